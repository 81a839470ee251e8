"""How much a backend holds at a time, and how its rows are renumbered. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room for keys and values."""

    rows: int
    """Trajectories decoded or parked at a time."""
    prompts: int
    """Prompts at a time."""
    prompt_length: int
    """Tokens of the longest prompt."""
    completion_length: int
    """Tokens of the longest completion."""

    @property
    def cells(self) -> int:
        """Tokens whose keys and values there is room for."""
        return self.rows * self.completion_length + self.prompts * self.prompt_length


def moves_for_removal(removed: Sequence[int], count: int) -> list[tuple[int, int]]:
    """The moves ``(from, to)`` by which the last of ``count`` entries fill the gaps of removed ones.

    >>> moves_for_removal([1, 4], 5)
    [(3, 1)]
    """
    gone = set(removed)
    left = count - len(gone)
    movers = [entry for entry in range(left, count) if entry not in gone]
    return list(zip(movers, sorted(hole for hole in gone if hole < left), strict=True))


def order_after_removal(removed: Sequence[int], count: int) -> list[int]:
    """The former indices of the remaining entries, in their new order.

    >>> order_after_removal([1, 4], 5)
    [0, 3, 2]
    """
    order = list(range(count))
    for source, target in moves_for_removal(removed, count):
        order[target] = source
    return order[: count - len(set(removed))]
