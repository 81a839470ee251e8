"""Scoring a rollout, and trying the reward functions before anything expensive starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cohort.errors import RewardError
from cohort.rewards.contract import RewardFunction, call_reward, unique_names
from cohort.types import Completion, FinishReason, Group, Prompt, Scores


class RewardRunner:
    """Reward functions with their weights.

    Args:
        functions: see ``rewards.contract``.
        weights: one per function; None: 1 each.

    Raises:
        RewardError: no functions, something that is not callable, or another number of weights.
    """

    def __init__(self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> None:
        if not functions:
            raise RewardError("no reward function given: set reward.functions, or pass reward_funcs")
        for function in functions:
            if not callable(function):
                raise RewardError(f"a reward function must be callable, got {function!r:.80}")
        self.functions = tuple(functions)
        self.names = unique_names(functions)
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(functions)
        if len(self.weights) != len(functions):
            raise RewardError(f"reward.weights has {len(self.weights)} numbers for {len(functions)} functions")

    def score(self, groups: Sequence[Group]) -> Scores:
        """Rewards of all completions, group after group: the weighted sum of what the functions gave.

        A function's ``None`` leaves its term out of a completion's sum. A completion that no function scored has no
        reward (NaN) and no part in its group's statistics.
        """
        columns = [call_reward(f, name, groups) for f, name in zip(self.functions, self.names, strict=True)]
        by_function_SK = torch.tensor(columns, dtype=torch.float64).T
        weighted_SK = by_function_SK * torch.tensor(self.weights, dtype=torch.float64)
        unscored_S = by_function_SK.isnan().all(dim=1)
        rewards_S = torch.where(unscored_S, torch.nan, weighted_SK.nansum(dim=1))
        return Scores(rewards_S, by_function_SK, self.names)

    def dry_run(self, prompts: Sequence[Prompt]) -> None:
        """Call every function on a made completion of real rows, so that a broken one is found before sampling.

        Raises:
            RewardError: as ``call_reward``.
        """
        made = Completion((0,), (0.0,), FinishReason.LENGTH, "A made completion, to try the reward functions.", 0)
        groups = [Group(prompt, (made, made)) for prompt in prompts]
        for function, name in zip(self.functions, self.names, strict=True):
            try:
                call_reward(function, name, groups)
            except RewardError as error:
                raise RewardError(f"{error} (tried on {len(groups)} rows with a made completion)") from error.__cause__
