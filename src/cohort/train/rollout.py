"""One step's rollout: what was sampled, and which of it the updates use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cohort.errors import NonFiniteError
from cohort.objective import Objective, live_groups
from cohort.presets.parts import DropDead, DynamicSampling
from cohort.train.batch import group_numbers
from cohort.types import Completion, FinishReason, Group, Scores


@dataclass(frozen=True, slots=True)
class Rollout:
    """Scored groups in the order they were sampled."""

    sampled: list[Group]
    """Every group, those left out too, with every completion, those that failed too."""
    sampled_scores: Scores
    used_R: tuple[bool, ...]
    """Of which of them the updates use the usable completions."""
    rounds: int = 1
    """Calls of the engine."""

    @classmethod
    def of(cls, groups: Sequence[Group], scores: Scores, objective: Objective) -> Rollout:
        """One round's groups, with those marked that the objective's filter leaves out or that have nothing usable."""
        if not isinstance(objective.group_filter, DropDead | DynamicSampling):
            return cls(list(groups), scores, tuple(bool(group.usable.completions) for group in groups))
        group_S = group_numbers(groups)
        one_reward = objective.reward_aggregation == "sum_then_normalize"
        rewards_SK = scores.rewards_S[:, None] if one_reward else scores.by_function_SK
        return cls(list(groups), scores, tuple(live_groups(rewards_SK, group_S).tolist()))

    def __add__(self, other: Rollout) -> Rollout:
        """Two rounds as one."""
        scores = self.sampled_scores + other.sampled_scores
        return Rollout(self.sampled + other.sampled, scores, self.used_R + other.used_R, self.rounds + other.rounds)

    def check_drawn(self) -> None:
        """Raise where there is nothing to score.

        Raises:
            NonFiniteError: no completion could be drawn.
        """
        if not any(completion.finish_reason.usable for completion in self.completions):
            raise NonFiniteError(
                f"none of the step's {len(self.completions)} completions could be drawn: the model's logits are not "
                "numbers. Look at the run's newest checkpoint; where there is none, at the model it began with"
            )

    @property
    def completions(self) -> list[Completion]:
        """All that were sampled, group after group."""
        return [completion for group in self.sampled for completion in group.completions]

    @property
    def mean_rewards(self) -> dict[int, float]:
        """The mean reward of every group's scored completions, by its prompt's uid; NaN where none was scored."""
        pieces = self.sampled_scores.rewards_S.split([len(group.completions) for group in self.sampled])
        return {group.prompt.uid: float(rewards.nanmean()) for group, rewards in zip(self.sampled, pieces, strict=True)}

    @property
    def num_errors(self) -> int:
        """How many of them could not be drawn."""
        return sum(completion.finish_reason is FinishReason.ERROR for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        """Tokens of all completions that were sampled."""
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def usable(self) -> list[Group]:
        """All groups without the completions that failed; some may have none left."""
        return [group.usable for group in self.sampled]

    @property
    def groups(self) -> list[Group]:
        """Those that the updates use."""
        return [group for group, used in zip(self.usable, self.used_R, strict=True) if used]

    @property
    def used_S(self) -> list[int]:
        """The places of their completions among all that were sampled."""
        used = [u for group, u in zip(self.sampled, self.used_R, strict=True) for _ in group.completions]
        return [s for s, c in enumerate(self.completions) if used[s] and c.finish_reason.usable]

    @property
    def scores(self) -> Scores:
        """Their scores."""
        used_S = self.used_S
        if len(used_S) == len(self.completions):
            return self.sampled_scores
        scores = self.sampled_scores.of(used_S)
        if scores.token_rewards_N is None:
            return scores
        pieces = scores.token_rewards_N.split([len(completion.token_ids) for completion in self.completions])
        return replace(scores, token_rewards_N=torch.cat([pieces[s] for s in used_S]))
