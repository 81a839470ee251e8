"""Checks of what ``GRPOTrainer`` is given, before anything is loaded: names of arguments, and kinds of their values.

A value of another kind usually means that arguments were given in an order that TRL does not have.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments

import cohort.config
from cohort.errors import ConfigError, did_you_mean
from cohort.trl.translate import errors_in_trl_terms


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
