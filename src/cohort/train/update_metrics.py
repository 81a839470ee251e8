"""The metrics of updates, of a step's together and of each. ``docs/metrics.md`` gives every key with its formula."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cohort.objective import Cause, Objective, TokenStatistics, per_sequence
from cohort.train.progress import Updates
from cohort.train.update import UpdateResult

EACH_UPDATE = "each_update"
"""The key of ``each_update`` in the metrics of a step that is not yet written."""
QUANTILES = (("min", 0.0), ("q001", 0.001), ("q01", 0.01), ("q50", 0.5), ("q99", 0.99), ("q999", 0.999), ("max", 1.0))


def update_metrics(results: Sequence[UpdateResult], objective: Objective) -> dict[str, Any]:
    """Metrics of the step's updates: values are means over updates, token statistics are over all updates' tokens."""
    metrics: dict[str, Any] = {
        "updates": len(results),
        "updates_skipped": sum(result.grad_norm == 0 for result in results),
        "tokens": 0,
    }
    if not results:  # every group was left out
        return metrics
    whole = results[0].statistics
    for result in results[1:]:
        whole = whole + result.statistics
    metrics |= {
        "grad_norm": sum(result.grad_norm for result in results) / len(results),
        "learning_rate": results[-1].learning_rate,
        "tokens": int(whole.sums["tokens"]),
    }
    if objective.entropy:
        metrics["entropy_coefficient"] = results[-1].entropy_coefficient
    metrics |= cause_metrics(whole)
    if not whole.sums["tokens"]:  # every completion is masked
        return metrics
    first = next(one.statistics for one in results if one.statistics.sums["tokens"])
    metrics |= value_metrics(whole, len(results), objective) | entropy_metrics(whole) | ratio_metrics(whole)
    metrics |= clip_metrics(whole, objective) | sampler_metrics(first) | rule_metrics(whole)
    if objective.entropy:
        metrics["entropy_value"] = results[-1].entropy_coefficient * metrics["entropy"]
    return metrics | (kl_metrics(whole, len(results), objective) if "k1" in whole.sums else {})


def each_update(updates: Updates, objective: Objective) -> list[dict[str, Any]]:
    """Of each update of a step, in order, the metrics that need no sorting, under their names in the step's metrics;
    empty for an update that was skipped because a value was not finite."""
    results = iter(updates.results)
    skipped = set(updates.skipped)
    return [{} if number in skipped else one_update(next(results), objective) for number in range(updates.done)]


def one_update(result: UpdateResult, objective: Objective) -> dict[str, Any]:
    """The metrics of one update."""
    of_tokens, tokens = result.statistics, result.statistics.sums["tokens"]
    metrics: dict[str, Any] = {
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "tokens": int(tokens),
    }
    if objective.entropy:
        metrics["entropy_coefficient"] = result.entropy_coefficient
    if not tokens:
        return metrics
    metrics |= {"entropy": of_tokens.sums["entropy"] / tokens}
    metrics |= value_metrics(of_tokens, 1, objective) | clip_metrics(of_tokens, objective)
    return metrics | (kl_metrics(of_tokens, 1, objective) if "k1" in of_tokens.sums else {})


def value_metrics(whole: TokenStatistics, updates: int, objective: Objective) -> dict[str, Any]:
    """Values of the objective's terms, and the size of each term's gradient in the coefficients, which a KL over the
    vocabulary does not have."""
    over_vocabulary = objective.beta != 0 and objective.kl.estimator == "full"
    sums = whole.sums
    energies = sums["policy_energy"], sums["kl_energy"]
    both = math.sqrt(energies[0] * energies[1])
    return {
        "policy_value": sums["policy_value"] / updates,
        "policy_value_at_ratio_1": sums["policy_value_at_ratio_1"] / updates,
        "gradient/policy_l1": sums["policy_l1"] / updates,
        "gradient/kl_l1": None if over_vocabulary else sums["kl_l1"] / updates,
        "gradient/policy_energy": energies[0] / updates,
        "gradient/kl_energy": None if over_vocabulary else energies[1] / updates,
        "gradient/effective_tokens": sums["policy_sizes"] ** 2 / energies[0] if energies[0] else 0.0,
        "gradient/cosine": sums["cross_energy"] / both if both else None,
    } | ({"router_loss": sums["router_loss"] / updates} if "router_loss" in sums else {})


def cause_metrics(whole: TokenStatistics) -> dict[str, Any]:
    """Why tokens have or lack a policy gradient: shares that add up to 1."""
    causes = [cause.name.lower() for cause in Cause]
    return {f"tokens/{name}_share": whole.sums[f"cause_{name}"] / whole.sums["all_tokens"] for name in causes}


def entropy_metrics(whole: TokenStatistics) -> dict[str, Any]:
    """The policy's entropy over the vocabulary, and how its log-probs go with advantages."""
    sums, tokens = whole.sums, whole.sums["tokens"]
    metrics: dict[str, Any] = {
        "entropy": sums["entropy"] / tokens,
        "entropy/covariance": sums["logp_advantage"] / tokens - sums["logp"] * sums["advantage"] / tokens**2,
    }
    for name, q in (("q05", 0.05), ("q50", 0.5), ("q95", 0.95)):
        metrics[f"entropy/{name}"] = quantile(whole.values["entropy"], q)
    return metrics


