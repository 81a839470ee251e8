"""Rewards: the contract of reward functions, the runner, and the built-in functions."""

from cohort.rewards.builtin import BUILTIN_REWARDS
from cohort.rewards.contract import RewardFunction, TrainerState, reward
from cohort.rewards.environment import environment_reward
from cohort.rewards.model import RewardModel
from cohort.rewards.runner import RewardRunner
from cohort.rewards.specs import as_reward_function, resolve_reward
