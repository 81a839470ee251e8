"""Statistics of an update for the log, from the same tensors as the coefficients.

Every statistic is a sum over tokens, logged with its count or weight, so that minibatches add up exactly and no mean of
means is taken. ``docs/metrics.md`` names the metric that each sum becomes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cohort.objective.coefficients import Cause, Coefficients, surrogate_value
from cohort.objective.kl import MAX_LOG_GAP, k1, k3, kl_correction, kl_multiplier
from cohort.objective.ratio import MAX_LOG_RATIO, anchored_log_ratio, exp_clamped, leveled_log_ratio
from cohort.objective.segments import prefix_sums, segment_count, segment_mean, segment_sum
from cohort.objective.trust import trust_region
from cohort.presets.objective import Objective

VERY_UNLIKELY = 1e-4
"""rho of a token that the trainer finds much less likely than the sampler did: rounding does not explain such a gap."""
TOP_SHARE = 0.001
"""The share of tokens, those of largest KL coefficient, whose part of the KL term's gradient is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTokens:
    """All tokens of a minibatch, after their forward pass. Shape ``[N]`` each."""

    logps_N: Tensor
    entropy_N: Tensor
    """Entropy of the current policy where the token was drawn, over what it was drawn from."""
    collision_N: Tensor
    """``sum_v p_v^2`` there: a token's gradient in the logits has the squared size ``c^2 (1 - 2 p + sum_v p_v^2)``."""
    advantages_N: Tensor
    weights_N: Tensor
    base_weights_N: Tensor
    sequence_N: Tensor
    coefficients: Coefficients
    sampler_logps_N: Tensor
    old_logps_N: Tensor | None = None
    ref_logps_N: Tensor | None = None
    full_logps_N: Tensor | None = None
    """The sampler's log-probs over the same part of the vocabulary as ours, if ``sampler_logps_N`` are over less."""

    def select(self, chosen_N: Tensor) -> UpdateTokens:
        """The chosen tokens."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen: dict[str, Any] = {name: value[chosen_N] for name, value in given.items() if isinstance(value, Tensor)}
        return replace(self, **chosen, coefficients=Coefficients(*(values[chosen_N] for values in self.coefficients)))


@dataclass(frozen=True, slots=True)
class TokenStatistics:
    """Statistics of the tokens of one update; those of several updates add up with ``+``."""

    sums: dict[str, float]
    maxima: dict[str, float]
    values: dict[str, Tensor]
    """Per token, on the CPU, for quantiles."""

    def __add__(self, other: TokenStatistics) -> TokenStatistics:
        return TokenStatistics(
            {key: self.sums.get(key, 0.0) + other.sums.get(key, 0.0) for key in self.sums | other.sums},
            {key: max(self.maxima.get(key, 0.0), other.maxima.get(key, 0.0)) for key in self.maxima | other.maxima},
            {
                key: torch.cat([each.values[key] for each in (self, other) if key in each.values])
                for key in self.values | other.values
            },
        )

    @classmethod
    def of_idle(cls, tokens: int, masked: int = 0, sequences: int = 0) -> TokenStatistics:
        """Statistics of tokens without a pass, and of their sequences: ``masked`` of them are not in the loss, the
        others have advantage 0, and no other term needs them."""
        causes = {f"cause_{cause.name.lower()}": 0.0 for cause in Cause}
        causes |= {"cause_no_advantage": float(tokens - masked), "cause_masked": float(masked)}
        sums = {"all_tokens": float(tokens), "all_sequences": float(sequences), "tokens": 0.0, **causes}
        return cls(sums, {"not_clipped_low": 1.0} if tokens > masked else {}, {})


@torch.no_grad()
def token_statistics(objective: Objective, tokens: UpdateTokens) -> TokenStatistics:
    """Sums over the loss tokens of a minibatch, their largest gaps, and the values for quantiles."""
    count, sequences = tokens.logps_N.numel(), _sum(torch.bincount(tokens.sequence_N) > 0)
    cause_counts = torch.bincount(tokens.coefficients.cause_N.long(), minlength=len(Cause))
    loss_N = tokens.base_weights_N > 0
    if not bool(loss_N.all()):
        tokens = tokens.select(loss_N)
    old_N = tokens.logps_N if tokens.old_logps_N is None else tokens.old_logps_N
    log_rho_N = (old_N - tokens.sampler_logps_N).nan_to_num(nan=0.0)
    like_N = tokens.sampler_logps_N if tokens.full_logps_N is None else tokens.full_logps_N
    gap_N = (old_N - like_N).nan_to_num(nan=0.0).abs()
    sums = {
        "sampler_gap": _sum(gap_N),
        "all_tokens": torch.tensor(count),
        "all_sequences": sequences,
        "tokens": torch.tensor(tokens.logps_N.numel()),
        **{f"cause_{cause.name.lower()}": cause_counts[cause] for cause in Cause},
        "policy_value": _sum(tokens.weights_N * tokens.coefficients.value_N),
        "policy_value_at_ratio_1": value_at_ratio_one(objective, tokens),
        **_gradient_sums(tokens),
        **_ratio_sums(objective, tokens),
        **_mismatch_sums(tokens, log_rho_N),
        **_rule_sums(objective, tokens),
        **_entropy_sums(tokens),
    }
    gaps, shares = {"sampler_gap": gap_N}, clipped_shares(objective, tokens)
    if shares is not None:
        sums |= {"clipped_low": _sum(shares.low_U), "clipped_high": _sum(shares.high_U)}
        gaps |= {"not_clipped_low": 1 - shares.low_S, "clipped_high": shares.high_S}
    if tokens.ref_logps_N is not None:
        sums |= _kl_sums(objective, tokens, tokens.ref_logps_N)
        gaps["kl_gap"] = (tokens.ref_logps_N - tokens.logps_N).abs()
    maxima = {name: gap_N.max() if gap_N.numel() else gap_N.new_zeros(()) for name, gap_N in gaps.items()}
    values = {"log_ratio": tokens.coefficients.log_ratio_N, "log_rho": log_rho_N, "entropy": tokens.entropy_N}
    return TokenStatistics(_floats(sums), _floats(maxima), {key: value.float().cpu() for key, value in values.items()})


def value_at_ratio_one(objective: Objective, tokens: UpdateTokens) -> Tensor:
    """The policy term's value if every ratio were 1: the value of a first update, whatever is learned."""
    zero_N = torch.zeros_like(tokens.logps_N)
    a_N, sequence_N = tokens.advantages_N.to(zero_N), tokens.sequence_N
    trusted = trust_region(
        objective.trust_region, zero_N, a_N, tokens.logps_N, token_log_ratio_N=zero_N, sequence_N=sequence_N
    )
    return _sum(tokens.weights_N * surrogate_value(objective, trusted, tokens.logps_N, a_N, sequence_N))


