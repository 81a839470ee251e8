"""Sampling from a transformers model through its own modules, with what they keep of a prompt stored once per group.

It runs the model as the update does (``policy.custom_attention``): attention, convolutions and recurrences over packed
tokens are Cohort's. A prompt is read once. Its keys and values stay where they are, and its rows attend to them; the
states of its recurrent layers are copied for each row, which then changes them in place.

Axis letters: S rows, A heads, D head dimension, T tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cohort.parallel.full import is_gathered
from cohort.policy import Policy
from cohort.policy.attention import widened
from cohort.policy.choose import find_head
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.device import kind_of
from cohort.policy.head import in_like_shapes
from cohort.policy.layout import Layout
from cohort.policy.parts import need
from cohort.policy.passes import Hidden, KeysValues, PackedPass, base_of
from cohort.policy.recurrent import Recurrence, StateKey
from cohort.rollout import cache as storage
from cohort.rollout.backend import Backend, texts_together
from cohort.rollout.cache import ROW_MULTIPLE, TOKEN_MULTIPLE, GroupCache
from cohort.rollout.capacity import Capacity
from cohort.rollout.group_attention import attend_in_two_parts
from cohort.rollout.states import RowStates, StateStep, states_in

# ----------------------------------------
# Copies of a model's matrices in the compute dtype, for many small passes.


class CastWeights:
    """Matrices of a decoder's linear layers in the compute dtype, which stand for the model's own inside ``used``:
    autocast would cast them again in each decode step. Without autocast, or with weights that are gathered per layer,
    there are none.

    Args:
        policy: its present weights are copied.
    """

    @torch.no_grad()
    def __init__(self, policy: Policy) -> None:
        compute = policy.precision.compute
        casts = compute.itemsize < policy.precision.master.itemsize and not is_gathered(policy.model)
        linears = [module for module in base_of(policy.model).get_decoder().modules() if type(module) is nn.Linear]
        self._casts: list[tuple[dict[str, Any], Tensor, Tensor]] = [
            (linear._parameters, linear.weight, linear.weight.to(compute))
            for linear in linears
            if casts and linear.weight.dtype != compute
        ]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the copies inside the block, which needs no gradients. The modules hold them in place of their weights,
        which stay as they are: a policy may share them with its snapshot, and may be saved while that samples."""
        try:
            for parameters, _, copy in self._casts:
                parameters["weight"] = copy
            yield
        finally:
            for parameters, weight, _ in self._casts:
                parameters["weight"] = weight


