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
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch

from cohort.calls import interruptible
from cohort.config import Schedule
from cohort.data import DataCursor
from cohort.errors import ConfigError, RunFolderError
from cohort.objective import Objective
from cohort.parallel import World, on_main, together
from cohort.policy.device import Generators, generators
from cohort.presets.parts import DynamicSampling
from cohort.rewards import TrainerState
from cohort.rewards.runner import Scoring
from cohort.rollout import DividedSampler, RNGKey, Watch
from cohort.runs.checkpoints import random_state, set_random_state
from cohort.runs.folder import RunFolder
from cohort.runs.journal import EXACT, StoredRollout
from cohort.train.context import PhaseClock
from cohort.train.layout import Rollout, uses_rounds
from cohort.train.parts import TrainerParts
from cohort.train.ranks import reads_trained, update_engine
from cohort.train.state import State
from cohort.types import Group

log = logging.getLogger("cohort.train")
ABANDON_SECONDS = 10.0
"""Seconds to wait for an abandoned rollout."""


@dataclass(frozen=True, slots=True)
class StepRollout:
    """The rollout of a step, complete."""

    rollout: Rollout
    weights_step: int
    """Complete steps when it was begun, which determine the weights that drew it."""
    cursor: DataCursor
    """Where the data goes on after it."""
    metrics: dict[str, float]
    """Of the sampler and the data. Of what was sampled beside the training, also its lag, its seconds, and how many of
    them were not waited for."""


