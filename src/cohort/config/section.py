"""What all sections of the settings have in common."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)]
PathName = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
"""A string; in Python a path object will do too."""
PositiveInts = Annotated[tuple[PositiveInt, ...], Strict(False)]
Numbers = Annotated[tuple[float, ...], Strict(False)]


class Section(BaseModel):
    """A frozen table of settings. Types are strict: a string is never read as a number."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def laid_in(table: Any, path: Sequence[str], value: Any) -> Any:
    """A table with a value at a path of names; what is no table on the way there gives place to one.

    >>> laid_in({"a": {"b": 1}, "c": 2}, ["a", "d"], 3)
    {'a': {'b': 1, 'd': 3}, 'c': 2}
    """
    if not path:
        return value
    held = table if isinstance(table, Mapping) else {}
    return {**held, path[0]: laid_in(held.get(path[0]), path[1:], value)}
