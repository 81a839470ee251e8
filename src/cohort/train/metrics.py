"""The metrics of a step: one line of ``metrics.jsonl``. ``docs/metrics.md`` gives every key with its formula."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cohort.errors import NonFiniteError
from cohort.evaluation.evaluate import ended_lengths, std_of
from cohort.objective import Cause, Objective, TokenStatistics, group_statistics, k3, per_sequence, segment_mean
from cohort.parallel import World, agreed
from cohort.policy.fused import uncompiled
from cohort.rewards.runner import Scores
from cohort.train.context import StepContext
from cohort.train.layout import Part, Rollout, active_part, group_numbers, part_of
from cohort.train.sweep import share, sweep, token_logps
from cohort.train.update import UpdateResult, Updates, microbatch_losses, minibatch_weights
from cohort.types import FinishReason, TokenBatch

# ----------------------------------------
# How much the completions of a step differ from each other, and how much they repeat themselves, from token ids.


SPAN = 4
"""Tokens that make up what is counted as repeated."""
SHORTEST = 4 * SPAN
"""Tokens of a completion below which a repetition says nothing."""
FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
"""Odd 64-bit numbers: a span's hash is the sum of its ids times these. Two spans share one by chance once in 2^64."""


def text_metrics(rollout: Rollout) -> dict[str, Any]:
    """Different completions, and repetition inside of them, over the usable completions."""
    groups = [[one.token_ids for one in group.completions] for group in rollout.usable_groups if group.completions]
    distinct = [len({ids.tobytes() for ids in group}) for group in groups]
    count = sum(map(len, groups))
    return {
        "completions/distinct_share": sum(distinct) / count,
        "groups/identical_share": sum(n == 1 < len(one) for n, one in zip(distinct, groups, strict=True)) / len(groups),
        "completions/repetition": repetition([ids for group in groups for ids in group]),
    }


def repetition(completions: Sequence[NDArray[np.int64]]) -> float | None:
    """The share of all spans of ``SPAN`` tokens that occurred in the same completion before, over the completions of at
    least ``SHORTEST`` tokens; None without any.

    >>> repetition([np.arange(16)]), round(repetition([np.zeros(16, int)]), 3)
    (0.0, 0.923)
    """
    long = [ids for ids in completions if len(ids) >= SHORTEST]
    if not long:
        return None
    ids_N, sequence_N = np.concatenate(long), np.repeat(np.arange(len(long)), [len(ids) for ids in long])
    spans = len(ids_N) - SPAN + 1
    hash_N = sequence_N[:spans].astype(np.uint64)  # so that spans of different completions differ
    for place, factor in enumerate(FACTORS):
        hash_N += ids_N[place : place + spans].astype(np.uint64) * factor
    hash_N = np.sort(hash_N[sequence_N[:spans] == sequence_N[SPAN - 1 :]])
    return int((hash_N[1:] == hash_N[:-1]).sum()) / len(hash_N)


# ----------------------------------------
# The metrics of updates, of a step's together and of each. ``docs/metrics.md`` gives every key with its formula.


EACH_UPDATE = "each_update"
"""The key of ``each_update`` in the metrics of a step that is not yet written."""
QUANTILES = {"min": 0.0, "q001": 0.001, "q01": 0.01, "q50": 0.5, "q99": 0.99, "q999": 0.999, "max": 1.0}


def update_metrics(results: Sequence[UpdateResult], objective: Objective) -> dict[str, Any]:
    """Metrics of the step's updates: values are means over updates, token statistics are over all updates' tokens."""
    skipped = sum(result.grad_norm == 0 for result in results)
    metrics: dict[str, Any] = {"updates": len(results), "updates_skipped": skipped, "tokens": 0}
    if not results:  # every group was left out
        return metrics
    whole = reduce(add, (result.statistics for result in results))
    metrics |= unsorted_metrics(results, whole, objective) | cause_metrics(whole)
    if not whole.sums["tokens"]:  # every completion is masked
        return metrics
    first = next(one.statistics for one in results if one.statistics.sums["tokens"])
    metrics |= entropy_metrics(whole) | ratio_metrics(whole) | sampler_metrics(first) | rule_metrics(whole)
    if objective.entropy:
        metrics["entropy_value"] = results[-1].entropy_coefficient * metrics["entropy"]
    return metrics


