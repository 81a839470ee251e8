"""Low-rank adapters through peft: new ones, saved ones, those of a model handed over, and merging."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from cohort.config import LoraConfig
from cohort.errors import ModelError
from cohort.policy.experts import activation_of
from cohort.policy.files import ADAPTER_FILE, is_adapter, read_json_object
from cohort.policy.head import is_float32
from cohort.policy.load import PEFT_ASKS, Precision, load_adapter, matrices, peft_library, untrained_modules


def has_adapters(model: Any) -> bool:
    """Whether a model is wrapped by peft."""
    return hasattr(model, "get_base_model") and hasattr(model, "peft_config")


def add_adapters(
    model: nn.Module,
    config: LoraConfig,
    precision: Precision,
    *,
    seed: int = 0,
    allow_pickled_weights: bool = False,
) -> Any:
    """The model with trainable adapters. Everything else is frozen; frozen matrices are stored in the compute dtype.

    Args:
        model: a causal language model, which is wrapped and changed.
        config: the adapters.
        precision: adapters are in the master dtype.
        seed: of the initial weights of a new adapter.
        allow_pickled_weights: read a saved adapter's pickled weights where there are no others.

    Raises:
        ModelError: peft is not installed, the adapter does not exist, or it does not fit the model.
    """
    peft = peft_library()
    model.requires_grad_(False)
    try:
        if config.adapter:
            wrapped = _saved(model, config.adapter, precision, allow_pickled_weights=allow_pickled_weights)
        else:
            wrapped = _new(peft, model, config, seed)
    except ModelError:
        raise
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ModelError(f"model.lora does not fit {type(model).__name__}: {str(error).splitlines()[0]}") from error
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(precision.master)
    keep_in_compute_dtype(wrapped, precision)
    return wrapped


def lora_of(path: str, config: LoraConfig) -> LoraConfig:
    """The settings of adapters for a model of a folder: if the folder is an adapter's, that adapter is trained on.

    Raises:
        ModelError: the settings ask for another one.
    """
    if not is_adapter(path):
        return config
    there, unset = read_json_object(Path(path).expanduser() / ADAPTER_FILE), LoraConfig()
    known: dict[str, Any] = {
        "rank": there.get("r"),
        "alpha": there.get("lora_alpha"),
        "dropout": there.get("lora_dropout"),
    }
    known["variant"] = "dora" if there.get("use_dora") else "rslora" if there.get("use_rslora") else "lora"
    for name in ("target_modules", "modules_to_save"):
        listed = there.get(name) or ()
        known[name] = (listed,) if isinstance(listed, str) else tuple(listed)
    for name, value in [*known.items(), ("adapter", path)]:
        wanted = getattr(config, name)
        same = set(wanted) == set(value) if isinstance(wanted, tuple) else wanted == value
        if wanted != getattr(unset, name) and not same:
            raise ModelError(
                f"model.path {path} is an adapter, which is trained on, and its {name} is {value!r}; model.lora.{name} "
                f"is {wanted!r}: unset it, or merge the adapter into its model first (cohort export {path} FOLDER) and "
                "set model.path to that folder, for a new adapter"
            )
    return config.model_copy(update={"adapter": path})


def _saved(model: nn.Module, adapter: str, precision: Precision, *, allow_pickled_weights: bool) -> Any:
    folder = Path(adapter).expanduser()
    if not is_adapter(adapter):
        raise ModelError(f"model.lora.adapter: no {ADAPTER_FILE} in {adapter}")
    trained = tuple(read_json_object(folder / ADAPTER_FILE).get("modules_to_save") or ())
    for name, module in model.named_modules():
        if name.endswith(trained):  # peft copies them, and loads the trained values into the copies
            module.to(precision.master)
    return load_adapter(model, folder, allow_pickled_weights=allow_pickled_weights, is_trainable=True)


def _new(peft: Any, model: nn.Module, config: LoraConfig, seed: int) -> Any:
    targets = config.target_modules
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        modules_to_save=list(config.modules_to_save) or None,
        exclude_modules=list(untrained_modules(model)) or None,
        use_rslora=config.variant == "rslora",
        use_dora=config.variant == "dora",
    )
    with torch.random.fork_rng(), warnings.catch_warnings(), contextlib.ExitStack() as patches:
        warnings.filterwarnings("ignore", PEFT_ASKS, FutureWarning)
        if not getattr(model, "is_quantized", False):  # peft would round new adapters to the dtype of their layer
            for kind in (peft.tuners.tuners_utils.BaseTunerLayer, peft.tuners.lora.layer.ParamWrapper):
                patches.enter_context(mock.patch.object(kind, "_move_adapter_to_device_of_base_layer"))
        torch.manual_seed(seed)
        return peft.get_peft_model(model, settings)


def check_targets(model: Any, run: Callable[[], torch.Tensor]) -> None:
    """Check that a forward pass goes through the adapters of the layers whose weights it uses.

    Args:
        model: the model with adapters.
        run: a forward pass in the update's mode, on any tokens; returns its logits.

    Raises:
        ModelError: it fails, or uses the weights of some layers directly, past their adapters.
    """
    wrapped = {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}
    if not wrapped:
        return
    called: set[str] = set()
    hooks = [module.register_forward_hook(lambda *_, name=name: called.add(name)) for name, module in wrapped.items()]
    weights: dict[str, Any] = {}
    try:
        with torch.no_grad():
            run()
        for name in wrapped.keys() - called:
            weight = getattr(wrapped[name].base_layer, "weight", None)
            if weight is not None and weight.is_floating_point() and not weight.requires_grad:
                weights[name] = weight.requires_grad_()
        grads: Any = ()
        if weights:  # experts that no token has reached have no gradient
            grads = torch.autograd.grad(run().sum(), list(weights.values()), allow_unused=True)
    except Exception as error:  # models bring their own code
        raise ModelError(
            f"model.lora: {type(model.get_base_model()).__name__} cannot run with adapters on these layers "
            f"({str(error).splitlines()[0]}): name others in model.lora.target_modules"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
        for weight in weights.values():
            weight.requires_grad_(requires_grad=False)
    past = sorted({name.rpartition(".")[2] for name, grad in zip(weights, grads, strict=False) if grad is not None})
    if past:
        raise ModelError(
            f"model.lora: {type(model.get_base_model()).__name__} uses the weights of {', '.join(past)} past their "
            "adapters, which would train nothing: name other layers in model.lora.target_modules"
        )


def keep_in_compute_dtype(model: nn.Module, precision: Precision) -> None:
    """Store frozen matrices of linear layers and experts in the compute dtype, to which every pass would cast them;
    under adapters also embeddings, where that changes neither a value nor an output. Results do not change. Other
    matrices are stored in the master dtype: a head that computes in float32, and what peft needs so."""
    if precision.compute == precision.master:
        return
    modules: list[Any] = list(model.modules())
    linears: list[Any] = [module for module in modules if type(module) is nn.Linear]
    tables = [module for module in modules if isinstance(module, nn.Embedding)]
    # peft loads trained values into copies of these.
    copied = {id(module.original_module) for module in modules if hasattr(module, "original_module")}
    narrow = [one for one in tables if has_adapters(model) and id(one) not in copied and _can_be_narrow(one, precision)]
    wide = {id(one.weight) for one in tables if one not in narrow}
    # It adds to these experts in their own dtype, and transformers computes those in theirs.
    wide |= {id(module.get_param()) for module in modules if hasattr(module, "get_param")}
    theirs = [module for module in modules if hasattr(module, "is_transposed") and activation_of(module) is None]
    wide |= {id(weight) for module in theirs for weight in module.parameters()}
    wide |= {id(module.weight) for module in linears if is_float32(module)}
    for weight in matrices(model).values():
        if not weight.requires_grad:
            weight.data = weight.data.to(precision.master if id(weight) in wide else precision.compute)
    for module in narrow:
        module.register_forward_hook(_widened)
    for module in linears:  # products of these are as with a float32 weight
        module.is_table = any(module.weight is table.weight for table in tables)


def _widened(_embedding: nn.Embedding, _inputs: Any, output: Tensor) -> Tensor:
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _can_be_narrow(embedding: nn.Embedding, precision: Precision) -> bool:
    """Whether an embedding has the same values and outputs if its weight is stored in the compute dtype."""
    weight = embedding.weight.detach()
    same = all(torch.equal(part.to(precision.compute).to(part.dtype), part) for part in weight.split(4096))
    # Some multiply by a factor in the weight's dtype. This row's numbers have no zeros at the end.
    row = torch.linspace(-1, 1, embedding.embedding_dim, dtype=precision.compute, device=weight.device)
    rows = [row.to(dtype).expand_as(weight) for dtype in (precision.compute, precision.master)]
    ids = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    try:
        narrow, wide = (torch.func.functional_call(embedding, {"weight": each}, (ids,)) for each in rows)
    except Exception:  # models bring their own code
        return False
    return same and wide.dtype == precision.master and torch.equal(narrow.to(wide.dtype), wide)


def trained_adapter(model: Any) -> str:
    """The name of a model's active adapter, which is trained and saved.

    Raises:
        ModelError: several are active, or none.
    """
    active = list(model.active_adapters)
    if len(active) != 1:
        raise ModelError(
            f"the given model has {len(active)} active adapters ({', '.join(active) or 'none'}) of "
            f"{', '.join(model.peft_config)}, and a run trains and saves one: call model.set_adapter(NAME). "
            "Merge the others into the model first, and save it: they are not part of a checkpoint"
        )
    return str(active[0])


def check_given(model: Any) -> None:
    """Check that what trains of a model with adapters that was handed over is what a checkpoint holds.

    Raises:
        ModelError: nothing trains, or a weight that is not saved with the active adapter does.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"{type(model).__name__} was loaded by transformers with an adapter in it, which is neither trained nor "
            "merged: load it with peft.AutoPeftModelForCausalLM.from_pretrained(..., is_trainable=True)"
        )
    if not has_adapters(model):
        return
    name = trained_adapter(model)
    trainable = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not trainable:
        raise ModelError(
            f"no weight of the given model requires a gradient, so adapter {name!r} would not be trained: load it with "
            "PeftModel.from_pretrained(..., is_trainable=True)"
        )
    if model.active_peft_config.is_prompt_learning:  # what is saved is computed from the weights
        return
    saved = {one.data_ptr() for one in adapter_weights(model).values()}
    lost = [name for name, one in trainable.items() if one.data_ptr() not in saved]
    if lost:
        raise ModelError(
            f"{len(lost)} weights of the given model require a gradient and are not part of its active adapter "
            f"{name!r}, with which they would be saved, such as {lost[0]}: name their modules in modules_to_save of "
            "the adapter, or call requires_grad_(False) on them"
        )


