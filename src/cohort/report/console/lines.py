"""Steps and evaluations in one line each."""

from __future__ import annotations

from typing import Any

from cohort.report.labels import parts_of, reward_functions
from cohort.report.words import number, share


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
