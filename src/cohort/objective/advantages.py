"""Rewards to advantages. Pure functions on flat tensors; statistics in float64.

>>> import torch
>>> rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
>>> group = torch.zeros(8, dtype=torch.long)
>>> group_advantages(rewards, group, epsilon=0.0)[:2]
tensor([ 1.2076, -0.7246], dtype=torch.float64)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scale = Literal["group", "none"]


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Per-group statistics over the scored members (those whose reward is not NaN). Axis R: distinct group ids.

    ``index_S`` maps a completion to its place on axis R. ``std_R`` is NaN where ``count - ddof`` is not positive.
    ``degenerate_R``: fewer than two scored members, or all of them equal (max == min, an exact test: a rounding error
    in a standard deviation never decides whether a group teaches something).
    """

    index_S: Tensor
    count_R: Tensor
    mean_R: Tensor
    std_R: Tensor
    degenerate_R: Tensor


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
    num_groups = int(index_S.max()) + 1 if index_S.numel() else 0
    scored_S = ~torch.isnan(rewards_S)
    kept, where = rewards_S[scored_S], index_S[scored_S]

    def per_group(values: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64, device=values.device).index_add_(0, where, values)

    count_R = per_group(torch.ones_like(kept))
    mean_R = per_group(kept) / count_R
    std_R = torch.sqrt(per_group((kept - mean_R[where]) ** 2) / (count_R - ddof).clamp(min=0))
    infinity = torch.full_like(mean_R, torch.inf)
    highest_R = (-infinity).scatter_reduce(0, where, kept, "amax")
    lowest_R = infinity.scatter_reduce(0, where, kept, "amin")
    degenerate_R = (count_R < 2) | (highest_R == lowest_R)
    return GroupStatistics(index_S, count_R, mean_R, std_R, degenerate_R)


def group_advantages(
    rewards_S: Tensor, group_S: Tensor, *, scale: Scale = "group", ddof: int = 1, epsilon: float = 1e-6
) -> Tensor:
    """Group-relative advantages.

        A_i = (R_i - mean(R_group)) / (std(R_group) + epsilon)        scale="group"
        A_i =  R_i - mean(R_group)                                    scale="none"

    Args:
        rewards_S: rewards, shape ``[S]``; NaN marks a completion without a score. It is left out of its group's
            statistics and gets advantage 0.
        group_S: group id of each completion, shape ``[S]``.
        scale: what the centred reward is divided by.
        ddof: 1 (TRL, verl) or 0; the paper does not say which standard deviation it means.
        epsilon: added to the standard deviation; 0 is the paper's formula to the letter.

    Returns:
        Advantages, float64, shape ``[S]``. Exactly 0 for every member of a degenerate group (all scored rewards equal,
        or fewer than two of them), whatever ``epsilon`` is.

    Source: DeepSeekMath (arXiv 2402.03300), section 4.1.2, outcome supervision.

    >>> group_advantages(torch.tensor([0.1] * 8), torch.zeros(8, dtype=torch.long)).tolist() == [0.0] * 8
    True
    >>> group_advantages(torch.tensor([1.0, torch.nan, 0.0]), torch.zeros(3, dtype=torch.long), epsilon=0.0)
    tensor([ 0.7071,  0.0000, -0.7071], dtype=torch.float64)
    """
    if scale not in ("group", "none"):
        raise ValueError(f"scale must be 'group' or 'none', got {scale!r}")
    statistics = group_statistics(rewards_S, group_S, ddof=ddof)
    index_S = statistics.index_S
    advantages_S = rewards_S.double() - statistics.mean_R[index_S]
    if scale == "group":
        advantages_S = advantages_S / (statistics.std_R[index_S] + epsilon)
    no_signal_S = statistics.degenerate_R[index_S] | torch.isnan(rewards_S)
    return torch.where(no_signal_S, 0.0, advantages_S)
