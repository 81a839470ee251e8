"""GRPO: the loop. Read this file first.

One step samples a group of completions for each prompt, scores them, turns the scores into group-relative advantages,
and updates the policy with a clipped importance ratio and a KL term against a reference. Four policies take part:

    current    ``logps``          the weights being trained, with their graph; computed inside ``update``
    old        ``old_logps``      the weights before the step's updates, computed by the trainer when needed
    sampler    ``sampler_logps``  the distribution that the engine drew from, recorded while it drew
    reference  ``ref_logps``      the fixed (or slowly moved) policy of the KL term; when beta is not 0

With several ranks, each runs all of this file and holds the whole rollout. Most calls below exchange results, so every
rank must make all of them; an error on one rank is raised on all.

A run stops between two steps (``boundary``). It has one ``State``, which a checkpoint holds: each stage returns the
next one. What does not change is in ``TrainerParts``.

To follow one rollout, read train/source.py, train/layout.py and train/update.py next, in this order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cohort.config import Schedule
from cohort.parallel import on_main, together
from cohort.rollout import Engine
from cohort.runs.models import check_saved
from cohort.train.boundary import Training
from cohort.train.context import PhaseClock, StepContext
from cohort.train.guard import NonFiniteLog
from cohort.train.layout import Rollout, active_part, assign_advantages, lay_out, part_of, split_minibatches
from cohort.train.memory import memory_metrics
from cohort.train.metrics import EACH_UPDATE, each_update, policy_movement, rank_metrics, step_metrics, term_norms
from cohort.train.observers import CompleteStep
from cohort.train.parts import TrainerParts
from cohort.train.ranks import update_engine
from cohort.train.source import trainer_state
from cohort.train.state import State
from cohort.train.store import TrainedStep, store_step
from cohort.train.sweep import CHECKED_COMPLETIONS, check_gap, like_trainer, policy_logps
from cohort.train.update import Check, NonFinite, Updates, update
from cohort.types import TokenBatch


def run(training: Training) -> Iterator[CompleteStep]:
    """Train from the boundary's state to the end of the schedule."""
    parts, schedule, folder = training.parts, training.schedule, training.folder
    policy, config = parts.policy, parts.config
    nonfinite = NonFiniteLog(folder.path / "nonfinite", config.optim.max_nonfinite_updates, parts.world)
    first_step = training.state.complete_steps
    if training.state.metrics is not None:  # the run was stopped while it evaluated this step
        yield finish(training)

    while (state := training.state).complete_steps < schedule.steps and not state.best.exhausted:
        training.begin_step()
        step, objective = state.complete_steps + 1, state.adaptive.applied_to(parts.objective)
        clock = PhaseClock()
        context = replace(parts, objective=objective, clock=clock)

        # Sample a group of completions for each prompt, and score them. With ``rollout.lag``, that was begun some steps
        # ago, and the rollouts of later steps are sampled during the updates below.
        drawn = training.source.next(state, clock)
        rollout = drawn.rollout

        if parts.engine.sleeps:  # free its memory on this GPU for the update
            parts.engine.sleep()

        # Lay out the tokens once, with all that the updates share: advantages, old and reference log-probs.
        batch = lay_out(rollout.used_groups, policy.device, context.repetition_penalty)
        with clock("logps"):
            batch = with_advantages_and_logps(context, batch, rollout, schedule)
        is_first = step - 1 == first_step == drawn.weights_step
        check = gap_check(context, parts.engine, batch) if is_first else None
        parts.observers.tell("rollout_scored", step, rollout, batch)
        minibatches = split_minibatches(batch, objective.minibatches)

        # Measure the norm of each term's gradient, when the settings ask for it. The weights do not change.
        norms: dict[str, Any] = {}
        if minibatches and due(step, config.report.term_norms_steps):
            with clock("measure"):
                coefficient = state.adaptive.applied_entropy_coefficient(objective)
                norms = context.within_memory(term_norms, batch, minibatches[0], coefficient)

        # Update: minibatches change the result, microbatches (inside ``update``) do not.
        updates = Updates.none(batch, policy.version)
        with clock("update"):
            for minibatch in minibatches * config.objective.num_iterations:
                training.stop_point()  # only before the step's first optimizer step
                coefficient = state.adaptive.applied_entropy_coefficient(objective)
                outcome = context.within_memory(update, batch, minibatch, coefficient, check)
                updates.add(outcome)
                state = state.after_update(objective, outcome)
                if isinstance(outcome, NonFinite):
                    nonfinite.skipped(outcome.message, batch, minibatch, step, state.nonfinite_in_a_row)
        parts.optimizer.zero_grad()  # free their memory for the next rollout's keys and values

        with clock("measure"):
            moved = context.within_memory(policy_movement, batch, updates.results, config.report.update_kl_completions)
        done = TrainedStep(step, context, rollout, batch, updates)
        metrics = metrics_of(done, drawn.metrics | moved | norms)
        move_reference(parts, updates.version_before)

        adaptive = state.adaptive.after_step(objective, updates.results, batch.num_sequences)
        state = replace(state, complete_steps=step, version=policy.version, cursor=drawn.cursor, adaptive=adaptive)
        training.reached(replace(state, metrics=metrics))
        store_step(folder, config, done)
        yield finish(training)


