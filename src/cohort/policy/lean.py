"""The layers of a Llama-like model, run for the trainer: its own modules for the matrix products, fused operations
between them. It runs the models that ``Anatomy`` can read and computes what transformers' modules compute.
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
        UnsupportedModel: ``Anatomy`` cannot read it.
    """

    def __init__(self, model: ComputeModel) -> None:
        self.model = model
        self.anatomy = Anatomy.of(model.model)
        wide = torch.promote_types(model.precision.master, torch.float32)
        self.fused = Fused(kernels_for(model)[0], wide, model.precision.compute)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, packed: PackedPass) -> Hidden:
        """See ``Body``."""
        with self.model.compute():
            x = self._embed(ids_T).to(self.fused.wide)
            angles = {kind: self.anatomy.angles(kind, positions_T, x[:0]) for kind in self.anatomy.rotations}
            update: Tensor | None = None
            for number, layer in enumerate(self.anatomy.layers):
                arguments = number, x, update, angles, packed
                if torch.is_grad_enabled() and _is_checkpointed(layer.module):
                    x, update = torch.utils.checkpoint.checkpoint(self._recomputed, *arguments, use_reentrant=False)
                else:
                    x, update = self._layer(*arguments)
            return Hidden(self._add_norm(x, update, self.anatomy.norm)[1])

    def _embed(self, ids_T: Tensor) -> Tensor:
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
        self,
        number: int,
        x: Tensor,
        update: Tensor | None,
        angles: dict[str, tuple[Tensor, Tensor]],
        packed: PackedPass,
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream and the update that is added to it next, before and after a layer."""
        anatomy, layer, fused = self.anatomy, self.anatomy.layers[number], self.fused
        attention, mlp = layer.module.self_attn, layer.module.mlp
        x, normed = self._add_norm(x, update, layer.before_attention)
        q, k, v = (
            project(normed).unflatten(-1, (-1, anatomy.head_dim))
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if layer.qk_norms is not None:
            q, k = (self._norm(part, norm) for part, norm in zip((q, k), layer.qk_norms, strict=True))
        if layer.rope is not None:
            q, k = (fused.rotate(part, *angles[layer.rope]) for part in (q, k))
        q, k, v = (part.to(fused.narrow).transpose(0, 1) for part in (q, k, v))
        if packed.reads and number + 1 == len(anatomy.layers):
            packed.record(number, k, v)  # nothing reads the rest of the layer
            return x, None
        out_ATD = packed.attend(number, q, k, v, anatomy.scaling, layer.window, anatomy.score_cap)
        update = attention.o_proj(out_ATD.transpose(0, 1).flatten(1))
        if layer.after_attention is not None:
            update = self._norm(update, layer.after_attention, wide=True)
        x, normed = self._add_norm(x, update, layer.before_mlp)
        update = mlp.down_proj(fused.gate(mlp.gate_proj(normed), mlp.up_proj(normed), gelu=anatomy.gelu))
        if layer.after_mlp is not None:
            update = self._norm(update, layer.after_mlp, wide=True)
        return x, update

    def _add_norm(self, x: Tensor, update: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        return self.fused.add_norm(x, update, norm.factor(self.fused.wide), norm.eps)

    def _norm(self, x: Tensor, norm: Norm, *, wide: bool = False) -> Tensor:
        return self.fused.norm(x, norm.factor(self.fused.wide), norm.eps, wide=wide)


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
