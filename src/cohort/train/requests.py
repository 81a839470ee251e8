"""Requests to a run, from signals or from Python: stop, or write a checkpoint."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from cohort.runs.save_request import save_requested

SECONDS_BETWEEN_LOOKS = 1.0
"""How often a run looks for a request in its folder."""


@dataclass(slots=True)
class Requests:
    """What is asked of a run. The loop looks at ``stop_point``; sampling, scoring and evaluation ask ``stop`` too."""

    stop: threading.Event = field(default_factory=threading.Event)
    """End the run, with a checkpoint."""
    save: threading.Event = field(default_factory=threading.Event)
    """Write a checkpoint, and go on."""
    reason: str = "stop()"
    """What asked to stop: the name of a signal."""
    met: bool = False
    """Whether the run has stopped, and its checkpoint is written."""
    _looked: float = 0.0

    def look(self, folder: Path) -> None:
        """Look for a request of another process in the run's folder."""
        now = time.monotonic()
        if now - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = now
            if save_requested(folder):
                self.save.set()
