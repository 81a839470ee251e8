"""The terminal's mode is set back by whatever ends the process: signal handlers do not reach the display's thread."""

from __future__ import annotations

from collections.abc import Callable

changed: list[Callable[[], None]] = []
"""For each terminal whose mode this process has changed, what sets it back for good. It may be called in a signal
handler, and more than once."""


def release() -> None:
    """Set back the mode of every terminal, now."""
    for restore in [*changed]:
        restore()
