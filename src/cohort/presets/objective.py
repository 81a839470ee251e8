"""An objective: a preset's name and all its parts. Combinations that make no sense are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field, Strict

from cohort.errors import ConfigError, did_you_mean
from cohort.presets import parts
from cohort.presets.base import Checked, PositiveInt, Weight, kinds, one_of, require
from cohort.presets.settings import SHORTHANDS, merged
from cohort.presets.trust_regions import TrustRegion
from cohort.presets.words import WORDS

ABOUT = ("name", "version", "source", "summary", "minibatches")
"""Fields of a row of the table that are not parts of its formula."""
Share = Annotated[float, Field(gt=0, le=1)]


def _check_baseline(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        require(math.isfinite(value), f"expected a finite number, got {value!r}")
    elif not isinstance(value, str) or (value not in WORDS["baseline"] and ":" not in value):
        raise ConfigError(
            f"expected one of {', '.join(WORDS['baseline'])}, a number, or a function as file.py:function, "
            f"got {value!r}{did_you_mean(value, WORDS['baseline'])}"
        )
    return value


class Objective(Checked):
    """Everything that distinguishes one variant from another.

    Raises:
        ConfigError: a number is out of its range, or two parts cannot be combined; the message says why.
    """

    name: str = "custom"
    version: int = 1
    """Raised whenever a preset's numbers change; a run records name and version."""
    source: str = ""
    """The paper whose numbers these are."""
    summary: str = ""
    """The difference from GRPO, in one line."""
    minibatches: PositiveInt = 1
    """Optimizer steps per pass over a rollout. More than 1 in the presets whose ratio and trust region have no effect
    with one update per rollout."""

    # Rewards to advantages: once per rollout.
    soft_overlong: parts.SoftOverlong | None = None
    unlikeliness: parts.Unlikeliness | None = None
    reward_aggregation: Annotated[str, one_of(WORDS["reward_aggregation"])] = "sum_then_normalize"
    """How several rewards become one: sum and normalise; or normalise each in its group and sum; or that, and normalise
    the sums over the batch."""
    group_filter: parts.GroupFilter | None = None
    baseline: Annotated[float | str, BeforeValidator(_check_baseline)] = "group_mean"
    """Subtracted from a reward. A number is a constant; "module:function" or "file.py:function" is a user's function
    of rewards and groups."""
    scale: parts.Scale | None = parts.GroupStd()
    """The divisor of the centred reward."""
    sign_weights: parts.SignWeights | None = None
    credit: Annotated[str, one_of(WORDS["credit"])] = "outcome"
    """Which tokens a reward belongs to."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of later rewards, per token, with credit "return_to_go"."""
    truncated: Annotated[str, one_of(WORDS["truncated"])] = "keep"
    """Completions cut by the length limit, after the advantages of the whole group: kept; masked (no term sees them);
    given advantage 0; or given an advantage lower by ``truncated_penalty``."""
    truncated_penalty: Weight = 1.0

    # The policy term.
    ratio_anchor: Annotated[str, one_of(WORDS["ratio_anchor"])] = "old"
    """The policy that the current one is divided by; "self" makes every ratio 1."""
    ratio_level: Annotated[str, one_of(WORDS["ratio_level"])] = "token"
    trust_region: TrustRegion | None = None
    mismatch: Annotated[tuple[parts.Mismatch, ...], Strict(False)] = ()
    top_entropy: Share = 1.0
    """Share of the minibatch's tokens, those of highest entropy, that the policy term uses."""

    # The other terms.
    kl: parts.KL = parts.KL()
    entropy: parts.EntropyBonus | None = None

    # Denominators.
    aggregation: Annotated[str, one_of(WORDS["aggregation"])] = "seq_mean_token_mean"
    aggregation_length: PositiveInt | None = None
    """L of aggregation "constant"; unset: ``rollout.max_completion_length``."""
    denominator: Annotated[str, one_of(WORDS["denominator"])] = "base"
    """Whether tokens that ``top_entropy`` leaves out still count in the denominators ("base") or not."""
    count_empty: bool = True
    """Whether completions without a loss token count in B."""

    def problems(self) -> Iterator[str]:
        """Settings without effect, and parts that cannot be combined."""
        if self.aggregation_length is not None and self.aggregation != "constant":
            yield f"aggregation_length belongs to aggregation 'constant', not {self.aggregation!r}"
        if self.truncated_penalty != 1 and self.truncated != "penalize":
            yield "truncated_penalty belongs to truncated 'penalize'"
        if self.denominator != "base" and self.top_entropy == 1:
            yield "denominator 'after_masks' is about the tokens that top_entropy leaves out: set top_entropy"
        if self.discount != 1 and self.credit != "return_to_go":
            yield "discount belongs to credit 'return_to_go'"
        yield from self._conflicts_of_rewards()
        yield from self._conflicts_of_credit()
        yield from self._conflicts_of_scale()
        yield from self._conflicts_of_ratio()

    def _conflicts_of_rewards(self) -> Iterator[str]:
        """Settings from rewards to advantages that cannot be combined."""
        credit, filtered = f"credit {self.credit!r}", self.group_filter
        normalized = f"reward_aggregation {self.reward_aggregation!r}"
        scale = None if self.scale is None else self.scale.rule
        for part in (self.soft_overlong, self.unlikeliness, filtered):
            if part is not None and self.credit in parts.PER_STEP:
                name = "group_filter" if part is filtered else part.rule
                yield f"{name} is about a completion's one reward; {credit} has none"
        if self.reward_aggregation in parts.NORMALIZED:
            if self.soft_overlong or self.unlikeliness:
                yield (
                    f"with {normalized} there is no single reward to shape: set soft_overlong and unlikeliness to "
                    "'none'"
                )
            if self.credit != "outcome":
                yield f"{normalized} needs credit 'outcome'"
            if self.kl_in_reward:
                yield (
                    f"with {normalized} there is no single reward for the KL to be part of: set kl.place 'advantage' "
                    "or 'loss'"
                )
        if isinstance(filtered, parts.DropDead | parts.DynamicSampling):
            if self.baseline not in parts.GROUP_BASELINES:
                yield (
                    f"group_filter {filtered.rule!r} drops groups of equal rewards, which have a gradient with "
                    f"baseline {self.baseline!r}: set group_filter 'none', or baseline 'group_mean'"
                )
            if self.unlikeliness is not None:
                yield (
                    f"unlikeliness gives groups of equal rewards a gradient, and group_filter {filtered.rule!r} would "
                    "drop them before: set one of them to 'none'"
                )
        if self.baseline == "second_best" and scale not in (None, "group_std"):
            yield "baseline 'second_best' is an estimate of its own: set scale 'none' (or 'group_std')"

    def _conflicts_of_credit(self) -> Iterator[str]:
        """Settings that the credit cannot be combined with."""
        credit, filtered = f"credit {self.credit!r}", self.group_filter
        scale = None if self.scale is None else self.scale.rule
        if self.credit == "process" and (self.baseline != "group_mean" or scale not in (None, "group_std")):
            yield (
                f"{credit} normalises all step rewards of a group together: set baseline 'group_mean' and scale "
                "'group_std' or 'none'"
            )
        if self.credit == "given" and (self.baseline != "none" or scale is not None):
            yield f"{credit} uses the advantages as they are: set baseline 'none' and scale 'none'"
        if self.credit == "turns" and (self.baseline != "leave_one_out" or scale is not None):
            yield (
                f"{credit} compares a turn with the others that reached it: set baseline 'leave_one_out' and scale "
                "'none'"
            )
        if self.credit == "turns" and isinstance(filtered, parts.DropDead | parts.DynamicSampling):
            yield (
                f"group_filter {filtered.rule!r} drops groups of equal rewards, whose later turns may differ: with "
                f"{credit} set group_filter 'none'"
            )
        if self.credit in (*parts.PER_STEP, "turns") and self.kl_in_reward:
            yield f"the KL in the reward needs a completion's one reward; {credit} has none"

    def _conflicts_of_scale(self) -> Iterator[str]:
        """Settings that the scale cannot be combined with."""
        scale = self.scale
        if isinstance(scale, parts.GroupMean) and self.soft_overlong is not None:
            yield (
                "scale 'group_mean' needs rewards that are not negative, and soft_overlong makes negative ones: set "
                "scale 'none' or soft_overlong 'none'"
            )
        if isinstance(scale, parts.BatchStd) and self.reward_aggregation in parts.NORMALIZED:
            yield (
                "reward_aggregation normalises each reward in its group: set scale 'group_std' or 'none'; "
                "'normalize_sum_normalize' is the one that also divides by the batch's spread"
            )
        if not self.kl_in_reward:
            return
        if isinstance(scale, parts.GroupMean):
            yield "scale 'group_mean' with the KL in the reward would divide by a mean of both: set kl.place"
        if isinstance(scale, parts.GroupStd):
            yield (
                "the KL in the reward with scale 'group_std' would divide beta by the group's spread, and make pure KL "
                "noise of groups whose rewards are equal: set kl.place 'advantage' (after scaling), or scale 'none'"
            )
        # REINFORCE++ whitens returns to go with the KL in them, by definition.
        if isinstance(scale, parts.BatchStd) and not (scale.unit == "token" and self.credit == "return_to_go"):
            yield (
                "the KL in the reward with scale 'batch_std' would divide beta by the batch's spread: set kl.place "
                "'advantage' (after scaling), or scale 'none'"
            )

    def _conflicts_of_ratio(self) -> Iterator[str]:
        """Settings of the policy term that cannot be combined."""
        rule, level = self.trust_region, self.ratio_level
        if rule is not None and self.ratio_anchor == "self":
            yield (
                f"ratio_anchor 'self' makes every ratio 1, so trust_region {rule.rule!r} would never act: set "
                "trust_region 'none' or ratio_anchor 'old'"
            )
        if rule is not None and rule.only_level and rule.only_level[0] != level:
            yield f"trust_region {rule.rule!r} is {rule.only_level[1]}: set ratio_level {rule.only_level[0]!r}"
        by_sampler = any(isinstance(rule, parts.MismatchWeight | parts.Veto) for rule in self.mismatch)
        if by_sampler and self.ratio_anchor == "sampler":
            yield (
                "ratio_anchor 'sampler' carries the mismatch in its ratio already: set mismatch 'none', or "
                "ratio_anchor 'old'"
            )
        if level not in ("sequence_mean", "sequence_product"):
            return
        whole = f"ratio_level {level!r} moves a completion as one, and"
        if self.token_advantages:
            yield (
                f"{whole} needs one advantage for it: set ratio_level 'sequence_mean_token' or 'prefix_product', or "
                "give outcome credit and a KL of scope 'sequence'"
            )
        if rule is not None and rule.constant_weight:
            return
        if self.top_entropy < 1:
            yield f"{whole} top_entropy chooses single tokens: set ratio_level 'sequence_mean_token' or 'token'"
        if any(isinstance(rule, parts.MismatchWeight) and rule.level == "token" for rule in self.mismatch):
            yield (
                f"{whole} a mismatch weight of level 'token' weighs single tokens: set ratio_level "
                "'sequence_mean_token' or 'token'"
            )

    @property
    def beta(self) -> float:
        """Weight of the KL term. 0: no reference policy exists."""
        return self.kl.beta

    @property
    def identity(self) -> str:
        """``name@version``."""
        return f"{self.name}@{self.version}"

    @property
    def advantages_need_logps(self) -> bool:
        """Whether even a single update per rollout needs old log-probs: a KL outside of the loss is made of them."""
        return self.beta != 0 and self.kl.place != "loss"

    @property
    def token_advantages(self) -> bool:
        """Whether advantages may differ between the tokens of a completion."""
        return self.credit != "outcome" or (
            self.beta != 0 and self.kl.place == "advantage" and self.kl.scope == "token"
        )

    @property
    def group_relative(self) -> bool:
        """Whether baseline or scale use the other completions of the group, and so need at least two."""
        return self.baseline in parts.GROUP_BASELINES or isinstance(self.scale, parts.GroupStd | parts.GroupMean)

    @property
    def kl_in_reward(self) -> bool:
        """Whether there is a KL in the reward."""
        return self.beta != 0 and self.kl.place == "reward"

    def replace(self, **settings: object) -> Objective:
        """Return a copy with some settings changed.

        A part may be given as an object, as a word, or as a table. A table with the part's present rule, or without a
        rule, changes only the numbers it names; a table with another rule starts from that rule's defaults. ``beta``,
        ``epsilon`` and ``epsilon_high`` are short for ``kl.beta`` and the bounds of the PPO clip.

        Raises:
            ConfigError: a setting is unknown or does not fit.

        >>> Objective().replace(trust_region={"rule": "ppo_clip", "high": 1.28}).trust_region
        PPOClip(low=0.8, high=1.28, dual=None)
        """
        return Objective(**{**dict(self), **merged(self, self.settings(), settings)})

    def settings(self) -> dict[str, object]:
        """The parts, by name: all fields but ``ABOUT``."""
        return {name: value for name, value in self if name not in ABOUT}


def setting_names() -> tuple[str, ...]:
    """The settings of an objective, shorthands included."""
    return (*(name for name in Objective.model_fields if name not in ABOUT), *SHORTHANDS)


def optional_parts() -> frozenset[str]:
    """The parts whose absence, "none", is one of their values."""
    return frozenset(name for name, field in Objective.model_fields.items() if kinds(field.annotation)) | {"baseline"}


def choices(name: str) -> tuple[str, ...]:
    """The words that a setting may hold, "none" and the rules of a part included; empty for a number."""
    if name in WORDS:
        return tuple(WORDS[name])
    field = Objective.model_fields.get(name)
    rules = tuple(kinds(field.annotation)) if field else ()
    return ("none", *rules) if len(rules) > 1 else ()
