"""What a sampler keeps of prompts, once per group, and of rows: keys and values, and the states of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.policy.passes import KeysValues
from cohort.policy.recurrent import StateKey
from cohort.rollout.local.capacity import TOKEN_MULTIPLE, Capacity, round_up

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


class Rows:
    """The places in memory of rows or prompts, which are known by their slots: n of them have places 0 to n - 1, so
    that products compute nothing for places that are free. When some end, the last ones are moved."""

    def __init__(self) -> None:
        self._slots: list[int] = []  # by place
        self._places: dict[int, int] = {}

    def add(self, slots: Sequence[int]) -> list[int]:
        """The places of slots, which need not be new."""
        for slot in slots:
            if slot not in self._places:
                self._places[slot] = len(self._slots)
                self._slots.append(slot)
        return self.places(slots)

    def __len__(self) -> int:
        return len(self._slots)

    def places(self, slots: Sequence[int]) -> list[int]:
        """The places of slots."""
        return [self._places[slot] for slot in slots]

    def release(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """Forget slots; returns the moves ``(from, to)`` by which the last entries fill the gaps."""
        gone = set(self.places(slots))
        left = len(self._slots) - len(gone)
        movers = [place for place in range(left, len(self._slots)) if place not in gone]
        moves = list(zip(movers, sorted(hole for hole in gone if hole < left), strict=True))
        for source, target in moves:
            self._slots[target] = self._slots[source]
        del self._slots[left:]
        self._places = {slot: place for place, slot in enumerate(self._slots)}
        return moves


class Fixed(Rows):
    """Places that are the slots themselves, so that nothing ever moves: for kernels that find each row by itself."""

    def add(self, slots: Sequence[int]) -> list[int]:
        """See ``Rows``."""
        return self.places(slots)

    def places(self, slots: Sequence[int]) -> list[int]:
        """See ``Rows``."""
        return list(slots)

    def release(self, slots: Sequence[int]) -> list[tuple[int, int]]:  # noqa: ARG002
        """See ``Rows``."""
        return []


class Places:
    """Where the rows of a step are in memory, in rising order. A step reads a view of the places up to its last row
    when it has at least half of them, and copies its rows when it has fewer, as when most of them wait: a row's bits do
    not depend on which.

    Axis letters: S rows of the step, R places of the view or copy.

    Args:
        places: of the rows.
        device: of the tensors.
        share: the least share of the places that a view is taken for. 1 where a step writes to all of the view.
    """

    def __init__(self, places: Sequence[int], device: torch.device, *, share: float = 0.5) -> None:
        self.count, span = len(places), places[-1] + 1
        self.viewed = self.count >= share * span
        self.length = span if self.viewed else self.count
        """R."""
        self.places_S = torch.tensor(places, device=device)
        self._index = self.places_S if self.count < self.length else None

    def of(self, stored: Tensor) -> Tensor:
        """What is stored at the places, on axis R."""
        return stored[: self.length] if self.viewed else stored.index_select(0, self.places_S)

    def spread(self, entries_S: Tensor) -> Tensor:
        """From axis S to axis R, with zeros for places of other rows."""
        if self._index is None:
            return entries_S
        return entries_S.new_zeros(self.length, *entries_S.shape[1:]).index_copy_(0, self._index, entries_S)

    def collect(self, entries_R: Tensor) -> Tensor:
        """From axis R to axis S."""
        return entries_R if self._index is None else entries_R.index_select(0, self._index)

    def store(self, stored: Tensor, entries_R: Tensor) -> None:
        """Write back what ``of`` returned and the step changed."""
        if not self.viewed:
            stored.index_copy_(0, self.places_S, entries_R)


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of one layer's attention."""

    group: int
    """Query heads per key-value head."""
    count: int
    """K: key-value heads."""
    key_width: int
    value_width: int

    @property
    def numbers(self) -> int:
        """Numbers of the keys and values of one token."""
        return self.count * (self.key_width + self.value_width)


