"""Attention of packed sequences, some of which continue a common prefix, with its own backward pass.

Tokens lie end to end, without padding. Every sequence attends causally to itself. A sequence that continues a prefix
also attends to the whole prefix, whose keys and values are computed once for all sequences that continue it:

    out_t = sum_j exp(q_t . k_j s - lse_t) v_j        lse_t = log sum_j exp(q_t . k_j s)

with j over the prefix's tokens and the sequence's tokens up to t. The native kernel computes both parts at once. With
torch's kernels each part is computed by itself and the two are added by their log-sum-exps; in the backward pass each
part receives the output and the log-sum-exp of the whole, so that its gradients are exact. On CUDA, flash.py does so
with torch's flash attention of sequences that lie end to end. A sink, a score per head that has no value, is a term of
the log-sum-exp in the same way.

Axis letters: T tokens, X prefix tokens, A attention heads (keys and values may have fewer), D head dimension, J and W
sequences and width of a padded bucket.
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

from cohort.native import Work, attend, require
from cohort.policy.device import kind_of
from cohort.policy.flash import add_sinks, can_flash, flash_attention, sinks_gradient
from cohort.policy.layout import NEVER, Continuation, Layout

BLOCK = 2048
"""Keys of a sequence that the native kernel copies at a time, and keys of a prefix that torch's kernel gets at a time:
copies, masks and gradients of all would grow with the sequence, and leave the cache."""


def packed_attention(
    q_ATD: Tensor,
    k_ATD: Tensor,
    v_ATD: Tensor,
    layout: Layout,
    *,
    scaling: float,
    prefix: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
    native: bool = False,
    drawn_N: Tensor | None = None,
) -> Tensor:
    """Attention as the module describes it. Differentiable in all tensors, the prefixes included.

    Args:
        q_ATD, k_ATD, v_ATD: of the tokens. The number of query heads is a multiple of that of keys and values, whose
            widths may differ. Tokens after those of the layout are padding; their output is 0.
        layout: which token belongs to which sequence and prefix.
        scaling: s, multiplies the scores.
        prefix: keys and values of the prefixes, ``[A, X, D]`` each, end to end.
        window: a token sees this many tokens, itself included. None: all tokens.
        cap: scores become ``cap * tanh(scores / cap)``. None: no cap.
        sinks: a score of each head, ``[A]``, that takes part in the softmax and adds nothing to the output.
        native: whether to use the native kernel, which knows no cap, where each thread has an item of work.
        drawn_N: indices of the tokens whose output is needed; that of the others has no meaning. None: all tokens.

    Returns:
        ``[A, T, D]`` with the width of ``v_ATD``, in its dtype.
    """
    if window is not None and window >= layout.longest:
        window = None
    prefix_k, prefix_v = prefix or (None, None)
    width, value_width = q_ATD.shape[-1], v_ATD.shape[-1]
    if width != value_width:  # kernels want one width; zeros in both change neither scores nor outputs
        require(prefix is None or prefix[1].shape[-1] == value_width, "prefixes alike")
        wider = max(width, value_width)
        q_ATD, k_ATD, v_ATD, *both = widened(wider, q_ATD, k_ATD, v_ATD, *(prefix or ()))
        return packed_attention(
            q_ATD, k_ATD, v_ATD, layout, scaling=scaling, prefix=(both[0], both[1]) if both else None, window=window,
            cap=cap, sinks=sinks, native=native, drawn_N=drawn_N,
        )[..., :value_width]  # fmt: skip
    if native and cap is None and _suits_native(layout, len(k_ATD)):
        work = layout.work if drawn_N is None else layout.work._replace(drawn_before=_counted(drawn_N, layout.tokens))
        attended: Tensor = _Native.apply(work, scaling, window, sinks, q_ATD, k_ATD, v_ATD, prefix_k, prefix_v)  # type: ignore[no-untyped-call]
        return attended
    padding = q_ATD.shape[1] - layout.tokens
    q, k, v = (part[:, : layout.tokens] if padding else part for part in (q_ATD, k_ATD, v_ATD))
    kind = kind_of(q.device)
    out: Tensor
    if cap is None and kind == "cpu":
        out = _TwoPart.apply(layout, scaling, window, sinks, q, k, v, prefix_k, prefix_v)  # type: ignore[no-untyped-call]
    elif cap is None and kind == "cuda" and can_flash(q, k, v):
        out = flash_attention(q, k, v, prefix, layout, scaling, window, sinks)
    else:
        dtype, out_dtype = kernel_dtype(v), v.dtype
        q, k, v, prefix_k, prefix_v = _to(dtype, q, k, v, prefix_k, prefix_v)
        out = explicit_attention(q, k, v, prefix_k, prefix_v, layout, scaling, window, cap, sinks).to(out_dtype)
    return functional.pad(out, (0, 0, 0, padding)) if padding else out


def _suits_native(layout: Layout, kv_heads: int) -> bool:
    """Whether each thread has an item of the native kernel's work."""
    return len(layout.work.items) * kv_heads >= torch.get_num_threads()


