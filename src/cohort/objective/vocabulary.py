"""Terms over the whole vocabulary: entropy, KL, and which tokens have the highest entropy.

These terms are not weighted sums of token scores and therefore not part of the coefficients. They are differentiated
through the logits, a chunk of tokens at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.presets.parts import Direction

IMPOSSIBLE = -1e4
"""A finite log-prob whose ``exp`` is 0 in every dtype."""


def entropy(log_probs_NV: Tensor) -> Tensor:
    """``H = -sum_v p_v log p_v`` of each row, in nats, shape ``[N]``; a token that cannot occur adds 0. Differentiable:
    dH/dlogit_v = -p_v (log p_v + H).

    The entropy of the sampled token alone, -log p, would have the same mean and a gradient whose mean is exactly 0.

    >>> entropy(torch.zeros(1, 4).log_softmax(-1))
    tensor([1.3863])
    """
    # 0 * -inf is NaN, in the value and in the gradient: make the log-probs finite before the product.
    finite_NV = log_probs_NV.clamp(min=IMPOSSIBLE)
    return -(log_probs_NV.exp() * finite_NV).sum(-1)


def vocabulary_kl(
    log_probs_NV: Tensor, ref_log_probs_NV: Tensor, direction: Direction = "reverse", top_k: int | None = None
) -> Tensor:
    """KL between two distributions over the vocabulary, shape ``[N]``, differentiable in the first.

        reverse   KL(policy || ref) = sum_v p_v (log p_v - log q_v)
        forward   KL(ref || policy) = sum_v q_v (log q_v - log p_v)

    Args:
        log_probs_NV: the policy's.
        ref_log_probs_NV: the reference's.
        direction: one of those above.
        top_k: use only the k likeliest tokens (of the policy for "reverse", of the reference for "forward") and one
            bucket with the mass of the rest. The result is at most the full KL, by the data-processing inequality, and
            equal to it if the two agree on the proportions inside the bucket. Without the bucket it would not be a
            divergence.

    >>> p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    >>> vocabulary_kl(p, q), vocabulary_kl(p, q, "forward")
    (tensor([0.5108]), tensor([0.3681]))
    """
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction must be 'reverse' or 'forward', got {direction!r}")
    if top_k is not None and top_k < log_probs_NV.shape[-1]:
        leading_NV = (log_probs_NV if direction == "reverse" else ref_log_probs_NV).detach()
        chosen_NU = leading_NV.topk(top_k, dim=-1).indices
        log_probs_NV, ref_log_probs_NV = _with_tail(log_probs_NV, chosen_NU), _with_tail(ref_log_probs_NV, chosen_NU)
    first_NV, second_NV = log_probs_NV, ref_log_probs_NV
    if direction == "forward":
        first_NV, second_NV = second_NV, first_NV
    lowest = torch.finfo(log_probs_NV.dtype).min / 4  # a difference of two of them is finite
    return (first_NV.exp() * (first_NV.clamp(min=lowest) - second_NV.clamp(min=lowest))).sum(-1)


def _with_tail(log_probs_NV: Tensor, chosen_NU: Tensor) -> Tensor:
    """The chosen tokens' log-probs and, last, that of all others together."""
    rest_NV = log_probs_NV.scatter(-1, chosen_NU, -torch.inf)
    # Without any mass in the bucket its log is -inf, and the gradient of a logsumexp of nothing would be NaN.
    no_mass_N1 = torch.isneginf(rest_NV).all(-1, keepdim=True)
    tail_N1 = rest_NV.masked_fill(no_mass_N1, 0.0).logsumexp(-1, keepdim=True).masked_fill(no_mass_N1, -torch.inf)
    return torch.cat([log_probs_NV.gather(-1, chosen_NU), tail_N1], dim=-1)


def top_entropy_tokens(entropy_N: Tensor, share: float, counted_N: Tensor | None = None) -> Tensor:
    """Which tokens are among the ``share`` of highest entropy, boolean, shape ``[N]``.

    The threshold is the entropy of the ``ceil(share * n)``-th token of all n, so it is one of the values and ties with
    it are kept: at least that many tokens. n is the whole minibatch's, of any size (``torch.quantile`` fails above 2^24
    values).

    Args:
        entropy_N: entropies of the whole minibatch's tokens.
        share: in (0, 1]; 1 keeps all.
        counted_N: which are loss tokens; None: all. The others are never kept.

    Source: "Beyond the 80/20 Rule" (arXiv 2506.01939).

    >>> top_entropy_tokens(torch.tensor([0.1, 2.0, 0.5, 1.0, 0.2]), share=0.4)
    tensor([False,  True, False,  True, False])
    """
    counted_N = torch.ones_like(entropy_N, dtype=torch.bool) if counted_N is None else counted_N.bool()
    values = entropy_N[counted_N]
    if values.numel() == 0 or share >= 1:
        return counted_N
    keep = _ceil_share(share, values.numel())
    threshold = values.sort(descending=True).values[keep - 1]
    return counted_N & (entropy_N >= threshold)


def _ceil_share(share: float, count: int) -> int:
    """``ceil(share * count)``, where a product that is whole but for its last digit counts as whole; at least 1."""
    product = share * count
    nearest = round(product)
    whole = nearest if abs(product - nearest) < 1e-9 * max(1, count) else int(product) + 1
    return min(count, max(1, whole))
