"""Hand-worked advantages, every baseline and scale, degenerate groups, missing rewards, invariances."""

import math

import pytest
import torch

from cohort.errors import ConfigError, RewardError
from cohort.objective import combined_advantages, group_statistics, outcome_advantages
from cohort.presets.parts import BatchStd, GroupMean, GroupStd
from tests.conftest import each
from tests.objective.batches import doubles, longs

ONE_GROUP = torch.zeros(8, dtype=torch.long)
KNOWN = torch.tensor([1.0, 0, 0, 1, 1, 0, 0, 0])
NAN = math.nan
EXACT = GroupStd(epsilon=0.0)
BASELINES = ["none", 0.3, "group_mean", "leave_one_out", "length_weighted", "batch_mean", "second_best"]
GROUP_BASELINES = ["group_mean", "leave_one_out", "length_weighted", "second_best"]
SCALES = [None, GroupStd(), GroupMean(), BatchStd(), BatchStd(of="centred")]


def check(got, *expected):
    torch.testing.assert_close(got, doubles(*expected), rtol=1e-13, atol=1e-15)


# Known answers ------------------------------------------------------------------------------------------------------


@each(
    ("baseline", "scale", "right", "wrong"),
    [
        ("group_mean", EXACT, 1.207615, -0.724569),
        ("leave_one_out", None, 0.714286, -0.428571),
        ("group_mean", GroupMean(), 1.666667, -1.0),
        ("group_mean", None, 0.625, -0.375),
        ("none", None, 1.0, 0.0),
        (0.5, None, 0.5, -0.5),
        ("batch_mean", None, 0.625, -0.375),
        ("none", GroupMean(), 8 / 3, 0.0),
    ],
)
def test_known_answers_of_eight_binary_rewards(baseline, scale, right, wrong):
    got = outcome_advantages(KNOWN, ONE_GROUP, baseline=baseline, scale=scale)
    assert got.tolist() == pytest.approx([right if r else wrong for r in KNOWN.tolist()], abs=5e-7)  # printed digits


# Baselines ----------------------------------------------------------------------------------------------------------

REWARDS = doubles(1.0, 4.0, 2.0, 8.0, 6.0)
GROUPS = longs(3, 1, 3, 1, 3)
"""Interleaved: group 3 has 1, 2, 6 (mean 3), group 1 has 4, 8 (mean 6); mean of all 4.2."""
LENGTHS = longs(1, 3, 0, 1, 3)


@each(
    ("baseline", "expected"),
    [
        ("none", [1, 4, 2, 8, 6]),
        (2.0, [-1, 2, 0, 6, 4]),
        ("group_mean", [-2, -2, -1, 2, 3]),
        ("leave_one_out", [-3, -4, -1.5, 4, 4.5]),
        # (1 * 1 + 0 * 2 + 3 * 6) / 4 = 4.75 and (3 * 4 + 1 * 8) / 4 = 5
        ("length_weighted", [-3.75, -1, -2.75, 3, 1.25]),
        ("batch_mean", [-3.2, -0.2, -2.2, 3.8, 1.8]),
        # 3 (6 - 2) and 2 (8 - 4)
        ("second_best", [0, 0, 0, 8, 12]),
    ],
)
def test_baselines_by_hand(baseline, expected):
    check(outcome_advantages(REWARDS, GROUPS, baseline=baseline, scale=None, lengths_S=LENGTHS), *expected)


def test_a_group_of_empty_completions_has_its_plain_mean():
    got = outcome_advantages(REWARDS, GROUPS, baseline="length_weighted", scale=None, lengths_S=longs(0, 3, 0, 1, 0))
    check(got, -2, -1, -1, 3, 3)