def each_update(updates: Updates, objective: Objective) -> list[dict[str, Any]]:
    """Of each update of a step, in order, the metrics that need no sorting, under their names in the step's metrics;
    empty for an update that was skipped because a value was not finite."""
    return [unsorted_metrics([one], one.statistics, objective) if one else {} for one in updates.outcomes]


def unsorted_metrics(results: Sequence[UpdateResult], whole: TokenStatistics, objective: Objective) -> dict[str, Any]:
    """The metrics of some updates that need no sorting; ``whole``: their statistics together."""
    tokens, count = whole.sums["tokens"], len(results)
    metrics: dict[str, Any] = {
        "grad_norm": sum(result.grad_norm for result in results) / count,
        "learning_rate": results[-1].learning_rate,
        "tokens": int(tokens),
    }
    if objective.entropy:
        metrics["entropy_coefficient"] = results[-1].entropy_coefficient
    if tokens:
        metrics["entropy"] = whole.sums["entropy"] / tokens
        metrics |= value_metrics(whole, count, objective) | clip_metrics(whole, objective)
        metrics |= kl_metrics(whole, count, objective) if "k1" in whole.sums else {}
    return metrics


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
    """The spread of the policy's entropy over the vocabulary, and how its log-probs go with advantages."""
    sums, tokens = whole.sums, whole.sums["tokens"]
    covariance = sums["logp_advantage"] / tokens - sums["logp"] * sums["advantage"] / tokens**2
    middle = {"q05": 0.05, "q50": 0.5, "q95": 0.95}
    return {"entropy/covariance": covariance} | quantiles("entropy/", whole.values["entropy"], middle)


def rule_metrics(whole: TokenStatistics) -> dict[str, Any]:
    """Share of the tokens and of the sequences on which each mismatch rule acted."""
    keys = [(key, *key.removeprefix("rule_").split("/", 1)) for key in whole.sums if key.startswith("rule_")]
    return {f"mismatch/{name}/{units}_share": whole.sums[key] / whole.sums[units] for key, units, name in keys}


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
    metrics |= quantiles("ratio/log_", whole.values["log_ratio"], QUANTILES)
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
    return {
        "sampler/gap": sums["sampler_gap"] / tokens,
        "sampler/max_gap": first.maxima["sampler_gap"],
        "sampler/mean_ratio": sums["rho"] / tokens,
        "sampler/mean_ratio_se": standard_error(sums["rho"], sums["rho_squared"], tokens),
        "sampler/kl_k1": sums["rho_k1"] / tokens,
        "sampler/kl_k3": sums["rho_k3"] / tokens,
        "sampler/kl_k1_drift": drift,
        "sampler/unlikely_sequences_share": sums["unlikely_sequences"] / sums["sequences"],
        **quantiles("sampler/log_ratio_", first.values["log_rho"], QUANTILES),
    }


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


def quantiles(prefix: str, values: Tensor, shares: Mapping[str, float]) -> dict[str, float | None]:
    """Quantiles of values by their names after ``prefix``."""
    return {f"{prefix}{name}": quantile(values, q) for name, q in shares.items()}


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


# ----------------------------------------
# The gradient norm of each term of the objective, measured.


