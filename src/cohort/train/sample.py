"""Sampling and scoring of a step's rollout: at once, or ahead of the training (``rollout.lag``)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from itertools import takewhile

from cohort.config import GRPOConfig, Schedule
from cohort.data import DataCursor
from cohort.errors import ConfigError
from cohort.objective import Objective
from cohort.parallel import together
from cohort.presets.parts import DynamicSampling
from cohort.rewards import TrainerState
from cohort.rollout import DividedSampler, RNGKey, Sampling, Watch
from cohort.train.context import PhaseClock
from cohort.train.parts import TrainerParts
from cohort.train.ranks import may_draw_apart, reads_trained, sampler_copy, update_engine
from cohort.train.rollout import Ahead, Place, Rollout, Sampled, Unfinished, uses_rounds


def begin(
    parts: TrainerParts, schedule: Schedule, config: GRPOConfig, step: int, weights_step: int, cursor: DataCursor
) -> Ahead:
    """The rollout of a step, sampled with the policy's present weights: in the background with ``rollout.lag``, or else
    when it is waited for.

    Args:
        parts, schedule, config: the run. The engine must be free.
        step: the step that trains on it, from 0.
        weights_step: complete steps.
        cursor: position of its prompts in the data.

    Raises:
        ConfigError: with a lag, the engine has no weights of its own.
    """
    update_engine(parts.engine, parts.policy, parts.layout)
    lag, version = config.rollout.lag, parts.policy.version
    if not lag:
        work = partial(sample, parts, schedule, config, step, cursor)
        return Ahead(step, weights_step, work, parts.world, parts.wants_stop, version=version)
    if reads_trained(parts.engine):
        raise ConfigError(
            f"rollout.lag is {lag}, and the engine samples with the weights that are trained meanwhile: make it with "
            "local_engine(..., ahead=True), or set rollout.lag to 0"
        )
    return _begin_beside(parts, schedule, config, step, weights_step, version, cursor)


def _begin_beside(
    parts: TrainerParts,
    schedule: Schedule,
    config: GRPOConfig,
    step: int,
    weights_step: int,
    version: int,
    cursor: DataCursor,
) -> Ahead:
    """The rollout of a step, sampled in the background with the weights that the engine has, of this version."""
    # Exchanges of the background must not come between those of the training, nor between those of another rollout.
    number = step % config.rollout.lag
    if number not in parts.worlds:
        parts.worlds[number] = parts.world.beside()
    work, redrawable = partial(sample, parts, schedule, config, step, cursor), sampler_copy(parts.engine) is not None
    one = Ahead(
        step, weights_step, work, parts.worlds[number], parts.wants_stop, version=version, redrawable=redrawable
    )
    return one.begin(parts.pending, parts.policy.device)


def begin_unfinished(parts: TrainerParts, schedule: Schedule, config: GRPOConfig) -> None:
    """Begin again, beside the training, what a stopped run had pending of its rollouts, each with the weights that it
    was sampled with. Rollouts after the first of which that is not possible are dropped, and sampled anew."""
    copy, lag = sampler_copy(parts.engine), config.rollout.lag
    able = {
        step: kept
        for step, kept in parts.unfinished.items()
        if not parts.needs_sampler(kept) or (copy and copy.version == kept.version)
    }
    stored: dict[int, Ahead | Unfinished] = {**able, **{one.step: one for one in parts.pending}}
    first = parts.complete_steps + (parts.current is not None)
    steps = list(takewhile(stored.__contains__, range(first, schedule.steps)))
    if not lag:  # one that is not complete is begun when its step comes, with the weights of that time
        steps = list(takewhile(lambda step: step == first or isinstance(stored[step], Ahead), steps))
    parts.unfinished = {step: kept for step, kept in parts.unfinished.items() if step in steps}
    parts.pending.clear()
    if lag and parts.unfinished and not any(map(parts.needs_sampler, parts.unfinished.values())):
        update_engine(parts.engine, parts.policy, parts.layout)
    for step in steps:
        one, before = stored[step], [*filter(None, [parts.current]), *parts.pending]
        if isinstance(one, Ahead):
            parts.pending.append(one)
            continue
        if not lag:
            break
        if len(parts.pending) >= lag:  # begun with a larger lag: exchanges of two rollouts must not meet
            parts.pending[-1].wait_until_ended()
        place = place_after(parts, schedule, before) if before else Place(parts.cursor, {})
        if place is None:
            break  # a rollout before it has failed: its error is raised when its step comes
        weights_step = step if one.weights_step is None else one.weights_step
        version = parts.policy.version if one.version is None else one.version
        parts.pending.append(_begin_beside(parts, schedule, config, step, weights_step, version, place.cursor))


def place_after(parts: TrainerParts, schedule: Schedule, rollouts: Sequence[Ahead]) -> Place | None:
    """Where the data goes on after the next rollouts of a run, in order; None if one of them failed.

    Waits until the engine is free and, if the next prompts depend on the rewards, until the last rollout is scored.

    Raises:
        CancelledError: one of them was cancelled.
    """
    depends = uses_rounds(parts.objective) or schedule.config.data.curriculum == "measured"
    cursor = parts.cursor
    for one in rollouts:
        if one.place is None:
            if not (one.wait_until_ended() if depends else one.wait_for_engine()):
                if one.is_cancelled:
                    raise CancelledError
                return None
            used, rewards = schedule.prompts_of(one.step), dict[int, float]()
            if depends:
                used, rewards = len(one.wait().rollout.sampled), one.wait().rollout.mean_rewards
            one.place = Place(*parts.prompts.advance(cursor, used, rewards))
        cursor = one.place.cursor
    return rollouts[-1].place


def sample(
    parts: TrainerParts, schedule: Schedule, config: GRPOConfig, step: int, cursor: DataCursor, ahead: Ahead
) -> Sampled:
    """Sample and score a step's groups: each rank its share of the prompts, and all get all groups and scores.

    The engine computes each prompt once for its group. Async reward functions and those in workers start as soon as a
    completion ends. With dynamic sampling, new prompts replace groups whose rewards are all equal, for at most
    ``max_rounds`` rounds; otherwise there is one round. What a stopped run has sampled and scored of it is kept.
    """
    before = parts.unfinished.pop(step, Unfinished())
    apart = may_draw_apart(parts.engine, deterministic=config.run.deterministic)
    ahead.unfinished, rollout, spent = before, before.rollout, before.metrics if apart or before.drawn else {}
    world, clock, metrics = ahead.world, PhaseClock(), None
    sampler = parts.sampler.on(world) if isinstance(parts.sampler, DividedSampler) else parts.sampler
    target, state = schedule.prompts_of(step), trainer_state(schedule, step, cursor)
    while rollout is None or another_round(rollout, target, parts.objective):
        used, sampled = (sum(rollout.is_used_P), len(rollout.sampled)) if rollout else (0, 0)
        prompts = together(world, partial(parts.prompts.fetch, cursor, target - used, skip=sampled))
        begun, before = before.round_of(prompts, apart=apart), Unfinished()
        with parts.rewards.begin(prompts, config.rollout.num_generations, state, world, ahead.cancelled) as scoring:
            begun.begin(scoring)
            with clock("generate", scoring.progress):
                drawn = sampler.generate(
                    prompts,
                    config.rollout.num_generations,
                    Sampling.of(config.rollout),
                    RNGKey(config.run.seed, step),  # and draws depend on the prompt's uid
                    Watch(on_completion=scoring.on_completion, on_prompt=scoring.on_prompt, cancelled=ahead.cancelled),
                    begun.missing(config.rollout.num_generations),
                )
            groups = begun.joined(drawn)
            try:
                ahead.check_wanted()
                if not uses_rounds(parts.objective):
                    metrics = sampler.metrics()
                    ahead.free_engine()
                # Should a function not return, what is drawn stays.
                ahead.unfinished = Unfinished.of(rollout, groups, (), added(spent, metrics or {}))
                ahead.wait_for_previous()
                with clock("reward"):
                    scored = Rollout.of(groups, scoring.finish(groups), parts.objective)
            except Exception as error:
                everywhere = isinstance(error, CancelledError)  # else one rank may have failed, by a function to repair
                calls = scoring.ended_calls() if everywhere else ()
                if metrics is None and (everywhere or world.size == 1):
                    metrics = sampler.metrics()
                ahead.unfinished = Unfinished.of(rollout, groups, calls, added(spent, metrics or {}))
                raise
        rollout = scored if rollout is None else rollout + scored
    rollout.check_drawn()
    return Sampled(rollout, clock.seconds, added(spent, sampler.metrics() if metrics is None else metrics))


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The numbers of both, added up."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def drop_resized(parts: TrainerParts, schedule: Schedule) -> None:
    """Drop pending rollouts from the first on whose step now takes another number of prompts, as the last step of a run
    does after ``run.num_epochs`` was raised. They are drawn anew."""
    if not uses_rounds(parts.objective):
        kept = takewhile(lambda one: len(one.wait().rollout.sampled) == schedule.prompts_of(one.step), parts.pending)
        parts.pending = deque(kept)


def another_round(rollout: Rollout, target: int, objective: Objective) -> bool:
    """Whether dynamic sampling wants another round."""
    rule = objective.group_filter
    return isinstance(rule, DynamicSampling) and sum(rollout.is_used_P) < target and rollout.rounds < rule.max_rounds


def trainer_state(schedule: Schedule, step: int, cursor: DataCursor) -> TrainerState:
    """The progress of the run, for reward functions."""
    epoch = cursor.position / schedule.num_prompts if schedule.num_prompts else math.nan
    return TrainerState(step, schedule.steps, epoch)
