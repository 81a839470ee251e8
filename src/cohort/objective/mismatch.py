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
from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from cohort.objective.ratio import exp_clamped, leveled_log_ratio
from cohort.objective.segments import segment_count, segment_mean, segment_sum
from cohort.presets.base import Part
from cohort.presets.parts import MismatchWeight, OffPolicyMask, Veto

RATIO_LEVELS = {"token": "token", "sequence": "sequence_product", "geometric": "sequence_mean"}
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
    """Where each of the M rules acted, boolean, shape ``[N, M]``: dropped a token, or clamped its weight."""


@dataclass(frozen=True, slots=True)
class LogProbs:
    """The arguments of a rule. Shape ``[N]`` each."""

    log_rho_N: Tensor
    sampler_logps_N: Tensor
    logps_N: Tensor
    advantages_N: Tensor
    sequence_N: Tensor


@dataclass(frozen=True, slots=True)
class Acted:
    """The result of one rule. Shape ``[N]`` each."""

    acted_N: Tensor
    drops: bool = True
    """Whether the tokens it acted on are dropped."""
    weight_N: Tensor | None = None
    off_policy: bool = False


@singledispatch
def act(rule: Part, at: LogProbs) -> Acted:
    """The mathematics of a mismatch rule, registered for its class."""
    raise NotImplementedError(f"no function is registered for {type(rule).__name__}")


@act.register
def _(rule: MismatchWeight, at: LogProbs) -> Acted:
    rho_N = exp_clamped(leveled_log_ratio(at.log_rho_N, RATIO_LEVELS[rule.level], at.sequence_N))
    outside_N = (rho_N < rule.low) | (rho_N > rule.high)
    if rule.mode == "truncate":
        return Acted(outside_N, drops=False, weight_N=rho_N.clamp(rule.low, rule.high))
    return Acted(outside_N, weight_N=rho_N if rule.mode == "mask" else None)


@act.register
def _(rule: Veto, at: LogProbs) -> Acted:
    rho_N = exp_clamped(at.log_rho_N)
    extreme_N = ((rho_N < rule.low) | (rho_N > rule.high)).to(at.log_rho_N)
    count = segment_count(at.sequence_N)
    return Acted((segment_sum(extreme_N, at.sequence_N, count) > 0)[at.sequence_N])


@act.register
def _(rule: OffPolicyMask, at: LogProbs) -> Acted:
    gap_N = (at.sampler_logps_N - at.logps_N).nan_to_num(nan=0.0)
    far_S = segment_mean(gap_N, at.sequence_N, segment_count(at.sequence_N)) > rule.threshold
    return Acted(far_S[at.sequence_N] & (at.advantages_N < 0), off_policy=True)


def mismatch_weights(
    rules: Sequence[Part],
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
    at = LogProbs(log_rho_N, sampler_logps_N, logps_N, advantages_N, sequence_N)
    weight_N = torch.ones_like(logps_N)
    dropped_N = off_policy_N = torch.zeros_like(logps_N, dtype=torch.bool)
    results = [act(rule, at) for rule in rules]
    for result in results:
        if result.weight_N is not None:
            weight_N = weight_N * result.weight_N
        if result.off_policy:
            off_policy_N = off_policy_N | result.acted_N
        elif result.drops:
            dropped_N = dropped_N | result.acted_N
    weight_N = weight_N.masked_fill(dropped_N | off_policy_N, 0)
    acted = [result.acted_N for result in results]
    acted_NM = torch.stack(acted, dim=1) if acted else dropped_N.new_zeros(len(dropped_N), 0)
    return MismatchResult(weight_N, dropped_N, off_policy_N, acted_NM)