def kernel_dtype(like: Tensor) -> torch.dtype:
    """The dtype that torch computes attention in. On a CPU its backward pass is slower and less exact in bfloat16 than
    in float32."""
    return torch.promote_types(like.dtype, torch.float32) if kind_of(like.device) == "cpu" else like.dtype


def widened(width: int, *parts: Tensor) -> list[Tensor]:
    """Tensors with zeros at the end of their last axis, which then has this width; unchanged if it has."""
    return [part if part.shape[-1] == width else functional.pad(part, (0, width - part.shape[-1])) for part in parts]


def _to(dtype: torch.dtype, *parts: Any) -> list[Any]:
    """Tensors in another dtype; None stays None."""
    return [None if part is None else part.to(dtype) for part in parts]


class _Native(torch.autograd.Function):
    """``packed_attention`` by the native kernel, whose tensors are ``[T, A, D]``."""

    @staticmethod
    def forward(
        ctx: Any, work: Work, scaling: float, window: int | None, sinks: Tensor | None, *given: Tensor | None
    ) -> Tensor:
        ctx.dtypes, ctx.rest = [part.dtype for part in given if part is not None], (work, scaling, window)
        tensors = *_by_token(*given[:3]), *_by_token(*given[3:])
        wide = torch.float32 if work.longest > BLOCK else None  # outputs of blocks add up in memory
        out = _zeros_after(tensors[0], _written(work), wide)
        lse = out.new_zeros(out.shape[:2], dtype=torch.float32)
        attend(ctx.rest, tensors, BLOCK, out=out, lse=lse)
        if sinks is not None:
            add_sinks(out, lse, sinks)
        ctx.save_for_backward(*tensors, out, lse, sinks)
        ctx.leaves = _leaves(*given[3:])
        return out.transpose(0, 1).to(ctx.dtypes[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse, sinks = ctx.saved_tensors
        work, *_ = ctx.rest
        (grad,) = _by_token(grad.to(tensors[0].dtype))
        grads = [_zeros_after(part, _written(work)) for part in (out, *tensors[1:3])]
        in_place = work.slots == 1 and bool(ctx.leaves) and all(_adds_up(leaf.grad) for leaf in ctx.leaves)
        if in_place:  # as below in _TwoPart
            grads += [leaf.grad.transpose(0, 1)[None] for leaf in ctx.leaves]
        elif tensors[3] is not None:
            grads += [out.new_zeros(work.slots, *tensors[3].shape, dtype=torch.float32) for _ in range(2)]
        names = ("grad_q", "grad_k", "grad_v", "grad_prefix_k", "grad_prefix_v")
        named = dict(zip(names, grads, strict=False))
        attend(ctx.rest, tensors, BLOCK, out=out, lse=lse, grad_out=grad, **named)
        of_prefix = [] if in_place else [part[0] if len(part) == 1 else part.sum(0) for part in grads[3:]]
        found = [
            part.transpose(0, 1).to(dtype) for part, dtype in zip([*grads[:3], *of_prefix], ctx.dtypes, strict=False)
        ]
        grad_sinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks).sum(0).to(sinks.dtype)
        return None, None, None, grad_sinks, *found, *([None] * (5 - len(found)))


def _counted(drawn_N: Tensor, tokens: int) -> Tensor:
    """See ``Work.drawn_before``."""
    counts = torch.zeros(tokens + 1, dtype=torch.int64)
    counts[drawn_N + 1] = 1
    return counts.cumsum(0)


def _written(work: Work) -> int:
    """How many tokens are written for certain."""
    return work.tokens if work.drawn_before is None else 0


def _zeros_after(like: Tensor, count: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor with zeros from index ``count`` on."""
    made = torch.empty_like(like, dtype=dtype)
    made[count:] = 0
    return made


def _leaves(*prefix: Tensor | None) -> list[Tensor]:
    """Keys and values of a prefix, if their gradients can be added to ``.grad``."""
    leaves = [part for part in prefix if part is not None and part.requires_grad and part.is_leaf]
    return leaves if len(leaves) == 2 else []


def _adds_up(grad_AXD: Tensor | None) -> bool:
    """Whether the native kernel can add to a gradient."""
    return grad_AXD is not None and grad_AXD.dtype == torch.float32 and grad_AXD.transpose(0, 1).is_contiguous()


def _by_token(*parts: Any) -> Sequence[Any]:
    """``[heads, T, D]`` to contiguous ``[T, heads, D]``, in the widest dtype of the parts (rotation and adapters may
    return some of them wider than others)."""
    if parts[0] is None:
        return parts
    dtype = functools.reduce(torch.promote_types, [part.dtype for part in parts])
    return [part.to(dtype).transpose(0, 1).contiguous() for part in parts]


class _TwoPart(torch.autograd.Function):
    """``packed_attention`` by torch's fused kernels for CPUs, which keep no scores."""

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, scaling: float, window: int | None, sinks: Tensor | None, *given: Tensor | None
    ) -> Tensor:
        # Tensors are saved as they came: half precision needs half the memory.
        dtype, out_dtype = kernel_dtype(given[2]), given[2].dtype  # type: ignore[arg-type, union-attr]
        q, k, v, prefix_k, prefix_v = _to(dtype, *given)
        out_ATD = torch.empty_like(q)
        lse_AT = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for bucket in layout.buckets:
            mask = _window_mask(bucket.index_JW.shape[1], window, q)
            out, lse = _attend(bucket.gather(q), bucket.gather(k), bucket.gather(v), scaling, mask, causal=True)
            bucket.scatter(out_ATD, out)
            bucket.scatter(lse_AT, lse)
        for part in layout.blocks(BLOCK) if prefix_k is not None else ():
            seen = _prefix_seen(part, layout, window)
            if seen is not None and not bool(seen.any()):
                continue
            keys, values = prefix_k[None, :, part.prefix], prefix_v[None, :, part.prefix]
            out, lse = _attend(q[None, :, part.tokens], keys, values, scaling, _additive(seen, q))
            if seen is not None:
                lse = lse.masked_fill(~seen.any(-1), -torch.inf)
            own_lse = lse_AT[:, part.tokens]
            whole = torch.logaddexp(own_lse, lse[0])
            out_ATD[:, part.tokens].mul_((own_lse - whole).exp_()[..., None]).addcmul_(
                out[0], (lse[0] - whole).exp_()[..., None].to(out.dtype)
            )
            lse_AT[:, part.tokens] = whole
        if sinks is not None:
            add_sinks(out_ATD, lse_AT, sinks[:, None])
        out_ATD = out_ATD.to(out_dtype)
        ctx.save_for_backward(*given, out_ATD, lse_AT, sinks)
        ctx.rest = layout, scaling, window
        ctx.leaves = _leaves(*given[3:])
        return out_ATD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ATD: Tensor) -> tuple[Tensor | None, ...]:
        *given, out_ATD, lse_AT, sinks = ctx.saved_tensors
        layout, scaling, window = ctx.rest
        q, k, v, prefix_k, prefix_v, out_ATD, grad_ATD = _to(kernel_dtype(given[2]), *given, out_ATD, grad_ATD)
        totals = [torch.empty_like(part) for part in (q, k, v)]
        for bucket in layout.buckets:
            lse, grad = bucket.hide_padding(bucket.gather(lse_AT), bucket.gather(grad_ATD))
            mask = _window_mask(bucket.index_JW.shape[1], window, q)
            queries, keys, values, out = (bucket.gather(part) for part in (q, k, v, out_ATD))
            grads = _attend_backward(grad, queries, keys, values, out, lse, scaling, mask, causal=True)
            for total, of_bucket in zip(totals, grads, strict=True):
                bucket.scatter(total, of_bucket)
        if prefix_k is not None:
            # Where gradients of the prefix add up already, those of a block are added at once.
            in_place = bool(ctx.leaves) and all(leaf.grad is not None for leaf in ctx.leaves)
            of_prefix = [
                leaf.grad if in_place else torch.zeros_like(leaf) for leaf in ctx.leaves or (prefix_k, prefix_v)
            ]
            for part in layout.blocks(BLOCK):
                seen = _prefix_seen(part, layout, window)
                if seen is not None and not bool(seen.any()):
                    continue
                lse = lse_AT[None, :, part.tokens]
                if seen is not None:
                    lse = lse.masked_fill(~seen.any(-1), NEVER)
                grad, queries, out = (each[None, :, part.tokens] for each in (grad_ATD, q, out_ATD))
                keys, values = (each[None, :, part.prefix] for each in (prefix_k, prefix_v))
                grads = _attend_backward(grad, queries, keys, values, out, lse, scaling, _additive(seen, q))
                totals[0][:, part.tokens] += grads[0][0]
                of_prefix[0][:, part.prefix] += grads[1][0]
                of_prefix[1][:, part.prefix] += grads[2][0]
            totals += [] if in_place else of_prefix
        found = [total.to(part.dtype) for total, part in zip(totals, given, strict=False)]
        grad_sinks = None
        if sinks is not None:
            grad_sinks = sinks_gradient(grad_ATD, out_ATD, lse_AT, sinks[:, None]).sum(1).to(sinks.dtype)
        return None, None, None, grad_sinks, *found, *([None] * (5 - len(found)))


