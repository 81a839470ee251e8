"""Pure math on flat token tensors: no configuration, no model, no logging."""

from cohort.objective.advantages import GroupStatistics, group_advantages, group_statistics
from cohort.objective.aggregation import token_weights
from cohort.objective.coefficients import Coefficients, coefficients
from cohort.objective.diagnostics import token_sums
from cohort.objective.kl import k1, k2, k3, kl_multiplier
from cohort.objective.presets import PRESETS, Objective
from cohort.objective.ratio import importance_ratio, ppo_clip_multiplier, ppo_clip_sides, ppo_clip_value

__all__ = [
    "PRESETS",
    "Coefficients",
    "GroupStatistics",
    "Objective",
    "coefficients",
    "group_advantages",
    "group_statistics",
    "importance_ratio",
    "k1",
    "k2",
    "k3",
    "kl_multiplier",
    "ppo_clip_multiplier",
    "ppo_clip_sides",
    "ppo_clip_value",
    "token_sums",
    "token_weights",
]
