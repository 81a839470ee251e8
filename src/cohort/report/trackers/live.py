"""Trackers of a run in progress: starts a process for each, warns while one fails, and waits for them at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cohort.config.schema import ReportConfig
from cohort.report.trackers.kinds import KINDS, check_installed
from cohort.report.trackers.send import State, error_text, folder_of, left_to_send

WARN_SECONDS = 60.0
"""Time between warnings about a tracker."""
END_SECONDS, STOP_SECONDS = 30.0, 10.0
"""How long the end of a complete run, and of a stopped one, waits for all its trackers."""
log = logging.getLogger("cohort.trackers")


@dataclass(slots=True)
class _Process:
    """The process of one tracker."""

    kind: str
    process: subprocess.Popen[bytes] | None = None
    reason: str = ""
    """Why there is no process."""
    step: int = -1
    """The last step that was sent, by the latest look."""
    since: float | None = None
    """The time (``time.monotonic``) of the first look that saw this step; None: there was no look."""
    warned: float = -WARN_SECONDS
    """The time of the last warning."""


class Trackers:
    """A callback (``cohort.callbacks``) that sends the run to trackers.

    Args:
        names: the trackers.
        project: see ``Kind.project``.

    Raises:
        ConfigError: one is not installed.
    """

    def __init__(self, names: Sequence[str], project: str | None = None) -> None:
        check_installed(names)
        self._project = project
        self._all = [_Process(name) for name in dict.fromkeys(names)]
        self._run = Path()

    @classmethod
    def of(cls, settings: ReportConfig) -> list[Self]:
        """The trackers of a run's settings; empty without any."""
        return [cls(settings.trackers, settings.tracker_project)] if settings.trackers else []

    def on_start(self, trainer: Any, start: Any) -> None:  # noqa: ARG002
        """Start the processes."""
        self._run = start.output_dir
        for one in self._all:
            try:
                one.process = _start(self._run, one.kind, self._project)
            except Exception as error:  # whatever it is, the run goes on
                one.reason = error_text(error)

    def on_step(self, trainer: Any, event: Any) -> None:  # noqa: ARG002
        """Warn, once a minute, of trackers that are behind and fail or do not answer."""
        now = time.monotonic()
        for one in self._all:
            if now - one.warned < WARN_SECONDS:
                continue
            state = State.read(self._run, one.kind)
            if state.step != one.step or one.since is None:
                one.step, one.since = state.step, now
            ended = self._why_ended(one)
            reason = ended or state.error or ("no answer" if now - one.since >= WARN_SECONDS else "")
            if state.step < event.step and reason:
                one.warned = now
                sent = (
                    f"steps up to {state.step} of {event.step} are sent" if state.step >= 0 else "nothing is sent yet"
                )
                then = f"; send the rest with: {self._command(one)}" if ended else ", and it is tried again"
                log.warning("%s: %s; %s. Training goes on%s", KINDS[one.kind].title, reason, sent, then)

    def on_end(self, trainer: Any, end: Any) -> None:  # noqa: ARG002
        """Wait for the processes, within the limit, and say what was not sent."""
        until = time.monotonic() + (END_SECONDS if end.outcome == "complete" else STOP_SECONDS)
        try:
            for one in self._all:
                if one.process is not None and one.process.stdin is not None:
                    one.process.stdin.close()  # tells it that the run has ended
            for one in self._all:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if one.process is not None:
                        one.process.wait(max(0.0, until - time.monotonic()))
        finally:  # also if Ctrl-C ends the wait
            for one in self._all:
                if one.process is None or one.process.poll() != 0:
                    self._say_what_is_left(one)
                if one.process is not None:
                    _kill(one.process)

    def _say_what_is_left(self, one: _Process) -> None:
        left, state = left_to_send(self._run, one.kind), State.read(self._run, one.kind)
        what = f"steps {left[0]} to {left[-1]} were not sent" if left else "the last steps may not have arrived"
        reason = state.error or self._why_ended(one) or "no answer in time"
        log.warning("%s: %s: %s. Send them with: %s", KINDS[one.kind].title, what, reason, self._command(one))

    def _why_ended(self, one: _Process) -> str:
        """Why a tracker's process does not run; empty if it does."""
        if one.process is None or (code := one.process.poll()) is None:
            return one.reason
        return f"its process ended with code {code} (see {folder_of(self._run, one.kind) / 'log.txt'})"

    def _command(self, one: _Process) -> str:
        return f"cohort track {self._run} --to {one.kind}"


def _start(run: Path, kind: str, project: str | None) -> subprocess.Popen[bytes]:
    """Start the process of a tracker. Its output is in ``trackers/NAME/log.txt``."""
    folder = folder_of(run, kind)
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100
    with (folder / "log.txt").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "cohort.report.trackers", str(run.absolute()), kind, project or ""],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the run only; what it starts is killed with it
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and what it has started, which may outlast it."""
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.kill()
    process.wait()
