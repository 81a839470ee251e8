"""Base class and common types of the sections."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)]
PositiveInts = Annotated[tuple[PositiveInt, ...], Strict(False)]
Numbers = Annotated[tuple[float, ...], Strict(False)]
PathName = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
"""A string; path objects are converted."""


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


def subsection(annotation: Any) -> type[BaseModel] | None:
    """The type of a section or of a table within one; None for a setting."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def setting_paths(schema: type[BaseModel]) -> dict[str, str]:
    """The settings' names with their dotted paths: ``{"learning_rate": "optim.learning_rate", ...}``."""
    paths: dict[str, str] = {}
    for name, field in schema.model_fields.items():
        section = subsection(field.annotation)
        paths |= {key: f"{name}.{key}" for key in section.model_fields} if section else {name: name}
    return paths


def with_value(table: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of ``table`` with a nested key set. Parents that are not tables are replaced.

    >>> with_value({"a": {"b": 1}, "c": 2}, ["a", "d"], 3)
    {'a': {'b': 1, 'd': 3}, 'c': 2}
    """
    if not path:
        return value
    before = table if isinstance(table, Mapping) else {}
    return {**before, path[0]: with_value(before.get(path[0]), path[1:], value)}


def read_text(path: str) -> str:
    """A UTF-8 file's text.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
