"""Hand-worked advantages, degenerate groups, missing rewards, invariances."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cohort.objective import group_advantages, group_statistics

ONE_GROUP = torch.zeros(8, dtype=torch.long)
KNOWN = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0])


def test_known_answer_of_eight_binary_rewards():
    # mean 3/8; sample variance 8 * (3/8)(5/8) / 7 = 15/56, std 0.517549; (5/8)/std and (-3/8)/std.
    advantages = group_advantages(KNOWN, ONE_GROUP, epsilon=0.0)
    std = math.sqrt(15 / 56)
    expected = torch.where(KNOWN == 1, 0.625 / std, -0.375 / std)
    torch.testing.assert_close(advantages, expected.double(), rtol=1e-6, atol=0)
    assert advantages[0].item() == pytest.approx(1.207615, abs=5e-7)
    assert advantages[1].item() == pytest.approx(-0.724569, abs=5e-7)


def test_population_std_divides_by_the_group_size():
    # population std of 10011000 is sqrt(15/64)
    advantages = group_advantages(KNOWN, ONE_GROUP, ddof=0, epsilon=0.0)
    assert advantages[0].item() == pytest.approx(0.625 / math.sqrt(15 / 64), rel=1e-12)


def test_scale_none_only_centres():
    assert group_advantages(KNOWN, ONE_GROUP, scale="none").tolist() == [0.625 if r else -0.375 for r in KNOWN.tolist()]


def test_two_completions_get_plus_and_minus_one_over_root_two():
    advantages = group_advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long), epsilon=0.0)
    torch.testing.assert_close(advantages, torch.tensor([0.5**0.5, -(0.5**0.5)], dtype=torch.float64))


def test_epsilon_is_added_to_the_std():
    advantages = group_advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long), epsilon=1.0)
    assert advantages[0].item() == pytest.approx(0.5 / (0.5**0.5 + 1), rel=1e-12)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.7, 1e6])
@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1e-4])
def test_equal_rewards_give_exactly_zero(value, epsilon):
    # In float32, eight times 0.1 has mean != 0.1 and a std of about 8e-9: epsilon alone would not save it.
    rewards = torch.full((8,), value, dtype=torch.float32)
    assert group_advantages(rewards, ONE_GROUP, epsilon=epsilon).tolist() == [0.0] * 8


def test_unscored_completions_are_left_out_of_the_statistics():
    rewards = torch.tensor([1.0, math.nan, 0.0, 1.0])
    group = torch.zeros(4, dtype=torch.long)
    advantages = group_advantages(rewards, group, epsilon=0.0)
    without = group_advantages(torch.tensor([1.0, 0.0, 1.0]), group[:3], epsilon=0.0)
    assert advantages[1].item() == 0.0
    torch.testing.assert_close(advantages[[0, 2, 3]], without, rtol=0, atol=0)


@pytest.mark.parametrize("rewards", [[math.nan] * 3, [1.0, math.nan, math.nan], [math.nan, 2.0, 2.0]])
def test_a_group_with_nothing_to_compare_teaches_nothing(rewards):
    assert group_advantages(torch.tensor(rewards), torch.zeros(3, dtype=torch.long)).tolist() == [0.0] * 3


def test_groups_are_told_apart_by_id_whatever_their_order_and_size():
    rewards = torch.tensor([1.0, 5.0, 0.0, 5.0, 1.0, 9.0, 0.0])
    group = torch.tensor([7, 2, 7, 2, 7, 2, 7])
    together = group_advantages(rewards, group, epsilon=0.0)
    for gid in (2, 7):
        members = group == gid
        alone = group_advantages(rewards[members], group[members], epsilon=0.0)
        torch.testing.assert_close(together[members], alone, rtol=0, atol=1e-15)


def test_statistics_of_two_groups():
    statistics = group_statistics(torch.tensor([1.0, 3.0, 4.0, 4.0]), torch.tensor([0, 0, 1, 1]))
    assert statistics.mean_R.tolist() == [2.0, 4.0]
    assert statistics.std_R.tolist() == [pytest.approx(2**0.5), 0.0]
    assert statistics.degenerate_R.tolist() == [False, True]


rewards_lists = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=9)


@given(rewards_lists, st.floats(0.1, 50), st.floats(-20, 20))
def test_a_positive_affine_map_of_the_rewards_changes_nothing(rewards, a, b):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    group = torch.zeros(len(rewards), dtype=torch.long)
    spread = (rewards.max() - rewards.min()).item()
    if 0 < spread < 1e-3:
        return  # rounding of a * R + b is then as large as the differences themselves
    plain = group_advantages(rewards, group, epsilon=0.0)
    mapped = group_advantages(a * rewards + b, group, epsilon=0.0)
    if spread == 0:
        assert mapped.tolist() == plain.tolist() == [0.0] * len(rewards)
    else:
        torch.testing.assert_close(mapped, plain, rtol=1e-7, atol=1e-7)


@given(rewards_lists)
def test_advantages_of_a_group_sum_to_zero_and_have_variance_one(rewards):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.long), epsilon=0.0)
    if rewards.max() - rewards.min() > 1e-3:
        assert abs(advantages.sum().item()) < 1e-7
        assert advantages.var().item() == pytest.approx(1.0, rel=1e-7)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one length"):
        group_advantages(torch.zeros(3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="scale"):
        group_advantages(torch.zeros(3), torch.zeros(3, dtype=torch.long), scale="batch")
