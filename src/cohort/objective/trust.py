"""Trust regions: what an update may still move.

A rule is its multiplier phi(ratio, A), the factor by which a token's advantage enters its gradient coefficient, and,
for the log only, the surrogate's value. ``side_N`` says where a rule silenced a token or held its ratio: -1 below, +1
above, 0 nowhere.

    rule        phi                                                          value
    none        r                                                            r A
    ppo_clip    r; 0 where A > 0 and r > high, or A < 0 and r < low          min(r A, clip(r, low, high) A)
      dual      ... or A < 0 and r > dual                                    max of that and dual A, where A < 0
    mask        r; 0 outside [low, high] (signed: only where A pushes out)   phi A
    cap         clip(r, low, high), a constant weight                        phi A l
    sapo        r sech^2(tau (r - 1) / 2)                                    sigmoid(tau (r - 1)) (4 / tau) A
    gamma       r^k exp(lambda (1 - r)), a constant weight                   phi A l
    tv_mask     min(r, cap); 0 where A > 0 and p - p_a > high, ...           phi A
    kl_mask     min(r, cap); 0 where KL(p_a || p) > threshold and moving on  phi A
    gmpo        G = exp(mean of clipped log r); 0 where the token is clipped G A
    fipo        ppo_clip times a detached weight of the later log-ratios     the same times ppo_clip's value

Sources: PPO (arXiv 1707.06347), dual clip (1912.09729), INTELLECT-2 (2505.07291), CISPO (2506.13585), SAPO
(2511.20347), VESPO (2602.10693), DPPO (2602.04879), GMPO (2507.20673), FIPO (2603.19835).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cohort.errors import ConfigError
from cohort.objective.own import call_own
from cohort.objective.ratio import MAX_LOG_RATIO, exp_held, leveled_log_ratio
from cohort.objective.segments import by_sign, suffix_sums
from cohort.plugins import load_function
from cohort.presets.parts import FIPO, GMPO, SAPO, Cap, Custom, Gamma, KLMask, Mask, PPOClip, TrustRegion, TVMask


@dataclass(frozen=True, slots=True)
class Trusted:
    """What a rule makes of the tokens. Shape ``[N]`` each."""

    phi_N: Tensor
    """The gradient multiplier."""
    value_N: Tensor
    """The surrogate per token; weighted by 1/Z and summed it is the policy term's value."""
    side_N: Tensor
    """int8: -1 where the rule acted on a low ratio, +1 on a high one, 0 where it did not act."""


def trust_region(
    rule: TrustRegion | None,
    log_ratio_N: Tensor,
    advantages_N: Tensor,
    logps_N: Tensor,
    *,
    token_log_ratio_N: Tensor | None = None,
    sequence_N: Tensor | None = None,
) -> Trusted:
    """Apply a rule. Formulas in the module's header.

    Args:
        rule: the rule with its numbers; None: no trust region.
        log_ratio_N: log of each token's ratio at the objective's level, shape ``[N]``.
        advantages_N: shape ``[N]``. Where it is 0 nothing is silenced, and phi does not matter.
        logps_N: current log-probs of the sampled tokens; the anchor's are ``logps - token_log_ratio``.
        token_log_ratio_N: log-ratios of the single tokens (GMPO, FIPO, DPPO); None: ``log_ratio_N``.
        sequence_N: sequence ids (GMPO, FIPO).

    A token exactly on a bound is not silenced: the surrogate's ``min`` has its full gradient there.
    """
    token_N = log_ratio_N if token_log_ratio_N is None else token_log_ratio_N
    ratio_N, a_N = exp_held(log_ratio_N), advantages_N
    match rule:
        case None:
            return Trusted(ratio_N, ratio_N * a_N, _sides(ratio_N))
        case PPOClip(low=low, high=high, dual=dual):
            below_N, above_N = ppo_clip_sides(ratio_N, a_N, low, high, dual)
            phi_N = ratio_N.masked_fill(below_N | above_N, 0)
            return Trusted(phi_N, ppo_clip_value(ratio_N, a_N, low, high, dual), _sides(ratio_N, below_N, above_N))
        case Mask(low=low, high=high, signed=signed):
            below_N, above_N = ratio_N < low, ratio_N > high
            if signed:
                below_N, above_N = below_N & (a_N < 0), above_N & (a_N > 0)
            return _silenced(ratio_N, a_N, below_N, above_N)
        case Cap(low=low, high=high):
            phi_N = ratio_N.clamp(low, high)
            return Trusted(phi_N, phi_N * a_N * logps_N, _sides(ratio_N, ratio_N < low, ratio_N > high))
        case SAPO():
            return _sapo(rule, ratio_N, a_N)
        case Gamma():
            return _gamma(rule, ratio_N, a_N, logps_N)
        case TVMask(low=low, high=high, cap=cap):
            moved_N = torch.exp(logps_N) - torch.exp(logps_N - token_N)
            return _silenced(ratio_N.clamp(max=cap), a_N, (a_N < 0) & (-moved_N > low), (a_N > 0) & (moved_N > high))
        case KLMask(threshold=threshold, cap=cap):
            far_N = bernoulli_kl(logps_N - token_N, logps_N) > threshold
            return _silenced(
                ratio_N.clamp(max=cap), a_N, far_N & (a_N < 0) & (token_N < 0), far_N & (a_N > 0) & (token_N > 0)
            )
        case GMPO(low=low, high=high):
            return _gmpo(token_N, a_N, sequence_N, low, high)
        case FIPO():
            clip = PPOClip(low=rule.low, high=rule.high, dual=rule.dual)
            clipped = trust_region(clip, log_ratio_N, a_N, logps_N)
            weight_N = _future_weight(rule, token_N, ratio_N, a_N, sequence_N)
            return Trusted(clipped.phi_N * weight_N, clipped.value_N * weight_N, clipped.side_N)
        case Custom():
            phi_N = _custom_phi(rule, ratio_N, a_N)
            return Trusted(phi_N, phi_N * a_N, _sides(ratio_N))


