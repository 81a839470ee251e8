"""How a part of a batch is cut into forward and backward passes. Memory decides; the result never depends on it.

Sequences of one prompt share a pass over it. Sequences with the same tokens after the same prompt are computed once:
the gradient of a sum over tokens is that of the sum of their coefficients. Copies are frequent where a policy has
learned a format or answers in few tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cohort.objective import segment_sum
from cohort.policy import PackedRows
from cohort.train.layout import Part, numbers, span_positions
from cohort.types import TokenBatch

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Pack:
    """Prompts that are read together, and the microbatches of the sequences after them."""

    prompt_ids: tuple[tuple[int, ...], ...]
    microbatches: tuple[tuple[int, ...], ...]
    """Sequences, by their numbers in the part that was cut. With shared prompts, those of one prompt are neighbours."""
    idle: int = 0
    """Passes of weight 0 after the microbatches; see ``level``."""
    copies: Mapping[int, int] = field(default_factory=dict)
    """See ``copies``. A pass computes a sequence and its copies once."""


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """One backward pass."""

    part: Part
    rows: PackedRows
    """Its segments, as the model reads them; those of copies once."""
    index_N: Tensor | None = None
    """The index of each of the part's tokens among the drawn tokens of ``rows``. None: they are the same."""

    def at_tokens(self, values: Tensor) -> Tensor:
        """The part's tokens' values, from those of the drawn tokens of ``rows``. Differentiable."""
        return values if self.index_N is None else values.index_select(0, self.index_N)

    def summed(self, values_N: Tensor) -> Tensor:
        """The inverse for weights of a sum: for each drawn token of ``rows``, the sum over its copies."""
        if self.index_N is None:
            return values_N
        return values_N.new_zeros(len(self.rows.targets_N)).index_add(0, self.index_N, values_N)


def copies(batch: TokenBatch, part: Part) -> dict[int, int]:
    """Maps each sequence that repeats an earlier one to the first of its kind, both by their numbers in the part.
    Copies have the same prompt, tokens and supports: their log-probs are equal, whatever their advantages."""
    rows_S = torch.bincount(batch.sequence_B, minlength=batch.num_sequences)
    tokens_S = segment_sum(batch.lengths_B, batch.sequence_B, batch.num_sequences)
    columns: list[tuple[Any, Any]] = [(batch.ids_T, tokens_S), (batch.lengths_B, rows_S)]
    if batch.drawn_T is not None:
        columns.append((batch.drawn_T, tokens_S))
    if batch.support is not None:
        counts_N = batch.support.counts_N
        counts_S = segment_sum(torch.from_numpy(counts_N).long(), numbers(batch.lengths_S), batch.num_sequences)
        columns += [(counts_N, batch.lengths_S), (batch.support.excluded_N, batch.lengths_S)]
        columns.append((batch.support.token_ids_U, counts_S))
    arrays = [(np.asarray(values), np.append(0, counts_S.cumsum(0))) for values, counts_S in columns]
    first: dict[Any, int] = {}
    found = {}
    for index, sequence in enumerate(part.sequences_S.tolist()):
        prompt = batch.prompt_ids[int(batch.group_S[sequence])]
        own = (values[starts_S[sequence] : starts_S[sequence + 1]].tobytes() for values, starts_S in arrays)
        same = first.setdefault((prompt, *own), index)
        if same != index:
            found[index] = same
    return found


def packs(
    batch: TokenBatch, part: Part, token_budget: int, *, shared: bool = True, distinct: bool = True
) -> list[Pack]:
    """Cut a part so that no pass takes more than ``token_budget`` tokens. A longer sequence stands alone. The gradient
    does not depend on the cut.

    Args:
        batch: the layout.
        part: the sequences to cut.
        token_budget: tokens of one pass: of prompts, or of segments after them.
        shared: each prompt is read once, in one pack with all of its sequences. Off: every segment is read with its
            prompt, padded to the longest of the pass.
        distinct: sequences that are copies of another one are computed with it. Off: each is computed by itself.
    """
    same = copies(batch, part) if distinct else {}
    sizes = segment_sum(batch.lengths_B, batch.sequence_B, batch.num_sequences)[part.sequences_S].tolist()
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, group in enumerate(batch.group_S[part.sequences_S].tolist()):
        if sizes[index]:
            by_prompt.setdefault(batch.prompt_ids[group], []).append(index)
    if not shared:
        cuts = _padded_cuts(batch, part, token_budget)
        return [Pack(tuple(by_prompt), cuts, copies=same)] if by_prompt else []
    found = []
    for prompts in _filled(list(by_prompt), [len(prompt) for prompt in by_prompt], token_budget):
        together: dict[int, list[int]] = {}
        for index in chain.from_iterable(by_prompt[prompt] for prompt in prompts):
            together.setdefault(same.get(index, index), []).append(index)
        lengths = [sizes[index] for index in together]
        filled = _filled(list(together.values()), lengths, _balanced(lengths, token_budget))
        cuts = tuple(tuple(chain.from_iterable(cut)) for cut in filled)
        found.append(Pack(tuple(prompts), cuts, copies=same))
    return found


