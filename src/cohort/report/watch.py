"""``cohort watch``: follow a run that another process writes, from its folder alone. Imports no torch."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any, Literal

from cohort import terminal
from cohort.lock import holder, is_written
from cohort.report.console.live import Live, is_live_terminal, newest_checkpoint
from cohort.report.console.progress import RunState, starts_of, step_line
from cohort.report.console.view import Moment, as_plain, hanging, view
from cohort.report.words import clean, duration
from cohort.runs.reader import Run
from cohort.runs.starts import how_to_continue

LOOK_SECONDS = 0.5
"""Seconds between two looks at the run."""
LOCK_SECONDS = 5.0
"""Seconds between two looks at the lock, which take it for an instant."""
STALE_FACTOR, STALE_SECONDS = 5.0, 60.0
"""A step is late after this many times the median of the latest steps, and after this time at least."""
PLAIN_WIDTH = 100
PLAIN_LINES = 20
"""Progress lines of a whole run without a terminal."""


class Watched:
    """A run that another process writes.

    Args:
        folder: the run folder.

    Raises:
        RunFolderError: it is no run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.run = Run.read(folder)
        self.folder = self.run.path
        self.state = RunState(self.folder)
        self._locked: bool | None = None
        self._looked_at = -LOCK_SECONDS

    def look(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The metrics that are new since the last look, and what there is to say of them. When the run was resumed, its
        file is another one: then all of it is new."""
        replaced, lines = self.run.refresh()
        if replaced:
            self.state = RunState(self.folder)
        if replaced or lines:
            self.state.progress.starts, self.state.progress.steps = starts_of(self.run)
        return lines, [text for metrics in lines for text in self.state.add(metrics)]

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

    def doing(self) -> str:
        """What is known of the process that writes the run."""
        kind, text = self.standing()
        self.state.is_going = kind == "running"
        return text

    def standing(self) -> tuple[Literal["running", "late", "stopped"], str]:
        """Whether the run goes on, as its files and its lock show, and what to say of it."""
        now, progress = time.time(), self.state.progress
        if time.monotonic() - self._looked_at >= LOCK_SECONDS:
            self._looked_at = time.monotonic()
            self._locked = _is_locked(self.folder)
        if self._locked is False:
            ago = "" if progress.time is None else f", {duration(max(0.0, now - progress.time))} ago"
            after = f"after step {progress.step}{ago}" if progress.step else "before the end of a step"
            return "stopped", f"stopped {after}: run.lock is free. {how_to_continue(self.folder)} continues the run"
        late = self._late(now)
        if not late:
            return "running", f"step {progress.step + 1}"
        if self._locked is None:
            return "late", f"{late}: the process may be dead (run.lock cannot be read from here)"
        owner = holder(self.folder)
        who = f"process {owner['pid']} on {clean(owner['host'])}" if owner else "a process"
        hint = f"; kill -QUIT {owner['pid']} there prints what it waits for" if owner else ""
        return "late", f"{late}: {who} holds run.lock{hint}"

    def _late(self, now: float) -> str:
        """Since when there was no new step, if that is longer than it should be."""
        progress = self.state.progress
        walls = progress.walls()
        if progress.time is None or not walls:
            return ""
        usual, since = statistics.median(walls), now - progress.time
        if since < max(STALE_SECONDS, STALE_FACTOR * usual):
            return ""
        return f"no new step for {duration(since)}; steps took {duration(usual)}"


def _is_locked(folder: Path) -> bool | None:
    """Whether a process holds the lock of a run folder; None: that cannot be known."""
    try:
        return is_written(folder)
    except OSError:  # no permission to open it
        return None


def watch(folder: Path, *, once: bool = False) -> None:
    """Show a run until it is complete.

    Args:
        folder: the run folder.
        once: print one picture and return.

    Raises:
        RunFolderError: it is no run folder.
    """
    watched = Watched(folder)
    while watched.look()[0]:
        pass
    if once or not is_live_terminal():
        print(picture(watched), flush=True)
        if not once:
            _print_steps(watched)
        return
    _show(watched)
    print(watched.end or watched.doing(), flush=True)


def picture(watched: Watched, width: int = PLAIN_WIDTH) -> str:
    """The display as text."""
    progress = watched.state.progress
    kind, doing = watched.standing()
    end, saved, settings = watched.end, newest_checkpoint(watched.folder), watched.state.settings
    moment = Moment(time.time(), end or doing, saved, kind == "running" and not end, settings=settings)
    findings = [hanging(text, width - 1) for text in watched.state.standing()]
    return "\n".join([*findings, as_plain(view(progress, moment, width, 1000))])


def _print_steps(watched: Watched) -> None:
    """Print a line every twentieth of the run, findings and evaluations, until the run is complete."""
    before = ""
    while not watched.end:
        time.sleep(LOOK_SECONDS)
        lines, said = watched.look()
        steps = watched.state.progress.steps
        for metrics in lines:
            if metrics["step"] and metrics["step"] % max(1, (steps or 0) // PLAIN_LINES) == 0:
                print(f"step {metrics['step']}/{steps or '?'}  {clean(step_line(metrics))}", flush=True)
        for text in said:
            print(text, flush=True)
        kind, text = watched.standing()
        if kind not in ("running", before):
            print(text, flush=True)
        before = kind
    print(watched.end, flush=True)


def _show(watched: Watched) -> None:
    """The live display, until the run is complete, or q."""
    quitting = Event()
    live = Live(watched.state, watched.doing, quitting.set, quitting.is_set, "q quit; the run goes on")
    with _quitting_on_signals():
        live.start()
        try:
            while not watched.end and not quitting.wait(LOOK_SECONDS):
                with live.lock:
                    _, said = watched.look()
                    live.state = watched.state
                for text in said:
                    live.say(text)
        finally:
            live.stop()


@contextmanager
def _quitting_on_signals() -> Iterator[None]:
    """In this block, Ctrl-C leaves it; SIGTERM and SIGHUP do too, and then end the process as they would without it. A
    second signal ends the process at once. The terminal is set back first."""
    came: list[int] = []
    before: dict[int, Any] = {}

    def quit_once(number: int, _: Any) -> None:
        terminal.release()
        came.append(number)
        for one in before:
            signal.signal(one, signal.SIG_DFL)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        before = {number: one for number, one in before.items() if one in (signal.SIG_DFL, signal.default_int_handler)}
    for number in before:
        signal.signal(number, quit_once)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came and came[0] != signal.SIGINT:
        signal.raise_signal(came[0])