def ppo_clip_sides(
    ratio_N: Tensor, advantages_N: Tensor, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor]:
    """Which tokens the clip silences: ``(clipped_low_N, clipped_high_N)``, boolean.

    Low: A < 0 and ratio < low (the token is already as unlikely as allowed). High: A > 0 and ratio > high; with
    ``dual``, A < 0 and ratio > dual too. A token exactly on a bound is not clipped.
    """
    high_N = (advantages_N > 0) & (ratio_N > high)
    if dual is not None:
        high_N = high_N | ((advantages_N < 0) & (ratio_N > dual))
    return (advantages_N < 0) & (ratio_N < low), high_N


def ppo_clip_multiplier(
    ratio_N: Tensor, advantages_N: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """The clip's gradient multiplier: d/d logp of ``min(r A, clip(r, low, high) A)``, divided by A. Shape ``[N]``.

    Source: PPO (arXiv 1707.06347) eq. 7, as used by DeepSeekMath (arXiv 2402.03300) eq. 3.

    >>> r, a = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5]), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    >>> ppo_clip_multiplier(r, a, 0.8, 1.2)
    tensor([0.5000, 0.0000, 1.0000, 0.0000, 1.5000])
    """
    clipped_low_N, clipped_high_N = ppo_clip_sides(ratio_N, advantages_N, low, high, dual)
    return ratio_N.masked_fill(clipped_low_N | clipped_high_N, 0)


def ppo_clip_value(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """The clipped surrogate per token, ``min(r A, clip(r, low, high) A)``, and where A < 0 at least ``dual A``. For the
    log only. Shape ``[N]``.

    >>> ppo_clip_value(torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0]), 0.8, 1.2)
    tensor([ 1.2000, -1.5000, -0.8000])
    """
    value_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    if dual is None:
        return value_N
    return torch.where(advantages_N < 0, torch.maximum(value_N, dual * advantages_N), value_N)


def bernoulli_kl(anchor_logps_N: Tensor, logps_N: Tensor) -> Tensor:
    """KL of the two-way distributions {the sampled token, any other}: ``p_a log(p_a/p) + (1-p_a) log((1-p_a)/(1-p))``,
    never negative, at most the KL over the vocabulary. Shape ``[N]``.

    >>> bernoulli_kl(torch.tensor([0.5]).log(), torch.tensor([0.25]).log())
    tensor([0.1438])
    """
    tiny = torch.finfo(logps_N.dtype).tiny
    anchor_N, p_N = anchor_logps_N.exp(), logps_N.exp()
    rest_anchor_N = -torch.expm1(anchor_logps_N.clamp(max=0))
    rest_N = -torch.expm1(logps_N.clamp(max=0))
    own_N = anchor_N * (anchor_N.clamp(min=tiny).log() - p_N.clamp(min=tiny).log())
    other_N = rest_anchor_N * (rest_anchor_N.clamp(min=tiny).log() - rest_N.clamp(min=tiny).log())
    return (own_N + other_N).clamp(min=0)


def _silenced(weight_N: Tensor, advantages_N: Tensor, below_N: Tensor, above_N: Tensor) -> Trusted:
    phi_N = weight_N.masked_fill(below_N | above_N, 0)
    return Trusted(phi_N, phi_N * advantages_N, _sides(weight_N, below_N, above_N))


def _sides(like_N: Tensor, below_N: Tensor | None = None, above_N: Tensor | None = None) -> Tensor:
    side_N = torch.zeros_like(like_N, dtype=torch.int8)
    if below_N is not None:
        side_N = side_N.masked_fill(below_N, -1)
    return side_N if above_N is None else side_N.masked_fill(above_N, 1)


def _sapo(rule: SAPO, ratio_N: Tensor, a_N: Tensor) -> Trusted:
    tau_N = by_sign(a_N > 0, rule.tau_positive, rule.tau_negative, ratio_N)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1))
    phi_N = ratio_N * 4 * gate_N * (1 - gate_N)  # sech^2(x / 2) = 4 sigmoid(x) (1 - sigmoid(x))
    return Trusted(phi_N, gate_N * (4 / tau_N) * a_N, _sides(ratio_N))


