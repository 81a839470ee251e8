"""Scoring a rollout, and trying the reward functions before anything expensive starts."""

from __future__ import annotations

import math
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
        per_token: the functions reward tokens, not completions.
        not_negative: the part of the objective that takes no negative reward: a function that returns one is refused.

    Raises:
        RewardError: no functions, something that is not callable, or another number of weights.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        per_token: bool = False,
        not_negative: str | None = None,
    ) -> None:
        if not functions:
            raise RewardError("no reward function given: set reward.functions, or pass reward_funcs")
        for function in functions:
            if not callable(function):
                raise RewardError(f"a reward function must be callable, got {function!r:.80}")
        self.functions = tuple(functions)
        self.names = unique_names(functions)
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(functions)
        self.per_token = per_token
        self.not_negative = not_negative
        if len(self.weights) != len(functions):
            raise RewardError(f"reward.weights has {len(self.weights)} numbers for {len(functions)} functions")

    def score(self, groups: Sequence[Group]) -> Scores:
        """Rewards of all completions, group after group: the weighted sum of what the functions gave.

        A function's ``None`` leaves its term out of a completion's sum. A completion that no function scored has no
        reward (NaN) and no part in its group's statistics. Where functions reward tokens, a completion's reward is the
        sum over its tokens. Completions that are not usable (``FinishReason``) are shown to no function and have no
        score.
        """
        results = [self._call(f, name, groups) for f, name in zip(self.functions, self.names, strict=True)]
        by_function_SK = torch.tensor(
            [[_total(numbers) for numbers in column] for column in results], dtype=torch.float64
        ).T
        weights_K = torch.tensor(self.weights, dtype=torch.float64)
        return Scores(
            rewards_S=_weighted_sum(by_function_SK, weights_K),
            by_function_SK=by_function_SK,
            names=self.names,
            weights=self.weights,
            token_rewards_N=self._token_rewards(results, weights_K) if self.per_token else None,
        )

    def dry_run(self, prompts: Sequence[Prompt]) -> None:
        """Call every function on a made completion of real rows, so that a broken one is found before sampling.

        Raises:
            RewardError: as ``call_reward``.
        """
        made = Completion((0,), (0.0,), FinishReason.LENGTH, "A made completion, to try the reward functions.", 0)
        groups = [Group(prompt, (made, made)) for prompt in prompts]
        for function, name in zip(self.functions, self.names, strict=True):
            try:
                self._call(function, name, groups)
            except RewardError as error:
                raise RewardError(f"{error} (tried on {len(groups)} rows with a made completion)") from error.__cause__

    def _call(self, function: RewardFunction, name: str, groups: Sequence[Group]) -> list[list[float]]:
        shown = [group.usable for group in groups]
        results: list[list[float]] = []
        if any(group.completions for group in shown):
            results = call_reward(function, name, shown, per_token=self.per_token)
        if self.not_negative and any(number < 0 for numbers in results for number in numbers):
            raise RewardError(
                f"reward function {name} returned a negative reward, which does not go with objective."
                f"{self.not_negative}: shift the reward, or change that part"
            )
        of_shown = iter(results)
        return [
            next(of_shown) if c.finish_reason.usable else [math.nan] * (len(c.token_ids) if self.per_token else 1)
            for group in groups
            for c in group.completions
        ]

    def _token_rewards(self, results: Sequence[Sequence[Sequence[float]]], weights_K: torch.Tensor) -> torch.Tensor:
        columns = [[number for numbers in column for number in numbers] for column in results]
        return _weighted_sum(torch.tensor(columns, dtype=torch.float64).T, weights_K)


def _weighted_sum(values_MK: torch.Tensor, weights_K: torch.Tensor) -> torch.Tensor:
    """Over functions, those that gave nothing left out; NaN where none gave anything."""
    none_M = values_MK.isnan().all(dim=1)
    return torch.where(none_M, torch.nan, (values_MK * weights_K).nansum(dim=1))


def _total(numbers: Sequence[float]) -> float:
    given = [number for number in numbers if not math.isnan(number)]
    return math.fsum(given) if given else math.nan
