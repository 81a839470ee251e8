"""Where the rollout of a step comes from: the journal, or sampling and scoring, now or beside the training."""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from cohort.calls import interruptible
from cohort.config import Schedule
from cohort.data import DataCursor
from cohort.errors import ConfigError, RunFolderError
from cohort.objective import Objective
from cohort.parallel import World, on_main, together
from cohort.presets.parts import DynamicSampling
from cohort.rewards import TrainerState
from cohort.rollout import DividedSampler, RNGKey, Sampling, Watch
from cohort.runs.checkpoints import random_state, set_random_state
from cohort.runs.folder import RunFolder
from cohort.runs.journal import EXACT, StoredRollout
from cohort.train.context import PhaseClock
from cohort.train.parts import TrainerParts
from cohort.train.ranks import reads_trained, update_engine
from cohort.train.rollout import Rollout, uses_rounds
from cohort.train.state import State
from cohort.types import Completion, Group, Prompt

log = logging.getLogger("cohort.train")
ABANDON_SECONDS = 10.0
"""Seconds to wait for an abandoned rollout."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A scored rollout, with what sampling and scoring it has cost."""

    rollout: Rollout
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the sampler."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The completions of a rollout of one round, not scored yet."""

    groups: Sequence[Group]
    seconds: Mapping[str, float]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DataPlace:
    """Where the data goes on after a rollout."""

    cursor: DataCursor
    metrics: Mapping[str, int]
    """What the rollout has read."""


