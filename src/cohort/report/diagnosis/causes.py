"""Why a step's updates had no gradient, from its metrics alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cohort.report.diagnosis.numbers import number

CAUSES = {
    "masked": "belong to completions cut by the length limit, which objective.truncated masks",
    "no_advantage": "have an advantage of 0",
    "low_entropy": "are not among the objective.top_entropy tokens",
    "mismatch": "are dropped by objective.mismatch",
    "off_policy": "are dropped by the off-policy mask",
    "clipped_low": "are silenced by the trust region",
    "clipped_high": "are silenced by the trust region",
    "vanished": "have a multiplier of 0 in the trust region",
}
"""Why a token has no gradient (``tokens/CAUSE_share``), as what follows "90% of the tokens"."""


def why_no_gradient(metrics: Mapping[str, Any]) -> str:
    """Why a step's updates had no gradient, from its metrics; and which functions failed, which may be behind it."""
    failed = [key for key in metrics if key.startswith("rewards/") and key.endswith("/failed") and metrics[key]]
    if not failed or metrics.get("reward/mean", 0) is None:
        return _why(metrics)
    names = [key.removeprefix("rewards/").removesuffix("/failed") for key in failed]
    counts = [f"{name} failed on {metrics[f'rewards/{name}/failed']:,} completions" for name in names]
    shares = [number(metrics, f"rewards/{name}/unscored_share") for name in names]
    of = [f" ({share:.0%})" if share else "" for share in shares]
    causes = " and ".join(map("".join, zip(counts, of, strict=True)))
    return f"{causes}, which are unscored (the log has the traceback). Without them, {_why(metrics)}"


def _why(metrics: Mapping[str, Any]) -> str:
    left_out = number(metrics, "groups/left_out")
    if left_out and left_out == number(metrics, "groups/sampled"):
        return "no update was made: every group has equal rewards, and objective.group_filter dropped them all"
    if "reward/mean" in metrics and metrics["reward/mean"] is None:
        begin, end = "rewards/", "/unscored_share"
        keys = [key for key, value in metrics.items() if key.startswith(begin) and key.endswith(end) and value == 1]
        names = [key.removeprefix(begin).removesuffix(end) for key in keys]
        verbs = ["failed on" if metrics.get(f"rewards/{name}/failed") else "returned None for" for name in names]
        reasons = [f"{name} {verb} every one" for name, verb in zip(names, verbs, strict=True)]
        if (errors := number(metrics, "completions/errors")) and not reasons:
            return f"no update had a gradient: no completion was scored; {errors:.0f} could not be sampled"
        if not reasons:
            return "no update had a gradient: no completion was scored (reward/unscored)"
        return f"no update had a gradient: no completion was scored, because {' and '.join(reasons)}"
    shares = {cause: number(metrics, f"tokens/{cause}_share") or 0.0 for cause in CAUSES}
    if not any(shares.values()):
        return "no update had a gradient ('cohort docs metrics': tokens/..._share)"
    cause = max(shares, key=lambda name: shares[name])
    if cause == "no_advantage" and metrics.get("groups/dead_share") == 1:
        return "no update had a gradient: every group has equal rewards, so there is nothing to learn"
    return f"no update had a gradient: {shares[cause]:.0%} of the tokens {CAUSES[cause]} (tokens/{cause}_share)"
