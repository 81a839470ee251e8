"""A training run outlasts whoever reads its output: ``cohort train | head``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class _Outlasting:
    """A text stream that drops what is written after its reader has gone, so that the writer goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of a stream."""
        with self._outlasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """As of a stream."""
        with self._outlasting():
            self._stream.flush()

    @contextmanager
    def _outlasting(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            with suppress(OSError):
                print("cohort: standard output is closed; the run goes on", file=sys.stderr)


@contextmanager
def output_outlasted() -> Iterator[None]:
    """While the block runs, a closed standard output is not an error but a message on standard error, printed once."""
    before = sys.stdout
    if before is None:  # Python was started without one
        yield
        return
    sys.stdout = _Outlasting(before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