class GroupCache:
    """Keys and values of prompts and rows, by their places, in torch tensors. The rooms of rows grow with the longest.

    Args:
        capacity: how much is stored at a time.
        layers: the attention of each layer, by the layer's number.
        dtype, device: of the stored tensors.
    """

    def __init__(
        self, capacity: Capacity, layers: Mapping[int, Heads], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layers, self.dtype, self.device = layers, dtype, device
        # Not cleared as a whole: unused memory is never touched.
        self._capacity, room = capacity, capacity.room_of(1, 1)
        self._held = capacity.rows_of(room), room  # rows and tokens of each; a model may have no attention layers
        prompt_length = round_up(capacity.prompt_length, TOKEN_MULTIPLE)
        self.own = {layer: self._pair(heads, *self._held) for layer, heads in layers.items()}
        """Keys and values of rows, by layer: ``[places, K, room, width]`` each."""
        self.prompts = {layer: self._pair(heads, capacity.prompts, prompt_length) for layer, heads in layers.items()}
        """Those of prompts."""
        self._cleared = 0
        self._row_prompt: list[int] = []
        self._row_length: list[int] = []
        self._prompt_length: list[int] = []
        self._step: GroupStep | None = None

    def _pair(self, heads: Heads, count: int, room: int) -> tuple[Tensor, Tensor]:
        shapes = ((count, heads.count, room, width) for width in (heads.key_width, heads.value_width))
        keys, values = (torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return keys, values

    @property
    def room(self) -> int:
        """Tokens that a row has room for."""
        return self._held[1]

    def add_prompts(self, places: Sequence[int], lengths: Sequence[int], found: KeysValues) -> None:
        """Store the keys and values of prompts, ``[K, X, width]`` each, by layer, end to end."""
        for layer, both in self.prompts.items():
            for stored, new_KXD in zip(both, found[layer], strict=True):
                for place, part in zip(places, new_KXD.split([*lengths], 1), strict=True):
                    stored[place, :, : part.shape[1]] = part
                    stored[place, :, part.shape[1] :].zero_()  # masked memory must not hold NaN
        for place, length in zip(places, lengths, strict=True):
            _put(self._prompt_length, place, length)
        self._step = None

    def add_rows(self, places: Sequence[int], prompts: Sequence[int]) -> None:
        """Begin rows without tokens, each after the given prompt."""
        for place, prompt in zip(places, prompts, strict=True):
            _put(self._row_prompt, place, prompt)
            _put(self._row_length, place, 0)
        self._fit(0)
        self._step = None
        if self._cleared:
            index = torch.tensor(places, device=self.device)
            for both in self.own.values():
                for own in both:
                    own[:, :, : self._cleared].index_fill_(0, index, 0)

    def remove_rows(self, moves: Sequence[tuple[int, int]], left: int) -> None:
        """Move rows ``(from, to)``, and forget all after those that are left."""
        for both in self.own.values():
            for own in both:
                for source, target in moves:
                    own[target, :, : self._cleared] = own[source, :, : self._cleared]
        _remove(self._row_prompt, moves, left)
        _remove(self._row_length, moves, left)
        self._step = None

    def remove_prompts(self, moves: Sequence[tuple[int, int]], left: int) -> None:
        """Move prompts ``(from, to)``, and forget all after those that are left."""
        for both in self.prompts.values():
            for stored in both:
                for source, target in moves:
                    stored[target] = stored[source]
        moved = dict(moves)
        self._row_prompt = [moved.get(prompt, prompt) for prompt in self._row_prompt]
        _remove(self._prompt_length, moves, left)
        self._step = None

    def position(self, place: int) -> int:
        """Position of the next token of a row, its prompt counted."""
        return self._prompt_length[self._row_prompt[place]] + self._row_length[place]

    def text(self, layer: int, place: int) -> list[Tensor]:
        """Keys and values of a row's prompt and tokens in one layer, ``[K, T, width]`` each."""
        length, prompt = self._row_length[place], self._row_prompt[place]
        before = self._prompt_length[prompt]
        pairs = zip(self.prompts[layer], self.own[layer], strict=True)
        return [torch.cat([of_prompts[prompt, :, :before], own[place, :, :length]], 1) for of_prompts, own in pairs]

    def append(self, places: Sequence[int], lengths: Sequence[int], found: KeysValues) -> None:
        """Store the keys and values of further tokens of rows, ``[K, L, width]`` each, by layer, end to end."""
        ends = [self._row_length[place] + length for place, length in zip(places, lengths, strict=True)]
        self._fit(max(ends))
        self._clear_to(max(ends))
        for layer, both in self.own.items():
            for own, new_KLD in zip(both, found[layer], strict=True):
                for place, part, end in zip(places, new_KLD.split([*lengths], 1), ends, strict=True):
                    own[place, :, end - part.shape[1] : end] = part
        for place, end in zip(places, ends, strict=True):
            self._row_length[place] = end
        self._step = None

    def next_step(self, places: Sequence[int]) -> GroupStep:
        """The coming step, in which each of these rows, in rising order, gets one more token."""
        self._fit(max(self._row_length[place] for place in places) + 1)
        if self._step is None or self._step.places != places:
            self._step = GroupStep(self, places, self._row_prompt, self._row_length, self._prompt_length)
        else:
            self._step.advance()
        for place in places:
            self._row_length[place] += 1
        self._clear_to(self._step.own_length)
        return self._step

    def _fit(self, tokens: int) -> None:
        """Give each row room for so many tokens, and for what it has. Rows are copied a layer at a time, to memory of
        as many rows as there may then be."""
        (held, room), rows = self._held, len(self._row_length)
        if rows <= held and tokens <= room:
            return
        room = self._capacity.room_of(max([tokens, *self._row_length]), rows)
        held, copied = max(rows, self._capacity.rows_of(room)), min(rows, held)
        self._held, self._cleared, self._step = (held, room), min(self._cleared, room), None
        for layer, heads in self.layers.items():
            grown = self._pair(heads, held, room)
            for new, own in zip(grown, self.own[layer], strict=True):
                new[:copied, :, : self._cleared] = own[:copied, :, : self._cleared]
            self.own[layer] = grown

    def _clear_to(self, length: int) -> None:
        if length > self._cleared:
            fresh = min(round_up(length, CLEARED_TOKENS), self.room)
            for both in self.own.values():
                for own in both:
                    own[:, :, self._cleared : fresh].zero_()
            self._cleared = fresh


def _put(entries: list[int], place: int, value: int) -> None:
    """Write an entry, which may be the next one."""
    entries[place : place + 1] = [value]


def _remove(entries: list[int], moves: Sequence[tuple[int, int]], left: int) -> None:
    for source, target in moves:
        entries[target] = entries[source]
    del entries[left:]


class GroupStep:
    """Positions and masks of the rows in a decode step, and the way from their order to groups and back.

    Args:
        cache: of the rows, which have one token less than in the step.
        places: of the rows, rising.
        row_prompt, row_length: the prompt of each row that the cache has, and its tokens before the step.
        prompt_lengths: tokens of each prompt.
    """

    def __init__(
        self,
        cache: GroupCache,
        places: Sequence[int],
        row_prompt: Sequence[int],
        row_length: Sequence[int],
        prompt_lengths: Sequence[int],
    ) -> None:
        device = cache.device
        self.places, self.layers, self._room = list(places), cache.layers, cache.room
        self._own, self._prompts = cache.own, cache.prompts  # no reference to the cache, which has one to this
        self.count = len(places)
        """S: number of rows."""
        self.padding = padded_rows(self.count) - self.count
        """Number of padding rows outside attention."""
        self.rows = Places(places, device)
        self._prompt_count = len(prompt_lengths)
        self.prompt_length = round_up(max(prompt_lengths), TOKEN_MULTIPLE)
        """X: tokens of the longest prompt, rounded up."""
        prompts, lengths = [row_prompt[place] for place in places], [row_length[place] for place in places]
        self._longest = max(lengths)
        self._mask_dtype = torch.float64 if cache.dtype == torch.float64 else torch.float32
        self._own_S = torch.tensor(lengths, device=device)
        positions = [prompt_lengths[p] + t for p, t in zip(prompts, lengths, strict=True)]
        self._furthest = max(positions)
        self.positions = torch.tensor(positions + [0] * self.padding, device=device)
        """Position of each row's new token in the whole sequence; padded."""
        self._of_prompt: list[list[int]] = [[] for _ in prompt_lengths]
        for row, prompt in enumerate(prompts):
            self._of_prompt[prompt].append(row)
        self._prompt_lengths_P = torch.tensor(prompt_lengths, device=device)
        self._ragged_prompts = min(prompt_lengths) < self.prompt_length
        self._groups: dict[tuple[int, int], Groups] = {}
        self._writes: dict[int, Tensor] = {}
        self._own_masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._prompt_masks: dict[tuple[Heads, int | None], Tensor | None] = {}

    def advance(self) -> None:
        """Go on by one token, with the same rows."""
        for tensor in (self._own_S, self.positions, *self._writes.values()):
            tensor.add_(1)
        self._longest += 1
        self._furthest += 1
        self._own_masks.clear()
        self._prompt_masks = {key: mask for key, mask in self._prompt_masks.items() if key[1] is None}

    @property
    def own_length(self) -> int:
        """T: tokens of the longest row, the step's included, rounded up."""
        return min(round_up(self._longest + 1, TOKEN_MULTIPLE), self._room)

    def write(self, layer: int, *new_SKD: Tensor) -> None:
        """Store the keys and values of each row's newest token in one layer."""
        count = self.layers[layer].count
        if count not in self._writes:  # indices of [places K room]
            heads_SK = self.rows.places_S[:, None] * count + torch.arange(count, device=self._own_S.device)
            self._writes[count] = (heads_SK * self._room + self._own_S[:, None]).flatten()
        for own, new in zip(self._own[layer], new_SKD, strict=True):
            width = own.shape[-1]
            own.view(-1, width).index_copy_(0, self._writes[count], new.reshape(-1, width).to(own.dtype))

    def own(self, layer: int) -> list[Tensor]:
        """Keys and values of the rows in one layer, ``[R K, T, width]`` each."""
        return [self.rows.of(own[:, :, : self.own_length]).flatten(0, 1) for own in self._own[layer]]

    def of_prompts(self, layer: int) -> list[Tensor]:
        """Keys and values of the prompts in one layer, ``[P K, X, width]`` each."""
        return [part[: self._prompt_count, :, : self.prompt_length].flatten(0, 1) for part in self._prompts[layer]]

    def groups(self, heads: Heads) -> Groups:
        """The rows of each prompt."""
        key = heads.count, heads.group
        if key not in self._groups:
            self._groups[key] = Groups(self._of_prompt, self.count, heads, self._own_S.device)
        return self._groups[key]

    def own_mask(self, heads: Heads, window: int | None) -> Tensor | None:
        """Mask over a row's own tokens, ``[R K, 1, T]``: -inf for those that it does not see, else 0."""
        window = None if window is None or self._longest < window else window
        key = heads.count, window
        if key not in self._own_masks:
            keys_T = torch.arange(self.own_length, device=self._own_S.device)
            back_RT = self.rows.spread(self._own_S)[:, None] - keys_T
            seen_RT = (back_RT >= 0) & (back_RT < (window or math.inf))
            self._own_masks[key] = self._mask(seen_RT.repeat_interleave(heads.count, dim=0)[:, None])
        return self._own_masks[key]

    def prompt_mask(self, heads: Heads, window: int | None) -> Tensor | None:
        """Mask over the prompts' tokens, ``[P K, M group or 1, X]``. None: each row sees its whole prompt."""
        window = None if window is None or self._furthest < window else window
        if (heads, window) not in self._prompt_masks:
            self._prompt_masks[heads, window] = self._make_prompt_mask(heads, window)
        return self._prompt_masks[heads, window]

    def _make_prompt_mask(self, heads: Heads, window: int | None) -> Tensor | None:
        keys_X = torch.arange(self.prompt_length, device=self._own_S.device)
        within_PX = keys_X < self._prompt_lengths_P[:, None]
        if window is None:
            if not self._ragged_prompts:
                return None
            return self._mask(within_PX.repeat_interleave(heads.count, dim=0)[:, None])
        back_PMX = self.positions[self.groups(heads).rows_PM][..., None] - keys_X
        seen = (within_PX[:, None] & (back_PMX < window)).repeat_interleave(heads.group, dim=1)
        return self._mask(seen.repeat_interleave(heads.count, dim=0))

    def _mask(self, seen: Tensor) -> Tensor:
        zeros = torch.zeros(seen.shape, dtype=self._mask_dtype, device=seen.device)
        return zeros.masked_fill_(~seen, -torch.inf)


class Groups:
    """The way from the order of rows to prompts, of which all rows are computed in one product, and back.

    Args:
        of_prompt: the rows of each prompt.
        count: S, the number of rows.
        heads: of the layer.
        device: of the tensors.
    """

    def __init__(self, of_prompt: Sequence[Sequence[int]], count: int, heads: Heads, device: torch.device) -> None:
        # Queries of one prompt are the rows of one product, padded to a multiple of four for ROW_MULTIPLE's reason.
        self._most = round_up(max(map(len, of_prompt)), 4 // math.gcd(4, heads.group))
        self._group = heads.group
        scatter_S = [0] * count
        for prompt, rows in enumerate(of_prompt):
            for index, row in enumerate(rows):
                scatter_S[row] = prompt * heads.count * self._most + index
        heads_K = torch.arange(heads.count, device=device)
        self.rows_PM = torch.tensor([[*rows, *[0] * (self._most - len(rows))] for rows in of_prompt], device=device)
        # Indices that turn entries [S, K] into [P, K, M], and back.
        self._gather = (self.rows_PM[:, None] * heads.count + heads_K[:, None]).flatten()
        self._scatter = (torch.tensor(scatter_S, device=device)[:, None] + heads_K * self._most).flatten()

    def by_prompt(self, entries: Tensor) -> Tensor:
        """Order of rows ``[S K, group, w]`` to groups: ``[P K, M group, w]``."""
        return entries.index_select(0, self._gather).view(-1, self._most * self._group, entries.shape[-1])

    def by_row(self, grouped: Tensor) -> Tensor:
        """Groups ``[P K, M group, w]`` to the order of rows, ``[S K, group, w]``."""
        return grouped.view(-1, self._group, grouped.shape[-1]).index_select(0, self._scatter)


class RowStates:
    """States of recurrent layers, by layer and name: of prompts, once per group, by slot; of rows, which begin as
    copies of their prompt's, by place, ``[places, ...]`` each.

    Args:
        rows: number of places.
    """

    def __init__(self, rows: int) -> None:
        self._count = rows
        self._rows: dict[StateKey, Tensor] = {}
        self._prompts: dict[int, dict[StateKey, Tensor]] = {}

    def add_prompts(self, slots: Sequence[int], found: KeysValues) -> None:
        """Store what recurrent layers left of prompts, ``[prompts, ...]`` each."""
        states = states_in(found)
        for number, slot in enumerate(slots):
            self._prompts[slot] = {key: parts[number] for key, parts in states.items()}
        for key, parts in states.items():
            if key not in self._rows:
                self._rows[key] = parts.new_empty(self._count, *parts.shape[1:])

    def remove_prompts(self, slots: Sequence[int]) -> None:
        """Forget prompts."""
        for slot in slots:
            del self._prompts[slot]

    def add_rows(self, places: Sequence[int], prompts: Sequence[int]) -> None:
        """Begin rows, each with the states of the prompt in the given slot."""
        for place, prompt in zip(places, prompts, strict=True):
            for key, state in self._prompts[prompt].items():
                self._rows[key][place] = state

    def move_rows(self, moves: Sequence[tuple[int, int]]) -> None:
        """Move rows ``(from, to)``."""
        for states in self._rows.values():
            for source, target in moves:
                states[target] = states[source]

    def __getitem__(self, key: StateKey) -> Tensor:
        """A state at all places."""
        return self._rows[key]

    def of_rows(self, places: Sequence[int]) -> KeysValues:
        """Copies of the states of some rows."""
        return {key: (states[list(places)],) for key, states in self._rows.items()}

    def write(self, places: Sequence[int], found: KeysValues) -> None:
        """Store new states of some rows."""
        for key, parts in states_in(found).items():
            states = self._rows[key]
            states[torch.tensor(list(places), device=states.device)] = parts.to(states.dtype)


def states_in(found: KeysValues) -> dict[StateKey, Tensor]:
    """The states of recurrent layers in what a pass reads; the rest are keys and values, by the layer's number."""
    return {key: parts[0] for key, parts in found.items() if isinstance(key, tuple)}
