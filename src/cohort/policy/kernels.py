"""The functions of update.c, on tensors: see there for the formulas."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.native import Unavailable, fields, load, threads_for
from cohort.policy.compute import ComputeModel

DTYPES = (torch.float32, torch.bfloat16)
"""What the kernels read and write."""


class _Norm(ctypes.Structure):
    _fields_ = (
        *fields("x update factor sum scale out", c_void_p),
        *fields("rows width x_half update_half out_half threads"),
        *fields("eps", c_float),
    )


class _NormGrad(ctypes.Structure):
    _fields_ = (
        *fields("x grad_out factor scale grad_sum grad_x grad_update grad_factor", c_void_p),
        *fields("rows width x_half grad_half threads"),
    )


class _Rotation(ctypes.Structure):
    _fields_ = (
        *fields("x cos sin out", c_void_p),
        *fields("rows heads width x_half out_half transposed threads"),
    )


class _Activation(ctypes.Structure):
    _fields_ = (
        *fields("gate up grad_out out grad_gate grad_up", c_void_p),
        *fields("count half gelu threads"),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        *fields("logits targets logps entropies collisions tops sums grads", c_void_p),
        *fields("rows vocabulary half threads"),
        *fields("factor", c_float),
    )


class _Packed(ctypes.Structure):
    _fields_ = (
        *fields("q k v prefix_k prefix_v out lse grad_out grad_q grad_k grad_v grad_prefix_k grad_prefix_v", c_void_p),
        *fields("sequences items scratch", c_void_p),
        *fields("item_count kv_heads group width padded longest prefix_tokens window half prefix_half scratch_size"),
        *fields("threads"),
        *fields("scaling", c_float),
    )


class Work(NamedTuple):
    """How a pass's sequences are shared out; see attention.c."""

    sequences: Tensor
    """``[S, 4]``: first token, tokens, first token of its prefix, tokens of that."""
    items: Tensor
    """``[items, 3]``: first sequence, the one after the last, slot."""
    tokens: int
    prefix_tokens: int
    slots: int
    longest: int
    """Tokens of a sequence and its prefix, at most."""


class Attention(NamedTuple):
    """One layer's, with what is fixed about it."""

    work: Work
    scaling: float
    window: int | None


def _at(values: Tensor | None) -> int | None:
    """Where a tensor's numbers are. C would take any others for its own."""
    if values is None:
        return None
    if not values.is_contiguous() or values.device.type != "cpu" or values.dtype not in (*DTYPES, torch.int64):
        raise TypeError(f"a contiguous tensor on the CPU was expected, got {values.dtype}, {values.stride()}")
    return values.data_ptr()


def _require(holds: bool, what: str) -> None:
    """Where numbers do not fit, C would read or write beyond them."""
    if not holds:
        raise ValueError(what)


def _half(values: Tensor | None) -> bool:
    return values is not None and values.dtype == torch.bfloat16