def _gamma(rule: Gamma, ratio_N: Tensor, a_N: Tensor, logps_N: Tensor) -> Trusted:
    k_N = by_sign(a_N >= 0, rule.k_positive, rule.k_negative, ratio_N)
    lambda_N = by_sign(a_N >= 0, rule.lambda_positive, rule.lambda_negative, ratio_N)
    log_phi_N = k_N * ratio_N.log() + lambda_N * (1 - ratio_N)
    phi_N = torch.exp(log_phi_N.clamp(max=MAX_LOG_RATIO))  # far below 1 it may vanish; infinite it must not be
    return Trusted(phi_N, phi_N * a_N * logps_N, _sides(ratio_N))


def _gmpo(token_N: Tensor, advantages_N: Tensor, sequence_N: Tensor | None, low: float, high: float) -> Trusted:
    if sequence_N is None:
        raise ValueError("trust region 'gmpo' needs sequence_N: which sequence each token belongs to")
    bounds = torch.tensor([low, high], dtype=token_N.dtype, device=token_N.device).log()
    below_N, above_N = (advantages_N < 0) & (token_N < bounds[0]), (advantages_N > 0) & (token_N > bounds[1])
    clipped_N = torch.where(below_N, bounds[0], torch.where(above_N, bounds[1], token_N))
    mean_N = exp_held(leveled_log_ratio(clipped_N, "sequence_mean", sequence_N))
    return Trusted(mean_N.masked_fill(below_N | above_N, 0), mean_N * advantages_N, _sides(token_N, below_N, above_N))


def _future_weight(rule: FIPO, token_N: Tensor, ratio_N: Tensor, a_N: Tensor, sequence_N: Tensor | None) -> Tensor:
    if sequence_N is None:
        raise ValueError("trust region 'fipo' needs sequence_N: which sequence each token belongs to")
    future_N = suffix_sums(token_N, sequence_N, discount=2 ** (-1 / rule.half_life))
    weight_N = exp_held(future_N).clamp(rule.weight_low, rule.weight_high)
    return torch.where((a_N < 0) & (ratio_N > rule.safety), weight_N.clamp(max=1), weight_N)


@cache
def custom_rule(spec: str) -> Callable[..., Tensor]:
    """The function of a ``Custom`` rule, loaded once.

    Raises:
        ConfigError: there is no such function.
    """
    return load_function(spec, what="trust region")


def _custom_phi(rule: Custom, ratio_N: Tensor, a_N: Tensor) -> Tensor:
    phi_N = call_own(custom_rule(rule.function), f"trust region {rule.function}", ratio_N, a_N)
    if not bool(phi_N.isfinite().all()):
        raise ConfigError(f"trust region {rule.function} returned a multiplier that is not finite")
    return phi_N.to(ratio_N)
