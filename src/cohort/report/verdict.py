"""Which of two groups of runs is better, by how much, with what certainty: at equal updates, tokens and seconds.

The reward is compared where both have spent the same: the smallest amount that all runs have reached. Its value there
is that of an evaluation within 5% of it. If the runs lack one, the largest amount from the half on near which all were
evaluated takes its place; else the mean training reward over the last fifth of it decides.

What the certainty is about depends on what is there, best first:

1. Runs with the same seeds on both sides: paired differences, Student's t over seeds. Several runs with other seeds:
   Welch's t. This is the only claim about the settings.
2. One run on a side, and the same evaluation prompts on both: paired over prompts, as in ``cohort eval``. It is about
   these two trained models, on prompts like these.
3. One run on a side, without stored evaluations: about these two runs and their training rewards. No model is called
   better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from cohort.report.history import MAX_NUMBER, RunHistory
from cohort.report.series import Group, interval, positions
from cohort.statistics import Estimate, Floats, compare, paired_t, welch_t

BUDGETS = ("updates", "tokens", "seconds")
WORDS = {"updates": "optimizer updates", "tokens": "drawn tokens", "seconds": "seconds of training", "step": "steps"}
REWARD_SETTINGS = ("reward.functions", "reward.weights")
NEAR = 0.05
"""An evaluation counts for a budget if it was made within this part of it: one before the training says nothing about a
budget that ends before the next one."""
LAST_PART = 0.2
"""The training reward is averaged over this part of the budget."""
BLOCKS = 10
"""Neighbouring steps are not independent, so the last part is divided in so many blocks, whose means nearly are."""
MAX_BUDGETS = 200
"""Places of evaluations that are tried as a budget."""
MAX_ROWS = 500_000
"""Completions of a stored evaluation that are read."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Two groups of runs compared at one budget. ``dataclasses.asdict`` makes JSON of it."""

    a: str
    """Label of the first group."""
    b: str
    axis: str
    """One of ``BUDGETS``."""
    budget: float
    """What both have spent on the axis."""
    metric: str
    """What is compared, such as "eval/reward" or "reward/mean"."""
    difference: float | None
    """Of the means, second minus first; None: they cannot be compared."""
    low: float | None
    """The interval of the difference; None: there is none."""
    high: float | None
    p_value: float | None
    """Two-sided, of the hypothesis that the groups do not differ; None where it is not computed."""
    confidence: float
    over: str
    """What the interval is over: "seeds", "prompts", "blocks of steps"; empty without an interval."""
    count: int
    """How many of these."""
    paired: bool
    better: str | None
    """The label of the better group, if a difference can be claimed."""
    text: str
    """All of it as a sentence."""
    caveat: str
    """What the certainty does not cover, as a sentence."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two groups at a budget."""

    a: Group
    b: Group
    axis: str
    budget: float
    confidence: float

    def one_run_each(self) -> tuple[RunHistory, RunHistory]:
        """Runs with the same seed if there are some, else the first ones."""
        by_seed = {repr(seed): run for seed, run in zip(self.a.seeds, self.a.runs, strict=True)}
        pairs = [
            (by_seed[repr(seed)], run)
            for seed, run in zip(self.b.seeds, self.b.runs, strict=True)
            if repr(seed) in by_seed
        ]
        return pairs[0] if pairs else (self.a.runs[0], self.b.runs[0])


@dataclass(frozen=True, slots=True)
class _Evidence:
    """An estimate of the difference, second group minus first."""

    estimate: Estimate
    p_value: float
    over: str
    count: int
    paired: bool
    shown: bool
    basis: str
    """What it rests on, in words."""
    caveat: str = ""


def verdicts(groups: Sequence[Group], confidence: float = 0.95, metric: str | None = None) -> list[Verdict]:
    """Every two groups compared at each budget. Of many comparisons some find a difference by chance: at 95% one in 20.

    Args:
        groups: as ``series.grouped`` makes them; of fewer than two, there is no verdict. With more than five, all are
            compared with the first only.
        confidence: confidence level of the intervals.
        metric: a key of ``metrics.jsonl`` of which more is better. None: the first of ``common_metrics`` that both
            have values of at the budget.
    """
    pairs = list(combinations(groups, 2)) if len(groups) <= 5 else [(groups[0], other) for other in groups[1:]]
    return [verdict(a, b, axis, confidence, metric) for a, b in pairs for axis in BUDGETS]


