"""The parts that shape rewards, advantages, groups and mismatch weights, each declared once."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cohort.presets.base import Bound, Ddof, Excludes, Needs, Part, PositiveInt, Weight, check_bounds

GROUP_BASELINES = ("group_mean", "leave_one_out", "length_weighted", "second_best")
"""Baselines that compare a completion with the others of its group."""
NORMALIZED = ("normalize_then_sum", "normalize_sum_normalize")
"""Reward aggregations that make an advantage of each reward."""
PER_STEP = ("process", "given")
"""Credits whose rewards belong to tokens."""
SHAPES_ONE_REWARD = (
    Excludes(
        "credit",
        PER_STEP,
        "{part.rule} is about a completion's one reward; credit {objective.credit!r} has none",
    ),
    Excludes(
        "reward_aggregation",
        NORMALIZED,
        "with reward_aggregation {objective.reward_aggregation!r} there is no single reward to shape: set "
        "soft_overlong and unlikeliness to 'none'",
    ),
)
FILTERS_ONE_REWARD = Excludes(
    "credit",
    PER_STEP,
    "group_filter is about a completion's one reward; credit {objective.credit!r} has none",
)
DROPS_DEAD_GROUPS = (
    FILTERS_ONE_REWARD,
    Needs(
        "baseline",
        GROUP_BASELINES,
        "group_filter {part.rule!r} drops groups of equal rewards, which have a gradient with baseline "
        "{objective.baseline!r}: set group_filter 'none', or baseline 'group_mean'",
    ),
    Excludes(
        "unlikeliness",
        ("unlikeliness",),
        "unlikeliness gives groups of equal rewards a gradient, and group_filter {part.rule!r} would drop them before: "
        "set one of them to 'none'",
    ),
)

# Advantages ---------------------------------------------------------------------------------------------------------


class GroupStd(Part):
    """Divide by the group's standard deviation plus ``epsilon``."""

    rule: Literal["group_std"] = "group_std"
    formula: ClassVar[str] = "(std(R_group, ddof {ddof}) + {epsilon:g})"
    source: ClassVar[str] = "DeepSeekMath (arXiv 2402.03300)"
    excludes: ClassVar[tuple[Excludes, ...]] = (
        Excludes(
            "kl_in_reward",
            (True,),
            "the KL in the reward with scale 'group_std' would divide beta by the group's spread, and make pure KL "
            "noise of groups whose rewards are equal: set kl.place 'advantage' (after scaling), or scale 'none'",
        ),
    )
    ddof: Ddof = 1
    """1 divides by n - 1 (TRL, verl), 0 by n; the paper does not say."""
    epsilon: Weight = 1e-6


class BatchStd(Part):
    """Divide by the standard deviation over the whole rollout plus ``epsilon``."""

    rule: Literal["batch_std"] = "batch_std"
    source: ClassVar[str] = "Lite PPO (arXiv 2508.08221), REINFORCE++ (2501.03262)"
    excludes: ClassVar[tuple[Excludes, ...]] = (
        Excludes(
            "kl_scaled_by_batch",
            (True,),
            "the KL in the reward with scale 'batch_std' would divide beta by the batch's spread: set kl.place "
            "'advantage' (after scaling), or scale 'none'",
        ),
        Excludes(
            "reward_aggregation",
            NORMALIZED,
            "reward_aggregation normalises each reward in its group: set scale 'group_std' or 'none'; "
            "'normalize_sum_normalize' is the one that also divides by the batch's spread",
        ),
    )
    of: Literal["raw", "centred"] = "raw"
    """The rewards as scored, or after subtracting their baseline."""
    unit: Literal["sample", "token"] = "sample"
    """What counts once: a completion, or a token (then baseline "batch_mean" is a mean over tokens too)."""
    ddof: Ddof = 1
    epsilon: Weight = 1e-6

    def words(self) -> str:
        """What the deviation is of."""
        rewards = "rewards" if self.of == "raw" else "centred rewards"
        unit = "" if self.unit == "sample" else ", each token counting once"
        return f"(std of all {rewards} of the batch, ddof {self.ddof}{unit} + {self.epsilon:g})"


class GroupMean(Part):
    """Divide by the group's mean reward plus ``epsilon``. Rewards must not be negative."""

    rule: Literal["group_mean"] = "group_mean"
    source: ClassVar[str] = "MaxRL (arXiv 2602.02710)"
    excludes: ClassVar[tuple[Excludes, ...]] = (
        Excludes(
            "soft_overlong",
            ("soft_overlong",),
            "scale 'group_mean' needs rewards that are not negative, and soft_overlong makes negative ones: set "
            "scale 'none' or soft_overlong 'none'",
        ),
        Excludes(
            "kl_in_reward",
            (True,),
            "scale 'group_mean' with the KL in the reward would divide by a mean of both: set kl.place",
        ),
    )
    epsilon: Weight = 0.0

    def words(self) -> str:
        """The divisor."""
        return f"(mean(R_group) + {self.epsilon:g})" if self.epsilon else "mean(R_group)"


Scale = Annotated[GroupStd | BatchStd | GroupMean, Field(discriminator="rule")]


class SignWeights(Part):
    """Multiply positive advantages by ``positive`` and negative ones by ``negative``."""

    rule: Literal["sign_weights"] = "sign_weights"
    formula: ClassVar[str] = "times {positive:g} where A > 0, {negative:g} where A < 0"
    positive: Weight = 1.0
    negative: Weight = 1.0


