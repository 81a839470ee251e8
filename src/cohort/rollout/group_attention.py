"""Attention of a decode step in two parts, of which the rows of a prompt compute one together; see ``lean.py``."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from cohort.native import has_pairs
from cohort.policy.anatomy import soft_cap
from cohort.policy.attention import BLOCK, packed_attention
from cohort.policy.layout import Layout as PassLayout
from cohort.rollout.cache import GroupCache, Layout


def attend_in_two_parts(
    q_SAD: Tensor,
    cache: GroupCache,
    number: int,
    layout: Layout,
    scaling: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each row's newest token to its prompt and its own tokens, those just written included.

    Args:
        q_SAD: its queries.
        cache: keys and values.
        number: the layer among those of the cache.
        layout: the step's.
        scaling, window, cap, sinks: see ``packed_attention``.
    """
    own_k, own_v = cache.own(number, layout)
    q = q_SAD.to(own_k.dtype).reshape(len(own_k), -1, q_SAD.shape[-1])
    own = _scores(q, own_k, scaling, cap, layout.own_mask(window))
    prompt_k, prompt_v = cache.prompts(number, layout)
    prompt = _scores(layout.by_prompt(q), prompt_k, scaling, cap, layout.prompt_mask(window))
    scores = torch.cat([own, layout.by_row(prompt)], dim=-1)
    if sinks is not None:  # [S K, group, t] to [S, A, 1, t] and back
        weights = softmax(scores.view(layout.count, len(sinks), 1, -1), sinks).view_as(scores).to(own_v.dtype)
    else:
        weights = torch.softmax(scores, dim=-1).to(own_v.dtype)
    own_weights, prompt_weights = weights.split([own_k.shape[1], prompt_k.shape[1]], dim=-1)
    of_prompt = _product(layout.by_prompt(prompt_weights), prompt_v)
    return _product(own_weights, own_v).add_(layout.by_row(of_prompt)).view_as(q_SAD)


def attend_causally(
    q_LAD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    dtype: torch.dtype,
    scaling: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
    native: bool = False,
) -> Tensor:
    """Attention of a text over the tokens before it and itself: the last L of T tokens, by products of the
    given dtype. The settings: see ``packed_attention``, which computes whole texts in bfloat16 if ``native`` and the
    processor has units for it."""
    length, total = q_LAD.shape[0], k_TKD.shape[0]
    q, k, v = (part.to(dtype).transpose(0, 1)[None] for part in (q_LAD, k_TKD, v_TKD))
    # Decided by the text alone: its bits must not depend on those that are read with it.
    suits = cap is None and total == length <= BLOCK and len(k[0]) >= torch.get_num_threads()
    if native and suits and dtype == torch.bfloat16 and has_pairs():
        alone = PassLayout([length], q.device)
        out = packed_attention(q[0], k[0], v[0], alone, scaling=scaling, window=window, sinks=sinks, native=True)
        return out.transpose(0, 1)
    mask, plain = None, cap is None and sinks is None
    if not plain or total > length or (window is not None and length > window):
        positions = torch.arange(total, device=q.device)
        back = positions[total - length :, None] - positions
        mask = (back >= 0) & (back < (window or math.inf))
    if plain:
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
    else:
        assert mask is not None
        share = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(share, 1).mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scaling)
        scores = soft_cap(scores, cap).masked_fill_(~mask, -torch.inf)
        out = softmax(scores, sinks).to(v.dtype) @ v.repeat_interleave(share, 1)
    return out[0].transpose(0, 1)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last axis of scores ``[S, A, L, T]``, in which a sink of each head may take part."""
    if sinks is None:
        return torch.softmax(scores, -1)
    of_sinks = sinks.detach().to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, of_sinks], -1), -1)[..., :-1]


def _scores(q: Tensor, k: Tensor, scaling: float, cap: float | None, mask: Tensor | None) -> Tensor:
    """Batched attention scores, ``[B, m, t]``, in float32 or better.

    Args:
        q, k: ``[B, m, D]`` and ``[B, t, D]``.
        scaling: multiplies them.
        cap: bounds them softly; see ``soft_cap``.
        mask: added to them, ``[B, 1 or m, t]``: 0 or -inf. None: no mask.
    """
    if cap is None and mask is not None and q.dtype == mask.dtype:
        return torch.baddbmm(mask, q, k.mT, alpha=scaling)
    scores = soft_cap(_product(q, k.mT).mul_(scaling), cap)
    return scores if mask is None else scores.add_(mask)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product, in float32 or better: sums of half-precision inputs are not rounded to half precision."""
    if a.dtype in {torch.bfloat16, torch.float16}:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)
