"""The state of a run in progress, from its metrics: what the live display shows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cohort.report.diagnosis import Diagnosis, Finding, worst
from cohort.report.diagnosis.case import number as number_of
from cohort.report.series import parts_of, reward_functions
from cohort.report.words import PHASES, clean, number, share
from cohort.runs.reader import MAX_STEP, Run

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
                mean, spread = number_of(metrics, key), number_of(metrics, f"{key}/std")
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


# ----------------------------------------
# One hint on the time of a step: what takes much of it, and what to do.


REWARDS, FILES, WAITING, SAMPLING = 0.25, 0.25, 0.3, 0.8
"""Shares of the time from which a hint is worth reading."""


def hint(seconds: Seconds, settings: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """What to do about the phase that takes more than it should; empty if none does.

    Args:
        seconds: where the time of the latest steps went.
        settings: the run's, as nested tables.
        metrics: of the latest step.
    """
    shares = seconds.shares
    if (part := shares.get("rewards", 0.0)) >= REWARDS:
        slowest = max(seconds.functions, key=lambda name: seconds.functions[name], default="")
        which = f", most of it in {slowest}" if len(seconds.functions) > 1 else ""
        how = "set reward.workers, or make the functions async, to score while sampling goes on"
        if _setting(settings, "reward", "workers"):
            how = "raise reward.workers, or make the functions faster"
        return f"rewards take {part:.0%} of the step{which}: {how}"
    if (part := shares.get(BETWEEN, 0.0)) >= FILES:
        rare = [f"{table}.{key}" for table, key in (("eval", "eval_steps"), ("run", "save_steps"))]
        rare = [name for name in rare if _is_on(settings, *name.split("."))]
        how = f"raise {' or '.join(rare)}" if rare else "files, trackers or callbacks are slow"
        return f"{BETWEEN} take {part:.0%} of the time: {how}"
    if (part := shares.get("waiting for the rollout", 0.0)) >= WAITING:
        return f"training waits for its rollout {part:.0%} of the time: {_faster_rollout(seconds, settings)}"
    blocked = metrics.get("seconds/episodes_blocked")
    if blocked and seconds.step and (part := blocked / seconds.step) >= REWARDS:
        return f"sampling waits for tools and environments {part:.0%} of the step: raise environment.tool_workers"
    if (part := shares.get("sampling", 0.0)) >= SAMPLING and _setting(settings, "rollout", "engine") != "vllm":
        how = 'shorter completions cost less, and on a GPU rollout.engine = "vllm" samples faster'
        return f"sampling takes {part:.0%} of the step: {how}"
    return ""


def _faster_rollout(seconds: Seconds, settings: Mapping[str, Any]) -> str:
    """What to do when a rollout in the background takes longer than a step."""
    if sum(seconds.functions.values()) >= seconds.step / 2:
        return "raise reward.workers, or make the reward functions faster"
    if _setting(settings, "rollout", "engine") == "vllm":
        return "add servers to vllm.url, or lower rollout.max_completion_length"
    return 'lower rollout.max_completion_length, or on a GPU set rollout.engine = "vllm"'


def _is_on(settings: Mapping[str, Any], section: str, key: str) -> bool:
    value = _setting(settings, section, key)
    return isinstance(value, int) and value > 0


def _setting(settings: Mapping[str, Any], section: str, key: str) -> Any:
    table = settings.get(section)
    return table.get(key) if isinstance(table, Mapping) else None


# ----------------------------------------
# Steps and evaluations in one line each.


def step_line(metrics: dict[str, Any], *, groups_can_die: bool = True) -> str:
    """One line about a step. It has no loss, whose value means nothing in GRPO."""
    parts = [f"reward {number(metrics.get('reward/mean'))}"]
    parts += [f"{name} {number(metrics[key])}" for name, key in reward_functions(metrics).items()]
    if groups_can_die and "groups/dead_share" in metrics:
        parts.append(f"dead groups {share(metrics['groups/dead_share'])}")
    if (metrics.get("groups/rounds") or 0) > 1:
        sampled, left_out = (number(metrics.get(f"groups/{key}"), "g") for key in ("sampled", "left_out"))
        parts.append(f"{sampled} groups sampled, {left_out} left out")
    if "episodes/turns" in metrics:
        parts.append(f"turns {number(metrics['episodes/turns'], '.1f')}")
        if calls := metrics.get("episodes/calls"):
            failed = metrics.get("episodes/failed_call_share")
            parts.append(f"calls {calls:.2f}" + (f" ({failed:.0%} failed)" if failed else ""))
        if metrics.get("episodes/failed"):
            parts.append(f"{metrics['episodes/failed']} episodes failed")
    if "entropy" in metrics:
        parts.append(f"entropy {number(metrics['entropy'], '.4f')}")
    if "kl/k3" in metrics:
        parts.append(f"KL {number(metrics['kl/k3'], '.4f')}")
    parts.append(f"{number(metrics.get('tokens_per_second'), ',.0f')} tokens/s")
    return "  ".join(parts)


def evaluation_line(metrics: dict[str, Any], when: str, success: str = "") -> str:
    """Rewards, pass@k and maj@k of an evaluation with their intervals, set by set.

    Args:
        metrics: the metrics of a step.
        when: when it was, in words.
        success: what decides that a completion is correct, as in "math >= 1"; empty: unknown.
    """
    sets: dict[str, list[str]] = {}
    for key, mean in metrics.items():
        name, metric = parts_of(key)
        if key.startswith("eval/") and key.endswith("/mean") and metric not in ("length", "cut_share"):
            low, high = (metrics.get(key.removesuffix("mean") + end) for end in ("low", "high"))
            interval = "" if low is None or high is None else f" ({number(low)} to {number(high)})"
            title = metric.removeprefix("rewards/") + (f" by {success}" if success and "@" in metric else "")
            sets.setdefault(name, []).append(f"{title} {number(mean)}{interval}")
    found = [f"{name}: " * bool(name) + ", ".join(parts) for name, parts in sets.items()]
    return f"evaluation {when}: " + "; ".join(found)


def best_lines(summary: dict[str, Any]) -> list[str]:
    """The best model and early stopping in words; empty without either."""
    lines = []
    if best := summary.get("best"):
        value = f"{best['metric']} {number(best['value'])}"
        lines.append(f"best: {value} after step {best['step']}, kept in {summary['output_dir']}/best")
    if summary.get("stopped_early"):
        patience = "no better evaluation within eval.early_stopping_patience"
        lines.append(f"stopped early after step {summary['steps']}: {patience}")
    return lines


# ----------------------------------------
# A run as the terminal follows it: its progress, and the diagnosis of each step in words.


QUIET = ("value_zero",)
"""Notes on what is normal at the first update of every run: reports and ``cohort diagnose`` have them."""


class RunState:
    """The progress and the diagnosis of a run, fed with the lines of its ``metrics.jsonl`` in order.

    Args:
        folder: the run folder, whose settings are read. None: the defaults.
        steps: steps of the whole run; None: unknown.
    """

    def __init__(self, folder: Path | None = None, steps: int | None = None) -> None:
        self.folder = folder
        self.settings = Run(folder).settings if folder else {}
        self.progress = RunProgress(steps=steps)
        self.is_going = True
        """Whether a process trains it, so that there is a time left."""
        self._diagnosis = Diagnosis(self.settings)

    def add(self, metrics: dict[str, Any]) -> list[str]:
        """Take a step's metrics; return what is new to say: findings that begin, worsen or end, and the evaluation."""
        progress = self.progress
        progress.add(metrics)
        said = [finding_text(one) for one in self._diagnosis.step_or_log(metrics) if one.check not in QUIET]
        if metrics["step"]:
            progress.health = self._diagnosis.health
            progress.level = worst(self._diagnosis.findings) or "note"
        if any(key.startswith("eval/") for key in metrics):
            step = metrics["step"]
            when = f"after step {step}" if step else "before training"
            said.append(clean(evaluation_line(metrics, when, success_of(self.settings))))
        return said

    @property
    def groups_compared(self) -> bool:
        """Whether a group of equal rewards teaches nothing, so that the share of dead groups says something."""
        return self._diagnosis.groups_compared

    def standing(self) -> list[str]:
        """The warnings and alarms that stand, in words."""
        return [finding_text(one) for one in self._diagnosis.standing if one.level != "note"]


