"""What TRL's trainer is given, as Cohort's takes it: model, reward functions, rows."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainingArguments, set_seed
from transformers.pytorch_utils import Conv1D

import cohort.config
from cohort.calls import is_async
from cohort.config import GRPOConfig
from cohort.data.render import ChatTemplate
from cohort.environments.shapes import find_environments
from cohort.errors import ConfigError, did_you_mean
from cohort.policy import (
    DeferredModel,
    check_loading,
    file_of_hub,
    folder_of_revision,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_precision,
)
from cohort.policy.files import is_adapter
from cohort.policy.load import peft_library
from cohort.rewards import environment_reward
from cohort.rewards.contract import parameters_of
from cohort.rewards.model import RewardModel, is_reward_model
from cohort.train.inputs import model_name
from cohort.trl import rewards as trl_rewards
from cohort.trl.config import GRPOConfig as Arguments
from cohort.trl.translate import errors_in_trl_terms

# ----------------------------------------
# Checks of what ``GRPOTrainer`` is given, before anything is loaded: names of arguments, and kinds of their values.
#
# A value of another kind usually means that arguments were given in an order that TRL does not have.


def checked_inputs(init: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a constructor: check the names and the kinds of its arguments, and name TRL's fields in its errors.

    Raises:
        ConfigError: an argument is unknown, missing, or of another kind.
    """
    signature = inspect.signature(init)
    names = list(signature.parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in names:
                hint = "; use processing_class" if name == "tokenizer" else did_you_mean(name, names)
                raise ConfigError(f"GRPOTrainer: unknown argument {name!r}{hint}")
        try:
            given = signature.bind(self, *values, **named).arguments
        except TypeError as error:  # one is missing, too many, or given twice
            raise ConfigError(f"GRPOTrainer: {error}; it takes {', '.join(names)}") from None
        for name in ("train_dataset", "eval_dataset"):
            _check_rows(name, given.get(name))
        for name, (words, fits) in KINDS.items():
            if name in given and not fits(given[name]):
                raise ConfigError(
                    f"{name}: expected {words}, got {type(given[name]).__name__}; the order is {', '.join(names)}: "
                    "pass arguments by name"
                )
        with errors_in_trl_terms():
            init(self, *values, **named)

    return checked


def _is_rewards(value: Any) -> bool:
    one = isinstance(value, str | os.PathLike) or (callable(value) and not isinstance(value, PreTrainedTokenizerBase))
    return value is None or one or isinstance(value, list | tuple)


def _is_rows(value: Any) -> bool:
    others = PreTrainedTokenizerBase | TrainingArguments | cohort.config.GRPOConfig
    return not (isinstance(value, others) or callable(value))


def _is_tokenizer(value: Any) -> bool:
    return value is None or isinstance(getattr(value, "tokenizer", value), PreTrainedTokenizerBase)


def _check_rows(name: str, given: Any) -> None:
    """Check that data is rows, and not the name of data, or its splits.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(given, str | os.PathLike):
        raise ConfigError(
            f"{name}: expected rows, got the name {os.fspath(given)!r}: load them in the script, with "
            f"datasets.load_dataset({os.fspath(given)!r}, split=...)"
        )
    if isinstance(given, Mapping) and name == "train_dataset":
        raise ConfigError(
            f"{name}: expected rows, got a {type(given).__name__} with {', '.join(map(repr, given)) or 'nothing'}: "
            "pass one of its splits, as in data['train']"
        )
    if isinstance(given, Mapping):
        for key, one in given.items():
            _check_rows(f"{name}[{key!r}]", one)
    elif isinstance(given, list | tuple):
        other = next((row for row in given if not isinstance(row, Mapping)), None)
        if other is not None:
            raise ConfigError(f"{name}: expected rows, each a dict of columns, got a list with {other!r:.80}")


def _is_list(value: Any) -> bool:
    return value is None or isinstance(value, list | tuple)


def _is_pair(value: Any) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return False
    return all(one is None or hasattr(one, method) for one, method in zip(value, ("zero_grad", "step"), strict=True))


KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "model": (
        "a folder, a hub id, or a loaded model",
        lambda value: isinstance(value, str | os.PathLike) or hasattr(value, "state_dict"),
    ),
    "reward_funcs": ("functions, or names or models of reward models", _is_rewards),
    "train_dataset": ("rows", _is_rows),
    "eval_dataset": ("rows, or named sets of rows", _is_rows),
    "processing_class": ("a tokenizer", _is_tokenizer),
    "reward_processing_classes": (
        "tokenizers of the reward models",
        lambda value: _is_list(value) or _is_tokenizer(value),
    ),
    "callbacks": ("a list of callbacks", _is_list),
    "optimizers": ("(optimizer, scheduler) of torch, or None in place of one", _is_pair),
    "quantization_config": (
        "transformers' configuration of a quantization, such as BitsAndBytesConfig",
        lambda value: value is None or hasattr(value, "quant_method"),
    ),
    "tools": ("a list of functions", _is_list),
    "environment_factory": (
        "a class or function, or a dict of several",
        lambda value: value is None or callable(value) or isinstance(value, Mapping),
    ),
}
"""Argument to what it takes in words, and as a test. ``args`` and ``peft_config`` have errors of their own
(``translate.check_args``, ``given``)."""


log = logging.getLogger("cohort.trl")
HIDDEN = ("completion", "completion_ids")
"""Columns that TRL keeps from reward functions, which get the policy's completions under these names."""
IMAGES = {"image", "images"}
"""Columns that TRL gives to models that read images."""


def default_arguments(model: Any) -> Arguments:
    """TRL's arguments for ``args=None``."""
    name = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", "") or "model")
    return Arguments(f"{Path(name).name}-GRPO")


def named_model(model: Any, args: Any) -> Any:
    """The GGUF file that ``args.model_init_kwargs`` names, or the folder of the revision; else the model as given. A
    loaded model has its weights, as in TRL.

    Raises:
        ConfigError: ``gguf_file`` is no name.
        ModelError: there is no such file or revision.
    """
    loading = args.model_init_kwargs or {}
    revision, file = loading.get("revision"), loading.get("gguf_file")
    if not isinstance(model, str):
        return model
    if file is not None:
        if not isinstance(file, str):
            raise ConfigError(f"model_init_kwargs['gguf_file']: expected the name of a file, got {file!r:.80}")
        folder = Path(model).expanduser()
        return str(folder / file) if folder.is_dir() else file_of_hub(model, file, revision)
    return model if revision in (None, "main") else folder_of_revision(model, revision)


def prepared_model(
    model: Any, args: Any, config: GRPOConfig, peft_config: Any = None, quantization_config: Any = None
) -> Any:
    """The model to train: as given, or quantized or wrapped with adapters. What has a name is loaded after the data and
    the rewards are checked.

    Args:
        model: a folder, a hub id or a model.
        args: TRL's arguments.
        config: the settings.
        peft_config: peft's configuration of new adapters.
        quantization_config: transformers' configuration, for a folder or hub id.

    Raises:
        ConfigError: the model and the configurations exclude each other, or are of other types.
    """
    if quantization_config is not None and not isinstance(model, str):
        raise ConfigError("quantization_config: the model is loaded already; pass its name, or quantize it yourself")
    if peft_config is not None:
        _check_adapters(model, peft_config)
    if peft_config is None and quantization_config is None:
        return model

    def load() -> Any:
        loaded = _loaded(model, config, quantization_config) if isinstance(model, str) else model
        return loaded if peft_config is None else _with_adapters(loaded, args, peft_config)

    if not isinstance(model, str):
        return load()
    return DeferredModel.of(model, load, trust_remote_code=config.model.trust_remote_code)


def _check_adapters(model: Any, peft_config: Any) -> None:
    peft = peft_library()
    if not isinstance(peft_config, peft.PeftConfig):
        raise ConfigError(
            f"peft_config: expected a peft.PeftConfig such as LoraConfig, got {type(peft_config).__name__}"
        )
    if isinstance(model, peft.PeftModel) or (isinstance(model, str) and is_adapter(model)):
        raise ConfigError(
            "the model has adapters, and peft_config asks for more: merge them first (merge_and_unload), or leave "
            "peft_config unset to train them"
        )


def _with_adapters(model: Any, args: Any, peft_config: Any) -> Any:
    set_seed(args.seed)  # as TRL does: the adapters' initial weights are random
    try:
        return peft_library().get_peft_model(model, peft_config)
    except ValueError as error:  # of target_modules, usually: names that the model lacks
        layers = {
            name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)
        }
        raise ConfigError(
            f"peft_config: {str(error).rstrip('.')}; the model's linear layers are named {', '.join(sorted(layers))}"
        ) from error


