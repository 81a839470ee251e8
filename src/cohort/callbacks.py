"""Callbacks: objects of the user that a run tells what happens in it.

``GRPOTrainer(callbacks=[...])`` takes objects with any of the methods ``on_start``, ``on_rollout``, ``on_step``,
``on_evaluate``, ``on_save`` and ``on_end``. Each is called as ``method(trainer, event)``, in the order of the list, in
the training thread, on rank 0. The events are the classes of this file; docs/trackers.md has an example.

``trainer.stop()`` and ``trainer.save_now()`` may be called from any method. An exception in a method ends the run with
a checkpoint and a ``CallbackError``. The random generators of Python, NumPy and torch are restored after each call, so
a callback that only looks changes no number of the run. They are not while rollouts are sampled ahead
(``rollout.lag``), because reward functions may draw from them at the same time: then a callback should draw from a
generator of its own.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from cohort.config import GRPOConfig
from cohort.errors import CallbackError, ConfigError, Stopped, did_you_mean
from cohort.evaluation import Evaluation
from cohort.parallel import on_main
from cohort.policy.device import preserved
from cohort.report.diagnosis import Diagnosis, Finding
from cohort.rewards.runner import Scores
from cohort.runs.reader import Run
from cohort.state import kept
from cohort.train.layout import Rollout
from cohort.train.observers import CompleteStep, Observer, Wishes
from cohort.train.source import PendingRollout
from cohort.types import Group, TokenBatch

log = logging.getLogger("cohort.callbacks")


@dataclass(frozen=True, slots=True)
class Start:
    """The run begins, or goes on: the folder is made, and no step of this process has begun."""

    output_dir: Path
    """The run folder."""
    settings: GRPOConfig
    """The settings as resolved."""
    facts: Mapping[str, str]
    """Versions, hashes of the data and of functions, the machine: what ``starts.jsonl`` records."""
    complete_steps: int
    """0, or the steps that a resumed run has made before."""
    steps: int
    """The steps of the whole run."""


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A step's completions are sampled and scored; its updates follow. A run that goes on from
    before this step tells of it again."""

    step: int
    """The step, counted from 1."""
    groups: Sequence[Group]
    """Every sampled group, P of them, with all its completions, S in total."""
    scores: Scores
    """The rewards of the S completions, in the order of ``groups``."""
    advantages: Sequence[Sequence[float] | None]
    """Of each of the S completions, the advantages of its tokens; None if no update uses it."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step is complete: its updates are made, its metrics written, a due evaluation and checkpoint included."""

    step: int
    metrics: Mapping[str, Any]
    """The line of ``metrics.jsonl``."""
    findings: Sequence[Finding]
    """The findings of the diagnosis that begin, worsen or end with this step (see 'cohort docs diagnosis')."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation ended. Its step's ``on_step`` follows."""

    step: int
    """Complete steps; 0 for the evaluation before the first."""
    metrics: Mapping[str, Any]
    """The metrics, ``eval/...``."""
    evaluations: Mapping[str, Evaluation]
    """The evaluation of each set, "" if there is one, with every prompt's numbers and every completion."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A model was written completely. Checkpoints are written in the background, so later steps may have begun."""

    step: int
    path: Path
    """``checkpoints/step-N``, or ``best``. The run may remove it later: ``run.save_total_limit``."""
    is_best: bool
    """Whether it is the best model so far."""


@dataclass(frozen=True, slots=True)
class End:
    """The run ended."""

    outcome: Literal["complete", "stopped", "error"]
    """``stopped``: by a signal, ``trainer.stop()``, Ctrl-C, or a loop that left ``trainer.steps()``."""
    summary: Mapping[str, Any]
    """The summary; of a run that is not complete, as far as it is known."""
    error: BaseException | None = None
    """What ended it; None if it is complete."""


Event: TypeAlias = Start | ScoredRollout | Step | Evaluated | Saved | End
EVENTS: dict[str, type[Event]] = {
    "on_start": Start,
    "on_rollout": ScoredRollout,
    "on_step": Step,
    "on_evaluate": Evaluated,
    "on_save": Saved,
    "on_end": End,
}
"""The methods, and the event that each is given."""
STOPS = (Stopped, CancelledError, KeyboardInterrupt, GeneratorExit)


