"""Rewards to advantages, one number per completion. Pure functions on flat tensors; statistics in float64.

    A_i = centred(R)_i / scale        NaN rewards are left out of every statistic and have A = 0

    baseline            centred(R)_i
    "none"              R_i
    a number b          R_i - b
    "group_mean"        R_i - mean of the group                                             GRPO
    "leave_one_out"     R_i - mean of the others of the group                               RLOO
    "length_weighted"   R_i - sum(|o_j| R_j) / sum(|o_j|) of the group                      OPO
    "batch_mean"        R_i - mean of the batch
    "file.py:function"  R_i - function(R, group)_i, a user's; R may contain NaN; a NaN in the result means A = 0
    "second_best"       n (R_max - R_second) for the best of the group's n, 0 for the others   pass@k

    scale               divisor
    None                1
    GroupStd            std of the group + epsilon                                          GRPO
    BatchStd            std of all (raw or centred) rewards of the batch + epsilon          Lite PPO, REINFORCE++
    GroupMean           mean of the group + epsilon; rewards must not be negative           MaxRL

Equal rewards give exactly 0 wherever a group (or, for the batch's statistics, the batch) is compared with itself:
decided by max == min, never by a small standard deviation.

>>> import torch
>>> rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
>>> group = torch.zeros(8, dtype=torch.long)
>>> outcome_advantages(rewards, group, scale=GroupStd(epsilon=0.0))[:2]
tensor([ 1.2076, -0.7246], dtype=torch.float64)
>>> outcome_advantages(rewards, group, baseline="leave_one_out", scale=None)[:2]
tensor([ 0.7143, -0.4286], dtype=torch.float64)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.errors import ConfigError, RewardError
from cohort.objective.segments import grouped_order, index_in_run, segment_count, segment_sum
from cohort.objective.user_function import call_user_function
from cohort.presets.parts import GROUP_BASELINES, BatchStd, GroupMean, GroupStd, Scale


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Per-group statistics over the scored members (those whose reward is not NaN). Axis P: distinct group ids.

    ``index_S`` maps a completion to its index on axis P. ``std_P`` is NaN where ``count - ddof`` is not positive.
    ``degenerate_P``: fewer than two scored members, or all of them equal (max == min, an exact test: a rounding error
    in a standard deviation never decides whether a group teaches something).
    """

    index_S: Tensor
    count_P: Tensor
    mean_P: Tensor
    std_P: Tensor
    degenerate_P: Tensor


def group_statistics(rewards_S: Tensor, group_S: Tensor, *, ddof: int = 1) -> GroupStatistics:
    """Mean, standard deviation and degeneracy of each group's rewards, NaN rewards left out.

    Args:
        rewards_S: rewards, shape ``[S]``; NaN marks an unscored completion.
        group_S: group id of each completion, shape ``[S]``. Groups may have any size and any order.
        ddof: delta degrees of freedom of the standard deviation: 1 divides by n - 1, 0 by n.

    The standard deviation is two-pass (differences from the mean, then squares): E[x^2] - E[x]^2 in floating point
    turns equal rewards into a small non-zero spread.
    """
    if rewards_S.shape != group_S.shape or rewards_S.ndim != 1:
        raise ValueError(f"expected two vectors of one length, got {tuple(rewards_S.shape)} and {tuple(group_S.shape)}")
    rewards_S = rewards_S.double()
    _, index_S = torch.unique(group_S, return_inverse=True)
    num_groups = segment_count(index_S)
    scored_S = ~torch.isnan(rewards_S)
    kept, where = rewards_S[scored_S], index_S[scored_S]

    def per_group(values: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64, device=values.device).index_add_(0, where, values)

    count_P = per_group(torch.ones_like(kept))
    mean_P = per_group(kept) / count_P
    std_P = torch.sqrt(per_group((kept - mean_P[where]) ** 2) / (count_P - ddof).clamp(min=0))
    infinity = torch.full_like(mean_P, torch.inf)
    highest_P = (-infinity).scatter_reduce(0, where, kept, "amax")
    lowest_P = infinity.scatter_reduce(0, where, kept, "amin")
    degenerate_P = (count_P < 2) | (highest_P == lowest_P)
    return GroupStatistics(index_S, count_P, mean_P, std_P, degenerate_P)


