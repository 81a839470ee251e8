"""The parts an objective is put together from, as frozen dataclasses with their own numbers.

A part that has numbers is a class: choosing another one never reinterprets them, and bounds are bounds on the ratio
itself, never epsilons. A part that has none is a word. ``None`` (in TOML "none") is the part's absence. What each one
computes stands with the function that computes it, in ``cohort.objective``. Importing this module imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from cohort.presets.bounds import check_bounds, check_finite, check_words, require
from cohort.presets.trust_regions import (
    FIPO,
    GMPO,
    SAPO,
    Cap,
    Custom,
    Gamma,
    KLMask,
    Mask,
    PPOClip,
    TrustRegion,
    TVMask,
)

__all__ = [
    "FIPO",
    "GMPO",
    "KL",
    "SAPO",
    "Aggregation",
    "BaselineRule",
    "BatchStd",
    "Cap",
    "Credit",
    "Custom",
    "Denominator",
    "Direction",
    "DropDead",
    "DynamicSampling",
    "EntropyBonus",
    "Gamma",
    "GroupFilter",
    "GroupMean",
    "GroupStd",
    "KLMask",
    "Mask",
    "Mismatch",
    "MismatchWeight",
    "OffPolicyMask",
    "PPOClip",
    "RatioAnchor",
    "RatioLevel",
    "RewardAggregation",
    "Scale",
    "SignWeights",
    "SoftOverlong",
    "TVMask",
    "TopK",
    "Truncated",
    "TrustRegion",
    "Unlikeliness",
    "Veto",
]

RewardAggregation = Literal["sum_then_normalize", "normalize_then_sum", "normalize_sum_normalize"]
BaselineRule = Literal["none", "group_mean", "leave_one_out", "length_weighted", "batch_mean", "second_best"]
Credit = Literal["outcome", "process", "return_to_go", "given"]
Truncated = Literal["keep", "mask", "zero", "penalize"]
RatioAnchor = Literal["self", "old", "sampler"]
RatioLevel = Literal["token", "sequence_mean", "sequence_mean_token", "sequence_product", "prefix_product"]
Aggregation = Literal["seq_mean_token_mean", "token_mean", "prompt_mean", "constant", "seq_sum", "token_sum"]
Denominator = Literal["base", "after_masks"]
Direction = Literal["reverse", "forward"]


# Advantages ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStd:
    """Divide by the group's standard deviation plus ``epsilon``."""

    rule: ClassVar[str] = "group_std"
    ddof: int = 1
    """1 divides by n - 1 (TRL, verl), 0 by n; the paper does not say."""
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require(self.ddof in (0, 1), f"group_std: ddof must be 0 or 1, got {self.ddof!r}")
        require(self.epsilon >= 0, f"group_std: epsilon must not be negative, got {self.epsilon!r}")
        check_finite("group_std", self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStd:
    """Divide by the standard deviation over the whole rollout plus ``epsilon``."""

    rule: ClassVar[str] = "batch_std"
    of: Literal["raw", "centred"] = "raw"
    """Of the rewards as they came, or after their baseline was taken off."""
    unit: Literal["sample", "token"] = "sample"
    """Every completion counts once, or every token does (then baseline "batch_mean" is a mean over tokens too)."""
    ddof: int = 1
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require(self.ddof in (0, 1), f"batch_std: ddof must be 0 or 1, got {self.ddof!r}")
        require(self.epsilon >= 0, f"batch_std: epsilon must not be negative, got {self.epsilon!r}")
        check_finite("batch_std", self.epsilon)
        check_words(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMean:
    """Divide by the group's mean reward plus ``epsilon``. Rewards must not be negative."""

    rule: ClassVar[str] = "group_mean"
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        require(self.epsilon >= 0, f"group_mean: epsilon must not be negative, got {self.epsilon!r}")
        check_finite("group_mean", self.epsilon)


Scale = GroupStd | BatchStd | GroupMean


@dataclass(frozen=True, slots=True, kw_only=True)
class SignWeights:
    """Multiply positive advantages by ``positive`` and negative ones by ``negative``."""

    rule: ClassVar[str] = "sign_weights"
    positive: float = 1.0
    negative: float = 1.0

    def __post_init__(self) -> None:
        require(min(self.positive, self.negative) >= 0, "sign_weights: weights must not be negative")
        check_finite("sign_weights", self.positive, self.negative)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftOverlong:
    """A growing penalty on the reward of completions near the length limit."""

    rule: ClassVar[str] = "soft_overlong"
    cache_share: float = 0.2
    """The last share of ``max_completion_length`` over which the penalty grows from 0 to 1."""
    max_length: int | None = None
    """Length at which it is 1. Unset: ``rollout.max_completion_length``."""

    def __post_init__(self) -> None:
        require(0 < self.cache_share <= 1, f"soft_overlong: cache_share must be in (0, 1], got {self.cache_share!r}")
        require(self.max_length is None or self.max_length >= 1, "soft_overlong: max_length must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlikeliness:
    """Take a share off the reward of a group's likelier completions."""

    rule: ClassVar[str] = "unlikeliness"
    strength: float = 0.25

    def __post_init__(self) -> None:
        require(0 <= self.strength <= 1, f"unlikeliness: strength must be in [0, 1], got {self.strength!r}")


# Groups -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DropDead:
    """Leave out groups whose rewards are all equal: they cost no pass and do not count in the denominator."""

    rule: ClassVar[str] = "drop_dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSampling:
    """Leave out dead groups and sample new prompts in their place, in at most ``max_rounds`` rounds per step."""

    rule: ClassVar[str] = "dynamic_sampling"
    max_rounds: int = 4

    def __post_init__(self) -> None:
        require(self.max_rounds >= 1, f"dynamic_sampling: max_rounds must be at least 1, got {self.max_rounds!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK:
    """Learn from the ``k`` best completions of a group by ``metric``, compared among themselves; A is 0 elsewhere."""

    rule: ClassVar[str] = "top_k"
    k: int = 8
    metric: Literal["shortest", "reward_per_token"] = "shortest"

    def __post_init__(self) -> None:
        require(self.k >= 2, f"top_k: k must be at least 2, got {self.k!r}")
        check_words(self)


GroupFilter = DropDead | DynamicSampling | TopK


# Sampler and trainer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchWeight:
    """Weight or drop by rho = old / sampler at a level. ``truncate`` holds rho to [low, high]; ``mask`` is rho inside
    and 0 outside; ``reject`` is 1 inside and 0 outside."""

    rule: ClassVar[str] = "weight"
    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        check_words(self)
        check_bounds("mismatch weight", self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Veto:
    """Drop every sequence that has a token with rho = old / sampler outside [low, high]."""

    rule: ClassVar[str] = "veto"
    low: float = 1e-4
    high: float = 1e4

    def __post_init__(self) -> None:
        check_bounds("veto", self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffPolicyMask:
    """DeepSeek-V3.2: drop a sequence with A < 0 whose mean log(sampler / policy) is above ``threshold``."""

    rule: ClassVar[str] = "off_policy_mask"
    threshold: float = 0.5

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "off_policy_mask: threshold must not be negative")


Mismatch = MismatchWeight | Veto | OffPolicyMask


# KL and entropy -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KL:
    """The KL term, named by what it does. ``forward`` is KL(reference || policy), ``reverse`` KL(policy || reference).

    ``k3`` used as a loss without a ratio, as in DeepSeekMath, is direction "forward", correction "none".
    """

    rule: ClassVar[str] = "kl"
    beta: float = 0.0
    """Weight. 0: no KL term and no reference model."""
    direction: Direction = "reverse"
    scope: Literal["token", "sequence"] = "token"
    """Whose gradient: that of each token's conditional KL with its prefix held fixed, or the sequence KL's in full."""
    place: Literal["loss", "reward", "advantage"] = "loss"
    """In the loss; in the reward before baseline and scale; or in the advantage, after them."""
    correction: Literal["none", "token_ratio", "prefix_product", "sequence_weight"] = "none"
    """The importance weight that a KL in the loss carries when the tokens come from another policy."""
    anchor: Literal["old", "sampler"] = "old"
    """That other policy."""
    estimator: Literal["sampled", "full"] = "sampled"
    """From the sampled token, or over the vocabulary."""
    top_k: int | None = None
    """With "full": the vocabulary's ``top_k`` most likely tokens and one bucket for the rest. Unset: all of them."""
    target: float | None = None
    """Adaptive: beta moves so that the mean KL per token (k3) approaches this. Unset: beta stays."""
    horizon_default: ClassVar[int] = 10_000
    horizon: int = 10_000
    """Adaptive: completions over which beta may change by a factor of about 1.2."""

    def __post_init__(self) -> None:
        check_words(self)
        require(self.beta >= 0, f"beta must not be negative, got {self.beta:g}")
        require(math.isfinite(self.beta), "beta must be finite")
        require(
            self.target is not None or self.horizon == type(self).horizon_default,
            "kl.horizon belongs to an adaptive KL: set kl.target",
        )
        require(self.target is None or self.target > 0, "kl.target must be positive")
        require(self.target is None or self.beta > 0, "kl.target moves beta: set beta to the weight to begin with")
        require(self.horizon > 0, "kl.horizon must be positive")
        require(self.top_k is None or self.top_k > 0, "kl.top_k must be positive")
        self._check_estimator()
        self._check_correction()
        self._check_place()

    def _check_estimator(self) -> None:
        if self.estimator == "sampled":
            require(self.top_k is None, "kl.top_k belongs to kl.estimator 'full'")
            return
        require(self.place == "loss", "kl.estimator 'full' differentiates the logits: set kl.place 'loss'")
        require(self.scope == "token", "kl.estimator 'full' is a sum over tokens: set kl.scope 'token'")
        require(
            self.correction in ("none", "prefix_product"),
            "kl.estimator 'full' has no sampled token to correct for, only its prefix: set kl.correction 'none' or "
            "'prefix_product'",
        )

    def _check_correction(self) -> None:
        require(
            self.scope == "token" or self.correction in ("none", "sequence_weight"),
            f"kl.scope 'sequence' with kl.correction {self.correction!r} is the gradient of no KL: set "
            "kl.correction 'sequence_weight'",
        )
        require(
            self.anchor == "old" or self.correction != "none" or self.place != "loss",
            "kl.anchor 'sampler' has no effect with kl.correction 'none'",
        )

    def _check_place(self) -> None:
        if self.place == "loss":
            return
        require(self.anchor == "old", f"kl.anchor 'sampler' has no effect with kl.place {self.place!r}")
        require(
            self.direction == "reverse",
            f"kl.place {self.place!r} gives the reverse KL's gradient only: k3 as a reward is the reverse minus the "
            "forward KL's. Set kl.direction 'reverse'",
        )
        require(
            self.correction == "none",
            f"kl.place {self.place!r} is weighted by the ratio of the policy term already: set kl.correction 'none'",
        )
        require(
            self.place == "advantage" or self.scope == "sequence",
            "kl.place 'reward' is a reward of the whole completion: set kl.scope 'sequence', or kl.place 'advantage'",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyBonus:
    """``coefficient`` times the mean full-vocabulary entropy, added to the objective."""

    rule: ClassVar[str] = "entropy"
    coefficient: float = 0.0
    target: float | None = None
    """Adaptive: the coefficient rises by ``step`` after an update whose entropy is at most this, falls otherwise, and
    the bonus counts only while it is. Unset: the coefficient stays."""
    step: float = 0.005

    def __post_init__(self) -> None:
        require(self.coefficient >= 0, "entropy.coefficient must not be negative")
        require(
            self.coefficient > 0 or self.target is not None,
            "entropy has no effect with coefficient 0 and no target: set entropy.coefficient, or entropy 'none'",
        )
        check_finite("entropy", self.coefficient)
        require(self.target is None or self.target > 0, "entropy.target must be positive")
        require(self.step > 0, "entropy.step must be positive")