def _loaded(name: str, config: GRPOConfig, quantization_config: Any) -> Any:
    device, trusted = resolve_device(config.model.device), config.model.trust_remote_code
    precision = resolve_precision(config.model.precision, device)
    if quantization_config is None:
        return load_model(name, precision, device, trust_remote_code=trusted)
    check_loading(name, trust_remote_code=trusted)
    return AutoModelForCausalLM.from_pretrained(
        name,
        dtype=precision.compute,
        trust_remote_code=trusted,
        use_safetensors=True,
        quantization_config=quantization_config,
        device_map={"": device},
    )


class EnvironmentReward:
    """The environments' own reward as one more reward function, as in TRL.

    Args:
        name: the class of the environments, after which it is named.
        rows: what the column ``environment`` has in their rows; None: all rows are theirs.
    """

    recorded_as = environment_reward

    def __init__(self, name: str, rows: Collection[str] | None) -> None:
        self.__name__, self._rows = name, rows

    def __call__(
        self,
        completion: Any,  # noqa: ARG002 - makes this a function per sample
        environment_reward: float | None = None,
        environment: str | None = None,
    ) -> float | None:
        """The reward; None of environments of other classes."""
        return environment_reward if self._rows is None or environment in self._rows else None


def with_environment_rewards(given: Any, factory: Any, config: GRPOConfig) -> tuple[list[Any], GRPOConfig]:
    """The reward functions as a list, with one more for each class of environments that give rewards; and the settings,
    in which its weight is 1.

    Args:
        given: the argument ``reward_funcs``.
        factory: the argument ``environment_factory``.
        config: the settings, with the weights of the given functions.

    Raises:
        ConfigError: nothing gives rewards, or there are not as many weights as functions.
    """
    listed = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    weights = config.reward.weights
    if weights is not None and len(weights) != len(listed):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(listed)} reward functions")
    classes: dict[str, list[str]] = {}
    for name, shape in find_environments(factory).items() if factory is not None else ():
        if shape.gives_rewards and environment_reward not in listed:
            classes.setdefault(shape.name, []).append(name)
    listed += [EnvironmentReward(name, None if rows == [""] else rows) for name, rows in classes.items()]
    if not listed:
        raise ConfigError(
            "No reward source provided: pass reward_funcs, or an environment_factory whose environments have get_reward"
        )
    if weights is None or not classes:
        return listed, config
    reward = config.reward.model_copy(update={"weights": (*weights, *(1.0 for _ in classes))})
    return listed, config.model_copy(update={"reward": reward})