def outcome_advantages(
    rewards_S: Tensor,
    group_S: Tensor,
    *,
    baseline: float | str = "group_mean",
    scale: Scale | None = GroupStd(),  # noqa: B008 (frozen)
    lengths_S: Tensor | None = None,
) -> Tensor:
    """One advantage per completion. Formulas in the module's header.

    Args:
        rewards_S: rewards, shape ``[S]``; NaN marks a completion without a score.
        group_S: group id of each completion, shape ``[S]``; groups of any size, in any order.
        baseline: is subtracted from each reward.
        scale: the divisor of the rest.
        lengths_S: loss tokens per completion, for "length_weighted" and for statistics over tokens.

    Returns:
        Advantages, float64, shape ``[S]``. Exactly 0 for every member of a degenerate group (all scored rewards equal,
        or fewer than two of them) where the baseline or the standard deviation is the group's; and where its mean is
        the scale, of a group with fewer than two scored members or whose rewards are all 0.

    Raises:
        RewardError: scale ``GroupMean`` with a negative reward.

    Sources: DeepSeekMath (arXiv 2402.03300) 4.1.2; RLOO (2402.14740); OPO (2505.23585); MaxRL (2602.02710); Lite PPO
    (2508.08221); pass@k (2503.19595).

    >>> outcome_advantages(torch.tensor([0.1] * 8), torch.zeros(8, dtype=torch.long)).tolist() == [0.0] * 8
    True
    """
    statistics = group_statistics(rewards_S, group_S, ddof=scale.ddof if isinstance(scale, GroupStd) else 0)
    rewards_S = rewards_S.double()
    scored_S = ~torch.isnan(rewards_S)
    centred_S = centred_rewards(baseline, rewards_S, statistics, lengths_S)
    silent_S = ~scored_S | centred_S.isnan()  # no score, or nothing to be compared with
    if baseline in GROUP_BASELINES or isinstance(scale, GroupStd):
        silent_S = silent_S | statistics.degenerate_P[statistics.index_S]
    silent_S = silent_S | (baseline == "batch_mean" and batch_std(rewards_S[scored_S], 0) is None)
    return torch.where(silent_S, 0.0, _scaled(scale, rewards_S, centred_S, statistics, lengths_S, baseline))


def _scaled(
    scale: Scale | None,
    rewards_S: Tensor,
    centred_S: Tensor,
    statistics: GroupStatistics,
    lengths_S: Tensor | None,
    baseline: float | str,
) -> Tensor:
    """Rewards less their baseline, divided by the scale."""
    match scale:
        case None:
            return centred_S
        case GroupStd():
            return centred_S / (statistics.std_P[statistics.index_S] + scale.epsilon)
        case GroupMean():
            if bool((rewards_S < 0).any()):
                raise RewardError(
                    f"scale 'group_mean' needs rewards that are not negative (a negative mean turns every sign round), "
                    f"got {float(rewards_S[~rewards_S.isnan()].min()):g}: set objective.scale to 'none' or 'group_std'"
                )
            mean_S, count_S = statistics.mean_P[statistics.index_S], statistics.count_P[statistics.index_S]
            return torch.where((count_S < 2) | (mean_S == 0), 0.0, centred_S / (mean_S + scale.epsilon))
        case BatchStd():
            by_token, scored_S = scale.unit == "token", ~rewards_S.isnan()
            if by_token and baseline == "batch_mean":
                centred_S = rewards_S - rewards_S[_by_token(scored_S, lengths_S)].mean()
            # A completion that has nothing to be compared with has no part in the spread of the centred rewards.
            centred = scale.of == "centred"
            values_S, counted_S = (centred_S, scored_S & centred_S.isfinite()) if centred else (rewards_S, scored_S)
            spread = batch_std(values_S[_by_token(counted_S, lengths_S) if by_token else counted_S], scale.ddof)
            return torch.zeros_like(centred_S) if spread is None else centred_S / (spread + scale.epsilon)


def centred_rewards(
    baseline: float | str, rewards_S: Tensor, statistics: GroupStatistics, lengths_S: Tensor | None = None
) -> Tensor:
    """Rewards less their baseline, shape ``[S]``; NaN where there is no reward, or no other to compare it with."""
    if isinstance(baseline, int | float):
        return rewards_S - baseline
    index_S, mean_S = statistics.index_S, statistics.mean_P[statistics.index_S]
    count_S = statistics.count_P[index_S]
    match baseline:
        case "none":
            return rewards_S
        case "group_mean":
            return rewards_S - mean_S
        case "leave_one_out":  # R - (n mean - R) / (n - 1) = n / (n - 1) (R - mean)
            return (rewards_S - mean_S) * count_S / (count_S - 1)
        case "length_weighted":
            return rewards_S - _length_weighted_mean(rewards_S, statistics, lengths_S)[index_S]
        case "batch_mean":
            return rewards_S - rewards_S.nanmean()
        case "second_best":
            return _lead_over_the_second(rewards_S, index_S) * count_S
    return rewards_S - _user_baseline(baseline, rewards_S, index_S)


def _length_weighted_mean(rewards_S: Tensor, statistics: GroupStatistics, lengths_S: Tensor | None) -> Tensor:
    if lengths_S is None:
        raise ValueError("baseline 'length_weighted' needs lengths_S")
    lengths_S, mean_P = lengths_S.double().masked_fill(torch.isnan(rewards_S), 0), statistics.mean_P
    weighted_P = segment_sum(lengths_S * rewards_S.nan_to_num(nan=0.0), statistics.index_S, len(mean_P))
    total_P = segment_sum(lengths_S, statistics.index_S, len(mean_P))
    # A group whose completions are all empty has no weights: its plain mean.
    return torch.where(total_P > 0, weighted_P / total_P.clamp(min=1), mean_P)


