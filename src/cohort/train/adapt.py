"""Weights of the objective that follow a target from update to update: the KL's and the entropy bonus's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cohort.objective import Objective, applied_entropy_coefficient, next_beta, next_entropy_coefficient
from cohort.train.update import UpdateResult


@dataclass(slots=True)
class Adaptive:
    """Weights that follow a target; a weight without a target is constant. Part of a checkpoint."""

    beta: float
    entropy_coefficient: float
    entropy: float | None = None
    """Mean entropy in the last update."""

    @classmethod
    def of(cls, objective: Objective) -> Adaptive:
        """The weights at the start of a run."""
        return cls(objective.beta, objective.entropy.coefficient if objective.entropy else 0.0)

    def applied_to(self, objective: Objective) -> Objective:
        """The objective with the current weight of the KL."""
        return objective if objective.kl.target is None else objective.replace(beta=self.beta)

    def applied_entropy_coefficient(self, objective: Objective) -> float:
        """The entropy bonus's weight in the next update."""
        return applied_entropy_coefficient(objective.entropy, self.entropy_coefficient, self.entropy)

    def after_update(self, objective: Objective, result: UpdateResult) -> None:
        """Adapt to the entropy of an update."""
        sums = result.statistics.sums
        if sums["tokens"]:
            self.entropy = sums["entropy"] / sums["tokens"]
        if objective.entropy and self.entropy is not None:
            self.entropy_coefficient = next_entropy_coefficient(
                objective.entropy, self.entropy_coefficient, self.entropy
            )

    def after_step(self, objective: Objective, results: list[UpdateResult], completions: int) -> None:
        """Adapt to the KL: its mean over the tokens of the step's last update."""
        sums = results[-1].statistics.sums if results else {}
        if "k3" in sums and sums["tokens"]:
            self.beta = next_beta(objective.kl, self.beta, sums["k3"] / sums["tokens"], completions)

    def state_dict(self) -> dict[str, Any]:
        """The state as a checkpoint stores it."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        for name, value in state.items():
            setattr(self, name, value)