def verdict(a: Group, b: Group, axis: str, confidence: float = 0.95, metric: str | None = None) -> Verdict:
    """Two groups compared at one budget; arguments as of ``verdicts``."""
    reached = {
        group.label: min(max(positions(run, axis).values(), default=0.0) for run in group.runs) for group in (a, b)
    }
    pair = _Pair(a, b, axis, min(reached.values()), confidence)
    if not pair.budget:
        lacking = " and ".join(label for label, budget in reached.items() if not budget)
        return _undecided(pair, metric or "", f"the metrics of {lacking} do not have them")
    for key in [metric] if metric else common_metrics(a, b):
        at = replace(pair, budget=_comparable(pair, key))
        for method in (_over_seeds, _over_prompts, _over_blocks):
            if evidence := method(at, key):
                return _verdict(at, key, evidence)
    reason = f"{metric} has no values there" if metric else "the runs have no reward in common there"
    return _undecided(pair, metric or "", reason)


def _comparable(pair: _Pair, key: str) -> float:
    """The largest budget from the half on near which all runs were evaluated; of a training metric, and without any,
    the whole budget."""
    runs = (*pair.a.runs, *pair.b.runs)
    places = {positions(run, pair.axis).get(step, 0.0) for run in runs for step in run.series(key)[0]}
    earlier = sorted((x for x in places if pair.budget / 2 <= x < pair.budget), reverse=True)
    for budget in (pair.budget, *earlier[:MAX_BUDGETS]) if key.startswith("eval/") else ():
        if all(evaluated_at(run, key, pair.axis, budget) is not None for run in runs):
            return budget
    return pair.budget


def common_metrics(a: Group, b: Group) -> list[str]:
    """The rewards that all runs have, in the order in which they decide: of the evaluation sets, then of the training.

    Where the reward functions or their weights differ, sums of rewards mean different things: the rewards of single
    functions take their place, if both have some of the same name.
    """
    keys = [run.keys() for run in (*a.runs, *b.runs)]
    shared = [key for key in keys[0] if all(key in others for others in keys[1:])]
    scored = [[group.runs[0].flat_settings().get(name) for name in REWARD_SETTINGS] for group in (a, b)]
    whole = scored[0] == scored[1]
    found = [key for key in shared if _is_reward(key, whole=whole)]
    return sorted(found, key=lambda key: not key.startswith("eval/"))


def _is_reward(key: str, *, whole: bool) -> bool:
    if key.startswith("eval/") and not key.endswith("/mean"):
        return False
    name = parts_of(key)[1]
    return name == "reward" if whole else name.startswith("rewards/") and name.count("/") == 1


def parts_of(key: str) -> tuple[str, str]:
    """The evaluation set in a metric's name, and the column of stored tables that the metric is the mean of.

    >>> parts_of("eval/gsm8k/rewards/math/mean"), parts_of("eval/reward/mean"), parts_of("rewards/math")
    (('gsm8k', 'rewards/math'), ('', 'reward'), ('', 'rewards/math'))
    """
    name = key.removesuffix("/mean")
    if not name.startswith("eval/"):
        return "", name
    before, marker, function = name.removeprefix("eval/").partition("rewards/")
    if marker:
        return before.rstrip("/"), marker + function
    before, _, column = before.rpartition("/")
    return before, column


def _over_seeds(pair: _Pair, key: str) -> _Evidence | None:
    """Several runs on both sides."""
    a, b = (
        {
            repr(seed): value
            for seed, run in zip(group.seeds, group.runs, strict=True)
            if (value := value_at(run, key, pair.axis, pair.budget)) is not None
        }
        for group in (pair.a, pair.b)
    )
    shared = [seed for seed in a if seed in b]
    if len(shared) >= 2:
        estimate, p_value = paired_t(np.array([b[seed] - a[seed] for seed in shared]), pair.confidence)
        basis, paired = f"{len(shared)} paired seeds", True
    elif min(len(a), len(b)) >= 2:
        estimate, p_value = welch_t(np.array(list(b.values())), np.array(list(a.values())), pair.confidence)
        basis, paired = f"{len(a)} and {len(b)} seeds, not paired", False
    else:
        return None
    count = len(shared) if paired else min(len(a), len(b))
    caveat = "With two seeds only a very large difference can be shown: add seeds." if count == 2 else ""
    shown = estimate.has_interval and not estimate.low <= 0 <= estimate.high
    return _Evidence(estimate, p_value, "seeds", count, paired, shown, basis, caveat)


