"""Which of two groups of runs is better, by how much, with what certainty: at equal updates, tokens or seconds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from cohort.config import GRPOConfig
from cohort.config.schema import marks_of
from cohort.report.series import Group, default_settings, interval, parts_of
from cohort.runs.reader import MAX_NUMBER, Run
from cohort.statistics import Estimate, Floats, compare, paired_t, welch_t

# ----------------------------------------
# What the runs of two groups tell about a difference between them, at one budget: over seeds, over the evaluation's
# prompts, or over the last steps of the training.


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

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of both."""
        return (*self.a.runs, *self.b.runs)

    def by_seed(self) -> tuple[dict[str, Run], dict[str, Run]]:
        """The runs of each by their seeds."""
        a, b = (dict(zip(map(repr, group.seeds), group.runs, strict=True)) for group in (self.a, self.b))
        return a, b

    def one_run_each(self) -> tuple[Run, Run]:
        """Runs with the same seed if there are some, else the first ones."""
        a, b = self.by_seed()
        return next(((a[seed], run) for seed, run in b.items() if seed in a), (self.a.runs[0], self.b.runs[0]))


@dataclass(frozen=True, slots=True)
class Evidence:
    """An estimate of the difference, second group minus first."""

    estimate: Estimate
    p_value: float
    over: str
    count: int
    paired: bool
    basis: str
    """What it rests on, in words."""
    caveat: str
    tested: bool | None = None
    """Whether a test shows a difference; None: the interval alone decides."""

    @property
    def shown(self) -> bool:
        """Whether a difference is shown."""
        return self.estimate.low > 0 or self.estimate.high < 0 if self.tested is None else self.tested


def evidence(pair: Pair, key: str) -> Evidence | None:
    """The best there is about a metric; None where a group has no values near the budget."""
    one_each = _over_prompts if key.startswith("eval/") else _over_blocks
    return _over_seeds(pair, key) or one_each(pair, key)


def comparable(pair: Pair, key: str) -> float:
    """The largest budget from the half on near which all runs were evaluated; of a training metric, and without any,
    the whole budget."""
    if not key.startswith("eval/"):
        return pair.budget
    places = np.unique(np.concatenate([run.axis(pair.axis)[~np.isnan(run.column(key))] for run in pair.runs]))
    earlier = places[(places >= pair.budget / 2) & (places < pair.budget)][::-1][:MAX_BUDGETS].tolist()
    near = (
        budget
        for budget in (pair.budget, *earlier)
        if all(evaluated_at(run, key, pair.axis, budget) is not None for run in pair.runs)
    )
    return next(near, pair.budget)


def _over_seeds(pair: Pair, key: str) -> Evidence | None:
    """Several runs on both sides."""
    found = [
        {seed: value_at(run, key, pair.axis, pair.budget) for seed, run in runs.items()} for runs in pair.by_seed()
    ]
    a, b = ({seed: value for seed, value in one.items() if value is not None} for one in found)
    shared = [seed for seed in a if seed in b]
    count = len(shared) if len(shared) >= 2 else min(len(a), len(b))
    if count < 2:
        return None
    caveat = "With two seeds only a very large difference can be shown: add seeds." if count == 2 else ""
    if len(shared) >= 2:
        paired = paired_t(np.array([b[seed] - a[seed] for seed in shared]), pair.confidence)
        return Evidence(*paired, "seeds", count, True, f"{count} paired seeds", caveat)
    welch = welch_t(np.array([*b.values()]), np.array([*a.values()]), pair.confidence)
    return Evidence(*welch, "seeds", count, False, f"{len(a)} and {len(b)} seeds, not paired", caveat)