@dataclass(eq=False, slots=True)
class PendingRollout:
    """The rollout of a step: complete, being sampled and scored in a thread, or to be sampled when it is waited for."""

    step: int
    """The step that trains on it."""
    weights_step: int
    """Complete steps when it begins, which determine the weights that sample it."""
    work: Callable[[PendingRollout], Rollout]
    """Samples and scores. Called with this object, which it tells when the engine is free."""
    world: World
    """The ranks that share the work, for exchanges of this rollout alone."""
    wants_stop: Callable[[], bool]
    """Whether the run is to stop."""
    place: tuple[DataCursor, Mapping[str, int]] | None = None
    """Where the data goes on after it, and what it has read, once that is known."""
    drawn: Sequence[Group] | None = None
    """All completions of a rollout of one round, once they are drawn."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds so far, by phase."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the sampler, once everything is drawn."""
    in_background: bool = False
    """Whether it was sampled beside the training."""
    generators: Generators | None = None
    """The random generators before it was scored, or when it was complete. None: its scoring has not begun."""
    is_journaled: bool = False
    unwanted: Literal["nothing", "scores", "all"] = "nothing"
    """What nobody waits for any more."""
    outcome: Future[Rollout] = field(default_factory=Future)
    """Cancelled also when it is left behind."""
    _engine_is_free: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    """Where it is sampled, until it is left behind."""
    _previous: PendingRollout | None = None

    def begin(self, previous: PendingRollout | None, device: torch.device) -> PendingRollout:
        """Start in a thread, on the engine's device. The previous rollout is scored before it."""
        self.in_background, self._previous = True, previous
        place, name = _beside_training(device), f"rollout-{self.step}"
        self._thread = threading.Thread(target=self.run, args=(place,), name=name, daemon=True)
        self._thread.start()
        return self

    def run(self, place: AbstractContextManager[None] | None = None) -> None:
        """Do the work, inside ``place``. ``wait`` raises what it raises."""
        try:
            with place or nullcontext():
                rollout = self.work(self)
            with suppress(InvalidStateError):  # it was left behind
                self.outcome.set_result(rollout)
        except CancelledError:
            self.outcome.cancel()
        except BaseException as error:
            with suppress(InvalidStateError):
                self.outcome.set_exception(error)
        finally:
            self._engine_is_free.set()

    def complete(self, rollout: Rollout, *, in_background: bool) -> None:
        """It is in the journal, complete."""
        self.in_background, self.is_journaled = in_background, True
        self.outcome.set_result(rollout)
        self._engine_is_free.set()

    def cancelled(self) -> bool:
        """Whether it is to end now. A stop cancels the scoring of what is sampled beside the training, and
        not the sampling, which cannot be repeated: the weights will have changed."""
        if not self.in_background:
            return self.wants_stop()
        return self.unwanted == "all" or (self._is_sampled and (self.unwanted == "scores" or self.wants_stop()))

    def wait(self) -> Rollout:
        """The rollout, sampled now if it was not begun. Raises what sampling or scoring raised."""
        if self._thread is None and not self.outcome.done():
            self.run()
        self.wait_until_ended()
        return self.outcome.result()

    @property
    def _is_complete(self) -> bool:
        return self.outcome.done() and not self.outcome.cancelled() and self.outcome.exception() is None

    @property
    def _is_sampled(self) -> bool:
        return self.drawn is not None or self._is_complete

    def wait_until_ended(self) -> bool:
        """Wait until it is complete, has failed or was cancelled; returns whether it is complete. When the run is to
        stop and its time is half over, a function of the user that does not return is left behind."""
        try:
            with interruptible(), suppress(CancelledError):
                self.outcome.exception()
            if (thread := self._thread) is not None:
                thread.join()  # a thread that outlives the run aborts the interpreter's exit
        except CancelledError:
            self._leave()
        return self._is_complete

    def wait_for_engine(self) -> bool:
        """Wait until the engine is free; returns whether everything is sampled."""
        self._engine_is_free.wait()
        return self._is_sampled

    def join(self) -> None:
        """Wait until it has ended, as it is unwanted; if only its scores are, until everything is sampled. A function
        of the user that runs in this process and takes more than ``ABANDON_SECONDS`` is left behind."""
        if self._thread is not None:
            if self.unwanted == "scores":
                self._engine_is_free.wait()
            self._thread.join(ABANDON_SECONDS)
            if self._thread.is_alive():
                self._leave()

    def _leave(self) -> None:
        log.warning("the rollout of step %d goes on: its sampling or a function in it does not end", self.step)
        self._thread = None
        self.outcome.cancel()

    def to_store(self) -> StoredRollout | None:
        """What the journal can hold of it: all of it, or all completions without their scores; None: too little. The
        data's columns are left out: ``RolloutSource`` adds them again."""
        if not self.outcome.done() or not self._is_sampled:
            return None
        rollout = self.outcome.result() if self._is_complete else None
        facts: dict[str, Any] = {"weights_step": self.weights_step, "in_background": self.in_background}
        facts |= {"seconds": self.seconds, "metrics": self.metrics}
        if rollout is not None:
            facts |= {"rounds": rollout.rounds, "is_used": rollout.is_used_P}
        groups = rollout.sampled if rollout else self.drawn or ()
        bare = [replace(group, prompt=replace(group.prompt, columns={})) for group in groups]
        return StoredRollout(bare, rollout.sampled_scores if rollout else None, facts)

    # For the work ---------------------------------------------------------------------------------------------------

    def free_engine(self, drawn: Sequence[Group]) -> None:
        """Everything is drawn: the engine may take other weights and begin the next rollout."""
        self.drawn = drawn
        self._engine_is_free.set()

    def wait_for_previous(self) -> None:
        """Wait until the previous rollout is scored: functions are called in the order of the rollouts.

        Raises:
            CancelledError: the previous one was cancelled, so this one is not to be scored.
        """
        if self._previous is not None:
            self._previous.wait_until_ended()
            if self._previous.outcome.cancelled():
                raise CancelledError
            self._previous = None


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
        self._worlds = [parts.world.beside() for _ in range(parts.config.rollout.lag)] or [parts.world]
        """The ranks, for exchanges of pending rollouts: those of the background must not come between those of the
        training, nor of another rollout."""
        self._first_step = state.complete_steps
        self._readable = set(on_main(parts.world, folder.journal_steps))
        self._first_sampled = math.inf
        """The first step that this process has sampled: what later weights have drawn is outdated."""
        step, lag = state.complete_steps + 1, parts.config.rollout.lag
        if lag and 1 < step <= schedule.steps and step not in self._readable:
            log.warning(
                "the journal lacks the rollout of step %d. Earlier weights drew it (rollout.lag) and are gone: the "
                "present weights draw it again",
                step,
            )

    def next(self, state: State, clock: PhaseClock) -> StepRollout:
        """The rollout of the next step, complete and in the journal. ``clock`` gets the seconds: of waiting, as phase
        ``rollout_wait``, or of the phases of a rollout that is sampled now.

        With a lag, step t trains on what the weights after step t - 1 - lag have drawn, and the first steps on what the
        initial weights have.
        """
        step, lag, pending = state.complete_steps + 1, self._parts.config.rollout.lag, self.pending
        start = time.perf_counter()
        if not pending:
            pending.append(self._begin(step, state.complete_steps, state.cursor))
        one = pending[0]
        rollout, metrics = one.wait(), dict(one.metrics)
        if one.in_background:
            clock.seconds["rollout_wait"] = waited = time.perf_counter() - start
            metrics |= {f"seconds/{phase}": seconds for phase, seconds in one.seconds.items()}
            metrics |= {"rollout/lag": step - 1 - one.weights_step}
            metrics |= {"seconds/rollout_hidden": max(0.0, sum(one.seconds.values()) - waited)}
        else:
            clock.seconds |= one.seconds
        self._cursor_after([one], state.cursor)
        while len(pending) <= min(lag, self._schedule.steps - step):
            if (cursor := self._cursor_after(pending, state.cursor)) is None:
                break  # a pending rollout has failed: its error is raised when its step comes
            pending.append(self._begin(step + len(pending), state.complete_steps, cursor))
        self._journal(pending.popleft())
        assert one.place is not None
        after, read = one.place
        return StepRollout(rollout, one.weights_step, after, {**metrics, **read})

    def _cursor_after(self, rollouts: Sequence[PendingRollout], cursor: DataCursor) -> DataCursor | None:
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
                    if one.outcome.cancelled():
                        raise CancelledError
                    return None
                used, rewards = self._schedule.prompts_of(one.step - 1), dict[int, float]()
                if depends:
                    used, rewards = len(one.wait().sampled), one.wait().mean_rewards
                one.place = self._parts.prompts.advance(cursor, used, rewards)
            cursor = one.place[0]
        return cursor

    def wait(self) -> None:
        """Wait until the engine and the reward functions are idle. A pending rollout's error is raised when its step
        comes."""
        for one in self.pending:
            one.wait_until_ended()

    def end(self, unwanted: Literal["scores", "all"]) -> None:
        """End the pending rollouts. Without their scores, once everything is drawn: no later weights could draw it."""
        for one in self.pending:
            one.unwanted = unwanted
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
        random = one.generators and random_state(one.generators)
        facts = {**stored.facts, "random": world.gather(json.dumps(random))}
        on_main(world, lambda: self._folder.write_journal(one.step, replace(stored, facts=facts)))
        one.is_journaled = True
        return True

    def _read(self, step: int, cursor: DataCursor) -> StoredRollout | None:
        """What the journal holds of a step; None: nothing, or something that one of the ranks cannot read. Its prompts
        have the columns of the data: files do not hold every object."""
        if step not in self._readable:
            return None
        found, world = None, self._parts.world
        try:
            found = self._folder.read_journal(step)
        except RunFolderError as error:
            log.warning("%s; step %d is sampled again", error, step)
        if not all(world.gather(found is not None)) or found is None:
            return None
        prompts = together(world, partial(self._parts.prompts.fetch, cursor, len(found.groups)))
        is_same = [group.prompt.uid for group in found.groups] == [prompt.uid for prompt in prompts]
        if uses_rounds(self._parts.objective):  # the scores decide how many there are
            is_whole = found.scores is not None
        else:
            is_whole = len(prompts) == self._schedule.prompts_of(step - 1)
        is_exact = found.scores is not None or found.facts[EXACT]  # functions would be given other objects
        if not (is_same and is_whole and is_exact and int(found.facts["weights_step"]) < self._first_sampled):
            return None
        pairs = zip(found.groups, prompts, strict=True)
        return replace(
            found, groups=[replace(one, prompt=replace(one.prompt, columns=row.columns)) for one, row in pairs]
        )

    def _take_random_state(self, stored: StoredRollout) -> Generators | None:
        """Set the random generators, which user functions may use, to where the rollout has left them, or to where its
        scoring begins; returns their states. A scored rollout that was pending when the checkpoint was written is older
        than the checkpoint's generators, which stay. So they do if its scoring has not begun."""
        states, weights_step = stored.facts["random"], int(stored.facts["weights_step"])
        state = json.loads(states[self._parts.world.rank % len(states)])
        in_background = stored.facts["in_background"]
        is_older = stored.scores is not None and in_background and weights_step < self._first_step
        if state is None or is_older:
            return None
        set_random_state(state, torch_too=not in_background)
        return generators()

    # Sampling -------------------------------------------------------------------------------------------------------

    def _begin(self, step: int, weights_step: int, cursor: DataCursor) -> PendingRollout:
        """The rollout of a step, from the journal or with the policy's present weights.

        Args:
            step: the step that trains on it.
            weights_step: complete steps.
            cursor: position of its prompts in the data.

        Raises:
            ConfigError: with a lag, the engine has no weights of its own.
        """
        parts, lag, world = self._parts, self._parts.config.rollout.lag, self._worlds[step % len(self._worlds)]
        one = PendingRollout(step, weights_step, partial(self._sample, cursor), world, parts.wants_stop)
        if (stored := self._read(step, cursor)) is not None:
            facts = stored.facts
            one.generators = self._take_random_state(stored)
            one.weights_step, one.seconds, one.metrics = int(facts["weights_step"]), facts["seconds"], facts["metrics"]
            if stored.scores is not None:
                rollout = Rollout(list(stored.groups), stored.scores, tuple(facts["is_used"]), int(facts["rounds"]))
                one.complete(rollout, in_background=facts["in_background"])
                return one
            one.drawn = stored.groups
        else:
            self._first_sampled = min(self._first_sampled, step)
            update_engine(parts.engine, parts.policy, parts.layout)
        if not lag:
            return one
        if stored is None and reads_trained(parts.engine):
            raise ConfigError(
                f"rollout.lag is {lag}, and the engine samples with the weights that are trained meanwhile: make it "
                "with local_engine(..., ahead=True), or set rollout.lag to 0"
            )
        return one.begin(self.pending[-1] if self.pending else None, parts.policy.device)

    def _sample(self, cursor: DataCursor, pending: PendingRollout) -> Rollout:
        """Sample and score a step's groups: each rank its share of the prompts, and all get all groups and scores. If
        the completions are drawn, score them.

        The engine computes each prompt once for its group. Async reward functions and those in workers start as soon as
        a completion ends. With dynamic sampling, new prompts replace groups whose rewards are all equal, for at most
        ``max_rounds`` rounds; otherwise there is one round.

        Args:
            cursor: position of its prompts in the data.
            pending: the rollout.
        """
        parts, world, clock, before = self._parts, pending.world, PhaseClock(pending.seconds), pending.step - 1
        size, sampling = parts.config.rollout.num_generations, parts.sampling
        key = RNGKey(parts.config.run.seed, before)  # and draws depend on the prompt's uid
        sampler = parts.sampler.on(world) if isinstance(parts.sampler, DividedSampler) else parts.sampler
        target, state = self._schedule.prompts_of(before), trainer_state(self._schedule, before, cursor)
        rollout, in_rounds = None, uses_rounds(parts.objective)
        while rollout is None or another_round(rollout, target, parts.objective):
            used, sampled = (sum(rollout.is_used_P), len(rollout.sampled)) if rollout else (0, 0)
            prompts = together(world, partial(parts.prompts.fetch, cursor, target - used, skip=sampled))
            with parts.rewards.begin(prompts, size, state, world, pending.cancelled) as scoring:
                if (groups := pending.drawn) is not None:
                    tell_drawn(groups, scoring)
                else:
                    on_completion, on_prompt = scoring.on_completion, scoring.on_prompt
                    watch = Watch(on_completion=on_completion, on_prompt=on_prompt, cancelled=pending.cancelled)
                    with clock("generate", scoring.progress):
                        groups = sampler.generate(prompts, size, sampling, key, watch)
                if any(world.gather(pending.cancelled())):  # all ranks stop at one place; a completion may be cut
                    raise CancelledError
                if not in_rounds:
                    pending.metrics = sampler.metrics() if pending.drawn is None else pending.metrics
                    pending.free_engine(groups)
                pending.wait_for_previous()
                pending.generators = generators()
                with clock("reward"):
                    scored = Rollout.of(groups, scoring.finish(groups), parts.objective)
            rollout = scored if rollout is None else rollout + scored
        rollout.check_drawn()
        pending.generators = generators()
        if in_rounds:
            pending.metrics = sampler.metrics()
        return rollout


def tell_drawn(groups: Sequence[Group], scoring: Scoring) -> None:
    """Tell of completions as a sampler does that draws them."""
    for p, group in enumerate(groups):
        scoring.on_prompt(p, group.prompt)
        for g, completion in enumerate(group.completions):
            scoring.on_completion(p, g, completion)


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


def _beside_training(device: torch.device) -> AbstractContextManager[None]:
    """Where a thread computes beside the training: with as many threads as the main thread and, with CUDA, on a stream
    of its own with priority, or each token would wait for all that training has queued. What the main thread has queued
    until now, which is the copy of the weights, comes first."""
    threads = torch.get_num_threads()
    copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @contextmanager
    def place() -> Iterator[None]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if copied is None:
            yield
            return
        stream = _stream(device)
        stream.wait_event(copied)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield

    return place()
