"""Rewards: the contract, the runner, the built-in functions.

A worker process imports this room without torch: the runner, which makes tensors, is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cohort.rewards.builtin import BUILTIN_REWARDS
from cohort.rewards.contract import RewardFunction, TrainerState, as_reward_function
from cohort.rewards.kinds import reward
from cohort.rewards.model import RewardModel
from cohort.rewards.specs import resolve_reward

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
    if name == "RewardRunner":
        from cohort.rewards.runner import RewardRunner

        return RewardRunner
    raise AttributeError(f"module 'cohort.rewards' has no attribute {name!r}")
