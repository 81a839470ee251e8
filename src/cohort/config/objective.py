"""The settings of section ``[objective]``: a preset, changes to its parts, and the schedule of updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from cohort.config.section import PositiveInt, Section
from cohort.presets import Objective, preset
from cohort.presets.base import Part


def _plain(value: Any) -> Any:
    """A part given as an object, as the table that a file would hold."""
    if isinstance(value, Part):
        value = {"rule": value.rule, **value.numbers()}
    if isinstance(value, Mapping):  # an absent number is a word: a file has no None
        return {key: "none" if item is None else item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


Setting = Annotated[Any, BeforeValidator(_plain)]
"""A word, a number, or a table of a part's numbers. Checked by ``Objective.replace``."""


class ObjectiveConfig(Section):
    """The objective: a preset, and what differs from it. `cohort objective` explains both. Unset: as in
    the preset; a part's absence is the word "none"."""

    preset: Annotated[str, BeforeValidator(lambda name: preset(name).identity if isinstance(name, str) else name)] = (
        "default@1"
    )
    """A row of `cohort objective`: its newest version, or name@version."""
    beta: float | None = None
    """Weight of the KL term (kl.beta). 0: no KL, and no reference model in memory. The paper's is 0.04."""
    epsilon: float | None = None
    """The PPO clip's lower bound is the ratio 1 - epsilon (trust_region.low), ..."""
    epsilon_high: float | None = None
    """... and its upper bound 1 + epsilon_high (trust_region.high). Unset: epsilon."""
    baseline: Setting = None
    """What is taken off a reward: none, group_mean, leave_one_out, length_weighted, batch_mean, second_best; or a
    number."""
    scale: Setting = None
    """What the rest is divided by: none, group_std, batch_std, group_mean; or a table,
    { rule = "group_std", ddof = 1, epsilon = 1e-6 }."""
    reward_aggregation: Setting = None
    """Several rewards: sum_then_normalize, normalize_then_sum, normalize_sum_normalize."""
    soft_overlong: Setting = None
    """Penalty near the length limit: none, or { rule = "soft_overlong", cache_share = 0.2 }."""
    unlikeliness: Setting = None
    """Less reward for a group's likelier completions: none, or { rule = "unlikeliness", strength = 0.25 }."""
    sign_weights: Setting = None
    """Factors of positive and negative advantages: none, or { rule = "sign_weights", positive = 1, negative = 1 }."""
    group_filter: Setting = None
    """none, drop_dead, { rule = "dynamic_sampling", max_rounds = 4 }; or only the k best completions of a group teach,
    { rule = "top_k", k = 8, metric = "shortest" }."""
    credit: Setting = None
    """Which tokens a reward belongs to: outcome, process, return_to_go, given. For "process" and "given" a reward
    function returns a list with a number per token."""
    discount: Setting = None
    """Of later rewards, per token, with credit "return_to_go"."""
    truncated: Setting = None
    """Completions cut by the length limit: keep, mask, zero, penalize; after the advantages of their whole group."""
    truncated_penalty: Setting = None
    """What "penalize" takes off their advantage."""
    ratio_anchor: Setting = None
    """What the current policy is divided by: self, old, sampler."""
    ratio_level: Setting = None
    """token, sequence_mean, sequence_mean_token, sequence_product, prefix_product."""
    trust_region: Setting = None
    """none, ppo_clip, mask, cap, sapo, gamma, tv_mask, kl_mask, gmpo, fipo; a table, { rule = "ppo_clip", low = 0.8,
    high = 1.28 }; or your own function of ratio and advantage, "module:function"."""
    mismatch: Setting = None
    """What is done about sampler and trainer disagreeing: none, or a list of tables with the rules weight, veto,
    off_policy_mask: [{ rule = "weight", level = "token", mode = "truncate", high = 2.0 }]."""
    top_entropy: Setting = None
    """Share of the tokens, those of highest entropy, that the policy term uses. 1: all."""
    kl: Setting = None
    """The KL term: { direction = "reverse", scope = "token", place = "loss", correction = "token_ratio" }; or
    "k3_legacy", k3 as a loss as in DeepSeekMath."""
    entropy: Setting = None
    """Entropy bonus: none, or { rule = "entropy", coefficient = 0.001 }."""
    aggregation: Setting = None
    """The mean: seq_mean_token_mean, token_mean, prompt_mean, constant, seq_sum, token_sum."""
    aggregation_length: Setting = None
    """L of aggregation "constant". Unset: rollout.max_completion_length."""
    denominator: Setting = None
    """Whether tokens that top_entropy leaves out count in the mean: base (they do) or after_masks."""
    count_empty: Setting = None
    """Whether completions without a loss token count in the mean."""
    num_iterations: PositiveInt = 1
    """Passes over a rollout (the papers' mu)."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass; each uses its share of the rollout's prompts."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO). Needs beta > 0."""
    ref_model_sync_steps: PositiveInt = 512
    """Optimizer updates between two moves of the reference."""
    ref_model_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """reference <- alpha * policy + (1 - alpha) * reference."""

    @property
    def updates_per_rollout(self) -> int:
        """How many optimizer steps use one rollout."""
        return self.num_iterations * self.minibatches

    def parts(self) -> tuple[str, ...]:
        """The settings that are parts of the objective."""
        own = ("preset", "num_iterations", "minibatches", "sync_ref_model", "ref_model_sync_steps")
        return tuple(name for name in type(self).model_fields if name not in (*own, "ref_model_mixup_alpha"))

    def changes(self) -> Mapping[str, Any]:
        """What is set of them, beside the preset."""
        return {name: value for name in self.parts() if (value := getattr(self, name)) is not None}

    def resolve(self) -> Objective:
        """The preset with its changes.

        Raises:
            ConfigError: a part is unknown, or cannot be combined with the others.
        """
        return preset(self.preset).replace(**self.changes())