def _over_prompts(pair: Pair, key: str) -> Evidence | None:
    """One run on each side, evaluated near the budget: paired over prompts, or from the logged intervals."""
    runs = pair.one_run_each()
    places = [(run, at) for run in runs if (at := evaluated_at(run, key, pair.axis, pair.budget)) is not None]
    if len(places) < 2:
        return None
    a, b = (per_prompt(run, key, at) for run, at in places)
    shared = [prompt for prompt in a if prompt in b]
    basis, caveat = "one run each", "One run each: another seed may turn out otherwise."
    if len(shared) >= 2:
        b_P, a_P = (np.array([one[prompt] for prompt in shared]) for one in (b, a))
        found = compare(b_P, a_P, pair.confidence)
        basis += f", paired over {len(shared):,} evaluation prompts"
        tested = found.shown(pair.confidence)
        return Evidence(found.difference, found.p_value, "prompts", len(shared), True, basis, caveat, tested)
    first, second = (float(run.column(key)[at]) for run, at in places)
    # The halves of two intervals add up as their standard errors do: by their squares.
    half = math.hypot(*(high[at] - low[at] for run, at in places for low, high, _ in [interval(run, key)])) / 2
    estimate = Estimate(second - first, second - first - half, second - first + half)
    if not estimate.has_interval:
        return Evidence(estimate, math.nan, "", 0, False, basis, caveat)
    basis += ", from the intervals of both over their evaluation prompts"
    return Evidence(estimate, math.nan, "prompts", 0, False, basis, caveat)


def _over_blocks(pair: Pair, key: str) -> Evidence | None:
    """One run on each side: the metric in the last part of the budget, block by block."""
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
    return Evidence(estimate, p_value, "blocks of steps", len(differences), True, basis, caveat)


def value_at(run: Run, key: str, axis: str, budget: float) -> float | None:
    """A metric of a run when it had spent a budget. Of an evaluation: that of ``evaluated_at``. Of the training: the
    mean over the last ``LAST_PART`` of the budget. None without values there."""
    if key.startswith("eval/"):
        at = evaluated_at(run, key, axis, budget)
        return None if at is None else float(run.column(key)[at])
    _, values = _last_part(run, key, axis, budget)
    return float(values.mean()) if len(values) else None


def evaluated_at(run: Run, key: str, axis: str, budget: float) -> int | None:
    """The row of the evaluation nearest to a budget; None if it is more than ``NEAR`` of the budget away."""
    distances = np.abs(run.axis(axis) - budget)
    distances[np.isnan(distances) | np.isnan(run.column(key))] = math.inf
    at = int(distances.argmin()) if len(distances) else 0
    return at if len(distances) and distances[at] <= NEAR * budget else None


def per_prompt(run: Run, key: str, at: int) -> dict[tuple[Any, Any], float]:
    """The mean of a metric for each prompt of the stored evaluation of a row, by the prompt's row in the data set and
    its text. Null is left out; a prompt without any value has NaN. Empty if the table is missing, damaged, larger than
    ``MAX_ROWS``, or lacks the column."""
    name, column = parts_of(key)
    try:
        table = pyarrow.parquet.ParquetFile(run.evaluations[run.rows[at]["step"], name])
        if table.metadata.num_rows > MAX_ROWS:
            return {}
        read = table.read(columns=["row", "prompt", column])
        means = read.group_by(["row", "prompt"]).aggregate([(column, "mean")])
        keys = zip(means["row"].to_pylist(), means["prompt"].to_pylist(), strict=True)
        values = (math.nan if value is None else float(value) for value in means[f"{column}_mean"].to_pylist())
        return {key: value if abs(value) < MAX_NUMBER else math.nan for key, value in zip(keys, values, strict=True)}
    except (OSError, ValueError, TypeError, LookupError, pyarrow.ArrowException):
        return {}


def _last_part(run: Run, key: str, axis: str, budget: float) -> tuple[Floats, Floats]:
    x, values = run.axis(axis), run.column(key)
    kept = ((1 - LAST_PART) * budget < x) & (x <= budget) & ~np.isnan(values)
    return x[kept], values[kept]


