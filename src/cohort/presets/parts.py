"""The parts but for trust regions, each declared once: they shape rewards, advantages, groups, mismatch weights, the KL
term and the entropy bonus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from cohort.presets.base import Bound, Ddof, Part, Positive, PositiveInt, Weight

GROUP_BASELINES = ("group_mean", "leave_one_out", "length_weighted", "second_best")
"""Baselines that compare a completion with the others of its group."""
NORMALIZED = ("normalize_then_sum", "normalize_sum_normalize")
"""Reward aggregations that make an advantage of each reward."""
PER_STEP = ("process", "given")
"""Credits whose rewards belong to tokens."""

# Advantages ---------------------------------------------------------------------------------------------------------


class GroupStd(Part):
    """Divide by the group's standard deviation plus ``epsilon``."""

    rule: Literal["group_std"] = "group_std"
    formula = "(std(R_group, ddof {ddof}) + {epsilon:g})"
    source = "DeepSeekMath (arXiv 2402.03300)"
    ddof: Ddof = 1
    """1 divides by n - 1 (TRL, verl), 0 by n; the paper does not say."""
    epsilon: Weight = 1e-6


class BatchStd(Part):
    """Divide by the standard deviation over the whole rollout plus ``epsilon``."""

    rule: Literal["batch_std"] = "batch_std"
    source = "Lite PPO (arXiv 2508.08221), REINFORCE++ (2501.03262)"
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
    source = "MaxRL (arXiv 2602.02710)"
    epsilon: Weight = 0.0

    def words(self) -> str:
        """The divisor."""
        return f"(mean(R_group) + {self.epsilon:g})" if self.epsilon else "mean(R_group)"


Scale = Annotated[GroupStd | BatchStd | GroupMean, Field(discriminator="rule")]


class SignWeights(Part):
    """Multiply positive advantages by ``positive`` and negative ones by ``negative``."""

    rule: Literal["sign_weights"] = "sign_weights"
    formula = "times {positive:g} where A > 0, {negative:g} where A < 0"
    positive: Weight = 1.0
    negative: Weight = 1.0


class SoftOverlong(Part):
    """A growing penalty on the reward of completions near the length limit."""

    rule: Literal["soft_overlong"] = "soft_overlong"
    source = "DAPO (arXiv 2503.14476)"
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
    formula = "R (1 - {strength:g} rank/G), rank of the mean log-prob in the group, least likely 0"
    source = "Rewarding the Unlikely (arXiv 2506.02355)"
    strength: Annotated[float, Field(ge=0, le=1)] = 0.25


# Groups -------------------------------------------------------------------------------------------------------------


class DropDead(Part):
    """Leave out groups whose rewards are all equal: they cost no pass and do not count in the denominator."""

    rule: Literal["drop_dead"] = "drop_dead"
    formula = "groups of equal rewards are left out, of the denominator too"


class DynamicSampling(Part):
    """Leave out dead groups and sample new prompts for them, in at most ``max_rounds`` rounds per step."""

    rule: Literal["dynamic_sampling"] = "dynamic_sampling"
    formula = "groups of equal rewards are replaced by new prompts, in at most {max_rounds} rounds of sampling per step"
    source = "DAPO (arXiv 2503.14476)"
    max_rounds: PositiveInt = 4


class TopK(Part):
    """Learn from the ``k`` best completions of a group by ``metric``, compared among themselves; A is 0 elsewhere."""

    rule: Literal["top_k"] = "top_k"
    source = "GFPO (arXiv 2508.09726)"
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


class MismatchWeight(Part):
    """Weight or drop by rho = old / sampler at a level. ``truncate`` clamps rho to [low, high]; ``mask`` is rho inside
    and 0 outside; ``reject`` is 1 inside and 0 outside."""

    rule: Literal["weight"] = "weight"
    source = "mask at level token: IcePop (arXiv 2510.18855)"
    bounds = "mismatch weight"
    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    low: Bound = 0.0
    high: Bound = 2.0

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
    formula = "sequences with a token of rho = old / sampler outside [{low:g}, {high:g}] are dropped"
    bounds = "veto"
    low: Bound = 1e-4
    high: Bound = 1e4


