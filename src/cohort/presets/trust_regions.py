"""Trust regions: the rules that limit how far an update moves the policy. Their mathematics is ``objective.trust``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from cohort.presets.base import Bound, Part, Positive, Weight, bounds_problems

Cap20 = Annotated[float, Field(ge=1)]
TOKENS_ONLY = ("token", "about single tokens")


class Rule(Part):
    """A trust region. ``formula`` is its surrogate; ``{{anchor}}`` in it is the policy that the ratio divides by."""

    only_level: ClassVar[tuple[str, str] | None] = None
    """The only ``ratio_level`` that the rule goes with, and what the rule is, for the message. None: any."""
    constant_weight: ClassVar[bool] = False
    """Whether the ratio is a detached weight of log(policy), so that every token keeps a gradient of its own."""
    of_probabilities: ClassVar[bool] = False
    """Whether the rule compares probabilities, not ratios, so that its bounds are not bounds of a ratio."""
    of_single_tokens: ClassVar[bool] = False
    """Whether the bounds are for the ratios of single tokens at every ``ratio_level``."""


class PPOClip(Rule):
    """PPO's clip with separate bounds. ``dual`` also silences tokens with A < 0 and a ratio above it."""

    rule: Literal["ppo_clip"] = "ppo_clip"
    formula = "min(r A, clip(r, {low:g}, {high:g}) A)"
    source = "PPO (arXiv 1707.06347), dual clip (1912.09729), INTELLECT-2 (2505.07291)"
    low: Bound = 0.8
    high: Bound = 1.2
    dual: Bound | None = None

    def words(self) -> str:
        """The formula; the second bound where there is one."""
        return super().words() + (f"; and none where A < 0 and r > {self.dual:g}" if self.dual else "")

    def problems(self) -> Iterator[str]:
        """Require low < 1 <= high < dual."""
        if self.high < 1:
            yield f"{self.rule}: high ({self.high:g}) is a bound on the ratio itself: an epsilon of 0.28 is high = 1.28"
        yield from bounds_problems(self.rule, self.low, self.high, why=", the ratio of a policy to itself")
        if self.dual is not None and self.dual <= self.high:
            yield (
                f"{self.rule}: dual ({self.dual}) must be above high ({self.high:g}): dual and two-sided clip are the "
                "same rule only there, and below it would also cut A > 0"
            )


class Mask(Rule):
    """Silence tokens with a ratio outside [low, high]; with ``signed`` only where the ratio moved the way the advantage
    pushes."""

    rule: Literal["mask"] = "mask"
    formula = "r A; none where r outside [{low:g}, {high:g}]"
    bounds = "mask"
    low: Bound = 0.5
    high: Bound = 5.0
    signed: bool = False

    def words(self) -> str:
        """The formula, by the sign of A if ``signed``."""
        signed = f"r A; none where A > 0 and r > {self.high:g}, or A < 0 and r < {self.low:g}"
        return signed if self.signed else super().words()


class Cap(Rule):
    """CISPO: the ratio, clamped to [low, high], is a weight; nothing is silenced."""

    rule: Literal["cap"] = "cap"
    formula = "clip(r, {low:g}, {high:g}) A log(policy), the clipped ratio a constant weight"
    source = "CISPO (arXiv 2506.13585)"
    constant_weight = True
    low: Bound = 0.0
    high: Bound = 5.0

    def problems(self) -> Iterator[str]:
        """Require low <= 1 <= high."""
        return bounds_problems(
            "cap",
            self.low,
            self.high,
            why=", or it would scale every on-policy gradient. The bounds are ratios, not epsilons: an epsilon of "
            f"{self.high:g} is high = {1 + self.high:g}",
        )


class SAPO(Rule):
    """A smooth gate: r * sech^2(tau (r - 1) / 2), with tau by the advantage's sign."""

    rule: Literal["sapo"] = "sapo"
    formula = (
        "sigmoid(tau (r - 1)) (4 / tau) A; phi = r sech^2(tau (r - 1) / 2); tau {tau_positive:g} (A > 0), "
        "{tau_negative:g} (A <= 0)"
    )
    source = "SAPO (arXiv 2511.20347)"
    tau_positive: Annotated[Positive, Field(allow_inf_nan=False)] = 1.0
    tau_negative: Annotated[Positive, Field(allow_inf_nan=False)] = 1.05


class Gamma(Rule):
    """VESPO: the weight r^k exp(lambda (1 - r)), with (k, lambda) by the advantage's sign."""

    rule: Literal["gamma"] = "gamma"
    formula = (
        "r^k exp(lambda (1 - r)) A log(policy), the first factor a constant weight; (k, lambda) "
        "({k_positive:g}, {lambda_positive:g}) where A >= 0, ({k_negative:g}, {lambda_negative:g}) where A < 0"
    )
    source = "VESPO (arXiv 2602.10693)"
    constant_weight = True
    k_positive: Weight = 2.0
    lambda_positive: Weight = 3.0
    k_negative: Weight = 3.0
    lambda_negative: Weight = 2.0


