"""The output of ``cohort eval``: a table, a verdict in words, rows with their completions, a summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cohort.config import GRPOConfig, hide_secrets
from cohort.evaluation.evaluate import NOT_PROPORTIONS, Evaluation, Evaluator, Success, eval_sampling, prefix
from cohort.runs.lines import as_json, write_atomically
from cohort.statistics import Comparison, Estimate, compare

Evaluations = Mapping[str, Evaluation]
Comparisons = Mapping[str, Mapping[str, Comparison]]
"""By set and metric."""
SUMMARY_SETTINGS = ("num_generations_eval", "bootstrap_samples", "confidence")
"""Settings in the summary beside the sampling."""
JUDGED = ("pass@", "maj@")
"""Beginnings of the metrics that depend on what is correct."""
OUTPUT_COLUMNS = ("set", "samples", "pass_rate")


def compared(first: Evaluations, second: Evaluations, settings: GRPOConfig) -> Comparisons:
    """Compare two models prompt by prompt, metric by metric."""
    numbers = (settings.eval.confidence, settings.eval.bootstrap_samples, settings.run.seed)
    found: dict[str, dict[str, Comparison]] = {name: {} for name in first}
    for name, evaluation in first.items():
        for metric, values_P in evaluation.values.items():
            proportion = metric not in NOT_PROPORTIONS
            found[name][metric] = compare(values_P, second[name].values[metric], *numbers, proportion=proportion)
    return found


def show(console: Console, found: Sequence[Evaluations], comparisons: Comparisons, settings: GRPOConfig) -> None:
    """Print a table per set and, with two models, a verdict on the reward."""
    confidence = settings.eval.confidence
    for name, evaluation in found[0].items():
        prompts = evaluation.table.num_rows // settings.eval.num_generations_eval
        title = f"{name}: " * bool(name) + f"{prompts:,} prompts, {_share(confidence)} intervals over them"
        table = Table("metric", *("model", "against")[: len(found)], title=title, box=SIMPLE)
        if comparisons:
            table.add_column("difference")
            table.add_column("p", justify="right")
        for metric in evaluation.estimates:
            cells = [_cell(one[name].estimates[metric], metric) for one in found]
            if comparisons:
                comparison = comparisons[name][metric]
                cells += [_cell(comparison.difference, metric, signed=True), f"{comparison.p_value:.2g}"]
            judged = f" ({evaluation.success})" if metric.startswith(JUDGED) else ""
            table.add_row(metric + judged, *cells)
        for count in dict.fromkeys(count for one in found for count, number in one[name].counts.items() if number):
            table.add_row(count, *(f"{one[name].counts.get(count, 0):g}" for one in found))
        console.print(table)
        if comparisons:
            rewards = np.concatenate([one[name].values["reward"] for one in found])
            points = bool(np.all((rewards >= 0) & (rewards <= 1) | np.isnan(rewards)))
            text = verdict(comparisons[name]["reward"], confidence, points=points)
            console.print(text, highlight=False, soft_wrap=True)


def verdict(comparison: Comparison, confidence: float, *, points: bool) -> str:
    """Which model is better, in words.

    Args:
        comparison: the comparison of rewards.
        confidence: confidence level of its interval.
        points: whether rewards lie between 0 and 1, so that differences are in percentage points.

    >>> from cohort.evaluation import Estimate
    >>> print(verdict(Comparison(Estimate(0.031, 0.004, 0.058), 30, 80, 10, 0.02), 0.95, points=True))
    reward: better by 3.1 points, 95% interval 0.4 to 5.8 (30 prompts better, 80 equal, 10 worse; p = 0.02)
    >>> print(verdict(Comparison(Estimate(-0.5, -1.5, 0.5), 3, 0, 5, 0.3), 0.95, points=False))
    reward: no difference shown: -0.5, 95% interval -1.5 to 0.5 (3 prompts better, 0 equal, 5 worse; p = 0.3)
    >>> print(verdict(Comparison(Estimate(0.363, 0.0188, 0.669), 3, 20, 0, 0.25), 0.95, points=False))
    reward: no difference shown: 0.363 (3 prompts better, 20 equal, 0 worse; p = 0.25). The 95% interval, 0.0188 to
    0.669, is above 0, but the permutation test does not confirm it.
    >>> nan = math.nan
    >>> print(verdict(Comparison(Estimate(0.0, nan, nan), 0, 12, 0, 1.0), 0.95, points=True))
    reward: no difference shown: all equal on 12 prompts
    >>> print(verdict(Comparison(Estimate(nan, nan, nan), 0, 0, 0, 1.0), 0.95, points=True))
    reward: no prompt was scored by both
    """
    difference, prompts = comparison.difference, comparison.wins + comparison.ties + comparison.losses
    if not prompts:
        return "reward: no prompt was scored by both"
    if comparison.ties == prompts and not difference.has_interval:
        return f"reward: no difference shown: all equal on {prompts:,} prompts"
    scale = 100 if points else 1
    shown = comparison.shown(confidence)
    sign = -1 if shown and difference.mean < 0 else 1
    low, high = sorted(sign * scale * bound for bound in (difference.low, difference.high))
    mean = f"{sign * scale * difference.mean:.3g}" + (" points" if points else "")
    result = f"{'better' if sign > 0 else 'worse'} by {mean}" if shown else f"no difference shown: {mean}"
    counts = f"{comparison.wins} prompts better, {comparison.ties} equal, {comparison.losses} worse"
    interval = f"{_share(confidence)} interval {low:.3g} to {high:.3g}"
    interval = interval if difference.has_interval else f"the same on all {prompts:,}, no interval"
    counts = f"({counts}; p = {comparison.p_value:.2g})"
    if difference.has_interval and not shown and low * high > 0:
        return (
            f"reward: {result} {counts}. The {interval.replace(' interval', ' interval,')}, is "
            f"{'above' if low > 0 else 'below'} 0, but the permutation test does not confirm it."
        )
    return f"reward: {result}, {interval} {counts}"


def _share(confidence: float) -> str:
    """A proportion as a percentage.

    >>> _share(0.95), _share(0.999)
    ('95%', '99.9%')
    """
    return f"{100 * confidence:.6g}%"


def _cell(estimate: Estimate, metric: str, *, signed: bool = False) -> str:
    if math.isnan(estimate.mean):
        return "none"
    form = ".1f" if metric == "length" else ".3f"
    # Without a space inside the interval, a narrow terminal breaks the line before it.
    interval = f"{estimate.low:{form}},{estimate.high:{form}}" if estimate.has_interval else "none"
    return f"{estimate.mean:{'+' * signed}{form}} [{interval}]"


def write_rows(file: str, evaluator: Evaluator, found: Evaluations) -> None:
    """Write one JSON line per prompt: the row's columns, the completions as ``samples``, and ``pass_rate``, the share
    of scored completions that are correct, if something decides what is correct. A column of the row with one of these
    names is written as ``row.NAME``.

    Args:
        file: path of the output.
        evaluator: the evaluator of the sets.
        found: the evaluation of each set.
    """
    settings, lines = evaluator.settings, []
    for name, evaluation in found.items():
        unused = [key for key in ("prompt", "sampler_logps", "full_logps") if key in evaluation.table.column_names]
        table = evaluation.table.drop_columns(unused).to_pylist()
        count = settings.num_generations_eval
        for index, first in enumerate(range(0, len(table), count)):
            row, samples = evaluator.sets[name].prompt(index, uid=index).columns, table[first : first + count]
            line = {
                **{(f"row.{key}" if key in OUTPUT_COLUMNS else key): value for key, value in row.items()},
                **({"set": name} if name else {}),
                "samples": [
                    {
                        **{key: one[key] for key in ("completion", "finish_reason")},
                        "length": len(one["token_ids"]),
                        **{key: value for key, value in one.items() if key.startswith(("reward", "extra/"))},
                    }
                    for one in samples
                ],
                **({"pass_rate": pass_rate(samples, evaluation.success)} if evaluation.success else {}),
            }
            lines.append(line)
    _write_lines(file, lines)


def write_pass_rates(file: str, evaluator: Evaluator, found: Evaluations) -> None:
    """Write one JSON line per prompt: the row's columns under their names in the source, so that the same settings read
    the file, with the measured ``pass_rate`` in place of an earlier one.

    Args:
        file: path of the output.
        evaluator: the evaluator of the sets.
        found: the evaluation of each set, which knows what is correct.
    """
    count, lines = evaluator.settings.num_generations_eval, []
    for name, evaluation in found.items():
        assert evaluation.success is not None  # checked before any model is loaded
        table = evaluation.table.select([f"rewards/{evaluation.success.function}"]).to_pylist()
        for index, first in enumerate(range(0, len(table), count)):
            row, renamed = evaluator.sets[name].original(index), evaluator.sets[name].data.sources[0].config.columns
            rate = pass_rate(table[first : first + count], evaluation.success)
            lines.append({**row, renamed.get("pass_rate", "pass_rate"): rate})
    _write_lines(file, lines)


def _write_lines(file: str, rows: Iterable[Mapping[str, Any]]) -> None:
    # Lone surrogates, which UTF-8 cannot encode, are escaped as JSON escapes them.
    text = "".join(as_json(row, ensure_ascii=False, default=str) for row in rows)
    write_atomically(Path(file).expanduser(), text.encode("utf-8", "backslashreplace").decode())


def pass_rate(samples: Sequence[Mapping[str, Any]], success: Success) -> float | None:
    """Share of the scored completions that are correct; None if none was scored."""
    rewards = [reward for one in samples if (reward := one[f"rewards/{success.function}"]) is not None]
    return float(np.mean([reward >= success.threshold for reward in rewards])) if rewards else None


def write_summary(
    file: str, models: Sequence[str], found: Sequence[Evaluations], comparisons: Comparisons, settings: GRPOConfig
) -> None:
    """Write all numbers as one JSON object."""
    summary = {
        "models": list(models),
        "data": hide_secrets(settings.data.model_dump(mode="json")["eval"]),
        "rewards": hide_secrets(list(settings.reward.functions)),
        "sampling": eval_sampling(settings).describe(),
        "success": next((str(one.success) for one in found[0].values() if one.success), None),
        "settings": {name: getattr(settings.eval, name) for name in SUMMARY_SETTINGS} | {"seed": settings.run.seed},
        "metrics": [
            {key: value for name, one in each.items() for key, value in one.metrics(name).items()} for each in found
        ],
        "comparison": {
            f"{prefix(name)}{metric}": asdict(comparison) | {"shown": comparison.shown(settings.eval.confidence)}
            for name, by_metric in comparisons.items()
            for metric, comparison in by_metric.items()
        },
    }
    write_atomically(Path(file).expanduser(), as_json(summary, ensure_ascii=False, indent=2))
