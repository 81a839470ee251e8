"""Pydantic's errors in Cohort's words: one line per mistake, with the nearest right name."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from cohort.config.section import setting_paths
from cohort.errors import ConfigError


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
    except ValidationError as error:
        raise ConfigError("\n".join(prefix + line for line in explanations(error, schema))) from None
    except ConfigError as error:
        raise ConfigError("\n".join(prefix + line for line in str(error).splitlines())) from None


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
            return f"{path}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def suggestion(name: str, schema: type[BaseModel], prefix: str = "") -> str:
    """What follows "unknown setting NAME" in an error."""
    key, paths = name.rpartition(".")[2], setting_paths(schema)
    if key in foreign_names():
        return f": {foreign_names()[key]}"
    if key in paths:  # the right name in the wrong section, or in none
        return f"; did you mean {prefix}{paths[key]}?"
    if close := difflib.get_close_matches(name, paths.values(), n=1, cutoff=0.75):
        return f"; did you mean {prefix}{close[0]}?"
    if close := difflib.get_close_matches(key, paths, n=1):
        return f"; did you mean {prefix}{paths[close[0]]}?"
    return "; 'cohort config' lists all settings"
