"""A run's health in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cohort.report.diagnosis.finding import Finding, Level
from cohort.report.diagnosis.numbers import number

WORDS = {Level.ALARM: "unhealthy", Level.WARNING: "warning"}


FIRST = 5
"""The step before which most checks have nothing to say."""


def health_line(metrics: Mapping[str, Any], findings: Sequence[Finding] = (), *, groups_compared: bool = True) -> str:
    """A step in one line: the verdict, the names of the warnings and alarms that stand, and the main numbers. It has no
    loss, whose value means nothing in GRPO.

    >>> metrics = {"groups/dead_share": 0.29, "entropy": 0.83, "updates": 2, "kl/k3": 0.004}
    >>> metrics |= {"tokens/active_share": 0.49, "tokens/clipped_low_share": 0.01, "tokens/clipped_high_share": 0.0}
    >>> health_line(metrics)
    'healthy: 71% of groups teach, entropy 0.83, clip 2%, KL 0.004'
    >>> health_line({"step": 1} | metrics, groups_compared=False)
    'no verdict before step 5: entropy 0.83, clip 2%, KL 0.004'
    >>> health_line(metrics, [Finding("truncation", Level.ALARM, 3, "...")])
    'unhealthy (truncation): 71% of groups teach, entropy 0.83, clip 2%, KL 0.004'

    Args:
        metrics: of the step.
        findings: of the run; those that have ceased, and notes, do not count.
        groups_compared: whether a group of equal rewards teaches nothing (``Diagnosis.groups_compared``).
    """
    ill = [one for one in findings if one.stands and one.level is not Level.NOTE]
    ill.sort(key=lambda one: -one.level.rank)
    step = number(metrics, "step")
    verdict = f"no verdict before step {FIRST}" if step is not None and step < FIRST else "healthy"
    if ill:
        verdict = f"{WORDS[ill[0].level]} ({', '.join(one.check for one in ill)})"
    parts = []
    if groups_compared and (dead := number(metrics, "groups/dead_share")) is not None:
        parts.append(f"{1 - dead:.0%} of groups teach")
    if (entropy := number(metrics, "entropy")) is not None:
        parts.append(f"entropy {entropy:.2g}")
    if (number(metrics, "updates") or 0) > 1 and (clipped := clipped_share(metrics)) is not None:
        parts.append(f"clip {clipped:.0%}")
    if (kl := number(metrics, "kl/k3")) is not None:
        parts.append(f"KL {kl:.2g}")
    return f"{verdict}: {', '.join(parts)}" if parts else verdict


def clipped_share(metrics: Mapping[str, Any]) -> float | None:
    """The share of tokens that the trust region has silenced, among those that could have a gradient."""
    low, high, active = (number(metrics, f"tokens/{name}_share") for name in ("clipped_low", "clipped_high", "active"))
    if low is None or high is None or active is None or low + high + active <= 0:
        return None
    return (low + high) / (low + high + active)