class OffPolicyMask(Part):
    """Drop a sequence with A < 0 whose mean log(sampler / policy) is above ``threshold``."""

    rule: Literal["off_policy_mask"] = "off_policy_mask"
    formula = "sequences with A < 0 and mean log(sampler / policy) > {threshold:g} are dropped"
    source = "DeepSeek-V3.2 (arXiv 2512.02556)"
    threshold: Bound = 0.5


Mismatch = Annotated[MismatchWeight | Veto | OffPolicyMask, Field(discriminator="rule")]

# The other terms ----------------------------------------------------------------------------------------------------

Direction = Literal["reverse", "forward"]


class KL(Part):
    """The KL term, named by its gradient. ``forward`` is KL(reference || policy), ``reverse`` KL(policy || reference).

    ``k3`` used as a loss without a ratio, as in DeepSeekMath, is direction "forward", correction "none".
    """

    rule: Literal["kl"] = "kl"
    beta: Weight = 0.0
    """Weight. 0: no KL term and no reference model."""
    direction: Direction = "reverse"
    scope: Literal["token", "sequence"] = "token"
    """The gradient of each token's conditional KL given its prefix, or that of the whole sequence's KL."""
    place: Literal["loss", "reward", "advantage"] = "loss"
    """In the loss; in the reward before baseline and scale; or in the advantage, after them."""
    correction: Literal["none", "token_ratio", "prefix_product", "sequence_weight"] = "none"
    """The importance weight of a KL in the loss whose tokens come from another policy."""
    anchor: Literal["old", "sampler"] = "old"
    """That other policy."""
    estimator: Literal["sampled", "full"] = "sampled"
    """From the sampled token, or over the vocabulary."""
    top_k: PositiveInt | None = None
    """With "full": the vocabulary's ``top_k`` most likely tokens and one bucket for the rest. Unset: all of them."""
    target: Positive | None = None
    """Adaptive: beta moves so that the mean KL per token (k3) approaches this. Unset: beta stays."""
    horizon: PositiveInt = 10_000
    """Adaptive: completions over which beta may change by a factor of about 1.2."""

    def problems(self) -> Iterator[str]:
        """Combinations without effect, and those that are the gradient of no KL."""
        if self.target is None and self.horizon != type(self).model_fields["horizon"].default:
            yield "kl.horizon belongs to an adaptive KL: set kl.target"
        if self.target is not None and self.beta == 0:
            yield "kl.target moves beta: set beta to the weight to begin with"
        if self.top_k is not None and self.estimator != "full":
            yield "kl.top_k belongs to kl.estimator 'full'"
        if self.scope == "sequence" and self.correction not in ("none", "sequence_weight"):
            yield (
                f"kl.scope 'sequence' with kl.correction {self.correction!r} is the gradient of no KL: set "
                "kl.correction 'sequence_weight'"
            )
        if self.anchor == "sampler" and (self.correction == "none" or self.place != "loss"):
            yield f"kl.anchor 'sampler' has no effect with kl.correction {self.correction!r}, kl.place {self.place!r}"
        full, outside = self.estimator == "full", self.place != "loss"
        if full and outside:
            yield "kl.estimator 'full' differentiates the logits: set kl.place 'loss'"
        if full and self.scope != "token":
            yield "kl.estimator 'full' is a sum over tokens: set kl.scope 'token'"
        if full and self.correction not in ("none", "prefix_product"):
            yield (
                "kl.estimator 'full' has no sampled token to correct for, only its prefix: set kl.correction 'none' or "
                "'prefix_product'"
            )
        if outside and self.direction != "reverse":
            yield (
                f"kl.place {self.place!r} gives the reverse KL's gradient only: k3 as a reward is the reverse minus "
                "the forward KL's. Set kl.direction 'reverse'"
            )
        if outside and self.correction != "none":
            yield f"kl.place {self.place!r} is weighted by the policy term's ratio already: set kl.correction 'none'"
        if self.place == "reward" and self.scope != "sequence":
            yield "kl.place 'reward' is a reward of the whole completion: set kl.scope 'sequence', or place 'advantage'"

    def words(self) -> str:
        """The weight, and the gradient's multiplier kappa."""
        if self.beta == 0:
            return "beta = 0; no reference policy"
        weight = f"beta = {self.beta:g}"
        weight += f", moving toward a KL of {self.target:g} per token" if self.target else ""
        name = "KL(policy || ref)" if self.direction == "reverse" else "KL(ref || policy)"
        if self.place != "loss":
            what = (
                "sum of log(old/ref) over the completion" if self.scope == "sequence" else "log(old/ref) of the token"
            )
            return f"{weight}; {what}, subtracted from the {self.place}: the gradient of {name}"
        if self.estimator == "full":
            over = f"the {self.top_k} likeliest tokens and a bucket for the rest" if self.top_k else "the vocabulary"
            corrected = f", weighted by the product of earlier ratios to {self.anchor}" * (self.correction != "none")
            return f"{weight}; {name} over {over}{corrected}"
        kappa = {
            ("reverse", "token"): "log(policy/ref)",
            ("forward", "token"): "1 - ref/policy",
            ("reverse", "sequence"): "sum of log(policy/ref)",
            ("forward", "sequence"): "1 - product of ref/policy",
        }[self.direction, self.scope]
        correction = {
            "none": "",
            "token_ratio": f"policy/{self.anchor} * ",
            "prefix_product": f"product of policy/{self.anchor} up to the token * ",
            "sequence_weight": f"product of policy/{self.anchor} over the sequence * ",
        }[self.correction]
        k3 = " (k3 as a loss)" if self == KL(beta=self.beta, direction="forward") else ""
        return f"{weight}; the gradient of {name} per {self.scope}: kappa = {correction}{kappa}{k3}"


