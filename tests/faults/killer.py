"""Where a run is, event by event, and a signal at a chosen one.

An event is the call or the return of any function of the main thread, C functions included: so a kill may come between
any two system calls. Counted by phase, an instant of a run can be named, as "update:1234", and met again.
"""

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import Any

from cohort.rewards.runner import Scoring
from cohort.rollout import LocalEngine
from cohort.runs.folder import RunFolder
from cohort.runs.models import save_merged
from cohort.train import loop
from cohort.train.source import RolloutSource
from cohort.train.update import update
from cohort.trainer import GRPOTrainer

MARKS: dict[str, list[Callable[..., Any]]] = {
    "start": [],
    "resume": [GRPOTrainer._resume],
    "sampling": [LocalEngine.generate],
    "scoring": [Scoring.finish],
    "log-probs": [loop.with_advantages_and_logps],
    "update": [update],
    "between updates": [RolloutSource.next],
    "evaluation": [loop.evaluate],
    "best": [RunFolder.save_best],
    "journal": [RunFolder.write_journal],
    "store": [RunFolder.write_rollout, RunFolder.write_evaluation],
    "metrics": [RunFolder.append_metrics],
    "checkpoint": [RunFolder.save_checkpoint],
    "end": [RunFolder.write_summary, save_merged],
}
"""The functions in which a run is in a phase. Outside of all of them, it is where it began, "start"; from the first
rollout on "between updates"; and from the first function of "end" on there."""
PHASES = tuple(MARKS)
WHOLE = ("between updates", "end")
"""Phases that last when their function has returned."""
CODES: dict[int, str] = {
    id(unwrap(function).__code__): phase for phase, functions in MARKS.items() for function in functions
}
"""By the code's identity: its hash takes longer than everything else that happens at an event."""


class Killer:
    """Counts the events of each phase, and sends this process a signal at one of them.

    Args:
        report: the file that gets the counts, when ``end`` is called or before the signal is sent.
        target: phase and number of the event; None: no signal.
        number: the signal.
    """

    def __init__(self, report: Path, target: tuple[str, int] | None, number: int = signal.SIGKILL) -> None:
        self.counts: Counter[str] = Counter()
        self._report, self.target, self._signal = report, target, number
        self._stack = ["start"]

    def begin(self) -> None:
        """Watch this thread from now on."""
        counts, stack, target = self.counts, self._stack, self.target
        phases_of_code = CODES
        phase_now = stack[-1]

        def watch(frame: FrameType, event: str, _: object) -> None:
            nonlocal phase_now
            # Nearly all events are of other functions: for them, this is all.
            code = id(frame.f_code)
            is_marked = code in phases_of_code
            if is_marked and event == "call":
                phase_now = enter(phases_of_code[code])
            counts[phase_now] = count = counts[phase_now] + 1
            if (phase_now, count) == target:
                sys.setprofile(None)
                self.end()
                os.kill(os.getpid(), self._signal)
            if is_marked and event == "return":
                stack.pop()
                phase_now = stack[-1]

        def enter(phase: str) -> str:
            if phase in WHOLE:
                stack[0] = phase
            # An evaluation samples and scores too.
            stack.append("evaluation" if "evaluation" in stack and phase in ("sampling", "scoring") else phase)
            return stack[-1]

        sys.setprofile(watch)

    def end(self, **more: Any) -> None:
        """Stop, and write the counts and ``more``."""
        sys.setprofile(None)
        self._report.write_text(json.dumps({"events": self.counts, **more}))
