"""The page that compares runs: curves with bands over seeds on equal axes, and verdicts with their certainty."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from cohort.report.diagnosis import Diagnosis
from cohort.report.page.blocks import MAX_KEY, short
from cohort.report.page.charts import CHARTS, Chart, evaluated_charts, rounded
from cohort.report.page.sections import MAX_ROWS, number, run_state
from cohort.report.series import Curve, Group, common_window, grouped, means_of_groups, reward_functions
from cohort.report.verdict import conclusions, verdicts
from cohort.runs.reader import AXES, Run

SHOWN_AXES = ("step", "updates", "tokens", "seconds")
MAX_POINTS = 400
MAX_CHARTS = 40
MAX_GROUPS = 12
"""Curves of a chart; more cannot be told apart."""


def compared(histories: Sequence[Run]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the template and the scripts of the comparison need."""
    groups = grouped(histories)
    found = verdicts(groups)
    content = {
        "title": f"Comparison of {len(histories)} runs",
        "conclusions": conclusions(found),
        "verdicts": [{"text": one.text, "caveat": one.caveat} for one in found],
        "groups": [{"label": one.label, "runs": [_summary(run) for run in one.runs]} for one in groups],
        "differs": _differences(groups),
        "left_out": max(0, len(groups) - MAX_GROUPS),
        "missing": [f"{run.path.name}: {text}" for run in histories for text in run.damaged],
    }
    data = {"axes": {axis: AXES[axis] for axis in SHOWN_AXES}, "charts": _charts(groups[:MAX_GROUPS], histories)}
    return content, data


def _summary(run: Run) -> dict[str, str]:
    """A run in a row of the table."""
    _, words = run_state(run)
    _, rewards = run.series("reward/mean")
    part = rewards[-max(1, len(rewards) // 10) :]
    return {
        "name": run.path.resolve().name,
        "seed": str(run.flat_settings().get("run.seed", "")),
        "state": words,
        "health": Diagnosis.of(run).health,
        "reward": number(sum(part) / len(part)) if part else number(None),
    }


def _differences(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The settings that are not equal in all groups."""
    keys = groups[0].differs if len(groups) > 1 else {}
    return [
        {"key": short(key), "values": [short(str(one.differs[key]), 400) for one in groups]}
        for key in islice(keys, MAX_ROWS)
    ]


def _charts(groups: Sequence[Group], histories: Sequence[Run]) -> list[dict[str, Any]]:
    """A chart for each metric that some run has, with a curve for each group on every axis."""
    keys = list(dict.fromkeys(key for run in histories for key in run.keys() if len(key) <= MAX_KEY))  # noqa: SIM118
    evaluated = evaluated_charts(keys)
    rewards = reward_functions(keys).items()
    functions = [Chart(f"Reward: {name}", "", (key,)) for name, key in rewards] if len(rewards) > 1 else []
    plain = [one for one in CHARTS if not one.keys[0].startswith("^") and one.keys[0] in keys]
    wanted = [*evaluated, plain[0], *functions, *plain[1:]] if plain else [*evaluated, *functions]
    found = []
    for chart in wanted[:MAX_CHARTS]:
        curves, lines = _curves(groups, chart)
        if curves:
            about = f"{chart.keys[0]}. {lines}".rstrip()
            found.append({"title": chart.title, "about": about, "log": chart.log, "curves": curves})
    return found


def _curves(groups: Sequence[Group], chart: Chart) -> tuple[list[dict[str, Any]], str]:
    """The curve of each group on every axis, and what lines and bands are, in words."""
    key = chart.keys[0]
    runs = [run for group in groups for run in group.runs]
    window = common_window(runs, key) if chart.smooth and not key.startswith("eval/") else 1
    found: dict[str, dict[str, Any]] = {}
    said = ""
    for axis in SHOWN_AXES:
        for mean, _ in means_of_groups(groups, key, axis, window):
            if not mean.x:
                continue
            found.setdefault(mean.label, {"label": mean.label})[axis] = _points(mean)
            smoothed = f"Lines: local linear fits over {mean.window} points. " if mean.window > 1 else ""
            said = said or smoothed + (f"Band: {mean.band}." if mean.band else "")
    return list(found.values()), said


def _points(curve: Curve) -> dict[str, Any]:
    """The points of a curve, at most ``MAX_POINTS``."""
    stride = -(-len(curve.x) // MAX_POINTS)
    parts = {"x": curve.x, "y": curve.line, "low": curve.low, "high": curve.high}
    return {name: values and [rounded(value) for value in values[::stride]] for name, values in parts.items()}
