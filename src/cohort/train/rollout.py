"""The scored groups of one step: complete, cancelled on the way, or sampled ahead of the training."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from cohort.calls import interruptible
from cohort.data import DataCursor
from cohort.errors import NonFiniteError
from cohort.objective import Objective, live_groups
from cohort.parallel import World
from cohort.presets.parts import DropDead, DynamicSampling
from cohort.rewards.runner import EndedCall, Scores, Scoring
from cohort.runs.rollouts import StoredRollout
from cohort.train.context import PhaseClock
from cohort.train.layout import group_numbers
from cohort.types import Completion, FinishReason, Group, Prompt, TokenBatch


def uses_rounds(objective: Objective) -> bool:
    """Whether a rollout may take several rounds, so that its rewards decide when it is complete."""
    return isinstance(objective.group_filter, DynamicSampling)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Scored groups in the order in which they were sampled."""

    sampled: list[Group]
    """Every group with every completion, including those that no update uses."""
    sampled_scores: Scores
    is_used_P: tuple[bool, ...]
    """Whether the updates use the group's usable completions."""
    rounds: int = 1
    """Calls of the engine: more than one with dynamic sampling."""

    @classmethod
    def of(cls, groups: Sequence[Group], scores: Scores, objective: Objective) -> Rollout:
        """One round. A group is unused when the objective's filter drops it or it has no usable completion."""
        if not isinstance(objective.group_filter, DropDead | DynamicSampling):
            return cls(list(groups), scores, tuple(bool(group.usable.completions) for group in groups))
        one_reward = objective.reward_aggregation == "sum_then_normalize"
        rewards_SK = scores.rewards_S[:, None] if one_reward else scores.by_function_SK
        return cls(list(groups), scores, tuple(live_groups(rewards_SK, group_numbers(groups)).tolist()))

    def __add__(self, other: Rollout) -> Rollout:
        """Concatenate two rounds."""
        scores = self.sampled_scores + other.sampled_scores
        return Rollout(
            self.sampled + other.sampled, scores, self.is_used_P + other.is_used_P, self.rounds + other.rounds
        )

    def check_drawn(self) -> None:
        """Check that there is something to score.

        Raises:
            NonFiniteError: no completion could be drawn.
        """
        if not any(completion.finish_reason.usable for completion in self.completions):
            raise NonFiniteError(
                f"none of the step's {len(self.completions)} completions could be drawn: the model's logits are NaN or "
                "infinite. Look at the run's newest checkpoint or, if there is none, at the initial model"
            )

    @property
    def completions(self) -> list[Completion]:
        """All sampled completions, group after group."""
        return [completion for group in self.sampled for completion in group.completions]

    @property
    def mean_rewards(self) -> dict[int, float]:
        """Mean reward of each group's scored completions, by the prompt's uid; NaN when none was scored."""
        pieces = self.sampled_scores.rewards_S.split([len(group.completions) for group in self.sampled])
        return {group.prompt.uid: float(rewards.nanmean()) for group, rewards in zip(self.sampled, pieces, strict=True)}

    @property
    def num_errors(self) -> int:
        """Number of completions that could not be drawn."""
        return sum(completion.finish_reason is FinishReason.ERROR for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        """Drawn tokens of all sampled completions."""
        return sum(completion.num_tokens for completion in self.completions)

    @property
    def usable_groups(self) -> list[Group]:
        """All groups without their unusable completions. Some may be empty."""
        return [group.usable for group in self.sampled]

    @property
    def used_groups(self) -> list[Group]:
        """The usable groups that the updates use."""
        return [group for group, used in zip(self.usable_groups, self.is_used_P, strict=True) if used]

    @property
    def used_S(self) -> list[int]:
        """Indices of the used completions among all sampled ones."""
        pairs = zip(self.sampled, self.is_used_P, strict=True)
        candidates = [(is_used, completion) for group, is_used in pairs for completion in group.completions]
        return [s for s, (is_used, completion) in enumerate(candidates) if is_used and completion.finish_reason.usable]

    @property
    def used_scores(self) -> Scores:
        """Scores of the used completions."""
        used_S = self.used_S
        if len(used_S) == len(self.completions):
            return self.sampled_scores
        scores = self.sampled_scores.select(used_S)
        if scores.token_rewards_N is None:
            return scores
        pieces = scores.token_rewards_N.split([completion.num_tokens for completion in self.completions])
        return replace(scores, token_rewards_N=torch.cat([pieces[s] for s in used_S]))

    def advantages(self, batch: TokenBatch) -> list[list[float] | None]:
        """For each sampled completion, the advantages of its tokens in ``batch``; None if no update uses it."""
        found: list[list[float] | None] = [None] * len(self.completions)
        for s, tokens in zip(self.used_S, batch.advantages_N.cpu().split(batch.lengths_S.tolist()), strict=True):
            found[s] = tokens.tolist()
        return found


# ----------------------------------------
# A rollout that was cancelled: what is complete of it, so that a resumed run draws and scores only the rest.


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What is complete of a rollout: whole rounds, and of the round after them the completions that have ended."""

    rollout: Rollout | None = None
    """The whole rounds; None: there is none."""
    groups: Sequence[Group] = ()
    """Of the next round, each prompt with its completions that have ended."""
    samples: Sequence[Sequence[int]] = ()
    """Their numbers in their groups."""
    calls: Sequence[EndedCall] = ()
    """The calls of reward functions that have ended."""
    drawn: bool = False
    """Whether every completion of the round has ended."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the sampler."""
    weights_step: int | None = None
    """Complete steps when it began; None: as many as before its own."""
    version: int | None = None
    """Of the weights that sample it."""

    @classmethod
    def of(
        cls,
        rollout: Rollout | None,
        groups: Sequence[Group],
        calls: Sequence[EndedCall],
        metrics: Mapping[str, float],
    ) -> Unfinished:
        """What is complete, of whole rounds and the groups of a cancelled one."""
        samples = [
            [g for g, one in enumerate(group.completions) if one.finish_reason is not FinishReason.CANCELLED]
            for group in groups
        ]
        ended = [
            Group(group.prompt, tuple(group.completions[g] for g in some))
            for group, some in zip(groups, samples, strict=True)
        ]
        drawn = all(len(some) == len(group.completions) for group, some in zip(groups, samples, strict=True))
        return cls(rollout, ended, samples, calls, drawn, metrics)

    @property
    def holds_something(self) -> bool:
        """Whether anything is complete."""
        return self.rollout is not None or any(self.samples)

    @property
    def size(self) -> tuple[int, int, int]:
        """How much is complete: rounds, completions of the next one, and calls."""
        return self.rollout.rounds if self.rollout else 0, sum(map(len, self.samples)), len(self.calls)

    def round_of(self, prompts: Sequence[Prompt], *, apart: bool) -> Unfinished:
        """The cancelled round, if it was of these prompts, and all of it is drawn or the rest may be drawn ``apart``;
        or else a round of which nothing is drawn."""
        same = [group.prompt.uid for group in self.groups] == [prompt.uid for prompt in prompts]
        if same and (apart or self.drawn):
            # The prompts may have objects in their columns that files cannot hold; environments may have added to them.
            fresh = zip(self.groups, prompts, strict=True)
            groups = [replace(g, prompt=replace(g.prompt, columns=p.columns) if g.completions else p) for g, p in fresh]
            return replace(self, groups=groups)
        return Unfinished(None, [Group(prompt, ()) for prompt in prompts], [()] * len(prompts))

    def missing(self, num_generations: int) -> list[list[int]]:
        """The numbers of the completions of each prompt that are to be drawn."""
        return [[g for g in range(num_generations) if g not in some] for some in self.samples]

    def begin(self, scoring: Scoring) -> None:
        """Give a scoring what has ended."""
        scoring.keep(self.calls)
        for p, (group, some) in enumerate(zip(self.groups, self.samples, strict=True)):
            if some:
                scoring.on_prompt(p, group.prompt)
            for g, completion in zip(some, group.completions, strict=True):
                scoring.on_completion(p, g, completion)

    def joined(self, drawn: Sequence[Group]) -> list[Group]:
        """The groups, with the completions that were missing."""
        return [_merged(old, some, new) for old, some, new in zip(self.groups, self.samples, drawn, strict=True)]

    def to_store(self) -> StoredRollout:
        """It, as files hold it."""
        rounds = self.rollout
        facts = {"samples": self.samples, "calls": self.calls, "drawn": self.drawn, "metrics": self.metrics}
        facts |= {"rounds": 0, "is_used": (), "weights_step": self.weights_step, "version": self.version}
        if rounds:
            facts |= {"rounds": rounds.rounds, "is_used": rounds.is_used_P}
        sampled = rounds.sampled if rounds else []
        return StoredRollout([*sampled, *self.groups], rounds.sampled_scores if rounds else None, facts)

    @staticmethod
    def is_stored(stored: StoredRollout) -> bool:
        """Whether files hold such a rollout, and not a complete one."""
        return "samples" in stored.facts

    @classmethod
    def stored(cls, stored: StoredRollout) -> Unfinished:
        """The inverse of ``to_store``."""
        facts, whole = stored.facts, len(stored.facts["is_used"])
        rounds = None
        if stored.scores is not None:
            rounds = Rollout(list(stored.groups[:whole]), stored.scores, facts["is_used"], facts["rounds"])
        members = {name: facts[name] for name in ("samples", "calls", "drawn", "metrics")}
        given = {name: facts.get(name) for name in ("weights_step", "version")}
        members |= {name: None if number is None else int(number) for name, number in given.items()}
        return cls(rounds, stored.groups[whole:], **members)


def _merged(old: Group, samples: Sequence[int], new: Group) -> Group:
    """A group with all completions, in order."""
    ended, drawn = dict(zip(samples, old.completions, strict=True)), iter(new.completions)
    pairs = [
        (old.prompt, ended[g]) if g in ended else (new.prompt, next(drawn))
        for g in range(len(old.completions) + len(new.completions))
    ]
    if not (ended and new.completions) or old.prompt.token_ids == new.prompt.token_ids:
        return Group(old.prompt if ended else new.prompt, tuple(completion for _, completion in pairs))
    return Group.of_starts(old.prompt, pairs)


# ----------------------------------------
# Rollouts that are sampled and scored ahead of the training, beside it: ``rollout.lag``.
#
# A thread for each. The engine works for one at a time: the next one begins when the engine is free again. Rewards of
# two rollouts may be awaited at the same time, but functions are called in the order of the rollouts.


log = logging.getLogger("cohort.train")
ABANDON_SECONDS = 10.0
"""Time for a rollout that is no longer wanted to end."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A scored rollout, with what sampling and scoring it has cost."""

    rollout: Rollout
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the sampler."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the data goes on after a rollout."""

    cursor: DataCursor
    metrics: Mapping[str, int]
    """What the rollout has read."""


class Ahead:
    """The rollout of a step: complete, being sampled and scored in a thread, or to be sampled when it is waited for.

    Args:
        step: the step that trains on it, from 0.
        weights_step: complete steps when it begins, which determine the weights that sample it.
        work: samples and scores. It is given this object, and tells it what it needs no longer.
        world: the ranks that share the work, for exchanges of this rollout alone.
        cancelled: whether nobody waits for it any more. None: somebody always does.
        version: of the weights that sample it.
        redrawable: whether a later process can draw the rest of it. If not, a stop does not cancel its sampling.
    """

    def __init__(
        self,
        step: int,
        weights_step: int,
        work: Callable[[Ahead], Sampled],
        world: World | None = None,
        cancelled: Callable[[], bool] | None = None,
        *,
        version: int = 0,
        redrawable: bool = True,
    ) -> None:
        self.step, self.weights_step, self.world, self.cancelled = step, weights_step, world or World(), cancelled
        self.version = version
        self.place: Place | None = None
        """Where the data goes on after it, once that is known."""
        self.unfinished: Unfinished | None = None
        """What is complete of it, should it be cancelled."""
        self.in_background = False
        """Whether it was sampled beside the training."""
        self._work, self._redrawable = work, redrawable
        self._waited = 0.0
        self._engine_is_free, self._ended, self._abandoned = threading.Event(), threading.Event(), threading.Event()
        self._is_sampled = self._is_left = False
        self._sampled: Sampled | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._previous: Ahead | None = None

    def begin(self, pending: Sequence[Ahead], device: torch.device) -> Ahead:
        """Start in a thread, on the engine's device. The last of ``pending`` is scored before it."""
        stops, self.in_background = self.cancelled, True

        def cancelled() -> bool:
            may_stop = stops is not None and (self._redrawable or self._is_sampled)
            return self._abandoned.is_set() or bool(may_stop and stops and stops())

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
    def is_complete(self) -> bool:
        """Whether it is sampled and scored."""
        return self.has_ended and self._error is None

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
                self._thread.join()  # see StepDisplay.__exit__
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
        self._abandoned.set()

    def join(self) -> None:
        """Wait until it has ended after ``abandon``. A function of the user that runs in this process and takes more
        than ``ABANDON_SECONDS`` is left behind."""
        if self._thread is not None and not self._is_left:
            self._thread.join(ABANDON_SECONDS)
            if self._thread.is_alive():
                self._leave()

    def _leave(self) -> None:
        log.warning("the rollout of step %d goes on: a function in it does not return", self.step + 1)
        self._is_left, self._error = True, self._error or CancelledError()
        self._ended.set()

    # Files ----------------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> Unfinished | None:
        """What there is of it after it was cancelled or failed. None: it is complete or goes on, or nothing is lost by
        sampling it anew."""
        if self._error is None or self.unfinished is None:
            return None
        some = self.in_background or self.unfinished.holds_something  # in the background, with weights of its own
        return replace(self.unfinished, weights_step=self.weights_step, version=self.version) if some else None

    def to_store(self) -> StoredRollout:
        """The complete rollout, as files hold it."""
        sampled = self.wait()
        rollout, facts = sampled.rollout, dict[str, Any](weights_step=self.weights_step, rounds=sampled.rollout.rounds)
        facts |= {"is_used": rollout.is_used_P, "seconds": sampled.seconds, "metrics": sampled.metrics}
        facts["in_background"] = self.in_background
        return StoredRollout(rollout.sampled, rollout.sampled_scores, facts)

    @classmethod
    def stored(cls, step: int, stored: StoredRollout) -> Ahead:
        """The inverse of ``to_store``."""
        facts, scores = stored.facts, stored.scores
        assert scores is not None
        rollout = Rollout(list(stored.groups), scores, facts["is_used"], facts["rounds"])
        one = cls(step, int(facts["weights_step"]), lambda _: Sampled(rollout, facts["seconds"], facts["metrics"]))
        one._run(nullcontext())
        one.in_background = facts.get("in_background", True)
        return one

    # For the work ---------------------------------------------------------------------------------------------------

    def check_wanted(self) -> None:
        """Check that somebody waits for it.

        Raises:
            CancelledError: nobody does; what was sampled may be incomplete.
        """
        if self.cancelled and any(self.world.gather(self.cancelled())):  # all ranks stop at one place
            raise CancelledError

    def free_engine(self) -> None:
        """Say that the engine may take other weights and begin the next rollout."""
        self._is_sampled = True
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
            self._is_sampled = True
        except BaseException as error:  # the main thread raises it
            self._error = error
        finally:
            self._engine_is_free.set()
            self._ended.set()


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
