"""Follow the files of a run that another process writes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.report.history import DAMAGE, MAX_LINE, MAX_STEP, inside, json_object, read_lines, step_metrics

CHUNK = 2**20
MAX_READ = 64 * CHUNK
"""Bytes that one call of ``read`` reads."""
MARK = 64
"""Bytes before the position by which a file is recognised."""


class Tail:
    """Reads the complete lines of ``metrics.jsonl`` as they are appended.

    A resumed run replaces the file: then everything is read again.

    Args:
        file: the file. It need not exist.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._position, self._mark, self._rest = 0, b"", b""
        self._identity: tuple[int, int] | None = None

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the file has been replaced or cut, and the metrics of its new lines: all lines if it has. The lines
        of a very long file come in several calls: until there are none."""
        try:
            with inside(self._file.parent, self._file).open("rb") as file:
                status = os.fstat(file.fileno())
                file.seek(max(0, self._position - MARK))
                same = file.read(min(MARK, self._position)) == self._mark and status.st_size >= self._position
                replaced = self._position > 0 and not (same and self._identity == (status.st_dev, status.st_ino))
                if replaced:
                    self._position, self._mark, self._rest = 0, b"", b""
                    file.seek(0)
                self._identity = status.st_dev, status.st_ino
                return replaced, self._new_lines(file)
        except OSError:  # missing, being replaced, its disk gone for a while, or no ordinary file of the folder
            return False, []

    def everything(self) -> list[dict[str, Any]]:
        """The metrics of all lines that were not read yet."""
        found: list[dict[str, Any]] = []
        while lines := self.read()[1]:
            found += lines
        return found

    def _new_lines(self, file: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        read = 0
        while read < MAX_READ and (chunk := file.read(CHUNK)):
            read += len(chunk)
            self._position += len(chunk)
            self._mark = (self._mark + chunk)[-MARK:]
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            self._rest = self._rest[: MAX_LINE + 1]  # a longer line is no line of metrics
            found += [metrics for line in lines if (metrics := self._metrics(line)) is not None]
        return found

    def _metrics(self, line: bytes) -> dict[str, Any] | None:
        """The numbers of a line; None if it is damaged or has no step: such lines are left out."""
        with suppress(*DAMAGE):
            if len(line) <= MAX_LINE:
                return step_metrics(json_object(line.decode()))[0]
        return None


def read_starts(folder: Path) -> tuple[list[int], int | None]:
    """The steps after which processes started or resumed a run, and the steps of the whole run by the last of them;
    None: unknown."""
    after, steps = [], None
    for start in read_lines(folder, "starts.jsonl"):
        if type(step := start.get("step")) is int:
            after.append(step)
        if type(count := start.get("steps")) is int and 0 < count < MAX_STEP:
            steps = count
    return after, steps
