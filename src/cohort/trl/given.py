"""What TRL's trainer is given, as Cohort's takes it: model, reward functions, rows."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.calls import is_async, partial_layers
from cohort.config import GRPOConfig
from cohort.errors import ConfigError
from cohort.rewards.model import RewardModel
from cohort.trl.config import GRPOConfig as Arguments

HIDDEN = ("completion", "completion_ids")
"""Columns that TRL keeps from reward functions, which get the policy's completions under these names."""


def default_arguments(model: Any) -> Arguments:
    """TRL's arguments for ``args=None``."""
    name = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", "") or "model")
    return Arguments(f"{Path(name).name}-GRPO")


def of_revision(model: Any, args: Any) -> Any:
    """The folder of the revision that ``args.model_init_kwargs`` names. A loaded model has its revision, as in TRL.

    Raises:
        ModelError: there is no such revision.
    """
    from cohort.policy import folder_of_revision

    revision = (args.model_init_kwargs or {}).get("revision")
    if not isinstance(model, str) or revision in (None, "main"):
        return model
    return folder_of_revision(model, revision)


def prepared_model(
    model: Any, args: Any, config: GRPOConfig, peft_config: Any = None, quantization_config: Any = None
) -> Any:
    """The model to train: as given, or loaded and quantized or wrapped with adapters.

    Args:
        model: a folder, a hub id or a model.
        args: TRL's arguments.
        config: the settings.
        peft_config: peft's configuration of new adapters.
        quantization_config: transformers' configuration, for a folder or hub id.

    Raises:
        ConfigError: the model and the configurations exclude each other, or are of other types.
    """
    if quantization_config is not None:
        model = _quantized(model, config, quantization_config)
    if peft_config is None:
        return model
    import peft
    from transformers import set_seed

    from cohort.policy import load_model, resolve_device, resolve_precision

    if not isinstance(peft_config, peft.PeftConfig):
        raise ConfigError(
            f"peft_config: expected a peft.PeftConfig such as LoraConfig, got {type(peft_config).__name__}"
        )
    if isinstance(model, peft.PeftModel):
        raise ConfigError(
            "the model has adapters, and peft_config asks for more: merge them first (merge_and_unload), or leave "
            "peft_config unset to train them"
        )
    if isinstance(model, str):
        device = resolve_device(config.model.device)
        trusted = config.model.trust_remote_code
        model = load_model(model, resolve_precision(config.model.precision, device), device, trust_remote_code=trusted)
    set_seed(args.seed)  # as TRL does: the adapters' initial weights are random
    return peft.get_peft_model(model, peft_config)


def _quantized(model: Any, config: GRPOConfig, quantization_config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from cohort.policy import check_loading, resolve_device, resolve_precision

    if not isinstance(model, str):
        raise ConfigError("quantization_config: the model is loaded already; pass its name, or quantize it yourself")
    device = resolve_device(config.model.device)
    trusted = config.model.trust_remote_code
    check_loading(model, trust_remote_code=trusted)
    return AutoModelForCausalLM.from_pretrained(
        model,
        dtype=resolve_precision(config.model.precision, device).compute,
        trust_remote_code=trusted,
        use_safetensors=True,
        quantization_config=quantization_config,
        device_map={"": device},
    )


def reward_functions(given: Any, tokenizers: Any, state: Callable[[], Any]) -> list[Callable[..., Any]] | None:
    """The reward functions. Names and models become reward models; a function with a parameter ``trainer_state`` gets
    transformers' state.

    Args:
        given: a function, a name or model of a reward model, or a list of them; None.
        tokenizers: of the reward models, in the order of the functions; None: those saved with the models.
        state: gives the state of the run.

    Raises:
        ConfigError: there are not as many tokenizers as functions.
        RewardError: a reward model cannot be used.
    """
    if given is None:
        return None
    listed = list(given) if isinstance(given, list | tuple) else [given]
    classes = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    if tokenizers is None:
        classes *= len(listed)
    if len(classes) != len(listed):
        raise ConfigError(
            f"reward_processing_classes has {len(classes)} entries for {len(listed)} reward functions: give one for "
            "each, None for functions that are no models"
        )
    return [_reward(one, tokenizer, state) for one, tokenizer in zip(listed, classes, strict=True)]


def _reward(function: Any, tokenizer: Any, state: Callable[[], Any]) -> Callable[..., Any]:
    is_model = isinstance(function, str | Path) or (hasattr(function, "config") and hasattr(function, "parameters"))
    if is_model:
        return RewardModel(function, tokenizer)
    try:
        wants_state = "trainer_state" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a built-in function
        wants_state = False
    return _with_state(function, state) if wants_state else function


def _with_state(function: Callable[..., Any], state: Callable[[], Any]) -> Callable[..., Any]:
    """The function with transformers' ``TrainerState``, which counts updates, in place of Cohort's."""

    @functools.wraps(function)
    def plain(*args: Any, **columns: Any) -> Any:
        return function(*args, **columns | {"trainer_state": state()})

    @functools.wraps(function)
    async def awaited(*args: Any, **columns: Any) -> Any:
        return await function(*args, **columns | {"trainer_state": state()})

    found = awaited if is_async(function) else plain
    inner = partial_layers(function)[-1]
    found.__name__ = getattr(inner, "__name__", type(inner).__name__)
    return found


def rows(given: Any) -> Any:
    """Rows, or named sets of rows, without the columns that TRL hides."""
    if isinstance(given, Mapping):
        return {name: rows(one) for name, one in given.items()}
    if hasattr(given, "column_names") and hasattr(given, "remove_columns"):
        hidden = [name for name in HIDDEN if name in (given.column_names or ())]
        return given.remove_columns(hidden) if hidden else given
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [{key: value for key, value in row.items() if key not in HIDDEN} for row in given]
    return given


def count_prompts(given: Any) -> int | None:
    """The number of rows; None for streamed data."""
    try:
        return len(given)
    except TypeError:
        return None
