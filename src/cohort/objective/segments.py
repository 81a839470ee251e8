"""Sums over the tokens of a sequence, on flat tensors. A sequence is an id; its tokens may be in several segments.

The tokens of a sequence are in their order on axis N.
"""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values_N: Tensor, index_N: Tensor, count: int) -> Tensor:
    """Sum of the values of each id 0..count-1, shape ``[count]``; 0 for an id without values.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 2]), 3)
    tensor([3., 0., 4.])
    """
    return torch.zeros(count, dtype=values_N.dtype, device=values_N.device).index_add_(0, index_N, values_N)


def segment_mean(values_N: Tensor, index_N: Tensor, count: int) -> Tensor:
    """Mean of the values of each id, shape ``[count]``; 0 for an id without values."""
    lengths = torch.bincount(index_N, minlength=count).clamp(min=1)
    return segment_sum(values_N, index_N, count) / lengths


def segment_count(index_N: Tensor) -> int:
    """The number of ids 0..count-1: the highest id plus 1; 0 without any.

    >>> segment_count(torch.tensor([0, 0, 2]))
    3
    """
    return int(index_N.max()) + 1 if index_N.numel() else 0


def grouped_order(values_S: Tensor, index_S: Tensor, *, descending: bool = False) -> Tensor:
    """The indices of the completions group by group, sorted by value within a group; equal ones keep their order.
    Shape ``[S]``.

    >>> grouped_order(torch.tensor([5.0, 1.0, 3.0, 2.0]), torch.tensor([0, 1, 0, 1]))
    tensor([2, 0, 1, 3])
    """
    by_value = torch.argsort(values_S, descending=descending, stable=True)
    return by_value[torch.argsort(index_S[by_value], stable=True)]


def index_in_run(sorted_keys: Tensor) -> Tensor:
    """0, 1, 2, ... within each run of equal keys (rows of keys).

    >>> index_in_run(torch.tensor([4, 4, 4, 7, 7]))
    tensor([0, 1, 2, 0, 1])
    """
    position = torch.arange(len(sorted_keys), device=sorted_keys.device)
    keys = sorted_keys.unsqueeze(-1).flatten(1)
    starts = torch.ones_like(position, dtype=torch.bool)
    starts[1:] = (keys[1:] != keys[:-1]).any(dim=1)
    return position - (torch.where(starts, position, 0).cummax(0).values if len(position) else position)


def prefix_sums(values_N: Tensor, index_N: Tensor) -> Tensor:
    """Sum of a sequence's values up to each token, that one included, shape ``[N]``.

    >>> prefix_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 1, 0, 1]))
    tensor([ 1.,  2.,  5., 10.])
    """
    order_N = torch.argsort(index_N, stable=True)
    return _unsort(_scan(values_N[order_N], index_N[order_N], 1.0), order_N)


def suffix_sums(values_N: Tensor, index_N: Tensor, discount: float = 1.0) -> Tensor:
    """Discounted sum of a sequence's values from each token on: ``sum_{k >= t} discount^(k - t) values_k``, shape
    ``[N]``.

    >>> suffix_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 0, 0]), discount=0.5)
    tensor([3., 4., 4.])
    """
    order_N = torch.argsort(index_N, stable=True).flip(0)
    return _unsort(_scan(values_N[order_N], index_N[order_N], discount), order_N)


def by_sign(up_N: Tensor, positive: float, negative: float, like_N: Tensor) -> Tensor:
    """One of two numbers for each token, in the dtype of another tensor; ``torch.where`` would return float32.

    >>> by_sign(torch.tensor([True, False]), 0.2, 2.0, torch.zeros(2, dtype=torch.float64))
    tensor([0.2000, 2.0000], dtype=torch.float64)
    """
    return torch.full_like(like_N, negative).masked_fill(up_N, positive)


def _scan(values_N: Tensor, index_N: Tensor, discount: float) -> Tensor:
    """Running discounted sums over runs of equal ids, by doubling, in log2(longest run) passes. A sum adds only the
    values of its own sequence, so that a huge value elsewhere costs it no digits."""
    sums_N = values_N.clone()
    longest = int(torch.bincount(index_N).max()) if index_N.numel() else 0
    step = 1
    while step < longest:
        same_N = index_N[step:] == index_N[:-step]
        sums_N = torch.cat([sums_N[:step], sums_N[step:] + torch.where(same_N, discount**step * sums_N[:-step], 0.0)])
        step *= 2
    return sums_N


def _unsort(sorted_N: Tensor, order_N: Tensor) -> Tensor:
    return torch.empty_like(sorted_N).scatter_(0, order_N, sorted_N)
