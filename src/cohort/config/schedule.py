"""The arithmetic of a run: how many steps, what each computes. Decided once, said in words at the start."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cohort.config.schema import GRPOConfig
from cohort.errors import DataError
from cohort.presets import Objective


@dataclass(frozen=True, slots=True)
class Schedule:
    """What follows from the settings and the number of training prompts."""

    steps: int
    """Rollouts."""
    prompts_per_step: int
    num_generations: int
    num_iterations: int
    minibatches: int
    updates_per_rollout: int
    """Optimizer steps per rollout."""
    num_prompts: int
    needs_old_logps: bool
    """More than one update uses a rollout, or the KL is in reward or advantage: the policy that sampled must be
    remembered."""
    needs_ref_logps: bool
    """beta is not 0, and the KL is of sampled tokens."""
    objective: Objective
    """With the numbers that the settings leave open."""

    @classmethod
    def of(cls, config: GRPOConfig, num_prompts: int) -> Schedule:
        """Work out the schedule.

        Raises:
            DataError: the data set is smaller than one step.
        """
        prompts, objective = config.rollout.prompts_per_step, config.resolved_objective
        if num_prompts < prompts:
            raise DataError(
                f"the training data has {num_prompts} prompts, fewer than one step uses: "
                f"set rollout.prompts_per_step (now {prompts}) to {num_prompts} or less"
            )
        steps = config.run.max_steps or math.ceil(num_prompts * config.run.num_epochs / prompts)
        return cls(
            steps=steps,
            prompts_per_step=prompts,
            num_generations=config.rollout.num_generations,
            num_iterations=config.objective.num_iterations,
            minibatches=config.objective.minibatches,
            updates_per_rollout=config.objective.updates_per_rollout,
            num_prompts=num_prompts,
            needs_old_logps=config.objective.updates_per_rollout > 1 or objective.needs_old_logps,
            needs_ref_logps=objective.beta != 0 and objective.kl.estimator == "sampled",
            objective=objective,
        )

    @property
    def updates(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps * self.updates_per_rollout

    def describe(self) -> str:
        """The schedule in words."""
        per_rollout = self.prompts_per_step * self.num_generations
        epochs = self.steps * self.prompts_per_step / self.num_prompts
        unmoved = ": every ratio is 1" if self.objective.ratio_anchor == "old" else ""
        uses = "the KL needs it" if self.objective.needs_old_logps else f"{self.updates_per_rollout} updates use it"
        old = (
            f"one no-grad pass per rollout ({uses})"
            if self.needs_old_logps
            else "not computed: one update per rollout, the old policy is the current one by identity" + unmoved
        )
        if self.objective.beta == 0:
            ref = "not computed: beta is 0, no reference model"
        else:
            ref = "one no-grad pass per rollout" if self.needs_ref_logps else "over the vocabulary, in every update"
        return "\n".join(
            [
                f"schedule: {self.prompts_per_step} prompts x {self.num_generations} = {per_rollout} completions per "
                f"rollout, {_count(self.updates_per_rollout, 'update')} each",
                f"  ({_count(self.num_iterations, 'iteration')} x {_count(self.minibatches, 'minibatch', 'es')}); "
                f"{_count(self.steps, 'rollout')} = {_count(self.updates, 'update')}, "
                f"{epochs:.3g} epochs of {self.num_prompts:,} prompts",
                f"  old log-probs: {old}",
                f"  ref log-probs: {ref}",
            ]
        )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
