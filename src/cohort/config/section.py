"""What all sections of the settings have in common."""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict

PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)]
PathName = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
"""A string; in Python a path object will do too."""
PositiveInts = Annotated[tuple[PositiveInt, ...], Strict(False)]
Numbers = Annotated[tuple[float, ...], Strict(False)]


MEASURES = ("reward", "rewards", "length", "cut_share", "unscored", "errors")
"""What an evaluation logs under eval/: no name of a data set."""


def _check_set_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in MEASURES:
        raise ValueError(
            f"expected a name of letters, digits, '-' and '_' that is none of {', '.join(MEASURES)}, as it becomes part "
            f"of metrics and of file names; got {name!r}"
        )
    return name


SetName = Annotated[str, AfterValidator(_check_set_name)]
"""What one of several evaluation sets is called."""


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
