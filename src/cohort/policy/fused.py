"""What a layer computes between its matrix products, each as one differentiable operation.

On a CPU these are the kernels of update.c, which read the numbers once and keep only what their backward passes need.
Elsewhere, and in float64, torch's own operations compute the same.
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
        kernels: native kernels that compute them. None: torch computes them.
        wide: dtype of the residual stream and of sums: float32 or float64.
        narrow: dtype of the factors of matrix products.
    """

    def __init__(self, kernels: UpdateKernels | None, wide: torch.dtype, narrow: torch.dtype) -> None:
        self.kernels, self.wide, self.narrow = kernels, wide, narrow

    def norm(self, x: Tensor, factor: Tensor, eps: float, *, wide: bool = False) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * factor``, over the last axis.

        Args:
            x: in either dtype.
            factor: one number per entry of the last axis, in the wide dtype.
            eps: added to the mean.
            wide: return the wide dtype, for a result that is added to the residual stream.
        """
        dtype = self.wide if wide else self.narrow
        if self.kernels is None:
            return functional.rms_norm(x.to(self.wide), x.shape[-1:], factor, eps).to(dtype)
        out: Tensor = _AddNorm.apply(x, None, factor, eps, dtype, self.kernels)  # type: ignore[no-untyped-call]
        return out

    def add_norm(self, x: Tensor, update: Tensor | None, factor: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The residual stream with an update added, and its norm in the narrow dtype."""
        if update is None or self.kernels is None:
            x = x if update is None else x + update
            return x, self.norm(x, factor, eps)
        pair: tuple[Tensor, Tensor] = _AddNorm.apply(x, update, factor, eps, self.narrow, self.kernels)  # type: ignore[no-untyped-call]
        return pair

    def rotate(self, x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotary embedding in the narrow dtype: ``[x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]`` with the halves x1
        and x2 of a head."""
        if self.kernels is not None:
            out: Tensor = _Rotate.apply(x_TAD, cos_TD, sin_TD, self.narrow, self.kernels)  # type: ignore[no-untyped-call]
            return out
        x = x_TAD.to(self.wide)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        return (x * cos_TD[:, None] + turned * sin_TD[:, None]).to(self.narrow)

    def gate(self, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """``SiLU(gate) * up``, or with the tanh form of GELU, in the narrow dtype."""
        gate, up = gate.to(self.narrow), up.to(self.narrow)  # adapters may return a wider dtype
        if self.kernels is not None:
            out: Tensor = _Gate.apply(gate, up, gelu, self.kernels)  # type: ignore[no-untyped-call]
            return out
        activation = partial(functional.gelu, approximate="tanh") if gelu else functional.silu
        return activation(gate) * up


class _AddNorm(torch.autograd.Function):
    """The sum of x and an update, and its norm; without an update the norm alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor | None, factor: Tensor, eps: float, dtype: torch.dtype, kernels: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        factor, update = factor.contiguous(), None if update is None else update.contiguous()
        total, scale, out = kernels.norm(x.contiguous(), update, factor, eps, dtype)
        ctx.save_for_backward(total, scale, factor)
        ctx.rest = None if update is None else update.dtype, kernels
        ctx.set_materialize_grads(False)
        return out if update is None else (total, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, scale, factor = ctx.saved_tensors
        dtype, kernels = ctx.rest
        grad_sum, grad = (None, *grads)[-2:]
        if grad is None:  # only the stream was used
            return grad_sum, None if grad_sum is None else grad_sum.to(dtype), None, None, None, None
        grad_sum = None if grad_sum is None else grad_sum.contiguous()
        found = kernels.norm_grad(
            total, scale, factor, grad.contiguous(), grad_sum, dtype, of_factor=ctx.needs_input_grad[2]
        )
        return *found, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor, dtype: torch.dtype, kernels: UpdateKernels
    ) -> Tensor:
        ctx.save_for_backward(cos_TD.contiguous(), sin_TD.contiguous())
        ctx.rest = x_TAD.dtype, kernels
        return kernels.rotate(x_TAD.contiguous(), cos_TD.contiguous(), sin_TD.contiguous(), dtype, transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TAD: Tensor) -> tuple[Tensor | None, ...]:
        dtype, kernels = ctx.rest
        grad = kernels.rotate(grad_TAD.contiguous(), *ctx.saved_tensors, dtype, transposed=True)
        return grad, None, None, None, None


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
