"""What the texts of settings stand for: files, which get absolute names once the settings are read, and code."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.config.schema import Mark, Section, marks_of
from cohort.shipped import BUILTIN_REWARDS

SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".gz", ".zst", ".jinja"}
"""A name that ends so is never a hub id."""
NOT_IN_NAMES = set("*?[{:\n")
"""A text with one of these may be something else than a name."""
VALUES = re.compile(r"\((?=\s*(?:\w+\s*=|\)\s*$))")
"""Where values in parentheses begin, after a function or a reward model. Names of folders have parentheses too."""
Change = Callable[[str, Mark, str], str]
"""Takes the path of a setting, its mark and a text in its value; returns the text to put in its place."""


def with_texts(table: Mapping[str, Any], marks: Mapping[str, Mark], change: Change, above: str = "") -> dict[str, Any]:
    """Settings with their texts changed.

    Args:
        table: the settings, in nested tables.
        marks: those of the settings by their dotted paths; what has none stays.
        change: what to do with each text.
        above: the path of the table, with a dot.
    """
    found = {}
    for key, value in table.items():
        if mark := marks.get(path := f"{above}{key}"):
            found[key] = changed(value, path, mark, change)
        else:
            found[key] = with_texts(value, marks, change, f"{path}.") if isinstance(value, Mapping) else value
    return found


def changed(value: Any, path: str, mark: Mark, change: Change) -> Any:
    """The value of a setting with its texts changed. A source of data whose path changes is still named as before."""
    if isinstance(value, Section):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, str):
        return change(path, mark, value)
    if isinstance(value, list | tuple):
        items = [{"path": one} if mark.table and isinstance(one, str) else one for one in value]
        return type(value)(changed(one, path, mark, change) for one in items)
    if not isinstance(value, Mapping):
        return value
    if mark.table and "path" in value:
        new = with_texts(value, marks_of(mark.table), lambda _, inner, text: change(path, inner, text))
        return new if new["path"] == value["path"] else {"name": value["path"], **new}
    return {key: changed(one, path, mark if mark.in_tables else Mark(), change) for key, one in value.items()}


def absolute(*folders: Path) -> Change:
    """Makes names of files absolute.

    A name stands for the file or folder in the first of the folders that has it, else for something else, such as a hub
    id. A name that can only be a file's, and there is none, stands for one in the first folder, so that an error names
    the place where it belongs.
    """

    def change(_path: str, mark: Mark, text: str) -> str:
        name, is_certain = file_in(text, mark)
        if not name:
            return text
        try:
            places = [os.path.abspath(folder / Path(name).expanduser()) for folder in folders]  # noqa: PTH100 - links stay
            place = next((one for one in places if Path(one).exists()), places[0] if is_certain else name)
        except (OSError, RuntimeError, ValueError):  # too long for a name, of an unknown user, with a NUL
            return text
        return place + text[len(name) :]

    return change


def shown_name(name: str) -> str:
    """The name of a file for messages: as it leads from the working directory, if the file is below it."""
    with suppress(OSError):  # the directory may have been removed
        return name.removeprefix(f"{Path.cwd()}/")
    return name


def file_in(text: str, mark: Mark) -> tuple[str, bool]:
    """The beginning of a setting's text that may name a file or a folder, and whether it can be nothing else; empty if
    there is none."""
    name = text
    if mark.runs == "code":
        name = VALUES.split(text, maxsplit=1)[0]
        source, is_code, _ = name.partition(".py:")
        if is_code and ":" not in source:
            return f"{source}.py", True
        if ":" in name or name.strip() in BUILTIN_REWARDS:  # what is left is the folder of a reward model
            return "", False
    is_certain = Path(name).suffix in SUFFIXES or name.startswith(".")
    return (name, is_certain and NOT_IN_NAMES.isdisjoint(name)) if mark.file else ("", False)


def texts_of(config: Section) -> list[tuple[str, Mark, str]]:
    """Every text in the settings: the setting's path, its mark, and the text."""
    found: list[tuple[str, Mark, str]] = []

    def note(path: str, mark: Mark, text: str) -> str:
        found.append((path, mark, text))
        return text

    with_texts(config.model_dump(exclude_none=True), marks_of(type(config)), note)
    return found
