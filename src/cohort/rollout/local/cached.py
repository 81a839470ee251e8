"""Sampling through the layers that the update runs, with what they keep of a prompt stored once per group.

A prompt is read once. Its keys and values stay where they are, and its rows attend to them; the states of its recurrent
layers are copied for each row, which then changes them in place. The layers are the update's (``policy.lean``, or the
model's own modules in ``policy.custom_attention``); how their tokens see each other is in ``mixing.py``. Decode steps
of lean layers run in native kernels where these are available.

Shapes are padded (rows to a multiple of 8 and at least 16, tokens to 32): on a CPU a row's numbers do not depend on the
others (docs/rollout.md).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cohort.errors import ModelError
from cohort.native import Kernels
from cohort.parallel.full import is_gathered
from cohort.policy import Policy
from cohort.policy.anatomy import Anatomy, soft_cap
from cohort.policy.choose import find_head
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.device import kind_of
from cohort.policy.head import in_like_shapes
from cohort.policy.layout import Layout
from cohort.policy.lean import LeanLayers
from cohort.policy.parts import UnsupportedModel, need
from cohort.policy.passes import KeysValues, Mixing, PackedPass, base_of
from cohort.rollout.local.backend import Backend, texts_together
from cohort.rollout.local.cache import ROW_MULTIPLE, Fixed, GroupCache, Heads, Rows, RowStates, padded_rows, states_in
from cohort.rollout.local.capacity import TOKEN_MULTIPLE, Capacity
from cohort.rollout.local.mixing import Reading, StateStep, Step
from cohort.rollout.local.native_decoder import Decoder
from cohort.rollout.local.native_slots import SlotCache
from cohort.rollout.local.weights import DecoderWeights


def without_gradients(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method of a backend without gradients. Lean layers run in inference mode. Modules of transformers do not:
    they may keep a tensor, and an update cannot use one that was made in that mode."""

    @functools.wraps(method)
    def run(self: CachedBackend, *given: Any) -> Any:
        with torch.inference_mode() if isinstance(self.body, LeanBody) else torch.no_grad():
            return method(self, *given)

    return run


class LeanBody:
    """The layers of a Llama-like model (``policy.lean``) and its head, with weights prepared for many small passes.

    Args:
        policy: its weights are read at each call of ``begin``.
        native: whether native kernels are used if they are available.

    Raises:
        UnsupportedModel: ``Anatomy`` cannot read the model.
    """

    def __init__(self, policy: Policy, *, native: bool = True) -> None:
        self.policy = policy
        self.why_not_native = policy.why_no_kernels() if native else "switched off"
        self.native = not self.why_not_native
        self._read(Anatomy.of(policy.model))
        anatomy = self.anatomy
        group = anatomy.num_heads // anatomy.num_key_value_heads
        heads = Heads(group, anatomy.num_key_value_heads, anatomy.head_dim, anatomy.head_dim)
        self.layers = dict.fromkeys(anatomy.attention_layers, heads)
        self.state_numbers = sum(mixer.state_numbers for mixer in anatomy.mixers)
        self.description = f"lean ({policy.model.config.get_text_config().model_type})"

    def _read(self, anatomy: Anatomy) -> None:
        self.anatomy, self._identity = anatomy, anatomy.identity()
        self.weights = DecoderWeights(anatomy, self.policy.precision.compute, native=self.native)
        self.lean = LeanLayers(self.policy, anatomy=self.weights.anatomy, native=self.native)

    def begin(self) -> None:
        """Read the present weights. Parameters may have been replaced, and adapters switched."""
        try:
            anatomy = Anatomy.of(self.policy.model)
        except UnsupportedModel as unknown:
            raise ModelError(
                f"the model was changed after the engine was made, which needs a new one: {unknown}"
            ) from None
        if anatomy.identity() != self._identity:
            self._read(anatomy)
        self.weights.refresh(self.policy.version)

    def end(self) -> None:
        """Nothing is to be freed."""

    def sleep(self) -> None:
        """Free the copies of weights in compute precision."""
        self._read(self.anatomy)

    def hidden(self, ids_T: Tensor, positions_T: Tensor, mixing: Mixing) -> Tensor:
        """The last hidden states of the tokens that the pass selects, ``[S, H]``."""
        return self.lean(ids_T, positions_T, mixing).states

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """``[S, V]`` in float32 or wider."""
        logits_SV = self.weights.head(hidden_SH).to(self.lean.fused.wide)
        if self.anatomy.logit_multiplier != 1:
            logits_SV = logits_SV * self.anatomy.logit_multiplier
        return soft_cap(logits_SV, self.anatomy.logit_cap)


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


