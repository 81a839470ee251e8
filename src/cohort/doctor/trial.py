"""A rollout of the run's first prompts and one update on it, measured. The same functions as in the loop, and draws
with the same keys: with no more than 16 prompts per step, the first groups are those of the run's first step."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cohort.config import GRPOConfig
from cohort.data import DataCursor
from cohort.doctor.known import Run
from cohort.rollout import RNGKey, Sampling, Watch
from cohort.train import (
    Adaptive,
    NonFinite,
    Rollout,
    StepContext,
    UpdateResult,
    active_part,
    lay_out,
    part_of,
    policy_logps,
    split_minibatches,
    update,
)
from cohort.train.context import PhaseClock
from cohort.train.loop import with_advantages_and_logps
from cohort.train.metrics import policy_movement
from cohort.train.ranks import update_engine
from cohort.train.source import trainer_state
from cohort.train.sweep import CHECKED_COMPLETIONS, sampler_gap
from cohort.types import TokenBatch

PROMPTS = 16
"""Prompts of the trial."""
WARM_UP_TOKENS = 8
QUICK = 10.0
"""Seconds below which an update is made twice, and the second one timed: the first allocates and compiles."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the trial has found."""

    rollout: Rollout
    """All groups."""
    seconds: dict[str, float]
    """Of each phase of a step of the run."""
    sampler_gap: float
    """Mean |difference of log-probs| of sampler and trainer."""
    reference_gap: float | None
    """Largest |difference of log-probs| of policy and reference; None without a reference."""
    problem: str
    """Why the update could not be made; empty if it was."""


def count_of(config: GRPOConfig, available: int) -> int:
    """Number of prompts: whole steps of the run, if a step has no more than ``PROMPTS``.

    Args:
        config: the settings.
        available: prompts of the data.
    """
    per_step = config.rollout.prompts_per_step
    return min(available, PROMPTS // per_step * per_step if per_step <= PROMPTS else PROMPTS)


def try_run(run: Run) -> Trial:
    """Sample and score some prompts, and make one update. The policy is changed: do not train with it afterwards.

    Raises:
        CohortError: sampling or scoring failed, as it would in the run.
    """
    parts, config = run.parts, run.config
    count = count_of(config, len(parts.prompts.prompts))
    per_call = min(config.rollout.prompts_per_step, count)
    clock = PhaseClock()
    update_engine(parts.engine, parts.policy, parts.layout)
    _warm_up(run)
    rollouts = [_sample(run, start, min(per_call, count - start), clock) for start in range(0, count, per_call)]
    whole = rollouts[0]
    for other in rollouts[1:]:
        whole += other
    whole.check_drawn()
    scale = config.rollout.prompts_per_step / count
    seconds = {phase: found * scale for phase, found in clock.seconds.items()}

    context = replace(parts, objective=Adaptive.of(parts.objective).applied_to(parts.objective))
    batch = lay_out(rollouts[0].used_groups, parts.policy.device, context.repetition_penalty)
    gap = sampler_gap(context, batch)
    reference_gap = _reference_gap(context, batch)
    of_update, problem = _time_update(run, context, batch, rollouts[0])
    return Trial(whole, seconds | of_update, gap, reference_gap, problem)


def _warm_up(run: Run) -> None:
    """Sample a few tokens: what is compiled and allocated once is not part of a step."""
    few = min(WARM_UP_TOKENS, run.config.rollout.max_completion_length)
    sampling = replace(Sampling.of(run.config.rollout), max_completion_length=few, min_completion_length=0)
    run.parts.engine.generate(run.parts.prompts.fetch(DataCursor(), 1), 1, sampling, RNGKey(run.config.run.seed, 0))


def _sample(run: Run, start: int, count: int, clock: PhaseClock) -> Rollout:
    """Sample and score prompts from ``start`` on."""
    parts, size, cursor = run.parts, run.config.rollout.num_generations, DataCursor()
    prompts = parts.prompts.fetch(cursor, count, skip=start)
    with parts.rewards.begin(prompts, size, trainer_state(run.schedule, 0, cursor)) as scoring:
        watch = Watch(on_completion=scoring.on_completion, on_prompt=scoring.on_prompt)
        with clock("generate"):
            key = RNGKey(run.config.run.seed, 0)
            groups = parts.sampler.generate(prompts, size, Sampling.of(run.config.rollout), key, watch)
        with clock("reward"):
            scores = scoring.finish(groups)
    return Rollout(list(groups), scores, tuple(bool(group.usable.completions) for group in groups))


def _reference_gap(context: StepContext, batch: TokenBatch) -> float | None:
    if context.reference is None:
        return None
    part = part_of(batch, range(min(CHECKED_COMPLETIONS, batch.num_sequences)))
    both = [policy_logps(context, policy, batch, part) for policy in (context.policy, context.reference)]
    known = [logps_N[part.tokens_N] for logps_N in both if isinstance(logps_N, Tensor)]
    return float((known[0] - known[1]).abs().max()) if len(known) == 2 and part.num_tokens else None


def _time_update(run: Run, context: StepContext, batch: TokenBatch, rollout: Rollout) -> tuple[dict[str, float], str]:
    """Seconds of the phases after sampling in a step of the run, and why the update could not be made.

    The timed update gives every completion an advantage, because the few groups of a trial may all have equal rewards.
    A step takes the share of that time that its completions with an advantage have of the tokens.
    """
    config, clock = run.config, PhaseClock()
    with clock("logps"):
        batch = with_advantages_and_logps(context, batch, rollout, run.schedule)
    every = part_of(batch, range(batch.num_sequences))
    live = active_part(batch, every, context.objective).num_tokens / batch.num_tokens
    alternating_S = 1.0 - 2.0 * (torch.arange(batch.num_sequences) % 2).double()
    advantages_N = alternating_S.to(batch.sequence_N.device)[batch.sequence_N]
    batch = replace(batch, advantages_N=advantages_N, loss_N=torch.ones_like(batch.loss_N))
    scale = config.rollout.prompts_per_step / len(rollout.sampled)
    minibatches = split_minibatches(batch, max(1, round(context.objective.minibatches / scale)))

    for parts in (minibatches[:1], minibatches):
        start, results = time.perf_counter(), list[UpdateResult]()
        for minibatch in parts:
            outcome = context.within_memory(update, batch, minibatch)
            if isinstance(outcome, NonFinite):
                return {}, outcome.message
            results.append(outcome)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) * len(minibatches) / len(parts)
        if seconds >= QUICK:
            break
    with clock("measure"):
        policy_movement(context, batch, results, config.report.update_kl_completions)
    found = {"logps": clock.seconds["logps"] * scale, "measure": clock.seconds["measure"]}
    return found | {"update": seconds * scale * live * config.objective.num_iterations}, ""
