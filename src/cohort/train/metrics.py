"""The metrics of a step: one line of ``metrics.jsonl``. ``docs/metrics.md`` gives every key with its formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cohort.evaluation.totals import ended_lengths, std_of
from cohort.objective import Objective, group_statistics, k3, segment_mean
from cohort.parallel import World
from cohort.rewards.scores import Scores
from cohort.train.context import StepContext
from cohort.train.layout import group_numbers, part_of
from cohort.train.logps import token_logps
from cohort.train.rollout import Rollout
from cohort.train.texts import text_metrics
from cohort.train.update import UpdateResult
from cohort.train.update_metrics import quantile, update_metrics
from cohort.types import FinishReason, TokenBatch

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
    scored_P = torch.bincount(group_S[~rewards_S.isnan()], minlength=len(statistics.mean_P))
    means_R = statistics.mean_P[~statistics.mean_P.isnan()]
    metrics: dict[str, Any] = {
        "reward/mean": _mean(scored_S),
        "reward/std": std_of(scored_S),
        "reward/within_group_std": _mean(statistics.std_P[~statistics.std_P.isnan()]),
        "reward/unscored": int(rewards_S.isnan().sum()),
        "groups/dead_share": float(statistics.degenerate_P.double().mean()),
        "groups/unscored_share": float((scored_P < 2).double().mean()),
        **_ends_of_dead(scored_S, statistics.mean_P[statistics.degenerate_P], len(statistics.degenerate_P)),
    }
    for name, q in (("q10", 0.1), ("q50", 0.5), ("q90", 0.9)):
        metrics[f"groups/mean_reward_{name}"] = quantile(means_R, q)
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        own = group_statistics(column_S, group_S, ddof=0)
        metrics[f"rewards/{name}"] = _mean(column_S[~column_S.isnan()])
        metrics[f"rewards/{name}/std"] = std_of(column_S[~column_S.isnan()])
        metrics[f"rewards/{name}/within_group_std"] = _mean(own.std_P[~own.std_P.isnan()])
        metrics[f"rewards/{name}/dead_share"] = float(own.degenerate_P.double().mean())
        metrics[f"rewards/{name}/unscored_share"] = float(column_S.isnan().double().mean())
    metrics |= scores.counts
    return metrics | {f"custom/{name}": sum(numbers) / len(numbers) for name, numbers in scores.logged.items()}


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
        "completions/errors": rollout.num_errors,
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
