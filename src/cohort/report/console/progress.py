"""The state of a run in progress, from its metrics: what the live display shows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from cohort.report.diagnosis.numbers import number
from cohort.report.labels import reward_functions
from cohort.report.words import PHASES

POINTS = 512
"""Points of a series. A longer one is stored at half the resolution."""
STEPS_OF_TIME = 100
"""The latest steps, from which the times are measured."""
ROUNDING = 1e-6
"""Difference of two variances of float32 numbers that are equal."""
BETWEEN = "evaluation and files"
"""What passes between the phases of two steps."""


class Series:
    """The course of a number in at most ``POINTS`` points: means over equally many values."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._each, self._sum, self._count = 1, 0.0, 0
        self.last: float | None = None

    def add(self, value: float | None) -> None:
        """Append a value. None, NaN and infinity are left out."""
        if value is None or not math.isfinite(value):
            return
        self.last = value
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == POINTS:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means, self._each = [(a + b) / 2 for a, b in pairs], 2 * self._each

    def points(self, count: int) -> list[float]:
        """At most ``count`` points over the whole course."""
        points = [*self._means, *([self._sum / self._count] if self._count else [])]
        if len(points) <= count:
            return points
        edges = [round(n * len(points) / count) for n in range(count + 1)]
        return [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of the latest steps went."""

    step: float
    """Seconds from one step to the next."""
    shares: dict[str, float]
    """Share of each phase by its name in words, largest first."""
    functions: dict[str, float]
    """Seconds of each reward function in a step, added up over concurrent calls."""


@dataclass(slots=True)
class RunProgress:
    """A run in progress. Feed it each line of ``metrics.jsonl``."""

    steps: int | None = None
    """Steps of the whole run; None: unknown."""
    step: int = 0
    """Complete steps."""
    starts: Collection[int] = ()
    """Steps after which a process started or resumed the run: the time before the next one does not count."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """Of the latest step."""
    rewards: dict[str, Series] = field(default_factory=dict)
    """The mean of each reward function, by its name."""
    reward: Series = field(default_factory=Series)
    """The mean of the weighted rewards."""
    graded: set[str] = field(default_factory=set)
    """The reward functions that have given anything but 0 and 1: the mean of the others is an accuracy."""
    evaluations: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """The metrics of the first and of the latest evaluation, with their steps."""
    evaluated: Series = field(default_factory=Series)
    """The mean reward of the evaluations, if there is one set."""
    health: str = ""
    """The health line; empty: unknown."""
    level: str = "note"
    """The level of the worst finding that stands: note, warning or alarm."""
    time: float | None = None
    """When the latest step ended, in seconds since 1970."""
    _times: deque[tuple[float, dict[str, float]]] = field(default_factory=lambda: deque(maxlen=STEPS_OF_TIME))

    def add(self, metrics: dict[str, Any]) -> None:
        """Take a step's metrics. Step 0 is the evaluation before the first one."""
        step = metrics["step"]
        if evaluation := {key: value for key, value in metrics.items() if key.startswith("eval/")}:
            self.evaluations[1:] = [(step, evaluation)]
            self.evaluated.add(evaluation.get("eval/reward/mean"))
        time = metrics.get("time")
        if step > 0:
            self._add_seconds(metrics, time)
            self.step, self.metrics = step, metrics
            self.reward.add(metrics.get("reward/mean"))
            for name, key in reward_functions(metrics).items():
                self.rewards.setdefault(name, Series()).add(metrics[key])
                mean, spread = number(metrics, key), number(metrics, f"{key}/std")
                # The variance of 0s and 1s follows from their mean.
                if mean is not None and (spread is None or abs(spread * spread - mean * (1 - mean)) > ROUNDING):
                    self.graded.add(name)
        self.time = time

    def _add_seconds(self, metrics: dict[str, Any], time: float | None) -> None:
        if time is None or self.time is None or metrics["step"] - 1 in self.starts or time < self.time:
            return
        seconds = {key.removeprefix("seconds/"): value for key, value in metrics.items() if key.startswith("seconds/")}
        self._times.append((time - self.time, {key: value for key, value in seconds.items() if value}))

    def walls(self) -> list[float]:
        """Seconds from one step to the next, of the latest steps."""
        return [wall for wall, _ in self._times]

    def seconds(self) -> Seconds | None:
        """Where the time of the latest steps went; None before two steps are complete."""
        if not self._times:
            return None
        total = sum(wall for wall, _ in self._times)
        summed: dict[str, float] = {}
        for _, seconds in self._times:
            for key, value in seconds.items():
                summed[key] = summed.get(key, 0.0) + value
        phases = {words: summed[key] for key, words in PHASES.items() if key in summed}
        if "rollout_wait" in summed:  # sampling and scoring have passed beside the training
            phases = {words: value for words, value in phases.items() if words not in ("sampling", "rewards")}
        total = max(total, sum(phases.values()))
        phases[BETWEEN] = total - sum(phases.values())
        shares = {words: value / total for words, value in phases.items() if total}
        functions = {key.removeprefix("reward/"): value for key, value in summed.items() if key.startswith("reward/")}
        count = len(self._times)
        return Seconds(
            total / count,
            dict(sorted(shares.items(), key=lambda pair: -pair[1])),
            {name: value / count for name, value in functions.items()},
        )

    def time_left(self, now: float) -> float | None:
        """Seconds until the end of the run at the pace of the latest steps; None: unknown."""
        seconds = self.seconds()
        if seconds is None or self.steps is None or self.time is None:
            return None
        passed = min(max(0.0, now - self.time), seconds.step)  # of the present step, which may be late
        return max(0.0, (self.steps - self.step) * seconds.step - passed)


def sparkline(values: Sequence[float], *, ascii_only: bool = False) -> str:
    """Values as bars between their minimum and their maximum; equal ones as bars of half the height.

    >>> sparkline([0, 1, 2, 3]), sparkline([5, 5]), sparkline([0, 1, 2], ascii_only=True)
    ('▁▃▆█', '▄▄', '_-^')
    """
    bars = "_.-=^" if ascii_only else "▁▂▃▄▅▆▇█"
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high <= low:
        return bars[(len(bars) - 1) // 2] * len(values)
    return "".join(bars[round((value - low) / (high - low) * (len(bars) - 1))] for value in values)
