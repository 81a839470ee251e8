"""The engine protocol: prompts in, groups of completions out. Everything that samples stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cohort.config import RolloutConfig
from cohort.rollout.philox import Draws
from cohort.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a completion is drawn with. Complete: a model's own generation defaults are never read."""

    max_completion_length: int
    temperature: float = 1.0
    stop: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RolloutConfig) -> Sampling:
        """What the settings say: in training and in evaluation alike."""
        return cls(config.max_completion_length, config.temperature, config.stop)


class Engine(Protocol):
    """Draws completions from the current policy."""

    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: Sampling, draws: Draws
    ) -> list[Group]:
        """``num_generations`` completions of each prompt, in the prompts' order.

        The same prompts, settings and draws under the same weights give the same completions, whatever else is decoded
        beside them (up to the rounding of a differently shaped matrix product).
        """
        ...
