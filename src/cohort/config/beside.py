"""Relative names of files in a TOML file of settings, which are looked for in the file's folder first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    return dict(table) if folder.resolve() == Path.cwd() else {key: _led(table[key], key, folder) for key in table}


def _led(value: Any, setting: str, folder: Path) -> Any:
    if isinstance(value, list | tuple):
        return [_led(one, setting, folder) for one in value]
    if isinstance(value, Mapping) and setting in ("data.train", "data.eval"):
        inner = "data.source.{}" if "path" in value else setting  # a source, or the names of evaluation sets
        return {key: _led(one, inner.format(key), folder) for key, one in value.items()}
    if isinstance(value, Mapping):
        return {key: _led(one, f"{setting}.{key}", folder) for key, one in value.items()}
    return _beside(value, setting, folder) if isinstance(value, str) else value


def _beside(text: str, setting: str, folder: Path) -> str:
    name, is_code, rest = text.partition(".py:")
    if is_code and setting.startswith(CODE):
        name, rest = f"{name}.py", f":{rest}"
    elif setting not in FILES:
        return text
    else:
        name, rest = text, ""
        if setting == "reward.functions":  # the folder of a reward model, perhaps with its settings
            name = text.partition("(")[0]
            rest = text[len(name) :]
    path = Path(name)
    if not name or path.is_absolute() or name.startswith("~"):
        return text
    can_only_be_a_file = path.suffix in SUFFIXES or name.startswith(".") or (is_code and "(" not in name)
    try:
        belongs = (folder / path).exists() or (can_only_be_a_file and not path.exists())
    except (OSError, ValueError):  # too long for a name, as the text of a chat template
        return text
    return f"{folder / path}{rest}" if belongs else text
