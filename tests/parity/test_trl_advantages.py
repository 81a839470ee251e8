"""Rewards to advantages: TRL 1.16.0's own ``_generate_and_score_completions`` against Cohort's, with TRL's epsilon."""

from __future__ import annotations

import pytest
import torch

from cohort.objective import (
    PRESETS,
    Objective,
    Outcomes,
    combined_advantages,
    outcome_advantages,
    soft_overlong_punishment,
    token_advantages,
)
from cohort.presets.parts import BatchStd, GroupStd

from .oracle import assert_same, get_soft_overlong_punishment, trl_rollout

EPSILON = 1e-4
"""TRL's, which cannot be set."""
SCALES = {"group": GroupStd(epsilon=EPSILON), "batch": BatchStd(of="raw", epsilon=EPSILON), "none": None}
SEEDS = range(3)


def random_rewards(seed, groups=3, size=4, functions=2, missing=0.0):
    """Rewards of several functions on different scales; some of them NaN (a function that does not apply)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (groups * size, functions)
    rewards_SK = torch.randn(shape, dtype=torch.float64, generator=generator) * 10.0 ** torch.arange(functions)
    return rewards_SK.masked_fill(torch.rand(shape, generator=generator) < missing, torch.nan)


def groups_of(rewards_SK, size):
    return torch.arange(len(rewards_SK)) // size


def weighted_sum(rewards_SK, weights):
    """A NaN leaves its term out; a completion without any reward has none."""
    unscored_S = rewards_SK.isnan().all(dim=1)
    return (rewards_SK * torch.tensor(weights, dtype=torch.float64)).nansum(dim=1).masked_fill(unscored_S, torch.nan)


def trl_advantages(rewards_SK, size, weights=None, **settings):
    return trl_rollout(rewards_SK, weights=weights, num_generations=size, **settings)["advantages"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("size", [2, 4, 7])
def test_sum_then_normalize(size, scale, missing, seed):
    rewards_SK = random_rewards(seed, size=size, missing=missing)
    weights = [0.7, -0.2]
    expected = trl_advantages(rewards_SK, size, weights, scale_rewards=scale)
    group_S = groups_of(rewards_SK, size)
    assert_same(outcome_advantages(weighted_sum(rewards_SK, weights), group_S, scale=SCALES[scale]), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_normalize_then_sum_is_gdpo(size, missing, seed):
    """TRL's normalize_then_sum has a third step, over the batch: Cohort's "normalize_sum_normalize"."""
    rewards_SK = random_rewards(seed, size=size, functions=3, missing=missing)
    weights = [0.7, 0.2, 1.5]
    expected = trl_advantages(rewards_SK, size, weights, multi_objective_aggregation="normalize_then_sum")
    got = combined_advantages(
        rewards_SK,
        torch.tensor(weights, dtype=torch.float64),
        groups_of(rewards_SK, size),
        over_batch=True,
        scale=GroupStd(epsilon=EPSILON),
    )
    assert_same(got, expected)


def test_the_gdpo_preset_is_trls_normalize_then_sum():
    rewards_SK = random_rewards(5)
    outcomes = Outcomes(
        rewards_S=rewards_SK.sum(dim=1),
        group_S=groups_of(rewards_SK, 4),
        sequence_N=torch.arange(len(rewards_SK)),
        max_length=256,
        by_function_SK=rewards_SK,
    )
    expected = trl_advantages(rewards_SK, 4, multi_objective_aggregation="normalize_then_sum")
    assert_same(token_advantages(PRESETS["gdpo"], outcomes), expected)


@pytest.mark.parametrize(
    ("preset", "scale"), [("default", "group"), ("dr_grpo", "none"), ("lite_ppo", "batch"), ("dapo", "group")]
)
def test_presets_with_trls_epsilon(preset, scale):
    objective: Objective = PRESETS[preset]
    if objective.scale is not None:
        objective = objective.replace(scale={"epsilon": EPSILON})
    objective = objective.replace(soft_overlong=None)
    rewards_SK = random_rewards(8, functions=1)
    outcomes = Outcomes(
        rewards_S=rewards_SK[:, 0],
        group_S=groups_of(rewards_SK, 4),
        sequence_N=torch.arange(len(rewards_SK)),
        max_length=256,
    )
    assert_same(token_advantages(objective, outcomes), trl_advantages(rewards_SK, 4, scale_rewards=scale))


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_with_one_scored_member_teaches_nothing(scale):
    rewards_SK = random_rewards(2, functions=1)
    rewards_SK[1:4] = torch.nan
    expected = trl_advantages(rewards_SK, 4, scale_rewards=scale)
    got = outcome_advantages(rewards_SK[:, 0], groups_of(rewards_SK, 4), scale=SCALES[scale])
    assert_same(got, expected)
    assert got[:4].tolist() == [0.0] * 4


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_that_floats_hold_exactly(scale):
    """Ones and zeros have exact means, so TRL's advantages of a dead group are exactly 0 as well."""
    rewards_SK = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1], dtype=torch.float64)[:, None]
    expected = trl_advantages(rewards_SK, 4, scale_rewards=scale)
    got = outcome_advantages(rewards_SK[:, 0], groups_of(rewards_SK, 4), scale=SCALES[scale])
    assert_same(got, expected)
    assert got[:8].tolist() == [0.0] * 8


@pytest.mark.parametrize(("max_length", "cache"), [(100, 20), (20480, 4096), (7, 7), (10, 1), (50, 3)])
def test_soft_overlong_punishment(max_length, cache):
    lengths = list(range(max_length + 5)) if max_length <= 100 else [0, 16383, 16384, 16385, 18000, 20480, 20481]
    expected = get_soft_overlong_punishment(max_length, cache)([[1] * length for length in lengths])
    assert_same(soft_overlong_punishment(torch.tensor(lengths), max_length, cache), expected)