def metrics_of(done: TrainedStep, measured: Mapping[str, Any]) -> dict[str, Any]:
    """All metrics of a step, with those that were ``measured`` already. ``docs/metrics.md`` gives their formulas."""
    context, rollout, batch, updates = done.context, done.rollout, done.batch, done.updates
    nonfinite = updates.outcomes.count(None)
    metrics: dict[str, Any] = {"step": done.step, "time": time.time(), "updates_nonfinite": nonfinite}
    metrics |= {**context.clock.metrics(rollout.num_tokens), **measured}
    metrics |= step_metrics(rollout, batch, updates.results, context.objective, updates.version_before)
    metrics |= rank_metrics(context.world, updates.results, metrics["seconds/step"])
    metrics |= memory_metrics(context.policy.device)
    return metrics | {EACH_UPDATE: each_update(updates, context.objective)}


def with_advantages_and_logps(
    context: StepContext, batch: TokenBatch, rollout: Rollout, schedule: Schedule
) -> TokenBatch:
    """The batch with advantages, and with old and reference log-probs if the updates need them.

    With a single update the old policy is the current one: the ratio is 1 by identity and no pass is spent on it.
    Sequences that teach nothing get no pass either, unless a KL inside the reward makes all advantages depend on it.
    """
    objective, limit = context.objective, context.sampling.max_completion_length
    logps_first = objective.advantages_need_logps
    part = part_of(batch, range(batch.num_sequences))
    if not logps_first:
        batch = assign_advantages(batch, rollout.used_scores, objective, limit)
        part = active_part(batch, part, objective, context.policy.router_aux_loss_coef)
    old_logps_N = ref_logps_N = None
    if schedule.needs_old_logps:
        old_logps_N = context.within_memory(policy_logps, context.policy, batch, part)
    if schedule.needs_ref_logps and context.reference is not None:
        ref_logps_N = context.within_memory(policy_logps, context.reference, batch, part)
    batch = replace(batch, old_logps_N=old_logps_N, ref_logps_N=ref_logps_N)
    return assign_advantages(batch, rollout.used_scores, objective, limit) if logps_first else batch


def gap_check(context: StepContext, engine: Engine, batch: TokenBatch) -> Check:
    """Check that the sampler computes what the trainer computes with the same weights. Checks now if the
    trainer's log-probs are known, or dropout changes those of an update; otherwise returns the check for ``update``.

    Raises:
        PolicyMismatchError: it does not. Nothing has been updated yet.
    """
    policy = context.policy
    check = partial(check_gap, policy, shared_weights=engine.capabilities.shared_weights)
    logps_N = batch.old_logps_N
    if policy.dropout:
        few = part_of(batch, range(min(CHECKED_COMPLETIONS, batch.num_sequences)))
        logps_N = context.within_memory(policy_logps, policy, batch, few)
    if logps_N is None:
        return lambda tokens: check(tokens.logps_N, like_trainer(tokens))
    check(logps_N, like_trainer(batch))
    return None


