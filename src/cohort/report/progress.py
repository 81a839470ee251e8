"""A run as the terminal follows it: its course and diagnosis from the rows of its metrics, and steps in words."""

from __future__ import annotations

import math
import threading
from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cohort.report.diagnosis import Diagnosis, Finding
from cohort.report.diagnosis import number as number_of
from cohort.report.series import parts_of, reward_functions
from cohort.report.words import PHASES, clean, number, share
from cohort.runs.reader import MAX_STEP, Row, Run, flat

STEPS_OF_TIME = 100
"""The latest steps, from which the times are measured."""
ROUNDING = 1e-6
"""Difference of two variances of float32 numbers that are equal."""
BETWEEN = "evaluation and files"
"""What passes between the phases of two steps."""
QUIET = ("value_zero",)
"""Notes on what is normal at the first update of every run: reports and ``cohort diagnose`` have them."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of the latest steps went."""

    step: float
    """Seconds from one step to the next."""
    shares: dict[str, float]
    """Share of each phase by its name in words, largest first."""
    functions: dict[str, float]
    """Seconds of each reward function in a step, added up over concurrent calls."""


class Progress:
    """The course of a run and its diagnosis, fed with the rows of its ``metrics.jsonl`` in order. Only what is shown is
    kept of a row, and a row costs the same however long the run is.

    Args:
        run: its folder. None: there is none, and the settings are the defaults.
        steps: steps of the whole run; None: what its latest start says.
    """

    def __init__(self, run: Run | None = None, steps: int | None = None) -> None:
        self.run, self._steps = run, steps
        self.lock = threading.RLock()
        """Held while rows are taken, and by another thread while it reads what is here."""
        self.saved: int | None = None
        self._begin()

    def _begin(self) -> None:
        settings = self.run.settings if self.run else {}
        self.settings: dict[str, Any] = dict(flat(settings))
        self.diagnosis = Diagnosis(settings)
        self.row: Row = {"step": 0}
        """The latest step's."""
        self.courses: dict[str, array[float]] = {}
        """The finite values of the rewards, of each reward function and of the evaluations, by their keys."""
        self.graded: set[str] = set()
        """Keys of the reward functions that have given anything but 0 and 1: the mean of the others is an accuracy."""
        self.evaluations: list[Row] = []
        """The rows with the first and the latest evaluation."""
        self.recent: deque[Row] = deque(maxlen=STEPS_OF_TIME + 1)
        """The latest rows. One without a time keeps what passes around it out of the times."""
        self._read_starts()

    def _read_starts(self) -> None:
        starts = self.run.starts if self.run else []
        self.starts = [start.get("step") for start in starts]
        """Steps after which a process started or resumed the run: the time before the next one does not count."""
        counts = [count for start in starts if type(count := start.get("steps")) is int and 0 < count < MAX_STEP]
        self.steps = self._steps or (counts[-1] if counts else None)

    def look(self, before: float = math.inf) -> list[tuple[Row, list[str]]]:
        """Take the rows that are new in the run's folder, each with what there is to say of it. When the run was
        resumed, its file is another one: then all of it is new.

        Args:
            before: leave out rows of this step and later ones.
        """
        with self.lock:
            replaced, rows = self.run.refresh() if self.run else (False, [])
            self.look_for_checkpoints()
            if replaced:
                self._begin()
            elif rows:
                self._read_starts()
            return [(row, self.add(row)) for row in rows if row["step"] < before]

    def look_for_checkpoints(self) -> None:
        """Set ``saved`` to the step of the newest checkpoint in the run's folder; None without one."""
        self.saved = max(self.run.checkpoints, default=None) if self.run else None

    def add(self, row: Row) -> list[str]:
        """Take a step's row; return what is new to say: findings that begin, worsen or end, and the evaluation. Step 0
        is the evaluation before the first step."""
        step, functions = row["step"], reward_functions(row).values()
        with self.lock:
            said = [finding_text(one) for one in self.diagnosis.step_or_log(row) if one.check not in QUIET]
            self.recent.append(row)
            if step:
                self.row = row
            if any(key.startswith("eval/") for key in row):
                self.evaluations[1:] = [row]
                said.append(clean(evaluation_line(row, after(step), success_of(self.settings))))
            for key in ("eval/reward/mean", *(["reward/mean", *functions] if step else [])):
                if (value := number_of(row, key)) is not None:
                    self.courses.setdefault(key, array("d")).append(value)
            for key in functions:
                mean, spread = number_of(row, key), number_of(row, f"{key}/std")
                # The variance of 0s and 1s follows from their mean.
                if mean is not None and (spread is None or abs(spread * spread - mean * (1 - mean)) > ROUNDING):
                    self.graded.add(key)
        return said

    @property
    def time(self) -> float | None:
        """When the latest step ended, in seconds since 1970."""
        return number_of(self.recent[-1], "time") if self.recent else None

    def _timed(self) -> list[tuple[float, Row]]:
        """The latest steps with the seconds since the one before."""
        pairs = [(a.get("time"), b.get("time"), b) for a, b in pairwise(self.recent)]
        return [
            (end - begin, row)
            for begin, end, row in pairs
            if begin is not None and end is not None and end >= begin and row["step"] - 1 not in self.starts
        ]

    def walls(self) -> list[float]:
        """Seconds from one step to the next, of the latest steps."""
        return [wall for wall, _ in self._timed()]

    def seconds(self) -> Seconds | None:
        """Where the time of the latest steps went; None before two steps are complete."""
        if not (timed := self._timed()):
            return None
        summed = defaultdict[str, float](float)
        for _, row in timed:
            for key, value in row.items():
                if key.startswith("seconds/") and value:
                    summed[key[8:]] += value
        hidden = ("sampling", "rewards") if "rollout_wait" in summed else ()  # they have passed beside the training
        phases = {words: summed[key] for key, words in PHASES.items() if key in summed and words not in hidden}
        total = max(sum(wall for wall, _ in timed), sum(phases.values()))
        phases[BETWEEN] = total - sum(phases.values())
        return Seconds(
            total / len(timed),
            {words: phases[words] / total for words in sorted(phases, key=lambda one: -phases[one]) if total},
            {key[7:]: value / len(timed) for key, value in summed.items() if key.startswith("reward/")},
        )

    def time_left(self, now: float) -> float | None:
        """Seconds until the end of the run at the pace of the latest steps; None: unknown."""
        seconds = self.seconds()
        if seconds is None or self.steps is None or self.time is None:
            return None
        passed = min(max(0.0, now - self.time), seconds.step)  # of the present step, which may be late
        left: float = (self.steps - self.row["step"]) * seconds.step - passed
        return max(0.0, left)


