"""Importance ratios and the trust region: what an update may still move.

A rule of the trust region is its multiplier phi(ratio, A): the factor by which a token's advantage enters its gradient
coefficient. Bounds are bounds on the ratio itself, ``[low, high]``, never epsilons whose meaning changes with the rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are held to +-20 before ``exp``: float32 overflows at 88.7, and e^20 = 4.9e8 is past any use. The share of
tokens held is logged (``ratio/held_share``); it is 0 in a run that is not already lost."""


def importance_ratio(logps_N: Tensor, old_logps_N: Tensor) -> Tensor:
    """Token ratio of the current to the old policy, ``exp(logps - old_logps)``, shape ``[N]``.

    >>> importance_ratio(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0]))
    tensor([1.0000, 0.3679])
    """
    return torch.exp((logps_N - old_logps_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def ppo_clip_sides(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Which tokens the clip silences: ``(clipped_low_N, clipped_high_N)``, boolean.

    Low: A < 0 and ratio < low (the token is already as unlikely as allowed). High: A > 0 and ratio > high. A token
    exactly on a bound is not clipped: ``min(r A, clip(r) A)`` has its full gradient there.
    """
    return (advantages_N < 0) & (ratio_N < low), (advantages_N > 0) & (ratio_N > high)


def ppo_clip_multiplier(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """The clip's gradient multiplier: d/d logp of ``min(r A, clip(r, low, high) A)``, divided by A. Shape ``[N]``.

        phi = r * [not (A > 0 and r > high)] * [not (A < 0 and r < low)]

    Source: PPO (arXiv 1707.06347) eq. 7, as used by DeepSeekMath (arXiv 2402.03300) eq. 3.

    >>> r, a = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5]), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    >>> ppo_clip_multiplier(r, a, 0.8, 1.2)
    tensor([0.5000, 0.0000, 1.0000, 0.0000, 1.5000])
    """
    clipped_low_N, clipped_high_N = ppo_clip_sides(ratio_N, advantages_N, low, high)
    return torch.where(clipped_low_N | clipped_high_N, torch.zeros_like(ratio_N), ratio_N)


def ppo_clip_value(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """The clipped surrogate per token, ``min(r A, clip(r, low, high) A)``, shape ``[N]``. For the log only.

    >>> ppo_clip_value(torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0]), 0.8, 1.2)
    tensor([ 1.2000, -1.5000, -0.8000])
    """
    return torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
