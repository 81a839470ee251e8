"""The steps before the advantages: shape rewards by length and likelihood, and choose completions."""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.errors import RewardError
from cohort.objective.segments import grouped_order, index_in_run
from cohort.presets.parts import SoftOverlong, TopK, Unlikeliness


def soft_overlong_punishment(lengths_S: Tensor, max_length: int, cache_length: float) -> Tensor:
    """DAPO's length penalty, to be added to the reward, float64, shape ``[S]``.

        0                                       |o| <= L_max - L_cache
        ((L_max - L_cache) - |o|) / L_cache     in between
        -1                                      |o| > L_max

    Args:
        lengths_S: tokens per completion.
        max_length, cache_length: L_max and L_cache, in tokens; ``0 < cache_length <= max_length``.

    Source: DAPO (arXiv 2503.14476) eq. 13.

    >>> soft_overlong_punishment(torch.tensor([80, 90, 100, 101]), max_length=100, cache_length=20)
    tensor([ 0.0000, -0.5000, -1.0000, -1.0000], dtype=torch.float64)
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"expected 0 < cache_length <= max_length, got {cache_length} and {max_length}")
    return (((max_length - cache_length) - lengths_S.double()) / cache_length).clamp(-1, 0) + 0.0


def soft_overlong(rule: SoftOverlong, lengths_S: Tensor, max_completion_length: int) -> Tensor:
    """``soft_overlong_punishment`` with a rule's numbers."""
    length = rule.max_length or max_completion_length
    return soft_overlong_punishment(lengths_S, length, rule.cache_share * length)


def unlikeliness(rule: Unlikeliness, rewards_S: Tensor, mean_logps_S: Tensor, group_S: Tensor) -> Tensor:
    """``R_i (1 - strength * rank_i / G)``, shape ``[S]``: rank_i is how many of the group are less likely than i.

    Args:
        rule: the strength; 0 changes nothing.
        rewards_S: NaN stays NaN. A reward of 0 stays 0, so wrong answers are not touched.
        mean_logps_S: each completion's mean log-prob per token under the sampler.
        group_S: group ids; G is the group's size.

    Raises:
        RewardError: a reward is negative; a likely completion would then have a smaller penalty.

    Equal likelihoods share the lower rank, so the order of completions does not matter.

    Source: "Rewarding the Unlikely" (arXiv 2506.02355).

    >>> lp, one_group = torch.tensor([-0.5, -2.0]), torch.zeros(2, dtype=torch.long)
    >>> unlikeliness(Unlikeliness(strength=0.25), torch.ones(2), mean_logps_S=lp, group_S=one_group)
    tensor([0.8750, 1.0000], dtype=torch.float64)
    """
    if bool((rewards_S < 0).any()):
        raise RewardError(
            "unlikeliness needs rewards that are not negative: it would reduce the penalty of likely completions"
        )
    _, index_S, count_P = torch.unique(group_S, return_inverse=True, return_counts=True)
    order_S = grouped_order(mean_logps_S, index_S)
    rank_in_group_S = index_in_run(index_S[order_S])
    # Completions of equal likelihood share the rank of the first of them.
    index_in_tie_S = index_in_run(torch.stack([index_S[order_S].to(mean_logps_S), mean_logps_S[order_S]], dim=1))
    rank_S = torch.empty_like(rank_in_group_S).scatter_(0, order_S, rank_in_group_S - index_in_tie_S)
    kept_S: Tensor = 1 - rule.strength * rank_S.double() / count_P[index_S]
    return rewards_S.double() * kept_S


def top_k_of_group(rule: TopK, rewards_S: Tensor, lengths_S: Tensor, group_S: Tensor) -> Tensor:
    """Which completions are the ``k`` best scored ones of their group, boolean, shape ``[S]``; of equal ones, the
    earlier. A group with fewer scored members keeps them all.

    Source: GFPO (arXiv 2508.09726).

    >>> lengths, one_group = torch.tensor([9, 3, 5]), torch.zeros(3, dtype=torch.long)
    >>> top_k_of_group(TopK(k=2), torch.ones(3), lengths, one_group)
    tensor([False,  True,  True])
    """
    lengths_S = lengths_S.double()
    better_S = -lengths_S if rule.metric == "shortest" else rewards_S.double() / lengths_S.clamp(min=1)
    better_S = better_S.masked_fill(torch.isnan(rewards_S), -torch.inf)
    order_S = grouped_order(better_S, group_S, descending=True)
    rank_in_group_S = index_in_run(group_S[order_S])
    chosen_S = torch.empty_like(rank_in_group_S, dtype=torch.bool).scatter_(0, order_S, rank_in_group_S < rule.k)
    return chosen_S & ~torch.isnan(rewards_S)