@each(
    ("rewards", "expected"),
    [
        ([3.0, 1.0, 3.0], [0, 0, 0]),  # two share the maximum: no lead
        ([3.0, 1.0, 1.0], [6, 0, 0]),
        ([0.0, NAN, 2.0], [0, 0, 4]),  # n is the number of scored ones
        ([-1.0, -3.0, -2.0], [3, 0, 0]),
        ([NAN, NAN, 2.0], [0, 0, 0]),
        ([NAN, NAN, NAN], [0, 0, 0]),
    ],
)
def test_second_best(rewards, expected):
    group = longs(0, 0, 0)
    check(outcome_advantages(doubles(*rewards), group, baseline="second_best", scale=None), *expected)
    # The same beside another group, before and behind.
    for gid in (-1, 1):
        beside = torch.cat([doubles(*rewards), doubles(5.0, 9.0)])
        got = outcome_advantages(beside, longs(0, 0, 0, gid, gid), baseline="second_best", scale=None)
        check(got, *expected, 0.0, 8.0)


def test_a_users_baseline_may_lack_completions_and_changes_no_reward(tmp_path):
    (tmp_path / "own.py").write_text(
        "def half(rewards, group):\n"
        "    found = rewards / 2\n"
        "    found[0], found[rewards.isnan()] = float('nan'), float('inf')\n"
        "    rewards.zero_(), group.zero_()\n"
        "    return found\n"
        "def endless(rewards, group):\n"
        "    return rewards / 0\n"
    )
    rewards, groups = doubles(2, 4, NAN, 8), longs(0, 0, 1, 1)
    check(outcome_advantages(rewards, groups, baseline=f"{tmp_path}/own.py:half", scale=None), 0, 2, 0, 4)
    check(rewards[[0, 1, 3]], 2, 4, 8)
    scale = GroupMean(epsilon=0.0)  # of the rewards, not of what the function left of them
    check(outcome_advantages(rewards[:2], groups[:2], baseline=f"{tmp_path}/own.py:half", scale=scale), 0, 2 / 3)
    with pytest.raises(ConfigError, match="infinite number for a scored completion"):
        outcome_advantages(rewards, groups, baseline=f"{tmp_path}/own.py:endless", scale=None)


# Scales -------------------------------------------------------------------------------------------------------------


def sample_std(*values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))


@each(
    ("scale", "divisors"),
    [
        (EXACT, [sample_std(1, 2, 6), sample_std(4, 8)]),
        (GroupStd(ddof=0, epsilon=0.5), [sample_std(1, 2, 6) * math.sqrt(2 / 3) + 0.5, 2.5]),
        (GroupMean(), [3.0, 6.0]),
        (GroupMean(epsilon=0.5), [3.5, 6.5]),
        (BatchStd(of="raw", epsilon=0.0), [sample_std(1, 4, 2, 8, 6)] * 2),
        (BatchStd(of="centred", epsilon=0.0), [sample_std(-2, -2, -1, 2, 3)] * 2),
        (BatchStd(of="raw", ddof=0, epsilon=0.25), [sample_std(1, 4, 2, 8, 6) * math.sqrt(4 / 5) + 0.25] * 2),
    ],
)
def test_scales_by_hand(scale, divisors):
    of_3, of_1 = divisors
    expected = [-2 / of_3, -2 / of_1, -1 / of_3, 2 / of_1, 3 / of_3]
    check(outcome_advantages(REWARDS, GROUPS, scale=scale), *expected)


# Nothing to compare -------------------------------------------------------------------------------------------------


@each("scale", SCALES, ids=str)
@each("baseline", [*GROUP_BASELINES, "batch_mean"])
def test_equal_rewards_give_exactly_zero(baseline, scale):
    # In float32, eight times 0.1 has mean != 0.1 and a std of about 8e-9: epsilon alone would not save it.
    rewards, group = torch.full((8,), 0.1), longs(0, 1, 0, 1, 0, 1, 0, 1)
    got = outcome_advantages(rewards, group, baseline=baseline, scale=scale, lengths_S=torch.arange(8) % 3)
    assert got.tolist() == [0.0] * 8