class PendingRollout:
    """The rollout of a step: complete, being sampled and scored in a thread, or to be sampled when it is waited for.

    Args:
        step: the step that trains on it, from 0.
        weights_step: complete steps when it begins, which determine the weights that sample it.
        work: samples and scores. Called with this object, which it tells when the engine is free.
        world: the ranks that share the work, for exchanges of this rollout alone.
        cancelled: whether nobody waits for it any more. None: somebody always does.
    """

    def __init__(
        self,
        step: int,
        weights_step: int,
        work: Callable[[PendingRollout], Sampled],
        world: World | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self.step, self.weights_step, self.world, self.cancelled = step, weights_step, world or World(), cancelled
        self.place: DataPlace | None = None
        """Where the data goes on after it, once that is known."""
        self.drawn: Drawn | None = None
        """All completions, until they are scored."""
        self.in_background = False
        """Whether it was sampled beside the training."""
        self.random: Mapping[str, Any] | None = None
        """The random generators before it was scored, or when it was complete. None: its scoring has not begun."""
        self.is_journaled = False
        self._work, self._waited = work, 0.0
        self._engine_is_free, self._ended = threading.Event(), threading.Event()
        self._is_abandoned = self._scores_unwanted = self._is_sampled = self._is_left = False
        self._sampled: Sampled | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._previous: PendingRollout | None = None

    @classmethod
    def complete(cls, step: int, weights_step: int, sampled: Sampled, *, in_background: bool) -> PendingRollout:
        """One that the journal holds."""
        one = cls(step, weights_step, lambda _: sampled)
        one._run(nullcontext())
        one.in_background, one.is_journaled = in_background, True
        return one

    def begin(self, pending: Sequence[PendingRollout], device: torch.device) -> PendingRollout:
        """Start in a thread, on the engine's device. The last of ``pending`` is scored before it.

        A stop cancels its scoring and not its sampling, which cannot be repeated: the weights will have changed.
        """
        stops, self.in_background = self.cancelled, True

        def cancelled() -> bool:
            return self._is_abandoned or (self._is_sampled and (self._scores_unwanted or bool(stops and stops())))

        self.cancelled = cancelled
        self._previous = pending[-1] if pending else None
        place = _beside_training(device)
        self._thread = threading.Thread(target=self._run, args=(place,), name=f"rollout-{self.step}", daemon=True)
        self._thread.start()
        return self

    def wait(self, clock: PhaseClock | None = None) -> Sampled:
        """The rollout. Raises what sampling or scoring raised. ``clock`` gets the seconds: of waiting, as phase
        ``rollout_wait``, or of the phases of a rollout that is sampled now."""
        start = time.perf_counter()
        if self._thread is None and not self._ended.is_set():
            self._run(nullcontext())
        self.wait_until_ended()
        if clock is not None and self.in_background:
            clock.seconds["rollout_wait"] = self._waited = time.perf_counter() - start
        elif clock is not None and self._sampled is not None:
            clock.seconds |= self._sampled.seconds
        if self._error is not None:
            raise self._error
        assert self._sampled is not None
        return self._sampled

    @property
    def has_ended(self) -> bool:
        """Whether it is complete, has failed or was cancelled."""
        return self._ended.is_set()

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled."""
        return isinstance(self._error, CancelledError)

    def wait_until_ended(self) -> bool:
        """Wait until it is complete, has failed or was cancelled; returns whether it is complete. When the run is to
        stop and its time is half over, a function of the user that does not return is left behind."""
        try:
            with interruptible():
                self._ended.wait()
            if self._thread is not None and not self._is_left:
                self._thread.join()  # a thread that outlives the run aborts the interpreter's exit
        except CancelledError:
            self._leave()
        return self._error is None

    def wait_for_engine(self) -> bool:
        """Wait until the engine is free; returns whether everything is sampled."""
        self._engine_is_free.wait()
        return self._is_sampled

    def metrics(self) -> dict[str, float]:
        """The sampler's. Of what was sampled beside the training, also its lag, its seconds, and how many of them were
        not waited for."""
        sampled = self.wait()
        if not self.in_background:
            return dict(sampled.metrics)
        phases = {f"seconds/{phase}": seconds for phase, seconds in sampled.seconds.items()}
        hidden = max(0.0, sum(phases.values()) - self._waited)
        lag = {"rollout/lag": self.step - self.weights_step, "seconds/rollout_hidden": hidden}
        return {**sampled.metrics, **phases, **lag}

    def abandon(self) -> None:
        """Cancel what is being sampled and what is awaited."""
        self._is_abandoned = True

    def finish_sampling(self) -> None:
        """Cancel its scoring, and wait until everything is sampled."""
        self._scores_unwanted = True
        if self._thread is not None:
            self._engine_is_free.wait()
        self.join()

    def join(self) -> None:
        """Wait until it has ended after ``abandon`` or ``finish_sampling``. A function of the user that runs in this
        process and takes more than ``ABANDON_SECONDS`` is left behind."""
        if self._thread is not None and not self._is_left:
            self._thread.join(ABANDON_SECONDS)
            if self._thread.is_alive():
                self._leave()

    def _leave(self) -> None:
        log.warning("the rollout of step %d goes on: its sampling or a function in it does not end", self.step + 1)
        self._is_left, self._error = True, self._error or CancelledError()
        self._ended.set()

    @property
    def after(self) -> DataPlace:
        """Where the data goes on after a rollout that ``RolloutSource.next`` has returned."""
        assert self.place is not None
        return self.place

    def to_store(self) -> StoredRollout | None:
        """What the journal can hold of it: all of it, or all completions without their scores; None: too little."""
        facts: dict[str, Any] = {"weights_step": self.weights_step, "in_background": self.in_background}
        if self._sampled is not None:
            sampled, rollout = self._sampled, self._sampled.rollout
            facts |= {"rounds": rollout.rounds, "is_used": rollout.is_used_P}
            return StoredRollout(_without_columns(rollout.sampled), rollout.sampled_scores, facts | _costs(sampled))
        if self._error is not None and self.drawn is not None:
            return StoredRollout(_without_columns(self.drawn.groups), None, facts | _costs(self.drawn))
        return None

    # For the work ---------------------------------------------------------------------------------------------------

    def check_wanted(self) -> None:
        """Check that somebody waits for it.

        Raises:
            CancelledError: nobody does; what was sampled may be incomplete.
        """
        if self.cancelled and any(self.world.gather(self.cancelled())):  # all ranks stop at one place
            raise CancelledError

    def free_engine(self, drawn: Drawn) -> None:
        """Everything is drawn: the engine may take other weights and begin the next rollout."""
        self.drawn, self._is_sampled = drawn, True
        self._engine_is_free.set()

    def wait_for_previous(self) -> None:
        """Wait until the previous rollout is scored: functions are called in the order of the rollouts.

        Raises:
            CancelledError: the previous one was cancelled, so this one is not to be scored.
        """
        if self._previous is not None:
            self._previous.wait_until_ended()
            if self._previous.is_cancelled:
                raise CancelledError
            self._previous = None

    def _run(self, place: AbstractContextManager[None]) -> None:
        try:
            with place:
                self._sampled = self._work(self)
            self._is_sampled, self.drawn = True, None
        except BaseException as error:  # the main thread raises it
            self._error = error
        finally:
            self._engine_is_free.set()
            self._ended.set()


def _without_columns(groups: Sequence[Group]) -> list[Group]:
    """The groups without the data's columns; ``_read`` adds them again."""
    return [replace(group, prompt=replace(group.prompt, columns={})) for group in groups]


def _costs(of: Sampled | Drawn) -> dict[str, Any]:
    return {"seconds": of.seconds, "metrics": of.metrics}


class RolloutSource:
    """The rollouts of a run, step by step.

    A rollout that the journal holds is read. Any other is sampled and scored when its step comes or, with
    ``rollout.lag``, so many steps before, in a thread beside the updates. The engine works for one rollout at a time:
    the next one begins when the engine is free. Rewards of two rollouts may be awaited at the same time, but functions
    are called in the order of the rollouts.

    Args:
        parts: the collaborators of the run.
        schedule: its schedule.
        folder: its folder, with the journal.
        state: the state that it goes on from.
    """

    def __init__(self, parts: TrainerParts, schedule: Schedule, folder: RunFolder, state: State) -> None:
        self._parts, self._schedule, self._folder = parts, schedule, folder
        self.pending: deque[PendingRollout] = deque()
        """The rollouts of the next steps. Without ``rollout.lag``, at most the one that is waited for."""
        self._worlds: dict[int, World] = {}
        """The ranks, for exchanges of pending rollouts."""
        self._first_step = state.complete_steps
        self._readable = set(on_main(parts.world, folder.journal_steps))
        self._first_sampled = math.inf
        """The first step, from 0, that this process has sampled: what later weights have drawn is outdated."""
        step, lag = state.complete_steps, parts.config.rollout.lag
        if lag and 0 < step < schedule.steps and step + 1 not in self._readable:
            log.warning(
                "the journal lacks the rollout of step %d. Earlier weights drew it (rollout.lag) and are gone: the "
                "present weights draw it again",
                step + 1,
            )

    def next(self, state: State, clock: PhaseClock) -> PendingRollout:
        """The rollout of the next step, complete and in the journal.

        With a lag, step t trains on what the weights after step t - 1 - lag have drawn, and the first steps on what the
        initial weights have.
        """
        step, lag, pending = state.complete_steps, self._parts.config.rollout.lag, self.pending
        if not pending:
            pending.append(self._begin(step, step, state.cursor))
        pending[0].wait(clock)
        self.place_after([pending[0]], state.cursor)
        while len(pending) <= min(lag, self._schedule.steps - step - 1):
            if (place := self.place_after(pending, state.cursor)) is None:
                break  # a pending rollout has failed: its error is raised when its step comes
            pending.append(self._begin(step + len(pending), step, place.cursor))
        self._journal(pending[0])
        return pending.popleft()

    def place_after(self, rollouts: Sequence[PendingRollout], cursor: DataCursor) -> DataPlace | None:
        """Where the data goes on after the next rollouts of a run, in order; None if one of them failed.

        Waits until the engine is free and, if the next prompts depend on the rewards, until the last rollout is scored.

        Args:
            rollouts: of the next steps.
            cursor: before the first of them.

        Raises:
            CancelledError: one of them was cancelled.
        """
        depends = uses_rounds(self._parts.objective) or self._parts.config.data.curriculum == "measured"
        for one in rollouts:
            if one.place is None:
                if not (one.wait_until_ended() if depends else one.wait_for_engine()):
                    if one.is_cancelled:
                        raise CancelledError
                    return None
                used, rewards = self._schedule.prompts_of(one.step), dict[int, float]()
                if depends:
                    used, rewards = len(one.wait().rollout.sampled), one.wait().rollout.mean_rewards
                one.place = DataPlace(*self._parts.prompts.advance(cursor, used, rewards))
            cursor = one.place.cursor
        return rollouts[-1].place

    def wait(self) -> None:
        """Wait until the engine and the reward functions are idle. A pending rollout's error is raised when its step
        comes."""
        for one in self.pending:
            one.wait_until_ended()

    def finish_sampling(self) -> None:
        """End the pending rollouts once everything is drawn: no later weights could draw the rest."""
        for one in self.pending:
            one.finish_sampling()

    def cancel(self) -> None:
        """End the pending rollouts."""
        for one in self.pending:
            one.abandon()
        for one in self.pending:
            one.join()

    def journal_pending(self) -> None:
        """Bring what there is of the pending rollouts to the journal, up to the first that is incomplete. Every rank
        must call."""
        self.wait()
        for one in self.pending:
            if not self._journal(one):
                break

    # Journal --------------------------------------------------------------------------------------------------------

    def _journal(self, one: PendingRollout) -> bool:
        """Write a rollout into the journal, unless it is there. Returns whether there was enough of it."""
        if one.is_journaled:
            return True
        stored, world = one.to_store(), self._parts.world
        if not all(world.gather(stored is not None)) or stored is None:
            return False
        facts = {**stored.facts, "random": world.gather(json.dumps(one.random))}
        on_main(world, lambda: self._folder.write_journal(one.step + 1, replace(stored, facts=facts)))
        one.is_journaled = True
        return True

    def _read(self, step: int, cursor: DataCursor) -> StoredRollout | None:
        """What the journal holds of a step; None: nothing, or something that one of the ranks cannot read. Its prompts
        have the columns of the data: files do not hold every object."""
        if step + 1 not in self._readable:
            return None
        found, world = None, self._parts.world
        try:
            found = self._folder.read_journal(step + 1)
        except RunFolderError as error:
            log.warning("%s; step %d is sampled again", error, step + 1)
        if not all(world.gather(found is not None)) or found is None:
            return None
        prompts = together(world, partial(self._parts.prompts.fetch, cursor, len(found.groups)))
        is_same = [group.prompt.uid for group in found.groups] == [prompt.uid for prompt in prompts]
        if uses_rounds(self._parts.objective):  # the scores decide how many there are
            is_whole = found.scores is not None
        else:
            is_whole = len(prompts) == self._schedule.prompts_of(step)
        is_exact = found.scores is not None or found.facts[EXACT]  # functions would be given other objects
        if not (is_same and is_whole and is_exact and int(found.facts["weights_step"]) <= self._first_sampled):
            return None
        pairs = zip(found.groups, prompts, strict=True)
        return replace(
            found, groups=[replace(one, prompt=replace(one.prompt, columns=row.columns)) for one, row in pairs]
        )

    def _take_random_state(self, stored: StoredRollout) -> None:
        """Set the random generators, which user functions may use, to where the rollout has left them, or to where its
        scoring begins. A scored rollout that was pending when the checkpoint was written is older than the checkpoint's
        generators, which stay."""
        states, weights_step = stored.facts["random"], int(stored.facts["weights_step"])
        state = json.loads(states[self._parts.world.rank % len(states)])
        in_background = stored.facts["in_background"]
        is_older = stored.scores is not None and in_background and weights_step < self._first_step
        if state is not None and not is_older:
            set_random_state(state, torch_too=not in_background)

    # Sampling -------------------------------------------------------------------------------------------------------

    def _begin(self, step: int, weights_step: int, cursor: DataCursor) -> PendingRollout:
        """The rollout of a step, from the journal or with the policy's present weights.

        Args:
            step: the step that trains on it, from 0.
            weights_step: complete steps.
            cursor: position of its prompts in the data.

        Raises:
            ConfigError: with a lag, the engine has no weights of its own.
        """
        parts, lag, drawn = self._parts, self._parts.config.rollout.lag, None
        if (stored := self._read(step, cursor)) is not None:
            facts, weights_step = stored.facts, int(stored.facts["weights_step"])
            self._take_random_state(stored)
            if stored.scores is not None:
                rollout = Rollout(list(stored.groups), stored.scores, tuple(facts["is_used"]), int(facts["rounds"]))
                sampled = Sampled(rollout, facts["seconds"], facts["metrics"])
                return PendingRollout.complete(step, weights_step, sampled, in_background=facts["in_background"])
            drawn = Drawn(stored.groups, facts["seconds"], facts["metrics"])
        else:
            self._first_sampled = min(self._first_sampled, step)
            update_engine(parts.engine, parts.policy, parts.layout)
        work = partial(self._sample, step, cursor, drawn)
        if not lag:
            return PendingRollout(step, weights_step, work, parts.world, parts.wants_stop)
        if drawn is None and reads_trained(parts.engine):
            raise ConfigError(
                f"rollout.lag is {lag}, and the engine samples with the weights that are trained meanwhile: make it "
                "with local_engine(..., ahead=True), or set rollout.lag to 0"
            )
        # Exchanges of the background must not come between those of the training, nor between those of another rollout.
        number = step % lag
        if number not in self._worlds:
            self._worlds[number] = parts.world.beside()
        one = PendingRollout(step, weights_step, work, self._worlds[number], parts.wants_stop)
        return one.begin(self.pending, parts.policy.device)

    def _sample(self, step: int, cursor: DataCursor, drawn: Drawn | None, pending: PendingRollout) -> Sampled:
        """Sample and score a step's groups: each rank its share of the prompts, and all get all groups and scores.

        The engine computes each prompt once for its group. Async reward functions and those in workers start as soon as
        a completion ends. With dynamic sampling, new prompts replace groups whose rewards are all equal, for at most
        ``max_rounds`` rounds; otherwise there is one round.

        Args:
            step: the step, from 0.
            cursor: position of its prompts in the data.
            drawn: the completions, if only their scores are missing.
            pending: this rollout.
        """
        parts, world, clock = self._parts, pending.world, PhaseClock()
        size, sampling = parts.config.rollout.num_generations, Sampling.of(parts.config.rollout)
        key = RNGKey(parts.config.run.seed, step)  # and draws depend on the prompt's uid
        sampler = parts.sampler.on(world) if isinstance(parts.sampler, DividedSampler) else parts.sampler
        target, state = self._schedule.prompts_of(step), trainer_state(self._schedule, step, cursor)
        rollout, metrics = None, drawn.metrics if drawn else None
        clock.seconds |= drawn.seconds if drawn else {}
        while rollout is None or another_round(rollout, target, parts.objective):
            used, sampled = (sum(rollout.is_used_P), len(rollout.sampled)) if rollout else (0, 0)
            prompts = together(world, partial(parts.prompts.fetch, cursor, target - used, skip=sampled))
            with parts.rewards.begin(prompts, size, state, world, pending.cancelled) as scoring:
                on_completion, on_prompt = scoring.on_completion, scoring.on_prompt
                if drawn:
                    groups = tell_drawn(drawn.groups, on_completion, on_prompt)
                else:
                    with clock("generate", scoring.progress):
                        watch = Watch(on_completion=on_completion, on_prompt=on_prompt, cancelled=pending.cancelled)
                        groups = sampler.generate(prompts, size, sampling, key, watch)
                pending.check_wanted()
                if not uses_rounds(parts.objective):
                    metrics = sampler.metrics() if metrics is None else metrics
                    pending.free_engine(Drawn(groups, dict(clock.seconds), metrics))
                pending.wait_for_previous()
                pending.random = random_state()
                with clock("reward"):
                    scored = Rollout.of(groups, scoring.finish(groups), parts.objective)
            rollout = scored if rollout is None else rollout + scored
        rollout.check_drawn()
        pending.random = random_state()
        return Sampled(rollout, clock.seconds, sampler.metrics() if metrics is None else metrics)


def tell_drawn(
    groups: Sequence[Group],
    on_completion: Callable[[int, int, Completion], None],
    on_prompt: Callable[[int, Prompt], None],
) -> Sequence[Group]:
    """Tell of completions as a sampler does that draws them. Returns them."""
    for p, group in enumerate(groups):
        on_prompt(p, group.prompt)
        for g, completion in enumerate(group.completions):
            on_completion(p, g, completion)
    return groups


def another_round(rollout: Rollout, target: int, objective: Objective) -> bool:
    """Whether dynamic sampling wants another round."""
    rule = objective.group_filter
    return isinstance(rule, DynamicSampling) and sum(rollout.is_used_P) < target and rollout.rounds < rule.max_rounds


def trainer_state(schedule: Schedule, step: int, cursor: DataCursor) -> TrainerState:
    """The progress of the run, for reward functions."""
    epoch = cursor.position / schedule.num_prompts if schedule.num_prompts else math.nan
    return TrainerState(step, schedule.steps, epoch)


@functools.cache
def _stream(device: torch.device) -> Any:
    """One for all rollouts: torch keeps freed memory for the stream that it was allocated on."""
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def _in_thread(device: torch.device, threads: int, copied: Any) -> Iterator[None]:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if copied is None:
        yield
        return
    stream = _stream(device)
    stream.wait_event(copied)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def _beside_training(device: torch.device) -> AbstractContextManager[None]:
    """Where a thread computes beside the training: with as many threads as the main thread and, with CUDA, on a stream
    of its own with priority, or each token would wait for all that training has queued. What the main thread has queued
    until now, which is the copy of the weights, comes first."""
    copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return _in_thread(device, torch.get_num_threads(), copied)