class Callbacks(Observer):
    """Tells the callbacks of a run what happens in it.

    Args:
        trainer: the run's trainer, which every callback is given.
        callbacks: the callbacks of the user.
        own: those of Cohort, which are called first.

    Raises:
        ConfigError: one has no method of a callback, an unknown one, or one with other parameters.
    """

    def __init__(self, trainer: Any, callbacks: Any, own: Sequence[Any] = ()) -> None:
        if not isinstance(callbacks, list | tuple | None):
            raise ConfigError(f"callbacks: expected a list of objects, got {type(callbacks).__name__}")
        self._of = weakref.ref(trainer)  # no cycle: when a trainer goes, the memory of its model is free
        for callback in callbacks or ():
            check_callback(callback)
        self._callbacks = [*own, *(callbacks or ())]
        self._wanted: frozenset[str] = frozenset()
        """The methods that the callbacks of rank 0 have, on every rank: for others, nothing is made or exchanged."""
        self._pending: Collection[PendingRollout] = ()
        """The run's rollouts of later steps."""
        self._diagnosis = Diagnosis()

    @property
    def _trainer(self) -> Any:
        return self._of()

    def start(self, complete_steps: int, facts: Mapping[str, str], pending: Collection[PendingRollout] = ()) -> None:
        """Call ``on_start``. Every rank must call this method, and those below.

        Args:
            complete_steps: steps that were made before.
            facts: as in ``Start``.
            pending: the run's rollouts of later steps, as they are at any time.
        """
        run, self._pending = self._trainer, pending
        self._wanted = on_main(run.world, lambda: frozenset(name for name in EVENTS if self._with(name)))
        if run.world.is_main and "on_step" in self._wanted:
            self._diagnosis = Diagnosis(run.args.model_dump())
            for metrics in Run(run.folder.path).rows:
                self._diagnosis.step_or_log(metrics)  # of the steps before
        self._tell("on_start", lambda: Start(run.folder.path, run.args, facts, complete_steps, run.schedule.steps))

    def rollout_scored(self, step: int, rollout: Rollout, batch: TokenBatch) -> None:
        """Call ``on_rollout``."""
        self._tell(
            "on_rollout",
            lambda: ScoredRollout(step, rollout.sampled, rollout.sampled_scores, rollout.advantages(batch)),
        )

    def stepped(self, step: CompleteStep) -> Wishes:
        """Call ``on_step``, and ``on_save`` for each model written meanwhile."""
        self._trainer.record(step)
        metrics = step.metrics
        self._tell("on_step", lambda: Step(metrics["step"], metrics, self._diagnosis.step_or_log(metrics)))
        if "on_save" in self._wanted:
            on_main(self._trainer.world, partial(self._tell_saved, self._trainer))
        return Wishes()

    def evaluated(self, step: int, evaluations: Mapping[str, Evaluation], metrics: Mapping[str, Any]) -> None:
        """Call ``on_evaluate``."""
        if step == 0:  # the others are part of their step's metrics
            self._diagnosis.step_or_log({"step": 0, **metrics})
        self._tell("on_evaluate", lambda: Evaluated(step, metrics, evaluations))

    @contextmanager
    def told_of_end(self, trainer: Any) -> Iterator[None]:
        """Call ``on_end`` when the block ends, however it does. Exchanges nothing: other ranks may have failed.

        If the block raises, an exception in a callback is logged, and that of the block is raised. ``trainer``: the
        weak reference to it is dead while the garbage collector ends the steps of a trainer.
        """

        def end(outcome: Literal["complete", "stopped", "error"], error: BaseException | None = None) -> None:
            if trainer.world.is_main:
                try:
                    self._tell_saved(trainer)
                finally:
                    self._call(trainer, "on_end", lambda: End(outcome, trainer.summary, error))

        try:
            yield
        except BaseException as error:
            try:
                end("stopped" if isinstance(error, STOPS) else "error", error)
            except CallbackError as other:
                log.error("%s", other, exc_info=other)
            raise
        end("complete")

    def _tell_saved(self, trainer: Any) -> None:
        folder = trainer.folder
        while folder.saved:
            step, path = folder.saved.popleft()
            self._call(trainer, "on_save", partial(Saved, step, path, path == folder.best))

    def _with(self, name: str) -> list[Any]:
        """The callbacks that have a method."""
        return [callback for callback in self._callbacks if hasattr(callback, name)]

    def _tell(self, name: str, make: Callable[[], Event]) -> None:
        if name in self._wanted:
            on_main(self._trainer.world, lambda: self._call(self._trainer, name, make))

    def _call(self, trainer: Any, name: str, make: Callable[[], Event]) -> None:
        """Make an event if a callback has its method, and call those that have. None is called after one that raised,
        except for the end of the run, which all are told."""
        if not (callbacks := self._with(name)):
            return
        event, failure = make(), None
        for callback in callbacks:
            if failure and name != "on_end":
                break
            try:
                # While reward functions run in the background, what they draw meanwhile would be drawn again.
                draws = not all(one.outcome.done() for one in self._pending)
                with nullcontext() if draws else preserved(), kept(getattr(callback, name)):
                    getattr(callback, name)(trainer, event)
            except Exception as error:
                step = f" of step {event.step}" if hasattr(event, "step") else ""
                what = f"{type(callback).__name__}.{name}{step} raised {type(error).__name__}: {error}"
                failure = failure or CallbackError(f"callback {what}")
                failure.__cause__ = failure.__cause__ or error
        if failure:
            raise failure


def check_callback(callback: Any) -> None:
    """Check an object's methods.

    Raises:
        ConfigError: as ``Callbacks``.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    known = ", ".join(EVENTS)
    if isinstance(callback, type):
        raise ConfigError(f"callbacks: expected objects, got the class {kind.__name__}: pass {kind.__name__}(...)")
    found = [name for name in dir(callback) if name.startswith("on_")]
    if any(base.__module__.partition(".")[0] == "transformers" for base in kind.__mro__):
        raise ConfigError(
            f"callbacks: {kind.__name__} is a callback of transformers, which cohort.trl.GRPOTrainer takes. Here, "
            f"write what it does as the methods {known} of an object (see 'cohort docs trackers')"
        )
    for name in found:
        if name not in EVENTS:
            hint = did_you_mean(name, EVENTS) or f"; the methods are {known}"
            raise ConfigError(f"callbacks: {kind.__name__} has an unknown method {name}{hint}")
        _check_method(kind.__name__, name, getattr(callback, name))
    if not found:
        raise ConfigError(f"callbacks: {kind.__name__} has none of the methods {known}")


def _check_method(owner: str, name: str, method: Any) -> None:
    expected = f"expected {name}(trainer, event), where event is a cohort.callbacks.{EVENTS[name].__name__}"
    if not callable(method):
        raise ConfigError(f"callbacks: {owner}.{name} is not a method, but {method!r:.40}; {expected}")
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        raise ConfigError(
            f"callbacks: {owner}.{name} would not run when it is called; {expected}, without async or yield"
        )
    try:
        signature = inspect.signature(method)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise ConfigError(f"callbacks: {owner}.{name}{signature} does not take two arguments; {expected}") from None