@each("rewards", [[0.1] * 3, [0.7, NAN, 0.7, 0.7]])
def test_equal_rewards_of_a_batch_give_exactly_zero_though_their_mean_is_rounded(rewards):
    rewards = doubles(*rewards)
    assert rewards.nanmean() != rewards[0]
    for scale in (None, GroupMean(), BatchStd()):
        got = outcome_advantages(rewards, torch.arange(len(rewards)), baseline="batch_mean", scale=scale)
        assert got.tolist() == [0.0] * len(rewards)


def test_equal_rewards_of_a_group_teach_where_the_baseline_is_not_the_groups():
    rewards, group = doubles(1, 1, 0, 1), longs(0, 0, 1, 1)
    check(outcome_advantages(rewards, group, baseline=0.5, scale=None), 0.5, 0.5, -0.5, 0.5)
    check(outcome_advantages(rewards, group, baseline="batch_mean", scale=None), 0.25, 0.25, -0.75, 0.25)


def test_a_groups_spread_or_mean_of_zero_silences_it_whatever_the_baseline():
    got = outcome_advantages(doubles(1, 1, 0, 1), longs(0, 0, 1, 1), baseline="none", scale=GroupStd())
    assert got[:2].tolist() == [0.0, 0.0]
    assert got[3] > 0
    rewards, group = doubles(0, 0, 1, 1, 0, 2), longs(0, 0, 1, 1, 2, 2)
    # r / mean, MaxRL without a baseline: equal rewards above 0 teach.
    check(outcome_advantages(rewards, group, baseline="none", scale=GroupMean()), 0, 0, 1, 1, 0, 2)
    check(outcome_advantages(rewards, group, scale=GroupMean()), 0, 0, 0, 0, -1, 1)
    # A lone scored completion has no group mean to be divided by.
    check(
        outcome_advantages(doubles(2, NAN, 1, 3), longs(0, 0, 1, 1), baseline=0.5, scale=GroupMean()), 0, 0, 0.25, 1.25
    )


@each("scale", SCALES, ids=str)
@each("baseline", BASELINES)
def test_unscored_completions_are_left_out_of_every_statistic(baseline, scale):
    group, lengths = torch.cat([GROUPS, longs(3, 1)]), torch.cat([LENGTHS, longs(50, 2)])
    rewards = torch.cat([REWARDS, doubles(NAN, NAN)])
    got = outcome_advantages(rewards, group, baseline=baseline, scale=scale, lengths_S=lengths)
    without = outcome_advantages(REWARDS, GROUPS, baseline=baseline, scale=scale, lengths_S=LENGTHS)
    check(got, *without.tolist(), 0.0, 0.0)
    assert got[-2:].tolist() == [0.0, 0.0]


@each("rewards", [[NAN] * 3, [1.0, NAN, NAN], [NAN, 2.0, 2.0]])
@each("scale", SCALES, ids=str)
@each("baseline", GROUP_BASELINES)
def test_a_group_with_nothing_to_compare_teaches_nothing(rewards, scale, baseline):
    got = outcome_advantages(
        torch.tensor(rewards), longs(0, 0, 0), baseline=baseline, scale=scale, lengths_S=longs(1, 2, 3)
    )
    assert got.tolist() == [0.0] * 3


@each("scale", SCALES, ids=str)
@each("baseline", GROUP_BASELINES)
def test_a_group_of_one_teaches_nothing_and_disturbs_nothing(baseline, scale):
    rewards, group = torch.cat([REWARDS, doubles(5.0)]), torch.cat([GROUPS, longs(2)])
    got = outcome_advantages(rewards, group, baseline=baseline, scale=scale, lengths_S=torch.cat([LENGTHS, longs(2)]))
    assert got[-1].item() == 0.0
    assert torch.isfinite(got).all()
    if not isinstance(scale, BatchStd):  # which is of all rewards, the lone one's too
        check(
            got[:-1], *outcome_advantages(REWARDS, GROUPS, baseline=baseline, scale=scale, lengths_S=LENGTHS).tolist()
        )


