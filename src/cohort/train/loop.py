"""GRPO: the loop. Read this file first.

One step samples a group of completions for each prompt, scores them, turns the scores into group-relative advantages,
and updates the policy with a clipped importance ratio and a KL term against a reference. Four policies take part:

    current    ``logps``          the weights being trained, with their graph; computed inside ``update``
    old        ``old_logps``      the weights before the step's updates, computed by the trainer; when updates need it
    sampler    ``sampler_logps``  the distribution that the engine drew from, recorded while it drew
    reference  ``ref_logps``      the fixed (or slowly moved) policy of the KL term; when beta is not 0

With several ranks, each runs all of this file and holds the whole rollout. Inside ``next_rollout``, ``logps_of``,
``term_norms``, ``update``, ``policy_movement``, ``evaluate_step`` and where files are written, the ranks exchange
results: every rank must come to each of them, so what fails on one rank fails on all.

A run can stop at each ``stop_point``, and while it samples, scores or evaluates, which raises ``CancelledError``. What
it has done by then is in ``parts``, so that a checkpoint can be of any instant. A resumed run skips what is done.

To follow one rollout, read train/sample.py, train/rollout.py, train/layout.py and train/update.py next, in this order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from cohort.config import GRPOConfig, Schedule
from cohort.parallel import on_main, together
from cohort.policy import Policy
from cohort.rewards import TrainerState
from cohort.rollout import Sampling
from cohort.runs.folder import RunFolder
from cohort.runs.models import check_saved
from cohort.train.context import PhaseClock, StepContext
from cohort.train.guard import NonFiniteLog
from cohort.train.layout import Part, active_part, assign_advantages, lay_out, part_of, split_minibatches
from cohort.train.logps import CHECKED_COMPLETIONS, check_gap, like_trainer, policy_logps
from cohort.train.memory import memory_metrics
from cohort.train.metrics import EACH_UPDATE, each_update, policy_movement, rank_metrics, step_metrics, term_norms
from cohort.train.parts import TrainerParts
from cohort.train.ranks import update_engine
from cohort.train.resume import save_instant, stop_point
from cohort.train.rollout import Ahead, Rollout
from cohort.train.sample import begin, begin_unfinished, place_after, trainer_state
from cohort.train.store import store_step
from cohort.train.update import Check, NonFinite, update
from cohort.types import TokenBatch


def run(
    parts: TrainerParts, schedule: Schedule, config: GRPOConfig, folder: RunFolder, *, first_step: int = 0
) -> Iterator[dict[str, Any]]:
    """Train from ``first_step`` on. Yields each step's metrics after they and the completions are written, and any due
    checkpoint has begun to be."""
    policy, adaptive, sampling = parts.policy, parts.adaptive, Sampling.of(config.rollout)
    nonfinite = NonFiniteLog(folder.path, config.optim.max_nonfinite_updates, parts.world)
    begin_unfinished(parts, schedule, config)
    if parts.metrics is not None:  # of a step after whose updates the run was stopped
        yield finish_step(parts, schedule, config, folder)

    for step in range(first_step, schedule.steps):
        if parts.best.exhausted:  # early stopping; the checkpoint is written
            break
        stop_point(parts, folder)
        objective = adaptive.applied_to(parts.objective)
        context = StepContext(policy, parts.optimizer, objective, sampling, parts.budget, parts.reference, parts.layout)
        clock = context.clock

        # Sample a group of completions for each prompt, and score them. With ``rollout.lag``, that was begun some steps
        # ago, and goes on for later steps during the updates below.
        current = next_rollout(parts, schedule, config, step, clock)
        rollout = current.wait().rollout
        updates = parts.begin_updates(current)

        if config.vllm.sleep:  # free the memory of servers on this GPU for the update
            parts.engine.sleep()

        # Lay out the tokens once, with all that the updates share: advantages, old and reference log-probs.
        batch = updates.resumed(lay_out(rollout.used_groups, policy.device, context.repetition_penalty))
        with clock("logps"):
            batch = updates.share(with_advantages_and_logps(context, batch, rollout, schedule))
        check = gap_check(context, parts, batch) if step == first_step == current.weights_step else {}
        parts.rollout_scored(step + 1, rollout, batch)
        minibatches = split_minibatches(batch, objective.minibatches)

        # Measure the norm of each term's gradient, when the settings ask for it. The weights do not change.
        if minibatches and not updates.done and due(step + 1, config.report.term_norms_steps):
            with clock("measure"):
                updates.term_norms = context.within_memory(
                    term_norms, batch, minibatches[0], adaptive.applied_entropy_coefficient(objective)
                )

        # Update: minibatches change the result, microbatches (inside ``update``) do not.
        with clock("update"):
            for minibatch in updates.left(minibatches * config.objective.num_iterations):
                stop_point(parts, folder)
                entropy_coefficient = adaptive.applied_entropy_coefficient(objective)
                outcome = parts.end_update(
                    context.within_memory(update, batch, minibatch, entropy_coefficient, **check)
                )
                if isinstance(outcome, NonFinite):
                    nonfinite.skipped(outcome.message, batch, minibatch, step + 1, parts.nonfinite_in_a_row)
                    continue
                adaptive.after_update(objective, outcome)
        parts.optimizer.zero_grad()  # their memory is for the next rollout's keys and values

        with clock("measure"):
            moved = context.within_memory(policy_movement, batch, updates.results, config.report.update_kl_completions)
        metrics: dict[str, Any] = {"step": step + 1, "time": time.time(), "updates_nonfinite": updates.num_nonfinite}
        metrics |= clock.metrics(rollout.num_tokens) | current.metrics() | moved | updates.term_norms
        metrics |= step_metrics(rollout, batch, updates.results, objective, updates.version_before)
        metrics |= rank_metrics(context.world, updates.results, metrics["seconds/step"]) | memory_metrics(policy.device)
        metrics[EACH_UPDATE] = each_update(updates, objective)

        adaptive.after_step(objective, updates.results, batch.num_sequences)
        move_reference(parts, config, updates.version_before)
        complete_step(parts, schedule, current, metrics)
        on_main(parts.world, partial(store_step, folder, config, context, step + 1, rollout, batch, updates))
        yield finish_step(parts, schedule, config, folder)


def next_rollout(parts: TrainerParts, schedule: Schedule, config: GRPOConfig, step: int, clock: PhaseClock) -> Ahead:
    """The scored rollout of a step. Without ``rollout.lag`` it is sampled now, with the policy's present weights.

    With a lag it has been pending in the background since so many steps ago. When it is complete and the engine is
    free, the engine takes the present weights and begins the rollout of ``lag`` steps later, beside the updates of this
    step. So step t trains on what the weights after step t - 1 - lag have drawn; the first steps, on what those before
    the first step have.
    """
    lag, pending = config.rollout.lag, parts.pending
    if parts.current is not None:  # a run was stopped between two of its updates
        parts.current.wait(clock)
        return parts.current
    if not pending:
        pending.append(begin(parts, schedule, config, step, step, parts.cursor))
    pending[0].wait(clock)
    while len(pending) <= min(lag, schedule.steps - step - 1):
        if (place := place_after(parts, schedule, pending)) is None:
            break  # a pending rollout has failed: its error is raised when its step comes
        pending.append(begin(parts, schedule, config, step + len(pending), step, place.cursor))
    return pending.popleft()


def with_advantages_and_logps(
    context: StepContext, batch: TokenBatch, rollout: Rollout, schedule: Schedule
) -> TokenBatch:
    """The batch with advantages, and with old and reference log-probs if the updates need them.

    With a single update the old policy is the current one: the ratio is 1 by identity and no pass is spent on it.
    Sequences that teach nothing get no pass either, unless a KL inside the reward makes all advantages depend on it.
    Log-probs that the batch has already, from before the first update, are not computed again.
    """
    objective, limit = context.objective, context.sampling.max_completion_length
    logps_first = objective.needs_old_logps
    part = part_of(batch, range(batch.num_sequences))
    if not logps_first:
        batch = assign_advantages(batch, rollout.used_scores, objective, limit)
        part = active_part(batch, part, objective, context.policy.router_aux_loss_coef)
    old_logps_N, ref_logps_N = batch.old_logps_N, batch.ref_logps_N
    if schedule.needs_old_logps and old_logps_N is None:
        old_logps_N = logps_of(context, context.policy, batch, part)
    if schedule.needs_ref_logps and ref_logps_N is None:
        ref_logps_N = logps_of(context, context.reference, batch, part)
    batch = replace(batch, old_logps_N=old_logps_N, ref_logps_N=ref_logps_N)
    return assign_advantages(batch, rollout.used_scores, objective, limit) if logps_first else batch


def gap_check(context: StepContext, parts: TrainerParts, batch: TokenBatch) -> dict[str, Check]:
    """Check that the sampler computes what the trainer computes, whose weights are the same: now, if the trainer's
    log-probs are known or dropout changes those of an update. Otherwise returns the argument of ``update`` for it.

    Raises:
        PolicyMismatchError: it does not. Nothing has been updated yet.
    """
    policy, updates = context.policy, parts.updates
    check = partial(check_gap, policy, shared_weights=parts.engine.capabilities.shared_weights)
    if updates is None or updates.done:
        return {}
    logps_N = batch.old_logps_N
    if policy.dropout:
        logps_N = logps_of(context, policy, batch, part_of(batch, range(min(CHECKED_COMPLETIONS, batch.num_sequences))))
    if logps_N is None:
        return {"check": lambda tokens: check(tokens.logps_N, like_trainer(tokens))}
    check(logps_N, like_trainer(batch))
    return {}


def logps_of(context: StepContext, policy: Policy | None, batch: TokenBatch, part: Part) -> Tensor | None:
    """``policy_logps`` within memory; None without a policy."""
    if policy is None:
        return None
    return context.within_memory(policy_logps, policy, batch, part)


def move_reference(parts: TrainerParts, config: GRPOConfig, version_before: int) -> None:
    """The reference is fixed, or moved toward the policy every ``ref_model_sync_steps`` updates."""
    every = config.objective.ref_model_sync_steps
    if parts.reference and config.objective.sync_ref_model and parts.policy.version // every > version_before // every:
        parts.reference.move_toward(parts.policy, config.objective.ref_model_mixup_alpha)


def complete_step(parts: TrainerParts, schedule: Schedule, current: Ahead, metrics: dict[str, Any]) -> None:
    """Go to the instant after a step, whose evaluation is to follow: advance the position in the data."""
    place = place_after(parts, schedule, [current])
    assert place is not None
    parts.end_step(place.cursor, {**metrics, **place.metrics})


def finish_step(parts: TrainerParts, schedule: Schedule, config: GRPOConfig, folder: RunFolder) -> dict[str, Any]:
    """Evaluate if it is due, and write metrics and checkpoint. Returns the metrics with those of the evaluation.

    When the evaluation fails or is cancelled, ``parts.metrics`` is still set: a checkpoint of this instant lets the
    resumed run evaluate again.
    """
    assert parts.metrics is not None
    step, metrics = parts.complete_steps, parts.metrics
    parts.companion.updated(metrics)
    last, asked = step == schedule.steps, parts.requests.take_evaluate(parts.world)
    if asked or due(step, config.eval.eval_steps) or (last and not parts.companion.asks_for_evaluations):
        metrics |= evaluate_step(parts, trainer_state(schedule, step, parts.cursor), config, folder)
        last |= parts.best.exhausted

    parts.each_update = metrics.pop(EACH_UPDATE, [])

    def write() -> bool:
        folder.append_metrics(metrics)
        return folder.checkpoint_due(step)

    is_due = on_main(parts.world, write)
    parts.metrics = None
    if last or is_due:
        if parts.first_save:
            parts.first_save.saved(folder.checkpoint(step))
        save_instant(parts, folder, wait=last)
        if last and config.report.check_saved:
            together(parts.world, partial(check_saved, parts.policy, folder.checkpoint(step)))
    if parts.first_save:
        on_main(parts.world, parts.first_save.look)
    return metrics


def evaluate_step(parts: TrainerParts, state: TrainerState, config: GRPOConfig, folder: RunFolder) -> dict[str, Any]:
    """Evaluate after ``state.global_step`` steps; write the completions, and the model if it is the best so far.

    Returns the metrics, which are empty without evaluation data. The training is not affected.
    """
    if parts.evaluator is None:
        return {}
    parts.free_engine()
    update_engine(parts.engine, parts.policy, parts.layout)
    evaluations = parts.evaluator.evaluate(parts.sampler, state, cancelled=parts.wants_stop)
    step = state.global_step
    metrics: dict[str, Any] = {}
    for name, evaluation in evaluations.items():
        metrics |= evaluation.metrics(name)
        if config.report.log_completions:
            on_main(parts.world, partial(folder.write_evaluation, step, name, evaluation.table))
    parts.evaluated(step, evaluations, metrics)
    counts = step > 0 or parts.companion.initial_can_be_best
    is_saved = (
        counts and parts.best.update(step, metrics) and folder.save_best(parts.models, parts.best.record(), parts.world)
    )
    if is_saved and config.report.check_saved:
        together(parts.world, partial(check_saved, parts.policy, folder.best))
    parts.companion.evaluated(step, evaluations, metrics)
    return metrics


def due(step: int, every: int) -> bool:
    """Whether something that happens every ``every`` steps (0: never) happens after this one, counted from 1."""
    return every > 0 and step % every == 0
