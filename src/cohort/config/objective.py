"""The settings of section ``[objective]``: a preset, changes to its parts, and the schedule of updates."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field

from cohort.config.section import PositiveInt, Section
from cohort.presets import Objective, choices, preset, setting_names
from cohort.presets.base import Part


def _plain(value: object) -> object:
    """A part given as an object, as the table that a file would contain."""
    if isinstance(value, Part):
        value = {"rule": value.rule, **value.numbers()}
    if isinstance(value, Mapping):  # an absent number is a word: a file has no None
        return {key: "none" if item is None else item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


Setting = Annotated[object, BeforeValidator(_plain)]
"""A word, a number, or a table of a part's numbers, as the user wrote it; ``Objective.replace`` gives it its type."""


class ObjectiveConfig(Section):
    """The objective: a preset, and changes to it. `cohort objective` explains both. An unset setting is the preset's;
    the word "none" is the absence of a part."""

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
    """Subtracted from a reward; also a number, or a user's function "file.py:function"."""
    scale: Setting = None
    """The divisor of the rest; or a table, { rule = "group_std", ddof = 1, epsilon = 1e-6 }."""
    reward_aggregation: Setting = None
    """How several rewards become one."""
    soft_overlong: Setting = None
    """Penalty near the length limit: none, or { rule = "soft_overlong", cache_share = 0.2 }."""
    unlikeliness: Setting = None
    """A lower reward for a group's likelier completions: none, or { rule = "unlikeliness", strength = 0.25 }."""
    sign_weights: Setting = None
    """Factors of positive and negative advantages: none, or { rule = "sign_weights", positive = 1, negative = 1 }."""
    group_filter: Setting = None
    """The groups and completions that are used; or a table, { rule = "top_k", k = 8, metric = "shortest" }."""
    credit: Setting = None
    """Which tokens a reward belongs to. For "process" and "given" a reward function returns a list with a number per
    token."""
    discount: Setting = None
    """Of later rewards, per token, with credit "return_to_go"."""
    truncated: Setting = None
    """Completions cut by the length limit, after the advantages of their whole group."""
    truncated_penalty: Setting = None
    """Subtracted from their advantage by "penalize"."""
    ratio_anchor: Setting = None
    """The policy that the current policy is divided by."""
    ratio_level: Setting = None
    """The level of the ratio."""
    trust_region: Setting = None
    """The limit of an update; or a table, { rule = "ppo_clip", low = 0.8, high = 1.28 }; or a user's function of ratio
    and advantage, "module:function"."""
    mismatch: Setting = None
    """Corrections for a disagreement between sampler and trainer: none, or a list of tables,
    [{ rule = "weight", level = "token", mode = "truncate", high = 2.0 }]."""
    top_entropy: Setting = None
    """Share of the tokens, those of highest entropy, that the policy term uses. 1: all."""
    kl: Setting = None
    """The KL term: { direction = "reverse", scope = "token", place = "loss", correction = "token_ratio" }; or
    "k3_legacy", k3 as a loss as in DeepSeekMath."""
    entropy: Setting = None
    """Entropy bonus: none, or { rule = "entropy", coefficient = 0.001 }."""
    aggregation: Setting = None
    """The mean over tokens and completions."""
    aggregation_length: Setting = None
    """L of aggregation "constant". Unset: rollout.max_completion_length."""
    denominator: Setting = None
    """Whether tokens that top_entropy leaves out count in the mean: base (they do) or after_masks."""
    count_empty: Setting = None
    """Whether completions without a loss token count in the mean."""
    num_iterations: PositiveInt = 1
    """Passes over a rollout (the papers' mu)."""
    minibatches: PositiveInt | None = None
    """Optimizer steps per pass; each uses its share of the rollout's prompts. Unset: the preset's, which
    'cohort objective NAME' shows."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO). Needs beta > 0."""
    ref_model_sync_steps: PositiveInt = 512
    """Optimizer updates between two moves of the reference."""
    ref_model_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """reference <- alpha * policy + (1 - alpha) * reference."""

    @property
    def updates_per_rollout(self) -> int:
        """How many optimizer steps use one rollout."""
        return self.num_iterations * self.resolved_minibatches

    @property
    def resolved_minibatches(self) -> int:
        """``minibatches``, or the preset's where it is unset."""
        return self.minibatches or preset(self.preset).minibatches

    def changes(self) -> Mapping[str, object]:
        """The changes to the preset."""
        given = {name: getattr(self, name) for name in setting_names()}
        return {name: value for name, value in given.items() if value is not None}

    def resolve(self) -> Objective:
        """The preset with its changes.

        Raises:
            ConfigError: a part is unknown, or cannot be combined with the others.
        """
        changed = preset(self.preset).replace(**self.changes())
        return changed.model_copy(update={"minibatches": self.resolved_minibatches})


for _name, _field in ObjectiveConfig.model_fields.items():
    if len(_words := choices(_name)) > 1:
        _text = f"{_field.description} Values: {', '.join(_words)}."
        _field.description = "\n".join(textwrap.wrap(_text, 116))
