"""Rewards: the contract of reward functions, the runner, and the built-in functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cohort.rewards.builtin import BUILTIN_REWARDS
from cohort.rewards.contract import RewardFunction, TrainerState, reward
from cohort.rewards.model import RewardModel
from cohort.rewards.specs import as_reward_function, resolve_reward

if TYPE_CHECKING:
    from cohort.rewards.runner import RewardRunner

__all__ = [
    "BUILTIN_REWARDS",
    "RewardFunction",
    "RewardModel",
    "RewardRunner",
    "TrainerState",
    "as_reward_function",
    "resolve_reward",
    "reward",
]


def __getattr__(name: str) -> Any:
    if name == "RewardRunner":  # on demand: worker processes import this package and do not need it
        from cohort.rewards.runner import RewardRunner

        return RewardRunner
    raise AttributeError(f"module 'cohort.rewards' has no attribute {name!r}")