class ClippedShares(NamedTuple):
    """Where ratios are beyond the bounds of the trust region on the side to which A pushes."""

    low_U: Tensor
    """Of each unit, a token or, if the ratio is that of a sequence, a sequence: whether A < 0 and r < low."""
    high_U: Tensor
    """Whether A > 0 and r > high."""
    low_S: Tensor
    """Of each sequence with loss tokens, the share of its tokens."""
    high_S: Tensor


def clipped_shares(objective: Objective, tokens: UpdateTokens) -> ClippedShares | None:
    """The clipped units of loss tokens, whatever else silences them; None if the trust region has no bounds on a ratio.

    The bounds are those of the rule, and the ratio is at the level that the rule uses.
    """
    rule, sequence_N = objective.trust_region, tokens.sequence_N
    low, high = getattr(rule, "low", None), getattr(rule, "high", None)
    if rule is None or low is None or high is None or rule.of_probabilities:
        return None
    level = "token" if rule.of_single_tokens else objective.ratio_level
    ratio_N = exp_clamped(leveled_log_ratio(tokens.coefficients.log_ratio_N, level, sequence_N))
    low_N = ((tokens.advantages_N < 0) & (ratio_N < low)).to(ratio_N)
    high_N = ((tokens.advantages_N > 0) & (ratio_N > high)).to(ratio_N)
    count = segment_count(sequence_N)
    present_S = torch.bincount(sequence_N, minlength=count) > 0
    low_S, high_S = (segment_mean(values_N, sequence_N, count)[present_S] for values_N in (low_N, high_N))
    if per_sequence(objective):
        return ClippedShares(low_S, high_S, low_S, high_S)
    return ClippedShares(low_N, high_N, low_S, high_S)


