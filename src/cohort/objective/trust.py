"""Trust regions: what an update may still move. One function per rule that ``cohort.presets.trust_regions`` declares.

A rule is its multiplier phi(ratio, A), the factor by which a token's advantage enters its gradient coefficient, and,
for the log only, the surrogate's value. ``side_N`` says where a rule silenced a token or clamped its ratio: -1 below,
+1 above, 0 nowhere.

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
    taper       clip(r, low, high) by the sign of A, a constant weight       phi A l
    gppo        r; the clipped bound times beta_low, beta_high where clipped phi A
"""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

import torch
from torch import Tensor

from cohort.errors import ConfigError
from cohort.objective.ratio import MAX_LOG_RATIO, exp_clamped, leveled_log_ratio
from cohort.objective.segments import by_sign, suffix_sums
from cohort.objective.user_function import call_user_function
from cohort.presets import trust_regions as rules


class Trusted(NamedTuple):
    """The result of a rule. Shape ``[N]`` each."""

    phi_N: Tensor
    """The gradient multiplier."""
    value_N: Tensor
    """The surrogate per token; weighted by 1/Z and summed it is the policy term's value."""
    side_N: Tensor
    """int8: -1 where the rule acted on a low ratio, +1 on a high one, 0 where it did not act."""


class Ratios(NamedTuple):
    """The arguments of a rule. Shape ``[N]`` each."""

    ratio_N: Tensor
    """At the objective's level."""
    advantages_N: Tensor
    logps_N: Tensor
    token_log_ratio_N: Tensor
    """Of the single tokens."""
    sequence_N: Tensor | None


