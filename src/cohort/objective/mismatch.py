"""What is done about the sampler and the trainer disagreeing: weights on the policy term, always detached.

With rho = old / sampler per token (the old policy in the trainer's numerics over what the engine really drew from),
its product over the sequence, and its geometric mean:

    weight, truncate   clip(rho, low, high)                           truncated importance sampling
    weight, mask       rho where low <= rho <= high, else 0           IcePop (arXiv 2510.18855) at level token
    weight, reject     1 where low <= rho <= high, else 0
    veto               0 for a sequence with any rho outside [low, high]
    off_policy_mask    0 for a sequence with A < 0 and mean log(sampler / policy) > threshold   DeepSeek-V3.2

Bounds are on rho itself, not on 1/rho. A dropped token keeps its place in the denominator. A token whose sampler
log-prob is NaN (an engine could not say) has rho = 1. Masking and truncating are not the same gradient: 0 against
``high * A * s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.objective.ratio import exp_held, leveled_log_ratio
from cohort.objective.segments import segment_count, segment_mean, segment_sum
from cohort.presets.parts import Mismatch, MismatchWeight, OffPolicyMask, RatioLevel, Veto

RATIO_LEVELS: dict[str, RatioLevel] = {
    "token": "token",
    "sequence": "sequence_product",
    "geometric": "sequence_mean",
}
"""The levels of ``MismatchWeight`` as levels of a ratio."""


@dataclass(frozen=True, slots=True)
class MismatchResult:
    """Shape ``[N]`` each, but for the last."""

    weight_N: Tensor
    dropped_N: Tensor
    """Silenced by a weight's bounds or a veto."""
    off_policy_N: Tensor
    """Silenced by the off-policy mask."""
    acted_NM: Tensor
    """Where each of the M rules acted, boolean, shape ``[N, M]``: dropped a token, or held its weight to a bound."""


def mismatch_weights(
    rules: Sequence[Mismatch],
    old_logps_N: Tensor,
    sampler_logps_N: Tensor,
    logps_N: Tensor,
    advantages_N: Tensor,
    sequence_N: Tensor,
) -> MismatchResult:
    """The product of all rules' weights. Formulas in the module's header.

    Args:
        rules: may be several; an empty one gives weight 1.
        old_logps_N: the old policy's log-probs; the current ones where the old policy is the current.
        sampler_logps_N: the engine's.
        logps_N: the current policy's.
        advantages_N: their sign decides for the off-policy mask.
        sequence_N: sequence ids.
    """
    weight_N = torch.ones_like(logps_N)
    dropped_N = torch.zeros_like(logps_N, dtype=torch.bool)
    off_policy_N = torch.zeros_like(dropped_N)
    count = segment_count(sequence_N)
    log_rho_N = (old_logps_N - sampler_logps_N).nan_to_num(nan=0.0)
    acted: list[Tensor] = []
    for rule in rules:
        match rule:
            case MismatchWeight(level=level, mode=mode, low=low, high=high):
                rho_N = exp_held(leveled_log_ratio(log_rho_N, RATIO_LEVELS[level], sequence_N))
                outside_N = (rho_N < low) | (rho_N > high)
                acted.append(outside_N)
                if mode == "truncate":
                    weight_N = weight_N * rho_N.clamp(low, high)
                else:
                    weight_N = weight_N * (rho_N if mode == "mask" else 1.0)
                    dropped_N = dropped_N | outside_N
            case Veto(low=low, high=high):
                rho_N = exp_held(log_rho_N)
                extreme_N = ((rho_N < low) | (rho_N > high)).to(log_rho_N)
                acted.append((segment_sum(extreme_N, sequence_N, count) > 0)[sequence_N])
                dropped_N = dropped_N | acted[-1]
            case OffPolicyMask(threshold=threshold):
                gap_N = (sampler_logps_N - logps_N).nan_to_num(nan=0.0)
                far_N = (segment_mean(gap_N, sequence_N, count) > threshold)[sequence_N]
                acted.append(far_N & (advantages_N < 0))
                off_policy_N = off_policy_N | acted[-1]
    weight_N = weight_N.masked_fill(dropped_N | off_policy_N, 0)
    acted_NM = torch.stack(acted, dim=1) if acted else dropped_N.new_zeros(len(dropped_N), 0)
    return MismatchResult(weight_N, dropped_N, off_policy_N, acted_NM)