def reward_functions(
    listed: list[Any], tokenizers: Any, config: GRPOConfig, trainer: Callable[[], Any]
) -> list[Callable[..., Any]]:
    """The reward functions. Names and models become reward models; a function with a parameter ``trainer_state``, or
    with ``**kwargs``, gets transformers' state.

    Args:
        listed: functions, and names or models of reward models.
        tokenizers: of the reward models, in the order of the functions; None: those saved with the models.
        config: the settings, whose device is that of reward models.
        trainer: gives the trainer, whose state functions get.

    Raises:
        ConfigError: there are not as many tokenizers as functions, or one is of another type.
        RewardError: a reward model cannot be used.
    """
    for one in listed:
        if not callable(one) and not isinstance(one, str | Path):
            raise ConfigError(
                f"reward_funcs: expected functions, or names or models of reward models, got {type(one).__name__}: "
                "pass arguments by name"
            )
    classes = list(tokenizers) if isinstance(tokenizers, list | tuple) else [tokenizers]
    given = [one for one in listed if not isinstance(one, EnvironmentReward)]
    if tokenizers is None:
        classes *= len(given)
    if len(classes) != len(given):
        raise ConfigError(
            f"reward_processing_classes has {len(classes)} entries for {len(given)} reward functions, and the numbers "
            "must match: give one for each, None for functions that are no models"
        )
    classes += [None] * (len(listed) - len(given))
    device = config.model.device
    return [_reward(one, tokenizer, trainer, device) for one, tokenizer in zip(listed, classes, strict=True)]