def per_sequence(objective: Objective) -> bool:
    """Whether the trust region acts on ratios of whole sequences."""
    rule = objective.trust_region
    return objective.ratio_level.startswith("sequence") and not (rule is not None and rule.of_single_tokens)


def _gradient_sums(tokens: UpdateTokens) -> dict[str, Tensor]:
    """The size of each term of the gradient: L1 of the coefficients, and energy in the logits."""
    policy_N, kl_N = tokens.coefficients.policy_N, tokens.coefficients.kl_N
    # |d logp / d logits|^2 = (1 - p)^2 + sum of the others' p_v^2
    energy_N = (1 - 2 * tokens.logps_N.exp() + tokens.collision_N).clamp(min=0)
    return {
        "policy_l1": _sum(policy_N.abs()),
        "kl_l1": _sum(kl_N.abs()),
        "policy_sizes": _sum(policy_N.abs() * energy_N.sqrt()),
        "policy_energy": _sum(policy_N**2 * energy_N),
        "kl_energy": _sum(kl_N**2 * energy_N),
        "cross_energy": _sum(policy_N * kl_N * energy_N),
    }


def _ratio_sums(objective: Objective, tokens: UpdateTokens) -> dict[str, Tensor]:
    log_ratio_N, a_N, sequence_N = tokens.coefficients.log_ratio_N, tokens.advantages_N, tokens.sequence_N
    ratio_N = exp_clamped(log_ratio_N)
    rule = objective.trust_region
    low, high = 0.8, 1.2
    if rule is not None and (rule.of_single_tokens or objective.ratio_level == "token") and not rule.of_probabilities:
        low, high = getattr(rule, "low", low), getattr(rule, "high", high)  # the ratios here are those of single tokens
    up_N, down_N = a_N > 0, a_N < 0
    sums = {
        "ratio": _sum(ratio_N),
        "ratio_squared": _sum(ratio_N**2),
        "held": _sum(log_ratio_N.abs() > MAX_LOG_RATIO),
        "above_positive": _sum(up_N & (ratio_N > high)),
        "above_negative": _sum(down_N & (ratio_N > high)),
        "below_positive": _sum(up_N & (ratio_N < low)),
        "below_negative": _sum(down_N & (ratio_N < low)),
    }
    count = segment_count(sequence_N)
    lengths_S = torch.bincount(sequence_N, minlength=count)
    weight_S = exp_clamped(segment_sum(log_ratio_N, sequence_N, count))
    mean_a_S = segment_sum(a_N.to(log_ratio_N), sequence_N, count)
    for sign, of_N, of_S in (
        ("positive", up_N, (mean_a_S > 0) & (lengths_S > 0)),
        ("negative", down_N, (mean_a_S < 0) & (lengths_S > 0)),
    ):
        for level, weight, chosen in (("token", ratio_N, of_N), ("sequence", weight_S, of_S)):
            sums |= {
                f"ess_{level}_{sign}_n": _sum(chosen),
                f"ess_{level}_{sign}_w": _sum(weight * chosen),
                f"ess_{level}_{sign}_w2": _sum(weight**2 * chosen),
            }
    return sums