def rule_metrics(whole: TokenStatistics) -> dict[str, Any]:
    """Share of the tokens and of the sequences on which each mismatch rule acted."""
    sums, metrics = whole.sums, {}
    for key, count in sums.items():
        kind, _, name = key.partition("/")
        if kind == "rule_tokens":
            metrics[f"mismatch/{name}/tokens_share"] = count / sums["tokens"]
        elif kind == "rule_sequences":
            metrics[f"mismatch/{name}/sequences_share"] = count / sums["sequences"]
    return metrics


def ratio_metrics(whole: TokenStatistics) -> dict[str, Any]:
    """The ratio to its anchor, over all updates."""
    sums, tokens = whole.sums, whole.sums["tokens"]
    metrics: dict[str, Any] = {
        "ratio/mean": sums["ratio"] / tokens,
        "ratio/mean_se": standard_error(sums["ratio"], sums["ratio_squared"], tokens),
        "ratio/held_share": sums["held"] / tokens,
    }
    for side in ("above_positive", "above_negative", "below_positive", "below_negative"):
        metrics[f"ratio/{side}_share"] = sums[side] / tokens
    for name, q in QUANTILES:
        metrics[f"ratio/log_{name}"] = quantile(whole.values["log_ratio"], q)
    for level in ("token", "sequence"):
        for sign in ("positive", "negative"):
            count, weight, squared = (sums[f"ess_{level}_{sign}_{part}"] for part in ("n", "w", "w2"))
            metrics[f"ess/{level}_{sign}"] = weight**2 / (count * squared) if count and squared else None
    return metrics


def clip_metrics(whole: TokenStatistics, objective: Objective) -> dict[str, Any]:
    """Share of the tokens, or of the completions if the ratio is that of a sequence, that the trust region clips on the
    side to which A pushes, whatever else silences them; and the extremes of the shares over completions."""
    sums = whole.sums
    if "clipped_low" not in sums:
        return {}
    units = sums["all_sequences"] if per_sequence(objective) else sums["all_tokens"] - sums["cause_masked"]
    return {
        "clip/low_share": sums["clipped_low"] / units,
        "clip/high_share": sums["clipped_high"] / units,
        "clip/low_min": 1 - whole.maxima["not_clipped_low"],
        "clip/high_max": whole.maxima["clipped_high"],
    }


def sampler_metrics(first: TokenStatistics) -> dict[str, Any]:
    """Old policy against sampler, over the tokens of the step's first update that has some, before it."""
    sums, tokens = first.sums, first.sums["tokens"]
    early, late = tokens - sums["late_tokens"], sums["late_tokens"]
    drift = sums["rho_k1_late"] / late - (sums["rho_k1"] - sums["rho_k1_late"]) / early if early and late else None
    metrics: dict[str, Any] = {
        "sampler/gap": sums["sampler_gap"] / tokens,
        "sampler/max_gap": first.maxima["sampler_gap"],
        "sampler/mean_ratio": sums["rho"] / tokens,
        "sampler/mean_ratio_se": standard_error(sums["rho"], sums["rho_squared"], tokens),
        "sampler/kl_k1": sums["rho_k1"] / tokens,
        "sampler/kl_k3": sums["rho_k3"] / tokens,
        "sampler/kl_k1_drift": drift,
        "sampler/unlikely_sequences_share": sums["unlikely_sequences"] / sums["sequences"],
    }
    for name, q in QUANTILES:
        metrics[f"sampler/log_ratio_{name}"] = quantile(first.values["log_rho"], q)
    return metrics


def kl_metrics(whole: TokenStatistics, updates: int, objective: Objective) -> dict[str, Any]:
    """The KL to the reference."""
    sums, tokens = whole.sums, whole.sums["tokens"]
    return {
        "beta": objective.beta,
        "kl_value": sums["kl_value"] / updates,
        "kl_value_weighted": sums["kl_value_weighted"] / updates,
        "kl/k1": sums["k1"] / tokens,
        "kl/k1_se": standard_error(sums["k1"], sums["k1_squared"], tokens),
        "kl/k3": sums["k3"] / tokens,
        "kl/k3_weighted": sums["k3_weighted"] / tokens,
        "kl/k3_se": standard_error(sums["k3"], sums["k3_squared"], tokens),
        "kl/max_gap": whole.maxima["kl_gap"],
        "kl/held_share": sums["kl_held"] / tokens,
        "kl/forward_coefficient": sums["forward_coefficient"] / tokens,
        "kl/top_share": sums["kl_top"] / sums["kl_l1"] if sums["kl_l1"] else None,
    }


def quantile(values: Tensor, q: float) -> float | None:
    """The smallest value that at least a share ``q`` of all values does not exceed; None without values. Works for any
    number of values (``torch.quantile`` fails above 2^24)."""
    if not values.numel():
        return None
    rank = min(values.numel(), max(1, math.ceil(q * values.numel())))
    return float(values.kthvalue(rank).values)


def standard_error(total: float, squared: float, count: float) -> float | None:
    """Standard error of a mean, from the sum of the values and of their squares."""
    if count < 2:
        return None
    mean = total / count
    return math.sqrt(max(0.0, squared / count - mean**2) / (count - 1))
