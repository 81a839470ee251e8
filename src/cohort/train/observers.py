"""What watches a run: one protocol for trackers, callbacks of the user and the TRL face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

from cohort.errors import RunFolderError
from cohort.evaluation import Evaluation
from cohort.parallel import World
from cohort.train.layout import Rollout
from cohort.train.state import State
from cohort.types import TokenBatch


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an observer asks of the run. What is asked on one rank is done on all."""

    evaluate: bool = False
    """Evaluate after the step whose updates are made."""
    save: bool = False
    """Write a checkpoint after the step."""
    stop: bool = False
    """End the run after the step, with a checkpoint."""

    def __or__(self, other: Wishes) -> Wishes:
        return Wishes(*(getattr(self, one.name) or getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True, slots=True)
class CompleteStep:
    """A step whose metrics and completions are written, and whose due evaluation and checkpoint are made."""

    state: State
    metrics: dict[str, Any]
    """The line of ``metrics.jsonl``."""
    updates: list[dict[str, Any]]
    """Metrics of each update, in order."""


class Observer:
    """Watches a run on every rank. ``GRPOTrainer.steps(observers=...)`` takes objects with these methods; these do
    nothing. Every rank calls each of them at the same place, in the order of the observers."""

    evaluates_last = True
    """Whether the run evaluates after its last step although nothing asks for it."""
    initial_can_be_best = True
    """Whether the initial model, which is evaluated before the first step, can be the best one."""

    def rollout_scored(self, step: int, rollout: Rollout, batch: TokenBatch) -> None:
        """A step's rollout is scored; its updates follow. ``step`` counts from 1; ``batch`` has the advantages. A run
        that goes on from before the step tells of it again."""

    def updated(self, metrics: Mapping[str, Any]) -> Wishes:  # noqa: ARG002 - of subclasses
        """A step's updates are made; a due evaluation and checkpoint follow. A run that was stopped in this evaluation
        and resumed tells of the step again.

        Args:
            metrics: the step's, without those of its evaluation.
        """
        return Wishes()

    def evaluated(self, step: int, evaluations: Mapping[str, Evaluation], metrics: Mapping[str, Any]) -> None:
        """An evaluation ended. Whether its model is the best is not known yet.

        Args:
            step: complete steps; 0 for the evaluation before the first.
            evaluations: the evaluation of each set, "" if there is one.
            metrics: theirs, ``eval/...``.
        """

    def stepped(self, step: CompleteStep) -> Wishes:  # noqa: ARG002
        """A step is complete."""
        return Wishes()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold, in types of JSON. Rank 0's is written."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` gave to the checkpoint that the run goes on from; empty if it gave nothing.

        Raises:
            RunFolderError: the state is that of another observer.
        """


@dataclass(frozen=True, slots=True)
class Observers:
    """All observers of a run, as one."""

    each: Sequence[Observer] = ()
    world: World = field(default_factory=World)

    @property
    def evaluates_last(self) -> bool:
        """See ``Observer``."""
        return all(one.evaluates_last for one in self.each)

    @property
    def initial_can_be_best(self) -> bool:
        """See ``Observer``."""
        return all(one.initial_can_be_best for one in self.each)

    def tell(self, name: str, *about: Any) -> Wishes:
        """Call a method of all. Returns the wishes of all, on all ranks."""
        wishes = [getattr(one, name)(*about) for one in self.each]
        asked = self.world.gather(wishes) if any(wishes) else []
        return reduce(or_, filter(None, chain.from_iterable(asked)), Wishes())

    def state_dict(self) -> dict[str, Any]:
        """The state of those that have one: there is one such observer at most."""
        return {name: value for one in self.each for name, value in one.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Observer``.

        Raises:
            RunFolderError: the run was watched by an observer with a state, and none of these has one; or one of them
                expects another state.
        """
        if state and not any(type(one).state_dict is not Observer.state_dict for one in self.each):
            raise RunFolderError(
                "the run was begun with cohort.trl: continue it with the script or command that began it"
            )
        for one in self.each:
            one.load_state_dict(state)
