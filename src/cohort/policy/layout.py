"""How tokens of several sequences lie end to end, some of which continue a common prefix.

Axis letters: N tokens, M tokens of prefixes, B sequences of a bucket, T tokens of the longest of them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from cohort.policy.kernels import Work

LIKE_LENGTHS = 0.75
"""Sequences at least so long as the longest of their bucket are computed with it, padded to its length."""
NEVER = 1e30
"""A log-sum-exp beside which every score's weight is 0."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences whose own parts are one product."""

    shape: tuple[int, int]
    """B and T."""
    span: slice | None
    """Their tokens, where they are neighbours of one length."""
    places_BT: Tensor | None
    """Their tokens' places on axis N, where they are not; padding points at some token."""
    real_BT: Tensor | None
    """Which of these are not padding."""

    def take(self, values: Tensor) -> Tensor:
        """``[heads, N, ...]`` to ``[B, heads, T, ...]``."""
        if self.span is not None:
            taken: Tensor = values[:, self.span].unflatten(1, self.shape)
            return taken.transpose(0, 1)
        return values[:, self.places_BT].transpose(0, 1)

    def put(self, target: Tensor, values: Tensor) -> None:
        """The inverse, into ``[heads, N, ...]``."""
        if self.span is not None:
            target[:, self.span] = values.transpose(0, 1).flatten(1, 2)
        else:
            assert self.places_BT is not None
            target[:, self.places_BT[self.real_BT]] = values.transpose(0, 1)[:, self.real_BT]

    def hide_padding(self, lse_BHT: Tensor, grad_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """So that padding gets no weight and sends back no gradient."""
        if self.real_BT is None:
            return lse_BHT, grad_BHTD
        real = self.real_BT[:, None]
        return lse_BHT.masked_fill(~real, NEVER), grad_BHTD * real[..., None]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Neighbouring tokens that continue one prefix."""

    tokens: slice
    """On axis N."""
    prefix: slice
    """On axis M."""


class Layout:
    """Which token belongs to what.

    Args:
        lengths: tokens of each sequence, laid end to end.
        prefixes: the number of the prefix that each continues; those of one prefix are neighbours. None: there are no
            prefixes.
        prefix_lengths: tokens of each prefix; 0 is one.
        device: of the tensors.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        prefixes: Sequence[int] | None = None,
        prefix_lengths: Sequence[int] = (),
    ) -> None:
        self.lengths = tuple(lengths)
        self.starts = (0, *accumulate(lengths))
        self.tokens = self.starts[-1]
        before = [0] * len(lengths) if prefixes is None else [prefix_lengths[prefix] for prefix in prefixes]
        self.before = tuple(before)
        """Tokens of the prefix that each sequence continues."""
        shifts = torch.tensor(self.before) - torch.tensor(self.starts[:-1])
        shift_N = shifts.repeat_interleave(torch.tensor(self.lengths))
        self.positions_N = (torch.arange(self.tokens) + shift_N).to(device)
        self.longest = max(first + length for first, length in zip(before, lengths, strict=True))
        """Tokens of the longest sequence with its prefix."""
        self.prefix_starts = (0, *accumulate(prefix_lengths))
        self.prefixes = None if prefixes is None else tuple(prefixes)

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Sequences whose own parts torch's kernels take together."""
        return tuple(self._buckets(self.positions_N.device))

    @functools.cached_property
    def continuations(self) -> tuple[Continuation, ...]:
        """The stretches of tokens after each prefix, for torch's kernels."""
        return tuple(self._continuations())

    @functools.cached_property
    def work(self) -> Work:
        """How a kernel's threads share the sequences: those of one prefix together, unless there were too few then."""
        sequences = [
            (start, length, 0 if self.prefixes is None else self.prefix_starts[self.prefixes[s]], self.before[s])
            for s, (start, length) in enumerate(zip(self.starts, self.lengths, strict=False))
        ]
        prefixes = self.prefixes or range(len(sequences))  # without any, each sequence stands by itself
        stretches = _stretches(prefixes)
        pieces = -(-torch.get_num_threads() // len(stretches))
        items: list[tuple[int, int, int]] = []
        used: Counter[int] = Counter()  # slots, by prefix: gradients of one are written by one item
        for start, end in stretches:
            for first, stop in pairwise(_cuts(start, end, pieces)):
                items.append((first, stop, used[prefixes[first]]))
                used[prefixes[first]] += 1
        slots = max(used.values())
        before = self.prefix_starts[-1]
        return Work(torch.tensor(sequences), torch.tensor(items), self.tokens, before, slots, self.longest)

    def _buckets(self, device: torch.device) -> Iterator[Bucket]:
        if len(set(self.lengths)) == 1:
            yield Bucket((len(self.lengths), self.lengths[0]), slice(0, self.starts[-1]), None, None)
            return
        longest_first = sorted(range(len(self.lengths)), key=lambda s: -self.lengths[s])
        bucket: list[int] = []
        for sequence in longest_first:
            if bucket and self.lengths[sequence] < LIKE_LENGTHS * self.lengths[bucket[0]]:
                yield self._padded(bucket, device)
                bucket = []
            bucket.append(sequence)
        yield self._padded(bucket, device)

    def _padded(self, sequences: Sequence[int], device: torch.device) -> Bucket:
        longest = self.lengths[sequences[0]]
        start_B = torch.tensor([self.starts[s] for s in sequences], device=device)
        length_B = torch.tensor([self.lengths[s] for s in sequences], device=device)
        place_T = torch.arange(longest, device=device)
        real_BT = place_T < length_B[:, None]
        places_BT = (start_B[:, None] + place_T).masked_fill(~real_BT, 0)
        return Bucket((len(sequences), longest), None, places_BT, real_BT)

    def _continuations(self) -> Iterator[Continuation]:
        if self.prefixes is None:
            return
        for first, stop in _stretches(self.prefixes):
            prefix = self.prefixes[first]
            keys = slice(self.prefix_starts[prefix], self.prefix_starts[prefix + 1])
            if keys.start < keys.stop:
                yield Continuation(slice(self.starts[first], self.starts[stop]), keys)


def _stretches(prefixes: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours that continue one prefix: the first, and the one after the last."""
    changes = [s for s in range(1, len(prefixes)) if prefixes[s] != prefixes[s - 1]]
    return list(pairwise([0, *changes, len(prefixes)]))


def _cuts(start: int, end: int, pieces: int) -> list[int]:
    """Where to cut so that there are so many pieces, or fewer where there is less to cut."""
    pieces = min(pieces, end - start)
    return [start + (end - start) * piece // pieces for piece in range(pieces + 1)]
