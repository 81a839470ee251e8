"""Products of attention and rotations of the lean sampler, by torch.

Axis letters: N tokens, H heads, R rotated dimensions, S rows, A query heads, L tokens that are read, T keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.policy.anatomy import soft_cap


def rotate_halves(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Rotary embedding: ``[x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin]`` with the halves x1 and x2 of a head."""
    half = x_NHD.shape[-1] // 2
    out = x_NHD * cos_N1D
    out[..., :half].addcmul_(x_NHD[..., half:], sin_N1D[..., :half], value=-1)
    out[..., half:].addcmul_(x_NHD[..., :half], sin_N1D[..., half:])
    return out


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last axis of scores ``[S, A, L, T]``, in which a sink of each head may take part."""
    if sinks is None:
        return torch.softmax(scores, -1)
    of_sinks = sinks.detach().to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, of_sinks], -1), -1)[..., :-1]


def scores_of(q: Tensor, k: Tensor, scaling: float, cap: float | None, mask: Tensor | None) -> Tensor:
    """Batched attention scores, ``[B, m, t]``, in float32 or better.

    Args:
        q, k: ``[B, m, D]`` and ``[B, t, D]``.
        scaling: multiplies them.
        cap: bounds them softly; see ``soft_cap``.
        mask: added to them, ``[B, 1 or m, t]``: 0 or -inf. None: no mask.
    """
    if cap is None and mask is not None and q.dtype == mask.dtype:
        return torch.baddbmm(mask, q, k.mT, alpha=scaling)
    scores = soft_cap(product(q, k.mT).mul_(scaling), cap)
    return scores if mask is None else scores.add_(mask)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product, in float32 or better: sums of half-precision inputs are not rounded to half precision."""
    if a.dtype in {torch.bfloat16, torch.float16}:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)