def success_of(settings: dict[str, Any]) -> str:
    """What counts as correct in the evaluations of a run, from its settings; empty if they do not say.

    >>> success_of({"eval": {"success": "math", "success_threshold": 0.5}})
    'math >= 0.5'
    >>> success_of({"reward": {"functions": ["/data/rewards.py:digits(n=2)"]}})
    'digits >= 1'
    """
    chosen, functions = settings.get("eval", {}), settings.get("reward", {}).get("functions", [])
    function = chosen.get("success") or (functions[0] if len(functions) == 1 else "")
    function = function.partition("(")[0].rpartition(":")[2]  # as the metrics name it
    return f"{function} >= {number(chosen.get('success_threshold', 1.0), 'g')}" if function else ""


def starts_of(run: Run) -> tuple[list[int], int | None]:
    """The steps after which processes started or resumed a run, and the steps of the whole run by the last of them;
    None: unknown."""
    after, steps = [], None
    for start in run.starts:
        if type(step := start.get("step")) is int:
            after.append(step)
        if type(count := start.get("steps")) is int and 0 < count < MAX_STEP:
            steps = count
    return after, steps


def finding_text(finding: Finding) -> str:
    """A finding for the terminal: when it begins or worsens, what to do; or that it has ended.

    >>> print(finding_text(Finding("all_right", "warning", 7, "every answer is right.", "Take harder prompts.")))
    step 7: warning (all_right): every answer is right.
      -> Take harder prompts.
    """
    if finding.end is not None:
        return f"step {finding.end}: ended ({finding.check})"
    text = f"step {finding.step}: {finding.level} ({finding.check}): {finding.found}"
    return clean(f"{text}\n  -> {finding.advice}" if finding.advice else text)
