"""A causal language model as a policy: what it is, and the log-probabilities it gives to completions."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cohort.policy.adapters import (
    REFERENCE,
    TRAINED,
    add_reference_adapter,
    has_adapters,
    is_untouched,
    keep_in_compute_dtype,
)
from cohort.policy.choose import choose_passes
from cohort.policy.distribution import Distribution
from cohort.policy.head import CompletionStates, Head, TokenLogps
from cohort.policy.load import Precision
from cohort.policy.passes import Passes, PlainPasses, Prefixes
from cohort.types import Support


class Policy:
    """A model with the dtype it computes in and the number of updates it has seen.

    Args:
        model: a transformers causal language model. Used as it is, not copied: training it changes it.
        precision: what it computes in.
        dropout: False sets every dropout of the model to 0, the attention's too.
        adapter: of a model with adapters, the one that is part of this policy; None: none is.

    The model stands in evaluation mode except inside ``training()``.
    """

    def __init__(
        self, model: Any, precision: Precision, *, dropout: bool = False, adapter: str | None = TRAINED
    ) -> None:
        self.model = model.eval()
        self.precision = precision
        self.version = 0
        """Optimizer updates these weights have seen. Completions carry it."""
        self.dropout = dropout
        self.router_aux_loss_coef = 0.0
        """What the load-balancing loss of a model with experts weighs in an update; see ``policy.router``."""
        self.native_kernels = True
        """Whether passes on a CPU go through the kernels of ``cohort.native``, where there are such."""
        self.adds_gradients = False
        """See ``gradients_in_place``."""
        self._adapter = adapter
        if not dropout:
            disable_dropout(model)
        # An adapter's wrapper passes on what it does not name itself.
        wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.forward_arguments = frozenset(inspect.signature(wrapped.forward).parameters)
        """Names that the model's forward takes."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return torch.device(next(self.model.parameters()).device)

    @property
    def vocab_size(self) -> int:
        """V: how many logits the model gives."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    @contextlib.contextmanager
    def compute(self) -> Iterator[None]:
        """Run the model as this policy's, in its compute dtype. Weights are cast once per outermost block, not once per
        call in it."""
        with self._with_adapter(), self._in_compute_dtype():
            yield

    @contextlib.contextmanager
    def _with_adapter(self) -> Iterator[None]:
        """The adapter of this policy, where a model has several policies' adapters."""
        if self._adapter == TRAINED or not has_adapters(self.model):
            yield
        elif self._adapter is None:
            with self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter(self._adapter)
            try:
                yield
            finally:
                self.model.set_adapter(TRAINED)

    @contextlib.contextmanager
    def _in_compute_dtype(self) -> Iterator[None]:
        if self.precision.master == torch.float64:
            with AllFloat64():
                yield
        elif self.precision.compute == self.precision.master:
            yield
        else:
            with torch.autocast(self.device.type, self.precision.compute):
                yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Training mode for the update (gradient checkpointing and dropout need it); evaluation mode again after."""
        self.model.train()
        try:
            yield
        finally:
            self.model.eval()

    @contextlib.contextmanager
    def gradients_in_place(self) -> Iterator[None]:
        """Passes made in this block add the gradients of the largest matrices that there are to ``.grad`` themselves,
        without tensors of the same size on the way: the head's, of log-probs, and a plain embedding's, where layers are
        run lean. Only for losses of which ``backward`` is called: ``torch.autograd.grad`` would find no gradient."""
        self.adds_gradients = True
        try:
            yield
        finally:
            self.adds_gradients = False

    def logits(self, input_ids: Tensor, *, keep: int, **arguments: Any) -> Any:
        """The model's output with logits of the last ``keep`` positions only, where the model can leave out the
        rest."""
        if "logits_to_keep" in self.forward_arguments:
            arguments["logits_to_keep"] = keep
        output = self.model(input_ids=input_ids, **arguments)
        if output.logits.shape[1] != keep:
            output.logits = output.logits[:, -keep:]
        return output

    @functools.cached_property
    def passes(self) -> Passes:
        """How the trainer runs the model; tried on a few tokens when it is first asked for."""
        return PlainPasses(self, Head()) if self.dropout else choose_passes(self)

    def states(
        self,
        prefixes: Prefixes,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float,
        supports: Sequence[Support | None] = (),
        repetition_penalty: float = 1.0,
    ) -> CompletionStates:
        """What log-probs of completions are made of.

        Args:
            prefixes: the prompts that have been read, by ``passes.read``.
            prompt_ids, completion_ids: the token ids of S completions and of their prompts, which are among those
                read. No completion may be empty.
            temperature: divides the logits, as it did in sampling.
            supports: what their tokens were drawn from. All others count as impossible, so that whatever is computed is
                of the distribution drawn from. Empty: the whole vocabulary.
            repetition_penalty: as it was in sampling; see ``Distribution``. 1: none.
        """
        passes = self.passes
        prompt_S = [prefixes.numbers[tuple(prompt)] for prompt in prompt_ids]
        distribution = Distribution(prompt_ids, completion_ids, temperature, supports, repetition_penalty, self.device)
        hidden = passes.hidden(prefixes, prompt_S, completion_ids)
        return CompletionStates(
            hidden.states_NH, passes.head, distribution, hidden.router_logits, adds_gradient=self.adds_gradients
        )

    def logps(
        self,
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
        temperature: float,
        supports: Sequence[Support | None] = (),
        repetition_penalty: float = 1.0,
    ) -> TokenLogps:
        """Log-probs of completions' tokens, and statistics of the distributions they were drawn from.

        Args:
            prompt_ids, completion_ids: the token ids of S completions and of their prompts. No completion may be empty.
                Equal prompts are computed once.
            temperature, supports, repetition_penalty: as ``states`` takes them.

        Returns:
            Flat in sequence order, float32 (float64 for a float64 policy). Gradients flow through the log-probs when
            they are enabled.
        """
        prefixes = self.passes.read(list(dict.fromkeys(map(tuple, prompt_ids))), attached=True)
        return self.states(prefixes, prompt_ids, completion_ids, temperature, supports, repetition_penalty).logps()

    def reference(self, *, moves: bool = False) -> Policy:
        """The policy as it is now, to be compared with later. Of a model with adapters, the same model with them
        switched off or, where they have been trained already, with a copy of them; else a frozen copy.

        Args:
            moves: it will be moved toward the policy: its weights are kept in the master dtype.
        """
        if not has_adapters(self.model) or TRAINED not in self.model.peft_config:
            frozen = self.copy_frozen()
            if not moves:
                keep_in_compute_dtype(frozen.model, self.precision)
            return frozen
        untouched = is_untouched(self.model)
        if not untouched:
            add_reference_adapter(self.model)
        adapter = None if untouched else REFERENCE
        seen = Policy(self.model, self.precision, dropout=self.dropout, adapter=adapter)
        seen.version, seen.native_kernels = self.version, self.native_kernels
        return seen

    def copy_frozen(self) -> Policy:
        """A copy of the policy as it is now, in memory, that needs no gradients."""
        model = copy.deepcopy(self.model)
        model.requires_grad_(False)
        frozen = Policy(model, self.precision, dropout=self.dropout)
        frozen.version, frozen.native_kernels = self.version, self.native_kernels
        return frozen

    @torch.no_grad()
    def move_toward(self, other: Policy, alpha: float) -> None:
        """Move weight by weight: self <- alpha * other + (1 - alpha) * self (TR-DPO, arXiv 2404.09656, soft update)."""
        for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
            mine.lerp_(theirs.to(mine.dtype), alpha)
        self.version = other.version


class AllFloat64(TorchFunctionMode):
    """Inside the block, float64 stays float64: transformers' norms and softmaxes ask for float32 whatever they get,
    which would leave a float64 model with float32's rounding."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Take requests for float32 on float64 tensors as requests for float64."""
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def enable_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass. Sampling keeps its cache: it runs in evaluation mode, where
    transformers does not checkpoint.
    """
    if hasattr(model, "activation_checkpointing_enable"):  # transformers' new name for it
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability of a model to 0: ``nn.Dropout`` modules, and the floats that attention modules read
    (``attention_dropout`` and the like), which are not modules at all.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
