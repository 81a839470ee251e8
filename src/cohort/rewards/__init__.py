"""Rewards: the contract of reward functions, the runner, and the built-in functions."""

from cohort.rewards.contract import RewardFunction, TrainerState, reward
from cohort.rewards.environment import environment_reward
from cohort.rewards.model import RewardModel
from cohort.rewards.names import BUILTIN_REWARDS, as_reward_function, resolve_reward
from cohort.rewards.runner import RewardRunner
