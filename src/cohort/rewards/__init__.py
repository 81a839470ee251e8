"""Rewards: the contract, the runner, the built-in functions."""

from cohort.rewards.builtin import BUILTIN_REWARDS
from cohort.rewards.contract import RewardFunction, resolve_reward
from cohort.rewards.runner import RewardRunner

__all__ = ["BUILTIN_REWARDS", "RewardFunction", "RewardRunner", "resolve_reward"]
