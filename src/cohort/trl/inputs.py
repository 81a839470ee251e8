"""Checks of what ``GRPOTrainer`` is given, before anything is loaded: names of arguments, the model, and rows."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from cohort.errors import ConfigError, did_you_mean
from cohort.trl.translate import errors_in_trl_terms


def checked_inputs(init: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a constructor: check the names of its arguments, the model and the rows, and name TRL's fields in
    errors.

    Raises:
        ConfigError: an argument is unknown or missing, the model is no model, or data is no rows.
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
        if not isinstance(given["model"], str | os.PathLike) and not hasattr(given["model"], "state_dict"):
            raise ConfigError(
                f"model: expected a folder, a hub id, or a loaded model, got {type(given['model']).__name__}; the "
                f"order is {', '.join(names)}: pass arguments by name"
            )
        with errors_in_trl_terms():
            init(self, *values, **named)

    return checked


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