def _reward(function: Any, tokenizer: Any, trainer: Callable[[], Any], device: str) -> Callable[..., Any]:
    if isinstance(function, EnvironmentReward):
        return function
    is_model = isinstance(function, str | Path) or is_reward_model(function)  # any name is one's, as in TRL
    if isinstance(function, str) and function in vars(trl_rewards):
        raise ConfigError(
            f"reward_funcs: {function!r} would be a reward model, as in TRL; pass the function itself: from "
            f"cohort.trl.rewards import {function}"
        )
    if is_model:
        if not isinstance(function, str | Path) and not hasattr(function, "hf_device_map"):
            function.to(resolve_device(device))
        return RewardModel(function, tokenizer, device=device)
    if isinstance(function, functools.partial):
        inner = _reward(function.func, None, trainer, device)
        return functools.partial(inner, *function.args, **function.keywords)
    takes_state = any(one.name == "trainer_state" or one.kind is one.VAR_KEYWORD for one in parameters_of(function))
    return _with_state(function, trainer) if takes_state else function


class TrainerReference(weakref.ref[Any]):
    """A trainer, until it ends. Sent to another process, a reference to none."""

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(None),)


def _with_state(function: Callable[..., Any], trainer: Callable[[], Any]) -> Callable[..., Any]:
    """The function with transformers' ``TrainerState``, which counts updates, in place of Cohort's."""

    def own(columns: dict[str, Any]) -> dict[str, Any]:
        of = trainer()  # None in a worker process, which has no trainer: then the state counts rollouts
        return columns | {"trainer_state": of.state} if of and "trainer_state" in columns else columns

    @functools.wraps(function)
    def plain(*args: Any, **columns: Any) -> Any:
        return function(*args, **own(columns))

    @functools.wraps(function)
    async def awaited(*args: Any, **columns: Any) -> Any:
        return await function(*args, **own(columns))

    found = awaited if is_async(function) else plain
    found.__name__ = getattr(function, "__name__", type(function).__name__)
    vars(found)["recorded_as"] = function  # the run's settings name the script's function
    return found


def rows(given: Any) -> Any:
    """Rows, or named sets of rows, without the columns that TRL hides.

    Raises:
        ConfigError: they have images.
    """
    if isinstance(given, Mapping):
        return {name: rows(one) for name, one in given.items()}
    first = given[0] if isinstance(given, Sequence) and given and isinstance(given[0], Mapping) else ()
    if found := {*(getattr(given, "column_names", None) or first)} & IMAGES:
        raise ConfigError(f"the data has the column {min(found)!r}, and models read text only here: remove it")
    if hasattr(given, "column_names") and hasattr(given, "remove_columns"):
        hidden = [name for name in HIDDEN if name in (given.column_names or ())]
        return given.remove_columns(hidden) if hidden else given
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [{key: value for key, value in row.items() if key not in HIDDEN} for row in given]
    return given


def read_whole(given: Any) -> Any:
    """Rows for evaluation, or named sets of them: a stream is read to its end, as in TRL."""
    if isinstance(given, Mapping):
        return {name: read_whole(one) for name, one in given.items()}
    return given if given is None or hasattr(given, "__len__") else list(given)


def without_unread_variables(config: GRPOConfig, model: Any, tokenizer: Any, data: Any) -> tuple[GRPOConfig, Any]:
    """The settings without variables of ``chat_template_kwargs`` that nothing reads: the chat template does not, or the
    prompts are text. A warning names them; TRL says nothing. With the tokenizer, loaded if it had to be.

    Args:
        config: the settings.
        model: a folder, a hub id or a model, whose tokenizer has the template unless one is given.
        tokenizer: the given one, or None.
        data: the training rows, whose first one tells whether prompts are text.
    """
    given = config.data.chat_template_kwargs
    if not given:
        return config, tokenizer
    tokenizer = tokenizer or load_tokenizer(model_name(model), trust_remote_code=config.model.trust_remote_code)
    row = next(iter(data), None)
    is_text = isinstance(row, Mapping) and isinstance(row.get("prompt"), str)
    known = set() if is_text else ChatTemplate(tokenizer, None).variables
    unread = [name for name in given if known is not None and name not in known]
    if not unread:
        return config, tokenizer
    why = "prompts are text" if is_text else "the chat template does not read it"
    log.warning("chat_template_kwargs: without effect: %s (%s)", ", ".join(unread), why)
    kept = {name: value for name, value in given.items() if name not in unread}
    data_settings = config.data.model_copy(update={"chat_template_kwargs": kept})
    return config.model_copy(update={"data": data_settings}), tokenizer


def count_prompts(given: Any) -> int | None:
    """The number of rows; None for streamed data."""
    try:
        return len(given)
    except TypeError:
        return None
