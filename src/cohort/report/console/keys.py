"""Single keys from the terminal, while this process is in its foreground."""

from __future__ import annotations

import os
import re
import select
import termios
import threading
from contextlib import suppress
from typing import Any

from cohort.report.console.screen import background_allowed, in_foreground

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
