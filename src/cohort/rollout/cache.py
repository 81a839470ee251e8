"""Keys and values of a rollout: a prompt's once for its group, a row's own beside it. Preallocated, densely packed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.rollout.backend import Capacity, moves_for_removal, order_after_removal

ROW_MULTIPLE = 8
"""Rows are computed in multiples of this. CPU matrix products sum a row the same way for every such number of rows."""
TOKEN_MULTIPLE = 32
"""Key lengths are multiples of this: vectorised sums then add the same numbers in the same order, then zeros."""
CLEARED_TOKENS = 64
"""Rows are cleared so many tokens at a time, before they come into use."""


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


class GroupCache:
    """Keys and values of the prompts and of the rows of a ``LeanBackend``.

    Args:
        capacity: how much is held at most.
        layers, heads, width: of the model; ``heads`` are key-value heads.
        dtype, device: of what is held.
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
        own_length = round_up(capacity.completion_length, TOKEN_MULTIPLE)
        prompt_length = round_up(capacity.prompt_length, TOKEN_MULTIPLE)
        self._heads, self._width, self._group, self._device = heads, width, group, device
        # Not cleared as a whole: memory that is never used is never touched.
        self._own = torch.empty(2, layers, capacity.rows, heads, own_length, width, dtype=dtype, device=device)
        self._prompts = torch.empty(
            2, layers, capacity.prompts, heads, prompt_length, width, dtype=dtype, device=device
        )
        self._cleared = 0
        self._row_prompt: list[int] = []
        self._row_length: list[int] = []
        self._prompt_length: list[int] = []
        self._layout: Layout | None = None

    @property
    def tokens(self) -> int:
        """Tokens that there is memory for."""
        return sum(held.shape[2] * held.shape[4] for held in (self._own, self._prompts))

    def add_prompts(self, lengths: Sequence[int]) -> int:
        """Make room for prompts; the first one's number."""
        first = len(self._prompt_length)
        for prompt, length in enumerate(lengths, first):
            self._prompts[:, :, prompt, :, length:].zero_()  # what is masked must still be a number
        self._prompt_length += lengths
        self._layout = None
        return first

    def write_prompt(self, layer: int, prompt: int, k_LKD: Tensor, v_LKD: Tensor) -> None:
        """A prompt's keys and values in one layer."""
        length = k_LKD.shape[0]
        self._prompts[0, layer, prompt, :, :length] = k_LKD.transpose(0, 1)
        self._prompts[1, layer, prompt, :, :length] = v_LKD.transpose(0, 1)

    def add_rows(self, prompts: Sequence[int]) -> None:
        """Rows without tokens, each after the given prompt."""
        first = len(self._row_prompt)
        self._own[:, :, first : first + len(prompts), :, : self._cleared].zero_()
        self._row_prompt += prompts
        self._row_length += [0] * len(prompts)
        self._layout = None

    def remove_rows(self, rows: Sequence[int]) -> None:
        """Forget rows; the last ones take their places."""
        for source, place in moves_for_removal(rows, len(self._row_prompt)):
            self._own[:, :, place, :, : self._cleared] = self._own[:, :, source, :, : self._cleared]
        order = order_after_removal(rows, len(self._row_prompt))
        self._row_prompt = [self._row_prompt[row] for row in order]
        self._row_length = [self._row_length[row] for row in order]
        self._layout = None

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """Forget prompts; the last ones take their places, and rows are told."""
        moves = moves_for_removal(prompts, len(self._prompt_length))
        for source, place in moves:
            self._prompts[:, :, place] = self._prompts[:, :, source]
        order = order_after_removal(prompts, len(self._prompt_length))
        self._prompt_length = [self._prompt_length[prompt] for prompt in order]
        moved = dict(moves)
        self._row_prompt = [moved.get(prompt, prompt) for prompt in self._row_prompt]
        self._layout = None

    def next_layout(self) -> Layout:
        """How the rows lie in the coming step, in which each gets one more token."""
        if self._layout is None:
            self._layout = Layout(
                self._row_prompt,
                self._row_length,
                self._prompt_length,
                heads=self._heads,
                group_rows=self._group,
                own_capacity=self._own.shape[-2],
                device=self._device,
                dtype=self._own.dtype,
            )
        else:
            self._layout.advance()
        self._row_length = [length + 1 for length in self._row_length]
        if (wanted := self._layout.own_length) > self._cleared:
            fresh = min(round_up(wanted, CLEARED_TOKENS), self._own.shape[-2])
            self._own[..., self._cleared : fresh, :].zero_()
            self._cleared = fresh
        return self._layout

    def write_rows(self, layer: int, layout: Layout, k_SKD: Tensor, v_SKD: Tensor) -> None:
        """The keys and values of every row's newest token in one layer."""
        for own, new in zip(self._own[:, layer], (k_SKD, v_SKD), strict=True):
            own.view(-1, self._width).index_copy_(0, layout.writes, new.reshape(-1, self._width).to(own.dtype))

    def own(self, layer: int, layout: Layout) -> tuple[Tensor, Tensor]:
        """Keys and values of the rows in one layer, ``[S K, T, D]`` each."""
        held = self._own[:, layer, : layout.count, :, : layout.own_length].flatten(1, 2)
        return held[0], held[1]

    def prompts(self, layer: int, layout: Layout) -> tuple[Tensor, Tensor]:
        """Keys and values of the prompts in one layer, ``[R K, L, D]`` each."""
        held = self._prompts[:, layer, : layout.prompts, :, : layout.prompt_length].flatten(1, 2)
        return held[0], held[1]


