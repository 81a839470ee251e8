"""GRPO: the loop. Read this file first.

One step samples a group of completions for each prompt, scores them, turns the scores into group-relative advantages,
and updates the policy with a clipped importance ratio and a KL term against a reference. Four policies take part:

    current    ``logps``          the weights being trained, with their graph; computed inside ``update``
    old        ``old_logps``      the weights that sampled, as the trainer computes them; only for several updates
    sampler    ``sampler_logps``  what the engine really drew from, recorded while it drew
    reference  ``ref_logps``      the fixed (or slowly moved) policy of the KL term; only when beta is not 0
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from cohort.config import GRPOConfig, Schedule
from cohort.data import DataCursor, PromptLoader
from cohort.errors import CohortError
from cohort.objective import Objective
from cohort.policy import Policy
from cohort.presets.parts import DynamicSampling
from cohort.rewards import RewardRunner, TrainerState
from cohort.rollout import Engine, RNGKey, Sampling, Watch
from cohort.train.adapt import Adaptive
from cohort.train.batch import assemble, assign_advantages, split_minibatches
from cohort.train.best import Best
from cohort.train.check import check_sampler_gap
from cohort.train.evaluate import Evaluator
from cohort.train.folder import RunFolder, RunState
from cohort.train.guard import Guard
from cohort.train.memory import TokenBudget
from cohort.train.metrics import PhaseClock, policy_movement, step_metrics
from cohort.train.optim import Optimizer
from cohort.train.packing import policy_logps, working_sequences
from cohort.train.rollout import Rollout
from cohort.train.saved import check_saved
from cohort.train.update import UpdateResult, term_norms, update
from cohort.types import TokenBatch


@dataclass(slots=True)
class Parts:
    """What a run is made of. Put together by ``GRPOTrainer``; the loop only uses them."""

    policy: Policy
    reference: Policy | None
    engine: Engine
    rewards: RewardRunner
    prompts: PromptLoader
    objective: Objective
    optimizer: Optimizer
    evaluator: Evaluator | None
    tokenizer: Any
    budget: TokenBudget
    """Tokens of one pass of the update."""
    adaptive: Adaptive
    """Weights of the objective that follow a target."""
    best: Best
    """The best evaluation so far."""
    identity: dict[str, str]
    """What else makes this run what it is: a hash of its prompts, its rewards' names. A resumed run has the same."""
    cursor: DataCursor = field(default_factory=DataCursor)
    """Position in the data after the last complete step. The loop advances it once per step."""

    def state(self, step: int) -> RunState:
        """What a checkpoint holds."""
        return RunState(
            step,
            self.policy,
            self.reference,
            self.optimizer,
            self.adaptive,
            self.best,
            self.cursor,
            self.tokenizer,
            self.identity,
        )


def run(
    parts: Parts, schedule: Schedule, config: GRPOConfig, folder: RunFolder, *, first_step: int = 0
) -> Iterator[dict[str, Any]]:
    """Train from ``first_step`` on; yield each step's metrics after they, and what else is due, are on disk."""
    policy, reference, optimizer, adaptive = parts.policy, parts.reference, parts.optimizer, parts.adaptive
    budget, guard = parts.budget, Guard(folder.path, config.optim.max_nonfinite_updates)
    sampling, penalty, temperature = (
        Sampling.of(config.rollout),
        config.rollout.replayed_penalty,
        config.rollout.temperature,
    )

    for step in range(first_step, schedule.steps):
        clock = PhaseClock()
        objective = adaptive.applied_to(parts.objective)

        # Sample: every prompt of the step is computed once for its group of completions. Score, so that each completion
        # can be compared with the others of its group. With dynamic sampling, new prompts take the places of groups
        # that teach nothing, for a number of rounds; otherwise there is one round.
        rollout: Rollout | None = None
        num_prompts = 0
        state = trainer_state(schedule, step, parts.cursor)
        while rollout is None or missing(rollout, schedule.prompts_of(step), objective):
            wanted = schedule.prompts_of(step) - (sum(rollout.used_R) if rollout else 0)
            prompts = parts.prompts.fetch(parts.cursor, wanted, skip=num_prompts)
            num_prompts += wanted
            with parts.rewards.begin(prompts, schedule.num_generations, state) as scoring:
                with clock("generate"):  # async rewards and those in workers begin as completions end
                    groups = parts.engine.generate(
                        prompts,
                        schedule.num_generations,
                        sampling,
                        RNGKey(config.run.seed, step),
                        Watch(on_completion=scoring.on_completion),
                    )
                with clock("reward"):
                    scored = Rollout.of(groups, scoring.finish(groups), objective)
            rollout = scored if rollout is None else rollout + scored
        rollout.check_drawn()
        if step == first_step:
            check_sampler_gap(policy, assemble(rollout.usable, policy.device, penalty), temperature, budget.tokens)

        # What the updates hold on to, computed once per rollout and only when they need it.
        batch = assemble(rollout.groups, policy.device, penalty)
        with clock("logps"):
            batch = with_advantages_and_logps(parts, batch, rollout, schedule, objective, sampling)

        # The gradient's size term by term, when the settings ask for it. Changes nothing.
        norms = {}
        if batch.num_sequences and due(step + 1, config.report.term_norms_steps):
            with clock("measure"):
                minibatch, bonus = split_minibatches(batch, schedule.minibatches)[0], adaptive.entropy_weight(objective)
                norms = term_norms(policy, minibatch, objective, temperature, budget.tokens, reference, bonus)

        # Update: minibatches change the result, microbatches (inside ``update``) do not.
        version_before = policy.version
        results: list[UpdateResult] = []
        with clock("update"):
            for _iteration in range(schedule.num_iterations):
                for minibatch in split_minibatches(batch, schedule.minibatches):
                    call = partial(
                        update,
                        policy,
                        optimizer,
                        minibatch,
                        objective,
                        temperature,
                        reference=reference,
                        entropy_coefficient=adaptive.entropy_weight(objective),
                    )
                    with guard(minibatch, step + 1):  # where a number is not finite, no update is made
                        result = budget.run(call)
                        results.append(result)
                        adaptive.after_update(objective, result)
        adaptive.after_step(objective, results, batch.num_sequences)

        # The reference stands still, or follows the policy at a distance.
        if reference and config.objective.sync_ref_model:
            every = config.objective.ref_model_sync_steps
            if policy.version // every > version_before // every:
                reference.move_toward(policy, config.objective.ref_model_mixup_alpha)

        with clock("measure"):
            moved = policy_movement(
                policy, batch, results, temperature, budget.tokens, config.report.update_kl_completions
            )
        metrics = (
            {"step": step + 1, "time": time.time(), "updates_nonfinite": guard.take_count()}
            | clock.metrics(rollout.num_tokens)
            | moved
            | norms
        )
        metrics |= step_metrics(rollout, batch, results, objective, version_before)
        yield finish_step(parts, schedule, config, folder, rollout, batch, metrics, num_prompts)
        if parts.best.exhausted:  # no evaluation has been better for long enough; the checkpoint is written
            break


