"""What turns tokens into logits for the sampler: the protocol that the lean path and the generic paths share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

PREFILL_TOKENS = 4096
"""Tokens that go through the model at a time outside decoding (a longer text goes alone). Memory only."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much a call of ``generate`` may hold at a time."""

    rows: int
    """Completions decoded at a time."""
    prompts: int
    """Prompts whose keys and values are held at a time."""
    prompt_length: int
    """Tokens of the longest prompt."""
    completion_length: int
    """Tokens of the longest completion."""

    @property
    def cells(self) -> int:
        """Tokens whose keys and values are held."""
        return self.rows * self.completion_length + self.prompts * self.prompt_length


class Backend(Protocol):
    """Holds prompts and rows, both numbered densely from 0. A row is a completion being written.

    Removing: whatever is removed, the last takes its place. ``order_after_removal`` says the same to the caller.
    """

    refills: bool
    """Whether rows may be added while others are being decoded."""
    mixed_lengths: bool
    """Whether prompts of different length may be taken in together."""
    token_multiple: int
    """What lengths are rounded up to in memory."""
    description: str
    """What it is, in words, for the start of a run."""

    @property
    def token_bytes(self) -> int:
        """Memory of one token's keys and values."""
        ...

    def begin(self, capacity: Capacity) -> None:
        """Make room."""
        ...

    def end(self) -> None:
        """Give it back."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Take in prompts after those held; the logits of their first next tokens, ``[len(prompts), V]``."""
        ...

    def add_rows(self, prompts: Sequence[int]) -> None:
        """New rows after those there are, each a completion of the given held prompt."""
        ...

    def step(self, tokens_S: Tensor) -> Tensor:
        """Give every row the token drawn for it; the logits of the next ones, ``[S, V]``."""
        ...

    def remove_rows(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        ...

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """Forget prompts that no row uses any more."""
        ...


def moves_for_removal(removed: Sequence[int], count: int) -> list[tuple[int, int]]:
    """Which entries move where, ``(from, to)``, when some of ``count`` entries go and the last ones fill the gaps.

    >>> moves_for_removal([1, 4], 5)
    [(3, 1)]
    """
    gone = set(removed)
    left = count - len(gone)
    movers = [entry for entry in range(left, count) if entry not in gone]
    return list(zip(movers, sorted(hole for hole in gone if hole < left), strict=True))


def order_after_removal(removed: Sequence[int], count: int) -> list[int]:
    """The places that entries had which stay, in the order that they have afterwards.

    >>> order_after_removal([1, 4], 5)
    [0, 3, 2]
    """
    order = list(range(count))
    for source, place in moves_for_removal(removed, count):
        order[place] = source
    return order[: count - len(set(removed))]
