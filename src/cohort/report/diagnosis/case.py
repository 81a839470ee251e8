"""A run as the checks see it: what they need of its settings, the thresholds, and the metrics so far."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from cohort.config.report import ThresholdsConfig
from cohort.report.diagnosis.facts import Facts
from cohort.report.diagnosis.numbers import differs, mean, number, share_interval, variance

START = 5
"""Steps that the start of a run is measured by."""
RECENT = 10
"""Last steps that most checks look at."""
WINDOW = 20
"""Steps that are remembered besides: no check looks further back, so a step costs the same however long the run is."""
RISES = 2.0
"""Standard errors that the reward has to rise by."""
FALLS = 5.0
"""Standard errors that the reward has to fall by. The variance of the last window is taken as no smaller than that of
the best one, since that one was chosen among many."""
STILL = {"entropy": 0.17, "length/mean": 0.1}
"""Metrics that may move away from their start, and by how much (in logarithms) they still count as there: a quarter of
the factor that is an illness."""
EVALUATIONS = 50
"""Evaluations that are remembered."""

TINY = 1e-6
"""A fall of the reward below this is one of rounding."""

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Window:
    """``RECENT`` steps."""

    step: int
    """The last of them."""
    rewards: list[float]
    """Their mean rewards."""


class Case:
    """Settings and the metrics so far: the first steps of the run, its last steps, and its evaluations."""

    def __init__(self, facts: Facts, limits: ThresholdsConfig) -> None:
        self.facts, self.limits = facts, limits
        self.first: list[Metrics] = []
        self.last: deque[Metrics] = deque(maxlen=WINDOW)
        self.evaluations: deque[tuple[Window, Metrics]] = deque(maxlen=EVALUATIONS)
        """The steps before (with its rewards, if there were any), and the metrics."""
        self.best: Window | None = None
        """The steps with the highest mean reward."""
        self.still: dict[str, list[float]] = {}
        """The rewards when a metric was last where it started."""
        self.binary = True
        """Whether every reward so far can have been 0 or 1."""
        self.steps = 0
        """Steps with metrics of updates."""
        self.highest, self.lowest = float("-inf"), float("inf")
        """Of the mean rewards of groups (10% and 90% quantiles) and of steps."""

    def add(self, metrics: Metrics) -> None:
        """Take a line of ``metrics.jsonl``."""
        if "updates" in metrics:  # not the evaluation before the first step
            self.steps += 1
            self.last.append(metrics)
            if len(self.first) < START:
                self.first.append(metrics)
            for key in ("groups/mean_reward_q90", "groups/mean_reward_q10", "reward/mean"):
                if (value := number(metrics, key)) is not None:
                    self.highest, self.lowest = max(self.highest, value), min(self.lowest, value)
            self._remember(metrics)
        if any(key.startswith("eval/") for key in metrics):
            self.evaluations.append((Window(int(metrics["step"]), self.values("reward/mean", RECENT)), metrics))

    def _remember(self, metrics: Metrics) -> None:
        """Keep what later steps are compared with."""
        rewards = self.values("reward/mean", RECENT)
        if len(rewards) == RECENT and (self.best is None or fmean(rewards) > fmean(self.best.rewards)):
            self.best = Window(int(metrics["step"]), rewards)
        for key, near in STILL.items():
            before, after = mean(self.start(key)), mean(self.values(key)[-START:])
            if before and after and before * after > 0 and abs(math.log(after / before)) <= near:
                self.still[key] = rewards
        reward, spread = number(metrics, "reward/mean"), number(metrics, "reward/std")
        if reward is not None:  # the variance of 0s and 1s follows from their mean
            self.binary &= 0 <= reward <= 1 and (spread is None or abs(spread**2 - reward * (1 - reward)) < 1e-6)

    @property
    def now(self) -> Metrics:
        """The metrics of this step."""
        return self.last[-1]

    def recent(self, count: int = WINDOW) -> Sequence[Metrics]:
        """The last steps, at most ``count``, in order."""
        return list(islice(self.last, max(0, len(self.last) - count), None))

    def values(self, key: str, count: int = WINDOW) -> list[float]:
        """The numbers of the last steps under a key; steps without one are left out."""
        return list(_numbers(self.recent(count), key))

    def start(self, key: str) -> list[float]:
        """The numbers of the first steps under a key."""
        return list(_numbers(self.first, key))

    def mean(self, key: str, count: int = WINDOW) -> float | None:
        """The mean over the last steps."""
        return mean(self.values(key, count))

    def since_start(self, key: str, count: int = RECENT) -> tuple[float | None, float | None, float]:
        """Mean over the first steps, mean over the last ``count`` numbers, and their difference in standard errors.
        None where the two windows would overlap."""
        if self.steps < START + count:
            return None, None, 0.0
        before, after = self.start(key), self.values(key)[-count:]
        return mean(before), mean(after), differs(before, after)

    def risen(self, key: str) -> bool:
        """Whether the reward is higher than when a metric began to move, and has not fallen since."""
        before = self.still.get(key) or self.start("reward/mean")
        return differs(before, self.values("reward/mean", RECENT)) > RISES and not self.fallen(0.1)

    def fallen(self, share: float) -> bool:
        """Whether the reward is below its best, by a share of what that is above the lowest reward known. The best is
        the highest of many windows, which one low window would often be far below by chance: it takes two in a row."""
        rewards = self.values("reward/mean")
        if self.best is None or len(rewards) < 2 * RECENT:
            return False
        high, spread = fmean(self.best.rewards), variance(self.best.rewards)
        least = max(share * (high - self.lowest), TINY * max(1.0, abs(high)))
        for window in (rewards[-2 * RECENT : -RECENT], rewards[-RECENT:]):
            error = math.sqrt((max(variance(window), spread) + spread) / RECENT)
            if high - fmean(window) <= max(least, FALLS * error):
                return False
        return True

    def rising(self) -> bool:
        """Whether the reward has risen within the last steps."""
        rewards = self.values("reward/mean", RECENT)
        return differs(rewards[: len(rewards) // 2], rewards[len(rewards) // 2 :]) > RISES

    def groups(self, count: int = RECENT) -> float:
        """Groups sampled in the last steps."""
        return sum(self.values("groups/sampled", count))

    def share(self, key: str, count: int = RECENT) -> tuple[float, float, float]:
        """The share of the last steps under a key, weighted by their groups, with its confidence interval.

        The completions of a prompt resemble each other, so the interval counts prompts: of shares of completions it is
        wider than necessary.
        """
        pairs = [(number(one, key), number(one, "groups/sampled") or 1.0) for one in self.recent(count)]
        known = [(value, groups) for value, groups in pairs if value is not None]
        total = sum(groups for _, groups in known)
        found = sum(value * groups for value, groups in known)
        return found / total if total else 0.0, *share_interval(found, total)

    def ends_of_dead(self, count: int = RECENT) -> tuple[float, float]:
        """The shares of the last steps' groups whose equal rewards are the highest, and the lowest, that are known."""
        ends = [(self._ends(one), number(one, "groups/sampled") or 1.0) for one in self.recent(count)]
        total = sum(groups for _, groups in ends)
        right, wrong = (sum(end[side] * groups for end, groups in ends) for side in (0, 1))
        return (right / total, wrong / total) if total else (0.0, 0.0)

    def _ends(self, metrics: Metrics) -> tuple[float, float]:
        high, low = (number(metrics, f"groups/dead_{end}_share") for end in ("high", "low"))
        if high is not None and low is not None:
            return high, low
        dead, reward = number(metrics, "groups/dead_share"), number(metrics, "reward/mean")
        if dead is None or reward is None or dead < 1:
            return 0.0, 0.0
        if not self.binary and self.highest == self.lowest:
            return 0.0, 0.0  # every reward of the run is equal: nothing says whether it is a good one
        middle = 0.5 if self.binary else (self.highest + self.lowest) / 2
        return (dead, 0.0) if reward > middle else (0.0, dead)


def _numbers(lines: Sequence[Metrics], key: str) -> Iterator[float]:
    for metrics in lines:
        if (value := number(metrics, key)) is not None:
            yield value