def trust_region(
    rule: rules.Rule | None,
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
    return apply(rule, Ratios(exp_clamped(log_ratio_N), advantages_N, logps_N, token_N, sequence_N))


@singledispatch
def apply(rule: rules.Rule | None, at: Ratios) -> Trusted:
    """The mathematics of a rule, registered for its class; for None, the ratio itself."""
    assert rule is None, f"no function is registered for {type(rule).__name__}"
    return Trusted(at.ratio_N, at.ratio_N * at.advantages_N, _sides(at.ratio_N))


@apply.register
def _ppo_clip(rule: rules.PPOClip, at: Ratios) -> Trusted:
    ratio_N, a_N = at.ratio_N, at.advantages_N
    below_N, above_N = ppo_clip_sides(ratio_N, a_N, rule.low, rule.high, rule.dual)
    value_N = torch.minimum(ratio_N * a_N, ratio_N.clamp(rule.low, rule.high) * a_N)
    if rule.dual is not None:
        value_N = torch.where(a_N < 0, torch.maximum(value_N, rule.dual * a_N), value_N)
    return Trusted(ratio_N.masked_fill(below_N | above_N, 0), value_N, _sides(ratio_N, below_N, above_N))


@apply.register
def _(rule: rules.Mask, at: Ratios) -> Trusted:
    below_N, above_N = at.ratio_N < rule.low, at.ratio_N > rule.high
    if rule.signed:
        below_N, above_N = below_N & (at.advantages_N < 0), above_N & (at.advantages_N > 0)
    return _silenced(at.ratio_N, at, below_N, above_N)


@apply.register
def _(rule: rules.Cap, at: Ratios) -> Trusted:
    phi_N = at.ratio_N.clamp(rule.low, rule.high)
    return _constant_weight(phi_N, at, at.ratio_N < rule.low, at.ratio_N > rule.high)


@apply.register
def _(rule: rules.SAPO, at: Ratios) -> Trusted:
    tau_N = by_sign(at.advantages_N > 0, rule.tau_positive, rule.tau_negative, at.ratio_N)
    gate_N = torch.sigmoid(tau_N * (at.ratio_N - 1))
    phi_N = at.ratio_N * 4 * gate_N * (1 - gate_N)  # sech^2(x / 2) = 4 sigmoid(x) (1 - sigmoid(x))
    return Trusted(phi_N, gate_N * (4 / tau_N) * at.advantages_N, _sides(at.ratio_N))


@apply.register
def _(rule: rules.Gamma, at: Ratios) -> Trusted:
    up_N = at.advantages_N >= 0
    k_N = by_sign(up_N, rule.k_positive, rule.k_negative, at.ratio_N)
    lambda_N = by_sign(up_N, rule.lambda_positive, rule.lambda_negative, at.ratio_N)
    log_phi_N = k_N * at.ratio_N.log() + lambda_N * (1 - at.ratio_N)
    # phi may vanish far below 1 but must not become infinite.
    return _constant_weight(torch.exp(log_phi_N.clamp(max=MAX_LOG_RATIO)), at)


@apply.register
def _(rule: rules.TVMask, at: Ratios) -> Trusted:
    moved_N = torch.exp(at.logps_N) - torch.exp(at.logps_N - at.token_log_ratio_N)
    below_N, above_N = (at.advantages_N < 0) & (-moved_N > rule.low), (at.advantages_N > 0) & (moved_N > rule.high)
    return _silenced(at.ratio_N.clamp(max=rule.cap), at, below_N, above_N)


@apply.register
def _(rule: rules.KLMask, at: Ratios) -> Trusted:
    token_N, a_N = at.token_log_ratio_N, at.advantages_N
    far_N = bernoulli_kl(at.logps_N - token_N, at.logps_N) > rule.threshold
    below_N, above_N = far_N & (a_N < 0) & (token_N < 0), far_N & (a_N > 0) & (token_N > 0)
    return _silenced(at.ratio_N.clamp(max=rule.cap), at, below_N, above_N)


@apply.register
def _(rule: rules.GMPO, at: Ratios) -> Trusted:
    token_N, a_N = at.token_log_ratio_N, at.advantages_N
    low, high = torch.tensor([rule.low, rule.high], dtype=token_N.dtype, device=token_N.device).log()
    below_N, above_N = (a_N < 0) & (token_N < low), (a_N > 0) & (token_N > high)
    clipped_N = torch.where(below_N, low, torch.where(above_N, high, token_N))
    mean_N = exp_clamped(leveled_log_ratio(clipped_N, "sequence_mean", at.sequence_N))
    return Trusted(mean_N.masked_fill(below_N | above_N, 0), mean_N * a_N, _sides(token_N, below_N, above_N))


@apply.register
def _(rule: rules.FIPO, at: Ratios) -> Trusted:
    clipped = _ppo_clip(rule, at)
    if at.sequence_N is None:
        raise ValueError("trust region 'fipo' needs sequence_N: which sequence each token belongs to")
    future_N = suffix_sums(at.token_log_ratio_N, at.sequence_N, discount=2 ** (-1 / rule.half_life))
    weight_N = exp_clamped(future_N).clamp(rule.weight_low, rule.weight_high)
    unsafe_N = (at.advantages_N < 0) & (at.ratio_N > rule.safety)
    weight_N = torch.where(unsafe_N, weight_N.clamp(max=1), weight_N)
    return Trusted(clipped.phi_N * weight_N, clipped.value_N * weight_N, clipped.side_N)


@apply.register
def _(rule: rules.GradientPreservingClip, at: Ratios) -> Trusted:
    below_N, above_N = ppo_clip_sides(at.ratio_N, at.advantages_N, rule.low, rule.high)
    phi_N = at.ratio_N.masked_fill(below_N, rule.beta_low * rule.low).masked_fill(above_N, rule.beta_high * rule.high)
    return Trusted(phi_N, phi_N * at.advantages_N, _sides(at.ratio_N, below_N, above_N))


@apply.register
def _(rule: rules.Taper, at: Ratios) -> Trusted:
    up_N = at.advantages_N >= 0
    low_N = by_sign(up_N, rule.positive_low, rule.negative_low, at.ratio_N)
    high_N = by_sign(up_N, rule.positive_high, rule.negative_high, at.ratio_N)
    return _constant_weight(at.ratio_N.clamp(low_N, high_N), at, at.ratio_N < low_N, at.ratio_N > high_N)


@apply.register
def _(rule: rules.Custom, at: Ratios) -> Trusted:
    phi_N = call_user_function("trust region", rule.function, at.ratio_N, at.advantages_N)
    if not bool(phi_N.isfinite().all()):
        raise ConfigError(f"trust region {rule.function} returned a multiplier that is not finite")
    phi_N = phi_N.to(at.ratio_N)
    return Trusted(phi_N, phi_N * at.advantages_N, _sides(at.ratio_N))


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
    token_N = anchor_N * (anchor_N.clamp(min=tiny).log() - p_N.clamp(min=tiny).log())
    others_N = rest_anchor_N * (rest_anchor_N.clamp(min=tiny).log() - rest_N.clamp(min=tiny).log())
    return (token_N + others_N).clamp(min=0)


def _silenced(weight_N: Tensor, at: Ratios, below_N: Tensor, above_N: Tensor) -> Trusted:
    phi_N = weight_N.masked_fill(below_N | above_N, 0)
    return Trusted(phi_N, phi_N * at.advantages_N, _sides(weight_N, below_N, above_N))


def _constant_weight(
    phi_N: Tensor, at: Ratios, below_N: Tensor | None = None, above_N: Tensor | None = None
) -> Trusted:
    """A detached weight of A log(policy)."""
    return Trusted(phi_N, phi_N * at.advantages_N * at.logps_N, _sides(phi_N, below_N, above_N))


def _sides(like_N: Tensor, below_N: Tensor | None = None, above_N: Tensor | None = None) -> Tensor:
    side_N = torch.zeros_like(like_N, dtype=torch.int8)
    if below_N is not None:
        side_N = side_N.masked_fill(below_N, -1)
    return side_N if above_N is None else side_N.masked_fill(above_N, 1)
