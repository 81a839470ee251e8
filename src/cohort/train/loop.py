"""GRPO: the loop. Read this file first.

One step samples a group of completions for each prompt, scores them, turns the scores into group-relative advantages,
and updates the policy with a clipped importance ratio and a KL term against a reference. Four policies take part:

    current    ``logps``          the weights being trained, with their graph; computed inside ``update``
    old        ``old_logps``      the weights that sampled, as the trainer computes them; when updates need it
    sampler    ``sampler_logps``  the distribution that the engine drew from, recorded while it drew
    reference  ``ref_logps``      the fixed (or slowly moved) policy of the KL term; when beta is not 0

To follow one rollout, read train/rollout.py, train/layout.py and train/update.py next, in this order.
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
from cohort.evaluation import Best, Evaluator
from cohort.objective import Objective
from cohort.parallel import Layout, Replicate, World, on_main, together
from cohort.policy import Policy
from cohort.presets.parts import DynamicSampling
from cohort.rewards import RewardRunner, TrainerState
from cohort.rollout import Engine, RNGKey, Sampler, Sampling, Watch
from cohort.runs import Models, RunFolder, SavedState, check_saved, random_state
from cohort.train.adapt import Adaptive
from cohort.train.check import check_sampler_gap
from cohort.train.context import StepContext
from cohort.train.guard import NonFiniteLog
from cohort.train.layout import Part, active_part, assign_advantages, lay_out, part_of, split_minibatches
from cohort.train.logps import policy_logps
from cohort.train.memory import OutOfMemory, TokenBudget
from cohort.train.metrics import policy_movement, rank_metrics, step_metrics
from cohort.train.optim import Optimizer
from cohort.train.rollout import Rollout
from cohort.train.term_norms import term_norms
from cohort.train.update import NonFinite, UpdateResult, update
from cohort.types import TokenBatch


@dataclass(slots=True)
class TrainerParts:
    """What a run is made of. ``GRPOTrainer`` puts it together; the loop uses it."""

    policy: Policy
    reference: Policy | None
    engine: Engine
    sampler: Sampler
    """The engine or, with tools or environments, what drives it through episodes."""
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
    """Facts that are not settings and must be the same in a resumed run: a hash of the prompts, names of rewards."""
    layout: Layout = field(default_factory=Replicate)
    """The ranks, and how they hold the policy."""
    cursor: DataCursor = field(default_factory=DataCursor)
    """Position in the data after the last complete step. The loop advances it once per step."""

    @property
    def world(self) -> World:
        """The ranks that train together."""
        return self.layout.world

    @property
    def models(self) -> Models:
        """The models, as checkpoints store them."""
        return Models(self.policy, self.reference, self.tokenizer)

    def saved_state(self, step: int) -> SavedState:
        """Everything that a checkpoint stores besides the models. Every rank must call."""
        return SavedState(
            step,
            self.optimizer.state_dict(),
            self.cursor.state_dict(),
            self.adaptive.state_dict(),
            self.best.state_dict(),
            self.identity,
            self.world.gather(random_state()),
        )

    def restore(self, state: SavedState, best_record: dict[str, Any] | None) -> None:
        """The inverse of ``saved_state``; ``best_record`` is the contents of the run's ``best/best.json``."""
        self.optimizer.load_state_dict(state.optimizer)
        self.cursor = DataCursor.from_state(state.cursor)
        self.adaptive.load_state_dict(state.adaptive)
        self.best.load_state_dict(state.best, best_record)


