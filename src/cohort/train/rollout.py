"""One step's rollout: what was sampled, and which of it the updates use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cohort.objective import Objective, live_groups
from cohort.presets.parts import DropDead, DynamicSampling
from cohort.train.batch import group_numbers
from cohort.types import Group, Scores


@dataclass(frozen=True, slots=True)
class Rollout:
    """Scored groups in the order they were sampled."""

    sampled: list[Group]
    """Every group, those left out too."""
    sampled_scores: Scores
    used_R: tuple[bool, ...]
    """Which of them the updates use."""
    rounds: int = 1
    """Calls of the engine."""

    @classmethod
    def of(cls, groups: Sequence[Group], scores: Scores, objective: Objective) -> Rollout:
        """One round's groups, with those that the objective's filter leaves out marked."""
        if not isinstance(objective.group_filter, DropDead | DynamicSampling):
            return cls(list(groups), scores, (True,) * len(groups))
        group_S = group_numbers(groups)
        one_reward = objective.reward_aggregation == "sum_then_normalize"
        rewards_SK = scores.rewards_S[:, None] if one_reward else scores.by_function_SK
        return cls(list(groups), scores, tuple(live_groups(rewards_SK, group_S).tolist()))

    def __add__(self, other: Rollout) -> Rollout:
        """Two rounds as one."""
        mine, theirs = self.sampled_scores, other.sampled_scores
        scores = Scores(
            torch.cat([mine.rewards_S, theirs.rewards_S]),
            torch.cat([mine.by_function_SK, theirs.by_function_SK]),
            mine.names,
            mine.weights,
        )
        return Rollout(self.sampled + other.sampled, scores, self.used_R + other.used_R, self.rounds + other.rounds)

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions that were sampled."""
        return sum(len(completion.token_ids) for group in self.sampled for completion in group.completions)

    @property
    def groups(self) -> list[Group]:
        """Those that the updates use."""
        return [group for group, used in zip(self.sampled, self.used_R, strict=True) if used]

    @property
    def used_S(self) -> list[int]:
        """The places of their completions among all that were sampled."""
        used = [u for group, u in zip(self.sampled, self.used_R, strict=True) for _ in group.completions]
        return [place for place, u in enumerate(used) if u]

    @property
    def scores(self) -> Scores:
        """Their scores."""
        return self.sampled_scores if all(self.used_R) else self.sampled_scores.of(self.used_S)
