"""The layers of a Llama-like model, run for the trainer: its own modules for the matrix products, fused operations
between them. It runs the models that ``Anatomy`` can read and computes what transformers' modules compute.

On a CPU the fused operations are the kernels of update.c, which read the numbers once and keep only what their backward
passes need. Elsewhere, and in float64, torch's own operations compute the same.
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

from cohort.native import call, require, threads_for
from cohort.parallel.full import call_gathered, is_gathered
from cohort.policy.anatomy import Anatomy, Layer
from cohort.policy.compute import ComputeModel
from cohort.policy.head import gradient_of, in_like_shapes, takes_in_place
from cohort.policy.parts import Experts, Gated, Norm, need
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
        counted = self.anatomy.has_experts and model.router_aux_loss_coef
        need(not counted, "the load-balancing loss needs what routers say")
        wide = torch.promote_types(model.precision.master, torch.float32)
        self.fused = Fused(not model.why_no_kernels(), wide, model.precision.compute)

    def __call__(self, ids_T: Tensor, positions_T: Tensor, packed: PackedPass) -> Hidden:
        """See ``Body``."""
        run = partial(self.run, range(len(self.anatomy.layers)), ids_T, positions_T, packed)
        found = Hidden(call_gathered(self.model.model, run))
        return packed.select(found) if packed.drawn_N is None else found.select(slice(len(packed.drawn_N)))

    def run(self, layers: range, given: Tensor, positions_T: Tensor, packed: PackedPass) -> Tensor:
        """Neighbouring layers: from token ids, or from the residual stream before the first of them, to the residual
        stream; after the last layer of all, to hidden states."""
        with self.model.compute():
            x = given if layers.start else self._embed(given)
            angles = {kind: self.anatomy.angles(kind, positions_T, x[:0]) for kind in self.anatomy.rotations}
            update: Tensor | None = None
            for number in layers:
                run = partial(self._outputs, number, angles, packed)
                x, update, _ = call_gathered(self.anatomy.layers[number].module, run, x, update)
            norm = self.anatomy.norm if layers.stop == len(self.anatomy.layers) else None
            return self._add_norm(x, update, norm)[norm is not None]

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
        self, number: int, angles: Angles, packed: PackedPass, x: Tensor, update: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream and the update that is added to it next, before and after a layer; after the last layer
        only those of the tokens that ``packed.select`` selects."""
        anatomy, layer = self.anatomy, self.anatomy.layers[number]
        x, normed = self._add_norm(x, update, layer.before_attention)
        q, k, v = self._queries_keys_values(layer, normed, angles)
        last = number + 1 == len(anatomy.layers)
        if (packed.read is not None and last) or number == packed.only_keys_of:
            packed.record(number, k, v)  # nothing reads the rest of the layer
            return x, None
        drawn_N = packed.drawn_N if last else None
        out_ATD = packed.attend(number, q, k, v, anatomy.scaling, layer.window, anatomy.score_cap, drawn_N, layer.sinks)
        out_TAD = out_ATD.transpose(0, 1)
        if drawn_N is not None:
            index_N = in_like_shapes(drawn_N).to(x.device)
            x, out_TAD = x.index_select(0, index_N), out_TAD.index_select(0, index_N)
            normed = normed.index_select(0, index_N) if layer.parallel else normed
        update = self._scaled(layer.output(out_TAD.flatten(1)), layer.after_attention)
        if layer.parallel:
            return x, update + self._scaled(self._mlp(layer.mlp, normed), None)
        x, normed = self._add_norm(x, update, layer.before_mlp)
        return x, self._scaled(self._mlp(layer.mlp, normed), layer.after_mlp)

    def _queries_keys_values(self, layer: Layer, normed: Tensor, angles: Angles) -> list[Tensor]:
        """Normed and rotated, ``[A, T, D]`` each."""
        anatomy, fused, whole = self.anatomy, self.fused, layer.norms_whole(self.anatomy.head_dim)

        def norms(q: Tensor, k: Tensor) -> Sequence[Tensor]:
            return [self._norm(part, norm) for part, norm in zip((q, k), layer.qk_norms or (), strict=True)]

        q, k, v = layer.qkv(normed)
        if whole:
            q, k = norms(q, k)
        q, k, v = (torch.unflatten(part, -1, (-1, anatomy.head_dim)) for part in (q, k, v))
        normed_by_head = layer.qk_norms is not None and not whole
        if normed_by_head and not layer.normed_after_rotation:
            q, k = norms(q, k)
        if layer.rope is not None:
            q, k = (fused.rotate(part, *angles[layer.rope], neighbours=anatomy.neighbours) for part in (q, k))
        if normed_by_head and layer.normed_after_rotation:
            q, k = norms(q, k)
        return [part.to(fused.narrow).transpose(0, 1) for part in (q, k, v)]

    def _mlp(self, mlp: Gated | Experts, normed: Tensor) -> Tensor:
        if isinstance(mlp, Experts):
            return mlp(normed)
        gate, up = mlp.gate_up(normed)
        return mlp.down(self.fused.gate(gate, up, gelu=self.anatomy.gelu))

    def _scaled(self, update: Tensor, norm: Norm | None) -> Tensor:
        """An update as it is added to the residual stream."""
        if norm is not None:
            update = self._norm(update, norm, wide=True)
        return update if self.anatomy.residual_multiplier == 1 else update * self.anatomy.residual_multiplier

    def _add_norm(self, x: Tensor, update: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        if norm is None:
            x = x if update is None else x + update
            return x, x.to(self.fused.narrow)
        return self.fused.add_norm(x, update, norm.factor(self.fused.wide), norm.eps, centred=norm.centred)

    def _norm(self, x: Tensor, norm: Norm, *, wide: bool = False) -> Tensor:
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

    def norm(self, x: Tensor, factor: Tensor, eps: float, *, centred: bool = False, wide: bool = False) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * factor``, over the last axis; if centred, of x without its mean.

        Args:
            x: in either dtype.
            factor: one number per entry of the last axis, in the wide dtype.
            eps: added to the mean.
            centred: whether the mean is subtracted first. Torch has an operation for this on every device.
            wide: return the wide dtype, for a result that is added to the residual stream.
        """
        dtype = self.wide if wide else self.narrow
        if centred:
            return functional.layer_norm(x.to(self.wide), x.shape[-1:], factor, eps=eps).to(dtype)
        if not self.native:
            return functional.rms_norm(x.to(self.wide), x.shape[-1:], factor, eps).to(dtype)
        out: Tensor = _AddNorm.apply(x, None, factor, eps, dtype)  # type: ignore[no-untyped-call]
        return out

    def add_norm(
        self, x: Tensor, update: Tensor | None, factor: Tensor, eps: float, *, centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The residual stream with an update added, and its norm in the narrow dtype."""
        if update is None or centred or not self.native:
            x = x if update is None else x + update
            return x, self.norm(x, factor, eps, centred=centred)
        pair: tuple[Tensor, Tensor] = _AddNorm.apply(x, update, factor, eps, self.narrow)  # type: ignore[no-untyped-call]
        return pair

    def rotate(self, x_TAD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, neighbours: bool = False) -> Tensor:
        """Rotary embedding of the first R dimensions of a head in the narrow dtype: ``[x1, x2] -> [x1 cos - x2 sin,
        x2 cos + x1 sin]`` with their halves x1 and x2, or with neighbours x1 and x2."""
        if self.native:
            out: Tensor = _Rotate.apply(x_TAD, cos_TR, sin_TR, self.narrow, neighbours)  # type: ignore[no-untyped-call]
            return out
        return rotated(x_TAD.to(self.wide), cos_TR[:, None], sin_TR[:, None], neighbours=neighbours).to(self.narrow)

    def gate(self, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """``SiLU(gate) * up``, or with the tanh form of GELU, in the narrow dtype."""
        gate, up = gate.to(self.narrow), up.to(self.narrow)  # adapters may return a wider dtype
        if self.native:
            out: Tensor = _Gate.apply(gate, up, gelu)  # type: ignore[no-untyped-call]
            return out
        activation = partial(functional.gelu, approximate="tanh") if gelu else functional.silu
        return activation(gate) * up


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, neighbours: bool) -> Tensor:
    """``Fused.rotate`` by torch, with angles for each head."""
    width = cos.shape[-1]
    x, rest = x[..., :width], x[..., width:]
    if neighbours:
        cos, sin = (torch.stack(part.chunk(2, dim=-1), dim=-1).flatten(-2) for part in (cos, sin))
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    x = x * cos + turned * sin
    return torch.cat([x, rest], dim=-1) if rest.shape[-1] else x


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
    def forward(
        ctx: Any, x_TAD: Tensor, cos_TR: Tensor, sin_TR: Tensor, dtype: torch.dtype, neighbours: bool
    ) -> Tensor:
        ctx.save_for_backward(cos_TR.contiguous(), sin_TR.contiguous())
        ctx.dtype, ctx.neighbours = x_TAD.dtype, neighbours
        return _rotated(x_TAD, cos_TR, sin_TR, dtype, transposed=False, neighbours=neighbours)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TAD: Tensor) -> tuple[Tensor | None, ...]:
        cos_TR, sin_TR = ctx.saved_tensors
        grad_x = _rotated(grad_TAD, cos_TR, sin_TR, ctx.dtype, transposed=True, neighbours=ctx.neighbours)
        return grad_x, None, None, None, None


def _rotated(x_TAD: Tensor, cos_TR: Tensor, sin_TR: Tensor, dtype: torch.dtype, **flags: bool) -> Tensor:
    (rows, heads, width), x_TAD, rotated = x_TAD.shape, x_TAD.contiguous(), cos_TR.shape[1]
    require(cos_TR.dtype == sin_TR.dtype == torch.float32, "angles are float32")
    fits = rotated <= width and rotated % 2 == 0
    require(fits and cos_TR.shape == sin_TR.shape == (rows, rotated), "an angle for each rotated number")
    out = torch.empty_like(x_TAD, dtype=dtype)
    sizes = {"rows": rows, "heads": heads, "width": width, "rotated": rotated}
    call("rotate", x=x_TAD, cos=cos_TR.contiguous(), sin=sin_TR.contiguous(), out=out, **sizes, **flags)
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
