"""Write the names and types of all settings, as ``GRPOConfig(...)`` takes them, to ``src/cohort/config/names.py``.

Run ``python scripts/write_setting_names.py``. With ``--check`` nothing is written, and the exit code is 1 if the file
is not up to date.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

from pydantic import BeforeValidator

from cohort.config import GRPOConfig
from cohort.config.optim import LRSchedule
from cohort.config.report import Tracker
from cohort.config.section import subsection

ALIASES = {LRSchedule: "LRSchedule", Tracker: "Tracker"}
FILE = Path(__file__).parents[1] / "src" / "cohort" / "config" / "names.py"
HEAD = '''"""Names and types of the settings, as ``GRPOConfig(...)`` takes them, for type checkers and editors.

Written by ``scripts/write_setting_names.py``; do not edit.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from cohort.config.optim import LRSchedule
from cohort.config.report import Tracker
from cohort.config.section import Section


class SettingNames(TypedDict, total=False):
    """Sections and settings by name."""

'''


def main() -> int:
    text = formatted(HEAD + "".join(f"    {line}\n" for line in lines()))
    if "--check" in sys.argv[1:]:
        is_new = FILE.read_text(encoding="utf-8") == text
        print("setting names: up to date" if is_new else f"{FILE.name} is out of date: run this script")
        return 0 if is_new else 1
    FILE.write_text(text, encoding="utf-8")
    return 0


def formatted(text: str) -> str:
    """The text as ruff formats it."""
    command = [sys.executable, "-m", "ruff", "format", "-", "--stdin-filename", str(FILE)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def lines() -> Iterator[str]:
    for section, outer in GRPOConfig.model_fields.items():
        yield f"{section}: Mapping[str, Any] | Section"
        for name, field in (subsection(outer.annotation) or GRPOConfig).model_fields.items():
            if name not in GRPOConfig.model_fields:  # as ``data.eval``: the name is that of the section
                yield f"{name}: {rendered(field.annotation, field.metadata)}"


def rendered(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type as a caller may pass it: sequences for tuples, mappings for tables, paths where they are converted."""
    arguments = typing.get_args(annotation)
    match typing.get_origin(annotation):
        case typing.Annotated:
            return rendered(arguments[0], arguments[1:])
        case None if annotation is type(None):
            return "None"
        case None if annotation is str and any(isinstance(one, BeforeValidator) for one in metadata):
            return "str | PathLike[str]"
        case None if annotation in (int, bool, float, str):
            return str(annotation.__name__)
        case t if t is Literal and annotation in ALIASES:
            return ALIASES[annotation]
        case t if t is Literal:
            return f"Literal[{', '.join(map(json.dumps, arguments))}]"
        case t if t is Union or t is types.UnionType:
            return " | ".join(dict.fromkeys(rendered(one) for one in arguments))
        case t if t is tuple and arguments[1:] == (...,):
            one = rendered(arguments[0])
            single = any(isinstance(each, BeforeValidator) for each in metadata)  # which puts one into a tuple
            return f"{one} | Sequence[{one}]" if single else f"Sequence[{one}]"
        case t if isinstance(t, type) and issubclass(t, Mapping):
            return "Mapping[str, Any]"
    return "Any"


if __name__ == "__main__":
    sys.exit(main())
