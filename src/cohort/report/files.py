"""Read files of a run folder that is not trusted: regular files inside of the folder, of bounded size. Importing this
module imports no torch."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from cohort.config import GRPOConfig, to_toml
from cohort.config.of_run import only_settings, was_started
from cohort.errors import RunFolderError

MAX_FILE = 1 << 24
"""Bytes of a file that is read whole. Larger files are left out."""
MAX_DEPTH = 50
"""Nested tables of settings and JSON. Deeper ones are left out."""
MAX_NUMBER = 1e100
"""Numbers of JSON are below this, or None: so that their squares and sums are finite too."""
NAMES = ("config.toml", "metrics.jsonl", "starts.jsonl", "summary.json")
"""Files of a run that are asked about by name."""
DAMAGE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What reading a damaged file raises."""


def json_object(text: str) -> dict[str, Any]:
    """The JSON object in a text; numbers that are NaN or not below ``MAX_NUMBER`` become None.

    Raises:
        ValueError: it is not JSON, something else than an object, or nested deeper than ``MAX_DEPTH``.
        RecursionError: it is nested deeper than Python reads.
    """
    found = json.loads(text, parse_constant=lambda _: None, parse_float=_float, parse_int=_int)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}")
    return {key: _plain(value) if isinstance(value, dict | list) else value for key, value in found.items()}


def toml_table(text: str) -> dict[str, Any]:
    """The table in a TOML file in types of JSON: dates as text. Floats may be infinite.

    Raises:
        ValueError: it is not TOML, or nested deeper than ``MAX_DEPTH``.
        RecursionError: it is nested deeper than Python reads.
    """
    return {key: _plain(value, _scalar) for key, value in tomllib.loads(text).items()}


def flat(table: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested tables, with names like ``section.key``."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value


@cache
def default_settings() -> Mapping[str, Any]:
    """The default of every setting by ``section.key``, as ``config.toml`` writes it."""
    return dict(flat(tomllib.loads(to_toml(GRPOConfig()))))


def run_folder(path: str | Path) -> Path:
    """The path of a folder that holds a run.

    Raises:
        RunFolderError: it does not exist, or holds none.
    """
    folder = Path(path).expanduser()
    try:
        if folder.is_file() and folder.name in NAMES:
            raise RunFolderError(f"{folder} is a file of a run: give its folder, {folder.parent}")
        if not folder.is_dir():
            found = "is not a folder" if folder.exists() else "does not exist"
            raise RunFolderError(f"{folder} {found}: expected a run folder")
        if was_started(folder):
            return folder
        if settings := only_settings(folder):
            raise RunFolderError(settings)
        runs = sorted(one.name for one in islice(folder.iterdir(), 1000) if (one / "config.toml").is_file())
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        if isinstance(error, RunFolderError):
            raise
        raise RunFolderError(f"cannot read the run folder {str(path)!r}: {error}") from None
    above = folder.parent.parent
    hint = f" It holds the runs {', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}." if runs else ""
    hint = hint or (f" Its run is {above}." if (above / "config.toml").is_file() else "")
    raise RunFolderError(f"{folder} is not a run folder: it has none of {', '.join(NAMES)}.{hint}")


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a path, its links followed, is in a folder."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def inside(folder: Path, path: Path, *, directory: bool = False) -> Path:
    """The path, if it is an ordinary file of the folder, or a folder in it.

    Raises:
        OSError: it is something else: a pipe would block, a link could lead to any file of the account.
    """
    if not is_inside(folder, path):
        raise OSError("it leads out of the run folder")
    if not path.exists():
        raise FileNotFoundError("it is missing")
    if not (path.is_dir() if directory else path.is_file()):
        raise OSError(f"it is not a {'folder' if directory else 'file'}")
    return path


def read_file(folder: Path, name: str) -> bytes:
    """The bytes of a file of a run folder.

    Raises:
        OSError: it is missing, no ordinary file, larger than ``MAX_FILE``, or leads out of the folder.
    """
    with inside(folder, folder / name).open("rb") as file:
        text = file.read(MAX_FILE + 1)
    if len(text) > MAX_FILE:
        raise OSError(f"it is larger than {MAX_FILE:,} bytes")
    return text


def _plain(value: Any, scalar: Callable[[Any], Any] = lambda value: value, depth: int = 1) -> Any:
    """Nested dicts and lists with ``scalar`` of what is in them."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        return {key: _plain(one, scalar, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, scalar, depth + 1) for one in value]
    return scalar(value)


def _float(text: str) -> float | None:
    """A number; None if it is not below ``MAX_NUMBER``."""
    return number if abs(number := float(text)) < MAX_NUMBER else None


def _int(text: str) -> int | None:
    """As ``_float``."""
    return number if abs(number := int(text)) < MAX_NUMBER else None


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else str(value)


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
