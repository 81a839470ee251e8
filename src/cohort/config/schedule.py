"""The schedule of a run: how many steps it has and what each one computes. Decided and printed before the run
starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from cohort.config.schema import GRPOConfig
from cohort.errors import DataError
from cohort.presets import Objective
from cohort.presets.parts import DynamicSampling


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the settings and the number of training prompts determine."""

    steps: int
    """Rollouts."""
    prompts_per_step: int
    num_generations: int
    num_iterations: int
    minibatches: int
    updates_per_rollout: int
    """Optimizer steps per rollout."""
    num_prompts: int | None
    """Prompts of an epoch. None: the data is streamed."""
    last_prompts: int
    """Prompts of the last step, which uses what remains of the epochs."""
    total: int | None
    """Prompts of the whole run. None: ``run.max_steps`` ends it."""
    needs_old_logps: bool
    """Whether the log-probs of the policy that sampled are computed before the first update: several updates use a
    rollout, or the objective needs them (a KL in the reward or the advantage)."""
    needs_ref_logps: bool
    """Whether the reference's log-probs are computed before the first update: beta is not 0, and the KL is estimated
    from sampled tokens."""
    objective: Objective
    """The objective, with the numbers that the settings leave open."""

    @classmethod
    def of(cls, config: GRPOConfig, num_prompts: int | None) -> Schedule:
        """The schedule of a run.

        Args:
            config: the settings.
            num_prompts: prompts of an epoch; None for streamed data.

        Raises:
            DataError: the data set is smaller than one step, or the data is streamed without ``run.max_steps``.
        """
        prompts, objective = config.rollout.prompts_per_step, config.resolved_objective
        if num_prompts is None and config.run.max_steps is None:
            raise DataError("the training data is streamed, so its length is unknown: set run.max_steps")
        if num_prompts is not None and num_prompts < prompts:
            raise DataError(
                f"the training data has {num_prompts} prompts, fewer than one step uses: "
                f"set rollout.prompts_per_step (now {prompts}) to {num_prompts} or less"
            )
        total = None if num_prompts is None or config.run.max_steps else num_prompts * config.run.num_epochs
        steps = config.run.max_steps or math.ceil((total or 0) / prompts)
        return cls(
            steps=steps,
            prompts_per_step=prompts,
            num_generations=config.rollout.num_generations,
            num_iterations=config.objective.num_iterations,
            minibatches=config.objective.minibatches,
            updates_per_rollout=config.objective.updates_per_rollout,
            num_prompts=num_prompts,
            last_prompts=prompts if total is None else total - (steps - 1) * prompts,
            total=total,
            needs_old_logps=config.objective.updates_per_rollout > 1 or objective.needs_old_logps,
            needs_ref_logps=objective.beta != 0 and objective.kl.estimator == "sampled",
            objective=objective,
        )

    def prompts_of(self, step: int) -> int:
        """Number of prompts of a step. Steps count from 0."""
        return self.last_prompts if step == self.steps - 1 else self.prompts_per_step

    def resumed(self, step: int, consumed: int) -> Schedule:
        """The schedule of a run that continues after ``step`` steps, which consumed ``consumed`` prompts.

        It differs from this one if ``run.num_epochs`` was raised after a last step with fewer prompts.
        """
        full_steps = consumed == step * self.prompts_per_step
        if self.total is None or full_steps or isinstance(self.objective.group_filter, DynamicSampling):
            return self
        left = self.total - consumed
        steps = step + math.ceil(left / self.prompts_per_step)
        return replace(self, steps=steps, last_prompts=left - (steps - step - 1) * self.prompts_per_step)

    @property
    def updates(self) -> int:
        """Maximum number of optimizer steps of the run: a rollout with fewer groups than minibatches has fewer."""
        of_last = self.num_iterations * min(self.minibatches, self.last_prompts)
        return (self.steps - 1) * self.updates_per_rollout + of_last

    def describe(self) -> str:
        """The schedule in words."""
        per_rollout = self.prompts_per_step * self.num_generations
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
        return (
            f"schedule: {self.prompts_per_step} prompts x {self.num_generations} = {per_rollout} completions per "
            f"rollout, {_count(self.updates_per_rollout, 'update')} each "
            f"({_count(self.num_iterations, 'iteration')} x {_count(self.minibatches, 'minibatch', 'es')})\n"
            f"  {self._length()}\n  old log-probs: {old}\n  ref log-probs: {ref}"
        )

    def _length(self) -> str:
        """The length of the run in words."""
        run = f"{_count(self.steps, 'rollout')} = {_count(self.updates, 'update')}"
        if self.num_prompts is None:
            return f"{run}, on streamed prompts"
        rollouts = f"{self.num_prompts / self.prompts_per_step:,.2f}".rstrip("0").rstrip(".")
        per_epoch = f"{rollouts} rollouts per epoch on {self.num_prompts:,} prompts"
        if self.total is None:
            return f"{per_epoch}; {run}, {self.steps * self.prompts_per_step / self.num_prompts:.3g} epochs"
        short = self.last_prompts < self.prompts_per_step
        last = f", the last of {_count(self.last_prompts, 'prompt')}" if short else ""
        return f"{per_epoch}; {_count(self.total // self.num_prompts, 'epoch')} = {run}{last}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"