class SharedBackend(Backend):
    """See the module.

    Args:
        policy: its model is used.

    Raises:
        UnsupportedModel: the trainer cannot run it packed either, or its layers differ in the shapes of their keys.
    """

    refills = True
    mixed_lengths = True
    keeps_rows = True
    token_multiple = TOKEN_MULTIPLE

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        head = find_head(policy)
        need(head is not None, "its head is not a plain linear layer after a decoder")
        assert head is not None
        self._head = head
        self._body = CustomAttention(policy)
        self._native = not policy.why_no_kernels()
        self._cache: GroupCache | None = None
        self._states: RowStates | None = None
        self._weights: CastWeights | None = None
        self._head_weight: Tensor | None = None
        probe = Probe(Layout([2], policy.device), self._native, read={})
        self._run([[0, 0]], probe)
        shapes = set(probe.shapes.values())
        need(len(shapes) <= 1, "its layers differ in the shapes of their keys and values")
        self._group, self._heads, *self._widths = shapes.pop() if shapes else (1, 1, 1, 1)
        self._width = max(self._widths)  # as which both keys and values are stored
        self._layers = {layer: number for number, layer in enumerate(probe.shapes)}
        states = states_in(probe.found)
        self._state_bytes = sum(state.nbytes for state in states.values())
        self.description = "prompts once per group, rows refilled, transformers' modules" + (
            ", states of recurrent layers copied for each row" if states else ""
        )

    @property
    def token_bytes(self) -> int:
        """See ``Backend``."""
        return len(self._layers) * 2 * self._heads * self._width * self.policy.precision.compute.itemsize

    @property
    def row_bytes(self) -> int:
        """See ``Backend``."""
        return self._state_bytes

    @property
    def cache(self) -> GroupCache:
        """Keys and values, between ``begin`` and ``end``."""
        assert self._cache is not None
        return self._cache

    @property
    def states(self) -> RowStates:
        """States of recurrent layers, between ``begin`` and ``end``."""
        assert self._states is not None
        return self._states

    def begin(self, capacity: Capacity) -> None:
        """See ``Backend``."""
        sizes = {"layers": len(self._layers), "heads": self._heads, "width": self._width, "group": self._group}
        dtype = self.policy.precision.compute
        if kind_of(self.policy.device) == "cpu":  # its products of few rows are no slower in float32 than in bfloat16
            dtype = self.policy.precision.master
        self._cache = GroupCache(capacity, **sizes, dtype=dtype, device=self.policy.device)
        self._states = RowStates(capacity.rows)
        self._weights = CastWeights(self.policy)
        self._head_weight = self._head.cast_weight()

    def end(self) -> None:
        """See ``Backend``."""
        self._cache = self._states = self._weights = self._head_weight = None

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``. Prompts are laid end to end, without padding between them."""
        return torch.cat([self._prefill(prompts[part]) for part in texts_together(prompts)])

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        lengths = [len(prompt) for prompt in prompts]
        found: KeysValues = {}
        logits = self._run(prompts, PackedPass(Layout(lengths, self.policy.device), self._native, read=found))
        first = self.cache.add_prompts(lengths)
        for layer, number in self._layers.items():
            k, v = (part.split(lengths, 1) for part in widened(self._width, *found[layer]))
            for prompt in range(len(prompts)):
                self.cache.write_prompt(number, first + prompt, k[prompt].transpose(0, 1), v[prompt].transpose(0, 1))
        self.states.add_prompts(found, len(prompts))
        return logits

    def _run(self, texts: Sequence[Sequence[int]], packed: PackedPass) -> Tensor:
        """The logits after each text."""
        ids_T = in_like_shapes(torch.tensor([token for text in texts for token in text], device=self.policy.device))
        packed.drawn_N = torch.tensor([len(text) for text in texts], device=self.policy.device).cumsum(0) - 1
        with torch.no_grad(), self._cast():
            hidden = self._body(ids_T, in_like_shapes(packed.layout.positions_T), packed)
            return self._head.logits(hidden.states, self._head_weight)

    def _cast(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._weights is None else self._weights.used()

    @torch.no_grad()
    def step(self, tokens_S: Tensor) -> Tensor:
        """See ``Backend``."""
        layout = self.cache.next_layout()
        step = Step(self.cache, self.states, layout, self._layers, native=self._native)
        ids_T = functional.pad(tokens_S, (0, layout.padding))
        with self._cast():
            hidden = self._body(ids_T, layout.positions, step)
            return self._head.logits(hidden.states, self._head_weight, multiple=ROW_MULTIPLE)

    @torch.no_grad()
    def extend(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``."""
        return torch.cat([self._extend(rows[part], texts[part]) for part in texts_together(texts)])

    def _extend(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        lengths, before = [len(text) for text in texts], [self.cache.position(row) for row in rows]
        found: KeysValues = {}
        prefixes: KeysValues = dict(self.states.of_rows(rows))
        for layer, number in self._layers.items():
            parts = [self.cache.text(number, row) for row in rows]
            both = (torch.cat(part).transpose(0, 1) for part in zip(*parts, strict=True))
            prefixes[layer] = tuple(part[..., :width] for part, width in zip(both, self._widths, strict=True))
        layout = Layout(lengths, self.policy.device, range(len(rows)), before)
        logits = self._run(texts, PackedPass(layout, self._native, read=found, prefixes=prefixes))
        for layer, number in self._layers.items():
            k, v = (part.split(lengths, 1) for part in widened(self._width, *found[layer]))
            for index, row in enumerate(rows):
                self.cache.append(number, row, k[index].transpose(0, 1), v[index].transpose(0, 1))
        self.cache.grow(rows, lengths)
        self.states.write(rows, found)
        return logits

    def add_rows(self, prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self.cache.add_rows(prompts)
        self.states.add_rows(prompts)

    def remove_rows(self, rows: Sequence[int]) -> None:
        """See ``Backend``."""
        self.cache.remove_rows(rows)
        self.states.remove_rows(rows)

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self.cache.remove_prompts(prompts)
        self.states.remove_prompts(prompts)

    def park(self, row: int) -> int:
        """See ``Backend``."""
        handle = self.cache.park(row)
        self.states.park(row, handle)
        return handle

    def resume(self, handles: Sequence[int]) -> None:
        """See ``Backend``."""
        self.cache.resume(handles)
        self.states.resume(handles)

    def release(self, handle: int) -> None:
        """See ``Backend``."""
        self.cache.release(handle)
        self.states.release(handle)


class Probe(PackedPass):
    """A pass that finds out what a model's layers keep."""

    def __init__(self, *arguments: Any, read: KeysValues) -> None:
        super().__init__(*arguments, read=read)
        self.found = read
        self.shapes: dict[int, tuple[int, ...]] = {}
        """By layer: query heads per key-value head, key-value heads, width of keys and of values."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> Tensor:
        """See ``PackedPass``."""
        need(layer not in self.shapes, "one of its attention layers is used more than once")
        self.shapes[layer] = (len(q) // len(k), len(k), k.shape[-1], v.shape[-1])
        return super().attend(layer, q, k, v, *others, **named)


class Step:
    """What mixes the tokens of a decode step, one of each row; a ``Mixing``.

    Args:
        cache, states: of the rows; both are written.
        layout: the step's.
        layers: the number of each attention layer in the cache.
        native: whether to use native kernels.
    """

    routes_T: Tensor | None = None

    def __init__(
        self,
        cache: GroupCache,
        states: RowStates,
        layout: storage.Layout,
        layers: dict[int, int],
        *,
        native: bool,
    ) -> None:
        self.tokens = layout.count
        self._recurring = StateStep(states, layout.count, native=native)
        self._cache, self._layout, self._layers = cache, layout, layers

    def select(self, found: Hidden) -> Hidden:
        """See ``Mixing``."""
        return found.select(slice(self.tokens))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
        drawn_N: Tensor | None = None,  # noqa: ARG002
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``Mixing``."""
        parts = (part[:, : self.tokens].transpose(0, 1) for part in (q, k, v))
        q_SAD, k_SAD, v_SAD = widened(self._cache.width, *parts)
        number = self._layers[layer]
        with torch.autocast(q.device.type, enabled=False):
            self._cache.write_rows(number, self._layout, k_SAD, v_SAD)
            out = attend_in_two_parts(q_SAD, self._cache, number, self._layout, scaling, window, cap, sinks)
        out = out[..., : v.shape[-1]].transpose(0, 1)
        return functional.pad(out, (0, 0, 0, self._layout.padding)).to(v.dtype)

    def convolve(
        self, key: StateKey, x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, **flags: bool
    ) -> Tensor:
        """See ``Recurring``."""
        return self._recurring.convolve(key, x_TH, weight, bias, **flags)

    def recur(self, key: StateKey, recurrence: Recurrence, values: Sequence[Tensor], zeros: Tensor) -> Tensor:
        """See ``Recurring``."""
        return self._recurring.recur(key, recurrence, values, zeros)
