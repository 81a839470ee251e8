"""What a step's line in ``metrics.jsonl`` says. ``docs/metrics.md`` has every key with its formula."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cohort.objective import Cause, Objective, TokenStatistics, group_statistics, k3, segment_mean
from cohort.policy import Policy
from cohort.train.batch import group_numbers, select, token_indices
from cohort.train.packing import policy_logps
from cohort.train.rollout import Rollout
from cohort.train.update import UpdateResult
from cohort.types import FinishReason, Scores, TokenBatch

QUANTILES = (("min", 0.0), ("q001", 0.001), ("q01", 0.01), ("q50", 0.5), ("q99", 0.99), ("q999", 0.999), ("max", 1.0))
MOVED_PER_PROMPT = 4
"""Completions of one prompt by which it is measured how far the policy has moved."""


class PhaseClock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as ``phase``."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: int) -> dict[str, float]:
        """Seconds by phase, their sum, and how many tokens of the rollout it took a second."""
        total = sum(self.seconds.values())
        phases = {f"seconds/{phase}": seconds for phase, seconds in self.seconds.items()}
        return {**phases, "seconds/step": total, "tokens_per_second": tokens / total}


def step_metrics(
    rollout: Rollout, batch: TokenBatch, results: Sequence[UpdateResult], objective: Objective, version_before: int
) -> dict[str, Any]:
    """A step's metrics, flat. Rewards and lengths are of all that was sampled; means over tokens are sums over all
    updates divided by the tokens of all updates."""
    group_S = group_numbers(rollout.sampled)
    metrics = reward_metrics(rollout.sampled_scores, group_S) | length_metrics(rollout)
    metrics |= group_metrics(rollout, version_before) | advantage_metrics(batch)
    return metrics | update_metrics(results, objective)


def reward_metrics(scores: Scores, group_S: Tensor) -> dict[str, Any]:
    """Rewards over the scored completions. A statistic of nothing is None."""
    rewards_S = scores.rewards_S
    scored_S = rewards_S[~rewards_S.isnan()]
    statistics = group_statistics(rewards_S, group_S, ddof=0)
    means_R = statistics.mean_P[~statistics.mean_P.isnan()]
    metrics: dict[str, Any] = {
        "reward/mean": _mean(scored_S),
        "reward/std": float(scored_S.std(correction=0)) if scored_S.numel() else None,
        "reward/within_group_std": _mean(statistics.std_P[~statistics.std_P.isnan()]),
        "reward/unscored": int(rewards_S.isnan().sum()),
        "groups/dead_share": float(statistics.degenerate_P.double().mean()),
    }
    for name, q in (("q10", 0.1), ("q50", 0.5), ("q90", 0.9)):
        metrics[f"groups/mean_reward_{name}"] = quantile(means_R, q)
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        spread_R = group_statistics(column_S, group_S, ddof=0).std_P
        metrics[f"rewards/{name}"] = _mean(column_S[~column_S.isnan()])
        metrics[f"rewards/{name}/within_group_std"] = _mean(spread_R[~spread_R.isnan()])
        metrics[f"rewards/{name}/unscored_share"] = float(column_S.isnan().double().mean())
    metrics |= scores.counts
    return metrics | {f"custom/{name}": sum(numbers) / len(numbers) for name, numbers in scores.logged.items()}


def length_metrics(rollout: Rollout) -> dict[str, Any]:
    """Lengths in tokens (end token included) and how completions ended, of those that did."""
    completions = [completion for completion in rollout.completions if completion.finish_reason.usable]
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.float64)
    reasons = Counter(completion.finish_reason for completion in completions)
    return {
        "length/mean": float(lengths.mean()),
        "length/min": int(lengths.min()),
        "length/max": int(lengths.max()),
        "length/cut_share": reasons[FinishReason.LENGTH] / len(completions),
        "completions/errors": rollout.num_errors,
    }


def group_metrics(rollout: Rollout, version_before: int) -> dict[str, Any]:
    """What sampling cost, and how old the weights were that sampled."""
    lags = [version_before - completion.weights_version for completion in rollout.completions]
    return {
        "groups/sampled": len(rollout.sampled),
        "groups/left_out": len(rollout.sampled) - sum(rollout.used_R),
        "groups/rounds": rollout.rounds,
        "sampler/version_lag_mean": sum(lags) / len(lags),
        "sampler/version_lag_max": max(lags),
    }


def advantage_metrics(batch: TokenBatch) -> dict[str, Any]:
    """Advantages of the completions that the updates use, and how they go with length."""
    count = batch.num_sequences
    lengths_S = torch.tensor([len(ids) for ids in batch.completion_ids], dtype=torch.float64)
    mean_S = segment_mean(batch.advantages_N.cpu(), batch.sequence_N.cpu(), count)
    centred_l, centred_a = (lengths_S - lengths_S.mean(), mean_S - mean_S.mean()) if count else (lengths_S, mean_S)
    spread = float((centred_l.square().sum() * centred_a.square().sum()).sqrt()) if count else 0.0
    return {
        "advantage/abs_mean": _mean(mean_S.abs()),
        "advantage/length_correlation": float((centred_l * centred_a).sum()) / spread if spread else None,
        "length/mean_positive": _mean(lengths_S[mean_S > 0]),
        "length/mean_negative": _mean(lengths_S[mean_S < 0]),
    }


def update_metrics(results: Sequence[UpdateResult], objective: Objective) -> dict[str, Any]:
    """The step's updates. Values are means over updates; token statistics are over all tokens of all updates."""
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
    metrics |= value_metrics(whole, len(results), objective) | entropy_metrics(whole) | ratio_metrics(whole)
    metrics |= sampler_metrics(results[0].statistics) | rule_metrics(whole)
    if objective.entropy:
        metrics["entropy_value"] = results[-1].entropy_coefficient * metrics["entropy"]
    return metrics | (kl_metrics(whole, len(results), objective) if "k1" in whole.sums else {})


