"""Keys and values as the native kernels read them. Rows and prompts stay in the slot that they were given: removing one
moves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from cohort.rollout.cache import TOKEN_MULTIPLE, round_up
from cohort.rollout.capacity import Capacity, order_after_removal
from cohort.rollout.native.kernels import TILE, StepCall


class SlotCache:
    """Keys and values of the prompts and rows, preallocated. Unused memory is neither cleared nor read.

    Args:
        capacity: how much is stored at a time.
        layers, heads, width: of the model; ``heads`` are key-value heads.
        dtype: of the stored numbers, float32 or bfloat16.
        group: query heads per key-value head.
        lanes: numbers per vector of the kernels.
    """

    def __init__(
        self, capacity: Capacity, *, layers: int, heads: int, width: int, dtype: torch.dtype, group: int, lanes: int
    ) -> None:
        self.padded = round_up(width, lanes)
        own_tokens, prompt_tokens = (
            round_up(length, TOKEN_MULTIPLE) for length in (capacity.completion_length, capacity.prompt_length)
        )
        self.own = torch.empty(2, layers, capacity.rows, heads, own_tokens, self.padded, dtype=dtype)
        """Keys and values of the rows' slots; decode.c describes the layout."""
        self.prompts = torch.empty(2, layers, capacity.prompts, heads, prompt_tokens, self.padded, dtype=dtype)
        """Keys and values of the prompts' slots."""
        self._heads, self._width, self._group, self._lanes = heads, width, group, lanes
        self._free_rows = list(range(capacity.rows))
        self._free_prompts = list(range(capacity.prompts))
        self._parked: dict[int, tuple[int, int]] = {}  # by slot: the prompt's slot, tokens
        # Of each row: its slot, its prompt's slot, its number of tokens.
        self._row_slots, self._row_prompts, self._row_lengths = (np.zeros(0, np.int32) for _ in range(3))
        self._prompt_slots: list[int] = []
        self._prompt_lengths = np.zeros(capacity.prompts, np.int32)  # of the slots
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
        self._stale = True
        self._referenced: tuple[object, ...] = ()  # the step points to them
        self._texts: tuple[object, ...] = ()  # and those of texts to these

    @property
    def tokens(self) -> int:
        """Tokens for which memory is allocated."""
        return sum(part.shape[2] * part.shape[4] for part in (self.own, self.prompts))

    def add_prompts(self, lengths: Sequence[int]) -> int:
        """Make room for prompts; returns the number of the first."""
        first = len(self._prompt_slots)
        for length in lengths:
            self._prompt_slots.append(self._free_prompts.pop())
            self._prompt_lengths[self._prompt_slots[-1]] = length
        return first

    def write_prompt(self, layer: int, prompt: int, k_XKD: Tensor, v_XKD: Tensor) -> None:
        """Store a prompt's keys and values in one layer."""
        slot, length, lanes = self._prompt_slots[prompt], len(k_XKD), self._lanes
        keys, values = self.prompts[:, layer, slot]
        values[:, :length, : self._width] = v_XKD.transpose(0, 1)
        blocks = -(-length // lanes)
        whole = functional.pad(k_XKD, (0, 0, 0, 0, 0, blocks * lanes - length))
        by_block = keys.view(self._heads, -1, self.padded, lanes)[:, :blocks, : self._width]
        by_block.copy_(whole.view(blocks, lanes, self._heads, self._width).permute(2, 0, 3, 1))

    def add_rows(self, prompts: Sequence[int]) -> None:
        """Add rows without tokens, each after the given prompt."""
        slots = [self._free_rows.pop() for _ in prompts]
        self._append_rows(slots, [self._prompt_slots[prompt] for prompt in prompts], [0] * len(prompts))

    def _append_rows(self, slots: Sequence[int], prompts: Sequence[int], lengths: Sequence[int]) -> None:
        self._row_slots = np.append(self._row_slots, np.array(slots, np.int32))
        self._row_prompts = np.append(self._row_prompts, np.array(prompts, np.int32))
        self._row_lengths = np.append(self._row_lengths, np.array(lengths, np.int32))
        self._stale = True

    def remove_rows(self, rows: Sequence[int]) -> None:
        """Forget rows; the last ones take their numbers."""
        self._free_rows += [slot for slot in self._row_slots[list(rows)].tolist() if slot not in self._parked]
        order = order_after_removal(rows, len(self._row_slots))
        self._row_slots, self._row_prompts = self._row_slots[order], self._row_prompts[order]
        self._row_lengths = self._row_lengths[order]
        self._stale = True

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """Forget prompts; the last ones take their numbers."""
        self._free_prompts += [self._prompt_slots[prompt] for prompt in prompts]
        self._prompt_slots = [self._prompt_slots[p] for p in order_after_removal(prompts, len(self._prompt_slots))]

    def park(self, row: int) -> int:
        """Keep the slot of a row when the row is removed; returns a handle."""
        slot = int(self._row_slots[row])
        self._parked[slot] = int(self._row_prompts[row]), int(self._row_lengths[row])
        return slot

    def resume(self, handles: Sequence[int]) -> None:
        """Add rows with the keys and values of parked ones."""
        prompts, lengths = zip(*(self._parked.pop(handle) for handle in handles), strict=True)
        self._append_rows(handles, prompts, lengths)

    def release(self, handle: int) -> None:
        """Forget a parked row."""
        del self._parked[handle]
        self._free_rows.append(handle)

    def next_step(self) -> Structure:
        """The arguments of the coming step, in which each row gets one more token. The caller sets the scaling of
        scores."""
        self._row_lengths += 1
        threads = torch.get_num_threads()
        if self._stale or threads != self._step.threads:
            order = np.argsort(self._row_prompts, kind="stable").astype(np.int32)
            counts = np.unique(self._row_prompts, return_counts=True)[1].tolist()
            rows = (self._row_slots, self._row_prompts, self._row_lengths)
            self._referenced = self._lay_out(self._step, threads, order, counts, rows)
            self._stale = False
        return self._step

    def next_texts(self, rows: Sequence[int], lengths: Sequence[int]) -> tuple[Structure, Structure]:
        """The arguments of a pass in which some rows get several more tokens each: of layers whose output is needed for
        all tokens, and of the last layer, whose output is needed for the last token of each row."""
        chosen, counts = np.array(rows), np.array(lengths)
        ends = counts.cumsum()
        of_T = np.repeat(chosen, counts)
        before = self._row_lengths[of_T] - np.repeat(ends - counts, counts)
        grown = (before + np.arange(1, ends[-1] + 1)).astype(np.int32)
        tokens = (self._row_slots[of_T], self._row_prompts[of_T], grown)
        self._row_lengths[chosen] += counts.astype(np.int32)
        whole, last = (StepCall(**self._sizes, text=len(of_T)) for _ in range(2))
        threads = torch.get_num_threads()
        order = np.arange(len(of_T), dtype=np.int32)
        self._texts = (
            self._lay_out(whole, threads, order, lengths, tokens),
            self._lay_out(last, threads, (ends - 1).astype(np.int32), [1] * len(rows), tokens),
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
