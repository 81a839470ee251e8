"""Pure math on flat token tensors: no settings file, no model, no logging."""

from cohort.objective.advantages import combined_advantages, group_statistics, live_groups, outcome_advantages
from cohort.objective.aggregation import token_weights
from cohort.objective.coefficients import Cause, Coefficients, coefficients
from cohort.objective.controllers import applied_entropy_coefficient, next_beta, next_entropy_coefficient
from cohort.objective.credit import Outcomes, soft_overlong_punishment, token_advantages
from cohort.objective.diagnostics import TokenStatistics, UpdateTokens, per_sequence, token_statistics
from cohort.objective.explain import coefficient_table, explain, try_user_functions
from cohort.objective.kl import k1, k2, k3, kl_correction, kl_multiplier
from cohort.objective.mismatch import mismatch_weights
from cohort.objective.ratio import anchored_log_ratio, importance_ratio
from cohort.objective.segments import segment_count, segment_mean, segment_sum
from cohort.objective.trust import ppo_clip_multiplier, trust_region
from cohort.objective.vocabulary import entropy, top_entropy_tokens, vocabulary_kl
from cohort.presets import PRESETS, Objective
