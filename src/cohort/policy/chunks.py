"""Sequences that lie end to end, cut for recurrences: into chunks, and with the tails of what they continue.

Axis letters: T tokens, S sequences, J chunks, C tokens of a chunk, E tokens with the tails before each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

LONGEST_CHUNK = 64
"""Tokens of a chunk, at most. Work inside a chunk grows with its length; the recurrence between chunks runs one after
the other."""


class Chunks:
    """Sequences as chunks of one length, of which the last of a sequence may be padded. Chunks that come n-th in their
    sequences are neighbours, those of long sequences first, so that a step of the recurrence is one product.

    Args:
        starts: the first token of each sequence on axis T, and the end of the last one.
        device: of the indices.
    """

    def __init__(self, starts: Sequence[int], device: torch.device) -> None:
        lengths = [stop - start for start, stop in pairwise(starts)]
        self.size = -(-max(lengths) // -(-max(lengths) // LONGEST_CHUNK))
        """C."""
        order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
        first: list[int] = []
        real: list[int] = []
        self.steps: list[slice] = []
        """The chunks that come n-th, on axis J."""
        place = torch.empty(starts[-1], dtype=torch.int64)
        for before in range(0, lengths[order[0]], self.size):
            running = [s for s in order if lengths[s] > before]
            self.steps.append(slice(len(first), len(first) + len(running)))
            for s in running:
                token, count = starts[s] + before, min(self.size, lengths[s] - before)
                place[token : token + count] = torch.arange(count) + len(first) * self.size
                first.append(token)
                real.append(count)
        offset_C = torch.arange(self.size)
        real_JC = offset_C < torch.tensor(real)[:, None]
        index_JC = (torch.tensor(first)[:, None] + offset_C) * real_JC
        self.padded = not bool(real_JC.all())
        self.real_JC, self.index = real_JC.to(device), index_JC.flatten().to(device)
        self.place_T = place.to(device)
        self.order_S = torch.tensor(order, device=device)

    def cut(self, values: Tensor, *, fill: bool = True) -> Tensor:
        """``[T, ...]`` to ``[J, C, ...]``. Padding is 0, or unless ``fill`` the values of some token."""
        cut: Tensor = values.index_select(0, self.index).unflatten(0, (-1, self.size))
        if self.padded and fill:
            cut = cut * self.real_JC.view(*self.real_JC.shape, *[1] * (cut.ndim - 2)).to(cut.dtype)
        return cut

    def join(self, values: Tensor) -> Tensor:
        """The inverse, ``[J, C, ...]`` to ``[T, ...]``."""
        return values.flatten(0, 1).index_select(0, self.place_T)

    def sorted(self, states: Tensor) -> Tensor:
        """States of the sequences, ``[S, ...]``, longest first."""
        return states.index_select(0, self.order_S)

    def unsorted(self, states: Tensor) -> Tensor:
        """The inverse."""
        return states.index_select(0, self.order_S.argsort())


class Tails:
    """Sequences with room before each one for the last tokens of what it continues.

    Args:
        starts: as of ``Chunks``.
        count: tokens of a tail.
        device: of the indices.
    """

    def __init__(self, starts: Sequence[int], count: int, device: torch.device) -> None:
        tokens, sequences = starts[-1], len(starts) - 1
        self.count, self.tokens = count, tokens
        self.starts = torch.tensor(starts, device=device)
        tail = torch.arange(count)
        # Indices on axis E into tokens with the tails after them.
        parts = []
        for s, (start, stop) in enumerate(pairwise(starts)):
            parts += [tokens + s * count + tail, torch.arange(start, stop)]
        self._order_E = torch.cat(parts).to(device)
        shift = torch.tensor([stop - start for start, stop in pairwise(starts)])
        row_T = torch.arange(sequences).repeat_interleave(shift)
        self._place_T = (torch.arange(tokens) + row_T * count).to(device)
        """Where the window of a token begins on axis E."""
        ends = torch.tensor(starts[1:]) + torch.arange(sequences) * count
        self._ends = (ends[:, None] + tail).flatten().to(device)

    def convolve(self, values_T: Tensor, tails_S: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A causal convolution by channel, ``y_t = sum_j weight[:, j] x_{t + j - count}``.

        Args:
            values_T: x, ``[T, H]``.
            tails_S: x before each sequence, ``[S, count, H]``.
            weight: ``[H, count + 1]``.

        Returns:
            y, and the new tails: the last ``count`` of each sequence with what came before.
        """
        whole_E = torch.cat([values_T, tails_S.flatten(0, 1)]).index_select(0, self._order_E)
        windows = len(whole_E) - self.count
        out = whole_E[:windows] * weight[:, 0]
        for j in range(1, self.count + 1):
            out = torch.addcmul(out, whole_E[j : j + windows], weight[:, j])
        tails = whole_E.index_select(0, self._ends).view_as(tails_S)
        return out.index_select(0, self._place_T), tails
