"""The display of a training: live on a terminal, otherwise lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cohort.report.console.live import JOIN_SECONDS, Live, is_live_terminal
from cohort.report.console.progress import RunProgress, RunState, starts_of, step_line
from cohort.report.diagnosis import why_no_gradient
from cohort.report.words import duration
from cohort.runs.reader import Run
from cohort.watchdog import waits_of

if TYPE_CHECKING:
    from cohort.config import Schedule
    from cohort.runs.folder import RunFolder

PLAIN_LINES = 20
"""Progress lines of a whole run without a terminal, at least."""
LINE_SECONDS = 1.0
"""Steps that take less have no line each."""
SILENT_SECONDS = 30.0
"""Without a terminal, a line says what the run does after so many seconds without one."""
STOP_KEYS = "Ctrl-C stops with a checkpoint"


class StepDisplay:
    """Progress of a training: a live display on a terminal. Otherwise a line for each step, but at most one a second,
    for each twentieth of the run, and for every half minute within a step.

    Args:
        steps: steps of the whole run.
        enabled: False shows nothing.
        folder: the run folder: its settings, groups and checkpoints, and the earlier steps of a resumed run.
        stopping: whether the run was asked to stop.
    """

    def __init__(
        self,
        steps: int,
        *,
        enabled: bool = True,
        folder: Path | None = None,
        stopping: Callable[[], bool] = bool,
    ) -> None:
        self._steps, self._enabled = steps, enabled
        self._warned = False
        self._state = RunState(folder, steps)
        self._run = Run(folder) if folder else None
        if self._run:
            self._state.progress.starts = starts_of(self._run)[0]
            self._catch_up()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._hook = sys.breakpointhook
        self._doing = partial(_doing, threading.get_ident(), self._state.progress, stopping)
        self._line_at, self._said_at, self._ended = 0.0, time.monotonic(), threading.Event()
        if enabled and is_live_terminal():
            self._live = Live(self._state, self._doing, lambda: STOP_KEYS, stopping, STOP_KEYS)

    @classmethod
    def of(cls, schedule: Schedule, folder: RunFolder | None, stopping: Callable[[], bool], *, enabled: bool) -> Self:
        """The display of a run; without a folder, of one that is complete."""
        return cls(schedule.steps, enabled=enabled, folder=folder.path if folder else None, stopping=stopping)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self._hook, sys.breakpointhook = sys.breakpointhook, self._on_breakpoint
        elif self._enabled:
            self._thread = threading.Thread(target=self._break_silence, name="cohort-display", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread:
            # A thread that outlived the run would hold the last reference to its model and, at the interpreter's exit,
            # free tensors without a GIL to come back to, which aborts the process.
            self._thread.join(JOIN_SECONDS)
        if live := self._live:
            self._live = None
            sys.breakpointhook = self._hook
            live.stop()

    def show(self, metrics: dict[str, Any]) -> None:
        """Show a step, its evaluation, and once a warning when a step had no gradient."""
        if not self._enabled:
            return
        step = metrics["step"]
        with self._live.lock if self._live else nullcontext():
            self._catch_up(before=step)
            said = self._state.add(metrics)
        is_due = step in (1, self._steps) or step % max(1, self._steps // PLAIN_LINES) == 0
        is_due |= time.monotonic() - self._line_at >= LINE_SECONDS
        if is_due and not (self._live and self._live.draws):
            self._line_at = time.monotonic()
            line = step_line(metrics, groups_can_die=self._state.groups_compared)
            self._print(f"step {step}/{self._steps}  {line}{self._left()}")
        if metrics["updates"] == metrics["updates_skipped"] and not self._warned:
            self._warned = True
            self._print(f"step {step}: {why_no_gradient(metrics)}")
        for text in said:
            self._print(text)

    def _catch_up(self, before: int | None = None) -> None:
        """Take the steps of the folder that this process has not shown: those before it was resumed and, with the first
        step, the evaluation before it."""
        if self._run:
            for metrics in self._run.refresh()[1]:
                if before is None or metrics["step"] < before:
                    self._state.add(metrics)
        if before is not None:
            self._run = None

    def _left(self) -> str:
        """The time left, in words; empty at the end, and without a step to go by."""
        left = self._state.progress.time_left(time.time())
        return f"  {duration(left)} left" if left else ""

    def _break_silence(self) -> None:
        """Print what the run does whenever nothing was printed for a while."""
        while not self._ended.wait(max(0.1, self._said_at + SILENT_SECONDS - time.monotonic())):
            if time.monotonic() - self._said_at >= SILENT_SECONDS:
                self._print(self._doing())

    def _print(self, text: str) -> None:
        self._said_at = time.monotonic()
        if self._live:
            self._live.say(text)
        else:
            print(text, flush=True)

    def _on_breakpoint(self, *arguments: Any, **named: Any) -> Any:
        """``breakpoint()`` in a reward function: the debugger gets the terminal, and the display ends."""
        self.__exit__()
        return self._hook(*arguments, **named)


def _doing(thread: int, progress: RunProgress, stopping: Callable[[], bool]) -> str:
    """What a thread of this process does now, in words."""
    if stopping():
        return "stopping with a checkpoint"
    step, waits = progress.step, waits_of(thread)
    if not waits:
        return f"step {step + 1}"
    what, seconds, detail = waits[0]
    text = f"step {step + 1}: {what}"
    if what == "evaluation":
        text = f"evaluation after step {step}" if step else "evaluation before training"
    text += f" for {seconds:.0f} s" if seconds >= 1 else ""
    inner = [f"{name}{', ' if more else ''}{more}" for name, _, more in waits[1:]]
    return text + "".join(f", {one}" for one in [detail, *inner] if one)
