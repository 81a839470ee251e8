"""Base class and common types of the sections, and pydantic's errors in Cohort's words."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from cohort.errors import ConfigError, did_you_mean

MAX_TEXT = 2**24
"""Maximum size in bytes of a file of settings, a chat template or a JSON schema."""
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)]
PositiveInts = Annotated[tuple[PositiveInt, ...], Strict(False)]
Numbers = Annotated[tuple[float, ...], Strict(False)]
OneAsList = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
"""One text stands for a list of it."""
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

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"settings do not change: make new ones with {name}={value!r}, as in GRPOConfig({name}=...)")


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


def _nested_paths(schema: type[BaseModel]) -> dict[str, str]:
    """The settings of tables within sections, such as ``{"rank": "model.lora.rank"}``."""
    sections = {name: subsection(field.annotation) for name, field in schema.model_fields.items()}
    tables = {name: setting_paths(section) for name, section in sections.items() if section}
    return {
        key: f"{name}.{path}" for name, paths in tables.items() for key, path in paths.items() if path.count(".") == 1
    }


def read_text(path: str | Path) -> str:
    """A UTF-8 file's text, of at most ``MAX_TEXT`` bytes.

    Raises:
        ValueError: the file cannot be read, or is larger.
    """
    try:
        with Path(path).expanduser().open("rb") as file:  # which may be a pipe, or a device without an end
            content = file.read(MAX_TEXT + 1)
        if len(content) > MAX_TEXT:
            raise ValueError(f"more than {MAX_TEXT:,} bytes")
        return content.decode("utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


@cache
def foreign_names() -> dict[str, str]:
    """Names that other trainers give to settings, with what to set here."""
    return tomllib.loads((Path(__file__).parent / "foreign_names.toml").read_text(encoding="utf-8"))


@contextmanager
def explain_errors(schema: type[BaseModel], source: str = "") -> Iterator[None]:
    """Raise pydantic's errors as one ``ConfigError``.

    Args:
        schema: its settings are suggested in place of unknown ones.
        source: put before each line.
    """
    prefix = f"{source}: " if source else ""
    try:
        yield
    except (ValidationError, ConfigError) as error:
        lines = explanations(error, schema) if isinstance(error, ValidationError) else str(error).splitlines()
        raise ConfigError("\n".join(prefix + line for line in lines)) from None
    except UnicodeEncodeError as error:  # a lone surrogate, as of an undecodable byte on the command line
        raise ConfigError(f"{prefix}not UTF-8 text: {error.object!r:.80}") from None


def explanations(error: ValidationError, schema: type[BaseModel], path: str = "") -> list[str]:
    """One line per mistake. ``path`` is the path of the setting that was validated; empty for the whole schema."""
    return [_explanation(item, schema, path) for item in error.errors()]


def _explanation(item: Any, schema: type[BaseModel], path: str) -> str:
    path = ".".join(str(part) for part in (*([path] if path else []), *item["loc"]))
    match item["type"]:
        case "extra_forbidden":
            return f"unknown setting {path}{suggestion(path, schema)}"
        case "value_error":
            return f"{path}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
        case "model_type" | "dict_type":
            setting = setting_paths(schema).get(path)
            hint = f"; did you mean {setting}?" if setting else ""
            return f"{path} is a section: expected a table of settings, got {item['input']!r}{hint}"
        case _:
            message = item["msg"].replace("a valid tuple", "a list")
            return f"{path}: {message[0].lower()}{message[1:]}, got {item['input']!r}"


def suggestion(name: str, schema: type[BaseModel], prefix: str = "", *, python: bool = False) -> str:
    """What follows "unknown setting NAME" in an error. ``python``: NAME is an argument of ``GRPOConfig``, so a
    setting of a table within a section is also shown as one: ``lora={'rank': ...}``."""
    hint = _suggestion(name, schema, prefix)
    nested = set(_nested_paths(schema).values()) if python else set()
    if found := next((path for path in re.findall(r"\w+(?:\.\w+){2}", hint) if path in nested), None):
        _, table, key = found.split(".")
        hint += f" (in Python: {table}={{{key!r}: ...}})"
    return hint


def _suggestion(name: str, schema: type[BaseModel], prefix: str) -> str:
    key, paths = name.rpartition(".")[2], _nested_paths(schema) | setting_paths(schema)
    if key in foreign_names():
        return f": {foreign_names()[key]}"
    if key in paths:  # the right name in the wrong section, or in none
        return f"; did you mean {prefix}{paths[key]}?"
    if hint := did_you_mean(name, paths.values(), form=f"{prefix}{{}}", cutoff=0.75):
        return hint
    if close := difflib.get_close_matches(key, paths, n=1):
        return f"; did you mean {prefix}{paths[close[0]]}?"
    return "; 'cohort config' lists all settings"
