"""Pure math on flat token tensors: no settings file, no model, no logging."""

from cohort.objective.advantages import (
    GroupStatistics,
    combined_advantages,
    group_statistics,
    live_groups,
    outcome_advantages,
)
from cohort.objective.aggregation import token_weights
from cohort.objective.coefficients import Cause, Coefficients, coefficients
from cohort.objective.controllers import entropy_weight, next_beta, next_entropy_coefficient
from cohort.objective.credit import Outcomes, process_advantages, token_advantages
from cohort.objective.diagnostics import TokenStatistics, UpdateTokens, token_statistics
from cohort.objective.explain import coefficient_table, explain, try_user_functions
from cohort.objective.kl import k1, k2, k3, kl_correction, kl_multiplier
from cohort.objective.mismatch import MismatchResult, mismatch_weights
from cohort.objective.ratio import importance_ratio, leveled_log_ratio
from cohort.objective.segments import prefix_sums, segment_count, segment_mean, segment_sum, suffix_sums
from cohort.objective.shaping import soft_overlong_punishment, top_k_of_group, unlikeliness
from cohort.objective.trust import (
    Trusted,
    bernoulli_kl,
    custom_rule,
    ppo_clip_multiplier,
    ppo_clip_sides,
    ppo_clip_value,
    trust_region,
)
from cohort.objective.vocabulary import entropy, top_entropy_tokens, vocabulary_kl
from cohort.presets import PRESETS, Objective

__all__ = [
    "PRESETS",
    "Cause",
    "Coefficients",
    "GroupStatistics",
    "MismatchResult",
    "Objective",
    "Outcomes",
    "TokenStatistics",
    "Trusted",
    "UpdateTokens",
    "bernoulli_kl",
    "coefficient_table",
    "coefficients",
    "combined_advantages",
    "custom_rule",
    "entropy",
    "entropy_weight",
    "explain",
    "group_statistics",
    "importance_ratio",
    "k1",
    "k2",
    "k3",
    "kl_correction",
    "kl_multiplier",
    "leveled_log_ratio",
    "live_groups",
    "mismatch_weights",
    "next_beta",
    "next_entropy_coefficient",
    "outcome_advantages",
    "ppo_clip_multiplier",
    "ppo_clip_sides",
    "ppo_clip_value",
    "prefix_sums",
    "process_advantages",
    "segment_count",
    "segment_mean",
    "segment_sum",
    "soft_overlong_punishment",
    "suffix_sums",
    "token_advantages",
    "token_statistics",
    "token_weights",
    "top_entropy_tokens",
    "top_k_of_group",
    "trust_region",
    "try_user_functions",
    "unlikeliness",
    "vocabulary_kl",
]
