"""Single files: written to the disk, written atomically, JSON, a JSON object per line. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from cohort.lock import alone_in

FileRecord: TypeAlias = dict[str, Any]
"""Size and hash of a file: ``{"bytes": ..., "sha256": ...}``."""


class Threads(ThreadPoolExecutor):
    """A thread pool that works in the calling thread while the interpreter exits, when pools take no work: a checkpoint
    may be written then."""

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """As of a thread pool."""
        try:
            return super().submit(function, *arguments, **named)
        except RuntimeError:
            done: Future[Any] = Future()
            done.set_result(function(*arguments, **named))
            return done


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file to the disk. A thread hashes each chunk while the next one is made and written."""
    digest, size = hashlib.sha256(), 0
    path.parent.mkdir(exist_ok=True)
    with path.open("xb") as file, Threads(1) as thread:
        hashed: Future[None] | None = None
        for chunk in chunks:
            file.write(chunk)
            if hashed:
                hashed.result()  # so that no more than two chunks are in memory
            hashed = thread.submit(digest.update, chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: it is the old one or the complete new one. Writers of a folder wait for each other, and
    the next one of the file removes what a killed one has left."""
    part = path.with_name(path.name + ".part")
    with alone_in(path.parent):
        part.unlink(missing_ok=True)
        try:
            write_file(part, [text.encode()])
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


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
