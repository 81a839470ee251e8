"""Relative names of files in a TOML file of settings, which are looked for in the file's folder first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

FILES = {
    "model.path",
    "model.lora.adapter",
    "data.train",
    "data.eval",
    "data.source.path",
    "data.chat_template",
    "rollout.json_schema",
    "reward.functions",
    "vllm.python",
}
"""Settings that name a file or a folder. ``data.source`` is a table in ``data.train`` or ``data.eval``."""
CODE = ("data.filter", "data.source.filter", "reward.functions", "environment.", "objective.")
"""Beginnings of settings that name functions, as "file.py:function"."""
BUILTIN_REWARDS = frozenset(
    {
        *("math", "reasoning_answer", "gsm8k", "code", "exact_match", "fuzzy_match", "regex", "json_schema"),
        *("think_format", "soft_overlong", "cosine_length", "repetition_penalty", "language", "environment_reward"),
        "reasoning_gym",
    }
)
"""Names in ``reward.functions`` that are never those of files."""
SUFFIXES = {".jsonl", ".json", ".csv", ".parquet", ".gz", ".zst", ".jinja"}
"""A name that ends so is never a hub id."""


def with_names_beside(table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a file, with the relative names in it led to the files that are meant.

    A name stands for the file or folder in ``folder`` if there is one, else for the one in the working directory, else
    for something else, such as a hub id. A name that can only be a file's, and there is none, stands for one in
    ``folder``, so that the error names the place where it belongs.

    Args:
        table: the settings of the file.
        folder: the folder of the file.
    """
    if folder.resolve() == Path.cwd():
        return dict(table)
    return {key: with_files(table[key], key, lambda name, is_code: _beside(name, is_code, folder)) for key in table}


def with_files(value: Any, setting: str, change: Callable[[str, bool], str]) -> Any:
    """The value of a setting, or of a section, with other names of files in it.

    Args:
        value: the value.
        setting: the setting's name, as in "data.train".
        change: takes what may be the name of a file or a folder, and whether it is that of a .py file; returns the name
            to put in its place.
    """
    if isinstance(value, list | tuple):
        return type(value)(with_files(one, setting, change) for one in value)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if isinstance(value, Mapping) and setting in ("data.train", "data.eval"):
        inner = "data.source.{}" if "path" in value else setting  # a source, or the names of evaluation sets
        return {key: with_files(one, inner.format(key), change) for key, one in value.items()}
    if isinstance(value, Mapping):
        return {key: with_files(one, f"{setting}.{key}", change) for key, one in value.items()}
    if not isinstance(value, str) or not (name := _file_in(value, setting)):
        return value
    return change(name, name.endswith(".py") and name != value) + value[len(name) :]


def _file_in(text: str, setting: str) -> str:
    """The beginning of a setting's text that may name a file; empty if the setting names none."""
    name, is_code, _ = text.partition(".py:")
    if is_code and setting.startswith(CODE):
        return f"{name}.py"
    if setting == "reward.functions":  # the folder of a reward model, perhaps with its settings
        name = text.partition("(")[0]
        return "" if ":" in name or name.strip() in BUILTIN_REWARDS else name
    return text if setting in FILES else ""


def _beside(name: str, is_code: bool, folder: Path) -> str:
    path = Path(name)
    if path.is_absolute() or name.startswith("~"):
        return name
    can_only_be_a_file = path.suffix in SUFFIXES or name.startswith(".") or (is_code and "(" not in name)
    try:
        belongs = (folder / path).exists() or (can_only_be_a_file and not path.exists())
    except (OSError, ValueError):  # too long for a name, as the text of a chat template
        return name
    return str(folder / path) if belongs else name
