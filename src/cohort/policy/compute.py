"""A causal language model with what it computes in: its dtypes, device, adapter and kernels."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cohort.errors import ModelError
from cohort.native import DTYPES, Unavailable, load
from cohort.parallel.full import is_gathered
from cohort.policy.adapters import has_adapters
from cohort.policy.device import kind_of
from cohort.policy.experts import use_own_experts
from cohort.policy.load import Precision
from cohort.policy.narrow import narrow_linears


class ComputeModel:
    """A transformers model and how its forward pass is computed.

    Args:
        model: a transformers causal language model. It is not copied: training changes it.
        precision: the dtypes of weights and of matrix products.
        dropout: whether dropout stays on. False sets every dropout of the model to 0, the attention's included.
        adapters: whether the active adapter of a model with adapters is on in ``compute()``.

    The model is in evaluation mode; see ``training()``.
    """

    def __init__(self, model: Any, precision: Precision, *, dropout: bool = False, adapters: bool = True) -> None:
        self.model = model.eval()
        self.device = torch.device(next(model.parameters()).device)
        """Where passes compute. Weights that the ranks divide may lie elsewhere later (``parallel.offload``)."""
        self.precision = precision
        self.dropout = dropout
        self.router_aux_loss_coef = 0.0
        """Weight of the load-balancing loss of a mixture-of-experts model in an update; see ``policy.router``."""
        self.native_kernels = True
        """Whether passes on a CPU use the kernels of ``cohort.native`` where they are available."""
        self.torch_compile = False
        """Whether passes on CUDA compile what lies between the products of layers, where that works."""
        self.adds_gradients = False
        """See ``gradients_in_place``."""
        self._adapters_off = not adapters and has_adapters(model)
        if not dropout:
            disable_dropout(model)
        if precision.compute == torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped products of experts know no float64
        elif (native := not self.why_no_kernels()) or kind_of(self.device) == "cuda":
            use_own_experts(model, native=native)
        # A peft wrapper passes arguments that it does not name itself on to the model.
        wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.forward_arguments = frozenset(inspect.signature(wrapped.forward).parameters)
        """Names of the arguments of the model's forward pass."""

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def why_no_kernels(self) -> str:
        """Why passes and sampling cannot use native kernels. Empty: they can."""
        compute, master = self.precision.compute, self.precision.master
        if not self.native_kernels:
            return "switched off"
        if (kind := kind_of(self.device)) != "cpu":
            return f"the device is {kind}"
        if master != torch.float32 or compute not in DTYPES:
            return f"the precision is {self.precision}"
        try:
            load()
        except Unavailable as reason:
            return str(reason)
        return ""

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Run the model in its compute dtype, with its adapter or without. Weights are cast once per outermost block,
        not once per forward pass in it."""
        adapters = self.model.disable_adapter() if self._adapters_off else contextlib.nullcontext()
        with adapters, self._in_compute_dtype():
            yield

    @contextlib.contextmanager
    def _in_compute_dtype(self) -> Iterator[None]:
        if self.precision.master == torch.float64:
            with AllFloat64():
                yield
        elif self.precision.compute == self.precision.master:
            yield
        else:
            # Copies of weights that are gathered per layer would stay behind when the weights are freed.
            with torch.autocast(self.device.type, self.precision.compute, cache_enabled=not is_gathered(self.model)):
                yield

    def can_widen(self, *, copying: bool) -> bool:
        """Whether ``in_float32`` computes something else than the model does anyway: in half precision, unless weights
        are quantized. ``copying``: whether weights that are stored in half precision would be copied, which may not fit
        into memory."""
        weights = self.model.parameters()
        narrow = copying and any(weight.dtype == self.precision.compute for weight in weights)
        quantized = getattr(self.model, "is_quantized", False)
        return self.precision.compute.itemsize < torch.float32.itemsize and not quantized and not narrow

    @property
    def stores_narrow(self) -> bool:
        """Whether some weights are stored in half precision, so that ``in_float32`` computes without gradients."""
        return any(weight.dtype.itemsize < torch.float32.itemsize for weight in self.model.parameters())

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 inside the block. Matrices of linear layers that are stored in half precision are cast
        when their layer runs; it must not need a gradient."""
        before, self.precision = self.precision, Precision(self.precision.master, torch.float32)
        hooks = []
        for module in self.model.modules():
            narrow = any(weight.dtype == before.compute for weight in module.parameters(recurse=False))
            if narrow and not isinstance(module, nn.Embedding):
                hooks += [module.register_forward_pre_hook(_widen), module.register_forward_hook(_narrow)]
        try:
            with torch.autocast(self.device.type, enabled=False):  # of a ``compute()`` around the block
                yield
        finally:
            self.precision = before
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """The mode of an update inside the block: with dropout, training mode; else evaluation mode, as in sampling,
        because training mode may change more than dropout (router noise, skipped layers, a dropout that the model reads
        from its config). Layers that are checkpointed are in training mode, in which transformers checkpoints them;
        what they compute is in evaluation mode (``passes.recomputed_in``)."""
        modules = list(self.model.modules()) if self.dropout else checkpointed_modules(self.model)
        with modes_restored(modules):
            for module in modules:
                module.training = True
            yield

    @contextlib.contextmanager
    def gradients_in_place(self) -> Iterator[None]:
        """Backward passes of forward passes made in this block add the gradients of the largest matrices directly to
        ``.grad``: the head's, and with lean layers the embedding's. No second tensor of their size is allocated. In
        half precision, those of linear layers are added so as well. Weights must not change in the block. Use it only
        with ``backward``: ``torch.autograd.grad`` would find no gradient."""
        compute = self.precision.compute
        narrow = compute == torch.bfloat16 and not self.why_no_kernels() and not is_gathered(self.model)
        self.adds_gradients = True
        try:
            with narrow_linears(self.model, compute) if narrow else contextlib.nullcontext():
                yield
        finally:
            self.adds_gradients = False

    def logits(self, input_ids: Tensor, *, keep: int, **arguments: Any) -> Any:
        """The model's output with the logits of the last ``keep`` positions only. The others are not computed if the
        model can leave them out."""
        if "logits_to_keep" in self.forward_arguments:
            arguments["logits_to_keep"] = keep
        output = self.model(input_ids=input_ids, **arguments)
        if output.logits.shape[1] != keep:
            output.logits = output.logits[:, -keep:]
        return output


MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class AllFloat64(TorchFunctionMode):
    """Keep float64 tensors in float64. Norms and softmaxes of transformers convert to float32 whatever they get, which
    would leave a float64 model with the rounding of float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace float32 by float64 in calls on a float64 tensor."""
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            if func in MATRIX_PRODUCTS:  # rotary embeddings multiply frequencies by positions, which stay float32
                args = (args[0], args[1].double())
        return func(*args, **kwargs)


def _widen(module: Any, _given: Any) -> None:
    module.narrow_weights = [(weight, weight.data) for weight in module.parameters(recurse=False)]
    for weight, values in module.narrow_weights:
        weight.data = values.float()


def _narrow(module: Any, _given: Any, _output: Any) -> None:
    for weight, values in module.__dict__.pop("narrow_weights"):
        weight.data = values


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass. Sampling keeps its cache: it runs in evaluation mode, in which
    transformers does not checkpoint.

    Raises:
        ModelError: the architecture does not support it.
    """
    newer = hasattr(model, "activation_checkpointing_enable")  # the newer name in transformers
    enable = model.activation_checkpointing_enable if newer else model.gradient_checkpointing_enable
    try:
        enable({"use_reentrant": False})
    except (ValueError, AttributeError) as reason:
        raise ModelError(
            f"model.gradient_checkpointing: transformers does not support it for {type(model).__name__}: set it to "
            "false, and optim.microbatch_tokens lower"
        ) from reason


def checkpointed_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that recompute activations when they are in training mode: layers, or in models with their own code
    also what contains the layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    return [module for module in found if isinstance(module, GradientCheckpointingLayer)] or found


@contextlib.contextmanager
def modes_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore each module's mode, training or evaluation, at the end of the block."""
    before = [(module, module.training) for module in modules]
    try:
        yield
    finally:
        for module, mode in before:
            module.training = mode


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set every dropout probability of a model to 0 inside the block, and those of its config, which some models read
    in each forward pass."""
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    holders = [*map(vars, model.modules()), vars(config)]
    before = [(values, name, value) for values in holders for name, value in values.items() if _is_dropout(name, value)]
    before += [(vars(m), "p", m.p) for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    try:
        for values, name, _ in before:
            values[name] = 0.0
        yield
    finally:
        for values, name, value in before:
            values[name] = value


def _is_dropout(name: str, value: object) -> bool:
    return "dropout" in name and isinstance(value, float)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability of a model to 0: of ``nn.Dropout`` modules, and the floats that attention modules
    read (``attention_dropout`` and the like).
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if _is_dropout(name, value):
                setattr(module, name, 0.0)
