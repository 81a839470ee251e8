"""JSON, and files of a JSON object per line."""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO


def as_json(value: Any, **settings: Any) -> str:
    """A value as JSON with a line break; null for NaN and infinity, which JSON lacks. ``settings`` are those of
    ``json.dumps``."""
    return json.dumps(_finite(value), allow_nan=False, **settings) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, or nothing if that fails. A line that was cut, by a crash or a full disk, is removed."""
    with path.open("ab+") as file:
        end = _end_of_lines(file)
        try:
            file.truncate(end)
            file.write(line.encode())
            file.flush()
        except OSError:
            with suppress(OSError):  # closing writes what is in the buffer
                file.close()
            os.truncate(path, end)
            raise


def _end_of_lines(file: BinaryIO) -> int:
    """The length of a file without a last line that has no line break."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
