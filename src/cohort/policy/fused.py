"""What a layer computes between its matrix products, each as one differentiable operation.

On a CPU these are the kernels of update.c, which read the numbers once and keep only what their backward passes need.
On CUDA torch compiles each operation to one kernel forward and one backward. Elsewhere, and in float64, torch's own
operations compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.native import call, require, threads_for, whole_rows
from cohort.policy.parts import need

MOST_GRAPHS = 64
"""Most graphs of a compiled operation: it has one for each dtype, rank and size that is fixed, with gradients or
without. (torch's own limit is 8; beyond it, it runs operations one by one.)"""


class Fused:
    """The operations; see the module.

    Args:
        native: whether the native kernels compute them; otherwise torch does.
        wide: dtype of the residual stream and of sums: float32 or float64.
        narrow: dtype of the factors of matrix products.
        compiled: whether torch compiles them, without native kernels.
    """

    def __init__(self, native: bool, wide: torch.dtype, narrow: torch.dtype, *, compiled: bool = False) -> None:
        self.native, self.wide, self.narrow = native, wide, narrow
        self._by_torch: Callable[[Any], Any] = compiled_once if compiled else lambda function: function
        self._single = not (native or compiled)

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
            return self._by_torch(_normed)(x, factor, eps, dtype)  # type: ignore[no-any-return]
        out: Tensor = _AddNorm.apply(x, None, factor, eps, dtype)  # type: ignore[no-untyped-call]
        return out

    def add_norm(
        self, x: Tensor, update: Tensor | None, factor: Tensor, eps: float, *, centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The residual stream with an update added, and its norm in the narrow dtype."""
        if update is None or centred:
            x = x if update is None else x + update
            return x, self.norm(x, factor, eps, centred=centred)
        if not self.native:
            return self._by_torch(_add_normed)(x, update, factor, eps, self.narrow)  # type: ignore[no-any-return]
        pair: tuple[Tensor, Tensor] = _AddNorm.apply(x, update, factor, eps, self.narrow)  # type: ignore[no-untyped-call]
        return pair

    def rotate(
        self, q_TAD: Tensor, k_TAD: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, neighbours: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Rotary embedding of the first R dimensions of queries and keys in the narrow dtype: ``[x1, x2] -> [x1 cos -
        x2 sin, x2 cos + x1 sin]`` with the halves x1 and x2 of a head, or with neighbours x1 and x2."""
        turn = _Rotate.apply if self.native else self._by_torch(_turned)
        # Few tokens of a decode step: fewer operations.
        joined = self._single and not torch.is_grad_enabled()
        parts = [torch.cat([q_TAD, k_TAD], 1)] if joined else [q_TAD, k_TAD]
        turned = [turn(part, cos_TR, sin_TR, self.narrow, neighbours) for part in parts]
        q, k = turned[0].split([q_TAD.shape[1], k_TAD.shape[1]], 1) if joined else turned
        return q, k

    def gate(self, *parts: Tensor, gelu: bool, wide: bool = False) -> Tensor:
        """``SiLU(gate) * up``, or with the tanh form of GELU, in the narrow dtype, or in the wide one.

        Args:
            parts: gate and up, or one tensor that holds them side by side.
            gelu: the activation is GELU.
            wide: return the wide dtype.
        """
        dtype = self.wide if wide else self.narrow
        parts = tuple(part.to(dtype) for part in parts)  # adapters may return a wider dtype
        if self.native:
            out: Tensor = _Gate.apply(gelu, *parts)  # type: ignore[no-untyped-call]
            return out
        return self._by_torch(_active)(*_gate_and_up(parts), gelu)  # type: ignore[no-any-return]


def _normed(x: Tensor, factor: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return functional.rms_norm(x.to(factor.dtype), x.shape[-1:], factor, eps).to(dtype)


def _add_normed(x: Tensor, update: Tensor, factor: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = x + update
    return x, _normed(x, factor, eps, dtype)


def _turned(x_TAD: Tensor, cos_TR: Tensor, sin_TR: Tensor, dtype: torch.dtype, neighbours: bool) -> Tensor:
    return rotated(x_TAD.to(cos_TR.dtype), cos_TR[:, None], sin_TR[:, None], neighbours=neighbours).to(dtype)


def _active(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    activation = partial(functional.gelu, approximate="tanh") if gelu else functional.silu
    return activation(gate) * up


@torch.enable_grad()
def try_compiled(device: torch.device, narrow: torch.dtype) -> None:
    """Raise what compiling the operations or running them forward and backward raises, or ``UnsupportedModel`` if they
    then compute something else."""
    x = torch.linspace(-2, 2, 24, dtype=torch.float32, device=device).view(3, 2, 4)
    half, factor, angles = x.to(narrow), x[0, 0], (x[:, 0].cos(), x[:, 0].sin())
    cases: tuple[tuple[Callable[..., Any], tuple[Tensor, ...], tuple[Any, ...]], ...] = (
        (_normed, (x, factor), (1e-6, narrow)),
        (_add_normed, (x, half, factor), (1e-6, narrow)),
        (_turned, (half, *angles), (narrow, False)),
        (_active, (half, half), (False,)),
    )
    for function, given, rest in cases:
        found = []
        for run in (function, compiled_once(function)):
            leaves = [part.detach().clone().requires_grad_() for part in given]
            out = run(*leaves, *rest)
            outs = out if isinstance(out, tuple) else (out,)
            total = torch.stack([part.float().square().sum() for part in outs]).sum()
            found.append([*outs, *torch.autograd.grad(total, leaves)])
        # Rounding between operations differs: bfloat16 has 8 bits.
        alike = [torch.allclose(a.float(), b.float(), 2**-5, 2**-5) for a, b in zip(*found, strict=True)]
        need(all(alike), f"{function.__name__} computes something else when it is compiled")


@cache
def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation, compiled for any number of tokens, the first axis of tensors that have two axes or more. Other
    sizes and settings are constants of a graph."""
    from torch import _dynamo  # which takes seconds to import

    settings: dict[str, Any] = {"dynamic": False}
    if "recompile_limit" in signature(torch.compile).parameters:  # of newer versions, whose config holds in one thread:
        settings["recompile_limit"] = MOST_GRAPHS  # CUDA's backward passes, which recompute, run in others
    else:
        _dynamo.config.recompile_limit = max(_dynamo.config.recompile_limit, MOST_GRAPHS)
    compiled = torch.compile(function, **settings)

    def run(*given: Any) -> Any:
        for part in given:
            if isinstance(part, Tensor) and part.ndim > 1:
                _dynamo.maybe_mark_dynamic(part, 0)
        return compiled(*given)

    return run


def uncompiled() -> AbstractContextManager[None]:
    """A block in which operations are not compiled: what compiled ones keep serves one backward pass only."""
    return torch.compiler.set_stance("force_eager") if compiled_once.cache_info().currsize else nullcontext()


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


def split_gate(q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Queries that each have a gate beside them, ``[T, A 2 D]``, and those gates: ``[T, A D]`` each."""
    parts = q.unflatten(-1, (-1, 2, width))
    return parts[:, :, 0].flatten(1), parts[:, :, 1].flatten(1)


def gated(out_T: Tensor, gate_TW: Tensor | None) -> Tensor:
    """An attention's output, ``[T, ...]``, times the sigmoid of its gate; ``[T, W]``."""
    out_TW = out_T.flatten(1)
    return out_TW if gate_TW is None else out_TW * gate_TW.sigmoid()


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
    (rows, heads, width), rotated = x_TAD.shape, cos_TR.shape[1]
    x_TAD = whole_rows(x_TAD)
    require(cos_TR.dtype == sin_TR.dtype == torch.float32, "angles are float32")
    fits = rotated <= width and rotated % 2 == 0
    require(fits and cos_TR.shape == sin_TR.shape == (rows, rotated), "an angle for each rotated number")
    out = torch.empty(x_TAD.shape, dtype=dtype)
    sizes = {"rows": rows, "heads": heads, "width": width, "stride": x_TAD.stride(0), "rotated": rotated}
    call("rotate", ["x"], x=x_TAD, cos=cos_TR.contiguous(), sin=sin_TR.contiguous(), out=out, **sizes, **flags)
    return out


class _Gate(torch.autograd.Function):
    """``Fused.gate``. The gradient of gate and up side by side is one tensor, as the product before them takes it."""

    @staticmethod
    def forward(ctx: Any, gelu: bool, *parts: Tensor) -> Tensor:
        parts = tuple(part.contiguous() for part in parts)
        ctx.save_for_backward(*parts)
        ctx.gelu = gelu
        gate, up = _gate_and_up(parts)
        require(gate.dtype == up.dtype and gate.shape == up.shape, "gate and up of one shape and dtype")
        out = torch.empty(gate.shape, dtype=gate.dtype)
        _activate(gelu, out=out, gate=gate, up=up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        parts = ctx.saved_tensors
        grads = tuple(torch.empty_like(part) for part in parts)
        (gate, up), (grad_gate, grad_up) = _gate_and_up(parts), _gate_and_up(grads)
        _activate(ctx.gelu, grad_out=grad.contiguous(), gate=gate, up=up, grad_gate=grad_gate, grad_up=grad_up)
        return None, *grads


def _gate_and_up(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Both, of two tensors or of one that holds them side by side."""
    return parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)


def _activate(gelu: bool, **given: Tensor) -> None:
    """The kernel, forward or backward, on tensors of one shape."""
    given = {name: part.view(-1, part.shape[-1]) for name, part in given.items()}
    gate = given["gate"]
    call("gate", given, **given, rows=len(gate), width=gate.shape[-1], stride=gate.stride(0), gelu=gelu)
