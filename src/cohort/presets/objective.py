"""An objective: a preset's name and all its parts. Combinations that make no sense are refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field, Strict

from cohort.errors import ConfigError
from cohort.presets import parts, words
from cohort.presets.base import Checked, Part, PositiveInt, Weight, Word, kinds, nearest, one_of, require
from cohort.presets.kl import KL, EntropyBonus
from cohort.presets.settings import SHORTHANDS, merged
from cohort.presets.trust_regions import TrustRegion

ABOUT = ("name", "version", "source", "summary")
"""Fields that identify a row of the table; all others are its parts."""
WORDS: Mapping[str, Mapping[str, Word]] = {
    "reward_aggregation": words.REWARD_AGGREGATION,
    "baseline": words.BASELINE,
    "credit": words.CREDIT,
    "truncated": words.TRUNCATED,
    "ratio_anchor": words.RATIO_ANCHOR,
    "ratio_level": words.RATIO_LEVEL,
    "aggregation": words.AGGREGATION,
    "denominator": words.DENOMINATOR,
}
"""The settings that hold a word, and what each word declares."""
Share = Annotated[float, Field(gt=0, le=1)]


def _check_baseline(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        require(math.isfinite(value), f"expected a finite number, got {value!r}")
    elif value not in words.BASELINE and ":" not in str(value):
        raise ConfigError(
            f"expected one of {', '.join(words.BASELINE)}, a number, or a function as file.py:function, "
            f"got {value!r}{nearest(value, words.BASELINE)}"
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

    # Rewards to advantages: once per rollout.
    soft_overlong: parts.SoftOverlong | None = None
    unlikeliness: parts.Unlikeliness | None = None
    reward_aggregation: Annotated[str, one_of(words.REWARD_AGGREGATION)] = "sum_then_normalize"
    """How several rewards become one: sum and normalise; or normalise each in its group and sum; or that, and normalise
    the sums over the batch."""
    group_filter: parts.GroupFilter | None = None
    baseline: Annotated[float | str, BeforeValidator(_check_baseline)] = "group_mean"
    """Subtracted from a reward. A number is a constant; "module:function" or "file.py:function" is a user's function
    of rewards and groups."""
    scale: parts.Scale | None = parts.GroupStd()
    """The divisor of the centred reward."""
    sign_weights: parts.SignWeights | None = None
    credit: Annotated[str, one_of(words.CREDIT)] = "outcome"
    """Which tokens a reward belongs to."""
    discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of later rewards, per token, with credit "return_to_go"."""
    truncated: Annotated[str, one_of(words.TRUNCATED)] = "keep"
    """Completions cut by the length limit, after the advantages of the whole group: kept; masked (no term sees them);
    given advantage 0; or given an advantage lower by ``truncated_penalty``."""
    truncated_penalty: Weight = 1.0

    # The policy term.
    ratio_anchor: Annotated[str, one_of(words.RATIO_ANCHOR)] = "old"
    """The policy that the current one is divided by; "self" makes every ratio 1."""
    ratio_level: Annotated[str, one_of(words.RATIO_LEVEL)] = "token"
    trust_region: TrustRegion | None = None
    mismatch: Annotated[tuple[parts.Mismatch, ...], Strict(False)] = ()
    top_entropy: Share = 1.0
    """Share of the minibatch's tokens, those of highest entropy, that the policy term uses."""

    # The other terms.
    kl: KL = KL()
    entropy: EntropyBonus | None = None

    # Denominators.
    aggregation: Annotated[str, one_of(words.AGGREGATION)] = "seq_mean_token_mean"
    aggregation_length: PositiveInt | None = None
    """L of aggregation "constant"; unset: ``rollout.max_completion_length``."""
    denominator: Annotated[str, one_of(words.DENOMINATOR)] = "base"
    """Whether tokens that ``top_entropy`` leaves out still count in the denominators ("base") or not."""
    count_empty: bool = True
    """Whether completions without a loss token count in B."""

    def check(self) -> None:
        """Refuse numbers without effect, and parts that cannot be combined."""
        require(
            self.aggregation_length is None or self.aggregation == "constant",
            f"aggregation_length belongs to aggregation 'constant', not {self.aggregation!r}",
        )
        require(
            self.truncated_penalty == 1 or self.truncated == "penalize",
            "truncated_penalty belongs to truncated 'penalize'",
        )
        require(
            self.denominator == "base" or self.top_entropy < 1,
            "denominator 'after_masks' is about the tokens that top_entropy leaves out: set top_entropy",
        )
        require(self.discount == 1 or self.credit == "return_to_go", "discount belongs to credit 'return_to_go'")
        for name, value in self.settings().items():
            for part in value if isinstance(value, tuple) else (value,):
                declared = part if isinstance(part, Part) else WORDS.get(name, {}).get(str(part), Word(""))
                for excluded in declared.excludes:
                    other = getattr(self, excluded.setting)
                    refused = excluded.refuses(other.rule if isinstance(other, Part) else other)
                    require(not refused, excluded.message.format(part=part, objective=self))

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

    @property
    def kl_scaled_by_batch(self) -> bool:
        """Whether scale "batch_std" would divide the KL. REINFORCE++ is so by definition: returns to go with the KL in
        them, whitened over tokens."""
        whitened = (
            isinstance(self.scale, parts.BatchStd) and self.scale.unit == "token" and self.credit == "return_to_go"
        )
        return self.kl_in_reward and not whitened

    @property
    def token_weighting(self) -> str | None:
        """What treats the tokens of a completion differently where it has one ratio, as a clause; None: nothing."""
        if self.trust_region is not None and self.trust_region.constant_weight:
            return None
        if self.top_entropy < 1:
            return "top_entropy chooses"
        by_token = any(isinstance(rule, parts.MismatchWeight) and rule.level == "token" for rule in self.mismatch)
        return "a mismatch weight of level 'token' weighs" if by_token else None

    @property
    def length_text(self) -> str:
        """L of aggregation "constant" in words."""
        return str(self.aggregation_length or "max_completion_length")

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
        """The parts, by name, without name, version, source and summary."""
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
