"""The lean path: the forward pass of a Llama-like model for sampling, over the trainer's own weights.

Each prompt is read once; its keys and values are stored once for its group. A decode step computes attention scores in
two parts, takes one softmax over both, and adds the two parts of the output:

    own part      each row over its own tokens                         [rows x KV heads] products
    prompt part   the rows of a group together over their prompt       [prompts x KV heads] products

Shapes are padded (rows to 8, tokens to 32): on a CPU a row's numbers do not depend on the others (docs/rollout.md).

Axis letters: S rows, P prompts, A query heads, K key-value heads, D head dimension, T tokens of a row, X tokens of a
prompt, M largest number of rows of one prompt, L tokens of a text that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional

from cohort.errors import ModelError
from cohort.policy import Policy
from cohort.policy.anatomy import Anatomy, Layer, soft_cap
from cohort.policy.device import kind_of
from cohort.policy.experts import used
from cohort.policy.fused import Fused, gated, rotated, split_gate
from cohort.policy.layout import Layout
from cohort.policy.parts import Experts, Norm, UnsupportedModel
from cohort.policy.passes import KeysValues, PackedPass
from cohort.policy.recurrent import Recurring
from cohort.rollout.backend import Backend, texts_together
from cohort.rollout.cache import PREFILL_MULTIPLE, TOKEN_MULTIPLE, GroupCache, padded_rows
from cohort.rollout.capacity import Capacity
from cohort.rollout.group_attention import attend_causally, attend_in_two_parts
from cohort.rollout.native import Decoder, Kernels, SlotCache
from cohort.rollout.states import RowStates, StateStep
from cohort.rollout.weights import DecoderWeights, LayerWeights

Store = Callable[[int, int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Stores keys and values in a layer for a prompt or a row; returns those that its new tokens attend to."""


