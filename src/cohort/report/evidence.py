"""What the runs of two groups tell about a difference between them, at one budget: over seeds, over the evaluation's
prompts, or over the last steps of the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from cohort.report.files import MAX_NUMBER
from cohort.report.history import RunHistory
from cohort.report.labels import parts_of
from cohort.report.series import Group, interval, positions
from cohort.statistics import Estimate, Floats, compare, paired_t, welch_t

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
class Pair:
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
class Evidence:
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


def evidence(pair: Pair, key: str) -> Evidence | None:
    """The best there is about a metric; None where a group has no values near the budget."""
    return _over_seeds(pair, key) or _over_prompts(pair, key) or _over_blocks(pair, key)


def comparable(pair: Pair, key: str) -> float:
    """The largest budget from the half on near which all runs were evaluated; of a training metric, and without any,
    the whole budget."""
    runs = (*pair.a.runs, *pair.b.runs)
    places = {positions(run, pair.axis).get(step, 0.0) for run in runs for step in run.series(key)[0]}
    earlier = sorted((x for x in places if pair.budget / 2 <= x < pair.budget), reverse=True)
    for budget in (pair.budget, *earlier[:MAX_BUDGETS]) if key.startswith("eval/") else ():
        if all(evaluated_at(run, key, pair.axis, budget) is not None for run in runs):
            return budget
    return pair.budget


def _over_seeds(pair: Pair, key: str) -> Evidence | None:
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
    return Evidence(estimate, p_value, "seeds", count, paired, _excludes_zero(estimate), basis, caveat)


def _over_prompts(pair: Pair, key: str) -> Evidence | None:
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
        return Evidence(found.difference, found.p_value, "prompts", len(shared), True, shown, basis, caveat)
    lines = [next(line for line in run.metrics if line["step"] == step) for run, step in zip(runs, steps, strict=True)]
    first, second = (interval(line, key) for line in lines)
    mean = lines[1][key] - lines[0][key]
    if first is None or second is None:
        return Evidence(Estimate(mean, math.nan, math.nan), math.nan, "", 0, False, False, "one run each", caveat)
    # The halves of two intervals add up as their standard errors do: by their squares.
    half = math.hypot(first[1] - first[0], second[1] - second[0]) / 2
    basis = "one run each, from the intervals of both over their evaluation prompts"
    return Evidence(
        Estimate(mean, mean - half, mean + half), math.nan, "prompts", 0, False, abs(mean) > half, basis, caveat
    )


def _over_blocks(pair: Pair, key: str) -> Evidence | None:
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
    shown = _excludes_zero(estimate)
    return Evidence(estimate, p_value, "blocks of steps", len(differences), True, shown, basis, caveat)


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


def _excludes_zero(estimate: Estimate) -> bool:
    """Whether there is an interval, and 0 is outside of it."""
    return estimate.low > 0 or estimate.high < 0


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
