"""Checks that every part makes of its numbers."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from functools import cache
from typing import Any, Literal

from cohort.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_bounds(rule: str, low: float, high: float, why: str = "") -> None:
    """Bounds on a ratio: in order, not negative, and around 1, the ratio of a policy to itself; ``why`` ends that last
    one's message."""
    require(low < high, f"{rule}: low ({low:g}) must be below high ({high:g}); both are bounds on the ratio itself")
    require(low >= 0, f"{rule}: low ({low:g}) is a bound on a ratio and cannot be negative; 0 is no bound")
    require(low <= 1 <= high, f"{rule}: [{low:g}, {high:g}] must hold 1{why}")


def check_finite(rule: str, *numbers: float) -> None:
    """Numbers that are no bounds."""
    require(all(math.isfinite(number) for number in numbers), f"{rule}: expected finite numbers, got {list(numbers)}")


def check_words(part: Any) -> None:
    """Fields of fixed words hold one of them. A baseline may also be a number, or the name of a function."""
    for name, words in fixed_words(type(part)).items():  # type: ignore[arg-type]  # a class is hashable
        value = getattr(part, name)
        other = name == "baseline" and (isinstance(value, int | float) or ":" in str(value))
        if value not in words and not other:
            close = difflib.get_close_matches(str(value), words, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            also = ", a number, or a function as file.py:function" if name == "baseline" else ""
            raise ConfigError(f"{name}: expected one of {', '.join(words)}{also}, got {value!r}{hint}")


@cache
def fixed_words(kind: type) -> dict[str, tuple[str, ...]]:
    """The words that each such field of a dataclass may hold."""
    words = {name: literal_words(hint) for name, hint in typing.get_type_hints(kind).items()}
    return {field.name: words[field.name] for field in dataclasses.fields(kind) if words[field.name]}


def literal_words(hint: Any) -> tuple[Any, ...]:
    """The words of every ``Literal`` in a type, each once."""
    found = (word for option in type_options(hint) if typing.get_origin(option) is Literal for word in option.__args__)
    return tuple(dict.fromkeys(found))


def type_options(hint: Any) -> tuple[Any, ...]:
    """A union's members, the type itself where it is none.

    >>> type_options(int | Literal["none"] | None)
    (<class 'int'>, typing.Literal['none'], <class 'NoneType'>)
    """
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return tuple(option for item in typing.get_args(hint) for option in type_options(item))
    return (hint,)
