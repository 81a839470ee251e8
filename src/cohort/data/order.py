"""The order of the prompts of a data set in memory: shuffled, sequential or by a curriculum."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np

from cohort.config import DataConfig
from cohort.data.loader import DataCursor, PromptLoader
from cohort.data.prompts import PromptSet
from cohort.types import Prompt

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

    def _describe_order(self) -> str:
        return ORDERS[self._rule].format(self._config.curriculum)

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