def term_norms(
    context: StepContext, batch: TokenBatch, minibatch: Part, entropy_coefficient: float = 0.0
) -> dict[str, float]:
    """The norms of the gradients of the policy, KL and entropy terms, and the cosine between the first two, which
    ``gradient/..._energy`` estimates. Costs a backward pass per term; the weights do not change. Empty if a value is
    not finite."""
    try:
        flat = term_gradients(context, batch, minibatch, entropy_coefficient)
    except NonFiniteError:  # the update will say so
        return {}
    metrics = {f"gradient/{name}_norm": float(vector.norm()) for name, vector in flat.items()}
    if "kl" in flat and metrics["gradient/policy_norm"] and metrics["gradient/kl_norm"]:
        product = metrics["gradient/policy_norm"] * metrics["gradient/kl_norm"]
        metrics["gradient/exact_cosine"] = float(flat["policy"] @ flat["kl"]) / product
    return metrics


@torch.enable_grad()
def term_gradients(
    context: StepContext, batch: TokenBatch, minibatch: Part, entropy_coefficient: float
) -> dict[str, Tensor]:
    """Each term's gradient in all trained parameters, end to end: "policy", "kl" and "entropy", as far as the objective
    has them. Each rank computes its share.

    Raises:
        NonFiniteError: a value is not finite.
    """
    policy = context.policy
    weights = minibatch_weights(context, batch, minibatch, entropy_coefficient)
    part = active_part(batch, minibatch, context.objective, entropy_coefficient)
    shared = share(context, batch, part)
    weights = weights.at(part.positions_N).at(shared.own.positions_N)
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    sums: dict[str, Tensor] = {}

    def own_terms() -> list[str]:
        with policy.training(), policy.compute(), uncompiled():  # a graph serves several backward passes
            for micro, states, ref_states in sweep(context, policy, batch, shared, grad=True, attached=True):
                losses, _ = microbatch_losses(context.objective, batch, micro, weights, states, ref_states)
                for name, loss in losses.items():
                    grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
                    flat = torch.cat([grad.flatten() for grad in grads])
                    sums[name] = sums[name] + flat if name in sums else flat
        return list(sums)

    names = dict.fromkeys(name for some in agreed(context.world, own_terms) for name in some)
    empty = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=policy.device)
    return {name: context.world.sum_(sums.get(name, empty.clone())) for name in names}


MEASURED_PER_PROMPT = 4
"""Completions of one prompt that ``update_kl`` is measured on before other prompts are used up."""


def step_metrics(
    rollout: Rollout, batch: TokenBatch, results: Sequence[UpdateResult], objective: Objective, version_before: int
) -> dict[str, Any]:
    """A step's metrics, flat. What needs no pass is of all sampled completions; other means over tokens are sums over
    all updates divided by the tokens that the updates have passed over."""
    group_S = group_numbers(rollout.sampled)
    metrics = reward_metrics(rollout.sampled_scores, group_S) | length_metrics(rollout) | episode_metrics(rollout)
    metrics |= text_metrics(rollout) | group_metrics(rollout, version_before) | advantage_metrics(batch)
    return metrics | update_metrics(results, objective)


def reward_metrics(scores: Scores, group_S: Tensor) -> dict[str, Any]:
    """Rewards of the scored completions. A statistic of an empty set is None."""
    rewards_S = scores.rewards_S
    scored_S = rewards_S[~rewards_S.isnan()]
    statistics = group_statistics(rewards_S, group_S, ddof=0)
    metrics: dict[str, Any] = {
        **_spread("reward/mean", "reward", "groups/dead_share", rewards_S, group_S),
        "reward/unscored": int(rewards_S.isnan().sum()),
        "groups/unscored_share": float((statistics.count_P < 2).double().mean()),
        **_ends_of_dead(scored_S, statistics.mean_P[statistics.degenerate_P], len(statistics.degenerate_P)),
    }
    means_R = statistics.mean_P[~statistics.mean_P.isnan()]
    metrics |= quantiles("groups/mean_reward_", means_R, {"q10": 0.1, "q50": 0.5, "q90": 0.9})
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        key = f"rewards/{name}"
        metrics |= _spread(key, key, f"{key}/dead_share", column_S, group_S)
        metrics[f"{key}/unscored_share"] = float(column_S.isnan().double().mean())
    metrics |= scores.counts
    return metrics | {f"custom/{name}": sum(numbers) / len(numbers) for name, numbers in scores.logged.items()}


