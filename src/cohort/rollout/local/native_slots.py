"""Keys and values as the native kernels read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Structure

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cohort.native.decode import TILE, StepCall
from cohort.policy.passes import KeysValues
from cohort.rollout.local.cache import Heads
from cohort.rollout.local.capacity import TOKEN_MULTIPLE, Capacity, round_up


class SlotCache:
    """Keys and values of the prompts and rows, preallocated. Unused memory is neither cleared nor read.

    Args:
        capacity: how much is stored at a time.
        layers: the attention of each layer, by the layer's number; alike in all.
        dtype: of the stored numbers, float32 or bfloat16.
        lanes: numbers per vector of the kernels.
    """

    def __init__(self, capacity: Capacity, layers: Mapping[int, Heads], *, dtype: torch.dtype, lanes: int) -> None:
        (shape,) = {*layers.values()}
        heads, width, group = shape.count, shape.key_width, shape.group
        self.padded = round_up(width, lanes)
        own_tokens, prompt_tokens = (
            round_up(length, TOKEN_MULTIPLE) for length in (capacity.completion_length, capacity.prompt_length)
        )
        self.own = torch.empty(2, len(layers), capacity.rows, heads, own_tokens, self.padded, dtype=dtype)
        """Keys and values of the rows' slots; decode.c describes the layout."""
        self.prompts = torch.empty(2, len(layers), capacity.prompts, heads, prompt_tokens, self.padded, dtype=dtype)
        """Keys and values of the prompts' slots."""
        self._layers = list(layers)
        self._heads, self._width, self._group, self._lanes = heads, width, group, lanes
        # By slot: the prompt's slot and the number of tokens of rows, the number of tokens of prompts.
        self._row_prompts, self._row_lengths = (np.zeros(capacity.rows, np.int32) for _ in range(2))
        self._prompt_lengths = np.zeros(capacity.prompts, np.int32)
        self._sizes = {
            "kv_heads": heads,
            "group": group,
            "width": width,
            "padded": self.padded,
            "own_tokens": own_tokens,
            "prompt_tokens": prompt_tokens,
            "prompt_lengths": self._prompt_lengths.ctypes.data,
            "half": dtype == torch.bfloat16,
        }
        self._step = StepCall(**self._sizes)
        self._slots: list[int] | None = None  # of the step, whose rows have these lengths
        self._lengths = self._row_lengths[:0]
        self._referenced: tuple[object, ...] = ()  # the step points to them
        self._texts: tuple[object, ...] = ()  # and those of texts to these

    def add_prompts(self, slots: Sequence[int], lengths: Sequence[int], found: KeysValues) -> None:
        """Store the keys and values of prompts, ``[K, X, D]`` each, by layer, end to end."""
        for number, layer in enumerate(self._layers):
            parts = (part.split([*lengths], 1) for part in found[layer])
            for slot, k_KXD, v_KXD in zip(slots, *parts, strict=True):
                self._write_prompt(number, slot, k_KXD, v_KXD)
        self._prompt_lengths[list(slots)] = lengths

    def _write_prompt(self, number: int, slot: int, k_KXD: Tensor, v_KXD: Tensor) -> None:
        length, lanes = k_KXD.shape[1], self._lanes
        keys, values = self.prompts[:, number, slot]
        values[:, :length, : self._width] = v_KXD
        blocks = -(-length // lanes)
        whole = functional.pad(k_KXD, (0, 0, 0, blocks * lanes - length))
        by_block = keys.view(self._heads, -1, self.padded, lanes)[:, :blocks, : self._width]
        by_block.copy_(whole.view(self._heads, blocks, lanes, self._width).transpose(2, 3))

    def add_rows(self, slots: Sequence[int], prompts: Sequence[int]) -> None:
        """Begin rows without tokens, each after the prompt in the given slot."""
        self._row_prompts[list(slots)], self._row_lengths[list(slots)] = prompts, 0
        self._slots = None

    def remove_rows(self, moves: Sequence[tuple[int, int]], left: int) -> None:
        """Nothing to do: the kernels find each row by itself."""

    remove_prompts = remove_rows

    def position(self, slot: int) -> int:
        """Position of the next token of a row, its prompt counted."""
        return int(self._prompt_lengths[self._row_prompts[slot]] + self._row_lengths[slot])

    def next_step(self, slots: Sequence[int]) -> Structure:
        """The arguments of the coming step, in which each of these rows gets one more token. The caller sets the
        scaling of scores."""
        threads, places = torch.get_num_threads(), list(slots)
        self._row_lengths[places] += 1
        if self._slots != places or threads != self._step.threads:
            prompts, self._lengths = self._row_prompts[places], self._row_lengths[places]
            order = np.argsort(prompts, kind="stable").astype(np.int32)
            counts = np.unique(prompts, return_counts=True)[1].tolist()
            rows = (np.array(places, np.int32), prompts, self._lengths)
            self._referenced = self._lay_out(self._step, threads, order, counts, rows)
            self._slots = places
        else:
            self._lengths += 1
        return self._step

    def next_texts(self, slots: Sequence[int], lengths: Sequence[int]) -> tuple[Structure, Structure]:
        """The arguments of a pass in which some rows get several more tokens each: of layers whose output is needed for
        all tokens, and of the last layer, whose output is needed for the last token of each row."""
        chosen, counts = np.array(slots), np.array(lengths)
        ends = counts.cumsum()
        of_T = np.repeat(chosen, counts)
        before = self._row_lengths[of_T] - np.repeat(ends - counts, counts)
        grown = (before + np.arange(1, ends[-1] + 1)).astype(np.int32)
        tokens = (of_T.astype(np.int32), self._row_prompts[of_T], grown)
        self._row_lengths[chosen] += counts.astype(np.int32)
        self._slots = None
        whole, last = (StepCall(**self._sizes, text=len(of_T)) for _ in range(2))
        threads = torch.get_num_threads()
        order = np.arange(len(of_T), dtype=np.int32)
        self._texts = (
            self._lay_out(whole, threads, order, lengths, tokens),
            self._lay_out(last, threads, (ends - 1).astype(np.int32), [1] * len(slots), tokens),
        )
        return whole, last

    def _lay_out(
        self,
        step: Structure,
        threads: int,
        order: NDArray[np.int32],
        counts: Sequence[int],
        rows: tuple[NDArray[np.int32], ...],
    ) -> tuple[object, ...]:
        """Fill in how threads share the rows; returns what the structure points to.

        Args:
            step: the arguments.
            threads: their number.
            order: the rows that attend.
            counts: how many neighbours in ``order`` may share an item.
            rows: of each row its slot, its prompt's slot, and its tokens with the new one.
        """
        most = max(1, TILE // self._group)  # rows of one work item
        while most > 1 and sum(-(-count // most) for count in counts) * self._heads < 2 * threads:
            most //= 2
        items, first = [], 0
        for count in counts:
            items += [(first + start, min(most, count - start)) for start in range(0, count, most)]
            first += count
        items_N2 = np.array(items, np.int32)
        size = most * self._group * (2 * self.padded + self.own.shape[-2] + self.prompts.shape[-2])
        scratch = torch.empty(threads, size, dtype=torch.float32)
        step.order, step.items, step.item_count = order.ctypes.data, items_N2.ctypes.data, len(items)
        step.row_slots, step.row_prompts, step.row_lengths = (part.ctypes.data for part in rows)
        step.scratch, step.scratch_size, step.threads = scratch.data_ptr(), size, threads
        return order, items_N2, scratch, rows