def run(
    parts: TrainerParts, schedule: Schedule, config: GRPOConfig, folder: RunFolder, *, first_step: int = 0
) -> Iterator[dict[str, Any]]:
    """Train from ``first_step`` on. Yields each step's metrics after they, the completions and any due checkpoint are
    written."""
    policy, reference, adaptive = parts.policy, parts.reference, parts.adaptive
    sampling = Sampling.of(config.rollout)
    nonfinite = NonFiniteLog(folder.path, config.optim.max_nonfinite_updates, parts.world)

    for step in range(first_step, schedule.steps):
        objective = adaptive.applied_to(parts.objective)
        context = StepContext(policy, parts.optimizer, objective, sampling, parts.budget, reference, parts.layout)
        clock = context.clock

        # Sample a group of completions for each prompt with the policy's present weights, and score them.
        parts.engine.update_weights(policy.version)
        rollout = sample(parts, context, schedule, config, step)
        if step == first_step:
            checked = lay_out(rollout.usable_groups, policy.device, context.repetition_penalty)
            check_sampler_gap(context, checked, shared_weights=parts.engine.capabilities.shared_weights)

        # Lay out the tokens once, with all that the updates share: advantages, old and reference log-probs.
        batch = lay_out(rollout.used_groups, policy.device, context.repetition_penalty)
        with clock("logps"):
            batch = with_advantages_and_logps(context, batch, rollout, schedule)
        minibatches = split_minibatches(batch, config.objective.minibatches)

        # Measure the norm of each term's gradient, when the settings ask for it. The weights do not change.
        norms = {}
        if minibatches and due(step + 1, config.report.term_norms_steps):
            with clock("measure"):
                norms = term_norms(context, batch, minibatches[0], adaptive.applied_entropy_coefficient(objective))

        # Update: minibatches change the result, microbatches (inside ``update``) do not.
        version_before = policy.version
        results: list[UpdateResult] = []
        num_nonfinite = 0
        with clock("update"):
            for minibatch in minibatches * config.objective.num_iterations:
                entropy_coefficient = adaptive.applied_entropy_coefficient(objective)
                while isinstance(outcome := update(context, batch, minibatch, entropy_coefficient), OutOfMemory):
                    context.budget.halve()  # and repeat: smaller passes give the same gradient
                if isinstance(outcome, NonFinite):
                    num_nonfinite += 1
                    nonfinite.skipped(outcome.message, batch, minibatch, step + 1)
                    continue
                nonfinite.passed()
                results.append(outcome)
                adaptive.after_update(objective, outcome)
        adaptive.after_step(objective, results, batch.num_sequences)

        # The reference is fixed, or moved toward the policy every ``ref_model_sync_steps`` updates.
        if reference and config.objective.sync_ref_model:
            every = config.objective.ref_model_sync_steps
            if policy.version // every > version_before // every:
                reference.move_toward(policy, config.objective.ref_model_mixup_alpha)

        with clock("measure"):
            moved = policy_movement(context, batch, results, config.report.update_kl_completions)
        metrics = {"step": step + 1, "time": time.time(), "updates_nonfinite": num_nonfinite}
        metrics |= clock.metrics(rollout.num_tokens) | parts.sampler.metrics() | moved | norms
        metrics |= step_metrics(rollout, batch, results, objective, version_before)
        metrics |= rank_metrics(context.world, results, metrics["seconds/step"])
        yield finish_step(parts, schedule, config, folder, rollout, batch, metrics)
        if parts.best.exhausted:  # early stopping; the checkpoint is written
            break


def sample(parts: TrainerParts, context: StepContext, schedule: Schedule, config: GRPOConfig, step: int) -> Rollout:
    """Sample and score a step's groups: each rank its share of the prompts, and all get all groups and scores.

    The engine computes each prompt once for its group. Async reward functions and those in workers start as soon as a
    completion ends. With dynamic sampling, new prompts replace groups whose rewards are all equal, for at most
    ``max_rounds`` rounds; otherwise there is one round.
    """
    rollout: Rollout | None = None
    target = schedule.prompts_of(step)
    state = trainer_state(schedule, step, parts.cursor)
    while rollout is None or another_round(rollout, target, context.objective):
        used, sampled = (sum(rollout.is_used_P), len(rollout.sampled)) if rollout else (0, 0)
        prompts = together(parts.world, partial(parts.prompts.fetch, parts.cursor, target - used, skip=sampled))
        with parts.rewards.begin(prompts, config.rollout.num_generations, state) as scoring:
            with context.clock("generate"):
                groups = parts.sampler.generate(
                    prompts,
                    config.rollout.num_generations,
                    context.sampling,
                    RNGKey(config.run.seed, step),  # and draws depend on the prompt's uid
                    Watch(on_completion=scoring.on_completion, on_prompt=scoring.on_prompt),
                )
            with context.clock("reward"):
                scored = Rollout.of(groups, scoring.finish(groups), context.objective)
        rollout = scored if rollout is None else rollout + scored
    rollout.check_drawn()
    return rollout


