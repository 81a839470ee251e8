"""What a layer does between its matrix products, each as one differentiable operation.

On a CPU these are the kernels of update.c, which go over the numbers once and keep only what their backward passes
need. Elsewhere, and in float64, torch's own operations compute the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.policy.kernels import UpdateKernels


class Fused:
    """The operations.

    Args:
        kernels: those that do them. None: torch does.
        wide: the dtype of the residual stream and of sums: float32, or float64.
        narrow: the dtype of what goes into products.
    """

    def __init__(self, kernels: UpdateKernels | None, wide: torch.dtype, narrow: torch.dtype) -> None:
        self.kernels, self.wide, self.narrow = kernels, wide, narrow

    def norm(self, x: Tensor, factor: Tensor, eps: float, *, wide: bool = False) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * factor``, over the last axis.

        Args:
            x: in either dtype.
            factor: of each number of the last axis, in the wide dtype.
            eps: added to the mean.
            wide: the result is to be added to the residual stream, not multiplied.
        """
        dtype = self.wide if wide else self.narrow
        if self.kernels is not None:
            out: Tensor = _Norm.apply(x, factor, eps, dtype, self.kernels)  # type: ignore[no-untyped-call]
            return out
        return functional.rms_norm(x.to(self.wide), x.shape[-1:], factor, eps).to(dtype)

    def add_norm(self, x: Tensor, update: Tensor | None, factor: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The residual stream with an update added, and the norm of that, in the narrow dtype."""
        if update is None:
            return x, self.norm(x, factor, eps)
        if self.kernels is not None:
            pair: tuple[Tensor, Tensor] = _AddNorm.apply(x, update, factor, eps, self.narrow, self.kernels)  # type: ignore[no-untyped-call]
            return pair
        x = x + update
        return x, self.norm(x, factor, eps)

    def rotate(self, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor) -> Tensor:
        """Rotary embedding, in the narrow dtype: ``[x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]`` with the halves x1
        and x2 of a head."""
        if self.kernels is not None:
            out: Tensor = _Rotate.apply(x_NHD, cos_ND, sin_ND, self.narrow, self.kernels)  # type: ignore[no-untyped-call]
            return out
        x = x_NHD.to(self.wide)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x * cos_ND[:, None] + turned * sin_ND[:, None]).to(self.narrow)

    def gate(self, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """``SiLU(gate) * up``, or with GELU's tanh form, in the narrow dtype."""
        gate, up = gate.to(self.narrow), up.to(self.narrow)  # adapters may have left one of them wide
        if self.kernels is not None:
            out: Tensor = _Gate.apply(gate, up, gelu, self.kernels)  # type: ignore[no-untyped-call]
            return out
        activation = partial(functional.gelu, approximate="tanh") if gelu else functional.silu
        return activation(gate) * up


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, eps: float, dtype: torch.dtype, kernels: UpdateKernels) -> Tensor:
        x, factor = x.contiguous(), factor.contiguous()
        _, scale, out = kernels.norm(x, None, factor, eps, dtype)
        ctx.save_for_backward(x, scale, factor)
        ctx.kernels = kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, factor = ctx.saved_tensors
        grad_x, _, grad_factor = ctx.kernels.norm_grad(
            x, scale, factor, grad.contiguous(), None, None, of_factor=ctx.needs_input_grad[1]
        )
        return grad_x, grad_factor, None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor, factor: Tensor, eps: float, dtype: torch.dtype, kernels: UpdateKernels
    ) -> tuple[Tensor, Tensor]:
        factor = factor.contiguous()
        total, scale, out = kernels.norm(x.contiguous(), update.contiguous(), factor, eps, dtype)
        ctx.save_for_backward(total, scale, factor)
        ctx.rest = update.dtype, kernels
        ctx.set_materialize_grads(False)
        return total, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        total, scale, factor = ctx.saved_tensors
        dtype, kernels = ctx.rest
        if grad is None:  # the norm came to nothing, the stream may not have
            return grad_sum, None if grad_sum is None else grad_sum.to(dtype), None, None, None, None
        grad_sum = None if grad_sum is None else grad_sum.contiguous()
        grads = kernels.norm_grad(
            total, scale, factor, grad.contiguous(), grad_sum, dtype, of_factor=ctx.needs_input_grad[2]
        )
        return *grads, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, dtype: torch.dtype, kernels: UpdateKernels
    ) -> Tensor:
        cos_ND, sin_ND = cos_ND.contiguous(), sin_ND.contiguous()
        ctx.save_for_backward(cos_ND, sin_ND)
        ctx.rest = x_NHD.dtype, kernels
        return kernels.rotate(x_NHD.contiguous(), cos_ND, sin_ND, dtype, transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor) -> tuple[Tensor | None, ...]:
        cos_ND, sin_ND = ctx.saved_tensors
        dtype, kernels = ctx.rest
        return kernels.rotate(grad_NHD.contiguous(), cos_ND, sin_ND, dtype, transposed=True), None, None, None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, gelu: bool, kernels: UpdateKernels) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.rest = gelu, kernels
        return kernels.gate(gate, up, gelu=gelu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gelu, kernels = ctx.rest
        return *kernels.gate_grad(*ctx.saved_tensors, grad.contiguous(), gelu=gelu), None, None
