"""The live display: a thread that draws a run's progress at the bottom of the terminal, and reads keys.

The thread draws at most four times a second, and only what has changed. The training never waits for it: what it is to
print is put into a queue.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from cohort import terminal
from cohort.errors import RunFolderError
from cohort.report.console.progress import RunState
from cohort.report.console.screen import Keys, Printed, Screen
from cohort.report.console.view import NARROW, Moment, ShownGroup, StoredGroups, group_view, hanging, newest_file, view
from cohort.report.words import clean
from cohort.runs.reader import Run

TICK = 0.25
"""Seconds between two pictures."""
REDRAW_SECONDS = 2.0
"""After this time the same picture is drawn again, in case something else has written over it."""
LOOK_SECONDS = 1.0
"""Seconds between two looks for a checkpoint."""
SAID_SECONDS = 30.0
"""A saved checkpoint is said above the display unless another one was, this time ago."""
JOIN_SECONDS = 2.0
PLAIN_TERMINALS = ("dumb", "unknown")
log = logging.getLogger("cohort.report")


def is_live_terminal() -> bool:
    """Whether standard output is a terminal that a display can be drawn on: not in a notebook, a log of continuous
    integration (``CI``), or with ``TERM=dumb``."""
    try:
        is_terminal = os.isatty(sys.stdout.fileno()) and sys.stdout.isatty()
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object without a descriptor
        return False
    is_log = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return is_terminal and not is_log and os.environ.get("TERM", "") not in ("", *PLAIN_TERMINALS)


@dataclass(slots=True)
class _Shown:
    """The group on the display, and where in it."""

    groups: StoredGroups
    group: ShownGroup
    top: int = 0


class Live:
    """The display of a run on a terminal.

    Args:
        state: the run's. Change it with ``lock`` held.
        doing: what the run does now.
        on_quit: what ``q`` does; it may return what to say.
        ending: whether the process is about to end: then the terminal's mode is as it was before.
        keys: what to say of the keys that do something besides those of this display.
    """

    def __init__(
        self,
        state: RunState,
        doing: Callable[[], str],
        on_quit: Callable[[], str | None],
        ending: Callable[[], bool],
        keys: str,
    ) -> None:
        self.state, self.lock = state, threading.Lock()
        self._doing, self._on_quit, self._ending, self._own_keys = doing, on_quit, ending, keys
        encoding = (sys.stdout.encoding or "utf-8").lower()
        self._ascii = not encoding.startswith("utf")
        self.screen = Screen(sys.stdout.fileno(), encoding)
        self._keys = Keys(_terminal_of_input())
        self._colours = Console(file=io.StringIO(), force_terminal=True, legacy_windows=False, highlight=False)
        self._above: deque[str] = deque()
        self._shown: _Shown | None = None
        self._last: tuple[list[str], tuple[int, int]] | None = None
        self._drawn_at = self._looked_at = 0.0
        self._said_at = time.monotonic()
        self._saved: int | None = None
        self._streams: dict[str, Printed] = {}
        self._ended = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="cohort-display", daemon=True)

    def start(self) -> None:
        """Begin to draw, and to write above the display what this process prints."""
        self._saved = newest_checkpoint(self.state.folder)
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if _is_terminal(stream):
                stream.flush()
                self._streams[name] = Printed(stream, self.screen)
                setattr(sys, name, self._streams[name])
        terminal.changed.append(self._keys.release)
        self._thread.start()

    def stop(self) -> None:
        """Draw a last picture, which stays, and leave the terminal as it was."""
        self._ended.set()
        self._keys.release()
        terminal.changed.remove(self._keys.release)
        self._thread.join(JOIN_SECONDS)  # it does not end while the terminal takes nothing
        self._give_streams_back()
        if not self._thread.is_alive():
            self._say_what_waits()
            self._saved = newest_checkpoint(self.state.folder)
            try:
                self.screen.leave(self._coloured(self._picture(*self.screen.size(), last=True)) if self.draws else ())
            except Exception as error:  # the run goes on
                self._fail(error)

    @property
    def draws(self) -> bool:
        """Whether the display is drawn now: not while the process is in the background, nor after an error in it."""
        return self.screen.is_usable and not self._failed

    def say(self, text: str) -> None:
        """Print text above the display, soon; at once if the display has failed."""
        self._above.append(text)
        if self._failed:
            self._say_what_waits()

    def _give_streams_back(self) -> None:
        for name, printed in self._streams.items():
            printed.close_line()
            if getattr(sys, name) is printed:
                setattr(sys, name, printed.stream)

    def _fail(self, error: Exception) -> None:
        """End the display, not the run, which prints plain lines from here on."""
        self._failed = True
        self._keys.release()
        self.screen.draw([])
        self._give_streams_back()
        self._say_what_waits()
        log.warning("the live display ended: %r", error, exc_info=True)

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._keys.follow(wanted=not self._ending())
            while not self._ended.wait(TICK):
                self._keys.follow(wanted=not self._ending())
                for key in self._keys.read():
                    self._press(key)
                self._look()
                self._refresh()
        except Exception as error:  # the run goes on
            self._fail(error)

    def _refresh(self) -> None:
        if self.screen.is_gone:
            return
        if not self.draws:
            self._last = None
            self._say_what_waits()
            return
        size = self.screen.size()
        picture = self._coloured(self._picture(*size))
        now = time.monotonic()
        if (
            (picture, size) != self._last
            or self._above
            or self.screen.is_stale
            or now - self._drawn_at >= REDRAW_SECONDS
        ):
            self._last, self._drawn_at = (picture, size), now
            self.screen.draw(picture, self._waiting_text(size[0]))

    def _say_what_waits(self) -> None:
        if text := self._waiting_text(self.screen.size()[0]):
            self.screen.draw([], text)

    def _waiting_text(self, width: int) -> str:
        """What is to be said, wrapped at words."""
        texts = []
        with suppress(IndexError):  # after a failure, two threads may say something
            while True:
                texts.append(self._above.popleft())
        return "\n".join(hanging(text, width - 1) for text in texts)

    def _picture(self, width: int, height: int, *, last: bool = False) -> list[Text]:
        if self._shown and not last:
            shown = self._shown
            room = max(3, height - 2)
            keys = "g back   arrows scroll and change the group" if width >= NARROW else "g back   arrows"
            lines, last_top = group_view(shown.group, width, room, shown.top, keys)
            shown.top = min(shown.top, last_top)
            return lines
        with self.lock:
            keys = f"g last group   {self._own_keys}" if width >= NARROW else "g last group"
            keys = "" if last or not self._keys.are_read else keys
            doing = "" if last else self._doing()
            going = self.state.is_going and not last
            moment = Moment(time.time(), doing, self._saved, going, keys, self.state.settings, self._ascii)
            return view(self.state.progress, moment, width, height - 2)

    def _coloured(self, lines: Sequence[Text]) -> list[str]:
        with self._colours.capture() as captured:
            self._colours.print(Text("\n").join(lines), soft_wrap=True, end="")
        return captured.get().split("\n")

    def _press(self, key: str) -> None:
        if key == "g" or (key == "escape" and self._shown):
            self._shown = None if self._shown else self._last_group()
        elif key == "q":
            if text := self._on_quit():
                self.say(text)
        elif key == "suspend":
            self._suspend()
        elif shown := self._shown:
            page = self.screen.size()[1] - 4
            moves = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -page, "b": -page, "page down": page}
            shown.top = max(0, shown.top + moves.get(key, 0))
            if turn := {"left": -1, "h": -1, "right": 1, "l": 1, "n": 1, "p": -1}.get(key, 0):
                self._shown = self._group(shown.groups, (shown.group.number - 1 + turn) % len(shown.groups))

    def _suspend(self) -> None:
        """What the terminal does on Ctrl-Z, after the display is cleared and the terminal as it was."""
        self.screen.draw([])
        self._keys.restore()
        self._last = None
        os.killpg(os.getpgrp(), signal.SIGTSTP)
        time.sleep(TICK)  # which ends after the process was continued
        with self.lock:
            self.state.progress.time = None  # the time until the next step says nothing of its pace

    def _last_group(self) -> _Shown | None:
        file = newest_file(self.state.folder) if self.state.folder else None
        try:
            groups = StoredGroups(file) if file else ()
        except RunFolderError as error:
            self.say(clean(str(error)))
            return None
        if not groups:
            self.say("no group is stored yet" if self._stores else "no group is stored: report.log_completions is off")
            return None
        return self._group(groups, len(groups) - 1)

    def _group(self, groups: StoredGroups, index: int) -> _Shown | None:
        try:
            return _Shown(groups, groups.read(index))
        except RunFolderError as error:
            self.say(clean(str(error)))
            return None

    @property
    def _stores(self) -> bool:
        table = self.state.settings.get("report")
        return not isinstance(table, Mapping) or bool(table.get("log_completions", True))

    def _look(self) -> None:
        """Look for a new checkpoint."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        saved = newest_checkpoint(self.state.folder)
        if saved is not None and saved != self._saved and now - self._said_at >= SAID_SECONDS:
            self._said_at = now
            self.say(f"checkpoint of step {saved} saved")
        self._saved = saved


def newest_checkpoint(folder: Path | None) -> int | None:
    """The step of the newest checkpoint in a run folder; None: there is none."""
    return max(Run(folder).checkpoints, default=None) if folder else None


def _terminal_of_input() -> int | None:
    """The descriptor of standard input, if it is a terminal."""
    return sys.stdin.fileno() if _is_terminal(sys.stdin) else None


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream is not None and stream.isatty() and os.isatty(stream.fileno()))
    except (OSError, ValueError, AttributeError):
        return False
