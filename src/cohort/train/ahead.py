"""Rollouts that are sampled and scored ahead of the training, beside it: ``rollout.lag``.

A thread for each. The engine works for one at a time: the next one begins when the engine is free again. Rewards of two
rollouts may be awaited at the same time, but functions are called in the order of the rollouts.
"""

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
from cohort.parallel import World
from cohort.runs.rollouts import StoredRollout
from cohort.train.clock import PhaseClock
from cohort.train.rollout import Rollout
from cohort.train.unfinished import Unfinished

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