class Layout:
    """Where the rows stand in a decode step: positions, masks, and the way from row order to groups and back.

    Args:
        row_prompt: each row's prompt.
        row_length: its own tokens so far; the step adds one.
        prompt_lengths: tokens of each prompt held.
        heads, group_rows: key-value heads, and query heads of each.
        own_capacity: tokens that a row has room for.
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
        """S: how many rows there are."""
        self.padding = -len(row_prompt) % ROW_MULTIPLE
        """How many more are computed outside attention."""
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
        """Of the step's tokens, in the whole sequence; padded."""
        row_heads = torch.arange(self.count * heads, device=device).view(self.count, heads)
        self.writes = (row_heads * own_capacity + self._own_S[:, None]).view(-1)
        """Where their keys and values go: entries of ``[S K T]``."""
        self._set_groups(row_prompt, heads, device)
        self._prompt_lengths_R = torch.tensor(list(prompt_lengths), device=device)
        self._ragged_prompts = min(prompt_lengths) < self.prompt_length
        self._own_masks: dict[int | None, Tensor | None] = {}
        self._prompt_masks: dict[int | None, Tensor | None] = {}

    def _set_groups(self, row_prompt: Sequence[int], heads: int, device: torch.device) -> None:
        of_prompt: list[list[int]] = [[] for _ in range(self.prompts)]
        for row, prompt in enumerate(row_prompt):
            of_prompt[prompt].append(row)
        # Queries of one prompt are rows of one product: as many as are a multiple of four, for ROW_MULTIPLE's reason.
        step = 4 // math.gcd(4, self._group_rows)
        self.most_rows = round_up(max(map(len, of_prompt)), step)
        gather_RM = [[*rows, *[0] * (self.most_rows - len(rows))] for rows in of_prompt]
        scatter_S = [0] * self.count
        for prompt, rows in enumerate(of_prompt):
            for place, row in enumerate(rows):
                scatter_S[row] = prompt * heads * self.most_rows + place
        heads_K = torch.arange(heads, device=device)
        self._rows_RM = torch.tensor(gather_RM, device=device)
        # Of entries [S, K]: which makes up [R, K, M]; and back.
        self._gather = (self._rows_RM[:, None] * heads + heads_K[:, None]).flatten()
        self._scatter = (torch.tensor(scatter_S, device=device)[:, None] + heads_K * self.most_rows).flatten()

    def advance(self) -> None:
        """One token further, with the same rows."""
        for tensor in (self._own_S, self.positions, self.writes):
            tensor.add_(1)
        self._longest += 1
        self._furthest += 1
        self._own_masks.clear()
        self._prompt_masks = {None: self._prompt_masks[None]} if None in self._prompt_masks else {}

    @property
    def own_length(self) -> int:
        """T: tokens of the longest row with the step's, rounded up."""
        return min(round_up(self._longest + 1, TOKEN_MULTIPLE), self._own_capacity)

    def by_prompt(self, entries: Tensor) -> Tensor:
        """Row order ``[S K, G, w]`` to groups: ``[R K, M G, w]``."""
        grouped = entries.index_select(0, self._gather)
        return grouped.view(-1, self.most_rows * self._group_rows, entries.shape[-1])

    def by_row(self, grouped: Tensor) -> Tensor:
        """Groups ``[R K, M G, w]`` to row order, ``[S K, G, w]``."""
        return grouped.view(-1, self._group_rows, grouped.shape[-1]).index_select(0, self._scatter)

    def own_mask(self, window: int | None) -> Tensor | None:
        """What of its own tokens a row does not see, ``[S K, 1, T]``: -inf there, else 0."""
        window = None if window is None or self._longest < window else window
        if window not in self._own_masks:
            keys_T = torch.arange(self.own_length, device=self._own_S.device)
            back_ST = self._own_S[:, None] - keys_T
            seen_ST = (back_ST >= 0) & (back_ST < (window or math.inf))
            self._own_masks[window] = self._mask(seen_ST.repeat_interleave(self._heads, dim=0)[:, None])
        return self._own_masks[window]

    def prompt_mask(self, window: int | None) -> Tensor | None:
        """What of its prompt a row does not see, ``[R K, M G or 1, L]``; None: it sees all."""
        window = None if window is None or self._furthest < window else window
        if window not in self._prompt_masks:
            self._prompt_masks[window] = self._make_prompt_mask(window)
        return self._prompt_masks[window]

    def _make_prompt_mask(self, window: int | None) -> Tensor | None:
        keys_L = torch.arange(self.prompt_length, device=self._own_S.device)
        within_RL = keys_L < self._prompt_lengths_R[:, None]
        if window is None:
            if not self._ragged_prompts:
                return None
            return self._mask(within_RL.repeat_interleave(self._heads, dim=0)[:, None])
        back_RML = self.positions[self._rows_RM][..., None] - keys_L
        seen = (within_RL[:, None] & (back_RML < window)).repeat_interleave(self._group_rows, dim=1)
        return self._mask(seen.repeat_interleave(self._heads, dim=0))

    def _mask(self, seen: Tensor) -> Tensor:
        zeros = torch.zeros(seen.shape, dtype=self._mask_dtype, device=seen.device)
        return zeros.masked_fill_(~seen, -torch.inf)
