"""Named objectives as rows of one table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from cohort.objective.advantages import Scale
from cohort.objective.aggregation import Aggregation
from cohort.objective.kl import KLGradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Everything that distinguishes one variant from another. Ratio bounds are bounds on the ratio, not epsilons."""

    name: str
    source: str
    """The paper whose numbers these are."""
    scale: Scale
    """What a centred reward is divided by: its group's standard deviation, or nothing."""
    std_ddof: int
    std_epsilon: float
    ratio_low: float
    ratio_high: float
    aggregation: Aggregation
    beta: float
    """Weight of the KL term. 0: no reference policy exists."""
    kl_gradient: KLGradient

    def replace(self, **changes: Any) -> Objective:
        """A copy with some settings changed."""
        return dataclasses.replace(self, **changes)

    def describe(self) -> str:
        """The resolved formula in plain text, with its numbers."""
        spread = f"(std(R_group, ddof={self.std_ddof}) + {self.std_epsilon:g})" if self.scale == "group" else "1"
        kl = {
            "forward": "k3 as loss: the forward KL(ref || policy)'s gradient, kappa = 1 - ref/policy",
            "reverse": "the reverse KL(policy || ref)'s gradient, kappa = ratio * log(policy/ref)",
        }[self.kl_gradient]
        return "\n".join(
            [
                f"objective {self.name}, after {self.source}",
                f"  advantage   A = (R - mean(R_group)) / {spread}; 0 when all rewards of the group are equal",
                f"  policy      min(r A, clip(r, {self.ratio_low:g}, {self.ratio_high:g}) A), r = policy/old per token",
                f"  KL          beta = {self.beta:g}" + (f"; {kl}" if self.beta else "; no reference policy"),
                "  mean        over the tokens of a completion, then over completions",
            ]
        )


PRESETS: dict[str, Objective] = {
    "grpo": Objective(
        name="grpo",
        source="DeepSeekMath, arXiv 2402.03300",
        scale="group",
        std_ddof=1,
        std_epsilon=1e-6,
        ratio_low=0.8,
        ratio_high=1.2,
        aggregation="seq_mean_token_mean",
        beta=0.04,
        kl_gradient="forward",
    ),
}
"""The table. The paper gives beta = 0.04 but no clip range; 0.2 is PPO's."""