@each("baseline", BASELINES)
def test_an_empty_batch(baseline):
    nothing = torch.zeros(0, dtype=torch.long)
    assert outcome_advantages(nothing.double(), nothing, baseline=baseline, lengths_S=nothing).tolist() == []


# Groups -------------------------------------------------------------------------------------------------------------


def test_statistics_of_equal_rewards_have_no_spread_from_rounding():
    # E[x^2] - E[x]^2 would have one.
    assert group_statistics(torch.full((8,), 1e6 + 0.1, dtype=torch.float64), ONE_GROUP).degenerate_P.all()
    near = group_statistics(doubles(1e6, 1e6 + 1e-6), longs(0, 0))
    assert near.std_P.item() == pytest.approx(1e-6 / 2**0.5, rel=1e-3)  # 1e-6 itself is rounded at 1e6
    assert not near.degenerate_P.any()
    lone = group_statistics(doubles(1.0, NAN), longs(0, 0))
    assert lone.std_P.isnan().all()
    assert lone.degenerate_P.all()


# Several rewards ----------------------------------------------------------------------------------------------------

TWO = torch.stack([doubles(1, 0, 0, 1, 3, 5), doubles(10, 20, 60, 1, 1, 4)], dim=1)
TWO_GROUPS = longs(0, 0, 0, 1, 1, 1)
WEIGHTS = doubles(1.0, 0.5)


def standardised(*values):
    mean, std = sum(values) / len(values), sample_std(*values)
    return [(v - mean) / std for v in values]


def mo_grpo_by_hand():
    first = standardised(1, 0, 0) + standardised(1, 3, 5)
    second = standardised(10, 20, 60) + standardised(1, 1, 4)
    return [a + 0.5 * b for a, b in zip(first, second, strict=True)]


def test_mo_grpo_by_hand():
    got = combined_advantages(TWO, WEIGHTS, TWO_GROUPS, over_batch=False, scale=EXACT)
    check(got, *mo_grpo_by_hand())


def test_gdpo_by_hand():
    got = combined_advantages(TWO, WEIGHTS, TWO_GROUPS, over_batch=True, scale=EXACT)
    torch.testing.assert_close(got, doubles(*standardised(*mo_grpo_by_hand())), rtol=1e-12, atol=1e-14)
    # Epsilon is added to the batch's spread too.
    scale = GroupStd(epsilon=0.5)
    first, got = (combined_advantages(TWO, WEIGHTS, TWO_GROUPS, over_batch=o, scale=scale) for o in (False, True))
    torch.testing.assert_close(got, (first - first.mean()) / (first.std() + 0.5), rtol=1e-12, atol=1e-14)


def test_gdpo_centres_the_sums_over_the_batch():
    # With a group baseline they are centred already; without one they are not.
    first = combined_advantages(TWO, WEIGHTS, TWO_GROUPS, over_batch=False, baseline="none", scale=EXACT)
    assert first.mean() > 1
    got = combined_advantages(TWO, WEIGHTS, TWO_GROUPS, over_batch=True, baseline="none", scale=EXACT)
    torch.testing.assert_close(got, doubles(*standardised(*first.tolist())), rtol=1e-12, atol=1e-14)


@each("scale", [None, GroupMean()], ids=str)
def test_gdpo_without_the_groups_deviation_divides_by_the_batchs_as_one_sample_of_more(scale):
    first = combined_advantages(TWO, WEIGHTS, TWO_GROUPS, over_batch=False, scale=scale)
    got = combined_advantages(TWO, WEIGHTS, TWO_GROUPS, over_batch=True, scale=scale)
    torch.testing.assert_close(got, doubles(*standardised(*first.tolist())), rtol=1e-12, atol=1e-14)


