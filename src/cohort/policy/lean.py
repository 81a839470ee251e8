"""The layers of a Llama-like model, run for the trainer: its own modules for the matrix products, fused operations
between them.

What ``Anatomy`` knows runs this way; it computes what transformers' modules compute.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.policy.anatomy import Anatomy, Norm
from cohort.policy.compute import ComputeModel
from cohort.policy.fused import Fused
from cohort.policy.head import gradient_of, takes_in_place
from cohort.policy.kernels import kernels_for
from cohort.policy.passes import Hidden, PackedPass


class LeanLayers:
    """See the module.

    Args:
        model: the model.

    Raises:
        UnsupportedModel: it is of another kind.
    """

    def __init__(self, model: ComputeModel) -> None:
        self.model = model
        self.anatomy = Anatomy.of(model.model)
        wide = torch.promote_types(model.precision.master, torch.float32)
        self.fused = Fused(kernels_for(model)[0], wide, model.precision.compute)

    def __call__(self, ids_N: Tensor, positions_N: Tensor, packed: PackedPass) -> Hidden:
        """See ``Body``."""
        with self.model.compute():
            x = self._embedded(ids_N).to(self.fused.wide)
            angles = self._angles(positions_N)
            update: Tensor | None = None
            for number, layer in enumerate(self.anatomy.layers):
                if torch.is_grad_enabled() and _checkpointed(layer.module):
                    x, update = torch.utils.checkpoint.checkpoint(
                        self._recomputed, number, x, update, angles, packed, use_reentrant=False
                    )
                else:
                    x, update = self._layer(number, x, update, angles, packed)
            return Hidden(self._add_norm(x, update, self.anatomy.norm)[1])

    def _embedded(self, ids_N: Tensor) -> Tensor:
        embedding = self.anatomy.embedding
        plain = type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding.scale_grad_by_freq
        if self.model.adds_gradients and plain and takes_in_place(embedding.weight):
            out: Tensor = _Lookup.apply(embedding.weight, ids_N, embedding.padding_idx)  # type: ignore[no-untyped-call]
            return out
        return embedding(ids_N)  # type: ignore[no-any-return]

    def _recomputed(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        # The backward pass may run outside of the block that the forward pass ran in.
        with self.model.compute():
            return self._layer(*arguments)

    def _layer(
        self,
        number: int,
        x: Tensor,
        update: Tensor | None,
        angles: dict[str, tuple[Tensor, Tensor]],
        packed: PackedPass,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what is to be added to it; before and after a layer."""
        layer, fused = self.anatomy.layers[number], self.fused
        attention, mlp = layer.module.self_attn, layer.module.mlp
        x, normed = self._add_norm(x, update, layer.before_attention)
        q, k, v = (
            project(normed).unflatten(-1, (-1, self.anatomy.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if layer.qk_norms is not None:
            q, k = (self._norm(part, norm) for part, norm in zip((q, k), layer.qk_norms, strict=True))
        if layer.rope is not None:
            q, k = (fused.rotate(part, *angles[layer.rope]) for part in (q, k))
        q_HND, k_KND, v_KND = (part.to(fused.narrow).transpose(0, 1) for part in (q, k, v))
        if packed.reads and number + 1 == len(self.anatomy.layers):
            packed.take(number, k_KND, v_KND)  # the rest of the layer would be of no use
            return x, None
        out_HND = packed.attend(number, q_HND, k_KND, v_KND, self.anatomy.scaling, layer.window, self.anatomy.score_cap)
        update = attention.o_proj(out_HND.transpose(0, 1).flatten(1))
        if layer.after_attention is not None:
            update = self._norm(update, layer.after_attention, wide=True)
        x, normed = self._add_norm(x, update, layer.before_mlp)
        update = mlp.down_proj(fused.gate(mlp.gate_proj(normed), mlp.up_proj(normed), gelu=self.anatomy.gelu))
        if layer.after_mlp is not None:
            update = self._norm(update, layer.after_mlp, wide=True)
        return x, update

    def _add_norm(self, x: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        return self.fused.add_norm(x, update, self._factor(norm), norm.eps)

    def _norm(self, x: Tensor, norm: Norm, *, wide: bool = False) -> Tensor:
        return self.fused.norm(x, self._factor(norm), norm.eps, wide=wide)

    def _factor(self, norm: Norm) -> Tensor:
        factor = norm.weight.to(self.fused.wide)
        return 1 + factor if norm.shifted else factor

    def _angles(self, positions_N: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Cosines and sines, ``[N, D]`` each, by kind of rotation."""
        like = torch.empty(0, dtype=self.fused.wide, device=positions_N.device)
        return {kind: self.anatomy.angles(kind, positions_N, like) for kind in self.anatomy.rotations}


class _Lookup(torch.autograd.Function):
    """An embedding whose gradient is added to ``.grad``; see ``Policy.gradients_in_place``."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, ids_N: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids_N)
        ctx.rest = weight_VH, padding_idx  # the parameter itself: what is saved need not be the same object
        return functional.embedding(ids_N, weight_VH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[None, None, None]:
        (ids_N,), (weight_VH, padding_idx) = ctx.saved_tensors, ctx.rest
        if padding_idx is not None:  # transformers' embeddings do not train it
            grad_NH = grad_NH * (ids_N != padding_idx)[:, None]
        gradient_of(weight_VH).index_add_(0, ids_N, grad_NH.to(weight_VH.dtype))
        return None, None, None


def _checkpointed(module: Any) -> bool:
    return bool(module.training and getattr(module, "gradient_checkpointing", False))