def value_metrics(whole: TokenStatistics, updates: int, objective: Objective) -> dict[str, Any]:
    """The objective's terms: values, and how large each one's gradient is (of coefficients: not that of a KL over the
    vocabulary)."""
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
        "gradient/cosine": sums["cross_energy"] / both if both else None,
    }


def cause_metrics(whole: TokenStatistics) -> dict[str, Any]:
    """What became of the tokens: shares that add up to 1."""
    causes = [cause.name.lower() for cause in Cause]
    return {f"tokens/{name}_share": whole.sums[f"cause_{name}"] / whole.sums["all_tokens"] for name in causes}


def entropy_metrics(whole: TokenStatistics) -> dict[str, Any]:
    """The policy's entropy over its vocabulary, and what the sampled tokens say of it."""
    sums, tokens = whole.sums, whole.sums["tokens"]
    metrics: dict[str, Any] = {
        "entropy": sums["entropy"] / tokens,
        "entropy/sampled": sums["sampled_entropy"] / sums["known_sampler"] if sums["known_sampler"] else None,
        "entropy/covariance": sums["logp_advantage"] / tokens - sums["logp"] * sums["advantage"] / tokens**2,
    }
    for name, q in (("q05", 0.05), ("q50", 0.5), ("q95", 0.95)):
        metrics[f"entropy/{name}"] = quantile(whole.values["entropy"], q)
    return metrics


def rule_metrics(whole: TokenStatistics) -> dict[str, Any]:
    """On what share of the tokens and of the sequences each mismatch rule acted."""
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


def sampler_metrics(first: TokenStatistics) -> dict[str, Any]:
    """Old policy against sampler, over the tokens of the step's first update, before it."""
    sums, tokens = first.sums, first.sums["tokens"]
    if not tokens:
        return {}
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
        "kl/k1": sums["k1"] / tokens,
        "kl/k1_se": standard_error(sums["k1"], sums["k1_squared"], tokens),
        "kl/k3": sums["k3"] / tokens,
        "kl/k3_se": standard_error(sums["k3"], sums["k3_squared"], tokens),
        "kl/max_gap": whole.maxima["kl_gap"],
        "kl/held_share": sums["kl_held"] / tokens,
        "kl/forward_coefficient": sums["forward_coefficient"] / tokens,
        "kl/top_share": sums["kl_top"] / sums["kl_l1"] if sums["kl_l1"] else None,
    }


def policy_movement(
    policy: Policy,
    batch: TokenBatch,
    results: Sequence[UpdateResult],
    temperature: float,
    token_budget: int,
    completions: int,
) -> dict[str, Any]:
    """KL(policy before the step || policy after it), per token, measured by k3 on some of the rollout's completions."""
    moved = any(result.grad_norm for result in results)
    if not completions or not batch.num_sequences:
        return {}
    if not moved:
        return {"update_kl": 0.0}
    before_N = results[0].logps_N if batch.old_logps_N is None else batch.old_logps_N
    known = sorted(set(batch.sequence_N[~before_N.isnan()].tolist()))
    chosen = _of_few_prompts(batch, known, completions)
    places_N = token_indices(batch, chosen)
    after_N = policy_logps(policy, select(batch, chosen), temperature, token_budget)
    return {"update_kl": float(k3(before_N[places_N].double(), after_N.double()).mean())}


def _of_few_prompts(batch: TokenBatch, sequences: Sequence[int], count: int) -> list[int]:
    """Some of the sequences, four of a prompt, as a prompt may cost more than they do; of prompts far apart."""
    of_prompt: dict[tuple[int, ...], list[int]] = {}
    for s in sequences:
        of_prompt.setdefault(batch.prompt_ids[s], []).append(s)
    apart = max(1, len(of_prompt) * MOVED_PER_PROMPT // count)
    by_turns = sorted(range(len(of_prompt)), key=lambda place: place % apart)  # those far apart come first
    prompts = [list(of_prompt.values())[place] for place in by_turns]
    in_order = [own[:MOVED_PER_PROMPT] for own in prompts] + [own[MOVED_PER_PROMPT:] for own in prompts]
    return sorted([s for own in in_order for s in own][:count])


def quantile(values: Tensor, q: float) -> float | None:
    """The value that a share ``q`` of all values is at most: one of them, the smallest for 0 and the largest for 1. Of
    any number of values (``torch.quantile`` fails above 2^24)."""
    if not values.numel():
        return None
    place = min(values.numel(), max(1, math.ceil(q * values.numel())))
    return float(values.kthvalue(place).values)


def standard_error(total: float, squared: float, count: float) -> float | None:
    """Standard error of a mean, from the sum of the values and of their squares."""
    if count < 2:
        return None
    mean = total / count
    return math.sqrt(max(0.0, squared / count - mean**2) / (count - 1))


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if values.numel() else None