def _over_prompts(pair: _Pair, key: str) -> _Evidence | None:
    """One run on each side, evaluated near the budget: paired over prompts, or from the logged intervals."""
    if not key.startswith("eval/"):
        return None
    runs = pair.one_run_each()
    steps = [step for run in runs if (step := evaluated_at(run, key, pair.axis, pair.budget)) is not None]
    if len(steps) < 2:
        return None
    name, column = parts_of(key)
    files = [run.evaluation_files.get((step, name)) for run, step in zip(runs, steps, strict=True)]
    a, b = (per_prompt(file, column) if file else {} for file in files)
    shared = [prompt for prompt in a if prompt in b]
    caveat = "One run each: another seed may turn out otherwise."
    if len(shared) >= 2:
        b_P, a_P = (np.array([one[prompt] for prompt in shared]) for one in (b, a))
        found = compare(b_P, a_P, pair.confidence)
        basis = f"one run each, paired over {len(shared):,} evaluation prompts"
        shown = found.shown(pair.confidence)
        return _Evidence(found.difference, found.p_value, "prompts", len(shared), True, shown, basis, caveat)
    lines = [next(line for line in run.metrics if line["step"] == step) for run, step in zip(runs, steps, strict=True)]
    first, second = (interval(line, key) for line in lines)
    mean = lines[1][key] - lines[0][key]
    if first is None or second is None:
        return _Evidence(Estimate(mean, math.nan, math.nan), math.nan, "", 0, False, False, "one run each", caveat)
    # The halves of two intervals add up as their standard errors do: by their squares.
    half = math.hypot(first[1] - first[0], second[1] - second[0]) / 2
    basis = "one run each, from the intervals of both over their evaluation prompts"
    return _Evidence(
        Estimate(mean, mean - half, mean + half), math.nan, "prompts", 0, False, abs(mean) > half, basis, caveat
    )


def _over_blocks(pair: _Pair, key: str) -> _Evidence | None:
    """One run on each side: the metric in the last part of the budget, block by block."""
    if key.startswith("eval/"):
        return None
    ends = [_last_part(run, key, pair.axis, pair.budget) for run in pair.one_run_each()]
    count = min(BLOCKS, *(len(x) for x, _ in ends))
    if not count:
        return None
    a, b = (_block_means(x, y, pair.budget, count) for x, y in ends)
    differences = (b - a)[~np.isnan(b - a)]
    estimate, p_value = paired_t(differences, pair.confidence)
    if len(differences) < 3:
        estimate = Estimate(float(ends[1][1].mean() - ends[0][1].mean()), math.nan, math.nan)
    basis = f"one run each, mean over the last {LAST_PART:.0%} of it"
    basis += f", in {len(differences)} blocks" if estimate.has_interval else ", too few steps for an interval"
    caveat = (
        "One run each, compared by the rewards that they trained on: another seed may turn out otherwise, and an "
        "evaluation (data.eval) or more seeds would tell more."
    )
    shown = estimate.has_interval and not estimate.low <= 0 <= estimate.high
    return _Evidence(estimate, p_value, "blocks of steps", len(differences), True, shown, basis, caveat)


def value_at(run: RunHistory, key: str, axis: str, budget: float) -> float | None:
    """A metric of a run when it had spent a budget. Of an evaluation: that of ``evaluated_at``. Of the training: the
    mean over the last ``LAST_PART`` of the budget. None without values there."""
    if key.startswith("eval/"):
        step = evaluated_at(run, key, axis, budget)
        return None if step is None else dict(zip(*run.series(key), strict=True))[step]
    _, values = _last_part(run, key, axis, budget)
    return float(values.mean()) if len(values) else None


def evaluated_at(run: RunHistory, key: str, axis: str, budget: float) -> int | None:
    """The step of the evaluation nearest to a budget; None if it is more than ``NEAR`` of the budget away."""
    places = positions(run, axis)
    near = [(abs(places[step] - budget), step) for step in run.series(key)[0] if step in places]
    distance, step = min(near, default=(math.inf, 0))
    return step if distance <= NEAR * budget else None


