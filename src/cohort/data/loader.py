"""What the training loop needs of its data: a position, and a loader that returns the prompts at it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from cohort.config import DataConfig
from cohort.data.load import Interleaving
from cohort.data.prompts import PromptSet
from cohort.types import Prompt


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
        return [*self.prompts.describe(), f"order: {self._describe_order()}"]

    @abstractmethod
    def _describe_order(self) -> str: ...

    def _generator(self, epoch: int, lane: int) -> np.random.Generator:
        """The random numbers of one epoch of a lane."""
        return np.random.Generator(np.random.Philox(key=[self._seed + (lane << 32), epoch]))
