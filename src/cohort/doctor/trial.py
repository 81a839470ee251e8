"""A rollout of the run's first prompts and one update on it, measured and checked. The same functions as in the loop,
and draws with the same keys: with no more than 16 prompts per step, the first groups are those of the run's first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from math import ceil
from operator import add

import torch
from torch import Tensor

from cohort.data import DataCursor
from cohort.doctor.checks import (
    Run,
    check_cut,
    check_distinct,
    check_reference,
    check_rewards,
    check_sampler,
    check_signal,
    check_time,
)
from cohort.doctor.finding import Finding, Status
from cohort.presets.parts import DynamicSampling
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
from cohort.train.sweep import CACHED, CHECKED_COMPLETIONS, SERVED, most_gap, sampler_gap
from cohort.types import FinishReason, TokenBatch

PROMPTS = 16
"""Prompts of the trial."""
WARM_UP_TOKENS = 8
QUICK = 10.0
"""Seconds below which an update is made twice, and the second one timed: the first allocates and compiles."""


def try_run(run: Run) -> dict[str, list[Finding]]:
    """Sample and score some prompts, make one update, and check both and what they cost. The policy is changed: do not
    train with it afterwards.

    Returns:
        What the checks found, by name; "update" if it could not be made.

    Raises:
        CohortError: sampling or scoring failed, as it would in the run.
    """
    parts, config, clock = run.parts, run.config, PhaseClock()
    per_step, available = config.rollout.prompts_per_step, len(run.prompts)
    count = min(available, PROMPTS // per_step * per_step if per_step <= PROMPTS else PROMPTS)  # whole steps
    per_call = min(per_step, count)
    update_engine(parts.engine, parts.policy, parts.layout)
    _warm_up(run)
    rollouts = [_sample(run, start, min(per_call, count - start), clock) for start in range(0, count, per_call)]
    whole = reduce(add, rollouts)
    whole.check_drawn()
    seconds = {phase: found * per_step / count for phase, found in clock.seconds.items()}

    context = replace(parts, objective=Adaptive.of(parts.objective).applied_to(parts.objective))
    batch = lay_out(rollouts[0].used_groups, parts.policy.device, context.repetition_penalty)
    precision = str(parts.policy.precision.compute).removeprefix("torch.")
    shared = parts.engine.capabilities.shared_weights
    most, advice = most_gap(parts.policy, shared_weights=shared), CACHED if shared else SERVED
    found = {
        "sampler": check_sampler(sampler_gap(context, batch), most, precision, advice),
        "reference": check_reference(_reference_gap(context, batch), precision),
    }
    of_update, problem = _time_update(run, context, batch, rollouts[0])
    found |= _of_rollout(run, whole, seconds | of_update)
    if problem:
        advice = "look at the model: are its weights or logits finite?"
        found["update"] = [Finding("update", Status.FAIL, problem, advice)]
    return found


def _of_rollout(run: Run, rollout: Rollout, seconds: Mapping[str, float]) -> dict[str, list[Finding]]:
    """The checks of all groups, and of the seconds that the phases of a step take."""
    config, objective, scores = run.config, run.parts.objective, rollout.sampled_scores
    size, rewards = config.rollout.num_generations, scores.rewards_S.tolist()
    by_function = dict(zip(scores.names, scores.by_function_SK.T.tolist(), strict=True))
    weights = dict(zip(scores.names, scores.weights or (1.0,) * len(scores.names), strict=True))
    rule = objective.group_filter
    rounds = rule.max_rounds if isinstance(rule, DynamicSampling) else 1
    signal = check_signal(
        [rewards[start : start + size] for start in range(0, len(rewards), size)],
        sum(weight for weight in weights.values() if weight > 0),
        group_relative=objective.group_relative,
        rounds=rounds,
        by_function={name: rewards for name, rewards in by_function.items() if weights[name]},
    )
    ends = [one.finish_reason for one in rollout.completions if one.finish_reason.usable]
    cut = check_cut(
        ends.count(FinishReason.LENGTH),
        len(ends),
        config.rollout.max_completion_length,
        masked=objective.truncated == "mask",
        no_signal=any(one.status is Status.FAIL for one in signal),
    )
    live = 1 - (signal[0].numbers.get("dead_share") or 0.0)
    expected = min(rounds, 1 / live) if live > 0 else rounds  # rounds until all groups have different rewards
    sampling, steps, every = ("generate", "reward"), run.schedule.steps, config.eval.eval_steps
    each = sum(seconds[name] for name in sampling) / (config.rollout.prompts_per_step * size)
    sets = run.parts.evaluator.sets.values() if run.parts.evaluator else ()
    costs = check_time(
        {**seconds, **{name: seconds[name] * expected for name in sampling}},
        len(rollout.sampled),
        steps=steps,
        evaluation=each * sum(map(len, sets)) * config.eval.num_generations_eval,
        evaluations=(ceil(steps / every) if every else 1) + config.eval.eval_on_start if sets else 0,
        lag=config.rollout.lag,
    )
    distinct = [len({one.token_ids.tobytes() for one in group.completions}) for group in rollout.sampled]
    rest = {"duplicates": check_distinct(distinct, size), "cut": cut, "time": costs}
    return {"signal": signal, "rewards": check_rewards(by_function, weights), **rest}


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
        clock.seconds["update"], results = 0.0, list[UpdateResult]()
        with clock("update"):
            for minibatch in parts:
                outcome = context.within_memory(update, batch, minibatch)
                if isinstance(outcome, NonFinite):
                    return {}, outcome.message
                results.append(outcome)
        seconds = clock.seconds["update"] * len(minibatches) / len(parts)
        if seconds >= QUICK:
            break
    with clock("measure"):
        policy_movement(context, batch, results, config.report.update_kl_completions)
    found = {"logps": clock.seconds["logps"] * scale, "measure": clock.seconds["measure"]}
    return found | {"update": seconds * scale * live * config.objective.num_iterations}, ""