def _spread(mean: str, key: str, dead: str, rewards_S: Tensor, group_S: Tensor) -> dict[str, float | None]:
    """Mean, standard deviations, and share of dead groups, of the rewards that are known."""
    known_S, of_groups = rewards_S[~rewards_S.isnan()], group_statistics(rewards_S, group_S, ddof=0)
    within = _mean(of_groups.std_P[~of_groups.std_P.isnan()])
    spread = {mean: _mean(known_S), f"{key}/std": std_of(known_S), f"{key}/within_group_std": within}
    return spread | {dead: float(of_groups.degenerate_P.double().mean())}


def _ends_of_dead(scored_S: Tensor, dead_R: Tensor, groups: int) -> dict[str, float | None]:
    """Where the equal rewards of dead groups lie: nearer to the step's highest reward, or to its lowest."""
    low, high = (float(scored_S.min()), float(scored_S.max())) if scored_S.numel() else (0.0, 0.0)
    if low == high:
        return {"groups/dead_high_share": None, "groups/dead_low_share": None}
    middle = (low + high) / 2
    return {
        "groups/dead_high_share": float((dead_R > middle).sum()) / groups,
        "groups/dead_low_share": float((dead_R <= middle).sum()) / groups,
    }


def length_metrics(rollout: Rollout) -> dict[str, Any]:
    """Lengths in tokens, end token included, finish reasons and log-probs of the usable completions."""
    completions = [completion for completion in rollout.completions if completion.finish_reason.usable]
    errors = sum(completion.finish_reason is FinishReason.ERROR for completion in rollout.completions)
    lengths = torch.tensor([completion.num_tokens for completion in completions], dtype=torch.float64)
    ended = [completion.num_tokens for completion in completions if completion.finish_reason is FinishReason.EOS]
    reasons = Counter(completion.finish_reason for completion in completions)
    logps_N = torch.cat([torch.from_numpy(completion.sampler_logps) for completion in completions])
    return {
        "entropy/sampled": _mean(-logps_N[~logps_N.isnan()]),
        "length/mean": float(lengths.mean()),
        "length/min": int(lengths.min()),
        "length/max": int(lengths.max()),
        **ended_lengths(ended),
        "length/cut_share": reasons[FinishReason.LENGTH] / len(completions),
        "length/ended_share": reasons[FinishReason.EOS] / len(completions),
        "completions/errors": errors,
        "rollout/tokens": sum(len(one.prompt.token_ids) * len(one.completions) for one in rollout.sampled)
        + rollout.num_tokens,
    }


def episode_metrics(rollout: Rollout) -> dict[str, Any]:
    """Turns, calls of tools, and tokens of usable episodes; empty without tools and environments."""
    pairs = [(one, one.episode) for one in rollout.completions if one.episode is not None]
    usable = [(completion, episode) for completion, episode in pairs if completion.finish_reason.usable]
    if not usable:
        return {}
    turns = [turn for _, episode in usable for turn in episode.turns]
    read = sum(len(segment.token_ids) for completion, _ in usable for segment in completion.segments)
    rewards = [episode.reward for _, episode in usable if episode.reward is not None]
    return {
        "episodes/turns": len(turns) / len(usable),
        "episodes/turns_max": max(len(episode.turns) for _, episode in usable),
        "episodes/turns_cut_share": sum(c.finish_reason is FinishReason.TURNS for c, _ in usable) / len(usable),
        "episodes/calls": sum(turn.calls for turn in turns) / len(usable),
        "episodes/failed_call_share": sum(turn.failed_calls for turn in turns) / max(1, sum(t.calls for t in turns)),
        "episodes/drawn_share": sum(completion.num_tokens for completion, _ in usable) / read,
        "episodes/segments": sum(len(completion.segments) for completion, _ in usable) / len(usable),
        "episodes/environment_reward": sum(rewards) / len(rewards) if rewards else None,
        "episodes/failed": len(pairs) - len(usable),
        "seconds/answers": sum(turn.seconds for turn in turns),
    }


