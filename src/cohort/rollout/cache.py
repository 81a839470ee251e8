"""Keys and values of prompts, stored once per group, and of rows, whose rooms grow with the longest. Densely packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from cohort.rollout.capacity import TOKEN_MULTIPLE, Capacity, moves_for_removal, order_after_removal, round_up

PREFILL_MULTIPLE = 64
"""Prefills are padded to a multiple of this many tokens: oneDNN caches the code that it compiles for each shape."""
ROW_MULTIPLE, LEAST_ROWS = 8, 16
"""Rows are computed in multiples of this, and at least so many: then CPU matrix products sum each row in the same
order. (MKL has other code for 8 rows on Intel's processors.)"""
CLEARED_TOKENS = 64
"""Memory of rows is cleared this many tokens at a time, before its first use."""


def padded_rows(count: int) -> int:
    """How many rows are computed for ``count`` of them."""
    return max(LEAST_ROWS, round_up(count, ROW_MULTIPLE))


class GroupCache:
    """Keys and values of the prompts and rows of a ``LeanBackend``, in torch tensors.

    Args:
        capacity: how much is stored at a time.
        layers, heads, width: of the model; ``heads`` are key-value heads.
        dtype, device: of the stored tensors.
        group: query heads per key-value head.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        layers: int,
        heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        group: int,
    ) -> None:
        prompt_length = round_up(capacity.prompt_length, TOKEN_MULTIPLE)
        self._heads, self.width, self._group, self._device = heads, width, group, device
        # Not cleared as a whole: unused memory is never touched.
        self._capacity, room = capacity, capacity.room_of(1, 1)
        self._held = capacity.rows_of(room), room  # rows and tokens of each; a model may have no attention layers
        shape = (2, self._held[0], heads, room, width)
        self._own = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._prompts = torch.empty(
            2, layers, capacity.prompts, heads, prompt_length, width, dtype=dtype, device=device
        )
        self._cleared = 0
        self._row_prompt: list[int] = []
        self._row_length: list[int] = []
        self._prompt_length: list[int] = []
        self._parked: dict[int, tuple[list[Tensor], int, int]] = {}  # keys and values, prompt, length
        self._handles = count()
        self._layout: Layout | None = None

    @property
    def tokens(self) -> int:
        """Tokens for which memory is allocated."""
        rows, room = self._held
        return rows * room + self._prompts.shape[2] * self._prompts.shape[4]

    def add_prompts(self, lengths: Sequence[int]) -> int:
        """Make room for prompts; returns the number of the first."""
        first = len(self._prompt_length)
        for prompt, length in enumerate(lengths, first):
            self._prompts[:, :, prompt, :, length:].zero_()  # masked memory must not hold NaN
        self._prompt_length += lengths
        self._layout = None
        return first

    def write_prompt(self, layer: int, prompt: int, k_XKD: Tensor, v_XKD: Tensor) -> None:
        """Store a prompt's keys and values in one layer."""
        length = k_XKD.shape[0]
        self._prompts[0, layer, prompt, :, :length] = k_XKD.transpose(0, 1)
        self._prompts[1, layer, prompt, :, :length] = v_XKD.transpose(0, 1)

    def add_rows(self, prompts: Sequence[int]) -> None:
        """Add rows without tokens, each after the given prompt."""
        first = len(self._row_prompt)
        self._fit(0, first + len(prompts))
        for own in self._own:
            own[:, first : first + len(prompts), :, : self._cleared].zero_()
        self._row_prompt += prompts
        self._row_length += [0] * len(prompts)
        self._layout = None

    def remove_rows(self, rows: Sequence[int]) -> None:
        """Forget rows; the last ones take their numbers."""
        for source, target in moves_for_removal(rows, len(self._row_prompt)):
            for own in self._own:
                own[:, target, :, : self._cleared] = own[:, source, :, : self._cleared]
        order = order_after_removal(rows, len(self._row_prompt))
        self._row_prompt = [self._row_prompt[row] for row in order]
        self._row_length = [self._row_length[row] for row in order]
        self._layout = None

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """Forget prompts; the last ones take their numbers."""
        moves = moves_for_removal(prompts, len(self._prompt_length))
        for source, target in moves:
            self._prompts[:, :, target] = self._prompts[:, :, source]
        order = order_after_removal(prompts, len(self._prompt_length))
        self._prompt_length = [self._prompt_length[prompt] for prompt in order]
        moved = dict(moves)
        self._row_prompt = [moved.get(prompt, prompt) for prompt in self._row_prompt]
        for handle, (kept, prompt, length) in self._parked.items():
            self._parked[handle] = kept, moved.get(prompt, prompt), length
        self._layout = None

    def park(self, row: int) -> int:
        """Copy the keys and values of a row; returns a handle."""
        handle, length = next(self._handles), self._row_length[row]
        kept = [own[:, row, :, :length].clone() for own in self._own]
        self._parked[handle] = kept, self._row_prompt[row], length
        return handle

    def resume(self, handles: Sequence[int]) -> None:
        """Add rows with the keys and values of parked ones."""
        for handle in handles:
            kept, prompt, length = self._parked.pop(handle)
            self._fit(length, len(self._row_prompt) + 1)
            self.add_rows([prompt])
            for own, part in zip(self._own, kept, strict=True):
                own[:, len(self._row_prompt) - 1, :, :length] = part
            self._row_length[-1] = length

    def release(self, handle: int) -> None:
        """Forget a parked row."""
        del self._parked[handle]

    def position(self, row: int) -> int:
        """Position of the next token of a row, its prompt counted."""
        return self._prompt_length[self._row_prompt[row]] + self._row_length[row]

    def text(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a row's prompt and tokens in one layer, ``[T, K, D]`` each."""
        prompt, length = self._row_prompt[row], self._row_length[row]
        k, v = (
            torch.cat([of_prompts[prompt, :, : self._prompt_length[prompt]], own[:, :length]], dim=1).transpose(0, 1)
            for own, of_prompts in zip(self._own[layer][:, row], self._prompts[:, layer], strict=True)
        )
        return k, v

    def append(self, layer: int, row: int, k_LKD: Tensor, v_LKD: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of further tokens of a row in one layer; returns those of the whole text. ``grow``
        follows after the last layer."""
        start, prompt = self._row_length[row], self._row_prompt[row]
        end = start + len(k_LKD)
        self._fit(end, len(self._row_prompt))
        self._clear_to(end)
        whole = []
        for new, own, of_prompts in zip((k_LKD, v_LKD), self._own[layer][:, row], self._prompts[:, layer], strict=True):
            own[:, start:end] = new.transpose(0, 1)
            before = of_prompts[prompt, :, : self._prompt_length[prompt]]
            whole.append(torch.cat([before, own[:, :end]], dim=1).transpose(0, 1))
        return whole[0], whole[1]

    def grow(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Count tokens that were appended."""
        for row, length in zip(rows, lengths, strict=True):
            self._row_length[row] += length
        self._layout = None

    def next_layout(self) -> Layout:
        """The layout of the coming step, in which each row gets one more token."""
        self._fit(max(self._row_length) + 1, len(self._row_length))
        if self._layout is None:
            self._layout = Layout(
                self._row_prompt,
                self._row_length,
                self._prompt_length,
                heads=self._heads,
                group_rows=self._group,
                own_capacity=self._held[1],
                device=self._device,
                dtype=self._prompts.dtype,
            )
        else:
            self._layout.advance()
        self._row_length = [length + 1 for length in self._row_length]
        self._clear_to(self._layout.own_length)
        return self._layout

    def _fit(self, tokens: int, rows: int) -> None:
        """Give so many rows room for so many tokens each, and for what they have. Rows are copied a layer at a time, to
        memory of as many rows as there may then be."""
        held, room = self._held
        if rows <= held and tokens <= room:
            return
        room = self._capacity.room_of(max([tokens, *self._row_length]), rows)
        held, count = max(rows, self._capacity.rows_of(room)), len(self._row_prompt)
        self._held, self._cleared = (held, room), min(self._cleared, room)
        for layer, own in enumerate(self._own):
            grown = own.new_empty(2, held, own.shape[2], room, own.shape[4])
            grown[:, :count, :, : self._cleared] = own[:, :count, :, : self._cleared]
            self._own[layer] = grown
        self._layout = None

    def _clear_to(self, length: int) -> None:
        if length > self._cleared:
            fresh = min(round_up(length, CLEARED_TOKENS), self._held[1])
            for own in self._own:
                own[..., self._cleared : fresh, :].zero_()
            self._cleared = fresh

    def write_rows(self, layer: int, layout: Layout, k_SKD: Tensor, v_SKD: Tensor) -> None:
        """Store the keys and values of each row's newest token in one layer."""
        for own, new in zip(self._own[layer], (k_SKD, v_SKD), strict=True):
            own.view(-1, self.width).index_copy_(0, layout.writes, new.reshape(-1, self.width).to(own.dtype))

    def own(self, layer: int, layout: Layout) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows in one layer, ``[S K, T, D]`` each."""
        rows = self._own[layer][:, : layout.count, :, : layout.own_length].flatten(1, 2)
        return rows[0], rows[1]

    def prompts(self, layer: int, layout: Layout) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompts in one layer, ``[P K, X, D]`` each."""
        prompts = self._prompts[:, layer, : layout.prompts, :, : layout.prompt_length].flatten(1, 2)
        return prompts[0], prompts[1]


class Layout:
    """Positions and masks of the rows in a decode step, and the way from row order to groups and back.

    Args:
        row_prompt: each row's prompt.
        row_length: its tokens so far; the step adds one.
        prompt_lengths: tokens of each prompt.
        heads, group_rows: key-value heads, and query heads of each.
        own_capacity: tokens for which a row has room.
        device, dtype: of indices and of masks.
    """

    def __init__(
        self,
        row_prompt: Sequence[int],
        row_length: Sequence[int],
        prompt_lengths: Sequence[int],
        *,
        heads: int,
        group_rows: int,
        own_capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.count = len(row_prompt)
        """S: number of rows."""
        self.padding = padded_rows(len(row_prompt)) - len(row_prompt)
        """Number of padding rows outside attention."""
        self.prompts = len(prompt_lengths)
        self.prompt_length = round_up(max(prompt_lengths), TOKEN_MULTIPLE)
        self._longest = max(row_length)
        self._own_capacity = own_capacity
        self._heads, self._group_rows = heads, group_rows
        self._mask_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self._own_S = torch.tensor(list(row_length), device=device)
        positions = [prompt_lengths[p] + t for p, t in zip(row_prompt, row_length, strict=True)]
        self._furthest = max(positions)
        self.positions = torch.tensor(positions + [0] * self.padding, device=device)
        """Position of each row's new token in the whole sequence; padded."""
        row_heads = torch.arange(self.count * heads, device=device).view(self.count, heads)
        self.writes = (row_heads * own_capacity + self._own_S[:, None]).view(-1)
        """Where its keys and values are stored: indices of ``[S K T]``."""
        self._set_groups(row_prompt, heads, device)
        self._prompt_lengths_P = torch.tensor(list(prompt_lengths), device=device)
        self._ragged_prompts = min(prompt_lengths) < self.prompt_length
        self._own_masks: dict[int | None, Tensor | None] = {}
        self._prompt_masks: dict[int | None, Tensor | None] = {}

    def _set_groups(self, row_prompt: Sequence[int], heads: int, device: torch.device) -> None:
        of_prompt: list[list[int]] = [[] for _ in range(self.prompts)]
        for row, prompt in enumerate(row_prompt):
            of_prompt[prompt].append(row)
        # Queries of one prompt are the rows of one product, padded to a multiple of four for ROW_MULTIPLE's reason.
        step = 4 // math.gcd(4, self._group_rows)
        self.most_rows = round_up(max(map(len, of_prompt)), step)
        gather_PM = [[*rows, *[0] * (self.most_rows - len(rows))] for rows in of_prompt]
        scatter_S = [0] * self.count
        for prompt, rows in enumerate(of_prompt):
            for index, row in enumerate(rows):
                scatter_S[row] = prompt * heads * self.most_rows + index
        heads_K = torch.arange(heads, device=device)
        self._rows_PM = torch.tensor(gather_PM, device=device)
        # Indices that turn entries [S, K] into [P, K, M], and back.
        self._gather = (self._rows_PM[:, None] * heads + heads_K[:, None]).flatten()
        self._scatter = (torch.tensor(scatter_S, device=device)[:, None] + heads_K * self.most_rows).flatten()

    def advance(self) -> None:
        """Go on by one token, with the same rows."""
        for tensor in (self._own_S, self.positions, self.writes):
            tensor.add_(1)
        self._longest += 1
        self._furthest += 1
        self._own_masks.clear()
        self._prompt_masks = {None: self._prompt_masks[None]} if None in self._prompt_masks else {}

    @property
    def own_length(self) -> int:
        """T: tokens of the longest row, the step's included, rounded up."""
        return min(round_up(self._longest + 1, TOKEN_MULTIPLE), self._own_capacity)

    def by_prompt(self, entries: Tensor) -> Tensor:
        """Row order ``[S K, group, w]`` to groups: ``[P K, M group, w]``."""
        grouped = entries.index_select(0, self._gather)
        return grouped.view(-1, self.most_rows * self._group_rows, entries.shape[-1])

    def by_row(self, grouped: Tensor) -> Tensor:
        """Groups ``[P K, M group, w]`` to row order, ``[S K, group, w]``."""
        return grouped.view(-1, self._group_rows, grouped.shape[-1]).index_select(0, self._scatter)

    def own_mask(self, window: int | None) -> Tensor | None:
        """Mask over a row's own tokens, ``[S K, 1, T]``: -inf for those that it does not see, else 0."""
        window = None if window is None or self._longest < window else window
        if window not in self._own_masks:
            keys_T = torch.arange(self.own_length, device=self._own_S.device)
            back_ST = self._own_S[:, None] - keys_T
            seen_ST = (back_ST >= 0) & (back_ST < (window or math.inf))
            self._own_masks[window] = self._mask(seen_ST.repeat_interleave(self._heads, dim=0)[:, None])
        return self._own_masks[window]

    def prompt_mask(self, window: int | None) -> Tensor | None:
        """Mask over the prompts' tokens, ``[P K, M group or 1, X]``. None: each row sees its whole prompt."""
        window = None if window is None or self._furthest < window else window
        if window not in self._prompt_masks:
            self._prompt_masks[window] = self._make_prompt_mask(window)
        return self._prompt_masks[window]

    def _make_prompt_mask(self, window: int | None) -> Tensor | None:
        keys_X = torch.arange(self.prompt_length, device=self._own_S.device)
        within_PX = keys_X < self._prompt_lengths_P[:, None]
        if window is None:
            if not self._ragged_prompts:
                return None
            return self._mask(within_PX.repeat_interleave(self._heads, dim=0)[:, None])
        back_PMX = self.positions[self._rows_PM][..., None] - keys_X
        seen = (within_PX[:, None] & (back_PMX < window)).repeat_interleave(self._group_rows, dim=1)
        return self._mask(seen.repeat_interleave(self._heads, dim=0))

    def _mask(self, seen: Tensor) -> Tensor:
        zeros = torch.zeros(seen.shape, dtype=self._mask_dtype, device=seen.device)
        return zeros.masked_fill_(~seen, -torch.inf)