class UpdateKernels:
    """The library's functions. Tensors are contiguous, float32 or bfloat16, on the CPU; factors, scales, angles and
    statistics are float32.

    Raises:
        Unavailable: there is none here.
    """

    def __init__(self) -> None:
        library = load()
        self.lanes: int = library.cohort_lanes()
        """Numbers in a vector."""
        self._norm, self._norm_grad, self._rotate, self._gate, self._head = (
            getattr(library, f"cohort_{name}") for name in ("norm", "norm_grad", "rotate", "gate", "head")
        )
        self._packed_attention = library.cohort_packed_attention
        self._packed_attention.restype = None
        self._scratch_size = library.cohort_attention_scratch
        self._scratch_size.argtypes, self._scratch_size.restype = [c_int64] * 3, c_int64
        for function in (self._norm, self._norm_grad, self._rotate, self._gate, self._head):
            function.restype = None

    def norm(
        self, x: Tensor, update: Tensor | None, factor: Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of x and the update (x itself without one), its scales, and the norm in ``dtype``."""
        _require(factor.dtype == torch.float32 and factor.shape == x.shape[-1:], "a factor for each number of a row")
        _require(update is None or (x.dtype == torch.float32 and update.shape == x.shape), "sums are float32")
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        total = x if update is None else torch.empty_like(x)
        scale = x.new_empty(rows, dtype=torch.float32)
        out = torch.empty_like(x, dtype=dtype)
        call = _Norm(
            _at(x), _at(update), _at(factor), None if update is None else _at(total), _at(scale), _at(out),
            rows, width, _half(x), _half(update), _half(out), threads_for(x.numel()), eps,
        )  # fmt: skip
        self._norm(ctypes.byref(call))
        return total, scale, out

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
        """Gradients of the sum's parts, x and the update, and of the factor."""
        _require(grad_sum is None or grad_sum.dtype == torch.float32, "sums are float32")
        _require(grad_out.shape == x.shape, "gradients are of the norm's shape")
        width, threads = x.shape[-1], threads_for(x.numel())
        grad_x = torch.empty_like(x)
        grad_update = torch.empty_like(x, dtype=update_dtype) if update_dtype == torch.bfloat16 else None
        grad_factor = x.new_zeros(threads, width, dtype=torch.float32) if of_factor else None
        call = _NormGrad(
            _at(x), _at(grad_out), _at(factor), _at(scale), _at(grad_sum), _at(grad_x), _at(grad_update),
            _at(grad_factor), x.numel() // width, width, _half(x), _half(grad_out), threads,
        )  # fmt: skip
        self._norm_grad(ctypes.byref(call))
        if update_dtype == torch.float32:
            grad_update = grad_x
        return grad_x, grad_update, None if grad_factor is None else grad_factor.sum(0)

    def rotate(self, x_NHD: Tensor, cos_ND: Tensor, sin_ND: Tensor, dtype: torch.dtype, *, transposed: bool) -> Tensor:
        """Rotated, in ``dtype``."""
        rows, heads, width = x_NHD.shape
        _require(cos_ND.dtype == sin_ND.dtype == torch.float32, "angles are float32")
        _require(cos_ND.shape == sin_ND.shape == (rows, width), "an angle for each number of a head")
        out = torch.empty_like(x_NHD, dtype=dtype)
        call = _Rotation(
            _at(x_NHD), _at(cos_ND), _at(sin_ND), _at(out),
            rows, heads, width, _half(x_NHD), _half(out), transposed, threads_for(x_NHD.numel()),
        )  # fmt: skip
        self._rotate(ctypes.byref(call))
        return out

    def gate(self, gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
        """Activated. The count of numbers is a multiple of ``lanes``."""
        _require(gate.dtype == up.dtype and gate.shape == up.shape, "gate and up are alike")
        out, count = torch.empty_like(gate), gate.numel()
        call = _Activation(_at(gate), _at(up), None, _at(out), None, None, count, _half(gate), gelu, threads_for(count))
        self._gate(ctypes.byref(call))
        return out

    def gate_grad(self, gate: Tensor, up: Tensor, grad_out: Tensor, *, gelu: bool) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""
        _require(gate.dtype == up.dtype == grad_out.dtype and gate.shape == grad_out.shape, "gradients are alike")
        grads, count = (torch.empty_like(gate), torch.empty_like(up)), gate.numel()
        call = _Activation(
            _at(gate), _at(up), _at(grad_out), None, *map(_at, grads), count, _half(gate), gelu, threads_for(count)
        )
        self._gate(ctypes.byref(call))
        return grads

    def attend(
        self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, prefix: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exps, ``[N, H, D]`` and ``[N, H]``.

        Args:
            attention: the layer's.
            q, k, v: ``[N, H, D]`` and ``[N, K, D]`` twice.
            prefix: keys and values of the prefixes, ``[M, K, D]`` each, or None and None.
        """
        out, lse = _zeros_after(q, attention.work.tokens), q.new_empty(q.shape[:2], dtype=torch.float32)
        self._attend(attention, q, k, v, prefix, out, lse, {})
        return out, lse

    def attend_grad(
        self,
        attention: Attention,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: Sequence[Tensor | None],
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, ...]:
        """Gradients of q, k, v and, in float32, of the prefixes' keys and values, where there are prefixes."""
        tokens = attention.work.tokens
        grads = {f"grad_{name}": _zeros_after(part, tokens) for name, part in zip("qkv", (q, k, v), strict=True)}
        if prefix[0] is not None:
            shape = (attention.work.slots, *prefix[0].shape)
            grads |= {f"grad_prefix_{part}": q.new_zeros(shape, dtype=torch.float32) for part in "kv"}
        self._attend(attention, q, k, v, prefix, out, lse, {"grad_out": grad, **grads})
        slotted = [grads[name] for name in ("grad_prefix_k", "grad_prefix_v") if name in grads]
        return *list(grads.values())[:3], *(part[0] if len(part) == 1 else part.sum(0) for part in slotted)

    def _attend(
        self,
        attention: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix: Sequence[Tensor | None],
        out: Tensor,
        lse: Tensor,
        grads: dict[str, Tensor],
    ) -> None:
        work, threads, width = attention.work, torch.get_num_threads(), q.shape[-1]
        (tokens, heads, _), kv_heads = q.shape, k.shape[1]
        _require(q.dtype == k.dtype == v.dtype == out.dtype, "queries, keys and values of one dtype")
        _require(k.shape == v.shape == (tokens, kv_heads, width), "keys and values of one width and number of tokens")
        _require(heads % kv_heads == 0 and tokens >= work.tokens, "as many tokens and heads as there should be")
        of_prefix = (work.prefix_tokens, kv_heads, width)
        held = [part for part in prefix if part is not None]
        _require(bool(held) or not work.prefix_tokens, "the keys and values of the prefixes")
        _require(all(part.shape == of_prefix and part.dtype == held[0].dtype for part in held), "prefixes' alike")
        padded = -(-width // self.lanes) * self.lanes
        size = self._scratch_size(work.longest, padded, bool(grads))
        scratch = q.new_empty(threads, size, dtype=torch.float32)
        prefix_k, prefix_v = prefix
        call = _Packed(
            q=_at(q), k=_at(k), v=_at(v), prefix_k=_at(prefix_k), prefix_v=_at(prefix_v), out=_at(out), lse=_at(lse),
            sequences=_at(work.sequences), items=_at(work.items), scratch=_at(scratch),
            item_count=len(work.items), kv_heads=k.shape[1], group=q.shape[1] // k.shape[1], width=width,
            padded=padded, longest=work.longest, prefix_tokens=0 if prefix_k is None else len(prefix_k),
            window=attention.window or 0, half=_half(q), prefix_half=_half(prefix_k), scratch_size=size,
            threads=threads, scaling=attention.scaling, **{name: _at(values) for name, values in grads.items()},
        )  # fmt: skip
        self._packed_attention(ctypes.byref(call))

    def head_statistics(self, logits_NV: Tensor, targets_N: Tensor, factor: float, found_5N: Tensor) -> None:
        """Fill in log-probs, entropies, collision probabilities; and the largest score and the sum, for the gradient.
        ``found_5N`` is float32, its rows contiguous."""
        self._of_head(logits_NV, targets_N, [_at(part) for part in found_5N], None, factor)

    def head_gradient(
        self, logits_NV: Tensor, targets_N: Tensor, factor: float, tops_N: Tensor, sums_N: Tensor, grads_N: Tensor
    ) -> None:
        """Overwrite logits with their gradient."""
        self._of_head(logits_NV, targets_N, [None, None, None, _at(tops_N), _at(sums_N)], _at(grads_N), factor)

    def _of_head(
        self, logits_NV: Tensor, targets_N: Tensor, parts: list[int | None], grads: int | None, factor: float
    ) -> None:
        rows, vocabulary = logits_NV.shape
        threads = threads_for(logits_NV.numel())
        call = _Head(_at(logits_NV), _at(targets_N), *parts, grads, rows, vocabulary, _half(logits_NV), threads, factor)
        self._head(ctypes.byref(call))


def _zeros_after(like: Tensor, count: int) -> Tensor:
    """To be filled in up to a place, zeros from there on."""
    made = torch.empty_like(like)
    made[count:] = 0
    return made


def kernels_for(model: ComputeModel) -> tuple[UpdateKernels | None, str]:
    """The kernels for a policy's passes; else None, and why."""
    without = why_no_kernels(model) if model.native_kernels else "switched off"
    return (None, without) if without else (UpdateKernels(), "")


def why_no_kernels(model: ComputeModel) -> str:
    """What keeps a policy from native kernels, its sampler's or its passes'; empty: nothing does."""
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
