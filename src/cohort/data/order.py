"""The order of prompts: one endless stream. What stands at a place follows from the place and the seed alone; and from
what was measured, where the order follows that."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from cohort.config import DataConfig
from cohort.data.load import Data
from cohort.data.mixture import Turns
from cohort.data.prompts import PromptSet
from cohort.errors import DataError
from cohort.types import Prompt

MEASURED = "measured"


@dataclass(slots=True)
class Reached:
    """How far streamed data has been read for the prompts of a run."""

    rows: list[int]
    """Of each lane."""
    dropped: int = 0
    """Rows that were too long."""
    truncated: int = 0
    """Prompts that were cut."""


@dataclass(slots=True)
class Place:
    """Where a run stands in its data after its last whole step. Part of a checkpoint."""

    taken: int = 0
    """Places of the stream that the steps have used: one per prompt."""
    reached: Reached | None = None
    """How far data has been read that is read while the run goes on."""
    rewards: np.ndarray | None = None
    """The newest mean reward of each prompt, NaN where none was measured. None where no order follows it."""
    passes: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """Of each lane: its newest pass that has begun, and the order of that, where it follows what was measured."""

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes."""
        return {name: getattr(self, name) for name in ("taken", "reached", "rewards", "passes")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        for name in ("taken", "reached", "rewards", "passes"):
            setattr(self, name, state[name])


class Stream(Protocol):
    """What the loop takes its prompts from."""

    place: Place

    @property
    def epoch_length(self) -> int | None:
        """Prompts of an epoch; None where that is not known."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, as far as that is known."""

    @property
    def fingerprint(self) -> str:
        """A hash of the prompts."""

    def take(self, start: int, count: int) -> list[Prompt]:
        """``count`` prompts from the place ``start`` on. A prompt's uid is its place, so no two groups of a run share
        one; the next place is that after the last prompt's."""

    def advance(self, taken: int, rewards: Mapping[int, float]) -> dict[str, int]:
        """A step is whole. Returns what its metrics say of the data.

        Args:
            taken: the next place.
            rewards: the mean rewards of the groups, by their uids.
        """

    def describe(self) -> list[str]:
        """The data in words: sources, lengths, order."""


class PromptStream:
    """Pass after pass over a data set.

    The prompts form one lane, or one per source of a weighted mixture; a lane is passed over again and again, each row
    once per pass. A step may span the end of one pass and the start of the next.

    Args:
        prompts: the data set.
        seed: decides the orders.
        config: the order; None: shuffled.
    """

    def __init__(self, prompts: PromptSet, *, seed: int, config: DataConfig | None = None) -> None:
        self.prompts = prompts
        self._seed = seed
        self._rule = config.order if config else "shuffled"
        self._curriculum = (config.curriculum if config else None) or ""
        weights = prompts.data.weights
        self._lanes = prompts.ranges() if weights else [range(len(prompts))]
        self._turns = Turns(weights) if weights else None
        check_weighted(prompts)
        self.place = Place()
        self._values: np.ndarray | None = None
        if self._curriculum == MEASURED:
            self.place.rewards = np.full(len(prompts), np.nan)
        elif self._curriculum:
            self._values = curriculum_values(prompts.data, self._curriculum)[prompts.places]
        self._order: Callable[[int, int], np.ndarray] = lru_cache(maxsize=2 * len(self._lanes))(self._fixed_order)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def epoch_length(self) -> int:
        """Prompts until every row has been used at least once; without weights that is once."""
        return self._turns.epoch_length([len(lane) for lane in self._lanes]) if self._turns else len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self.prompts.longest

    @property
    def fingerprint(self) -> str:
        """A hash of the prompts, and of the column that orders them."""
        if self._values is None:
            return self.prompts.fingerprint
        return hashlib.sha256(self.prompts.fingerprint.encode() + self._values.tobytes()).hexdigest()

    def take(self, start: int, count: int) -> list[Prompt]:
        """The prompts at places ``start .. start + count - 1``. Their uids are their places."""
        return [self.prompts.prompt(self.index(place), uid=place) for place in range(start, start + count)]

    def index(self, place: int) -> int:
        """Which of the prompts stands at a place."""
        lane, turn = self._turns.at(place) if self._turns else (0, place)
        epoch, within = divmod(turn, len(self._lanes[lane]))
        follows = epoch > 0 and self._curriculum == MEASURED
        order = self._measured_order(lane, epoch) if follows else self._order(lane, epoch)
        return int(order[within])

    def advance(self, taken: int, rewards: Mapping[int, float]) -> dict[str, int]:
        """A step is whole: passes that began in it keep the order they had, and what was measured is noted."""
        place = self.place
        if place.rewards is not None:
            measured = {self.index(uid): reward for uid, reward in rewards.items() if not np.isnan(reward)}
            begun = dict(map(self._lane_and_epoch, range(place.taken, taken)))
            for lane, epoch in begun.items():
                if epoch > 0:
                    place.passes[lane] = epoch, self._measured_order(lane, epoch)
            place.rewards[list(measured)] = list(measured.values())
        place.taken = taken
        return {}

    def describe(self) -> list[str]:
        """The data in words: sources, lengths, order."""
        order = {
            "shuffled": "a new order for each epoch",
            "sequential": "as the data is",
            "curriculum": f"by {self._curriculum}, of equal ones a new order for each epoch",
        }[self._rule]
        if self._curriculum == MEASURED:
            order = "the first epoch shuffled, each later one from the highest mean reward measured to the lowest"
        return [*describe_prompts(self.prompts), f"order: {order}"]

    def _lane_and_epoch(self, place: int) -> tuple[int, int]:
        lane, turn = self._turns.at(place) if self._turns else (0, place)
        return lane, turn // len(self._lanes[lane])

    def _fixed_order(self, lane: int, epoch: int) -> np.ndarray:
        """The order of a pass that follows nothing measured."""
        prompts = np.asarray(self._lanes[lane])
        if self._rule == "sequential":
            return prompts
        shuffled = prompts[pass_order(len(prompts), self._seed, epoch, lane)]
        return shuffled if self._values is None else _sorted(shuffled, self._values[shuffled])

    def _measured_order(self, lane: int, epoch: int) -> np.ndarray:
        """A pass that has begun keeps its order; one that begins follows what whole steps have measured."""
        assert self.place.rewards is not None
        if self.place.passes.get(lane, (0, None))[0] == epoch:
            return self.place.passes[lane][1]
        shuffled = self._order(lane, epoch)
        return _sorted(shuffled, -self.place.rewards[shuffled])


def pass_order(num_rows: int, seed: int, epoch: int, lane: int = 0) -> np.ndarray:
    """The order of rows in one shuffled pass.

    >>> sorted(pass_order(5, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """
    return pass_generator(seed, epoch, lane).permutation(num_rows)


def pass_generator(seed: int, epoch: int, lane: int) -> np.random.Generator:
    """The random numbers of one pass."""
    return np.random.Generator(np.random.Philox(key=[seed + (lane << 32), epoch]))


def curriculum_values(data: Data, curriculum: str) -> np.ndarray:
    """What a curriculum by a column sorts the rows by, smallest first.

    Raises:
        DataError: a row has no number there.
    """
    sign = -1.0 if curriculum.startswith("-") else 1.0
    return sign * data.numbers(curriculum.removeprefix("-"))


def check_weighted(prompts: PromptSet) -> None:
    """Whether every source with a weight has prompts; of streams, among the rows that were looked at.

    Raises:
        DataError: the limit of length has left none of a source.
    """
    if prompts.data.weights:
        for part, own in zip(prompts.data.parts, prompts.ranges(), strict=True):
            if not own:
                seen = f" of the first {len(part.rows):,} rows" if prompts.data.streams else ""
                raise DataError(
                    f"{part.where}: data.overlong_prompts has dropped every prompt{seen}, and it has a weight"
                )


def describe_prompts(prompts: PromptSet) -> list[str]:
    """The sources and the lengths in words."""
    return [*describe_sources(prompts), f"prompts: {len(prompts):,}; {prompts.describe_lengths()}"]


def describe_sources(prompts: PromptSet) -> list[str]:
    """The sources in words, with their shares where they have weights."""
    data = prompts.data
    if len(data.parts) == 1:
        return [f"data: {data.parts[0].said}"]
    weights = data.weights
    shares = [f", {float(weight / sum(weights)):.1%} of the prompts" for weight in weights] if weights else None
    how = "taking turns by their weights" if weights else "one after another, every row once per epoch"
    said = [part.said if part.said.startswith(part.name) else f"{part.name}: {part.said}" for part in data.parts]
    lines = [f"  {words}{shares[number] if shares else ''}" for number, words in enumerate(said)]
    return [f"data: {len(data.parts)} sources, {how}", *lines]


def _sorted(prompts: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """By their keys, smallest first and NaN last; of equal keys in the order they are in."""
    return prompts[np.argsort(keys, kind="stable")]
