"""The order of prompts: one endless stream. What stands at a place follows from the place and the seed alone; and from
what was measured, where the order follows that."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from cohort.config import DataConfig
from cohort.data.load import Data
from cohort.data.loader import DataCursor, ReadPosition
from cohort.data.mixture import Turns
from cohort.data.prompts import PromptSet
from cohort.errors import DataError
from cohort.types import Prompt

MEASURED = "measured"


Reached = ReadPosition  # its name in checkpoints of earlier versions


class InMemoryLoader:
    """Epoch after epoch over a data set; see ``PromptLoader``.

    The prompts form one lane, or one lane per source of a weighted mixture. A lane repeats its prompts epoch after
    epoch, each prompt once per epoch. A step may span two epochs.

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
        self._values: np.ndarray | None = None
        if self._curriculum not in ("", MEASURED):
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

    def fetch(self, cursor: DataCursor, count: int, skip: int = 0) -> list[Prompt]:
        """See ``PromptLoader``."""
        start = cursor.position + skip
        return [self.prompts.prompt(self._index(cursor, uid), uid=uid) for uid in range(start, start + count)]

    def advance(
        self, cursor: DataCursor, count: int, rewards: Mapping[int, float]
    ) -> tuple[DataCursor, dict[str, int]]:
        """See ``PromptLoader``."""
        end = cursor.position + count
        if self._curriculum != MEASURED:
            return DataCursor(end), {}
        # The order of a measured epoch is fixed when the epoch begins: later rewards must not change it.
        begun = dict(self._lane_and_turn(position)[:2] for position in range(cursor.position, end))
        orders = {lane: (epoch, self._measured_order(cursor, lane, epoch)) for lane, epoch in begun.items() if epoch}
        latest = np.full(len(self), np.nan) if cursor.rewards is None else cursor.rewards.copy()
        for uid, reward in rewards.items():
            if not np.isnan(reward):
                latest[self._index(cursor, uid)] = reward
        return DataCursor(end, rewards=latest, orders={**cursor.orders, **orders}), {}

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

    def _index(self, cursor: DataCursor, position: int) -> int:
        """Index of the prompt at a position."""
        lane, epoch, within = self._lane_and_turn(position)
        follows = epoch > 0 and self._curriculum == MEASURED
        order = self._measured_order(cursor, lane, epoch) if follows else self._order(lane, epoch)
        return int(order[within])

    def _lane_and_turn(self, position: int) -> tuple[int, int, int]:
        """Lane, epoch of the lane, and index within that epoch."""
        lane, turn = self._turns.at(position) if self._turns else (0, position)
        return lane, *divmod(turn, len(self._lanes[lane]))

    def _fixed_order(self, lane: int, epoch: int) -> np.ndarray:
        """The order of a pass that follows nothing measured."""
        prompts = np.asarray(self._lanes[lane])
        if self._rule == "sequential":
            return prompts
        shuffled = prompts[pass_order(len(prompts), self._seed, epoch, lane)]
        return shuffled if self._values is None else _sorted(shuffled, self._values[shuffled])

    def _measured_order(self, cursor: DataCursor, lane: int, epoch: int) -> np.ndarray:
        """The order of an epoch that has begun; otherwise by the rewards of all complete steps."""
        begun, order = cursor.orders.get(lane, (0, np.empty(0)))
        if begun == epoch:
            return order
        shuffled = self._order(lane, epoch)
        return shuffled if cursor.rewards is None else _sorted(shuffled, -cursor.rewards[shuffled])


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
