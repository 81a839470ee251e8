"""One rank's failure becomes every rank's, before the next exchange would wait for it in vain."""

from __future__ import annotations

import logging
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, TypeVar

from cohort.errors import RankError
from cohort.parallel.world import World, pickled

T = TypeVar("T")
log = logging.getLogger("cohort.parallel")


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as it is told to the other ranks."""

    rank: int
    kind: type[BaseException]
    text: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """The failure of an exception. Its type is the first one among its bases that other processes know and that is
        made from a text."""
        kind = next(kind for kind in type(error).__mro__ if _can_travel(kind))
        where = "" if kind is type(error) else f"{type(error).__name__}: "
        return cls(rank, kind, f"{where}{error}", "".join(traceback.format_exception(error)))

    def error(self, ranks: int) -> BaseException:
        """The exception that every rank raises."""
        error = self.kind(f"rank {self.rank} of {ranks}: {self.text}" if self.text else f"rank {self.rank} of {ranks}")
        error.add_note(f"on rank {self.rank}:\n{self.traceback}")
        return error


def agreed(world: World, function: Callable[[], T]) -> list[T]:
    """Run a function on every rank, and return every rank's result, by rank.

    The function must not exchange anything itself: a rank that fails in it would be missed there.

    Raises:
        BaseException: when the function raised on some rank: on every rank, of the type and with the text of the first
            rank that failed, whose number it names. With one rank, the exception itself.
        RankError: a rank has ended, does not answer, or is at another place, and this rank has not failed itself.
    """
    return _agreed(world, function, function)


def together(world: World, function: Callable[[], T]) -> T:
    """Run a function on every rank, and return this rank's result once every rank has one. Raises as ``agreed``."""
    results: list[T] = []
    _agreed(world, lambda: results.append(function()), function)
    return results[0]


def on_main(world: World, function: Callable[[], T]) -> T:
    """Run a function on rank 0, and return its result on every rank. Raises as ``agreed``."""
    found: T = _agreed(world, function if world.is_main else lambda: None, function)[0]
    return found


def _agreed(world: World, function: Callable[[], Any], named: Callable[[], Any]) -> list[Any]:
    """As ``agreed``. The name of another function says at which place the ranks are."""
    if world.size == 1:
        return [function()]
    place = getattr(named, "__qualname__", type(named).__qualname__)
    cause: BaseException | None = None
    try:
        outcome = pickled((place, function()))
    except RankError:
        raise
    except BaseException as error:
        outcome, cause = pickled((place, Failure.of(world.rank, error))), error
        if not world.is_main and not isinstance(error, CancelledError):  # the console is rank 0's
            log.error("rank %d of %d failed", world.rank, world.size, exc_info=error)
    try:
        outcomes = world.gather_pickled(outcome)
    except RankError:
        if cause is not None:  # the others have ended: this rank's own failure says more
            raise cause from None
        raise
    if len(places := {place for place, _ in outcomes}) > 1:
        raise RankError(f"the ranks are at different places: {', '.join(sorted(places))}")
    results = [outcome for _, outcome in outcomes]
    failure = next((result for result in results if isinstance(result, Failure)), None)
    if failure is not None:
        raise failure.error(world.size) from (cause if failure.rank == world.rank else None)
    return results


def _can_travel(kind: type[BaseException]) -> bool:
    """Whether an exception's type can be pickled and made from a text."""
    try:
        pickle.dumps(kind)
        kind("text")
    except Exception:
        return False
    return kind.__module__ != "__main__"
