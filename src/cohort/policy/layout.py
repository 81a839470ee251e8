"""How the tokens of several sequences lie end to end in a pass, some of which continue a common prefix.

Axis letters: T tokens, X prefix tokens, J and W sequences and width of a padded bucket.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.native import Work
from cohort.policy.recurrent import Chunks, Tails

LIKE_LENGTHS = 0.75
"""Sequences of at least this fraction of the longest of their bucket are padded to its length."""
NEVER = 1e30
"""A log-sum-exp beside which the weight of every score is 0."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences whose attention to themselves is one padded product."""

    index_JW: Tensor
    """The tokens' indices on axis T. Padding points at some token."""
    real_JW: Tensor | None
    """Which of them are not padding. None: all."""

    def gather(self, values: Tensor) -> Tensor:
        """``[heads, T, ...]`` to ``[J, heads, W, ...]``."""
        return values[:, self.index_JW].transpose(0, 1)

    def scatter(self, target: Tensor, values: Tensor) -> None:
        """The inverse, into ``[heads, T, ...]``."""
        if self.real_JW is None:
            target[:, self.index_JW] = values.transpose(0, 1)
        else:
            target[:, self.index_JW[self.real_JW]] = values.transpose(0, 1)[:, self.real_JW]

    def hide_padding(self, lse: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exps and gradients with which padding has no weight and sends back no gradient."""
        if self.real_JW is None:
            return lse, grad
        real = self.real_JW[:, None]
        return lse.masked_fill(~real, NEVER), grad * real[..., None]


class Continuation(NamedTuple):
    """Neighbouring tokens that continue one prefix."""

    tokens: slice
    """On axis T."""
    prefix: slice
    """On axis X."""
    position: int = 0
    """Of the first of these tokens in its prefix."""


class Spans(NamedTuple):
    """Queries and the keys that they attend to, end to end, for kernels of sequences of different lengths."""

    queries: Tensor | None
    """Indices on axis T. None: all tokens."""
    keys: Tensor | None
    """Indices on the keys' axis. None: all keys."""
    query_starts: Tensor
    """``[spans + 1]``, int32: where each span begins among the queries, and where the last one ends."""
    key_starts: Tensor
    most_queries: int
    most_keys: int


class Layout:
    """Which token belongs to which sequence and prefix.

    Args:
        lengths: tokens of each sequence.
        device: of the tensors.
        prefixes: the index of the prefix that each sequence continues; sequences of one prefix are neighbours. None:
            there are no prefixes.
        prefix_lengths: tokens of each prefix, which may be 0.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        prefixes: Sequence[int] | None = None,
        prefix_lengths: Sequence[int] = (),
    ) -> None:
        self.lengths = tuple(lengths)
        self._spans_within: dict[int, Spans] = {}  # by window
        self._tails: dict[int, Tails] = {}  # by length
        self.starts = (0, *accumulate(lengths))
        self.tokens = self.starts[-1]
        self.prefixes = None if prefixes is None else tuple(prefixes)
        self.prefix_starts = (0, *accumulate(prefix_lengths))
        self.before = tuple([0] * len(lengths) if prefixes is None else [prefix_lengths[p] for p in prefixes])
        """Tokens of the prefix that each sequence continues."""
        self.longest = max(map(sum, zip(self.before, lengths, strict=True)))
        """Tokens of the longest sequence with its prefix."""
        shifts = torch.tensor(self.before) - torch.tensor(self.starts[:-1])
        shift_T = shifts.repeat_interleave(torch.tensor(self.lengths))
        self.positions_T = (torch.arange(self.tokens) + shift_T).to(device)

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Sequences of similar length, for torch's kernels."""
        longest_first = sorted(range(len(self.lengths)), key=lambda s: -self.lengths[s])
        buckets: list[list[int]] = []
        for sequence in longest_first:
            if not buckets or self.lengths[sequence] < LIKE_LENGTHS * self.lengths[buckets[-1][0]]:
                buckets.append([])
            buckets[-1].append(sequence)
        return tuple(map(self._bucket, buckets))

    def _bucket(self, sequences: Sequence[int]) -> Bucket:
        device = self.positions_T.device
        start_J = torch.tensor([self.starts[s] for s in sequences], device=device)
        length_J = torch.tensor([self.lengths[s] for s in sequences], device=device)
        offset_W = torch.arange(self.lengths[sequences[0]], device=device)
        index_JW, real_JW = start_J[:, None] + offset_W, offset_W < length_J[:, None]
        if self.lengths[sequences[-1]] == len(offset_W):
            return Bucket(index_JW, None)
        return Bucket(index_JW.masked_fill(~real_JW, 0), real_JW)

    @functools.cached_property
    def chunks(self) -> Chunks:
        """The sequences, cut for recurrences."""
        return Chunks(self.starts, self.positions_T.device)

    def tails(self, count: int) -> Tails:
        """The sequences with room for the last ``count`` tokens of what they continue."""
        if count not in self._tails:
            self._tails[count] = Tails(self.starts, count, self.positions_T.device)
        return self._tails[count]

    @functools.cached_property
    def continued_S(self) -> Tensor:
        """The prefix that each sequence continues, counted from 1 and without empty ones. 0: none."""
        numbers = [0 if start == stop else 1 for start, stop in pairwise(self.prefix_starts)]
        counted = [number and count for number, count in zip(numbers, accumulate(numbers), strict=True)]
        found = [counted[p] for p in self.prefixes] if self.prefixes is not None else [0] * len(self.lengths)
        return torch.tensor(found, device=self.positions_T.device)

    @functools.cached_property
    def continuations(self) -> tuple[Continuation, ...]:
        """The tokens after each prefix that is not empty, for torch's kernels."""
        prefixes = self.prefixes or ()
        found = [
            Continuation(
                slice(self.starts[first], self.starts[stop]),
                slice(self.prefix_starts[prefixes[first]], self.prefix_starts[prefixes[first] + 1]),
            )
            for first, stop in _stretches(prefixes)
        ]
        return tuple(part for part in found if part.prefix.start < part.prefix.stop)

    def blocks(self, most: int) -> Iterator[Continuation]:
        """``continuations``, with at most ``most`` tokens of a prefix each."""
        for part in self.continuations:
            for start in range(part.prefix.start, part.prefix.stop, most):
                prefix = slice(start, min(start + most, part.prefix.stop))
                yield Continuation(part.tokens, prefix, start - part.prefix.start)

    @functools.cached_property
    def own_spans(self) -> Spans:
        """Each sequence and itself."""
        own = [torch.arange(*ends) for ends in pairwise(self.starts)]
        return self._spans(own, own, self.tokens)

    @functools.cached_property
    def prefix_spans(self) -> Spans:
        """The tokens after each prefix that is not empty, and the prefix; keys on axis X."""
        parts = self.continuations
        return self._spans(
            [torch.arange(part.tokens.start, part.tokens.stop) for part in parts],
            [torch.arange(part.prefix.start, part.prefix.stop) for part in parts],
            self.prefix_starts[-1],
        )

    def spans_within(self, window: int) -> Spans:
        """Each sequence, and itself after the tokens of its prefix that its first token sees; keys on axes X and T, end
        to end."""
        if window not in self._spans_within:
            total = self.prefix_starts[-1]
            own = [torch.arange(*ends) for ends in pairwise(self.starts)]
            ends = [self.prefix_starts[prefix + 1] for prefix in self.prefixes or [-1] * len(own)]
            seen = [min(before, window - 1) for before in self.before]
            keys = [
                torch.cat([torch.arange(end - count, end), total + tokens])
                for end, count, tokens in zip(ends, seen, own, strict=True)
            ]
            self._spans_within[window] = self._spans(own, keys, total + self.tokens)
        return self._spans_within[window]

    def _spans(self, queries: Sequence[Tensor], keys: Sequence[Tensor], num_keys: int) -> Spans:
        """The spans of given indices, each on its axis."""
        device = self.positions_T.device

        def starts(parts: Sequence[Tensor]) -> Tensor:
            return torch.tensor([0, *accumulate(map(len, parts))], dtype=torch.int32, device=device)

        def index(parts: Sequence[Tensor], total: int) -> Tensor | None:
            joined = torch.cat(list(parts))
            return None if torch.equal(joined, torch.arange(total)) else joined.to(device)

        most_queries, most_keys = max(map(len, queries)), max(map(len, keys))
        query_index, key_index = index(queries, self.tokens), index(keys, num_keys)
        return Spans(query_index, key_index, starts(queries), starts(keys), most_queries, most_keys)

    @functools.cached_property
    def work(self) -> Work:
        """How a kernel's threads share the sequences. Sequences of one prefix stay together unless threads would have
        nothing to do."""
        sequences = [
            (start, length, 0 if self.prefixes is None else self.prefix_starts[self.prefixes[s]], self.before[s])
            for s, (start, length) in enumerate(zip(self.starts, self.lengths, strict=False))
        ]
        prefixes = self.prefixes or range(len(sequences))  # without prefixes, each sequence is by itself
        stretches = _stretches(prefixes)
        pieces = -(-torch.get_num_threads() // len(stretches))
        items: list[tuple[int, int, int]] = []
        used: Counter[int] = Counter()  # slots of each prefix: one item writes the gradients of one slot
        for start, end in stretches:
            count = min(pieces, end - start)
            cuts = [start + (end - start) * piece // count for piece in range(count + 1)]
            for first, stop in pairwise(cuts):
                items.append((first, stop, used[prefixes[first]]))
                used[prefixes[first]] += 1
        tensors = torch.tensor(sequences), torch.tensor(items)
        return Work(*tensors, self.tokens, self.prefix_starts[-1], max(used.values()), self.longest)


def _stretches(prefixes: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbouring sequences of one prefix: the first, and the one after the last."""
    changes = [s for s in range(1, len(prefixes)) if prefixes[s] != prefixes[s - 1]]
    return list(pairwise([0, *changes, len(prefixes)])) if prefixes else []
