"""Short causal convolutions by channel over packed sequences that continue prefixes, one operation with what is around
them in recurrent layers: gates and SiLU. By the kernels of recurrent.c, or by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.native import call, require, threads_for
from cohort.policy.chunks import Tails


def convolve(
    x_TH: Tensor,
    tails_S: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tails: Tails,
    *,
    silu: bool = False,
    gated: bool = False,
    native: bool = False,
) -> tuple[Tensor, Tensor]:
    """``y_t = bias + sum_j weight[:, j] x_{t + j - count}``, and SiLU of it.

    Args:
        x_TH: x. Tokens after those of the sequences are padding, and 0 in the output.
        tails_S: x before each sequence, ``[S, count, H]``; for native kernels in float32.
        weight, bias: ``[H, count + 1]`` and ``[H]``.
        tails: the sequences.
        silu: whether SiLU follows.
        gated: whether x has ``3 H`` columns, a gate, a gate and x: the first multiplies x, the second the output.
        native: whether the kernels of recurrent.c compute it, in float32.

    Returns:
        y, and the new tails: the last ``count`` of each sequence with what came before.
    """
    if native:
        bias = None if bias is None else bias.float()
        both: tuple[Tensor, Tensor] = _Convolution.apply(  # type: ignore[no-untyped-call]
            x_TH, tails_S, weight.T.float(), bias, tails.starts, silu, gated
        )
        return both
    ends: list[Tensor] = []

    def inner(values: Tensor) -> Tensor:
        out, after = tails.convolve(values, tails_S, weight)
        ends.append(after)
        return out

    return _by_torch(inner, x_TH, tails.tokens, bias, silu=silu, gated=gated), ends[0]


def convolve_step(
    x_SH: Tensor, tails_S: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False, gated: bool = False
) -> Tensor:
    """One token of each sequence, by torch; see ``convolve``. Moves ``tails_S`` on."""

    def inner(values: Tensor) -> Tensor:
        whole = torch.cat([tails_S.to(values.dtype), values[:, None]], 1)
        tails_S.copy_(whole[:, 1:])
        return (whole.to(weight.dtype) * weight.T).sum(1)

    return _by_torch(inner, x_SH, len(tails_S), bias, silu=silu, gated=gated)


def _by_torch(
    inner: Callable[[Tensor], Tensor], x_TH: Tensor, tokens: int, bias: Tensor | None, *, silu: bool, gated: bool
) -> Tensor:
    """What is around a convolution."""
    after, values = None, x_TH[:tokens]
    if gated:
        before, after, values = values.chunk(3, -1)
        values = before * values
    out = inner(values)
    out = out if bias is None else out + bias
    out = functional.silu(out) if silu else out
    out = (out if after is None else after * out).to(x_TH.dtype)
    return functional.pad(out, (0, 0, 0, len(x_TH) - tokens)) if len(x_TH) > tokens else out


def _columns(x: Tensor, gated: bool) -> dict[str, int]:
    """The addresses of x and its gates, and the numbers between rows."""
    names = ("before", "after", "x") if gated else ("x",)
    step = x.shape[-1] // len(names) * x.itemsize
    return {name: x.data_ptr() + index * step for index, name in enumerate(names)}


def convolve_into(
    out_TH: Tensor,
    new_tails: Tensor,
    x_TH: Tensor,
    tails: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    *,
    silu: bool = False,
    gated: bool = False,
) -> None:
    """``convolve`` by the native kernel, without gradients.

    Args:
        out_TH: y, contiguous. Rows after those of the sequences are not written.
        new_tails: float32; may be ``tails``.
        x_TH: its rows may lie apart.
        tails: float32.
        weight: ``[count + 1, H]``, float32.
        bias: float32.
        starts: the first token of each sequence, and the end of the last one.
    """
    (sequences, count, channels), wide = tails.shape, {tails.dtype, new_tails.dtype, weight.dtype}
    columns = channels * (3 if gated else 1)
    fits = x_TH.shape[1] == columns and x_TH.stride(1) == 1 and len(starts) == sequences + 1
    require(fits and weight.shape == (count + 1, channels) and new_tails.shape == tails.shape, "tails of the channels")
    require(out_TH.shape == (len(x_TH), channels) and out_TH.dtype == x_TH.dtype, "an output for each token")
    require(wide == {torch.float32} and (bias is None or bias.dtype == torch.float32), "float32")
    call(
        "convolve", out=out_TH, weight=weight.contiguous(), bias=bias, tails=tails, new_tails=new_tails, starts=starts,
        **_columns(x_TH, gated), stride=x_TH.stride(0), sequences=sequences, channels=channels, count=count, silu=silu,
        threads=threads_for(out_TH.numel()),
    )  # fmt: skip


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tails: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool, gated: bool
    ) -> tuple[Tensor, Tensor]:
        x = x if x.stride(1) == 1 else x.contiguous()
        tails, weight = tails.contiguous(), weight.contiguous()
        out, new_tails = x.new_empty(len(x), tails.shape[2]), torch.empty_like(tails)
        convolve_into(out, new_tails, x, tails, weight, bias, starts, silu=silu, gated=gated)
        out[int(starts[-1]) :] = 0
        ctx.save_for_backward(x, tails, weight, bias, starts)
        ctx.silu, ctx.gated = silu, gated
        ctx.set_materialize_grads(False)
        return out, new_tails

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_new_tails: Tensor | None) -> tuple[Tensor | None, ...]:
        x, tails, weight, bias, starts = ctx.saved_tensors
        (sequences, count, channels), threads = tails.shape, threads_for(x.numel())
        grad = x.new_zeros(len(x), channels) if grad is None else grad.contiguous()
        grad_new_tails = None if grad_new_tails is None else grad_new_tails.contiguous()
        grad_x, grad_tails = torch.empty(x.shape, dtype=x.dtype), torch.empty_like(tails)
        grad_x[int(starts[-1]) :] = 0
        grad_weight = tails.new_zeros(threads, count + 2, channels)
        call(
            "convolve_grad", grad_out=grad, weight=weight, bias=bias, tails=tails, grad_new_tails=grad_new_tails,
            starts=starts, grad_tails=grad_tails, grad_weight=grad_weight, **_columns(x, ctx.gated),
            **{f"grad_{name}": at for name, at in _columns(grad_x, ctx.gated).items()}, stride=x.stride(0),
            grad_stride=grad_x.stride(0), sequences=sequences, channels=channels, count=count, silu=ctx.silu,
            threads=threads,
        )  # fmt: skip
        *of_weight, of_bias = grad_weight.sum(0)
        return grad_x, grad_tails, torch.stack(of_weight), None if bias is None else of_bias, None, None, None