def success_of(settings: Mapping[str, Any]) -> str:
    """What counts as correct in the evaluations of a run, from its settings by ``section.key``; empty if they do not
    say.

    >>> success_of({"eval.success": "math", "eval.success_threshold": 0.5})
    'math >= 0.5'
    >>> success_of({"reward.functions": ["/data/rewards.py:digits(n=2)"]})
    'digits >= 1'
    """
    functions = settings.get("reward.functions")
    only = functions[0] if isinstance(functions, list) and len(functions) == 1 else ""
    name = str(settings.get("eval.success") or only).partition("(")[0].rpartition(":")[2]  # as the metrics name it
    threshold = number_of(settings, "eval.success_threshold")
    return f"{name} >= {1.0 if threshold is None else threshold:g}" if name else ""


# ----------------------------------------
# One hint on the time of a step: what takes much of it, and what to do.


REWARDS, FILES, WAITING, SAMPLING = 0.25, 0.25, 0.3, 0.8
"""Shares of the time from which a hint is worth reading."""


def hint(seconds: Seconds, settings: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """What to do about the phase that takes more than it should; empty if none does.

    Args:
        seconds: where the time of the latest steps went.
        settings: the run's, by ``section.key``.
        row: the latest step's.
    """
    shares, functions, served = seconds.shares, seconds.functions, settings.get("rollout.engine")
    if (part := shares.get("rewards", 0.0)) >= REWARDS:
        which = f", most of it in {max(functions, key=functions.__getitem__)}" if len(functions) > 1 else ""
        how = "set reward.workers, or make the functions async, to score while sampling goes on"
        if settings.get("reward.workers"):
            how = "raise reward.workers, or make the functions faster"
        return f"rewards take {part:.0%} of the step{which}: {how}"
    if (part := shares.get(BETWEEN, 0.0)) >= FILES:
        rare = [name for name in ("eval.eval_steps", "run.save_steps") if (number_of(settings, name) or 0) > 0]
        how = f"raise {' or '.join(rare)}" if rare else "files, trackers or callbacks are slow"
        return f"{BETWEEN} take {part:.0%} of the time: {how}"
    if (part := shares.get("waiting for the rollout", 0.0)) >= WAITING:
        how = 'lower rollout.max_completion_length, or on a GPU set rollout.engine = "vllm"'
        if sum(functions.values()) >= seconds.step / 2:
            how = "raise reward.workers, or make the reward functions faster"
        elif served == "server":
            how = "add servers to server.url, or lower rollout.max_completion_length"
        return f"training waits for its rollout {part:.0%} of the time: {how}"
    blocked = row.get("seconds/episodes_blocked")
    if blocked and seconds.step and (part := blocked / seconds.step) >= REWARDS:
        return f"sampling waits for tools and environments {part:.0%} of the step: raise environment.tool_workers"
    if (part := shares.get("sampling", 0.0)) >= SAMPLING and served not in ("vllm", "server"):
        how = 'shorter completions cost less, and on a GPU rollout.engine = "vllm" samples faster'
        return f"sampling takes {part:.0%} of the step: {how}"
    return ""


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
    named = {"entropy": "entropy", "KL": "kl/k3"}
    parts += [f"{name} {number(metrics[key], '.4f')}" for name, key in named.items() if key in metrics]
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
    for name, metric, mean, interval in means_of(metrics):
        if metric not in ("length", "cut_share"):
            title = metric.removeprefix("rewards/") + (f" by {success}" if success and "@" in metric else "")
            sets.setdefault(name, []).append(f"{title} {mean}{interval}")
    found = [f"{name}: " * bool(name) + ", ".join(parts) for name, parts in sets.items()]
    return f"evaluation {when}: " + "; ".join(found)


def means_of(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """The means of an evaluation: set, column, and in words the mean and its interval."""
    for key, mean in metrics.items():
        if key.startswith("eval/") and key.endswith("/mean"):
            low, high = (metrics.get(key.removesuffix("mean") + end) for end in ("low", "high"))
            interval = "" if low is None or high is None else f" ({number(low)} to {number(high)})"
            yield *parts_of(key), number(mean), interval


def after(step: int) -> str:
    """When the evaluation of a step was, in words."""
    return f"after step {step}" if step else "before training"


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