IDLE_PROMPT = (0, 0)
"""A prompt of weight 0 that has keys and values."""


def level(plans: Sequence[Sequence[Pack]]) -> list[list[Pack]]:
    """The packs of every rank, extended by passes of weight 0 until all ranks make the same passes: as many packs, as
    many microbatches in each, and prompts with keys and values in every pack.

    >>> level([[Pack(((5, 6),), ((0,), (1,)))], []])[1]
    [Pack(prompt_ids=((0, 0),), microbatches=(), idle=2, copies={})]
    """
    count = max(map(len, plans), default=0)
    full = [[*plan, *[Pack((), ())] * (count - len(plan))] for plan in plans]
    passes = [max(len(pack.microbatches) for pack in packs) for packs in zip(*full, strict=True)]

    def filled(pack: Pack, passes: int) -> Pack:
        none_read = all(len(prompt) < 2 for prompt in pack.prompt_ids)
        prompts = pack.prompt_ids + (IDLE_PROMPT,) * none_read
        return replace(pack, prompt_ids=prompts, idle=passes - len(pack.microbatches))

    return [[filled(pack, number) for pack, number in zip(plan, passes, strict=True)] for plan in full]


def microbatches(batch: TokenBatch, part: Part, pack: Pack) -> Iterator[Microbatch]:
    """The microbatches of a pack that was cut from a part."""
    number = {prompt: number for number, prompt in enumerate(pack.prompt_ids)}
    prompt_P = torch.tensor([number.get(prompt, -1) for prompt in batch.prompt_ids])
    segments_S = torch.bincount(batch.sequence_B, minlength=batch.num_sequences)
    for cut in pack.microbatches:
        micro = part.select(torch.tensor(cut))
        computed, index_N = micro, None
        firsts = [pack.copies.get(index, index) for index in cut]
        if len(distinct := list(dict.fromkeys(firsts))) < len(cut):
            computed = part.select(torch.tensor(distinct))
            place = {first: number for number, first in enumerate(distinct)}
            chosen = torch.tensor([place[first] for first in firsts])
            index_N = span_positions(computed.lengths_S, chosen).to(micro.tokens_N.device)
        rows_B = span_positions(segments_S, computed.sequences_S)
        tokens_T = span_positions(batch.lengths_B, rows_B)
        rows = PackedRows(
            prompt_B=prompt_P[batch.group_S[batch.sequence_B[rows_B]]],
            ids_T=batch.ids_T[tokens_T],
            lengths_B=batch.lengths_B[rows_B],
            drawn_T=None if batch.drawn_T is None else batch.drawn_T[tokens_T],
            support=None if batch.support is None else batch.support.select(computed.tokens_N.cpu().numpy()),
        )
        yield Microbatch(micro, rows, index_N)


def _filled(items: Sequence[Item], sizes: Sequence[int], budget: int) -> list[list[Item]]:
    """Items in order, cut where the next one would take a share over the budget."""
    shares: list[list[Item]] = []
    filled = 0
    for item, size in zip(items, sizes, strict=True):
        if not shares or filled + size > budget:
            shares.append([])
            filled = 0
        shares[-1].append(item)
        filled += size
    return shares


def _balanced(sizes: Sequence[int], budget: int) -> int:
    """The smallest budget that makes no more shares, by bisection: about equal shares, instead of a small last one."""
    shares = len(_filled(sizes, sizes, budget))
    return bisect_left(range(budget), True, key=lambda less: len(_filled(sizes, sizes, less)) <= shares)


def _padded_cuts(batch: TokenBatch, part: Part, token_budget: int) -> tuple[tuple[int, ...], ...]:
    """Sequences of similar length together, as many as fit with their prompts and padding."""
    longest_S = torch.zeros(batch.num_sequences, dtype=torch.long)
    longest_S = longest_S.scatter_reduce(0, batch.sequence_B, batch.lengths_B, "amax")
    prompt_S = torch.tensor([len(prompt) for prompt in batch.prompt_ids])[batch.group_S]
    widths = (prompt_S + longest_S)[part.sequences_S].tolist()
    rows = torch.bincount(batch.sequence_B, minlength=batch.num_sequences)[part.sequences_S].tolist()
    cuts: list[list[int]] = []
    filled = 0
    for index in sorted((index for index, count in enumerate(rows) if count), key=lambda index: -widths[index]):
        if not cuts or (filled + rows[index]) * widths[cuts[-1][0]] > token_budget:
            cuts.append([])
            filled = 0
        cuts[-1].append(index)
        filled += rows[index]
    return tuple(map(tuple, cuts))
