"""A run as the checks see it: what they need of its settings, the thresholds, and the metrics so far."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from cohort.config.schema import ObjectiveConfig, Section, ThresholdsConfig
from cohort.errors import ConfigError
from cohort.presets import Objective
from cohort.presets.parts import DynamicSampling

# ----------------------------------------
# Numbers of untrusted metrics, and what the checks compute from a few of them.


CONFIDENCE = 2.576
"""Standard errors of a two-sided interval of 99%: with a looser one, some run of thousands would look ill by chance."""

LARGEST = 1e100
"""Numbers beyond are no measurement, and their squares would overflow."""


def number(metrics: Mapping[str, Any], key: str) -> float | None:
    """A number within ``LARGEST``; None for whatever else a line of ``metrics.jsonl`` has under the key."""
    value = metrics.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= LARGEST else None


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def share_interval(count: float, total: float) -> tuple[float, float]:
    """Wilson's score interval of a share of ``count`` in ``total``, (0, 1) of nothing. E. B. Wilson, 1927.

    >>> [round(end, 3) for end in share_interval(10, 10)]
    [0.601, 1.0]
    """
    if total <= 0:
        return 0.0, 1.0
    share, squared = min(1.0, max(0.0, count / total)), CONFIDENCE**2 / total
    centre = share + squared / 2
    spread = CONFIDENCE * math.sqrt(share * (1 - share) / total + squared / (4 * total))
    return max(0.0, (centre - spread) / (1 + squared)), min(1.0, (centre + spread) / (1 + squared))


def differs(before: Sequence[float], after: Sequence[float]) -> float:
    """The difference of two means in standard errors (Welch). 0 with fewer than two numbers on a side; infinite if
    neither side varies.

    >>> differs([1, 2, 3], [1, 2, 3]), differs([0, 0], [1, 1])
    (0.0, inf)
    """
    if len(before) < 2 or len(after) < 2:
        return 0.0
    difference = math.fsum(after) / len(after) - math.fsum(before) / len(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def variance(values: Sequence[float]) -> float:
    """Divided by n - 1."""
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


# ----------------------------------------
# What the checks need to know of a run's settings.


@dataclass(frozen=True, slots=True)
class Facts:
    """A run's settings as the checks use them. What is absent or unreadable has its default, so that a run folder of
    another version can be looked at."""

    objective: Objective
    updates: int = 1
    """Updates of a rollout."""
    prompts: int = 8
    """Prompts of a step."""
    generations: int = 8
    """Completions of a prompt."""
    max_length: int = 256
    """``rollout.max_completion_length``."""
    fixed_length: bool = False
    """Whether every completion is to reach that length."""
    learning_rate: float = 0.0
    """Its highest value."""
    weights: tuple[float, ...] | None = None
    """Of the reward functions. None: all 1."""
    truncates: bool = False
    """Whether sampling leaves tokens out that the update does not: ``rollout.replay_sampling`` is off."""
    confidence: float = 0.95
    """Of the intervals of evaluations."""
    skip: frozenset[str] = frozenset()
    """Checks that are left out."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Facts:
        """The facts of settings as a file has them: nothing in it is trusted, and no file that it names is read."""
        names = ("rollout", "objective", "reward", "optim", "report")
        rollout, objective, reward, optim, report = (_table(settings, name) for name in names)
        skip = report.get("skip_checks")
        confidence = _number(_table(settings, "eval"), "confidence", 0.95)
        return cls(
            objective=(resolved := _objective(objective)),
            updates=_positive(objective, "num_iterations", 1)
            * _positive(objective, "minibatches", resolved.minibatches),
            prompts=_positive(rollout, "prompts_per_step", 8),
            generations=_positive(rollout, "num_generations", 8),
            max_length=(longest := _positive(rollout, "max_completion_length", 256)),
            fixed_length=_positive(rollout, "min_completion_length", 0) >= longest,
            learning_rate=_number(optim, "learning_rate", 0.0),
            weights=_numbers_of(reward.get("weights")),
            truncates=_truncates(rollout) and rollout.get("replay_sampling") is False,
            confidence=confidence if 0 < confidence < 1 else 0.95,
            skip=frozenset(str(name) for name in skip) if isinstance(skip, list | tuple) else frozenset(),
        )

    @property
    def groups_compared(self) -> bool:
        """Whether a group of equal rewards teaches nothing."""
        return self.objective.group_relative and self.objective.credit in ("outcome", "return_to_go")

    @property
    def resamples(self) -> bool:
        """Whether groups of equal rewards are sampled anew."""
        return isinstance(self.objective.group_filter, DynamicSampling)


def _truncates(rollout: Mapping[str, Any]) -> bool:
    """Whether tokens are drawn from less than the full softmax (docs/metrics.md, "Sampler and trainer")."""
    numbers = any(_number(rollout, key, 0.0) > 0 for key in ("top_k", "min_p", "min_completion_length"))
    grammar = any(rollout.get(key) for key in ("regex", "json_schema"))
    return numbers or bool(grammar) or any(_number(rollout, key, 1.0) != 1 for key in ("top_p", "repetition_penalty"))


def thresholds_of(settings: Mapping[str, Any]) -> ThresholdsConfig:
    """``[report.thresholds]`` as a file has it; a number that is invalid has its default."""
    table = _table(_table(settings, "report"), "thresholds")
    return ThresholdsConfig(**_readable(ThresholdsConfig, table))


def _objective(table: Mapping[str, Any]) -> Objective:
    """The objective; the default one if this version does not know it."""
    try:
        return ObjectiveConfig(**_readable(ObjectiveConfig, table)).resolve()
    except (ConfigError, ValueError, TypeError):
        return ObjectiveConfig().resolve()


def _readable(section: type[Section], table: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a table that a section of settings accepts."""
    found: dict[str, Any] = {}
    for key in set(table) & set(section.model_fields):
        try:
            section(**{key: table[key]})
        except (ConfigError, ValueError, TypeError):
            continue
        found[key] = table[key]
    return found


def _table(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = settings.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = number(table, key)
    return default if value is None else value


def _positive(table: Mapping[str, Any], key: str, default: int) -> int:
    """An integer setting of at least 1."""
    value = table.get(key)
    return value if type(value) is int and 0 < value < LARGEST else default


def _numbers_of(values: Any) -> tuple[float, ...] | None:
    """A list of numbers; None for anything else."""
    if not isinstance(values, list | tuple):
        return None
    found = [number({"value": value}, "value") for value in values]
    return None if None in found else tuple(value for value in found if value is not None)


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
