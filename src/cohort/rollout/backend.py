"""What turns tokens into logits for the sampler: the interface that the lean path and the generic paths share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cohort.rollout.capacity import Capacity

PREFILL_TOKENS = 4096
"""Tokens that go through the model at a time outside decoding (a longer text goes alone). Affects memory only."""


class Backend:
    """Keys and values of prompts and of rows, both numbered densely from 0. A row is a trajectory that is being
    decoded.

    When entries are removed, the last ones take their numbers; ``order_after_removal`` tells the caller how.
    """

    refills: bool
    """Whether rows may be added while others are being decoded."""
    mixed_lengths: bool
    """Whether prompts of different length may be prefilled together."""
    keeps_rows: bool = False
    """Whether rows can be parked: ``park``, ``resume``, ``release`` and ``extend`` work."""
    grows: bool = False
    """Whether the rooms of rows grow with their lengths; see ``Capacity.row_tokens``."""
    token_multiple: int
    """Lengths are rounded up to a multiple of this in memory."""
    description: str
    """Shown at the start of a run."""

    @property
    def exact_rows(self) -> bool:
        """Whether the bits of a row do not depend on what is decoded beside it."""
        return False

    @property
    def token_bytes(self) -> int:
        """Memory of the keys and values of one token; 0 if none are kept."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Memory of a row or prompt that does not grow with its tokens."""
        return 0

    def begin(self, capacity: Capacity) -> None:
        """Allocate memory."""

    def end(self) -> None:
        """Free it."""

    def sleep(self) -> None:
        """Free what is kept between calls and can be made again."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts, numbered after those held; the logits of their next tokens, ``[len(prompts), V]``."""
        raise NotImplementedError

    def add_rows(self, prompts: Sequence[int]) -> None:
        """New rows after those there are, each a continuation of the given prompt."""
        raise NotImplementedError

    def step(self, tokens_S: Tensor) -> Tensor:
        """Read one token for every row; the logits of the next ones, ``[S, V]``."""
        raise NotImplementedError

    def remove_rows(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        raise NotImplementedError

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """Forget prompts that no row uses, parked ones included."""
        raise NotImplementedError

    def park(self, row: int) -> int:
        """Keep the keys and values of a row, which is removed next; returns a handle."""
        raise NotImplementedError

    def resume(self, handles: Sequence[int]) -> None:
        """New rows after those there are, with the keys and values of parked ones. The handles end."""
        raise NotImplementedError

    def release(self, handle: int) -> None:
        """Forget a parked row."""
        raise NotImplementedError

    def extend(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Read tokens for some rows; the logits of their next tokens, ``[len(rows), V]``."""
        raise NotImplementedError


def texts_together(texts: Sequence[Sequence[int]]) -> list[slice]:
    """Texts that go through the model together."""
    parts, start = list[slice](), 0
    while start < len(texts):
        stop, tokens = start + 1, len(texts[start])
        while stop < len(texts) and tokens + len(texts[stop]) <= PREFILL_TOKENS:
            tokens += len(texts[stop])
            stop += 1
        parts.append(slice(start, stop))
        start = stop
    return parts