def with_advantages_and_logps(
    context: StepContext, batch: TokenBatch, rollout: Rollout, schedule: Schedule
) -> TokenBatch:
    """The batch with advantages, and with old and reference log-probs if the updates need them.

    With a single update the old policy is the current one: the ratio is 1 by identity and no pass is spent on it.
    Sequences that teach nothing get no pass either, unless a KL inside the reward makes all advantages depend on it.
    """
    objective, limit = context.objective, context.sampling.max_completion_length
    logps_first = objective.needs_old_logps
    part = part_of(batch, range(batch.num_sequences))
    if not logps_first:
        batch = assign_advantages(batch, rollout.used_scores, objective, limit)
        part = active_part(batch, part, objective, context.policy.router_aux_loss_coef)
    batch = replace(
        batch,
        old_logps_N=logps_of(context, context.policy, batch, part) if schedule.needs_old_logps else None,
        ref_logps_N=logps_of(context, context.reference, batch, part) if schedule.needs_ref_logps else None,
    )
    return assign_advantages(batch, rollout.used_scores, objective, limit) if logps_first else batch


def logps_of(context: StepContext, policy: Policy | None, batch: TokenBatch, part: Part) -> Tensor | None:
    """``policy_logps``, repeated with smaller passes when memory runs out; None without a policy."""
    if policy is None:
        return None
    while isinstance(logps_N := policy_logps(context, policy, batch, part), OutOfMemory):
        context.budget.halve()
    return logps_N


def another_round(rollout: Rollout, target: int, objective: Objective) -> bool:
    """Whether dynamic sampling wants another round."""
    rule = objective.group_filter
    return isinstance(rule, DynamicSampling) and sum(rollout.is_used_P) < target and rollout.rounds < rule.max_rounds


def trainer_state(schedule: Schedule, step: int, cursor: DataCursor) -> TrainerState:
    """The progress of the run, for reward functions."""
    epoch = cursor.position / schedule.num_prompts if schedule.num_prompts else math.nan
    return TrainerState(step, schedule.steps, epoch)


def finish_step(
    parts: TrainerParts,
    schedule: Schedule,
    config: GRPOConfig,
    folder: RunFolder,
    rollout: Rollout,
    batch: TokenBatch,
    metrics: dict[str, Any],
) -> dict[str, Any]:
    """Advance the cursor, evaluate if it is due, and write metrics, completions and checkpoint.

    Returns the metrics with those of the evaluation.

    Raises:
        CohortError: the evaluation failed. Everything else is written first, with a checkpoint.
    """
    step = metrics["step"]
    last = step == schedule.steps
    parts.cursor, data_metrics = parts.prompts.advance(parts.cursor, len(rollout.sampled), rollout.mean_rewards)
    metrics |= data_metrics
    failed: CohortError | None = None
    if last or due(step, config.eval.eval_steps):
        try:
            metrics |= evaluate_step(parts, trainer_state(schedule, step, parts.cursor), config, folder)
        except CohortError as error:  # a failed evaluation must not cost the run its progress
            failed = error
        last |= parts.best.exhausted or failed is not None

    def write() -> None:
        folder.append_metrics(metrics)
        if config.report.log_completions:
            folder.write_rollout(step, rollout.sampled, rollout.sampled_scores, rollout.advantages(batch))

    on_main(parts.world, write)
    if last or due(step, config.run.save_steps):
        folder.save_checkpoint(parts.models, parts.saved_state(step), parts.world)
        if last and config.report.check_saved:
            together(parts.world, partial(check_saved, parts.policy, folder.checkpoint(step)))
    if failed is not None:
        raise failed
    return metrics


def evaluate_step(parts: TrainerParts, state: TrainerState, config: GRPOConfig, folder: RunFolder) -> dict[str, Any]:
    """Evaluate after ``state.global_step`` steps; write the completions, and the model if it is the best so far.

    Returns the metrics, which are empty without evaluation data. The training is not affected.
    """
    if parts.evaluator is None:
        return {}
    parts.engine.update_weights(parts.policy.version)
    evaluations, step = parts.evaluator.evaluate(parts.sampler, state), state.global_step
    metrics: dict[str, Any] = {}
    for name, evaluation in evaluations.items():
        metrics |= evaluation.metrics(name)
        if config.report.log_completions:
            on_main(parts.world, partial(folder.write_evaluation, step, name, evaluation.table))
    if parts.best.update(step, metrics):
        folder.save_best(parts.models, parts.best.record(), parts.world)
        if config.report.check_saved:
            together(parts.world, partial(check_saved, parts.policy, folder.best))
    return metrics


def due(step: int, every: int) -> bool:
    """Whether something that happens every ``every`` steps (0: never) happens after this one, counted from 1."""
    return every > 0 and step % every == 0
