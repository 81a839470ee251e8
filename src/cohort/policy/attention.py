"""Attention of packed sequences, some of which continue a common prefix, with its own backward pass.

Tokens lie end to end, without padding. Every sequence attends causally to itself; one that continues a prefix also
attends to all of the prefix, whose keys and values are computed once for all that continue it:

    out_n = sum_j exp(q_n . k_j s - lse_n) v_j        lse_n = log sum_j exp(q_n . k_j s)

with j over the prefix's tokens and the sequence's own up to n. A kernel of ours goes over both at once; torch's compute
the two parts apart, which are added by their log-sum-exps, and in the backward pass each part takes the whole's output
and log-sum-exp, which makes its share exact.

Axis letters: N tokens, H query heads, K key-value heads, D a head's width, M tokens of prefixes, B sequences of a
bucket, T tokens of the longest of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.policy.kernels import Attention, UpdateKernels
from cohort.policy.layout import NEVER, Bucket, Continuation, Layout


def packed_attention(
    q_HND: Tensor,
    k_KND: Tensor,
    v_KND: Tensor,
    layout: Layout,
    *,
    scaling: float,
    prefix: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    cap: float | None = None,
    kernels: UpdateKernels | None = None,
) -> Tensor:
    """Attention as the module describes it. Differentiable in everything, the prefixes included.

    Args:
        q_HND, k_KND, v_KND: of the tokens; H is a multiple of K. What comes after those that the layout knows means
            nothing: zeros come of it.
        layout: which token belongs to what.
        scaling: s, multiplies the scores.
        prefix: keys and values of the prefixes, ``[K, M, D]`` each, laid end to end.
        window: tokens further back are not seen, the token itself counted in. None: all are.
        cap: scores become ``cap * tanh(scores / cap)``. None: they stay.
        kernels: what does it on a CPU, where there are such; else torch's kernels do.

    Returns:
        ``[H, N, D]``, in the dtype of ``v_KND``.
    """
    if window is not None and window >= layout.longest:
        window = None
    prefix_k, prefix_v = (None, None) if prefix is None else prefix
    if kernels is not None and cap is None and layout.work.items.shape[0] * k_KND.shape[0] >= torch.get_num_threads():
        native: Tensor = _Native.apply(  # type: ignore[no-untyped-call]
            q_HND, k_KND, v_KND, prefix_k, prefix_v, Attention(layout.work, scaling, window), kernels
        )
        return native
    filler = q_HND.shape[1] - layout.tokens
    if filler:
        q_HND, k_KND, v_KND = (part[:, : layout.tokens] for part in (q_HND, k_KND, v_KND))
    fused = q_HND.device.type == "cpu" or (window is None and v_KND.dtype in {torch.bfloat16, torch.float16})
    if cap is None and fused:
        out: Tensor = _TwoPart.apply(  # type: ignore[no-untyped-call]
            q_HND, k_KND, v_KND, prefix_k, prefix_v, layout, scaling, window
        )
        return functional.pad(out, (0, 0, 0, filler))
    dtype = kernel_dtype(v_KND)
    q, k, v = (part.to(dtype) for part in (q_HND, k_KND, v_KND))
    before = (None, None) if prefix is None else (prefix[0].to(dtype), prefix[1].to(dtype))
    out = explicit_attention(q, k, v, layout, scaling, before, window, cap).to(v_KND.dtype)
    return functional.pad(out, (0, 0, 0, filler))


def kernel_dtype(like: Tensor) -> torch.dtype:
    """What attention is computed in. On a CPU torch's backward pass is slower in bfloat16 than in float32, and less
    exact."""
    return torch.promote_types(like.dtype, torch.float32) if like.device.type == "cpu" else like.dtype


class _Native(torch.autograd.Function):
    """``packed_attention`` by the kernel, whose tensors lie token by token."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_k: Tensor | None,
        prefix_v: Tensor | None,
        attention: Attention,
        kernels: UpdateKernels,
    ) -> Tensor:
        # One dtype for each: of rotation and adapters some may come out wider than others.
        ctx.dtypes = [part.dtype for part in (q, k, v, prefix_k, prefix_v) if part is not None]
        q, k, v = _alike(q, k, v)
        prefix_k, prefix_v = _alike(prefix_k, prefix_v)
        out, lse = kernels.attend(attention, q, k, v, (prefix_k, prefix_v))
        ctx.save_for_backward(q, k, v, prefix_k, prefix_v, out, lse)
        ctx.rest = attention, kernels
        return out.transpose(0, 1).to(ctx.dtypes[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, prefix_k, prefix_v, out, lse = ctx.saved_tensors
        attention, kernels = ctx.rest
        grads = kernels.attend_grad(attention, _by_token(grad.to(q.dtype)), q, k, v, (prefix_k, prefix_v), out, lse)
        found = [part.transpose(0, 1).to(dtype) for part, dtype in zip(grads, ctx.dtypes, strict=True)]
        return *found, *(() if prefix_k is not None else (None, None)), None, None


def _by_token(part: Tensor) -> Tensor:
    """``[heads, N, D]`` to ``[N, heads, D]``, contiguous; as a rule it lies so."""
    return part.transpose(0, 1).contiguous()


def _alike(*parts: Any) -> Sequence[Any]:
    """``_by_token`` in the widest of their dtypes."""
    if parts[0] is None:
        return parts
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    return [_by_token(part.to(dtype)) for part in parts]


class _TwoPart(torch.autograd.Function):
    """``packed_attention`` over fused kernels, which keep no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_k: Tensor | None,
        prefix_v: Tensor | None,
        layout: Layout,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        given = q, k, v, prefix_k, prefix_v  # kept as they came: half as large, where they are in half precision
        dtype = kernel_dtype(v)
        q, k, v = (part.to(dtype) for part in (q, k, v))
        if prefix_k is not None and prefix_v is not None:
            prefix_k, prefix_v = prefix_k.to(dtype), prefix_v.to(dtype)
        out_HND, lse_HN = (
            torch.empty_like(q),
            q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32)),
        )
        for bucket in layout.buckets:
            mask = _own_mask(bucket, window, q)
            out, lse = _attend(bucket.take(q), bucket.take(k), bucket.take(v), scaling, mask, causal=True)
            bucket.put(out_HND, out)
            bucket.put(lse_HN, lse)
        for part in layout.continuations:
            assert prefix_k is not None
            assert prefix_v is not None
            seen = _prefix_seen(part, layout, window)
            keys, values = prefix_k[None, :, part.prefix], prefix_v[None, :, part.prefix]
            out, lse = _attend(q[None, :, part.tokens], keys, values, scaling, _additive(seen, q))
            if seen is not None:
                lse = lse.masked_fill(~seen.any(-1), -torch.inf)
            own_lse = lse_HN[:, part.tokens]
            whole = torch.logaddexp(own_lse, lse[0])
            out_HND[:, part.tokens].mul_((own_lse - whole).exp_()[..., None]).addcmul_(
                out[0], (lse[0] - whole).exp_()[..., None].to(out.dtype)
            )
            lse_HN[:, part.tokens] = whole
        out_HND = out_HND.to(given[2].dtype)
        ctx.save_for_backward(*given, out_HND, lse_HN)
        ctx.rest = layout, scaling, window
        return out_HND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_HND: Tensor) -> tuple[Tensor | None, ...]:
        *given, out_HND, lse_HN = ctx.saved_tensors
        layout, scaling, window = ctx.rest
        dtype = kernel_dtype(given[2])
        q, k, v, out_HND, grad_HND = (part.to(dtype) for part in (*given[:3], out_HND, grad_HND))
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for bucket in layout.buckets:
            lse, grad = bucket.hide_padding(bucket.take(lse_HN), bucket.take(grad_HND))
            mask = _own_mask(bucket, window, q)
            own_q, own_k, own_v, own_out = (bucket.take(each) for each in (q, k, v, out_HND))
            grads = _attend_backward(grad, own_q, own_k, own_v, own_out, lse, scaling, mask, causal=True)
            for target, values in zip((grad_q, grad_k, grad_v), grads, strict=True):
                bucket.put(target, values)
        if given[3] is None:
            return *_as([grad_q, grad_k, grad_v], given), None, None, None, None, None
        prefix_k, prefix_v = (part.to(dtype) for part in given[3:])
        grad_prefix_k, grad_prefix_v = torch.zeros_like(prefix_k), torch.zeros_like(prefix_v)
        for part in layout.continuations:
            seen = _prefix_seen(part, layout, window)
            lse = lse_HN[None, :, part.tokens]
            if seen is not None:
                lse = lse.masked_fill(~seen.any(-1), NEVER)
            grads = _attend_backward(
                grad_HND[None, :, part.tokens],
                q[None, :, part.tokens],
                prefix_k[None, :, part.prefix],
                prefix_v[None, :, part.prefix],
                out_HND[None, :, part.tokens],
                lse,
                scaling,
                _additive(seen, q),
            )
            grad_q[:, part.tokens] += grads[0][0]
            grad_prefix_k[:, part.prefix] += grads[1][0]
            grad_prefix_v[:, part.prefix] += grads[2][0]
        return *_as([grad_q, grad_k, grad_v, grad_prefix_k, grad_prefix_v], given), None, None, None


def _as(grads: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    return [grad.to(part.dtype) for grad, part in zip(grads, given, strict=False)]


def _own_mask(bucket: Bucket, window: int | None, like: Tensor) -> Tensor | None:
    """What a sequence does not see of itself beyond what is causal; None: that is all."""
    if window is None or window >= bucket.shape[1]:
        return None
    place_T = torch.arange(bucket.shape[1], device=like.device)
    back_TT = place_T[:, None] - place_T
    return _additive((back_TT >= 0) & (back_TT < window), like)


def _prefix_seen(part: Continuation, layout: Layout, window: int | None) -> Tensor | None:
    """Which of its prefix each token sees, boolean; None: all."""
    positions = layout.positions_N[part.tokens]
    length = part.prefix.stop - part.prefix.start
    if window is None:
        return None
    return positions[:, None] - torch.arange(length, device=positions.device) < window


def _additive(seen: Tensor | None, like: Tensor) -> Tensor | None:
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """``[B, H, T, D]`` output and ``[B, H, T]`` log-sum-exp of the kernel of the device. A mask includes causality."""
    causal = causal and mask is None
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=scaling)
    else:
        assert mask is None
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scaling)
    return out, lse


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scaling: float,
    mask: Tensor | None,
    *,
    causal: bool = False,
) -> Sequence[Tensor]:
    """Gradients of q, k and v, of the part of a whole whose output and log-sum-exp are given."""
    causal = causal and mask is None
    lse = lse.contiguous()
    if q.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads: Sequence[Tensor] = kernel(grad, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scaling)
        return grads
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
    return kernel(  # type: ignore[no-any-return]
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[:1], scale=scaling
    )


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    scaling: float,
    prefix: tuple[Tensor | None, Tensor | None] = (None, None),
    window: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """``packed_attention`` by its formula, sequence by sequence: for what the fused kernels cannot do (soft caps), and
    what they are tested against. Its memory grows with the scores."""
    share = q.shape[0] // k.shape[0]
    prefix_k, prefix_v = prefix
    wide = torch.promote_types(q.dtype, torch.float32)
    outs = []
    for s, length in enumerate(layout.lengths):
        own = slice(layout.starts[s], layout.starts[s + 1])
        keys, values = k[:, own], v[:, own]
        if prefix_k is not None and prefix_v is not None and layout.prefixes is not None:
            number = layout.prefixes[s]
            before = slice(layout.prefix_starts[number], layout.prefix_starts[number + 1])
            keys = torch.cat([prefix_k[:, before], keys], dim=1)
            values = torch.cat([prefix_v[:, before], values], dim=1)
        first = layout.before[s]
        place = torch.arange(first + length, device=q.device)
        back = place[first:, None] - place
        seen = (back >= 0) & (back < (window or math.inf))
        scores = (q[:, own] @ keys.repeat_interleave(share, 0).mT).to(wide) * scaling
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        weights = functional.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1).to(values.dtype)
        outs.append(weights @ values.repeat_interleave(share, 0))
    return torch.cat(outs, dim=1)