def _user_baseline(spec: str, rewards_S: Tensor, index_S: Tensor) -> Tensor:
    if ":" not in spec:
        raise ValueError(f"unknown baseline {spec!r}")
    baseline_S = call_user_function("baseline", spec, rewards_S.clone(), index_S.clone())
    if bool(baseline_S[~rewards_S.isnan()].isinf().any()):
        raise ConfigError(f"baseline {spec} returned an infinite number for a scored completion")
    return baseline_S.double()


def _by_token(counted_S: Tensor, lengths_S: Tensor | None) -> Tensor:
    """The indices of the completions that count, each as often as it has tokens."""
    if lengths_S is None:
        raise ValueError("statistics over tokens (scale.unit 'token') need lengths_S")
    return torch.arange(len(counted_S), device=counted_S.device).repeat_interleave(lengths_S * counted_S)


def batch_std(values: Tensor, ddof: int) -> Tensor | None:
    """Standard deviation of all values; None where they are all equal or too few to have one."""
    if values.numel() <= max(ddof, 1) or values.max() == values.min():
        return None
    return values.std(correction=ddof)


def combined_advantages(
    rewards_SK: Tensor,
    weights_K: Tensor,
    group_S: Tensor,
    *,
    over_batch: bool,
    baseline: float | str = "group_mean",
    scale: Scale | None = GroupStd(),  # noqa: B008 (frozen)
    lengths_S: Tensor | None = None,
) -> Tensor:
    """MO-GRPO: turn each of several rewards into an advantage in its group, then sum with weights. Shape ``[S]``.

        A_i = sum_k w_k A_ik              over_batch: then (A - mean of the batch) / (std of the batch + epsilon): GDPO

    Args:
        rewards_SK: each function's rewards, NaN where it gave none, shape ``[S, K]``.
        weights_K: one per function.
        group_S: group ids.
        over_batch: normalise the sums over the batch, each completion counting once. With a single reward this is
            GRPO times a factor of the batch.
        baseline, scale, lengths_S: of each reward; see ``outcome_advantages``.

    A NaN reward leaves its term out of the completion's sum. A completion without any reward has advantage 0 and no
    part in the batch's statistics.

    Sources: MO-GRPO (arXiv 2509.22047), GDPO (2601.05242).
    """
    columns = [
        outcome_advantages(rewards_S, group_S, baseline=baseline, scale=scale, lengths_S=lengths_S)
        for rewards_S in rewards_SK.T
    ]
    advantages_S = torch.stack(columns, dim=1) @ weights_K.double()
    if not over_batch:
        return advantages_S
    scored_S = ~torch.isnan(rewards_SK).all(dim=1)
    ddof, epsilon = (scale.ddof, scale.epsilon) if isinstance(scale, GroupStd) else (1, 0.0)
    spread = batch_std(advantages_S[scored_S], ddof)
    if spread is None:
        return torch.zeros_like(advantages_S)
    normalised_S = (advantages_S - advantages_S[scored_S].mean()) / (spread + epsilon)
    if baseline not in GROUP_BASELINES and not isinstance(scale, GroupStd):
        return torch.where(scored_S, normalised_S, 0.0)
    # Groups that are dead in every reward stay at exactly 0: the batch's mean, even if only a rounding, is no signal.
    _, index_S = torch.unique(group_S, return_inverse=True)
    return torch.where(scored_S & live_groups(rewards_SK, group_S)[index_S], normalised_S, 0.0)


def live_groups(rewards_SK: Tensor, group_S: Tensor) -> Tensor:
    """Which groups' rewards are not all equal, boolean, shape ``[P]``, P the distinct ids in ascending order. With
    several columns K, a group is live if any of them differs within it."""
    live = [~group_statistics(rewards_S, group_S, ddof=0).degenerate_P for rewards_S in rewards_SK.T]
    return torch.stack(live).any(dim=0)


def _lead_over_the_second(rewards_S: Tensor, index_S: Tensor) -> Tensor:
    """R_max - R_second for the best of each group, 0 for the others (and for all, where two share the maximum)."""
    lead_S = torch.zeros_like(rewards_S)
    order_S = grouped_order(rewards_S.nan_to_num(nan=-torch.inf), index_S, descending=True)
    order_S = order_S[~torch.isnan(rewards_S[order_S])]
    sorted_S = rewards_S[order_S]
    first = (index_in_run(index_S[order_S]) == 0).nonzero().squeeze(-1)
    second = (first + 1).clamp(max=max(len(order_S) - 1, 0))
    lead_S[order_S[first]] = sorted_S[first] - sorted_S[second]
    return lead_S