def per_prompt(file: Path, column: str) -> dict[tuple[Any, Any], float]:
    """The mean of a column for each prompt of a stored table, by the prompt's row in the data set and its text. Null is
    left out; a prompt without any value has NaN. Empty if the table is damaged, larger than ``MAX_ROWS``, or lacks the
    column."""
    try:
        table = pyarrow.parquet.ParquetFile(file)
        if table.metadata.num_rows > MAX_ROWS:
            return {}
        read = table.read(columns=["row", "prompt", column])
        means = read.group_by(["row", "prompt"]).aggregate([(column, "mean")])
        keys = zip(means["row"].to_pylist(), means["prompt"].to_pylist(), strict=True)
        values = (math.nan if value is None else float(value) for value in means[f"{column}_mean"].to_pylist())
        return {key: value if abs(value) < MAX_NUMBER else math.nan for key, value in zip(keys, values, strict=True)}
    except (OSError, ValueError, TypeError, LookupError, pyarrow.ArrowException):
        return {}


def _last_part(run: RunHistory, key: str, axis: str, budget: float) -> tuple[Floats, Floats]:
    places = positions(run, axis)
    pairs = [(places[step], value) for step, value in zip(*run.series(key), strict=True) if step in places]
    kept = [(x, value) for x, value in pairs if (1 - LAST_PART) * budget < x <= budget]
    return np.array([x for x, _ in kept]), np.array([value for _, value in kept])


def _block_means(x: Floats, values: Floats, budget: float, count: int) -> Floats:
    """The means of ``count`` equal parts of the last part of a budget; NaN for one without points."""
    at = (x / budget - (1 - LAST_PART)) / LAST_PART * count
    block = np.clip(np.ceil(at - 1e-9).astype(int) - 1, 0, count - 1)
    sums, counts = np.bincount(block, values, count), np.bincount(block, minlength=count)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _verdict(pair: _Pair, key: str, evidence: _Evidence) -> Verdict:
    mean, low, high = evidence.estimate.mean, evidence.estimate.low, evidence.estimate.high
    known = evidence.estimate.has_interval
    trained_on = evidence.over == "blocks of steps"
    better, other = (pair.b.label, pair.a.label) if mean > 0 else (pair.a.label, pair.b.label)
    name, column = parts_of(key)
    what = f"{'evaluation' if key.startswith('eval/') else 'training'} {column}" + (f" on {name}" if name else "")
    sign = -1 if evidence.shown and mean < 0 else 1
    bounds = sorted((sign * low, sign * high))
    certainty = f"{100 * pair.confidence:g}%: {bounds[0]:.3g} to {bounds[1]:.3g}" if known else "no interval"
    where = f"at equal {WORDS[pair.axis]} ({pair.budget:,.0f}); {evidence.basis}"
    if evidence.shown and trained_on:
        text = f"{better} had more {what} than {other} by {abs(mean):.3g} ({certainty}) {where}"
    elif evidence.shown:
        text = f"{better} is better than {other} by {abs(mean):.3g} {what} ({certainty}) {where}"
    else:
        text = f"no difference can be claimed: {pair.b.label} minus {pair.a.label} is {mean:.3g} {what} "
        text += f"({certainty}) {where}"
    caveat = evidence.caveat
    if pair.axis == "seconds" and len(machines := _machines(pair)) > 1:
        caveat = f"The runs were made on different machines ({'; '.join(machines)}). {caveat}".strip()
    return Verdict(
        a=pair.a.label,
        b=pair.b.label,
        axis=pair.axis,
        budget=pair.budget,
        metric=key,
        difference=mean,
        low=low if known else None,
        high=high if known else None,
        p_value=None if math.isnan(evidence.p_value) else evidence.p_value,
        confidence=pair.confidence,
        over=evidence.over,
        count=evidence.count,
        paired=evidence.paired,
        better=better if evidence.shown and not trained_on else None,
        text=text,
        caveat=caveat,
    )


def _undecided(pair: _Pair, key: str, reason: str) -> Verdict:
    text = f"{pair.a.label} and {pair.b.label} cannot be compared at equal {WORDS[pair.axis]}: {reason}"
    return Verdict(
        a=pair.a.label,
        b=pair.b.label,
        axis=pair.axis,
        budget=pair.budget,
        metric=key,
        difference=None,
        low=None,
        high=None,
        p_value=None,
        confidence=pair.confidence,
        over="",
        count=0,
        paired=False,
        better=None,
        text=text,
        caveat="",
    )


def _machines(pair: _Pair) -> list[str]:
    """The machines that the runs were started on, as far as they are recorded."""
    facts = [start.get("facts") for run in (*pair.a.runs, *pair.b.runs) for start in run.starts]
    names = (f"{one.get('machine')}, {one.get('threads')} threads" for one in facts if isinstance(one, dict))
    return list(dict.fromkeys(name[:80] for name in names))
