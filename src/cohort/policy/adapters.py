"""Low-rank adapters through peft: made, continued, switched off for the reference, and merged."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cohort.config import LoraConfig
from cohort.errors import ModelError
from cohort.policy.load import ADAPTER_FILE, Precision, peft_library

TRAINED, REFERENCE = "default", "reference"
"""Names of the adapter that is trained, and of the one that stands for the reference."""


def has_adapters(model: Any) -> bool:
    """Whether a model is wrapped by peft."""
    return hasattr(model, "get_base_model") and hasattr(model, "peft_config")


def add_adapters(model: nn.Module, config: LoraConfig, precision: Precision, *, seed: int = 0) -> Any:
    """The model with trainable adapters and everything else frozen; frozen matrices are kept in the compute dtype.

    Args:
        model: a causal language model, which is wrapped and changed.
        config: which adapters.
        precision: the adapters are in its master dtype.
        seed: of a new adapter's first weights.

    Raises:
        ModelError: peft is not installed, there is no such adapter, or it does not fit the model.
    """
    peft = peft_library()
    model.requires_grad_(False)
    try:
        wrapped = _wrapped(peft, model, config, seed)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model.lora does not fit {type(model).__name__}: {str(error).splitlines()[0]}") from error
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(precision.master)
    keep_in_compute_dtype(wrapped, precision)
    return wrapped


def _wrapped(peft: Any, model: nn.Module, config: LoraConfig, seed: int) -> Any:
    if config.adapter:
        return peft.PeftModel.from_pretrained(model, _adapter_folder(config.adapter), is_trainable=True)
    targets = config.target_modules
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        modules_to_save=list(config.modules_to_save) or None,
        use_rslora=config.variant == "rslora",
        use_dora=config.variant == "dora",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return peft.get_peft_model(model, settings)


def _adapter_folder(path: str) -> str:
    folder = Path(path).expanduser()
    if not (folder / ADAPTER_FILE).exists():
        raise ModelError(f"model.lora.adapter: no {ADAPTER_FILE} in {path}")
    return str(folder)


def keep_in_compute_dtype(model: nn.Module, precision: Precision) -> None:
    """Frozen matrices of linear layers in the dtype they are multiplied in, which they would else be cast to in every
    pass. Nothing that is computed changes. A matrix that is also the embedding stays."""
    if precision.compute == precision.master:
        return
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and not module.weight.requires_grad and id(module.weight) not in tables:
            module.weight.data = module.weight.data.to(precision.compute)


def is_untouched(model: Any) -> bool:
    """Whether the adapters add nothing yet: the model is what it is without them."""
    added = [parameter for name, parameter in model.named_parameters() if f"lora_B.{TRAINED}" in name]
    copies = [name for name, parameter in model.named_parameters() if f"modules_to_save.{TRAINED}" in name]
    return bool(added) and not copies and not any(bool(parameter.any()) for parameter in added)


def add_reference_adapter(model: Any) -> None:
    """Keep the trained adapter as it is now under another name: memory of an adapter, not of a model."""
    peft = peft_library()
    state = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
    model.add_adapter(REFERENCE, model.peft_config[TRAINED])
    peft.set_peft_model_state_dict(model, state, adapter_name=REFERENCE)
    model.set_adapter(TRAINED)


def merged(model: Any) -> Any:
    """A copy of the model with the adapters added into its weights; the model itself stays as it is.

    Raises:
        ModelError: the weights are quantized: adding to them would round the adapter away.
    """
    if getattr(model.get_base_model(), "is_quantized", False):
        raise ModelError("the weights are quantized: merge the saved adapter into the model as it was before that")
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if type(module) is nn.Linear and module.weight.dtype in {torch.bfloat16, torch.float16}:
            module.weight.data = module.weight.data.float()
    return plain.merge_and_unload()


def adapter_weights(model: Any) -> dict[str, Any]:
    """The trained adapter's weights under the names that they are saved by."""
    weights: dict[str, Any] = peft_library().get_peft_model_state_dict(model, adapter_name=TRAINED)
    return weights


def load_adapter_weights(model: Any, folder: Path) -> None:
    """Put a saved adapter's weights into the trained one of a model that has the same."""
    peft = peft_library()
    weights = peft.load_peft_weights(str(folder), device=str(next(model.parameters()).device))
    peft.set_peft_model_state_dict(model, weights, adapter_name=TRAINED)