class TVMask(Rule):
    """DPPO: silence tokens whose probability moved more than ``low``/``high`` the way the advantage pushes."""

    rule: Literal["tv_mask"] = "tv_mask"
    formula = (
        "min(r, {cap:g}) A; none where A > 0 and p - p_{{anchor}} > {high:g}, or A < 0 and p_{{anchor}} - p > {low:g}"
    )
    source = "DPPO (arXiv 2602.04879)"
    only_level = TOKENS_ONLY
    of_probabilities = True
    low: Bound = 0.15
    high: Bound = 0.15
    cap: Cap20 = 20.0


class KLMask(Rule):
    """DPPO: silence tokens whose Bernoulli KL(anchor || policy) is above ``threshold`` and which still move away."""

    rule: Literal["kl_mask"] = "kl_mask"
    formula = "min(r, {cap:g}) A; none where Bernoulli KL(p_{{anchor}} || p) > {threshold:g} and A pushes further away"
    source = "DPPO (arXiv 2602.04879)"
    only_level = TOKENS_ONLY
    of_probabilities = True
    threshold: Bound = 0.05
    cap: Cap20 = 20.0


class GMPO(Rule):
    """Clip each token's ratio to [low, high], then take the geometric mean over the sequence."""

    rule: Literal["gmpo"] = "gmpo"
    formula = "A times the geometric mean of ratios clipped to [{low:.4g}, {high:.4g}] on the side A pushes to"
    source = "GMPO (arXiv 2507.20673)"
    only_level = ("sequence_mean", "a geometric mean over the sequence")
    of_single_tokens = True
    bounds = "gmpo"
    low: Bound = math.exp(-0.4)
    high: Bound = math.exp(0.4)


class FIPO(PPOClip):
    """PPO's clip times a weight from the discounted log-ratios of a token and those that follow it."""

    rule: Literal["fipo"] = "fipo"  # type: ignore[assignment]  # another name than PPOClip's
    source = "FIPO (arXiv 2603.19835)"
    only_level = TOKENS_ONLY
    half_life: Positive = 32.0
    """Tokens after which a later token's log-ratio counts half: gamma = 2^(-1 / half_life)."""
    weight_low: Bound = 1.0
    weight_high: Bound = 1.2
    safety: Positive = 4.0
    """A token with A < 0 and a ratio above this is never weighted by more than 1."""

    def words(self) -> str:
        """The clip and the weight."""
        return (
            f"{super().words()}; times clip(exp(sum of log r from the token on, half-life "
            f"{self.half_life:g}), {self.weight_low:g}, {self.weight_high:g}), at most 1 where A < 0 and "
            f"r > {self.safety:g}"
        )

    def problems(self) -> Iterator[str]:
        """Require the clip's order, and weight_low <= 1 <= weight_high."""
        yield from super().problems()
        yield from bounds_problems(
            "fipo weight", self.weight_low, self.weight_high, why=", the weight of an on-policy token"
        )


class GradientPreservingClip(Rule):
    """GPPO: a clipped token keeps the gradient of the bound, times ``beta_low`` or ``beta_high``; 0 is PPO's clip."""

    rule: Literal["gppo"] = "gppo"
    formula = (
        "r A; with r a constant {beta_low:g} * {low:g} where A < 0 and r < {low:g}, "
        "{beta_high:g} * {high:g} where A > 0 and r > {high:g}"
    )
    source = "GPPO (arXiv 2508.07629), CE-GPPO (2509.20712)"
    bounds = "gppo"
    low: Bound = 0.8
    high: Bound = 1.2
    beta_low: Weight = 1.0
    beta_high: Weight = 1.0


class Taper(Rule):
    """TOPR: the ratio, clamped by the advantage's sign, is a weight. By default A >= 0 has weight 1 at any ratio,
    and A < 0 the ratio, at most 1."""

    rule: Literal["taper"] = "taper"
    formula = (
        "clip(r, a, b) A log(policy), the clipped ratio a constant weight; [a, b] = "
        "[{positive_low:g}, {positive_high:g}] where A >= 0, [{negative_low:g}, {negative_high:g}] where A < 0"
    )
    source = "TOPR (arXiv 2503.14286)"
    constant_weight = True
    positive_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    positive_high: Annotated[float, Field(ge=1)] = 1.0
    negative_low: Annotated[float, Field(ge=0, le=1)] = 0.0
    negative_high: Annotated[float, Field(ge=1)] = 1.0


class Custom(Rule):
    """A user's rule: ``function(ratio_N, advantages_N) -> phi_N``, named "module:function" or "file.py:function"."""

    rule: Literal["custom"] = "custom"
    formula = "phi A, phi = {function}(r, A)"
    function: str = ""

    def problems(self) -> Iterator[str]:
        """Require a name with a colon."""
        if ":" not in self.function:
            yield f"custom: expected module:function or file.py:function, got {self.function!r}"


TrustRegion = Annotated[
    PPOClip | Mask | Cap | SAPO | Gamma | TVMask | KLMask | GMPO | FIPO | GradientPreservingClip | Taper | Custom,
    Field(discriminator="rule"),
]
