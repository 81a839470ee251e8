"""Which rank does which part of the work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from cohort.types import Prompt


def shares(costs: Sequence[float], size: int) -> list[list[int]]:
    """Divide items over ranks, the dearest first to the rank with the least work: at most 4/3 of the best maximum
    (Graham 1969). Every rank computes the same shares. With fewer items than ranks, some are empty.

    Args:
        costs: of each item.
        size: number of ranks.

    Returns:
        For each rank, the indices of its items in order.

    >>> shares([5, 3, 3, 2, 2], 2)
    [[0, 3], [1, 2, 4]]
    """
    least = [(0.0, rank) for rank in range(size)]
    found: list[list[int]] = [[] for _ in range(size)]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, rank = heapq.heappop(least)
        found[rank].append(item)
        heapq.heappush(least, (load + costs[item], rank))
    return [sorted(items) for items in found]


def prompt_shares(prompts: Sequence[Prompt], size: int) -> list[list[int]]:
    """Which rank samples and scores which prompts, by their indices: as many prompts each as possible, since the length
    of their completions is not known, then as many tokens."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    return shares([sum(lengths) + length for length in lengths], size)


def imbalance(costs: Sequence[float], divided: Sequence[Sequence[int]]) -> float:
    """The largest share's cost over the mean; 1 when all are equal, or nothing costs anything."""
    loads = [sum(costs[item] for item in items) for items in divided]
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