def group_metrics(rollout: Rollout, version_before: int) -> dict[str, Any]:
    """Groups and rounds of sampling, and the age of the weights that sampled."""
    lags = [version_before - one.weights_version for one in rollout.completions if one.num_tokens] or [0]
    return {
        "groups/sampled": len(rollout.sampled),
        "groups/left_out": len(rollout.sampled) - sum(rollout.is_used_P),
        "groups/rounds": rollout.rounds,
        "sampler/version_lag_mean": sum(lags) / len(lags),
        "sampler/version_lag_max": max(lags),
    }


def advantage_metrics(batch: TokenBatch) -> dict[str, Any]:
    """Advantages of the completions that the updates use, and their correlation with length."""
    count = batch.num_sequences
    lengths_S = batch.lengths_S.double()
    mean_S = segment_mean(batch.advantages_N.cpu(), batch.sequence_N.cpu(), count)
    centred_l, centred_a = (lengths_S - lengths_S.mean(), mean_S - mean_S.mean()) if count else (lengths_S, mean_S)
    spread = float((centred_l.square().sum() * centred_a.square().sum()).sqrt()) if count else 0.0
    return {
        "advantage/abs_mean": _mean(mean_S.abs()),
        "advantage/length_correlation": float((centred_l * centred_a).sum()) / spread if spread else None,
        "length/mean_positive": _mean(lengths_S[mean_S > 0]),
        "length/mean_negative": _mean(lengths_S[mean_S < 0]),
    }


def rank_metrics(world: World, results: Sequence[UpdateResult], step_seconds: float) -> dict[str, Any]:
    """How evenly the ranks have shared the work, and the cost of exchanges since the last call. Empty for one rank."""
    if world.size == 1:
        return {}
    each = world.gather(world.costs())
    seconds, waiting = max(one.seconds for one in each), sum(one.waiting for one in each) / world.size
    return {
        "parallel/ranks": world.size,
        "parallel/load": sum(result.load for result in results) / len(results) if results else None,
        "parallel/exchange_seconds": seconds,
        "parallel/exchange_share": seconds / step_seconds,
        "parallel/waiting_seconds": waiting,
    }


def policy_movement(
    context: StepContext, batch: TokenBatch, results: Sequence[UpdateResult], completions: int
) -> dict[str, Any]:
    """``update_kl``: KL(policy before the step || policy after it) per token, by k3 on some completions of the rollout.

    Args:
        context: the step's.
        batch: the rollout.
        results: the step's updates.
        completions: number of completions to measure on; 0: do not measure.
    """
    if not completions or not batch.num_sequences:
        return {}
    if not any(result.grad_norm for result in results):
        return {"update_kl": 0.0}
    before_N = results[0].logps_N if batch.old_logps_N is None else batch.old_logps_N
    known = sorted(set(batch.sequence_N[~before_N.isnan()].tolist()))
    part = part_of(batch, _few_prompts(batch, known, completions))
    after_N = token_logps(context, context.policy, batch, part).logps_N
    return {"update_kl": float(k3(before_N[part.tokens_N].double(), after_N.double()).mean())}


def _few_prompts(batch: TokenBatch, sequences: Sequence[int], count: int) -> list[int]:
    """``count`` of the sequences: four of each prompt, because reading a prompt may cost more than they do, and of
    prompts that are far apart in the batch."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    groups = batch.group_S.tolist()
    for s in sequences:
        by_prompt.setdefault(batch.prompt_ids[groups[s]], []).append(s)
    stride = max(1, len(by_prompt) * MEASURED_PER_PROMPT // count)
    lists = list(by_prompt.values())
    spread = [lists[index] for index in sorted(range(len(lists)), key=lambda index: index % stride)]
    ordered = [some[:MEASURED_PER_PROMPT] for some in spread] + [some[MEASURED_PER_PROMPT:] for some in spread]
    return sorted([s for some in ordered for s in some][:count])


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if values.numel() else None
