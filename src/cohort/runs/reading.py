"""Read the JSON files of a run folder. Anybody can have written them: whatever is in them, the answer is what they hold
or a ``RunFolderError``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from cohort.errors import RunFolderError

DAMAGE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError),
    SafetensorError,
)
"""What reading a file raises that is not as it was written."""


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Raise what reading a damaged file raises as ``RunFolderError``."""
    try:
        yield
    except RunFolderError:
        raise
    except DAMAGE as error:
        raise RunFolderError(f"{path} is damaged: {(str(error).splitlines() or [repr(error)])[0]}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        RunFolderError: the file cannot be read, or holds something else.
    """
    with damage_named(path):
        if not path.is_file():
            raise FileNotFoundError("it is not a file" if path.exists() else "it is missing")
        return _as_object(path.read_bytes())


def _as_object(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise TypeError(f"expected a JSON object, got {type(found).__name__}")
    return found


def metric_lines(path: Path) -> tuple[list[tuple[str, dict[str, Any]]], str]:
    """The complete lines of ``metrics.jsonl`` as text, and what each holds; none without a file. And what is there of a
    last line that was not written to its end.

    Raises:
        RunFolderError: a line is not an object with a step.
    """
    if not path.exists():
        return [], ""
    with damage_named(path):
        if not path.is_file():
            raise OSError("it is not a file")
        *lines, rest = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        with damage_named(Path(f"{path}, line {number},")):
            metrics = _as_object(line)
            if not isinstance(metrics["step"], int) or isinstance(metrics["step"], bool):
                raise TypeError(f"expected a whole number as step, got {metrics['step']!r:.40}")
            found.append((line.decode() + "\n", metrics))
    return found, rest.decode(errors="replace")


def read_best(path: Path) -> dict[str, Any]:
    """The contents of ``best.json``: step, metric, value, and what the value depends on.

    Raises:
        RunFolderError: the file cannot be read, or one of them is missing or of another type.
    """
    found = read_object(path)
    kinds: dict[str, Callable[[Any], bool]] = {
        "step": lambda step: type(step) is int and step >= 0,
        "metric": lambda metric: isinstance(metric, str),
        "value": lambda value: type(value) in (int, float) and math.isfinite(value),
        "measured": lambda measured: isinstance(measured, dict),
    }
    for name, accepts in kinds.items():
        if name not in found or not accepts(found[name]):
            got = f"got {found[name]!r:.40}" if name in found else "which is missing"
            raise RunFolderError(f"{path} is damaged: {name}, {got}")
    return found
