"""The live display's place on a terminal.

The display is redrawn in place at the bottom. Between two redraws the cursor rests on the empty line above it, so that
text which others write meanwhile, such as a worker process or a signal's handler, appears above it and is not
overwritten, and so that the terminal can change its size: nothing depends on where the lines below the cursor are.

What this process prints is taken by ``Printed``, and written above the display.
"""

from __future__ import annotations

import os
import re
import select
import signal
import termios
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

HOME, ERASE_LINE, ERASE_BELOW = "\r", "\x1b[K", "\x1b[J"
NO_WRAP, WRAP = "\x1b[?7l", "\x1b[?7h"
"""Whether a line that is wider than the terminal goes on in the next one."""
PRINT_SECONDS = 0.05
"""What is printed so soon after the display was drawn does not draw it again."""


class Screen:
    """The lines at the bottom of a terminal.

    Args:
        descriptor: of the terminal.
        encoding: of its text.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8") -> None:
        self._descriptor, self._encoding = descriptor, encoding
        self._lock = threading.RLock()
        self._lines: Sequence[str] = ()
        self._drawn_at = 0.0
        self.is_stale = False
        """Whether the lines have to be drawn again."""
        self.is_gone = False
        """Whether the terminal has been closed."""

    @property
    def is_usable(self) -> bool:
        """Whether the display may be drawn: this process is not in the background of the terminal."""
        return in_foreground(self._descriptor) is not False

    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal; 80 and 24 if it does not know them."""
        with suppress(OSError):
            columns, lines = os.get_terminal_size(self._descriptor)
            if columns and lines:
                return columns, lines
        return 80, 24

    def draw(self, lines: Sequence[str], above: str = "") -> None:
        """Show lines, which have no line breaks, in place of those before, and text above them."""
        with self._lock:
            self._lines, self._drawn_at, self.is_stale = lines, time.monotonic(), False
            self._write(_print_above(above) + _drawn(lines))

    def print_above(self, text: str) -> None:
        """Write text above the lines. Of text that comes fast, the lines are drawn only now and then."""
        with self._lock:
            if time.monotonic() - self._drawn_at >= PRINT_SECONDS:
                self.draw(self._lines, text)
            else:
                self._write(_print_above(text))
                self.is_stale = True

    def leave(self, lines: Sequence[str] = ()) -> None:
        """Show the last lines, which stay below an empty one, and go to the line below them."""
        with self._lock:
            self._lines = ()
            self._write(f"{HOME}{ERASE_BELOW}" + "".join(f"{line}\r\n" for line in ["", *lines] if lines))

    def _write(self, text: str) -> None:
        """Write at once, without the buffer of a stream: it could be interrupted by a handler that writes too."""
        data = text.encode(self._encoding, "backslashreplace")
        with background_allowed():
            try:
                while data and not self.is_gone:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                self.is_gone = True


def _drawn(lines: Sequence[str]) -> str:
    """Below the cursor's line, which is emptied, lines in place of those that are there."""
    if not lines:
        return f"{HOME}{ERASE_BELOW}"
    text = "".join(f"\r\n{line}{ERASE_LINE}" for line in lines)
    return f"{HOME}{ERASE_LINE}{NO_WRAP}{text}{ERASE_BELOW}{WRAP}\x1b[{len(lines)}A{HOME}"


def _print_above(text: str) -> str:
    return f"{HOME}{ERASE_BELOW}{text.removesuffix(chr(10))}\n" if text else ""


def in_foreground(descriptor: int) -> bool | None:
    """Whether this process is in the foreground of a terminal; None: it is not the terminal of its session, as that of
    a rank under ``cohort launch``."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return None


@contextmanager
def background_allowed() -> Iterator[None]:
    """In this block, this thread may use the terminal though the process is in the background: it is not stopped."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU, signal.SIGTTIN})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _last_version(line: str) -> str:
    """What remains of a line that was written over."""
    return line[:-1].rpartition("\r")[2] + line[-1:]


