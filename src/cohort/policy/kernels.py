"""The kernels of an update, on tensors. The formulas are in ``native/update.c`` and ``native/attention.c``."""

from __future__ import annotations

from ctypes import c_int64
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.native import DTYPES, Kernel, Unavailable, is_half, load, threads_for
from cohort.policy.compute import ComputeModel
from cohort.policy.layout import Work


class Attention(NamedTuple):
    """The attention of one layer, without its tensors."""

    work: Work
    scaling: float
    window: int | None


AttentionTensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Queries, keys and values, ``[T, A, D]`` (keys and values may have fewer heads), and the prefixes' keys and values,
``[X, A, D]``, or None and None."""


def _require(holds: bool, what: str) -> None:
    """Check shapes and dtypes: with others, C would read or write out of bounds."""
    if not holds:
        raise ValueError(what)


class UpdateKernels:
    """The functions of the library. Tensors are contiguous, float32 or bfloat16, on the CPU; factors, scales, angles
    and statistics are float32.

    Raises:
        Unavailable: the library cannot be built or loaded.
    """

    def __init__(self) -> None:
        library = load()
        self.lanes: int = library.cohort_lanes()
        """Numbers in a vector."""
        self._norm = Kernel(
            "norm", "x update factor sum scale out", "rows width x_half update_half out_half threads", "eps"
        )
        self._norm_grad = Kernel(
            "norm_grad",
            "x grad_out factor scale grad_sum grad_x grad_update grad_factor",
            "rows width x_half grad_half threads",
        )
        self._rotate = Kernel("rotate", "x cos sin out", "rows heads width x_half out_half transposed threads")
        self._gate = Kernel("gate", "gate up grad_out out grad_gate grad_up", "count half gelu threads")
        self._head = Kernel(
            "head",
            "logits targets logps entropies collisions tops sums grads",
            "rows vocabulary half threads",
            "factor",
        )
        self._attention = Kernel(
            "packed_attention",
            "q k v prefix_k prefix_v out lse grad_out grad_q grad_k grad_v grad_prefix_k grad_prefix_v "
            "sequences items scratch",
            "item_count kv_heads group width padded longest prefix_tokens window half prefix_half scratch_size threads",
            "scaling",
        )
        self._scratch_size = library.cohort_attention_scratch
        self._scratch_size.argtypes, self._scratch_size.restype = [c_int64] * 3, c_int64

    def norm(
        self, x: Tensor, update: Tensor | None, factor: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of x and the update (x itself without an update), its scales, and its norm in ``dtype``."""
        _require(factor.dtype == torch.float32 and factor.shape == x.shape[-1:], "a factor for each number of a row")
        _require(update is None or (x.dtype == torch.float32 and update.shape == x.shape), "sums are float32")
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        total = None if update is None else torch.empty_like(x)
        scale, out = x.new_empty(rows, dtype=torch.float32), torch.empty_like(x, dtype=dtype)
        self._norm(
            x=x, update=update, factor=factor, sum=total, scale=scale, out=out, rows=rows, width=width, eps=eps,
            x_half=is_half(x), update_half=is_half(update), out_half=is_half(out), threads=threads_for(x.numel()),
        )  # fmt: skip
        return x if total is None else total, scale, out

    def norm_grad(
        self,
        x: Tensor,
        scale: Tensor,
        factor: Tensor,
        grad_out: Tensor,
        grad_sum: Tensor | None,
        update_dtype: torch.dtype | None,
        *,
        of_factor: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Gradients of x, of the update (None if ``update_dtype`` is) and of the factor."""
        _require(grad_sum is None or grad_sum.dtype == torch.float32, "sums are float32")
        _require(grad_out.shape == x.shape, "gradients have the shape of the norm")
        width, threads = x.shape[-1], threads_for(x.numel())
        grad_x = torch.empty_like(x)
        grad_update = torch.empty_like(x, dtype=update_dtype) if update_dtype == torch.bfloat16 else None
        grad_factor = x.new_zeros(threads, width, dtype=torch.float32) if of_factor else None
        self._norm_grad(
            x=x, grad_out=grad_out, factor=factor, scale=scale, grad_sum=grad_sum, grad_x=grad_x,
            grad_update=grad_update, grad_factor=grad_factor, rows=x.numel() // width, width=width, x_half=is_half(x),
            grad_half=is_half(grad_out), threads=threads,
        )  # fmt: skip
        if update_dtype == torch.float32:
            grad_update = grad_x
        return grad_x, grad_update, None if grad_factor is None else grad_factor.sum(0)

    def rotate(self, x_TAD: Tensor, cos_TD: Tensor, sin_TD: Tensor, dtype: torch.dtype, *, transposed: bool) -> Tensor:
        """The rotated heads, in ``dtype``."""
        rows, heads, width = x_TAD.shape
        _require(cos_TD.dtype == sin_TD.dtype == torch.float32, "angles are float32")
        _require(cos_TD.shape == sin_TD.shape == (rows, width), "an angle for each number of a head")
        out = torch.empty_like(x_TAD, dtype=dtype)
        self._rotate(
            x=x_TAD, cos=cos_TD, sin=sin_TD, out=out, rows=rows, heads=heads, width=width, x_half=is_half(x_TAD),
            out_half=is_half(out), transposed=transposed, threads=threads_for(x_TAD.numel()),
        )  # fmt: skip
        return out

    def gate(self, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """The activated gate times ``up``."""
        out = torch.empty_like(gate)
        self._activate(gate, up, gelu, out=out)
        return out

    def gate_grad(self, gate: Tensor, up: Tensor, grad_out: Tensor, *, gelu: bool) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        _require(gate.dtype == grad_out.dtype and gate.shape == grad_out.shape, "gradients like the gate")
        grads = torch.empty_like(gate), torch.empty_like(up)
        self._activate(gate, up, gelu, grad_out=grad_out, grad_gate=grads[0], grad_up=grads[1])
        return grads

    def _activate(self, gate: Tensor, up: Tensor, gelu: bool, **others: Tensor) -> None:
        _require(gate.dtype == up.dtype and gate.shape == up.shape, "gate and up of one shape and dtype")
        count = gate.numel()
        self._gate(gate=gate, up=up, count=count, half=is_half(gate), gelu=gelu, threads=threads_for(count), **others)

    def attend(self, attention: Attention, tensors: AttentionTensors) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exps, ``[T, A, D]`` and ``[T, A]``."""
        q = tensors[0]
        out, lse = _zeros_after(q, attention.work.tokens), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._attend(attention, tensors, out, lse)
        return out, lse

    def attend_grad(
        self, attention: Attention, tensors: AttentionTensors, out: Tensor, lse: Tensor, grad: Tensor
    ) -> list[Tensor]:
        """Gradients of q, k, v and, in float32, of the prefixes' keys and values if there are prefixes."""
        q, k, v, prefix_k, _ = tensors
        grads = [_zeros_after(part, attention.work.tokens) for part in (q, k, v)]
        if prefix_k is not None:
            shape = (attention.work.slots, *prefix_k.shape)
            grads += [q.new_zeros(shape, dtype=torch.float32) for _ in range(2)]
        names = ("grad_q", "grad_k", "grad_v", "grad_prefix_k", "grad_prefix_v")
        self._attend(attention, tensors, out, lse, grad_out=grad, **dict(zip(names, grads, strict=False)))
        return [*grads[:3], *(part[0] if len(part) == 1 else part.sum(0) for part in grads[3:])]

    def _attend(
        self, attention: Attention, tensors: AttentionTensors, out: Tensor, lse: Tensor, **grads: Tensor
    ) -> None:
        q, k, v, prefix_k, prefix_v = tensors
        work, threads = attention.work, torch.get_num_threads()
        (tokens, heads, width), kv_heads = q.shape, k.shape[1]
        _require(q.dtype == k.dtype == v.dtype == out.dtype, "queries, keys and values of one dtype")
        _require(k.shape == v.shape == (tokens, kv_heads, width), "keys and values of one width and number of tokens")
        _require(heads % kv_heads == 0 and tokens >= work.tokens, "the heads and tokens of the layout")
        prefix = [part for part in (prefix_k, prefix_v) if part is not None]
        _require(bool(prefix) or not work.prefix_tokens, "the keys and values of the prefixes")
        shape = (work.prefix_tokens, kv_heads, width)
        _require(all(part.shape == shape and part.dtype == prefix[0].dtype for part in prefix), "prefixes alike")
        padded = -(-width // self.lanes) * self.lanes
        size = self._scratch_size(work.longest, padded, bool(grads))
        self._attention(
            q=q, k=k, v=v, prefix_k=prefix_k, prefix_v=prefix_v, out=out, lse=lse, sequences=work.sequences,
            items=work.items, scratch=q.new_empty(threads, size, dtype=torch.float32), item_count=len(work.items),
            kv_heads=kv_heads, group=heads // kv_heads, width=width, padded=padded, longest=work.longest,
            prefix_tokens=0 if prefix_k is None else len(prefix_k), window=attention.window or 0, half=is_half(q),
            prefix_half=is_half(prefix_k), scratch_size=size, threads=threads, scaling=attention.scaling, **grads,
        )  # fmt: skip

    def head_statistics(self, logits_CV: Tensor, targets_C: Tensor, factor: float, found_5C: Tensor) -> None:
        """Write log-probs, entropies and collision probabilities; and, for the gradient, the largest score and the sum.
        ``found_5C`` is float32 with contiguous rows."""
        logps, entropies, collisions, tops, sums = found_5C
        self._of_head(
            logits_CV, targets_C, factor, logps=logps, entropies=entropies, collisions=collisions, tops=tops, sums=sums
        )

    def head_gradient(
        self, logits_CV: Tensor, targets_C: Tensor, factor: float, tops_C: Tensor, sums_C: Tensor, grads_C: Tensor
    ) -> None:
        """Overwrite logits with their gradient."""
        self._of_head(logits_CV, targets_C, factor, tops=tops_C, sums=sums_C, grads=grads_C)

    def _of_head(self, logits_CV: Tensor, targets_C: Tensor, factor: float, **others: Tensor) -> None:
        rows, vocabulary = logits_CV.shape
        self._head(
            logits=logits_CV, targets=targets_C, rows=rows, vocabulary=vocabulary, half=is_half(logits_CV),
            threads=threads_for(logits_CV.numel()), factor=factor, **others,
        )  # fmt: skip


def _zeros_after(like: Tensor, count: int) -> Tensor:
    """An uninitialised tensor with zeros from index ``count`` on."""
    made = torch.empty_like(like)
    made[count:] = 0
    return made


def kernels_for(model: ComputeModel) -> tuple[UpdateKernels | None, str]:
    """The kernels for a model's passes; else None and the reason."""
    reason = why_no_kernels(model) if model.native_kernels else "switched off"
    return (None, reason) if reason else (UpdateKernels(), "")


def why_no_kernels(model: ComputeModel) -> str:
    """Why sampling and passes cannot use native kernels. Empty: they can."""
    compute, master = model.precision.compute, model.precision.master
    if model.device.type != "cpu":
        return f"the device is {model.device.type}"
    if master != torch.float32 or compute not in DTYPES:
        return f"the precision is {model.precision}"
    try:
        load()
    except Unavailable as reason:
        return str(reason)
    return ""
