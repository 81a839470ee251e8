"""Calls of a user's function inside the objective."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from cohort.errors import CohortError, ConfigError
from cohort.plugins import load_function

loaded = cache(load_function)
"""A user's function, loaded once. ``loaded.cache_clear()`` makes the next call load it again."""


def call_user_function(what: str, spec: str, *arguments: Tensor) -> Tensor:
    """Call a user's function and check that it returns a tensor of the first argument's shape.

    Args:
        what: its role, for messages: "trust region".
        spec: "module:function" or "file.py:function".

    Raises:
        ConfigError: there is no such function, it raises, or it returns anything else.
    """
    try:
        result = loaded(spec, what=what)(*arguments)
    except CohortError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} {spec} raised {type(error).__name__}: {error}") from error
    shape = arguments[0].shape
    if not isinstance(result, Tensor) or result.shape != shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(f"{what} {spec} must return a tensor of shape {tuple(shape)}, got {got}")
    return result
