"""A decode step whose operations between matrix products run in the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from itertools import count

import torch
from torch import Tensor
from torch.nn import functional

from cohort.native import threads_for
from cohort.native.decode import Gated, Kernels, LayerCall, Residual
from cohort.policy.anatomy import Layer
from cohort.policy.fused import gated, split_gate
from cohort.policy.lean import LeanLayers
from cohort.policy.parts import Experts, Norm
from cohort.policy.recurrent import Recurring
from cohort.rollout.local.cache import PREFILL_MULTIPLE, ROW_MULTIPLE
from cohort.rollout.local.native_slots import SlotCache
from cohort.rollout.local.weights import DecoderWeights


class Decoder:
    """Exists from ``begin`` to ``end``, while weights and memory do not move.

    Args:
        kernels: the library.
        weights: the model's products, in float32 or bfloat16.
        cache: of the same dtype.
        lean: the layers of other passes.
        longest: how many positions there may be.
    """

    def __init__(
        self,
        kernels: Kernels,
        weights: DecoderWeights,
        cache: SlotCache,
        lean: LeanLayers,
        longest: int,
    ) -> None:
        self._lean, self._fused = lean, lean.fused
        self._kernels, self._weights, self._cache = kernels, weights, cache
        self._anatomy = anatomy = weights.anatomy
        self._half = weights.dtype == torch.bfloat16
        self._referenced: list[Tensor] = []  # the structures point to them
        positions, wide = torch.arange(longest), torch.empty(0, dtype=torch.float32)
        ropes = {kind: anatomy.angles(kind, positions, wide) for kind in anatomy.rotations}
        tables = {kind: (self._at(cos), self._at(sin), cos.shape[1]) for kind, (cos, sin) in ropes.items()}
        numbers = count()
        self._calls = [
            None if layer.mixer is not None else self._layer(next(numbers), layer, tables) for layer in anatomy.layers
        ]
        self._first = self._residual(None, anatomy.layers[0].before_attention)
        self._middle = [self._residual(layer.after_attention, layer.before_mlp) for layer in anatomy.layers]
        following = [*(layer.before_attention for layer in anatomy.layers[1:]), anatomy.norm]
        pairs = zip(anatomy.layers, following, strict=True)
        self._last = [self._residual(layer.after_mlp, norm) for layer, norm in pairs]
        self._gated = Gated(half=self._half, gelu=anatomy.gelu)

    def step(self, slots: Sequence[int], tokens_S: Tensor, recurring: Recurring) -> Tensor:
        """Read one token for each of these rows; the input of the head, ``[S padded, H]``. ``recurring`` mixes
        recurrent layers."""
        return self._run(self._cache.next_step(slots), tokens_S, ROW_MULTIPLE, recurring)

    def read(self, slots: Sequence[int], texts: Sequence[Sequence[int]], recurring: Recurring) -> Tensor:
        """Read further tokens of some rows; the input of the head after each text, ``[S padded, H]``."""
        lengths = [len(text) for text in texts]
        whole, last = self._cache.next_texts(slots, lengths)
        tokens_T = torch.tensor([token for text in texts for token in text])
        return self._run(whole, tokens_T, PREFILL_MULTIPLE, recurring, last, torch.tensor(lengths).cumsum(0) - 1)

    def _run(
        self,
        step: Structure,
        tokens_T: Tensor,
        multiple: int,
        recurring: Recurring,
        last_step: Structure | None = None,
        last_S: Tensor | None = None,
    ) -> Tensor:
        """The layers over tokens, padded to a multiple; those of the last layer over some of the tokens."""
        anatomy, last_layer = self._anatomy, len(self._calls) - 1
        for one in (step, last_step or step):
            one.scaling, one.cap = anatomy.scaling, anatomy.score_cap or 0
        x = self._lean.embed(functional.pad(tokens_T, (0, -len(tokens_T) % multiple))).contiguous()
        # Rows are padded for the products; attention does not write the padding, which must not hold NaN.
        attended = x.new_zeros(len(x), anatomy.num_heads * anatomy.head_dim, dtype=self._weights.dtype)
        normed = torch.empty_like(x, dtype=self._weights.dtype)
        self._add_norm(self._first, x, None, normed)
        layers = zip(self._middle, self._last, anatomy.layers, strict=True)
        for number, (middle, last, layer) in enumerate(layers):
            ending = last_step if number == last_layer else None
            mixed = self._mixed(ending or step, number, normed, attended, recurring)
            if ending is not None and last_S is not None:
                padded_S = functional.pad(last_S, (0, -len(last_S) % ROW_MULTIPLE))
                x, mixed, normed = x[padded_S], mixed[padded_S], normed[padded_S]
            update = layer.output(mixed)
            if layer.parallel:
                self._add_norm(last, x, update.add_(self._mlp(number, normed)), normed)
            else:
                self._add_norm(middle, x, update, normed)
                self._add_norm(last, x, self._mlp(number, normed), normed)
        return normed

    def _mixed(self, step: Structure, number: int, normed: Tensor, attended: Tensor, recurring: Recurring) -> Tensor:
        """What a layer projects to its first update. ``attended`` is memory for the output of attention."""
        layer, call = self._anatomy.layers[number], self._calls[number]
        parts, gate = layer.qkv(normed), None
        if layer.mixer is not None:
            return layer.mixer(parts, recurring, self._fused)
        q, k, v = parts
        assert call is not None
        if layer.norms_whole(self._anatomy.head_dim):
            q, k = (self._lean.norm(part, norm) for part, norm in zip((q, k), layer.qk_norms or (), strict=True))
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), attended.data_ptr()
        call.q_stride, call.k_stride, call.v_stride = q.stride(0), k.stride(0), v.stride(0)
        self._kernels.attend(step, call)
        if layer.gated:
            _, gate = split_gate(q, self._anatomy.head_dim)
        return gated(attended, gate)

    def _add_norm(self, call: Structure, x: Tensor, update: Tensor | None, out: Tensor) -> None:
        call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), len(x)
        call.update = None if update is None else update.data_ptr()
        call.threads = threads_for(x.numel())
        self._kernels.add_norm(call)

    def _mlp(self, number: int, normed: Tensor) -> Tensor:
        mlp = self._anatomy.layers[number].mlp
        if isinstance(mlp, Experts):
            return mlp(normed).to(normed.dtype).contiguous()
        gate, up = mlp.gate_up(normed)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        call = self._gated
        call.gate, call.up, call.out = gate.data_ptr(), up.data_ptr(), out.data_ptr()
        call.gate_stride, call.up_stride = gate.stride(0), up.stride(0)
        call.rows, call.width = out.shape
        call.threads = threads_for(out.numel())
        self._kernels.activate(call)
        return mlp.down(out)

    def _layer(self, number: int, layer: Layer, tables: dict[str, tuple[int, int, int]]) -> Structure:
        anatomy, (own_k, own_v) = self._anatomy, self._cache.own[:, number]
        prompt_k, prompt_v = self._cache.prompts[:, number]
        cos, sin, rotated = (None, None, 0) if layer.rope is None else tables[layer.rope]
        call = LayerCall(
            q_step=anatomy.head_dim * (2 if layer.gated else 1),
            out_stride=anatomy.num_heads * anatomy.head_dim,
            cos=cos,
            sin=sin,
            rotated=rotated,
            neighbours=anatomy.neighbours,
            norm_last=layer.normed_after_rotation,
            own_k=own_k.data_ptr(),
            own_v=own_v.data_ptr(),
            prompt_k=prompt_k.data_ptr(),
            prompt_v=prompt_v.data_ptr(),
            window=layer.window or 0,
        )
        if layer.sinks is not None:
            call.sinks = self._at(layer.sinks.detach())
        if layer.qk_norms is not None and not layer.norms_whole(anatomy.head_dim):
            of_q, of_k = layer.qk_norms
            call.q_norm, call.k_norm = self._factor(of_q), self._factor(of_k)
            call.q_eps, call.k_eps = of_q.eps, of_k.eps
        return call

    def _residual(self, after: Norm | None, norm: Norm | None) -> Structure:
        anatomy = self._anatomy
        call = Residual(width=len(anatomy.norm.weight), half=self._half, multiplier=anatomy.residual_multiplier)
        if norm is not None:
            call.factor, call.eps, call.centred = self._factor(norm), norm.eps, norm.centred
        if after is not None:
            call.after, call.after_eps = self._factor(after), after.eps
        return call

    def _factor(self, norm: Norm) -> int:
        return self._at(norm.factor(torch.float32))

    def _at(self, values: Tensor) -> int:
        self._referenced.append(values.float().contiguous())
        return self._referenced[-1].data_ptr()
