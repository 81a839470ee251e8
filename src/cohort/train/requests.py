"""Requests to a run, from signals or from Python: stop, write a checkpoint, or evaluate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from cohort.parallel import World

SECONDS_BETWEEN_LOOKS = 1.0
"""How often a run looks for a request in its folder, and of another rank."""
STOP = "cohort/stop"


@dataclass(slots=True)
class Requests:
    """What is asked of a run. The loop looks at ``stop_point``; sampling, scoring and evaluation ask ``stop`` too.

    Handlers of signals set the attributes, so they are plain values: a handler that takes a lock waits for ever if it
    has interrupted the code that holds it.
    """

    stop: bool = False
    """End the run, with a checkpoint."""
    save: bool = False
    """Write a checkpoint, and go on."""
    evaluate: bool = False
    """Evaluate after the step in progress."""
    reason: str = "stop()"
    """What asked to stop: the name of a signal."""
    met: bool = False
    """Whether the run has stopped, and its checkpoint is written."""
    _looked: dict[str, float] = field(default_factory=dict)

    def look(self, save_request: Path) -> None:
        """Look for a request of another process: the file ``RunFolder.save_request``."""
        if self._is_time("folder") and save_request.exists():
            self.save = True

    def take_evaluate(self, world: World) -> bool:
        """Whether an evaluation was asked for on any rank. Forgets the request. Every rank must call."""
        evaluate, self.evaluate = self.evaluate, False
        return any(world.gather(evaluate))

    def wants_stop(self, world: World) -> bool:
        """Whether this rank or another one was asked to stop. Exchanges nothing: ranks sample at their own pace, and
        ``stop_point`` lets them agree."""
        if world.size > 1 and self._is_time("world"):
            if self.stop:
                world.tell(STOP, self.reason)
            elif (reason := world.told(STOP)) is not None:
                self.reason, self.stop = reason, True
        return self.stop

    def _is_time(self, where: str) -> bool:
        """Whether the last look there is long enough ago."""
        now = time.monotonic()
        due = now - self._looked.get(where, -SECONDS_BETWEEN_LOOKS) >= SECONDS_BETWEEN_LOOKS
        if due:
            self._looked[where] = now
        return due