def _block_means(x: Floats, values: Floats, budget: float, count: int) -> Floats:
    """The means of ``count`` equal parts of the last part of a budget; NaN for one without points."""
    at = (x / budget - (1 - LAST_PART)) / LAST_PART * count
    block = np.clip(np.ceil(at - 1e-9).astype(int) - 1, 0, count - 1)
    sums, counts = np.bincount(block, values, count), np.bincount(block, minlength=count)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


# ----------------------------------------
# Whether the runs of two groups measured a metric in the same way: otherwise a difference says nothing of policies.


MARKS = marks_of(GRPOConfig)
PROMPTS = tuple(name.removeprefix("data.") for name, mark in MARKS.items() if mark.measures == "prompts")
"""Settings of ``[data]``, besides ``eval``, that decide which prompts an evaluation has."""
_DRAWN = tuple(name.removeprefix("rollout.") for name, mark in MARKS.items() if mark.measures == "sampling")
OF_EVALUATION = tuple(name for name in _DRAWN if f"eval.{name}_eval" in MARKS)
"""Settings of ``[rollout]`` that ``eval.NAME_eval`` replaces in evaluations."""
SAMPLING = tuple(name for name in _DRAWN if name not in OF_EVALUATION)
"""Settings of ``[rollout]`` that evaluations share with the training."""
NOT_OF_REWARDS = tuple(name for name, mark in MARKS.items() if not mark.measures)
"""How the names of settings begin that do not change what a training reward means."""


def unequal_evaluations(pair: Pair, key: str) -> str:
    """Why an evaluation metric cannot be compared, in words; empty if it can."""
    if not key.startswith("eval/"):
        return ""
    runs, (name, _) = pair.runs, parts_of(key)
    texts = _stored_prompts(pair, key)
    prompts = _unequal(runs, [f"data.eval.{name}" if name else "data.eval", *(f"data.{one}" for one in PROMPTS)])
    if texts and texts[0].isdisjoint(texts[1]) and not _unequal(runs, ["model.path"]):
        return f"evaluated on different prompts{_named(prompts)}"
    if prompts and not (texts and texts[0] == texts[1]):  # the same file may have two names
        return f"evaluated on different prompts{_named(prompts)}"
    sampled = [one for one in OF_EVALUATION if len({repr(_sampling(run, one)) for run in runs}) > 1]
    sampled += _unequal(runs, [f"rollout.{one}" for one in SAMPLING])
    return f"evaluated with different sampling{_named(sampled)}" if sampled else ""


def unequal_training(pair: Pair) -> list[str]:
    """The settings of data, sampling and environment that differ: a training reward is then of something else."""
    keys = dict.fromkeys(key for run in pair.runs for key in _settings(run) if not key.startswith(NOT_OF_REWARDS))
    return _unequal(pair.runs, [key for key in keys if key.startswith(("data.", "rollout.", "env"))])


def same_rewards(runs: Iterable[Run]) -> bool:
    """Whether all runs have the same reward functions with the same weights."""
    return not _unequal(list(runs), ["reward.functions", "reward.weights"])


def _stored_prompts(pair: Pair, key: str) -> list[set[Any]]:
    """The prompts of stored evaluations near the budget, of one run of each side; empty unless both have some."""
    places = [(run, evaluated_at(run, key, pair.axis, pair.budget)) for run in pair.one_run_each()]
    found = [{prompt for _, prompt in per_prompt(run, key, at)} for run, at in places if at is not None]
    return found if len(found) == 2 and all(found) else []


def _settings(run: Run) -> dict[str, Any]:
    """The settings by name, with the defaults of those that are missing."""
    return {**default_settings(), **run.flat_settings()}


def _sampling(run: Run, name: str) -> Any:
    settings = _settings(run)
    return settings.get(f"eval.{name}_eval", settings.get(f"rollout.{name}"))


