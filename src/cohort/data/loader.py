"""What the training loop needs of its data: a position, and a loader that returns the prompts at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cohort.types import Prompt


@dataclass(slots=True)
class ReadPosition:
    """Read position of streamed data."""

    rows: list[int]
    """Rows read of each lane (see ``StreamingLoader``)."""
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
        """The cursor as checkpoints store it."""
        return {"taken": self.position, "reached": self.read, "rewards": self.rewards, "passes": dict(self.orders)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DataCursor:
        """The inverse of ``state_dict``."""
        return cls(state["taken"], state["reached"], state["rewards"], state["passes"])


class PromptLoader(Protocol):
    """Endless sequence of prompts. The prompt at a position depends only on the data, the seed and the cursor."""

    @property
    def epoch_length(self) -> int | None:
        """Prompts per epoch; None if unknown."""

    @property
    def longest(self) -> int:
        """Tokens of the longest known prompt."""

    @property
    def fingerprint(self) -> str:
        """Hash of the prompts."""

    def fetch(self, cursor: DataCursor, count: int, skip: int = 0) -> list[Prompt]:
        """The ``count`` prompts after the first ``skip`` prompts from the cursor on. Changes no state. The uid of a
        prompt is its position, so it is unique within a run.
        """

    def advance(
        self, cursor: DataCursor, count: int, rewards: Mapping[int, float]
    ) -> tuple[DataCursor, dict[str, int]]:
        """The cursor after a complete step, and the step's data metrics.

        Args:
            cursor: the cursor before the step.
            count: number of prompts that the step used.
            rewards: mean reward of each group, by uid.
        """

    def describe(self) -> list[str]:
        """Sources, lengths and order in words, one line each."""
