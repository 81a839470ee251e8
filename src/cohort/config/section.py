"""What all sections of the settings have in common."""

from __future__ import annotations

import os
from typing import Annotated

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
