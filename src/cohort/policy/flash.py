"""Packed attention on CUDA, by torch's flash attention of sequences that lie end to end.

Two calls of the kernel serve a whole pass, however many sequences and prefixes it has: each sequence attends to itself,
and the tokens after each prefix attend to the prefix. The two are joined as ``attention`` describes. With a window, a
sequence's keys are gathered behind the end of its prefix instead, and one call serves all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cohort.policy.layout import Layout, Spans

LARGEST_WIDTH = 256
"""The largest head dimension of the kernel; it is a multiple of 8."""


def can_flash(q_ATD: Tensor, k_ATD: Tensor, v_ATD: Tensor) -> bool:
    """Whether the kernel takes tensors of these dtypes and head dimensions. It runs on GPUs from Ampere on."""
    width = q_ATD.shape[-1]
    if q_ATD.device.type == "cuda" and torch.cuda.get_device_capability(q_ATD.device) < (8, 0):
        return False
    half = v_ATD.dtype in {torch.bfloat16, torch.float16} and q_ATD.dtype == k_ATD.dtype == v_ATD.dtype
    return half and k_ATD.shape[-1] == v_ATD.shape[-1] == width <= LARGEST_WIDTH and width % 8 == 0


def flash_attention(
    q_ATD: Tensor,
    k_ATD: Tensor,
    v_ATD: Tensor,
    prefix: tuple[Tensor, Tensor] | None,
    layout: Layout,
    scaling: float,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``attention.packed_attention`` of tensors for which ``can_flash`` holds, without padding after the tokens."""
    spans = layout.own_spans
    prefix_k, prefix_v = prefix if prefix is not None and layout.continuations else (None, None)
    if window is not None and prefix_k is not None and prefix_v is not None:
        spans = layout.spans_within(window)
        # In the prefix's dtype, in which the gradients of its keys and values add up over the sequences.
        k_ATD, v_ATD = (
            _keys_at(torch.cat([before, own], dim=1), spans.keys).to(own.dtype)
            for before, own in ((prefix_k, k_ATD), (prefix_v, v_ATD))
        )
        prefix_k = prefix_v = None
    out: Tensor = _Flash.apply(layout, spans, scaling, window, sinks, q_ATD, k_ATD, v_ATD, prefix_k, prefix_v)  # type: ignore[no-untyped-call]
    return out


class _Flash(torch.autograd.Function):
    """``flash_attention`` of gathered keys and values."""

    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        spans: Spans,
        scaling: float,
        window: int | None,
        sinks: Tensor | None,
        *given: Tensor | None,
    ) -> Tensor:
        q, k, v, prefix_k, prefix_v = _by_token(*given)
        out, lse_AT = _attend(q, k, v, spans, scaling, causal=True, window=window)
        if prefix_k is not None:
            parts = layout.prefix_spans
            queries, keys, values = _at(q, parts.queries), _at(prefix_k, parts.keys), _at(prefix_v, parts.keys)
            prefix_out, prefix_lse = _attend(queries, keys, values, parts, scaling)
            where = slice(None) if parts.queries is None else parts.queries
            own_lse = lse_AT[:, where]
            whole = torch.logaddexp(own_lse, prefix_lse)
            own_share, prefix_share = ((part - whole).exp().T[..., None] for part in (own_lse, prefix_lse))
            out[where] = (out[where] * own_share + prefix_out * prefix_share).to(out.dtype)
            lse_AT[:, where] = whole
        if sinks is not None:
            add_sinks(out, lse_AT.T, sinks)
        ctx.save_for_backward(*given, out, lse_AT, sinks)
        ctx.rest = layout, spans, scaling, window
        return out.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ATD: Tensor) -> tuple[Tensor | None, ...]:
        *given, out, lse_AT, sinks = ctx.saved_tensors
        layout, spans, scaling, window = ctx.rest
        q, k, v, prefix_k, prefix_v = _by_token(*given)
        grad = grad_ATD.transpose(0, 1).contiguous()
        grad_sinks = None if sinks is None else sinks_gradient(grad, out, lse_AT.T, sinks).sum(0).to(sinks.dtype)
        grads = list(_attend_backward(grad, q, k, v, out, lse_AT, spans, scaling, causal=True, window=window))
        if prefix_k is not None:
            parts = layout.prefix_spans
            queries, keys, values = _at(q, parts.queries), _at(prefix_k, parts.keys), _at(prefix_v, parts.keys)
            lse = lse_AT if parts.queries is None else lse_AT[:, parts.queries].contiguous()
            grad, out = _at(grad, parts.queries), _at(out, parts.queries)
            found = _attend_backward(grad, queries, keys, values, out, lse, parts, scaling)
            grads += [
                torch.zeros_like(part, dtype=leaf.dtype)
                for part, leaf in zip((prefix_k, prefix_v), given[3:], strict=True)
            ]
            totals = grads[0], *grads[3:]
            for total, piece, index in zip(totals, found, (parts.queries, parts.keys, parts.keys), strict=True):
                _add_at(total, piece, index)
        by_head = [each.transpose(0, 1) for each in grads]
        return None, None, None, None, grad_sinks, *by_head, *([None] * (5 - len(by_head)))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let sinks take part in the softmax of attention, in place: ``out`` is what the weights of the values are left,
    ``lse`` is the log-sum-exp with the sinks.

    Args:
        out: ``[..., D]``.
        lse: ``[...]``.
        sinks: broadcastable to ``lse``.
    """
    whole = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_((lse - whole).exp_()[..., None].to(out.dtype))
    lse.copy_(whole)


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The share of each token in the gradient of the sinks, ``-exp(sink - lse) (grad . out)``, after ``add_sinks``."""
    return -(sinks.to(lse.dtype) - lse).exp() * (grad.to(lse.dtype) * out).sum(-1)


def _by_token(*parts: Any) -> list[Any]:
    """``[heads, T, D]`` to ``[T, heads, D]``, in the dtype of the first, the queries: keys and values of a prefix are
    wider, so that their gradients add up in float32."""
    dtype = parts[0].dtype
    return [None if part is None else part.to(dtype).transpose(0, 1).contiguous() for part in parts]


def _at(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values[index]


def _keys_at(keys_AXD: Tensor, index: Tensor | None) -> Tensor:
    return keys_AXD if index is None else keys_AXD[:, index]


def _add_at(total: Tensor, values: Tensor, index: Tensor | None) -> None:
    """Add values at indices of the first axis, which may repeat. None: at all."""
    if index is None:
        total += values
    else:
        total.index_add_(0, index, values.to(total.dtype))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, spans: Spans, scaling: float, *, causal: bool = False, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """``[T, A, D]`` output and ``[A, T]`` log-sum-exp, in float32. A window includes the token itself."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, spans.query_starts, spans.key_starts, spans.most_queries, spans.most_keys, 0.0, causal, False,
        scale=scaling, **_window(window),
    )  # fmt: skip
    return out, lse


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spans: Spans,
    scaling: float,
    *,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one part, given the output and log-sum-exp of the whole."""
    dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of its random numbers: there is none
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, spans.query_starts, spans.key_starts, spans.most_queries, spans.most_keys, 0.0,
        causal, dropout, dropout[:0], scale=scaling, **_window(window),
    )  # fmt: skip
    return found


def _window(window: int | None) -> dict[str, int]:
    """The kernel's names for a window: how many keys before and after the token's own are seen."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