def _mismatch_sums(tokens: UpdateTokens, log_rho_N: Tensor) -> dict[str, Tensor]:
    rho_N = exp_clamped(log_rho_N)
    count = segment_count(tokens.sequence_N)
    unlikely_S = segment_sum((rho_N < VERY_UNLIKELY).to(rho_N), tokens.sequence_N, count) > 0
    # The half of its completion that a token is in: a drift between the halves means an off-by-one or a temperature.
    position_N = prefix_sums(torch.ones_like(log_rho_N), tokens.sequence_N)
    late_N = position_N > torch.bincount(tokens.sequence_N, minlength=count)[tokens.sequence_N] / 2
    return {
        "rho_k1_late": _sum(-log_rho_N * late_N),
        "late_tokens": _sum(late_N),
        "rho": _sum(rho_N),
        "rho_squared": _sum(rho_N**2),
        "rho_k1": _sum(-log_rho_N),
        "rho_k3": _sum(torch.expm1(log_rho_N.clamp(-MAX_LOG_GAP, MAX_LOG_GAP)) - log_rho_N),
        "unlikely_sequences": _sum(unlikely_S),
        "sequences": _sum(torch.bincount(tokens.sequence_N, minlength=count) > 0),
    }


def rule_names(objective: Objective) -> list[str]:
    """A name for each mismatch rule, numbered if several have the same rule."""
    rules = [rule.rule for rule in objective.mismatch]
    counts = [rules[: index + 1].count(rule) for index, rule in enumerate(rules)]
    return [f"{rule}_no_{count}" if count > 1 else rule for rule, count in zip(rules, counts, strict=True)]


def _rule_sums(objective: Objective, tokens: UpdateTokens) -> dict[str, Tensor]:
    """Tokens and sequences on which each mismatch rule acted."""
    count = segment_count(tokens.sequence_N)
    sums = {}
    for name, acted_N in zip(rule_names(objective), tokens.coefficients.acted_NM.T, strict=True):
        sums[f"rule_tokens/{name}"] = _sum(acted_N)
        sums[f"rule_sequences/{name}"] = _sum(segment_sum(acted_N.float(), tokens.sequence_N, count) > 0)
    return sums


def _entropy_sums(tokens: UpdateTokens) -> dict[str, Tensor]:
    a_N = tokens.advantages_N
    return {
        "entropy": _sum(tokens.entropy_N),
        "logp": _sum(tokens.logps_N),
        "advantage": _sum(a_N),
        "logp_advantage": _sum(tokens.logps_N * a_N),
    }


def _kl_sums(objective: Objective, tokens: UpdateTokens, ref_logps_N: Tensor) -> dict[str, Tensor]:
    k1_N, k3_N = k1(tokens.logps_N, ref_logps_N), k3(tokens.logps_N, ref_logps_N)
    anchor_N = tokens.sampler_logps_N if objective.kl.anchor == "sampler" else tokens.old_logps_N
    correction_N = kl_correction(objective.kl, anchored_log_ratio(tokens.logps_N, anchor_N), tokens.sequence_N)
    weighted_N = k3_N if correction_N is None else correction_N * k3_N
    part_N = tokens.coefficients.kl_N.abs()
    top = max(1, int(TOP_SHARE * part_N.numel())) if part_N.numel() else 0
    return {
        "k1": _sum(k1_N),
        "k1_squared": _sum(k1_N**2),
        "k3": _sum(k3_N),
        "k3_squared": _sum(k3_N**2),
        "forward_coefficient": _sum(kl_multiplier(tokens.logps_N, ref_logps_N, direction="forward")),
        "k3_weighted": _sum(weighted_N),
        "kl_value": _sum(tokens.base_weights_N * k3_N),
        "kl_value_weighted": _sum(tokens.base_weights_N * weighted_N),
        "kl_held": _sum(k1_N.abs() > MAX_LOG_GAP),
        "kl_top": _sum(part_N.topk(top).values),
    }


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _floats(named: dict[str, Tensor]) -> dict[str, float]:
    """One transfer from the device for all of them."""
    device = next((value.device for value in named.values() if value.device.type != "cpu"), torch.device("cpu"))
    stacked = torch.stack([value.to(device=device, dtype=torch.float64) for value in named.values()])
    return dict(zip(named, stacked.tolist(), strict=True))