def with_advantages_and_logps(
    parts: Parts, batch: TokenBatch, rollout: Rollout, schedule: Schedule, objective: Objective, sampling: Sampling
) -> TokenBatch:
    """A rollout's batch with each token's advantage, and with old and reference log-probs where updates need them.

    With a single update the old policy is the current one: the ratio to it is 1 by identity and no pass is spent on it.
    Completions that teach nothing get no pass either, unless a KL inside the reward makes all advantages depend on it.
    """
    limit, logps_first = sampling.max_completion_length, objective.needs_old_logps
    wanted = None
    if not logps_first:
        batch = assign_advantages(batch, rollout.scores, objective, limit)
        wanted = working_sequences(batch, objective, parts.policy.router_aux_loss_coef)

    def logps(policy: Policy) -> Tensor:
        return parts.budget.run(partial(policy_logps, policy, batch, sampling.temperature, sequences=wanted))

    batch = replace(
        batch,
        old_logps_N=logps(parts.policy) if schedule.needs_old_logps else None,
        ref_logps_N=logps(parts.reference) if parts.reference and schedule.needs_ref_logps else None,
    )
    return assign_advantages(batch, rollout.scores, objective, limit) if logps_first else batch


def missing(rollout: Rollout, wanted: int, objective: Objective) -> bool:
    """Whether another round of dynamic sampling is due."""
    rule = objective.group_filter
    return isinstance(rule, DynamicSampling) and sum(rollout.used_R) < wanted and rollout.rounds < rule.max_rounds


def trainer_state(schedule: Schedule, step: int, cursor: DataCursor) -> TrainerState:
    """What reward functions are told of the run."""
    epoch = cursor.position / schedule.num_prompts if schedule.num_prompts else math.nan
    return TrainerState(step, schedule.steps, epoch)


def finish_step(
    parts: Parts,
    schedule: Schedule,
    config: GRPOConfig,
    folder: RunFolder,
    rollout: Rollout,
    batch: TokenBatch,
    metrics: dict[str, Any],
    num_prompts: int,
) -> dict[str, Any]:
    """Evaluate if it is due, and write what there is to write. Returns the metrics, the evaluation's among them.

    Raises:
        CohortError: of the evaluation, once all else is written, with a checkpoint.
    """
    step = metrics["step"]
    last = step == schedule.steps
    parts.cursor, data_metrics = parts.prompts.advance(parts.cursor, num_prompts, rollout.mean_rewards)
    metrics |= data_metrics
    failed: CohortError | None = None
    if last or due(step, config.eval.eval_steps):
        try:
            metrics |= evaluate_step(parts, trainer_state(schedule, step, parts.cursor), config, folder)
        except CohortError as error:  # what was trained is not lost with what it was to be measured by
            failed = error
        last |= parts.best.exhausted or failed is not None
    folder.append_metrics(metrics)
    if config.report.log_completions:
        folder.write_rollout(step, rollout, batch)
    if last or due(step, config.run.save_steps):
        folder.save_checkpoint(parts.state(step))
        if last and config.report.check_saved:
            check_saved(parts.policy, folder.checkpoint(step))
    if failed is not None:
        raise failed
    return metrics


def evaluate_step(parts: Parts, state: TrainerState, config: GRPOConfig, folder: RunFolder) -> dict[str, Any]:
    """Evaluate after ``state.global_step`` steps; write the completions, and the model if it is the best so far.
    Returns the metrics: none without evaluation data. Nothing of it changes the training."""
    if parts.evaluator is None:
        return {}
    evaluations, step = parts.evaluator.evaluate(parts.engine, state), state.global_step
    metrics: dict[str, Any] = {}
    for name, evaluation in evaluations.items():
        metrics |= evaluation.metrics(name)
        if config.report.log_completions:
            folder.write_evaluation(step, name, evaluation)
    if parts.best.takes(step, metrics):
        folder.save_best(parts.state(step))
        if config.report.check_saved:
            check_saved(parts.policy, folder.best)
    return metrics


def due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens after this one, counted from 1."""
    return every > 0 and step % every == 0