class SoftOverlong(Part):
    """A growing penalty on the reward of completions near the length limit."""

    rule: Literal["soft_overlong"] = "soft_overlong"
    source: ClassVar[str] = "DAPO (arXiv 2503.14476)"
    excludes: ClassVar[tuple[Excludes, ...]] = SHAPES_ONE_REWARD
    cache_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The last share of ``max_completion_length`` over which the penalty grows from 0 to 1."""
    max_length: PositiveInt | None = None
    """Length at which it is 1. Unset: ``rollout.max_completion_length``."""

    def words(self) -> str:
        """The ramp."""
        return (
            f"R + soft overlong: 0 up to {1 - self.cache_share:g} L, then down to -1 at "
            f"L = {self.max_length or 'max_completion_length'}, over the last {self.cache_share:g} L"
        )


class Unlikeliness(Part):
    """Subtract a share of the reward of a group's likelier completions."""

    rule: Literal["unlikeliness"] = "unlikeliness"
    formula: ClassVar[str] = "R (1 - {strength:g} rank/G), rank of the mean log-prob in the group, least likely 0"
    source: ClassVar[str] = "Rewarding the Unlikely (arXiv 2506.02355)"
    excludes: ClassVar[tuple[Excludes, ...]] = SHAPES_ONE_REWARD
    strength: Annotated[float, Field(ge=0, le=1)] = 0.25


# Groups -------------------------------------------------------------------------------------------------------------


class DropDead(Part):
    """Leave out groups whose rewards are all equal: they cost no pass and do not count in the denominator."""

    rule: Literal["drop_dead"] = "drop_dead"
    formula: ClassVar[str] = "groups of equal rewards are left out, of the denominator too"
    excludes: ClassVar[tuple[Excludes, ...]] = DROPS_DEAD_GROUPS


class DynamicSampling(Part):
    """Leave out dead groups and sample new prompts for them, in at most ``max_rounds`` rounds per step."""

    rule: Literal["dynamic_sampling"] = "dynamic_sampling"
    formula: ClassVar[str] = (
        "groups of equal rewards are replaced by new prompts, in at most {max_rounds} rounds of sampling per step"
    )
    source: ClassVar[str] = "DAPO (arXiv 2503.14476)"
    excludes: ClassVar[tuple[Excludes, ...]] = DROPS_DEAD_GROUPS
    max_rounds: PositiveInt = 4


class TopK(Part):
    """Learn from the ``k`` best completions of a group by ``metric``, compared among themselves; A is 0 elsewhere."""

    rule: Literal["top_k"] = "top_k"
    source: ClassVar[str] = "GFPO (arXiv 2508.09726)"
    excludes: ClassVar[tuple[Excludes, ...]] = (FILTERS_ONE_REWARD,)
    k: Annotated[int, Field(ge=2)] = 8
    metric: Literal["shortest", "reward_per_token"] = "shortest"

    def words(self) -> str:
        """Which completions have an advantage."""
        what = "shortest" if self.metric == "shortest" else "by reward per token"
        return (
            f"the {self.k} best completions of a group ({what}) have an advantage, among themselves; the others have 0"
        )


GroupFilter = Annotated[DropDead | DynamicSampling | TopK, Field(discriminator="rule")]

# Sampler and trainer ------------------------------------------------------------------------------------------------

IN_THE_RATIO = Excludes(
    "ratio_anchor",
    ("sampler",),
    "ratio_anchor 'sampler' carries the mismatch in its ratio already: set mismatch 'none', or ratio_anchor 'old'",
)


class MismatchWeight(Part):
    """Weight or drop by rho = old / sampler at a level. ``truncate`` clamps rho to [low, high]; ``mask`` is rho inside
    and 0 outside; ``reject`` is 1 inside and 0 outside."""

    rule: Literal["weight"] = "weight"
    source: ClassVar[str] = "mask at level token: IcePop (arXiv 2510.18855)"
    excludes: ClassVar[tuple[Excludes, ...]] = (IN_THE_RATIO,)
    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    low: Bound = 0.0
    high: Bound = 2.0

    def check(self) -> None:
        """Require low <= 1 <= high."""
        check_bounds("mismatch weight", self.low, self.high)

    def words(self) -> str:
        """The factor, and the level of rho."""
        factor = {
            "truncate": f"times clip(rho, {self.low:g}, {self.high:g})",
            "mask": f"times rho, none outside [{self.low:g}, {self.high:g}]",
            "reject": f"none where rho is outside [{self.low:g}, {self.high:g}]",
        }[self.mode]
        level = {"token": "per token", "sequence": "product over the sequence", "geometric": "its geometric mean"}
        return f"{factor}; rho = old / sampler, {level[self.level]}"


class Veto(Part):
    """Drop every sequence that has a token with rho = old / sampler outside [low, high]."""

    rule: Literal["veto"] = "veto"
    formula: ClassVar[str] = "sequences with a token of rho = old / sampler outside [{low:g}, {high:g}] are dropped"
    excludes: ClassVar[tuple[Excludes, ...]] = (IN_THE_RATIO,)
    low: Bound = 1e-4
    high: Bound = 1e4

    def check(self) -> None:
        """Require low <= 1 <= high."""
        check_bounds("veto", self.low, self.high)


class OffPolicyMask(Part):
    """Drop a sequence with A < 0 whose mean log(sampler / policy) is above ``threshold``."""

    rule: Literal["off_policy_mask"] = "off_policy_mask"
    formula: ClassVar[str] = "sequences with A < 0 and mean log(sampler / policy) > {threshold:g} are dropped"
    source: ClassVar[str] = "DeepSeek-V3.2 (arXiv 2512.02556)"
    threshold: Bound = 0.5


Mismatch = Annotated[MismatchWeight | Veto | OffPolicyMask, Field(discriminator="rule")]
