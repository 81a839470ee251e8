"""The scored groups of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from cohort.errors import NonFiniteError
from cohort.objective import Objective, live_groups
from cohort.presets.parts import DropDead, DynamicSampling
from cohort.rewards.runner import Scores
from cohort.train.layout import group_numbers
from cohort.types import Completion, FinishReason, Group, TokenBatch


def uses_rounds(objective: Objective) -> bool:
    """Whether a rollout may take several rounds, so that its rewards decide when it is complete."""
    return isinstance(objective.group_filter, DynamicSampling)


@dataclass(frozen=True, slots=True)
class Rollout:
    """Scored groups in the order in which they were sampled."""

    sampled: list[Group]
    """Every group with every completion, including those that no update uses."""
    sampled_scores: Scores
    is_used_P: tuple[bool, ...]
    """Whether the updates use the group's usable completions."""
    rounds: int = 1
    """Calls of the engine: more than one with dynamic sampling."""

    @classmethod
    def of(cls, groups: Sequence[Group], scores: Scores, objective: Objective) -> Rollout:
        """One round. A group is unused when the objective's filter drops it or it has no usable completion."""
        if not isinstance(objective.group_filter, DropDead | DynamicSampling):
            return cls(list(groups), scores, tuple(bool(group.usable.completions) for group in groups))
        one_reward = objective.reward_aggregation == "sum_then_normalize"
        rewards_SK = scores.rewards_S[:, None] if one_reward else scores.by_function_SK
        return cls(list(groups), scores, tuple(live_groups(rewards_SK, group_numbers(groups)).tolist()))

    def __add__(self, other: Rollout) -> Rollout:
        """Concatenate two rounds."""
        scores = self.sampled_scores + other.sampled_scores
        return Rollout(
            self.sampled + other.sampled, scores, self.is_used_P + other.is_used_P, self.rounds + other.rounds
        )

    def check_drawn(self) -> None:
        """Check that there is something to score.

        Raises:
            NonFiniteError: no completion could be drawn.
        """
        if not any(completion.finish_reason.usable for completion in self.completions):
            raise NonFiniteError(
                f"none of the step's {len(self.completions)} completions could be drawn: the model's logits are NaN or "
                "infinite. Look at the run's newest checkpoint or, if there is none, at the initial model"
            )

    @property
    def completions(self) -> list[Completion]:
        """All sampled completions, group after group."""
        return [completion for group in self.sampled for completion in group.completions]

    @property
    def mean_rewards(self) -> dict[int, float]:
        """Mean reward of each group's scored completions, by the prompt's uid; NaN when none was scored."""
        pieces = self.sampled_scores.rewards_S.split([len(group.completions) for group in self.sampled])
        return {group.prompt.uid: float(rewards.nanmean()) for group, rewards in zip(self.sampled, pieces, strict=True)}

    @property
    def num_errors(self) -> int:
        """Number of completions that could not be drawn."""
        return sum(completion.finish_reason is FinishReason.ERROR for completion in self.completions)

    @property
    def num_tokens(self) -> int:
        """Drawn tokens of all sampled completions."""
        return sum(completion.num_tokens for completion in self.completions)

    @property
    def usable_groups(self) -> list[Group]:
        """All groups without their unusable completions. Some may be empty."""
        return [group.usable for group in self.sampled]

    @property
    def used_groups(self) -> list[Group]:
        """The usable groups that the updates use."""
        return [group for group, used in zip(self.usable_groups, self.is_used_P, strict=True) if used]

    @property
    def used_S(self) -> list[int]:
        """Indices of the used completions among all sampled ones."""
        pairs = zip(self.sampled, self.is_used_P, strict=True)
        candidates = [(is_used, completion) for group, is_used in pairs for completion in group.completions]
        return [s for s, (is_used, completion) in enumerate(candidates) if is_used and completion.finish_reason.usable]

    @property
    def used_scores(self) -> Scores:
        """Scores of the used completions."""
        used_S = self.used_S
        if len(used_S) == len(self.completions):
            return self.sampled_scores
        scores = self.sampled_scores.select(used_S)
        if scores.token_rewards_N is None:
            return scores
        pieces = scores.token_rewards_N.split([completion.num_tokens for completion in self.completions])
        return replace(scores, token_rewards_N=torch.cat([pieces[s] for s in used_S]))

    def advantages(self, batch: TokenBatch) -> list[list[float] | None]:
        """For each sampled completion, the advantages of its tokens in ``batch``; None if no update uses it."""
        found: list[list[float] | None] = [None] * len(self.completions)
        for s, tokens in zip(self.used_S, batch.advantages_N.cpu().split(batch.lengths_S.tolist()), strict=True):
            found[s] = tokens.tolist()
        return found
