"""What the training loop needs of its data: a position, and a loader that returns the prompts at it."""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from cohort.config import DataConfig
from cohort.data.load import Interleaving
from cohort.data.prompts import PromptSet
from cohort.data.source import Row
from cohort.errors import DataError
from cohort.types import Prompt
from cohort.watchdog import waiting


@dataclass(slots=True)
class ReadPosition:
    """Read position of streamed data."""

    rows: list[int]
    """Rows read of each lane (see ``PromptLoader``)."""
    dropped: int = 0
    """Rows dropped for their length."""
    truncated: int = 0
    """Prompts cut to ``data.max_prompt_length``."""


@dataclass(frozen=True, slots=True)
class DataCursor:
    """Position of a run in its data after its last complete step. The training loop holds it and advances it once per
    step; checkpoints store it. ``DataCursor()`` is the start of a run.
    """

    position: int = 0
    """Number of prompts used; equals the uid of the next prompt."""
    read: ReadPosition | None = None
    """Streamed data only."""
    rewards: np.ndarray | None = None
    """Measured curriculum only: the latest mean reward of each prompt, NaN if never measured."""
    orders: Mapping[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    """Measured curriculum only: per lane, the latest epoch that has begun and its order."""

    def state_dict(self) -> dict[str, Any]:
        """The cursor in types of JSON, as checkpoints store it: None for a reward that is NaN."""
        rewards = None
        if self.rewards is not None:
            rewards = [None if math.isnan(reward) else reward for reward in self.rewards.tolist()]
        orders = {str(lane): [epoch, order.tolist()] for lane, (epoch, order) in self.orders.items()}
        return {
            "position": self.position,
            "read": self.read and asdict(self.read),
            "rewards": rewards,
            "orders": orders,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DataCursor:
        """The inverse of ``state_dict``."""
        rewards = None if state["rewards"] is None else np.array(state["rewards"], dtype=float)  # makes None NaN
        orders = {int(lane): (epoch, np.array(order, dtype=int)) for lane, (epoch, order) in state["orders"].items()}
        return cls(state["position"], state["read"] and ReadPosition(**state["read"]), rewards, orders)


class PromptLoader(ABC):
    """Endless sequence of prompts. The prompt at a position depends only on the data, the seed and the cursor.

    The prompts form one lane, or one lane per source of a weighted mixture. A lane repeats its rows epoch after epoch,
    each row once per epoch. A step may span two epochs.

    Args:
        prompts: the data set; of streamed data, the first prompts.
        config: the order.
        seed: determines the orders.
    """

    _order_in_words: str

    def __init__(self, prompts: PromptSet, config: DataConfig, *, seed: int) -> None:
        self.prompts, self._config, self._seed = prompts, config, seed
        self._interleaving = Interleaving(prompts.data.weights or [1])

    @abstractmethod
    def fetch(self, cursor: DataCursor, count: int, skip: int = 0) -> list[Prompt]:
        """The ``count`` prompts after the first ``skip`` prompts from the cursor on. Changes no state. The uid of a
        prompt is its position, so it is unique within a run.

        Raises:
            DataError: a row of streamed data cannot be a prompt, or every row of an epoch is dropped.
        """

    @abstractmethod
    def advance(self, cursor: DataCursor, used: int, rewards: Mapping[int, float]) -> tuple[DataCursor, dict[str, int]]:
        """The cursor after a complete step, and the step's data metrics.

        Args:
            cursor: the cursor before the step.
            used: number of prompts that the step used.
            rewards: mean reward of each group, by uid.
        """

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts; of streamed data, of the first prompts."""
        return self.prompts.fingerprint

    def describe(self) -> list[str]:
        """Sources, lengths and order in words, one line each."""
        return [*self.prompts.describe(), f"order: {self._order_in_words}"]

    def _generator(self, epoch: int, lane: int) -> np.random.Generator:
        """The random numbers of one epoch of a lane."""
        return np.random.Generator(np.random.Philox(key=[self._seed + (lane << 32), epoch]))


# ----------------------------------------
# The order of the prompts of a data set in memory: shuffled, sequential or by a curriculum.


ORDERS = {
    "shuffled": "a new order for each epoch",
    "sequential": "in the order of the data",
    "curriculum": "by {}, ties in a new order for each epoch",
    "measured": "the first epoch shuffled, each later one from the highest measured mean reward to the lowest",
}


class InMemoryLoader(PromptLoader):
    """The prompts of a data set in memory; see ``PromptLoader``."""

    def __init__(self, prompts: PromptSet, config: DataConfig, *, seed: int) -> None:
        super().__init__(prompts, config, seed=seed)
        self._lanes = [np.asarray(lane) for lane in prompts.lanes()]
        self._rule = "measured" if config.curriculum == "measured" else config.order
        self._order_in_words = ORDERS[self._rule].format(config.curriculum)
        self._keys: np.ndarray | None = None
        if self._rule == "curriculum":
            self._keys = prompts.data.curriculum_values(str(config.curriculum))[prompts.row_indices]
        self._order: Callable[[int, int], np.ndarray] = lru_cache(maxsize=2 * len(self._lanes))(self._fixed_order)

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts and of the curriculum's column."""
        prompts = super().fingerprint
        return prompts if self._keys is None else hashlib.sha256(prompts.encode() + self._keys.tobytes()).hexdigest()

    def fetch(self, cursor: DataCursor, count: int, skip: int = 0) -> list[Prompt]:
        """See ``PromptLoader``."""
        uids = range(cursor.position + skip, cursor.position + skip + count)
        return [self.prompts.prompt(self._index(cursor, uid), uid=uid) for uid in uids]

    def advance(self, cursor: DataCursor, used: int, rewards: Mapping[int, float]) -> tuple[DataCursor, dict[str, int]]:
        """See ``PromptLoader``."""
        end = cursor.position + used
        if self._rule != "measured":
            return DataCursor(end), {}
        # The order of a measured epoch is fixed when the epoch begins: later rewards must not change it.
        begun = dict(self._lane_and_turn(position)[:2] for position in range(cursor.position, end))
        orders = {lane: (epoch, self._epoch_order(cursor, lane, epoch)) for lane, epoch in begun.items() if epoch}
        latest = np.full(len(self.prompts), np.nan) if cursor.rewards is None else cursor.rewards.copy()
        for uid, reward in rewards.items():
            if not np.isnan(reward):
                latest[self._index(cursor, uid)] = reward
        return DataCursor(end, rewards=latest, orders={**cursor.orders, **orders}), {}

    def _index(self, cursor: DataCursor, position: int) -> int:
        """Index of the prompt at a position."""
        lane, epoch, within = self._lane_and_turn(position)
        return int(self._epoch_order(cursor, lane, epoch)[within])

    def _lane_and_turn(self, position: int) -> tuple[int, int, int]:
        """Lane, epoch of the lane, and index within that epoch."""
        lane, turn = self._interleaving.at(position)
        return lane, *divmod(turn, len(self._lanes[lane]))

    def _epoch_order(self, cursor: DataCursor, lane: int, epoch: int) -> np.ndarray:
        """The order of a lane in an epoch. A measured epoch that has not begun follows all rewards so far."""
        begun, order = cursor.orders.get(lane, (0, np.empty(0)))
        if epoch == 0 or begun != epoch:
            order = self._order(lane, epoch)
            if epoch and cursor.rewards is not None:
                order = order[np.argsort(-cursor.rewards[order], kind="stable")]
        return order

    def _fixed_order(self, lane: int, epoch: int) -> np.ndarray:
        """The order by seed and data alone."""
        prompts = self._lanes[lane]
        if self._rule == "sequential":
            return prompts
        prompts = prompts[self._generator(epoch, lane).permutation(len(prompts))]
        return prompts if self._keys is None else prompts[np.argsort(self._keys[prompts], kind="stable")]


# ----------------------------------------
# Prompts of data that is read during the run and never as a whole.


DRAWS = 1024
"""Random numbers drawn at a time."""


class StreamingLoader(PromptLoader):
    """Prompts of streamed sources; see ``PromptLoader``.

    Sources without weights follow one another in their lane. A dropped row is replaced by the next row of its lane, so
    weights are shares of the prompts used. A resumed run reads the rows before its cursor again, but does not tokenize
    them.
    """

    def __init__(self, prompts: PromptSet, config: DataConfig, *, seed: int) -> None:
        super().__init__(prompts, config, seed=seed)
        numbers = list(range(len(prompts.data.sources)))
        self._sources_of_lanes = [[number] for number in numbers] if prompts.data.weights else [numbers]
        shuffled = f"shuffled within a buffer of {config.shuffle_buffer:,} rows, anew for each epoch"
        self._order_in_words = ORDERS["sequential"] if config.order == "sequential" else shuffled
        self._is_conversation = prompts.prompt(0, uid=0).is_conversation
        self._begin(DataCursor())

    @waiting("data")
    def fetch(self, cursor: DataCursor, count: int, skip: int = 0) -> list[Prompt]:
        """See ``PromptLoader``."""
        self._seek(cursor, cursor.position + skip)
        return [self._next_prompt() for _ in range(count)]

    def advance(self, cursor: DataCursor, used: int, rewards: Mapping[int, float]) -> tuple[DataCursor, dict[str, int]]:  # noqa: ARG002
        """See ``PromptLoader``. The metrics count the step's dropped and truncated rows."""
        end = cursor.position + used
        self._seek(cursor, end)
        before, now = cursor.read or ReadPosition([]), copy.deepcopy(self._read)
        changes = {name: getattr(now, name) - getattr(before, name) for name in ("dropped", "truncated")}
        return DataCursor(end, now), {f"prompts/{name}": count for name, count in changes.items()}

    def _begin(self, cursor: DataCursor) -> None:
        """Open the sources at a cursor, without rendering or tokenizing the rows before it."""
        self._position = cursor.position
        self._read = copy.deepcopy(cursor.read) or ReadPosition([0] * len(self._sources_of_lanes))
        read = enumerate(self._read.rows)
        self._lanes = [itertools.islice(self._rows_of_lane(lane), count, None) for lane, count in read]

    def _seek(self, cursor: DataCursor, position: int) -> None:
        """Move to a position, from the present one if possible, otherwise from the cursor. The sources stay open
        between calls only to save reading.
        """
        start = cursor if cursor.read else DataCursor()
        if not start.position <= self._position <= position:
            self._begin(start)
        while self._position < position:
            self._next_prompt()

    def _next_prompt(self) -> Prompt:
        # Until the prompt is made, no position is valid: after an error, the next call starts from its cursor again.
        position, self._position = self._position, -1
        lane, _ = self._interleaving.at(position)
        first_epoch = None
        for epoch, source, row_number, row in self._lanes[lane]:
            self._read.rows[lane] += 1
            first_epoch = epoch if first_epoch is None else first_epoch
            if epoch > first_epoch + 1:
                break
            if prompt := self._prompt(source, row_number, row, position):
                self._position = position + 1
                return prompt
            self._read.dropped += 1
        data = self.prompts.data
        where = data.sources[lane].rows.where if data.weights else data.name
        raise DataError(f"{where}: data.overlong_prompts drops every prompt of an epoch")

    def _prompt(self, number: int, row_number: int, row: Row, uid: int) -> Prompt | None:
        """The prompt of a row; None if it is dropped."""
        prompts, source, limit = self.prompts, self.prompts.data.sources[number], self.prompts.limit
        where = f"{source.rows.where}, row {row_number}"
        (ids,) = prompts.renderers[number].token_ids([row], [where])
        if limit is not None and len(ids) > limit.tokens:
            limit.check(np.array([len(ids)]), source.rows.where, lambda _: f"row {row_number}")
            if limit.rule == "drop":
                return None
            ids = ids[-limit.tokens :]
            self._read.truncated += 1
        prompts.check_row(ids, f"the prompt of {where}")
        prompt = prompts.render(number, row, row_number, ids, uid)
        if prompt.is_conversation is not self._is_conversation:
            first = prompts.data.sources[0]
            raise DataError(
                f"text and conversations are mixed: the prompts of {where} and of {first.rows.where}, row "
                f"{first.rows.numbers[0]}, are of two kinds. Set data.format to 'chat'"
            )
        return prompt

    def _rows_of_lane(self, lane: int) -> Iterator[tuple[int, int, int, Row]]:
        """The rows of a lane, epoch after epoch: epoch, source, number of the row in the source, row."""
        streams = [(number, self.prompts.data.sources[number].stream) for number in self._sources_of_lanes[lane]]
        for epoch in itertools.count():
            rows: Iterator[tuple[int, int, Row]]
            rows = ((number, *row) for number, stream in streams if stream for row in stream())
            if self._config.order != "sequential":
                rows = buffer_shuffled(rows, self._config.shuffle_buffer, self._generator(epoch, lane))
            first = next(rows, None)
            if first is None:
                raise DataError(f"{self.prompts.data.name}: an epoch has no rows; can the data be read only once?")
            for row in itertools.chain([first], rows):
                yield epoch, *row


def buffer_shuffled(items: Iterator[Any], size: int, generator: np.random.Generator) -> Iterator[Any]:
    """The items in random order within a buffer: each item is drawn from ``size`` items and replaced by the next one.
    If there are at most ``size`` items, every order is equally likely.

    >>> list(buffer_shuffled(iter(range(5)), 1, np.random.default_rng(0)))
    [0, 1, 2, 3, 4]
    """
    buffer = list(itertools.islice(items, size))
    while drawn := list(itertools.islice(items, DRAWS)):
        for item, at in zip(drawn, generator.integers(size, size=len(drawn)).tolist(), strict=True):
            yield buffer[at]
            buffer[at] = item
    yield from (buffer[at] for at in generator.permutation(len(buffer)))
