"""An objective: one row of the table, every part named, what cannot be combined refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.errors import ConfigError
from cohort.presets.bounds import check_words
from cohort.presets.parts import (
    FIPO,
    GMPO,
    KL,
    Aggregation,
    BaselineRule,
    BatchStd,
    Cap,
    Credit,
    Denominator,
    DropDead,
    DynamicSampling,
    EntropyBonus,
    Gamma,
    GroupFilter,
    GroupMean,
    GroupStd,
    KLMask,
    Mismatch,
    MismatchWeight,
    RatioAnchor,
    RatioLevel,
    RewardAggregation,
    Scale,
    SignWeights,
    SoftOverlong,
    Truncated,
    TrustRegion,
    TVMask,
    Unlikeliness,
    Veto,
)

ABOUT = ("name", "version", "source", "summary")
"""Fields that say which row this is; all others are its parts."""
GROUP_BASELINES = ("group_mean", "leave_one_out", "length_weighted", "second_best")
"""Baselines that compare a completion with the others of its group."""
WHOLE_SEQUENCE_LEVELS = ("sequence_mean", "sequence_product")
"""Ratio levels at which a completion has one ratio and one advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Everything that distinguishes one variant from another. Made once, checked when made.

    Raises:
        ConfigError: a number is out of its range, or two parts cannot be combined; the message says why.
    """

    name: str = "custom"
    version: int = 1
    """Raised whenever a preset's numbers change; a run records name and version."""
    source: str = ""
    """The paper whose numbers these are."""
    summary: str = ""
    """What differs from GRPO, in one line."""

    # Rewards to advantages: once per rollout.
    soft_overlong: SoftOverlong | None = None
    unlikeliness: Unlikeliness | None = None
    reward_aggregation: RewardAggregation = "sum_then_normalize"
    """How several rewards become one: sum and normalise; or normalise each in its group and sum; or that, and normalise
    the sums over the batch."""
    group_filter: GroupFilter | None = None
    baseline: BaselineRule | float | str = "group_mean"
    """What is taken off a reward; a number is a constant; "module:function" or "file.py:function" is your own, of
    rewards and groups."""
    scale: Scale | None = dataclasses.field(default_factory=GroupStd)
    """What the centred reward is divided by."""
    sign_weights: SignWeights | None = None
    credit: Credit = "outcome"
    """Which tokens a reward belongs to."""
    discount: float = 1.0
    """Of later rewards, per token, with credit "return_to_go"."""
    truncated: Truncated = "keep"
    """Completions cut by the length limit, after the advantages of the whole group: kept; masked (no term sees them);
    advantage 0; or ``truncated_penalty`` taken off it."""
    truncated_penalty: float = 1.0

    # The policy term.
    ratio_anchor: RatioAnchor = "old"
    """What the current policy is divided by; "self" makes every ratio 1."""
    ratio_level: RatioLevel = "token"
    trust_region: TrustRegion | None = None
    mismatch: tuple[Mismatch, ...] = ()
    top_entropy: float = 1.0
    """Share of the minibatch's tokens, those of highest entropy, that the policy term uses."""

    # The other terms.
    kl: KL = dataclasses.field(default_factory=KL)
    entropy: EntropyBonus | None = None

    # Denominators.
    aggregation: Aggregation = "seq_mean_token_mean"
    aggregation_length: int | None = None
    """L of aggregation "constant"; unset: ``rollout.max_completion_length``."""
    denominator: Denominator = "base"
    """Whether tokens that ``top_entropy`` leaves out still count in the denominators ("base") or not."""
    count_empty: bool = True
    """Whether completions without a loss token count in B."""

    def __post_init__(self) -> None:
        check_words(self)
        check_numbers(self)
        check_advantage_parts(self)
        check_credit(self)
        check_policy_parts(self)

    @property
    def beta(self) -> float:
        """Weight of the KL term. 0: no reference policy exists."""
        return self.kl.beta

    @property
    def identity(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"

    @property
    def needs_old_logps(self) -> bool:
        """Old log-probs are needed even when one update uses a rollout: a KL outside of the loss is made of them."""
        return self.beta != 0 and self.kl.place != "loss"

    @property
    def token_advantages(self) -> bool:
        """Advantages may differ between the tokens of a completion."""
        return self.credit != "outcome" or (
            self.beta != 0 and self.kl.place == "advantage" and self.kl.scope == "token"
        )

    @property
    def group_relative(self) -> bool:
        """Baseline or scale are made of the other completions of the group: it takes at least two."""
        return self.baseline in GROUP_BASELINES or isinstance(self.scale, GroupStd | GroupMean)

    def replace(self, **settings: Any) -> Objective:
        """A copy with some settings changed.

        A part may be given whole, as a word, or as a table: a table with the part's own rule, or without a rule,
        changes only the numbers it names; a table with another rule begins from that rule's own numbers. ``beta``,
        ``epsilon`` and ``epsilon_high`` are short for ``kl.beta`` and the bounds of the PPO clip.

        Raises:
            ConfigError: an unknown setting, or one that does not fit.

        >>> Objective().replace(trust_region={"rule": "ppo_clip", "high": 1.28}).trust_region
        PPOClip(low=0.8, high=1.28, dual=None)
        """
        from cohort.presets.resolve import replaced

        return replaced(self, settings)

    def describe(self) -> str:
        """The resolved formula in plain text, term by term, with its numbers."""
        from cohort.presets.describe import describe

        return describe(self)

    def settings(self) -> Mapping[str, Any]:
        """The parts, by name, without name, version, source and summary."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ABOUT}


def check_numbers(objective: Objective) -> None:
    """Plain numbers are in their ranges."""
    if isinstance(objective.baseline, float) and not math.isfinite(objective.baseline):
        raise ConfigError(f"baseline must be finite, got {objective.baseline!r}")
    if not 0 < objective.top_entropy <= 1:
        raise ConfigError(f"top_entropy is the share of tokens kept, in (0, 1], got {objective.top_entropy!r}")
    if not 0 <= objective.discount <= 1:
        raise ConfigError(f"discount must be in [0, 1], got {objective.discount!r}")
    if objective.truncated_penalty < 0:
        raise ConfigError(f"truncated_penalty must not be negative, got {objective.truncated_penalty!r}")
    if objective.aggregation_length is not None and objective.aggregation_length < 1:
        raise ConfigError(f"aggregation_length must be at least 1, got {objective.aggregation_length!r}")
    if objective.aggregation_length is not None and objective.aggregation != "constant":
        raise ConfigError(f"aggregation_length belongs to aggregation 'constant', not {objective.aggregation!r}")
    if objective.truncated_penalty != 1 and objective.truncated != "penalize":
        raise ConfigError("truncated_penalty belongs to truncated 'penalize'")
    if objective.denominator == "after_masks" and objective.top_entropy == 1:
        raise ConfigError("denominator 'after_masks' is about the tokens that top_entropy leaves out: set top_entropy")
    if objective.discount != 1 and objective.credit != "return_to_go":
        raise ConfigError("discount belongs to credit 'return_to_go'")


def check_advantage_parts(objective: Objective) -> None:
    """Baseline, scale, filter and reward aggregation fit together."""
    scale, baseline, kl = objective.scale, objective.baseline, objective.kl
    if isinstance(scale, GroupMean) and objective.soft_overlong:
        raise ConfigError(
            "scale 'group_mean' needs rewards that are not negative, and soft_overlong makes negative ones: set "
            "scale 'none' or soft_overlong 'none'"
        )
    if isinstance(scale, GroupMean) and kl.beta and kl.place == "reward":
        raise ConfigError("scale 'group_mean' with the KL in the reward would divide by a mean of both: set kl.place")
    if isinstance(scale, GroupStd) and kl.beta and kl.place == "reward":
        raise ConfigError(
            "the KL in the reward with scale 'group_std' would divide beta by the group's spread, and make pure KL "
            "noise of groups whose rewards are equal: set kl.place 'advantage' (after scaling), or scale 'none'"
        )
    # REINFORCE++ is the exception, by its definition: returns with the KL in them, whitened over tokens.
    whitened_returns = objective.credit == "return_to_go" and isinstance(scale, BatchStd) and scale.unit == "token"
    if isinstance(scale, BatchStd) and not whitened_returns and kl.beta and kl.place == "reward":
        raise ConfigError(
            "the KL in the reward with scale 'batch_std' would divide beta by the batch's spread: set kl.place "
            "'advantage' (after scaling), or scale 'none'"
        )
    if isinstance(objective.group_filter, DropDead | DynamicSampling) and baseline not in GROUP_BASELINES:
        raise ConfigError(
            f"group_filter {objective.group_filter.rule!r} drops groups of equal rewards, which teach with baseline "
            f"{baseline!r}: set group_filter 'none', or baseline 'group_mean'"
        )
    if isinstance(objective.group_filter, DropDead | DynamicSampling) and objective.unlikeliness:
        raise ConfigError(
            "unlikeliness gives groups of equal rewards something to learn, and group_filter "
            f"{objective.group_filter.rule!r} would drop them before: set one of them to 'none'"
        )
    if objective.reward_aggregation == "sum_then_normalize":
        return
    if objective.credit != "outcome":
        raise ConfigError(f"reward_aggregation {objective.reward_aggregation!r} needs credit 'outcome'")
    if kl.beta and kl.place == "reward":
        raise ConfigError(
            f"with reward_aggregation {objective.reward_aggregation!r} there is no single reward for the KL to be "
            "part of: set kl.place 'advantage' or 'loss'"
        )
    if objective.soft_overlong or objective.unlikeliness:
        raise ConfigError(
            f"with reward_aggregation {objective.reward_aggregation!r} there is no single reward to shape: set "
            "soft_overlong and unlikeliness to 'none'"
        )
    if isinstance(scale, BatchStd):
        raise ConfigError(
            "reward_aggregation normalises each reward in its group: set scale 'group_std' or 'none'; "
            "'normalize_sum_normalize' is the one that also divides by the batch's spread"
        )


def check_credit(objective: Objective) -> None:
    """Rewards that belong to tokens need parts that know tokens."""
    scale, baseline = objective.scale, objective.baseline
    if objective.credit == "process" and (baseline != "group_mean" or not isinstance(scale, GroupStd | None)):
        raise ConfigError(
            "credit 'process' normalises all step rewards of a group together: set baseline 'group_mean' and scale "
            "'group_std' or 'none'"
        )
    if objective.credit == "given" and (baseline != "none" or scale is not None):
        raise ConfigError("credit 'given' takes the advantages as they come: set baseline 'none' and scale 'none'")
    if objective.credit in ("process", "given"):
        _refuse_outcome_parts(objective)
    if baseline == "second_best" and not isinstance(scale, GroupStd | None):
        raise ConfigError("baseline 'second_best' is an estimate of its own: set scale 'none' (or 'group_std')")


def _refuse_outcome_parts(objective: Objective) -> None:
    for name in ("soft_overlong", "unlikeliness", "group_filter"):
        if getattr(objective, name) is not None:
            raise ConfigError(f"{name} is about a completion's one reward; credit {objective.credit!r} has none")
    if objective.beta and objective.kl.place == "reward":
        raise ConfigError(f"the KL in the reward needs a completion's one reward; credit {objective.credit!r} has none")


def check_policy_parts(objective: Objective) -> None:
    """Ratio, trust region, mismatch rules and KL fit together."""
    rule, level, anchor = objective.trust_region, objective.ratio_level, objective.ratio_anchor
    if anchor == "self" and rule is not None:
        raise ConfigError(
            f"ratio_anchor 'self' makes every ratio 1, so trust_region {rule.rule!r} would never act: set "
            "trust_region 'none' or ratio_anchor 'old'"
        )
    if level in WHOLE_SEQUENCE_LEVELS and objective.token_advantages:
        raise ConfigError(
            f"ratio_level {level!r} moves a completion as one, and needs one advantage for it: set ratio_level "
            "'sequence_mean_token' or 'prefix_product', or give outcome credit and a KL of scope 'sequence'"
        )
    if level in WHOLE_SEQUENCE_LEVELS and not isinstance(rule, Cap | Gamma):
        token_weights = [m for m in objective.mismatch if isinstance(m, MismatchWeight) and m.level == "token"]
        if objective.top_entropy < 1 or token_weights:
            what = "top_entropy chooses" if objective.top_entropy < 1 else "a mismatch weight of level 'token' weighs"
            raise ConfigError(
                f"ratio_level {level!r} moves a completion as one, and {what} single tokens: set ratio_level "
                "'sequence_mean_token' or 'token'"
            )
    if isinstance(rule, TVMask | KLMask | FIPO) and level != "token":
        raise ConfigError(f"trust_region {rule.rule!r} is about single tokens: set ratio_level 'token'")
    if isinstance(rule, GMPO) and level != "sequence_mean":
        raise ConfigError("trust_region 'gmpo' is a geometric mean over the sequence: set ratio_level 'sequence_mean'")
    if anchor == "sampler" and any(isinstance(item, MismatchWeight | Veto) for item in objective.mismatch):
        raise ConfigError(
            "ratio_anchor 'sampler' carries the mismatch in its ratio already: set mismatch 'none', or ratio_anchor "
            "'old'"
        )
