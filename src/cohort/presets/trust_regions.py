"""The rules of the trust region, with their numbers. What each computes is in ``cohort.objective.trust``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from cohort.presets.bounds import check_bounds, check_finite, require


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOClip:
    """PPO's clip with separate bounds; ``dual`` also silences A < 0 above that ratio (dual clip, two-sided clip)."""

    rule: ClassVar[str] = "ppo_clip"
    low: float = 0.8
    high: float = 1.2
    dual: float | None = None

    def __post_init__(self) -> None:
        require(
            self.high >= 1,
            f"ppo_clip: high ({self.high:g}) is a bound on the ratio itself: an epsilon of 0.28 is high = 1.28",
        )
        check_bounds("ppo_clip", self.low, self.high, why=", the ratio of a policy to itself")
        require(
            self.dual is None or self.dual > self.high,
            f"ppo_clip: dual ({self.dual}) must be above high ({self.high:g}): dual and two-sided clip are the same "
            "rule only there, and below it would also cut A > 0",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Silence tokens whose ratio is outside [low, high]: whatever the advantage's sign, or (``signed``) only where the
    ratio moved the way the advantage pushes."""

    rule: ClassVar[str] = "mask"
    low: float = 0.5
    high: float = 5.0
    signed: bool = False

    def __post_init__(self) -> None:
        check_bounds("mask", self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cap:
    """CISPO: the ratio, held to [low, high], is a weight; nothing is silenced."""

    rule: ClassVar[str] = "cap"
    low: float = 0.0
    high: float = 5.0

    def __post_init__(self) -> None:
        check_bounds(
            "cap",
            self.low,
            self.high,
            why=", or it would scale every on-policy gradient. The bounds are ratios, not epsilons: an epsilon of "
            f"{self.high:g} is high = {1 + self.high:g}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO:
    """A smooth gate: r * sech^2(tau (r - 1) / 2), with tau by the advantage's sign."""

    rule: ClassVar[str] = "sapo"
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        require(min(self.tau_positive, self.tau_negative) > 0, "sapo: temperatures must be positive")
        check_finite("sapo", self.tau_positive, self.tau_negative)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """VESPO: the weight r^k exp(lambda (1 - r)), with (k, lambda) by the advantage's sign."""

    rule: ClassVar[str] = "gamma"
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        numbers = (self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative)
        require(min(numbers) >= 0, "gamma: k and lambda must not be negative")
        check_finite("gamma", *numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TVMask:
    """DPPO: silence tokens whose probability moved more than ``low``/``high`` the way the advantage pushes."""

    rule: ClassVar[str] = "tv_mask"
    low: float = 0.15
    high: float = 0.15
    cap: float = 20.0

    def __post_init__(self) -> None:
        require(min(self.low, self.high) >= 0, "tv_mask: differences of probability must not be negative")
        require(self.cap >= 1, f"tv_mask: cap must be at least 1, got {self.cap:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KLMask:
    """DPPO: silence tokens whose Bernoulli KL(anchor || policy) is above ``threshold`` and which still move away."""

    rule: ClassVar[str] = "kl_mask"
    threshold: float = 0.05
    cap: float = 20.0

    def __post_init__(self) -> None:
        require(self.threshold >= 0, "kl_mask: threshold must not be negative")
        require(self.cap >= 1, f"kl_mask: cap must be at least 1, got {self.cap:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GMPO:
    """Clip each token's ratio to [low, high], then take the geometric mean over the sequence."""

    rule: ClassVar[str] = "gmpo"
    low: float = math.exp(-0.4)
    high: float = math.exp(0.4)

    def __post_init__(self) -> None:
        check_bounds("gmpo", self.low, self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class FIPO:
    """PPO's clip times a weight from the discounted log-ratios of a token and those that follow it."""

    rule: ClassVar[str] = "fipo"
    low: float = 0.8
    high: float = 1.2
    dual: float | None = None
    half_life: float = 32.0
    """Tokens after which a later token's log-ratio counts half: gamma = 2^(-1 / half_life)."""
    weight_low: float = 1.0
    weight_high: float = 1.2
    safety: float = 4.0
    """A token with A < 0 and a ratio above this is never weighted by more than 1."""

    def __post_init__(self) -> None:
        PPOClip(low=self.low, high=self.high, dual=self.dual)
        check_bounds("fipo weight", self.weight_low, self.weight_high, why=", what an on-policy token has")
        require(self.half_life > 0, "fipo: half_life must be positive")
        require(self.safety > 0, "fipo: safety is a ratio and must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """Your own rule: ``function(ratio_N, advantages_N) -> phi_N``, named "module:function" or "file.py:function"."""

    rule: ClassVar[str] = "custom"
    function: str = ""

    def __post_init__(self) -> None:
        require(":" in self.function, f"custom: expected module:function or file.py:function, got {self.function!r}")


TrustRegion = PPOClip | Mask | Cap | SAPO | Gamma | TVMask | KLMask | GMPO | FIPO | Custom
