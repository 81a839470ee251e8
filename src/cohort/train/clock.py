"""Seconds of each phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cohort.watchdog import waiting

WORK = {"generate": "sampling", "reward": "scoring", "logps": "log-probs", "measure": "measuring"}
"""Phases by their names in the messages of the watchdog, where these differ."""


class PhaseClock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str, detail: Callable[[], str] = str) -> Iterator[None]:
        """Add the time of a block to ``phase``. ``detail`` says more where the block hangs."""
        start = time.perf_counter()
        with waiting(WORK.get(phase, phase), detail):
            yield
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: int) -> dict[str, float]:
        """Seconds by phase, their sum, and tokens per second of the step."""
        total = sum(self.seconds.values())
        phases = {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}
        return {**phases, "seconds/step": total, "tokens_per_second": tokens / total}