def _window_mask(length: int, window: int | None, like: Tensor) -> Tensor | None:
    """The mask of a sequence's attention to itself. None: it is only causal."""
    if window is None or window >= length:
        return None
    position = torch.arange(length, device=like.device)
    back = position[:, None] - position
    return _additive((back >= 0) & (back < window), like)


def _prefix_seen(part: Continuation, layout: Layout, window: int | None) -> Tensor | None:
    """Which tokens of its prefix each token sees, boolean. None: all."""
    if window is None:
        return None
    positions = layout.positions_T[part.tokens]
    length = part.prefix.stop - part.prefix.start
    seen: Tensor = positions[:, None] - part.position - torch.arange(length, device=positions.device) < window
    return seen


def _additive(seen: Tensor | None, like: Tensor) -> Tensor | None:
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None, *, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """``[J, A, W, D]`` output and ``[J, A, W]`` log-sum-exp. A mask includes causality."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, causal and mask is None, attn_mask=mask, scale=scaling)
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
    """Gradients of q, k and v of one part, given the output and log-sum-exp of the whole."""
    kernel, causal = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, causal and mask is None
    grads: Sequence[Tensor] = kernel(grad, q, k, v, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scaling)
    return grads


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_k: Tensor | None,
    prefix_v: Tensor | None,
    layout: Layout,
    scaling: float,
    window: int | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``packed_attention`` by its formula, sequence by sequence: for soft caps, which the fused kernels do not have,
    for float32 on CUDA, and as a reference for tests. Its memory grows with the number of scores."""
    share = q.shape[0] // k.shape[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    outs = []
    for s, (length, first) in enumerate(zip(layout.lengths, layout.before, strict=True)):
        tokens = slice(layout.starts[s], layout.starts[s + 1])
        keys, values = k[:, tokens], v[:, tokens]
        if prefix_k is not None and prefix_v is not None and layout.prefixes is not None:
            start = layout.prefix_starts[layout.prefixes[s]]
            keys = torch.cat([prefix_k[:, start : start + first], keys], dim=1)
            values = torch.cat([prefix_v[:, start : start + first], values], dim=1)
        position = torch.arange(first + length, device=q.device)
        back = position[first:, None] - position
        seen = (back >= 0) & (back < (window or math.inf))
        scores = (q[:, tokens] @ keys.repeat_interleave(share, 0).mT).to(wide) * scaling
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(wide)[:, None, None].expand(-1, length, 1)], dim=-1)
        weights = functional.softmax(scores, dim=-1)[..., : first + length].to(values.dtype)
        outs.append(weights @ values.repeat_interleave(share, 0))
    return torch.cat(outs, dim=1)
