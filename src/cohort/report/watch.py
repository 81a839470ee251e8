"""``cohort watch``: follow a run that another process writes, from its folder alone. Imports no torch."""

from __future__ import annotations

import math
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from cohort.lock import holder, is_written
from cohort.report.console import Display, is_live_terminal, view
from cohort.report.progress import Progress, finding_text
from cohort.report.words import clean, duration
from cohort.runs.reader import Run
from cohort.runs.starts import how_to_continue
from cohort.terminal import output_outlasted

LOOK_SECONDS = 0.5
"""Seconds between two looks at the run."""
LOCK_SECONDS = 5.0
"""Seconds between two looks at the lock, which take it for an instant."""
STALE_FACTOR, STALE_SECONDS = 5.0, 60.0
"""A step is late after this many times the median of the latest steps, and after this time at least."""
PLAIN_WIDTH = 100


class Watched:
    """A run that another process writes.

    Args:
        folder: the run folder.

    Raises:
        RunFolderError: it is no run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.run = Run.read(folder)
        self.progress = Progress(self.run)
        self.progress.look()
        self._locked: bool | None = None
        self._looked_at = -math.inf

    @property
    def end(self) -> str:
        """What the summary of a complete run says; empty while there is none."""
        summary = self.run.summary
        if summary is None:
            return ""
        steps, seconds = summary.get("steps"), summary.get("seconds")
        early = ", stopped early" if summary.get("stopped_early") else ""
        took = f" in {duration(seconds)}" if isinstance(seconds, int | float) and 0 <= seconds < 1e9 else ""
        return f"complete: {steps} steps{took}{early}" if type(steps) is int else "complete"

    def standing(self) -> tuple[Literal["running", "late", "stopped"], str]:
        """Whether the run goes on, as its files and its lock show, and what to say of it."""
        now, progress, folder = time.time(), self.progress, self.run.path
        step = progress.row["step"]
        if time.monotonic() - self._looked_at >= LOCK_SECONDS:
            self._looked_at, self._locked = time.monotonic(), _is_locked(folder)
        if self._locked is False:
            ago = "" if progress.time is None else f", {duration(max(0.0, now - progress.time))} ago"
            after = f"after step {step}{ago}" if step else "before the end of a step"
            return "stopped", f"stopped {after}: run.lock is free. {how_to_continue(folder)} continues the run"
        late = self._late(now)
        if not late:
            return "running", f"step {step + 1}"
        if self._locked is None:
            return "late", f"{late}: the process may be dead (run.lock cannot be read from here)"
        owner = holder(folder)
        who = f"process {owner['pid']} on {clean(owner['host'])}" if owner else "a process"
        hint = f"; kill -QUIT {owner['pid']} there prints what it waits for" if owner else ""
        return "late", f"{late}: {who} holds run.lock{hint}"

    def _late(self, now: float) -> str:
        """Since when there was no new step, if that is longer than it should be."""
        walls, last = self.progress.walls(), self.progress.time
        if last is None or not walls:
            return ""
        usual, since = statistics.median(walls), now - last
        if since < max(STALE_SECONDS, STALE_FACTOR * usual):
            return ""
        return f"no new step for {duration(since)}; steps took {duration(usual)}"


def _is_locked(folder: Path) -> bool | None:
    """Whether a process holds the lock of a run folder; None: that cannot be known."""
    try:
        return is_written(folder)
    except OSError:  # no permission to open it
        return None


@output_outlasted()
def watch(folder: Path, *, once: bool = False) -> None:
    """Show a run until it is complete.

    Args:
        folder: the run folder.
        once: print one picture and return.

    Raises:
        RunFolderError: it is no run folder.
    """
    watched = Watched(folder)
    if once or not is_live_terminal():
        print_picture(watched)
    if not once:
        _follow(watched)
        print(watched.end or watched.standing()[1], flush=True)


def print_picture(watched: Watched) -> None:
    """Print the display once, below the findings that stand."""
    progress, (kind, doing), end = watched.progress, watched.standing(), watched.end
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False, legacy_windows=False)
    with console.capture() as captured:
        for finding in progress.diagnosis.standing:
            if finding.level != "note":
                console.print(Text(finding_text(finding)))
        console.print(view(progress, console.options, doing=end or doing, going=kind == "running" and not end))
    print("\n".join(map(str.rstrip, captured.get().splitlines())), flush=True)


def _follow(watched: Watched) -> None:
    """Show the run until it is complete, or q or Ctrl-C."""
    display = Display(watched.progress, lambda: watched.standing()[1], keys="q quit; the run goes on")
    display.silence, said = math.inf, ""
    with _quitting_on_signals(display), display:
        while not display.quitting.wait(LOOK_SECONDS):
            end = watched.end  # before the rows, so that none is missed
            for row, texts in watched.progress.look():
                display.tell(row, texts)
            if end:
                break
            kind, text = watched.standing()
            display.going = kind == "running"
            if kind not in ("running", said) and not display.draws:
                display.print(text)
            said = kind


@contextmanager
def _quitting_on_signals(display: Display) -> Iterator[None]:
    """In this block, Ctrl-C leaves it, and SIGTERM and SIGHUP end the process as they would without it, after the
    terminal is set back. A second Ctrl-C ends the process at once."""

    def end(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        display.__exit__()
        signal.raise_signal(number)

    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
