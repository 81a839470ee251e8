"""The terminal's mode is set back by whatever ends the process, as signal handlers do not reach the display's thread. A
run outlasts whoever reads its output, as in ``cohort train | head``, and letters that the output's encoding lacks."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

changed: list[Callable[[], None]] = []
"""For each terminal whose mode this process has changed, what sets it back for good. It may be called in a signal
handler, and more than once."""


def release() -> None:
    """Set back the mode of every terminal, now."""
    for restore in [*changed]:
        restore()


class _Outlasting:
    """A text stream that drops what is written after its reader has gone, and escapes letters that its encoding lacks,
    so that the writer goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As of a stream."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._outlast(self._stream.write, text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """As of a stream."""
        self._outlast(self._stream.flush)

    def _outlast(self, do: Callable[..., object], *arguments: str) -> None:
        try:
            do(*arguments)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # of a pipe without a reader, of a terminal that is gone
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            with suppress(OSError):
                print("cohort: standard output is closed; the run goes on", file=sys.stderr)


@contextmanager
def output_outlasted() -> Iterator[None]:
    """While the block runs, a closed standard output is not an error but a message on standard error, printed once; and
    no letter is an error."""
    before = sys.stdout
    if before is None or isinstance(before, _Outlasting):  # Python was started without one, or a block is around this
        yield
        return
    sys.stdout = _Outlasting(before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before
