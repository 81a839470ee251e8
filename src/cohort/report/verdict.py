"""Which of two groups of runs is better, by how much, with what certainty: at equal updates, tokens and seconds.

Evaluations are compared if they were made on the same prompts with the same sampling; training rewards call no run
better where data, sampling or environment differ. The reward is compared where both have spent the same: the smallest
amount that all runs have reached. Its value there is that of an evaluation within 5% of it. If the runs lack one, the
largest amount from the half on near which all were evaluated takes its place; else the mean training reward over the
last fifth of it decides.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

from cohort.report.evidence import Evidence, Pair, comparable, evidence
from cohort.report.labels import parts_of
from cohort.report.measured import same_rewards, unequal_evaluations, unequal_training
from cohort.report.series import Group, positions

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
    reached = {
        group.label: min(max(positions(run, axis).values(), default=0.0) for run in group.runs) for group in (a, b)
    }
    pair = Pair(a, b, axis, min(reached.values()), confidence)
    if not pair.budget:
        lacking = " and ".join(label for label, budget in reached.items() if not budget)
        return _undecided(pair, metric or "", f"the metrics of {lacking} do not have them")
    unequal = ""
    for key in [metric] if metric else common_metrics(a, b):
        at = replace(pair, budget=comparable(pair, key))
        if reason := unequal_evaluations(at, key):
            unequal = unequal or reason
        elif found := evidence(at, key):
            return _verdict(at, key, found, unequal)
    reason = unequal or (f"{metric} has no values there" if metric else "they have no reward there")
    if not metric and not unequal and not same_rewards((*a.runs, *b.runs)):
        reason = "their reward functions or weights differ, and they have no single function in common"
    return _undecided(pair, metric or "", reason)


def common_metrics(a: Group, b: Group) -> list[str]:
    """The rewards that all runs have, in the order in which they decide: of the evaluation sets, then of the training.

    Where the reward functions or their weights differ, sums of rewards mean different things: the rewards of single
    functions take their place, if both have some of the same name.
    """
    keys = [run.keys() for run in (*a.runs, *b.runs)]
    shared = [key for key in keys[0] if all(key in others for others in keys[1:])]
    whole = same_rewards((*a.runs, *b.runs))
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
    where = f"at equal {WORDS[pair.axis]} ({pair.budget:,.0f}); {found.basis}"
    if found.shown and trained_on:
        text = f"{better} had more {what} than {other} by {abs(mean):.3g} ({certainty}) {where}"
    elif found.shown:
        text = f"{better} is better than {other} by {abs(mean):.3g} {what} ({certainty}) {where}"
    else:
        text = f"no difference can be claimed: {pair.b.label} minus {pair.a.label} is {mean:.3g} {what} "
        text += f"({certainty}) {where}"
    machines = _machines(pair) if pair.axis == "seconds" else []
    said = [f"The evaluations cannot be compared: {unequal}."] * bool(unequal)
    if differ:
        said.append(f"They trained under different settings ({', '.join(differ[:5])}): more reward is no better model.")
    said += [f"The runs were made on different machines ({'; '.join(machines)})."] * (len(machines) > 1)
    return Verdict(
        a=pair.a.label,
        b=pair.b.label,
        axis=pair.axis,
        budget=pair.budget,
        metric=key,
        difference=mean,
        low=low if known else None,
        high=high if known else None,
        p_value=None if math.isnan(found.p_value) else found.p_value,
        confidence=pair.confidence,
        over=found.over,
        count=found.count,
        paired=found.paired,
        better=better if found.shown and not trained_on else None,
        text=text,
        caveat=" ".join([*said, found.caveat]).strip(),
    )


def _undecided(pair: Pair, key: str, reason: str) -> Verdict:
    text = f"{pair.a.label} and {pair.b.label} cannot be compared at equal {WORDS[pair.axis]}: {reason}"
    return Verdict(
        a=pair.a.label,
        b=pair.b.label,
        axis=pair.axis,
        budget=pair.budget,
        metric=key,
        confidence=pair.confidence,
        text=text,
    )


def _machines(pair: Pair) -> list[str]:
    """The machines that the runs were started on, as far as they are recorded."""
    facts = [start.get("facts") for run in (*pair.a.runs, *pair.b.runs) for start in run.starts]
    names = (f"{one.get('machine')}, {one.get('threads')} threads" for one in facts if isinstance(one, dict))
    return list(dict.fromkeys(name[:80] for name in names))