class LeanBackend(Backend):
    """See the module.

    Args:
        policy: its weights are read at each call of ``begin``.
        anatomy: where they are in the model.
        native_kernels: whether decode steps use the kernels of ``rollout.native`` if they are available.
    """

    refills = True
    mixed_lengths = True
    keeps_rows = True
    token_multiple = TOKEN_MULTIPLE

    def __init__(self, policy: Policy, anatomy: Anatomy, *, native_kernels: bool = True) -> None:
        self.policy = policy
        self.anatomy = anatomy
        compute, wide = policy.precision.compute, policy.precision.master
        self._wide = wide
        self._identity = anatomy.identity()
        without = policy.why_no_kernels() if native_kernels else "switched off"
        self._kernels = None if without else Kernels()
        self.grows = self._kernels is None
        self.weights = DecoderWeights(anatomy, compute, native=self.is_native)
        # On a CPU, torch's batched products of few rows are no slower in float32 than in bfloat16.
        self._cache_dtype = wide if kind_of(policy.device) == "cpu" and self._kernels is None else compute
        self._activation: Callable[[Tensor], Tensor] = functional.silu
        if anatomy.gelu:
            self._activation = partial(functional.gelu, approximate="tanh")
        self._cache: GroupCache | SlotCache | None = None
        self._decoder: Decoder | None = None
        self._ropes: dict[str, tuple[Tensor, Tensor]] = {}
        self.states = RowStates(0)
        """Of recurrent layers."""
        self._fused = Fused(self._kernels is not None, wide, compute)
        name = str(self._cache_dtype).removeprefix("torch.")
        self.description = f"lean ({policy.model.config.get_text_config().model_type}), keys and values in {name}"
        if kind_of(policy.device) == "cpu":
            self.description += ", native kernels" if self._kernels else f", no native kernels: {without}"

    @property
    def is_native(self) -> bool:
        """Whether decode steps use the native kernels."""
        return self._kernels is not None

    @property
    def token_bytes(self) -> int:
        """See ``Backend``."""
        a = self.anatomy
        return len(a.attention_layers) * 2 * a.num_key_value_heads * a.head_dim * self._cache_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """See ``Backend``."""
        return sum(mixer.state_numbers for mixer in self.anatomy.mixers) * self._wide.itemsize

    @property
    def cache(self) -> GroupCache | SlotCache:
        """Keys and values, between ``begin`` and ``end``."""
        assert self._cache is not None
        return self._cache

    @torch.inference_mode()
    def begin(self, capacity: Capacity) -> None:
        """See ``Backend``."""
        self._read_model()
        self.weights.refresh(self.policy.version)
        longest = capacity.prompt_length + capacity.completion_length
        with self.policy.compute():  # so that float64 tables are float64 throughout
            self._ropes = self.anatomy.rope_tables(longest, self._wide)
        sizes = {
            "layers": len(self.anatomy.attention_layers),
            "heads": self.anatomy.num_key_value_heads,
            "width": self.anatomy.head_dim,
            "group": self.anatomy.num_heads // self.anatomy.num_key_value_heads,
        }
        self.states = RowStates(capacity.rows)
        if self._kernels is None:
            self._cache = GroupCache(capacity, **sizes, dtype=self._cache_dtype, device=self.policy.device)
        else:
            self._cache = SlotCache(capacity, **sizes, dtype=self._cache_dtype, lanes=self._kernels.lanes)
            self._decoder = Decoder(self._kernels, self.weights, self._cache, self._ropes, self._experts, self._fused)

    def _read_model(self) -> None:
        """Find the parameters again: they may have been replaced, and adapters switched."""
        try:
            anatomy = Anatomy.of(self.policy.model)
        except UnsupportedModel as unknown:
            raise ModelError(
                f"the model was changed after the engine was made, which needs a new one: {unknown}"
            ) from None
        if (identity := anatomy.identity()) != self._identity:
            self.anatomy, self._identity = anatomy, identity
            self.weights = DecoderWeights(anatomy, self.weights.dtype, native=self.is_native)

    def end(self) -> None:
        """See ``Backend``."""
        self._cache = self._decoder = None
        self.states = RowStates(0)

    def sleep(self) -> None:
        """See ``Backend``. Frees the copies of weights in compute precision."""
        self.weights = DecoderWeights(self.anatomy, self.weights.dtype, native=self.is_native)

    @torch.inference_mode()
    def add_rows(self, prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self.cache.add_rows(prompts)
        self.states.add_rows(prompts)

    @torch.inference_mode()
    def remove_rows(self, rows: Sequence[int]) -> None:
        """See ``Backend``."""
        self.cache.remove_rows(rows)
        self.states.remove_rows(rows)

    @torch.inference_mode()
    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self.cache.remove_prompts(prompts)
        self.states.remove_prompts(prompts)

    @torch.inference_mode()
    def park(self, row: int) -> int:
        """See ``Backend``."""
        handle = self.cache.park(row)
        self.states.park(row, handle)
        return handle

    @torch.inference_mode()
    def resume(self, handles: Sequence[int]) -> None:
        """See ``Backend``."""
        self.cache.resume(handles)
        self.states.resume(handles)

    def release(self, handle: int) -> None:
        """See ``Backend``."""
        self.cache.release(handle)
        self.states.release(handle)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``. Prompts are laid end to end, without padding between them."""
        first = self.cache.add_prompts([len(prompt) for prompt in prompts])
        indices = range(first, first + len(prompts))
        logits = []
        for part in texts_together(prompts):
            found: KeysValues = {}
            packed = self._packed(prompts[part], found)
            logits.append(
                self._read(prompts[part], [0] * len(prompts[part]), indices[part], self._store_prompt, packed)
            )
            self.states.add_prompts(found, len(prompts[part]))
        return torch.cat(logits)

    def _packed(
        self, texts: Sequence[Sequence[int]], found: KeysValues, rows: Sequence[int] | None = None
    ) -> PackedPass:
        """What mixes the tokens of recurrent layers in a pass over texts, of which those of rows continue their states;
        the new ones are stored in ``found``."""
        lengths, device, native = list(map(len, texts)), self.policy.device, self._kernels is not None
        if rows is None:
            return PackedPass(Layout(lengths, device), native, read=found)
        layout = Layout(lengths, device, range(len(rows)), [1] * len(rows))
        return PackedPass(layout, native, read=found, prefixes=dict(self.states.of_rows(rows)))

    @torch.inference_mode()
    def extend(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``."""
        logits = []
        for part in texts_together(texts):
            found: KeysValues = {}
            own_rows, own_texts = rows[part], texts[part]
            packed = self._packed(own_texts, found, own_rows)
            if self._decoder is not None:
                logits.append(self._logits(self._decoder.read(own_rows, own_texts, packed))[: len(own_rows)])
            else:
                assert isinstance(self._cache, GroupCache)
                starts = [self._cache.position(row) for row in own_rows]
                logits.append(self._read(own_texts, starts, own_rows, self._cache.append, packed))
                self._cache.grow(own_rows, list(map(len, own_texts)))
            self.states.write(own_rows, found)
        return torch.cat(logits)

    def _store_prompt(self, layer: int, prompt: int, k_XKD: Tensor, v_XKD: Tensor) -> tuple[Tensor, Tensor]:
        self.cache.write_prompt(layer, prompt, k_XKD, v_XKD)
        return k_XKD, v_XKD

    def _read(
        self,
        texts: Sequence[Sequence[int]],
        starts: Sequence[int],
        indices: Sequence[int],
        store: Store,
        recurring: Recurring,
    ) -> Tensor:
        """The logits after each text.

        Args:
            texts: token ids.
            starts: position of the first token of each text.
            indices: the prompt or row that each text belongs to.
            store: stores keys and values; returns those that the text attends to, its own last.
            recurring: mixes the tokens of recurrent layers.
        """
        lengths = [len(text) for text in texts]
        flat = [token for text in texts for token in text]
        positions = [start + n for start, length in zip(starts, lengths, strict=True) for n in range(length)]
        filler = [0] * (-len(flat) % PREFILL_MULTIPLE)
        device = self.policy.device
        x = self.anatomy.embed(torch.tensor(flat + filler, device=device)).to(self._wide)
        rotations = self._rotations(torch.tensor(positions + filler, device=device))

        def attend(number: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attended, start = torch.zeros_like(q), 0
            for index, length in zip(indices, lengths, strict=True):
                span = slice(start, start + length)
                start += length
                seen_k, seen_v = store(number, index, k[span], v[span])
                settings = self.anatomy.scaling, layer.window, self.anatomy.score_cap, layer.sinks, self.is_native
                attended[span] = attend_causally(q[span], seen_k, seen_v, self._cache_dtype, *settings)
            return attended

        x = self._layers(x, rotations, recurring, attend)
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        x = functional.pad(x[last], (0, 0, 0, padded_rows(len(lengths)) - len(lengths)))
        return self._logits(self._norm(x, self.anatomy.norm))[: len(lengths)]

    @torch.inference_mode()
    def step(self, tokens_S: Tensor) -> Tensor:
        """See ``Backend``."""
        cache, rows = self._cache, len(tokens_S)
        recurring = StateStep(self.states, rows, native=self._kernels is not None)
        if self._decoder is not None:
            return self._logits(self._decoder.step(tokens_S, recurring))[:rows]
        assert isinstance(cache, GroupCache)
        layout = cache.next_layout()
        x = self.anatomy.embed(functional.pad(tokens_S, (0, layout.padding))).to(self._wide)
        rotations = self._rotations(layout.positions)

        def attend(number: int, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write_rows(number, layout, k[:rows], v[:rows])
            settings = self.anatomy.scaling, layer.window, self.anatomy.score_cap, layer.sinks
            attended = attend_in_two_parts(q[:rows], cache, number, layout, *settings).flatten(1)
            return functional.pad(attended, (0, 0, 0, layout.padding))

        x = self._layers(x, rotations, recurring, attend)
        return self._logits(self._norm(x, self.anatomy.norm))[:rows]

    def _layers(
        self,
        x: Tensor,
        rotations: dict[str, tuple[Tensor, Tensor]],
        recurring: Recurring,
        attend: Callable[[int, Layer, Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """The residual stream after all layers. ``attend`` is given the number of a layer of the cache, the layer, and
        queries, keys and values."""
        numbers = count()
        for layer, weights in zip(self.anatomy.layers, self.weights.layers, strict=True):
            normed = self._norm(x, layer.before_attention)
            if layer.mixer is not None:
                mixed = layer.mixer(weights.qkv.parts(normed), recurring, self._fused)
            else:
                (q, k, v), gate = self._queries_keys_values(normed, layer, weights, rotations)
                mixed = gated(attend(next(numbers), layer, q, k, v), gate)
            x = self._after_attention(x, normed, mixed, layer, weights)
        return x

    def _queries_keys_values(
        self, normed: Tensor, layer: Layer, weights: LayerWeights, rotations: dict[str, tuple[Tensor, Tensor]]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Normed and rotated; ``[N, heads, D]`` each. And the gate of the output, ``[N, heads, D]``."""
        anatomy = self.anatomy
        heads, kv_heads = anatomy.num_heads, anatomy.num_key_value_heads

        def norms(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            pairs = zip((q, k), layer.qk_norms or (), strict=True)
            return [self._norm(part.to(self._wide), norm) for part, norm in pairs]

        q, k, v = weights.qkv.parts(normed)
        q, gate = split_gate(q, anatomy.head_dim) if layer.gated else (q, None)
        if whole := layer.norms_whole(anatomy.head_dim):
            q, k = norms(q, k)
        q, k, v = (part.unflatten(-1, (-1, anatomy.head_dim)) for part in (q, k, v))
        by_head = layer.qk_norms is not None and not whole
        if by_head and not layer.normed_after_rotation:
            q, k = norms(q, k)
        if layer.rope is not None:
            both = torch.cat([q, k], dim=1).to(self._wide)
            q, k = self._rotate(both, *rotations[layer.rope]).split([heads, kv_heads], dim=1)
        if by_head and layer.normed_after_rotation:
            q, k = norms(q, k)
        return (q, k, v), gate

    def _rotations(self, positions_N: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            kind: (cos[positions_N][:, None], sin[positions_N][:, None]) for kind, (cos, sin) in self._ropes.items()
        }

    def _rotate(self, x_NHD: Tensor, cos_N1R: Tensor, sin_N1R: Tensor) -> Tensor:
        if self.anatomy.neighbours or cos_N1R.shape[-1] < x_NHD.shape[-1]:
            return rotated(x_NHD, cos_N1R, sin_N1R, neighbours=self.anatomy.neighbours)
        return _rotate(x_NHD, cos_N1R, sin_N1R)

    def _after_attention(
        self, x: Tensor, normed: Tensor, attended: Tensor, layer: Layer, weights: LayerWeights
    ) -> Tensor:
        """The rest of a layer: the attention's output added, and the MLP."""
        x = x + self._scaled(weights.output(attended.reshape(len(x), -1)), layer.after_attention)
        if not layer.parallel:
            normed = self._norm(x, layer.before_mlp)
        if weights.gate_up is None or weights.down is None:
            update = self._experts(layer, weights, normed)
        else:
            gate, up = weights.gate_up.parts(normed)
            update = weights.down(self._activation(gate).mul_(up))
        return x.add_(self._scaled(update, layer.after_mlp))

    def _experts(self, layer: Layer, weights: LayerWeights, normed: Tensor) -> Tensor:
        """The output of a layer's experts, in the compute dtype."""
        assert isinstance(layer.mlp, Experts)
        with self.policy.compute(), used(weights.experts):
            return layer.mlp(normed.to(self.weights.dtype)).to(self.weights.dtype)

    def _scaled(self, update: Tensor, norm: Norm | None) -> Tensor:
        """An update as it is added to the residual stream."""
        if norm is not None:
            update = self._norm(update.to(self._wide), norm)
        return update if self.anatomy.residual_multiplier == 1 else update.mul_(self.anatomy.residual_multiplier)

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else norm.of_rows(x, self.weights.factor(norm))

    def _logits(self, normed_SH: Tensor) -> Tensor:
        """Logits in float32, or in float64 for a float64 policy."""
        logits_SV = self.weights.head(normed_SH).to(self._wide)
        if self.anatomy.logit_multiplier != 1:
            logits_SV = logits_SV * self.anatomy.logit_multiplier
        return soft_cap(logits_SV, self.anatomy.logit_cap)


def _rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotary embedding: ``[x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]`` with the halves x1 and x2 of a head."""
    half = x_NHD.shape[-1] // 2
    out = x_NHD * cos_N1D
    out[..., :half].addcmul_(x_NHD[..., half:], sin_N1D[..., :half], value=-1)
    out[..., half:].addcmul_(x_NHD[..., :half], sin_N1D[..., half:])
    return out
