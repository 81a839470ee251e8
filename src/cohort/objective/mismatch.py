"""Corrections for a disagreement between sampler and trainer: weights on the policy term, always detached.

With rho = old / sampler per token (the old policy in the trainer's numerics over what the engine really drew from),
its product over the sequence, and its geometric mean:

    weight, truncate   clip(rho, low, high)                           truncated importance sampling
    weight, mask       rho where low <= rho <= high, else 0           IcePop (arXiv 2510.18855) at level token
    weight, reject     1 where low <= rho <= high, else 0
    veto               0 for a sequence with any rho outside [low, high]
    off_policy_mask    0 for a sequence with A < 0 and mean log(sampler / policy) > threshold   DeepSeek-V3.2

Bounds are on rho itself, not on 1/rho. A dropped token still counts in the denominator. A token whose sampler log-prob
is NaN (the engine does not know it) has rho = 1. Masking and truncating are not the same gradient: 0 against
``high * A * s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.objective.ratio import exp_clamped, leveled_log_ratio
from cohort.objective.segments import segment_count, segment_mean, segment_sum
from cohort.presets.parts import Mismatch, MismatchWeight, OffPolicyMask, Veto

RATIO_LEVELS = {"token": "token", "sequence": "sequence_product", "geometric": "sequence_mean"}
"""The levels of ``MismatchWeight`` as levels of a ratio."""


class MismatchResult(NamedTuple):
    """Shape ``[N]`` each, but for the last."""

    weight_N: Tensor
    dropped_N: Tensor
    """Silenced by a weight's bounds or a veto."""
    off_policy_N: Tensor
    """Silenced by the off-policy mask."""
    acted_NM: Tensor
    """Where each of the M rules acted, boolean, shape ``[N, M]``: dropped a token, or clamped its weight."""


def _weight(
    rule: Mismatch, log_rho_N: Tensor, gap_N: Tensor, advantages_N: Tensor, sequence_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Each token's weight (0: dropped), and where the rule acted. ``gap_N`` is log(sampler / policy)."""
    count = segment_count(sequence_N)
    match rule:
        case MismatchWeight():
            rho_N = exp_clamped(leveled_log_ratio(log_rho_N, RATIO_LEVELS[rule.level], sequence_N))
            outside_N = (rho_N < rule.low) | (rho_N > rule.high)
            if rule.mode == "truncate":
                return rho_N.clamp(rule.low, rule.high), outside_N
            return (rho_N if rule.mode == "mask" else torch.ones_like(rho_N)).masked_fill(outside_N, 0), outside_N
        case Veto():
            rho_N = exp_clamped(log_rho_N)
            extreme_N = ((rho_N < rule.low) | (rho_N > rule.high)).to(rho_N)
            dropped_N = (segment_sum(extreme_N, sequence_N, count) > 0)[sequence_N]
        case OffPolicyMask():
            far_S = segment_mean(gap_N, sequence_N, count) > rule.threshold
            dropped_N = far_S[sequence_N] & (advantages_N < 0)
    return (~dropped_N).to(log_rho_N), dropped_N


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
    log_rho_N = (old_logps_N - sampler_logps_N).nan_to_num(nan=0.0)
    gap_N = (sampler_logps_N - logps_N).nan_to_num(nan=0.0)
    weight_N = torch.ones_like(logps_N)
    dropped_N = off_policy_N = torch.zeros_like(logps_N, dtype=torch.bool)
    acted_NM = dropped_N.new_zeros(len(dropped_N), len(rules))
    for index, rule in enumerate(rules):
        of_rule_N, acted_NM[:, index] = _weight(rule, log_rho_N, gap_N, advantages_N, sequence_N)
        weight_N = weight_N * of_rule_N
        if isinstance(rule, OffPolicyMask):
            off_policy_N = off_policy_N | (of_rule_N == 0)
        else:
            dropped_N = dropped_N | (of_rule_N == 0)
    return MismatchResult(weight_N, dropped_N, off_policy_N, acted_NM)
