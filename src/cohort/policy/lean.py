"""The layers of a Llama-like model, as the update and the sampler run them: the model's own modules or prepared copies
for the matrix products, fused operations between them. It runs the models that ``Anatomy`` can read and computes what
transformers' modules compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.parallel.full import call_gathered, is_gathered
from cohort.policy.anatomy import Anatomy, Layer
from cohort.policy.compute import ComputeModel
from cohort.policy.fused import Fused, gated, split_gate, try_compiled
from cohort.policy.head import gradient_of, in_like_shapes
from cohort.policy.narrow import takes_in_place
from cohort.policy.parts import Experts, Gated, Norm
from cohort.policy.passes import Hidden, Mixing
from cohort.policy.routing import replaying

Angles = dict[str, tuple[Tensor, Tensor]]
"""Cosines and sines of the tokens' positions, by kind of rotation."""


class LeanLayers:
    """See the module.

    Args:
        model: the model.
        compiled: whether torch compiles what lies between the products.
        anatomy: its layers, if others than its modules compute the products.
        native: whether native kernels may compute what lies between them.

    Raises:
        UnsupportedModel: ``Anatomy`` cannot read it.
        Exception: compiling does not work.
    """

    returns_keys = True

    def __init__(
        self, model: ComputeModel, *, compiled: bool = False, anatomy: Anatomy | None = None, native: bool = True
    ) -> None:
        self.model = model
        self.anatomy = Anatomy.of(model.model) if anatomy is None else anatomy
        wide = torch.promote_types(model.precision.master, torch.float32)
        self.fused = Fused(native and not model.why_no_kernels(), wide, model.precision.compute, compiled=compiled)
        if compiled:
            try_compiled(model.device, model.precision.compute)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, packed: Mixing) -> Hidden:
        """See ``Body``."""
        run = partial(self.run, range(len(self.anatomy.layers)), ids_T, positions_T, packed)
        found = Hidden(call_gathered(self.model.model, run))
        return packed.select(found) if packed.drawn_N is None else found.select(slice(len(packed.drawn_N)))

    def run(self, layers: range, given: Tensor, positions_T: Tensor, packed: Mixing) -> Tensor:
        """Neighbouring layers: from token ids, or from the residual stream before the first of them, to the residual
        stream; after the last layer of all, to hidden states."""
        with self.model.compute():
            x = given if layers.start else self.embed(given)
            angles = {kind: self.anatomy.angles(kind, positions_T, x[:0]) for kind in self.anatomy.rotations}
            update: Tensor | None = None
            for number in layers:
                run = partial(self._outputs, number, angles, packed)
                x, update, _ = call_gathered(self.anatomy.layers[number].module, run, x, update)
            norm = self.anatomy.norm if layers.stop == len(self.anatomy.layers) else None
            return self._add_norm(x, update, norm)[norm is not None]

    def _outputs(
        self, number: int, angles: Angles, packed: Mixing, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...] | None]:
        """The result of ``_layer``, and the keys and values that the pass reads: gradients come back through them."""
        layer, arguments = self.anatomy.layers[number].module, (number, angles, packed, x, update)
        if torch.is_grad_enabled() and _is_checkpointed(layer):
            x, update = torch.utils.checkpoint.checkpoint(self._recomputed, *arguments, use_reentrant=False)
        else:
            x, update = self._layer(*arguments)
        if is_gathered(layer):  # the result of a gathered module must not be a view
            x, update = _owned(x), None if update is None else _owned(update)
        if packed.read is None:
            return x, update, None
        own = [key for key in packed.read if key == number or (isinstance(key, tuple) and key[0] == number)]
        if is_gathered(layer):
            packed.read |= {key: tuple(part.clone() for part in packed.read[key]) for key in own}
        return x, update, tuple(part for key in own for part in packed.read[key])

    def embed(self, ids_T: Tensor) -> Tensor:
        """The residual stream before the first layer."""
        x = self._looked_up(ids_T).to(self.fused.wide)
        return x if self.anatomy.embedding_multiplier == 1 else x * self.anatomy.embedding_multiplier

    def _looked_up(self, ids_T: Tensor) -> Tensor:
        embedding = self.anatomy.embedding
        plain = type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding.scale_grad_by_freq
        if self.model.adds_gradients and plain and takes_in_place(embedding.weight):
            out: Tensor = _Lookup.apply(embedding.weight, ids_T, embedding.padding_idx)  # type: ignore[no-untyped-call]
            return out
        return embedding(ids_T)  # type: ignore[no-any-return]

    def _recomputed(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        # The backward pass may run outside of the block in which the forward pass ran.
        with self.model.compute():
            return self._layer(*arguments)

    def _layer(
        self, number: int, angles: Angles, packed: Mixing, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream and the update that is added to it next, before and after a layer; after the last layer
        only those of the tokens that ``packed.select`` selects."""
        anatomy, layer = self.anatomy, self.anatomy.layers[number]
        x, normed = self._add_norm(x, update, layer.before_attention)
        last = number + 1 == len(anatomy.layers)
        drawn_N = packed.drawn_N if last else None
        mixed = self._mixed(number, normed, angles, packed, drawn_N)
        if self._only_keys(number, packed):  # nothing reads the rest of the layer
            return x, None
        if drawn_N is not None:
            index_N = in_like_shapes(drawn_N).to(x.device)
            x, mixed = x.index_select(0, index_N), mixed.index_select(0, index_N)
            normed = normed.index_select(0, index_N) if layer.parallel else normed
        update = self._scaled(layer.output(mixed), layer.after_attention)
        if layer.parallel:
            return x, update + self._scaled(self._mlp(layer.mlp, normed, packed.routes_T, drawn_N), None)
        x, normed = self._add_norm(x, update, layer.before_mlp)
        return x, self._scaled(self._mlp(layer.mlp, normed, packed.routes_T, drawn_N), layer.after_mlp)

    def _only_keys(self, number: int, packed: Mixing) -> bool:
        only_reads = packed.read is not None and packed.drawn_N is None
        return number == packed.only_keys_of or (only_reads and number + 1 == len(self.anatomy.layers))

    def _mixed(self, number: int, normed: Tensor, angles: Angles, packed: Mixing, drawn_N: Tensor | None) -> Tensor:
        """What a layer projects to its first update, ``[T, width]``; of a pass that only reads, nothing in its last
        layer."""
        anatomy, layer = self.anatomy, self.anatomy.layers[number]
        if layer.mixer is not None:
            return layer.mixer(layer.qkv(normed), packed, self.fused)
        (q, k, v), gate = self._queries_keys_values(layer, normed, angles)
        if self._only_keys(number, packed):
            packed.record(number, k, v)
            return normed
        out_ATD = packed.attend(number, q, k, v, anatomy.scaling, layer.window, anatomy.score_cap, drawn_N, layer.sinks)
        return gated(out_ATD.transpose(0, 1), gate)

    def _queries_keys_values(self, layer: Layer, normed: Tensor, angles: Angles) -> tuple[list[Tensor], Tensor | None]:
        """Normed and rotated, ``[A, T, D]`` each; and the gate of the output, ``[T, A D]``."""
        anatomy, fused, whole = self.anatomy, self.fused, layer.norms_whole(self.anatomy.head_dim)

        def norms(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            return [self.norm(part, norm) for part, norm in zip((q, k), layer.qk_norms or (), strict=True)]

        q, k, v = layer.qkv.apart(layer.qkv.beside(normed))
        q, gate = split_gate(q, anatomy.head_dim) if layer.gated else (q, None)
        if whole:
            q, k = norms(q, k)
        q, k, v = (torch.unflatten(part, -1, (-1, anatomy.head_dim)) for part in (q, k, v))
        normed_by_head = layer.qk_norms is not None and not whole
        if normed_by_head and not layer.normed_after_rotation:
            q, k = norms(q, k)
        if layer.rope is not None:
            q, k = fused.rotate(q, k, *angles[layer.rope], neighbours=anatomy.neighbours)
        if normed_by_head and layer.normed_after_rotation:
            q, k = norms(q, k)
        return [part.to(fused.narrow).transpose(0, 1) for part in (q, k, v)], gate

    def _mlp(self, mlp: Gated | Experts, normed: Tensor, routes_T: Tensor | None, drawn_N: Tensor | None) -> Tensor:
        if isinstance(mlp, Experts):
            if routes_T is not None and drawn_N is not None:
                routes_T = routes_T.index_select(0, drawn_N.to(routes_T.device))
            with replaying(routes_T):
                return mlp(normed)
        return mlp.down(self.fused.gate(*mlp.gate_up.beside(normed), gelu=self.anatomy.gelu))

    def _scaled(self, update: Tensor, norm: Norm | None) -> Tensor:
        """An update as it is added to the residual stream."""
        if norm is not None:
            update = self.norm(update, norm, wide=True)
        return update if self.anatomy.residual_multiplier == 1 else update * self.anatomy.residual_multiplier

    def _add_norm(self, x: Tensor, update: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        if norm is None:
            x = x if update is None else x + update
            return x, x.to(self.fused.narrow)
        return self.fused.add_norm(x, update, norm.factor(self.fused.wide), norm.eps, centred=norm.centred)

    def norm(self, x: Tensor, norm: Norm, *, wide: bool = False) -> Tensor:
        """A norm over the last axis."""
        return self.fused.norm(x, norm.factor(self.fused.wide), norm.eps, centred=norm.centred, wide=wide)


class _Lookup(torch.autograd.Function):
    """An embedding whose gradient is added to ``.grad``; see ``ComputeModel.gradients_in_place``."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, ids_T: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.rest = weight_VH, padding_idx  # the parameter itself: a saved tensor may be another object
        return functional.embedding(ids_T, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[None, None, None]:
        (ids_T,), (weight_VH, padding_idx) = ctx.saved_tensors, ctx.rest
        if padding_idx is not None:  # transformers' embeddings do not train it
            grad_TH = grad_TH * (ids_T != padding_idx)[:, None]
        gradient_of(weight_VH).index_add_(0, ids_T, grad_TH.to(weight_VH.dtype))
        return None, None, None


def _is_checkpointed(module: Any) -> bool:
    return bool(module.training and getattr(module, "gradient_checkpointing", False))


def _owned(values: Tensor) -> Tensor:
    """The same values in memory of their own, if they are a view."""
    return values.clone() if values._is_view() else values
