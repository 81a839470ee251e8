"""The layers of a Llama-like model, run for the trainer: its own modules for the matrix products, fused operations
between them. It runs the models that ``Anatomy`` can read and computes what transformers' modules compute.

On a CPU the fused operations are the kernels of update.c, which read the numbers once and keep only what their backward
passes need. Elsewhere, and in float64, torch's own operations compute the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.native import call, require, threads_for
from cohort.parallel.full import call_gathered, is_gathered
from cohort.policy.anatomy import Anatomy, Norm
from cohort.policy.compute import ComputeModel
from cohort.policy.head import gradient_of, in_like_shapes, takes_in_place
from cohort.policy.passes import Hidden, PackedPass

Angles = dict[str, tuple[Tensor, Tensor]]
"""Cosines and sines of the tokens' positions, by kind of rotation."""


class LeanLayers:
    """See the module.

    Args:
        model: the model.

    Raises:
        UnsupportedModel: ``Anatomy`` cannot read it.
    """

    returns_keys = True

    def __init__(self, model: ComputeModel) -> None:
        self.model = model
        self.anatomy = Anatomy.of(model.model)
        wide = torch.promote_types(model.precision.master, torch.float32)
        self.fused = Fused(not model.why_no_kernels(), wide, model.precision.compute)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, packed: PackedPass) -> Hidden:
        """See ``Body``."""
        found = call_gathered(self.model.model, partial(self._run, ids_T, positions_T, packed))
        return packed.select(found) if packed.drawn_N is None else found.select(slice(len(packed.drawn_N)))

    def _run(self, ids_T: Tensor, positions_T: Tensor, packed: PackedPass) -> Hidden:
        with self.model.compute():
            x = self._embed(ids_T).to(self.fused.wide)
            angles = {kind: self.anatomy.angles(kind, positions_T, x[:0]) for kind in self.anatomy.rotations}
            update: Tensor | None = None
            for number, layer in enumerate(self.anatomy.layers):
                run = partial(self._outputs, number, angles, packed)
                x, update, _ = call_gathered(layer.module, run, x, update)
            return Hidden(self._add_norm(x, update, self.anatomy.norm)[1])

    def _outputs(
        self, number: int, angles: Angles, packed: PackedPass, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...] | None]:
        """The result of ``_layer``, and the keys and values that the pass reads: gradients come back through them."""
        layer, arguments = self.anatomy.layers[number].module, (number, angles, packed, x, update)
        if torch.is_grad_enabled() and _is_checkpointed(layer):
            x, update = torch.utils.checkpoint.checkpoint(self._recomputed, *arguments, use_reentrant=False)
        else:
            x, update = self._layer(*arguments)
        if packed.read is None:
            return x, update, None
        if is_gathered(layer):  # whose results are no views
            k, v = packed.read[number]
            packed.read[number] = k.clone(), v.clone()
        return x, update, packed.read[number]

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
        self, number: int, angles: Angles, packed: PackedPass, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream and the update that is added to it next, before and after a layer; after the last layer
        only those of the tokens that ``packed.select`` selects."""
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
        last = number + 1 == len(anatomy.layers)
        if packed.read is not None and last:
            packed.record(number, k, v)  # nothing reads the rest of the layer
            return x, None
        drawn_N = packed.drawn_N if last else None
        out_ATD = packed.attend(number, q, k, v, anatomy.scaling, layer.window, anatomy.score_cap, drawn_N)
        out_TAD = out_ATD.transpose(0, 1)
        if drawn_N is not None:
            index_N = in_like_shapes(drawn_N).to(x.device)
            x, out_TAD = x.index_select(0, index_N), out_TAD.index_select(0, index_N)
        update = attention.o_proj(out_TAD.flatten(1))
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


# Between the matrix products ------------------------------------------------------------------------------------------


class Fused:
    """What a layer computes between its matrix products, each as one differentiable operation.

    Args:
        native: whether the native kernels compute them; otherwise torch does.
        wide: dtype of the residual stream and of sums: float32 or float64.
        narrow: dtype of the factors of matrix products.
    """

    def __init__(self, native: bool, wide: torch.dtype, narrow: torch.dtype) -> None:
        self.native, self.wide, self.narrow = native, wide, narrow

    def norm(self, x: Tensor, factor: Tensor, eps: float, *, wide: bool = False) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * factor``, over the last axis.

        Args:
            x: in either dtype.
            factor: one number per entry of the last axis, in the wide dtype.
            eps: added to the mean.
            wide: return the wide dtype, for a result that is added to the residual stream.
        """
        dtype = self.wide if wide else self.narrow
        if not self.native:
            return functional.rms_norm(x.to(self.wide), x.shape[-1:], factor, eps).to(dtype)
        out: Tensor = _AddNorm.apply(x, None, factor, eps, dtype)  # type: ignore[no-untyped-call]
        return out

    def add_norm(self, x: Tensor, update: Tensor | None, factor: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The residual stream with an update added, and its norm in the narrow dtype."""
        if update is None or not self.native:
            x = x if update is None else x + update
            return x, self.norm(x, factor, eps)
        pair: tuple[Tensor, Tensor] = _AddNorm.apply(x, update, factor, eps, self.narrow)  # type: ignore[no-untyped-call]
        return pair

    def rotate(self, x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotary embedding in the narrow dtype: ``[x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]`` with the halves x1
        and x2 of a head."""
        if self.native:
            out: Tensor = _Rotate.apply(x_TAD, cos_TD, sin_TD, self.narrow)  # type: ignore[no-untyped-call]
            return out
        x = x_TAD.to(self.wide)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x * cos_TD[:, None] + turned * sin_TD[:, None]).to(self.narrow)

    def gate(self, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """``SiLU(gate) * up``, or with the tanh form of GELU, in the narrow dtype."""
        gate, up = gate.to(self.narrow), up.to(self.narrow)  # adapters may return a wider dtype
        if self.native:
            out: Tensor = _Gate.apply(gate, up, gelu)  # type: ignore[no-untyped-call]
            return out
        activation = partial(functional.gelu, approximate="tanh") if gelu else functional.silu
        return activation(gate) * up


class _AddNorm(torch.autograd.Function):
    """The sum of x and an update, and its norm; without an update the norm alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, factor: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor | tuple[Tensor, Tensor]:
        x, factor, update = x.contiguous(), factor.contiguous(), None if update is None else update.contiguous()
        require(factor.dtype == torch.float32 and factor.shape == x.shape[-1:], "a factor for each number of a row")
        require(update is None or (x.dtype == torch.float32 and update.shape == x.shape), "sums are float32")
        total = None if update is None else torch.empty_like(x)
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        scale, out = x.new_empty(rows, dtype=torch.float32), torch.empty_like(x, dtype=dtype)
        call(
            "norm", x=x, update=update, factor=factor, sum=total, scale=scale, out=out, rows=rows, width=width, eps=eps
        )
        ctx.save_for_backward(x if total is None else total, scale, factor)
        ctx.update_dtype = None if update is None else update.dtype
        ctx.set_materialize_grads(False)
        return out if total is None else (total, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, scale, factor = ctx.saved_tensors
        dtype = ctx.update_dtype
        grad_sum, grad = (None, *grads)[-2:]
        if grad is None:  # only the stream was used
            return grad_sum, None if grad_sum is None else grad_sum.to(dtype), None, None, None
        grad_sum = None if grad_sum is None else grad_sum.contiguous()
        width, threads = x.shape[-1], threads_for(x.numel())
        require(grad_sum is None or grad_sum.dtype == torch.float32, "sums are float32")
        grad_x = torch.empty_like(x)
        grad_update = torch.empty_like(x, dtype=dtype) if dtype == torch.bfloat16 else None
        grad_factor = x.new_zeros(threads, width, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        call(
            "norm_grad", x=x, grad_out=grad.contiguous(), factor=factor, scale=scale, grad_sum=grad_sum, grad_x=grad_x,
            grad_update=grad_update, grad_factor=grad_factor, rows=x.numel() // width, width=width, threads=threads,
        )  # fmt: skip
        grad_update = grad_x if dtype == torch.float32 else grad_update
        return grad_x, grad_update, None if grad_factor is None else grad_factor.sum(0), None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos_TD.contiguous(), sin_TD.contiguous())
        ctx.dtype = x_TAD.dtype
        return _rotated(x_TAD, cos_TD, sin_TD, dtype, transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TAD: Tensor) -> tuple[Tensor | None, ...]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _rotated(grad_TAD, cos_TD, sin_TD, ctx.dtype, transposed=True), None, None, None


def _rotated(x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor, dtype: torch.dtype, *, transposed: bool) -> Tensor:
    (rows, heads, width), x_TAD = x_TAD.shape, x_TAD.contiguous()
    require(cos_TD.dtype == sin_TD.dtype == torch.float32, "angles are float32")
    require(cos_TD.shape == sin_TD.shape == (rows, width), "an angle for each number of a head")
    out, sizes = torch.empty_like(x_TAD, dtype=dtype), {"rows": rows, "heads": heads, "width": width}
    call("rotate", x=x_TAD, cos=cos_TD.contiguous(), sin=sin_TD.contiguous(), out=out, transposed=transposed, **sizes)
    return out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        require(gate.dtype == up.dtype and gate.shape == up.shape, "gate and up of one shape and dtype")
        ctx.save_for_backward(gate, up)
        ctx.gelu, out = gelu, torch.empty_like(gate)
        call("gate", gate=gate, up=up, out=out, count=gate.numel(), gelu=gelu)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate, up), grad = ctx.saved_tensors, grad.contiguous()
        grads = torch.empty_like(gate), torch.empty_like(up)
        given = {"gate": gate, "up": up, "grad_out": grad, "grad_gate": grads[0], "grad_up": grads[1]}
        call("gate", count=gate.numel(), gelu=ctx.gelu, **given)
        return *grads, None