def move_reference(parts: TrainerParts, version_before: int) -> None:
    """The reference is fixed, or moved toward the policy every ``ref_model_sync_steps`` updates."""
    objective, version = parts.config.objective, parts.policy.version
    every = objective.ref_model_sync_steps
    if parts.reference and objective.sync_ref_model and version // every > version_before // every:
        parts.reference.move_toward(parts.policy, objective.ref_model_mixup_alpha)


def finish(training: Training) -> CompleteStep:
    """End the step whose updates are made: evaluate if it is due, write metrics and checkpoint.

    The state has the step's metrics until they are written. So a checkpoint that is written because the evaluation
    failed, or was cancelled, lets the resumed run evaluate again.
    """
    parts, folder, state = training.parts, training.folder, training.state
    config, observers = parts.config, parts.observers
    step, metrics = state.complete_steps, dict(state.metrics or {})
    last = step == training.schedule.steps
    wishes = observers.tell("updated", metrics)
    asked = parts.requests.take_evaluate(parts.world) or wishes.evaluate or state.is_evaluation_asked
    if asked != state.is_evaluation_asked:
        training.reached(replace(state, is_evaluation_asked=asked))
    if asked or due(step, config.eval.eval_steps) or (last and all(one.evaluates_last for one in observers.each)):
        state, evaluated = evaluate(training)
        metrics |= evaluated
        last |= state.best.exhausted
    each = metrics.pop(EACH_UPDATE, [])

    def write() -> bool:
        folder.append_metrics(metrics)
        return folder.checkpoint_due(step)

    is_due = on_main(parts.world, write)
    state = training.reached(replace(state, metrics=None, is_evaluation_asked=False))
    if last or is_due:
        parts.first_save.will_save(folder.checkpoint(step))
        training.save(wait=last)
        if last and config.report.check_saved:
            together(parts.world, partial(check_saved, parts.policy, folder.checkpoint(step)))
    on_main(parts.world, parts.first_save.look)
    done = CompleteStep(state, metrics, each)
    wishes |= observers.tell("stepped", done)
    if wishes.save:
        training.save(wait=True)
    parts.requests.stop |= wishes.stop
    return done


def evaluate(training: Training) -> tuple[State, dict[str, Any]]:
    """Evaluate at the boundary; write the completions, and the model if it is the best so far. Returns the next state,
    and the metrics, which are empty without evaluation data. The training is not affected."""
    parts, folder, state = training.parts, training.folder, training.state
    if parts.evaluator is None:
        return state, {}
    training.source.wait()
    update_engine(parts.engine, parts.policy, parts.layout)
    step = state.complete_steps
    progress = trainer_state(training.schedule, step, state.cursor)
    evaluations = parts.evaluator.evaluate(parts.sampler, progress, cancelled=parts.wants_stop)
    metrics: dict[str, Any] = {}
    for name, evaluation in evaluations.items():
        metrics |= evaluation.metrics(name)
        if parts.config.report.log_completions:
            on_main(parts.world, partial(folder.write_evaluation, step, name, evaluation.table))
    parts.observers.tell("evaluated", step, evaluations, metrics)
    best, wins = state.best, False
    if step or all(one.initial_can_be_best for one in parts.observers.each):
        best, wins = state.best.after(step, metrics)
    if wins:
        folder.save_best(parts.models, best.record(), parts.world)
        if parts.config.report.check_saved:
            together(parts.world, partial(check_saved, parts.policy, folder.best))
    return replace(state, best=best), metrics


def due(step: int, every: int) -> bool:
    """Whether something that happens every ``every`` steps (0: never) happens after this one, counted from 1."""
    return every > 0 and step % every == 0