def _unequal(runs: Sequence[Run], names: Iterable[str]) -> list[str]:
    """Those of some settings, or tables of settings, that are not equal in all runs."""
    tables = [_settings(run) for run in runs]
    return [name for name in names if len({repr(_part(table, name)) for table in tables}) > 1]


def _part(settings: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    """A setting, or the entries of a table: without the default of a setting that the table replaces."""
    entries = sorted((key, value) for key, value in settings.items() if key.startswith(f"{name}."))
    return entries or [(name, settings.get(name))]


def _named(settings: Sequence[str]) -> str:
    shown = ", ".join(settings[:5]) + (", ..." if len(settings) > 5 else "")
    return f" ({shown})" if settings else ""


BUDGETS = ("updates", "tokens", "seconds")
WORDS = {"updates": "optimizer updates", "tokens": "drawn tokens", "seconds": "seconds of training", "step": "steps"}


@dataclass(frozen=True, slots=True, kw_only=True)
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
    difference: float | None = None
    """Of the means, second minus first; None: they cannot be compared."""
    low: float | None = None
    """The interval of the difference; None: there is none."""
    high: float | None = None
    p_value: float | None = None
    """Two-sided, of the hypothesis that the groups do not differ; None where it is not computed."""
    confidence: float
    over: str = ""
    """What the interval is over: "seeds", "prompts", "blocks of steps"; empty without an interval."""
    count: int = 0
    """How many of these."""
    paired: bool = False
    better: str | None = None
    """The label of the better group, if a difference can be claimed."""
    text: str
    """All of it as a sentence."""
    caveat: str = ""
    """What the certainty does not cover, as a sentence."""


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


def conclusions(found: Iterable[Verdict]) -> list[str]:
    """A sentence for each two groups: the verdicts without their numbers."""
    said = []
    for _, some in groupby(found, key=lambda one: (one.a, one.b)):
        axes: dict[tuple[str, str], list[str]] = {}
        for one in some:
            axes.setdefault(_claim(one), []).append(one.axis)
        said.append("; ".join(f"{claim} at equal {_listed(names)}{end}" for (claim, end), names in axes.items()))
    return said


def _claim(found: Verdict) -> tuple[str, str]:
    """What a verdict says, and a reservation."""
    if found.better:
        other = found.b if found.better == found.a else found.a
        return f"{found.better} is better than {other}", "" if found.over == "seeds" else " (one run each)"
    if found.difference is None:
        return f"{found.a} and {found.b} cannot be compared", ""
    if found.low is not None and found.high is not None and not found.low <= 0 <= found.high:
        return f"neither of {found.a} and {found.b} can be called better", ""
    return f"no difference between {found.a} and {found.b} can be claimed", ""


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def verdict(a: Group, b: Group, axis: str, confidence: float = 0.95, metric: str | None = None) -> Verdict:
    """Two groups compared at one budget; arguments as of ``verdicts``."""
    reached = [(group.label, min(_end(run, axis) for run in group.runs)) for group in (a, b)]
    pair = Pair(a, b, axis, min(budget for _, budget in reached), confidence)
    if not pair.budget:
        lacking = " and ".join(label for label, budget in reached if not budget)
        return _undecided(pair, metric or "", f"the metrics of {lacking} do not have them")
    unequal = ""
    for key in [metric] if metric else common_metrics(a, b):
        at = replace(pair, budget=comparable(pair, key))
        if reason := unequal_evaluations(at, key):
            unequal = unequal or reason
        elif found := evidence(at, key):
            return _verdict(at, key, found, unequal)
    reason = unequal or (f"{metric} has no values there" if metric else "they have no reward there")
    if not metric and not unequal and not same_rewards(pair.runs):
        reason = "their reward functions or weights differ, and they have no single function in common"
    return _undecided(pair, metric or "", reason)


def _end(run: Run, axis: str) -> float:
    """Where a run ends on an axis; 0: it has no place there."""
    return float(np.fmax.reduce(run.axis(axis), initial=0.0))


def common_metrics(a: Group, b: Group) -> list[str]:
    """The rewards that all runs have, in the order in which they decide: of the evaluation sets, then of the training.

    Where the reward functions or their weights differ, sums of rewards mean different things: the rewards of single
    functions take their place, if both have some of the same name.
    """
    runs = (*a.runs, *b.runs)
    shared = [key for key in runs[0].keys() if all(key in run.keys() for run in runs)]  # noqa: SIM118
    whole = same_rewards(runs)
    found = [key for key in shared if _is_reward(key, whole=whole)]
    return sorted(found, key=lambda key: not key.startswith("eval/"))


def _is_reward(key: str, *, whole: bool) -> bool:
    if key.startswith("eval/") and not key.endswith("/mean"):
        return False
    name = parts_of(key)[1]
    return name == "reward" if whole else name.startswith("rewards/") and name.count("/") == 1


def _verdict(pair: Pair, key: str, found: Evidence, unequal: str) -> Verdict:
    """The verdict on a metric; ``unequal`` says why the evaluations are not compared."""
    mean, low, high = found.estimate.mean, found.estimate.low, found.estimate.high
    known = found.estimate.has_interval
    differ = [] if key.startswith("eval/") else unequal_training(pair)
    trained_on = found.over == "blocks of steps" or bool(differ)
    better, other = (pair.b.label, pair.a.label) if mean > 0 else (pair.a.label, pair.b.label)
    name, column = parts_of(key)
    what = f"{'evaluation' if key.startswith('eval/') else 'training'} {column}" + (f" on {name}" if name else "")
    sign = -1 if found.shown and mean < 0 else 1
    bounds = sorted((sign * low, sign * high))
    certainty = f"{100 * pair.confidence:g}%: {bounds[0]:.3g} to {bounds[1]:.3g}" if known else "no interval"
    if not found.shown:
        claim = f"no difference can be claimed: {pair.b.label} minus {pair.a.label} is {mean:.3g} {what}"
    elif trained_on:
        claim = f"{better} had more {what} than {other} by {abs(mean):.3g}"
    else:
        claim = f"{better} is better than {other} by {abs(mean):.3g} {what}"
    machines = _machines(pair) if pair.axis == "seconds" else []
    said = [f"The evaluations cannot be compared: {unequal}."] * bool(unequal)
    if differ:
        said.append(f"They trained under different settings ({', '.join(differ[:5])}): more reward is no better model.")
    said += [f"The runs were made on different machines ({'; '.join(machines)})."] * (len(machines) > 1)
    text = f"{claim} ({certainty}) at equal {WORDS[pair.axis]} ({pair.budget:,.0f}); {found.basis}"
    return replace(
        _undecided(pair, key, ""),
        text=text,
        caveat=" ".join([*said, found.caveat]).strip(),
        difference=mean,
        low=low if known else None,
        high=high if known else None,
        p_value=None if math.isnan(found.p_value) else found.p_value,
        better=better if found.shown and not trained_on else None,
        **{name: getattr(found, name) for name in ("over", "count", "paired")},
    )


def _undecided(pair: Pair, key: str, reason: str) -> Verdict:
    a, b, axis, budget, confidence = pair.a.label, pair.b.label, pair.axis, pair.budget, pair.confidence
    text = f"{a} and {b} cannot be compared at equal {WORDS[axis]}: {reason}"
    return Verdict(a=a, b=b, axis=axis, budget=budget, metric=key, confidence=confidence, text=text)


def _machines(pair: Pair) -> list[str]:
    """The machines that the runs were started on, as far as they are recorded."""
    facts = [start.get("facts") for run in pair.runs for start in run.starts]
    names = (f"{one.get('machine')}, {one.get('threads')} threads" for one in facts if isinstance(one, dict))
    return list(dict.fromkeys(name[:80] for name in names))
