"""Calls of a user's function inside the objective."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cohort.errors import CohortError, ConfigError


def call_user_function(function: Callable[..., Tensor], name: str, *arguments: Tensor) -> Tensor:
    """Call a user's function and check that it returns a tensor of the first argument's shape.

    Args:
        function: the user's.
        name: its role and where it is, for messages: "trust region file.py:rule".

    Raises:
        ConfigError: it raises, or returns anything else.
    """
    try:
        result = function(*arguments)
    except CohortError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}") from error
    shape = arguments[0].shape
    if not isinstance(result, Tensor) or result.shape != shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ConfigError(f"{name} must return a tensor of shape {tuple(shape)}, got {got}")
    return result