class ModuleBody:
    """The model's own modules (``policy.custom_attention``), used as a ``LeanBody`` is.

    Args:
        policy: its model is used.

    Raises:
        UnsupportedModel: the trainer cannot run it packed either.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        head = find_head(policy)
        need(head is not None, "its head is not a plain linear layer after a decoder")
        assert head is not None
        self._head = head
        self._modules = CustomAttention(policy)
        self.native = not policy.why_no_kernels()
        self._weights: CastWeights | None = None
        self._head_weight: Tensor | None = None
        probe = Probe(Layout([2], policy.device), self.native, read={})
        ids_T = in_like_shapes(torch.zeros(2, dtype=torch.int64, device=policy.device))
        with torch.no_grad():
            self.hidden(ids_T, in_like_shapes(probe.layout.positions_T), probe)
        self.layers = probe.layers
        states = states_in(probe.read or {})
        self.state_numbers = sum(state.numel() for state in states.values())
        self.description = "prompts once per group, rows refilled, transformers' modules" + (
            ", states of recurrent layers copied for each row" if states else ""
        )

    def begin(self) -> None:
        """See ``LeanBody``."""
        self._weights, self._head_weight = CastWeights(self.policy), self._head.cast_weight()

    def end(self) -> None:
        """See ``LeanBody``."""
        self._weights = self._head_weight = None

    def sleep(self) -> None:
        """See ``LeanBody``."""

    def hidden(self, ids_T: Tensor, positions_T: Tensor, mixing: Mixing) -> Tensor:
        """See ``LeanBody``."""
        with contextlib.nullcontext() if self._weights is None else self._weights.used():
            return self._modules(ids_T, positions_T, mixing).states

    def logits(self, hidden_SH: Tensor) -> Tensor:
        """See ``LeanBody``."""
        return self._head.logits(hidden_SH, self._head_weight, multiple=ROW_MULTIPLE)


class Probe(PackedPass):
    """A pass that finds out what a model's layers keep."""

    def __init__(self, *arguments: Any, read: KeysValues) -> None:
        super().__init__(*arguments, read=read)
        self.layers: dict[int, Heads] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *others: Any, **named: Any) -> Tensor:
        """See ``PackedPass``."""
        need(layer not in self.layers, "one of its attention layers is used more than once")
        self.layers[layer] = Heads(len(q) // len(k), len(k), k.shape[-1], v.shape[-1])
        return super().attend(layer, q, k, v, *others, **named)


@dataclass(frozen=True, slots=True)
class Order:
    """The rows of a step in the order that they are computed in."""

    given: list[int]
    """Their slots as they came."""
    slots: list[int]
    """In the order of the computation."""
    places: list[int]
    there: Tensor | None = None
    """From the given order to this one. None: they are the same."""
    back: Tensor | None = None

    @classmethod
    def of(cls, slots: Sequence[int], places: Sequence[int], device: torch.device) -> Order:
        """By rising places."""
        order = sorted(range(len(places)), key=places.__getitem__)
        if order == list(range(len(places))):
            return cls(list(slots), list(slots), list(places))
        there = torch.tensor(order, device=device)
        return cls(list(slots), [slots[n] for n in order], [places[n] for n in order], there, there.argsort())


class CachedBackend(Backend):
    """See the module.

    Args:
        body: the layers.
    """

    refills = True
    mixed_lengths = True
    keeps_rows = True
    token_multiple = TOKEN_MULTIPLE

    def __init__(self, body: LeanBody | ModuleBody) -> None:
        self.body, self.policy = body, body.policy
        self._kernels = Kernels() if isinstance(body, LeanBody) and body.native else None
        self.grows = self._kernels is None
        compute, on_cpu = self.policy.precision.compute, kind_of(self.policy.device) == "cpu"
        self._wide = torch.promote_types(self.policy.precision.master, torch.float32)
        # On a CPU, torch's batched products of few rows are no slower in float32 than in bfloat16.
        self.dtype = self._wide if on_cpu and self._kernels is None else compute
        """Of keys and values."""
        self._cache: GroupCache | SlotCache | None = None
        self._decoder: Decoder | None = None
        self._states: RowStates | None = None
        self._rows, self._kept, self._prompts = Rows(), Rows(), Rows()
        self._order: Order | None = None
        self.description = body.description
        if isinstance(body, LeanBody):
            self.description += f", keys and values in {str(self.dtype).removeprefix('torch.')}"
            if on_cpu:
                self.description += ", native kernels" if body.native else f", no native kernels: {body.why_not_native}"

    @property
    def token_bytes(self) -> int:
        """See ``Backend``."""
        return sum(heads.numbers for heads in self.body.layers.values()) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """See ``Backend``."""
        return self.body.state_numbers * self._wide.itemsize

    @property
    def cache(self) -> GroupCache | SlotCache:
        """Keys and values, between ``begin`` and ``end``."""
        assert self._cache is not None
        return self._cache

    @property
    def states(self) -> RowStates:
        """States of recurrent layers, between ``begin`` and ``end``."""
        assert self._states is not None
        return self._states

    @without_gradients
    def begin(self, capacity: Capacity) -> None:
        """See ``Backend``."""
        self.body.begin()
        self._states, self._rows, self._order = RowStates(capacity.rows), Rows(), None
        fixed = self._kernels is not None
        self._kept, self._prompts = (Fixed(), Fixed()) if fixed else (self._rows, Rows())
        if self._kernels is None or not isinstance(self.body, LeanBody):
            self._cache = GroupCache(capacity, self.body.layers, dtype=self.dtype, device=self.policy.device)
        else:
            self._cache = SlotCache(capacity, self.body.layers, dtype=self.dtype, lanes=self._kernels.lanes)
            longest = capacity.prompt_length + capacity.completion_length
            self._decoder = Decoder(self._kernels, self.body.weights, self._cache, self.body.lean, longest)

    def end(self) -> None:
        """See ``Backend``."""
        self._cache = self._decoder = self._states = None
        self.body.end()

    def sleep(self) -> None:
        """See ``Backend``."""
        self.body.sleep()

    @without_gradients
    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``. Prompts are laid end to end, without padding between them."""
        logits = []
        for part in texts_together(prompts):
            lengths, found = [len(prompt) for prompt in prompts[part]], KeysValues()
            reading = Reading(lengths, self.body.native, self.dtype, found, self.policy.device)
            logits.append(self._read(prompts[part], reading))
            self.cache.add_prompts(self._prompts.add(slots[part]), lengths, found)
            self.states.add_prompts(slots[part], found)
        return torch.cat(logits)

    @without_gradients
    def add_rows(self, slots: Sequence[int], prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        places = self._rows.add(slots)
        self.cache.add_rows(self._kept.places(slots), self._prompts.places(prompts))
        self.states.add_rows(places, prompts)
        self._order = None

    @without_gradients
    def release(self, slots: Sequence[int]) -> None:
        """See ``Backend``."""
        moves = self._rows.release(slots)
        self.states.move_rows(moves)
        self.cache.remove_rows(moves, len(self._rows))
        self._order = None

    @without_gradients
    def remove_prompts(self, slots: Sequence[int]) -> None:
        """See ``Backend``."""
        self.states.remove_prompts(slots)
        self.cache.remove_prompts(self._prompts.release(slots), len(self._prompts))

    @without_gradients
    def extend(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``."""
        return torch.cat([self._extend(slots[part], texts[part]) for part in texts_together(texts)])

    def _extend(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        lengths, found, cache = [len(text) for text in texts], KeysValues(), self.cache
        places, kept = self._rows.places(slots), self._kept.places(slots)
        reading = Reading(
            lengths,
            self.body.native,
            self.dtype,
            found,
            self.policy.device,
            before=[cache.position(row) for row in kept],
            states=self.states.of_rows(places),
            earlier=None if isinstance(cache, SlotCache) else lambda layer, text: cache.text(layer, places[text]),
        )
        if self._decoder is not None:
            with self.policy.compute():
                hidden_SH = self._decoder.read(slots, texts, reading)
            logits = self._logits(hidden_SH[: len(slots)])
        else:
            assert isinstance(cache, GroupCache)
            logits = self._read(texts, reading)
            cache.append(places, lengths, found)
        self.states.write(places, found)
        return logits

    def _read(self, texts: Sequence[Sequence[int]], reading: Reading) -> Tensor:
        """The logits after each text."""
        ids_T = in_like_shapes(torch.tensor([token for text in texts for token in text], device=self.policy.device))
        hidden_SH = self.body.hidden(ids_T, in_like_shapes(reading.layout.positions_T), reading)
        return self._logits(hidden_SH)

    def _ordered(self, slots: Sequence[int]) -> Order:
        """The rows of a step by their places, which only states and torch's cache care for."""
        if self._order is None or self._order.given != slots:
            places = self._rows.places(slots)
            unordered = self._decoder is not None and not self.body.state_numbers
            given = Order(list(slots), list(slots), places)
            self._order = given if unordered else Order.of(slots, places, self.policy.device)
        return self._order

    @without_gradients
    def step(self, slots: Sequence[int], tokens_S: Tensor) -> Tensor:
        """See ``Backend``."""
        order = self._ordered(slots)
        if order.there is not None:
            tokens_S = tokens_S.index_select(0, order.there)
        if self._decoder is not None:
            recurring = StateStep(self.states, order.places, self.policy.device, native=True)
            with self.policy.compute():
                hidden_SH = self._decoder.step(order.slots, tokens_S, recurring)
        else:
            assert isinstance(self.cache, GroupCache)
            step = self.cache.next_step(order.places)
            ids_T = functional.pad(tokens_S, (0, step.padding))
            hidden_SH = self.body.hidden(ids_T, step.positions, Step(step, self.states, native=self.body.native))
        if order.back is not None:
            hidden_SH = hidden_SH.index_select(0, order.back)
        return self._logits(hidden_SH[: len(slots)])

    def _logits(self, hidden_SH: Tensor) -> Tensor:
        """By a product of padded rows."""
        padding = padded_rows(len(hidden_SH)) - len(hidden_SH)
        return self.body.logits(functional.pad(hidden_SH, (0, 0, 0, padding)))[: len(hidden_SH)]
