"""What recurrences compute inside their chunks besides matrix products, by the kernels of recurrent.c or by torch.

Axis letters: J chunks, G groups of R heads each that share keys, C tokens of a chunk, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.native import call, require, threads_for


def decayed(scores_JGCC: Tensor, passed_JGRC: Tensor, *, native: bool = False) -> Tensor:
    """``scores_ij exp(passed_i - passed_j)`` for i >= j, else 0, ``[J, G, R, C, C]``, in the dtype of the scores.
    ``passed`` holds sums over a chunk, in float64: in float32 the difference of two large ones would have few digits
    left."""
    if native:
        out: Tensor = _Decayed.apply(scores_JGCC, passed_JGRC)  # type: ignore[no-untyped-call]
        return out
    size = passed_JGRC.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=passed_JGRC.device).triu(1)
    between = (passed_JGRC[..., :, None] - passed_JGRC[..., None, :]).to(scores_JGCC.dtype)
    return scores_JGCC[:, :, None] * between.masked_fill(later, -torch.inf).exp()


def solved(lower: Tensor, b: Tensor, *, native: bool = False) -> Tensor:
    """X with ``(1 + lower) x = b``, ``[..., C, D]``; of ``lower``, ``[..., C, C]``, only the strictly lower triangle
    counts."""
    if native:
        out: Tensor = _Solved.apply(lower, b)  # type: ignore[no-untyped-call]
        return out
    x: Tensor = torch.linalg.solve_triangular(lower, b, upper=False, unitriangular=True)
    return x


class _Decayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, passed: Tensor) -> Tensor:
        scores, passed = scores.contiguous(), passed.contiguous()
        (chunks, groups, repeats, size), kinds = passed.shape, (scores.dtype, passed.dtype)
        require(scores.shape == (chunks, groups, size, size), "scores of each group")
        require(kinds == (torch.float32, torch.float64), "scores in float32, sums in float64")
        out = scores.new_empty(chunks, groups, repeats, size, size)
        _decay(scores, passed, out=out)
        ctx.save_for_backward(scores, passed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        scores, passed = ctx.saved_tensors
        grad_scores, grad_passed = torch.empty_like(scores), scores.new_empty(passed.shape)
        _decay(scores, passed, grad_out=grad.contiguous(), grad_scores=grad_scores, grad_passed=grad_passed)
        return grad_scores, grad_passed.double()


def _decay(scores: Tensor, passed: Tensor, **others: Tensor) -> None:
    chunks, groups, repeats, size = passed.shape
    threads = threads_for(passed.numel() * size)
    sizes = {"groups": chunks * groups, "repeats": repeats, "size": size}
    call("decayed", scores=scores, passed=passed.data_ptr(), threads=threads, **sizes, **others)


class _Solved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor, b: Tensor) -> Tensor:
        lower, b = lower.contiguous(), b.contiguous()
        fits = lower.shape == (*b.shape[:-1], b.shape[-2]) and lower.dtype == b.dtype == torch.float32
        require(fits, "square matrices and right sides in float32")
        x = torch.empty_like(b)
        _solve(lower, b, x)
        ctx.save_for_backward(lower, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        lower, x = ctx.saved_tensors
        grad_b, grad_lower = grad.clone(memory_format=torch.contiguous_format), torch.empty_like(lower)
        _solve(lower, x, grad_b, grad_lower)
        return grad_lower, grad_b


def _solve(lower: Tensor, b: Tensor, x: Tensor, grad_lower: Tensor | None = None) -> None:
    size, width = b.shape[-2:]
    systems = b.numel() // (size * width)
    call("triangular", lower=lower, b=b, x=x, grad_lower=grad_lower, systems=systems, size=size, width=width)
