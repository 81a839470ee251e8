"""How much a backend holds at a time, and in which slots. Imports no torch."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

TOKEN_MULTIPLE = 32
"""Key lengths are multiples of this: vectorised sums then add the same numbers in the same order, and zeros after."""
FIRST_TOKENS = 256
"""Tokens that a row has room for at first, where rooms grow; fewer if completions have fewer."""


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
    row_tokens: int | None = None
    """Tokens of all rows, where the rooms of rows grow with their lengths. None: each has room for the longest."""

    @property
    def cells(self) -> int:
        """Tokens whose keys and values there is room for."""
        own = self.rows * self.completion_length if self.row_tokens is None else self.row_tokens
        return own + self.prompts * self.prompt_length

    def rows_of(self, tokens: int) -> int:
        """Rows that there is room for when the longest has so many tokens.

        >>> [Capacity(64, 8, 100, 4096, 8192).rows_of(tokens) for tokens in (1, 300, 4096)]
        [32, 25, 2]
        """
        if self.row_tokens is None:
            return self.rows
        return max(1, min(self.rows, self.row_tokens // max(least_tokens(self), round_up(tokens, TOKEN_MULTIPLE))))

    def room_of(self, tokens: int, rows: int) -> int:
        """Tokens that each of some rows is given room for when the longest has so many: at least that, and up to twice
        as many, so that the rows are rarely copied.

        >>> [Capacity(64, 8, 100, 4096, 8192).room_of(tokens, rows) for tokens, rows in ((1, 4), (300, 4), (300, 25))]
        [256, 512, 320]
        """
        longest = round_up(self.completion_length, TOKEN_MULTIPLE)
        if self.row_tokens is None:
            return longest
        need, room = round_up(tokens, TOKEN_MULTIPLE), least_tokens(self)
        while room < need:
            room *= 2
        affordable = self.row_tokens // max(1, rows) // TOKEN_MULTIPLE * TOKEN_MULTIPLE
        return max(need, min(room, affordable, longest))


def least_tokens(capacity: Capacity) -> int:
    """Tokens that a row has room for at first, where rooms grow."""
    return min(FIRST_TOKENS, round_up(capacity.completion_length, TOKEN_MULTIPLE))


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


class Slots:
    """Numbers of places in memory, the lowest free one first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot, which is then in use."""
        return heapq.heappop(self._free)

    def give(self, slot: int) -> None:
        """Free a slot."""
        heapq.heappush(self._free, slot)
