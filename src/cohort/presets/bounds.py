"""Checks that every part makes of its numbers."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from typing import Any, Literal

from cohort.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_bounds(rule: str, low: float, high: float) -> None:
    """Bounds on a ratio: in order, and not negative."""
    require(low < high, f"{rule}: low ({low:g}) must be below high ({high:g}); both are bounds on the ratio itself")
    require(low >= 0, f"{rule}: low ({low:g}) is a bound on a ratio and cannot be negative; 0 is no bound")


def check_finite(rule: str, *numbers: float) -> None:
    """Numbers that are no bounds."""
    require(all(math.isfinite(number) for number in numbers), f"{rule}: expected finite numbers, got {list(numbers)}")


def check_words(part: Any) -> None:
    """Fields of fixed words hold one of them. A baseline may also be a number, or the name of a function."""
    for name, words in fixed_words(type(part)).items():
        value = getattr(part, name)
        other = name == "baseline" and (isinstance(value, int | float) or ":" in str(value))
        if value not in words and not other:
            close = difflib.get_close_matches(str(value), words, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            also = ", a number, or a function as file.py:function" if name == "baseline" else ""
            raise ConfigError(f"{name}: expected one of {', '.join(words)}{also}, got {value!r}{hint}")


def fixed_words(kind: type) -> dict[str, tuple[str, ...]]:
    """The words that each such field of a dataclass may hold."""
    if kind in _WORDS:
        return _WORDS[kind]
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        options = [hints[field.name], *typing.get_args(hints[field.name])]
        words = [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]
        if words:
            found[field.name] = tuple(dict.fromkeys(words))
    _WORDS[kind] = found
    return found


_WORDS: dict[type, dict[str, tuple[str, ...]]] = {}