def adds_nothing(model: Any) -> bool:
    """Whether only matrices of the active adapter are trained, and none of its products is other than 0: the policy is
    the model without adapters. Not so of adapters that start as a part of the base weights (PiSSA, OLoRA, CorDA)."""
    if not all("lora_" in name for name, one in model.named_parameters() if one.requires_grad):
        return False
    name, pairs = trained_adapter(model), []
    for module in model.modules():
        for kind in ("lora_", "lora_embedding_"):
            a, b = (getattr(module, f"{kind}{part}", {}) for part in "AB")
            if hasattr(module, "base_layer") and name in a and name in b:
                pairs.append([getattr(one[name], "weight", one[name]) for one in (a, b)])
    return bool(pairs) and all(not bool(a.any()) or not bool(b.any()) for a, b in pairs)


def merged(model: Any) -> Any:
    """A copy of the model with the adapters added to its weights.

    Raises:
        ModelError: the weights are quantized: rounding would lose the adapter.
    """
    if getattr(model.get_base_model(), "is_quantized", False):
        raise ModelError("the weights are quantized: merge the saved adapter into the model before its quantization")
    plain = copy.deepcopy(model)
    for weight in matrices(plain).values():
        weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    return plain.merge_and_unload()


def adapter_weights(model: Any) -> dict[str, Any]:
    """The trained adapter's weights under the names of their file."""
    weights: dict[str, Any] = peft_library().get_peft_model_state_dict(model, adapter_name=trained_adapter(model))
    return weights
