"""Where a run is between two steps: what a checkpoint holds beside weights, optimizer and random generators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cohort.data import DataCursor
from cohort.evaluation import Best
from cohort.objective import Objective, applied_entropy_coefficient, next_beta, next_entropy_coefficient
from cohort.train.update import NonFinite, UpdateResult


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Weights of the objective that follow a target from update to update: the KL's and the entropy bonus's. A weight
    without a target is constant."""

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

    def after_update(self, objective: Objective, result: UpdateResult) -> Adaptive:
        """Adapted to the entropy of an update."""
        sums, coefficient, entropy = result.statistics.sums, self.entropy_coefficient, self.entropy
        if sums["tokens"]:
            entropy = sums["entropy"] / sums["tokens"]
        if objective.entropy and entropy is not None:
            coefficient = next_entropy_coefficient(objective.entropy, coefficient, entropy)
        return Adaptive(self.beta, coefficient, entropy)

    def after_step(self, objective: Objective, results: list[UpdateResult], completions: int) -> Adaptive:
        """Adapted to the KL: its mean over the tokens of the step's last update."""
        sums = results[-1].statistics.sums if results else {}
        if "k3" in sums and sums["tokens"]:
            return replace(self, beta=next_beta(objective.kl, self.beta, sums["k3"] / sums["tokens"], completions))
        return self


@dataclass(frozen=True, slots=True)
class State:
    """A run between two steps. Each stage of the loop returns the next state; nothing changes one."""

    adaptive: Adaptive
    best: Best
    """The best evaluation so far."""
    complete_steps: int = 0
    version: int = 0
    """``Policy.version``. While it is the policy's, weights and optimizer are those of this state."""
    cursor: DataCursor = field(default_factory=DataCursor)
    """Position in the data after the last complete step."""
    nonfinite_in_a_row: int = 0
    """The last updates that were skipped because a value was not finite."""
    metrics: Mapping[str, Any] | None = None
    """The metrics of the last complete step until it is evaluated and they are written."""
    is_evaluation_asked: bool = False
    """Whether its evaluation was asked for."""

    def after_update(self, objective: Objective, outcome: UpdateResult | NonFinite) -> State:
        """The state after an update, made or skipped."""
        if isinstance(outcome, NonFinite):
            return replace(self, nonfinite_in_a_row=self.nonfinite_in_a_row + 1)
        return replace(self, nonfinite_in_a_row=0, adaptive=self.adaptive.after_update(objective, outcome))

    def to_store(self) -> dict[str, Any]:
        """The state in types of JSON."""
        return {
            "step": self.complete_steps,
            "version": self.version,
            "cursor": self.cursor.state_dict(),
            "adaptive": asdict(self.adaptive),
            "best": self.best.state_dict(),
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "metrics": None if self.metrics is None else dict(self.metrics),
            "is_evaluation_asked": self.is_evaluation_asked,
        }

    def restored(self, stored: Mapping[str, Any], best_record: Mapping[str, Any] | None) -> State:
        """The inverse of ``to_store``.

        Args:
            stored: what a checkpoint holds.
            best_record: the contents of the run's ``best/best.json``; None: there is no best model.
        """
        return replace(
            self,
            adaptive=Adaptive(**stored["adaptive"]),
            best=self.best.restored(stored["best"], best_record),
            complete_steps=stored["step"],
            version=stored["version"],
            cursor=DataCursor.from_state(stored["cursor"]),
            nonfinite_in_a_row=max(0, int(stored["nonfinite_in_a_row"])),
            metrics=stored["metrics"],
            is_evaluation_asked=bool(stored["is_evaluation_asked"]),
        )

    def for_summary(self, num_generations: int) -> dict[str, int]:
        """Complete steps, updates and completions so far."""
        completions = self.cursor.position * num_generations
        return {"steps": self.complete_steps, "updates": self.version, "completions": completions}