class EntropyBonus(Part):
    """``coefficient`` times the mean full-vocabulary entropy, added to the objective."""

    rule: Literal["entropy"] = "entropy"
    source = "adaptive: Skywork-OR1 (arXiv 2505.22312)"
    coefficient: Weight = 0.0
    target: Positive | None = None
    """Adaptive: the coefficient rises by ``step`` after an update whose entropy is at most this and falls otherwise;
    the bonus counts only while the entropy is at most this. Unset: the coefficient stays."""
    step: Positive = 0.005
    minimum: Weight = 0.0
    """The coefficient does not fall below this."""
    maximum: Positive | None = None
    """The coefficient does not rise above this. Unset: it has no bound."""

    def problems(self) -> Iterator[str]:
        """Require a coefficient or a target, and bounds in order that have an effect."""
        if self.coefficient == 0 and self.target is None:
            yield "entropy has no effect with coefficient 0 and no target: set entropy.coefficient, or entropy 'none'"
        if self.target is None and (self.minimum or self.maximum is not None):
            yield "entropy.minimum and entropy.maximum bound an adaptive coefficient: set entropy.target"
        if self.maximum is not None and self.maximum < self.minimum:
            yield f"entropy.maximum ({self.maximum:g}) is below entropy.minimum ({self.minimum:g})"

    def words(self) -> str:
        """The bonus, and how its weight moves."""
        text = f"+ {self.coefficient:g} * mean full-vocabulary entropy over the loss tokens"
        if self.target is None:
            return text
        return (
            f"{text}; the weight moves by {self.step:g} an update, up while the entropy is at most {self.target:g}, "
            f"else down{self._bounds()}, and counts only then"
        )

    def _bounds(self) -> str:
        if self.maximum is not None:
            return f", within [{self.minimum:g}, {self.maximum:g}]"
        return f", not below {self.minimum:g}" if self.minimum else ""