def test_a_rewards_nan_leaves_only_its_own_term_out():
    rewards = TWO.clone()
    rewards[0, 1] = NAN
    got = combined_advantages(rewards, WEIGHTS, TWO_GROUPS, over_batch=False, scale=EXACT)
    first, second = standardised(1, 0, 0), [0.0, *standardised(20, 60)]
    check(got[:3], *(a + 0.5 * b for a, b in zip(first, second, strict=True)))


@pytest.mark.parametrize(("over_batch", "baseline"), [(False, "group_mean"), (True, "group_mean"), (True, "none")])
def test_a_completion_without_any_reward_has_no_part(over_batch, baseline):
    # Without a group's baseline the batch's mean is not 0, and must be that of the scored completions.
    settings = {"over_batch": over_batch, "baseline": baseline}
    rewards = torch.cat([TWO, torch.full((1, 2), NAN, dtype=torch.float64)])
    got = combined_advantages(rewards, WEIGHTS, torch.cat([TWO_GROUPS, longs(1)]), **settings)
    plain = combined_advantages(TWO, WEIGHTS, TWO_GROUPS, **settings)
    check(got, *plain.tolist(), 0.0)


# Properties ---------------------------------------------------------------------------------------------------------


def test_what_is_refused():
    with pytest.raises(ValueError, match="one length"):
        outcome_advantages(torch.zeros(3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="one length"):
        group_statistics(torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="lengths_S"):
        outcome_advantages(REWARDS, GROUPS, baseline="length_weighted")
    with pytest.raises(ValueError, match="need lengths_S"):
        outcome_advantages(REWARDS, GROUPS, scale=BatchStd(unit="token"))
    with pytest.raises(ValueError, match="unknown baseline"):
        outcome_advantages(REWARDS, GROUPS, baseline="median")
    for baseline in ("group_mean", "none"):
        with pytest.raises(RewardError, match="not negative .*got -0.5"):
            outcome_advantages(doubles(1.0, -0.5, NAN), longs(0, 0, 0), baseline=baseline, scale=GroupMean())


def test_a_batchs_spread_over_tokens_counts_a_completion_as_often_as_it_has_tokens():
    rewards, group, lengths = torch.tensor([1.0, 0.0, 3.0]), torch.arange(3), torch.tensor([3, 1, 2])
    scale = BatchStd(unit="token", epsilon=0.0)
    by_token = torch.tensor([1.0, 1.0, 1.0, 0.0, 3.0, 3.0], dtype=torch.float64)
    got = outcome_advantages(rewards, group, baseline="none", scale=scale, lengths_S=lengths)
    torch.testing.assert_close(got, rewards.double() / by_token.std(), rtol=1e-12, atol=0)
    whitened = outcome_advantages(rewards, group, baseline="batch_mean", scale=scale, lengths_S=lengths)
    torch.testing.assert_close(whitened, (rewards.double() - by_token.mean()) / by_token.std(), rtol=1e-12, atol=0)
    spread = torch.repeat_interleave(whitened, lengths)
    assert spread.mean().item() == pytest.approx(0, abs=1e-15)
    assert spread.std().item() == pytest.approx(1, rel=1e-12)


@each("baseline", ["group_mean", "leave_one_out", "length_weighted", "second_best"])
def test_a_group_that_is_dead_in_every_reward_stays_at_zero_over_the_batch(baseline):
    rewards_SK = torch.tensor([[0.1, 0.3]] * 3 + [[1.0, 0.0], [0.0, 0.5], [0.7, 0.2]])
    got = combined_advantages(
        rewards_SK,
        torch.tensor([1.0, 2.0]),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        over_batch=True,
        baseline=baseline,
        lengths_S=torch.tensor([1, 2, 3, 4, 1, 2]),
    )
    assert got[:3].tolist() == [0.0] * 3
    assert got[3:].abs().min() > 0