class Printed:
    """Stands for ``sys.stdout`` or ``sys.stderr`` beside a display: writes complete lines above it.

    A line that is written over with carriage returns, as progress bars do, counts as it is at its end.

    Args:
        stream: the stream that it stands for.
        screen: where the lines go.
    """

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self.stream = stream
        self._screen, self._process = screen, os.getpid()
        self._rest = ""

    def write(self, text: str, /) -> int:
        """Keep text until its line is complete."""
        if os.getpid() != self._process:  # a forked child: its parent draws
            return self.stream.write(text)
        *lines, rest = (self._rest + text).split("\n")
        self._rest = _last_version(rest)
        if lines:
            self._screen.print_above("\n".join(map(_last_version, lines)) + "\n")
        return len(text)

    def close_line(self) -> None:
        """Write what is there of an incomplete line."""
        rest, self._rest = self._rest, ""
        if rest:
            self._screen.print_above(rest)

    def writelines(self, lines: Iterable[str], /) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


# ----------------------------------------
# Single keys from the terminal, while this process is in its foreground.


SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO.|\x1b.|[\xc2-\xf4][\x80-\xbf]+|.", re.DOTALL)
NAMES = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left", b"\x1b[5~": "page up"}
NAMES |= {b"\x1b[6~": "page down", b"\x1b": "escape", b" ": "page down", b"\r": "enter", b"\n": "enter"}
NAMES |= {b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left"}


class Keys:
    """Reads keys without waiting for a line, and without echo. Ctrl-C is a signal as before; Ctrl-Z is the key
    "suspend", so that the terminal can be set back before the process is stopped.

    Args:
        descriptor: of the terminal; None: there is none, and no keys.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor
        self._before: list[Any] | None = None
        self._suspend = b"\x1a"
        self._lock = threading.RLock()
        self._released = False

    @property
    def are_read(self) -> bool:
        """Whether keys are read now."""
        return self._before is not None

    def follow(self, *, wanted: bool = True) -> None:
        """Change the terminal's mode as it has to be now: single keys in the foreground, and as it was otherwise."""
        if self._descriptor is None:
            return
        if not (wanted and in_foreground(self._descriptor)):
            self.restore()
            return
        with self._lock, suppress(termios.error, OSError), background_allowed():
            if self._released:
                return
            mode = termios.tcgetattr(self._descriptor)
            if mode[3] & termios.ICANON:  # also if a shell has set its own mode since
                self._before = self._before or [*mode]
                mode[0] &= ~termios.IXON  # Ctrl-S would stop the run at its next line
                mode[3] &= ~(termios.ICANON | termios.ECHO)
                self._suspend, mode[6] = mode[6][termios.VSUSP], [*mode[6]]
                mode[6][termios.VSUSP] = b"\0"  # disabled
                termios.tcsetattr(self._descriptor, termios.TCSANOW, mode)

    def restore(self) -> None:
        """Set the terminal's mode to what it was."""
        with self._lock:
            if self._descriptor is not None and self._before is not None:
                before, self._before = self._before, None
                if in_foreground(self._descriptor):  # otherwise the mode is that of the shell
                    with suppress(termios.error, OSError), background_allowed():
                        termios.tcsetattr(self._descriptor, termios.TCSANOW, before)

    def release(self) -> None:
        """Set the terminal's mode to what it was, and read no more keys. A signal handler may call it."""
        with self._lock:
            self._released = True
            self.restore()

    def read(self) -> list[str]:
        """The keys pressed since the last call, by name; a character is its own name."""
        if self._descriptor is None or not self.are_read:
            return []
        try:
            with background_allowed():
                ready = select.select([self._descriptor], [], [], 0)[0]
                typed = os.read(self._descriptor, 1024) if ready and in_foreground(self._descriptor) else b""
        except OSError:  # the terminal is gone, or this process is in the background now
            return []
        names = NAMES | {self._suspend: "suspend"}
        return [names.get(key, key.decode(errors="replace")) for key in SEQUENCE.findall(typed)]
