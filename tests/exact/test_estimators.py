"""What a group estimator climbs on average, for every finite group size: the pass rate's gradient times a weight.

Binary rewards unless said otherwise; p is the probability of a right sequence. Every G-tuple is enumerated.
"""

import math

import pytest
import torch

from cohort.objective import PRESETS, Objective, coefficients, outcome_advantages
from cohort.presets.parts import GroupMean, GroupStd, SignWeights

from .tabular import TOLERANCE, assert_apart, assert_same, gradient, groups, tree

# vocabulary, longest length, group size
CASES = [(2, 2, 4), (3, 3, 2), (3, 3, 3)]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def plain(**parts):
    """No clip, no division by lengths: (1/G) sum_i A_i S_i."""
    return Objective(**{"scale": None, "aggregation": "seq_sum"} | parts)


def pass_rate(small, logits, right):
    return small.mean(logits, right)


def std_weight(p, G, ddof):
    """E[sqrt(K/G (1 - K/G))] / (p (1 - p)) with K ~ Bin(G, p); the sample std is larger by sqrt(G / (G - 1))."""
    mean = sum(math.comb(G, k) * p**k * (1 - p) ** (G - k) * math.sqrt(k / G * (1 - k / G)) for k in range(G + 1))
    return mean / (p * (1 - p)) * math.sqrt((G - ddof) / G)


def order(T, p):
    """sum of (1 - p)^k for k = 0..T-1: the weight of the log pass rate's expansion cut at order T."""
    return sum((1 - p) ** k for k in range(T))


def setting(case, seed):
    small = tree(*case[:2])
    logits, right = small.logits(seed), small.right(seed)
    p = pass_rate(small, logits, right)
    assert 0.001 < p < 0.999
    return groups(*case), logits, right, p.item(), gradient(pass_rate(small, logits, right), logits)


# Baselines, with any real reward ------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("baseline", ["none", 0.5, -2.0, "leave_one_out"])
def test_a_baseline_that_does_not_see_the_completion_leaves_the_gradient_exact(case, seed, baseline):
    small, rewards = tree(*case[:2]), tree(*case[:2]).rewards(seed)
    logits = small.logits(seed)
    ascent = groups(*case).expected_ascent(plain(baseline=baseline), logits, rewards)
    true = gradient(small.mean(logits, rewards), logits)
    assert true.abs().max() > 1e-3
    assert_same(ascent, true)


@every_case
def test_rloo_is_unbiased(case, seed):
    rloo = PRESETS["rloo"].replace(beta=0.0)
    small, rewards = tree(*case[:2]), tree(*case[:2]).rewards(seed)
    logits = small.logits(seed)
    assert_same(groups(*case).expected_ascent(rloo, logits, rewards), gradient(small.mean(logits, rewards), logits))


@every_case
def test_a_mean_that_counts_the_completion_itself_shrinks_the_gradient(case, seed):
    # Dr. GRPO divides by a constant length besides.
    size, length = case[2], 5
    small, rewards = tree(*case[:2]), tree(*case[:2]).rewards(seed)
    logits = small.logits(seed)
    true = gradient(small.mean(logits, rewards), logits)
    dr_grpo = PRESETS["dr_grpo"].replace(aggregation_length=length)
    assert_same(groups(*case).expected_ascent(dr_grpo, logits, rewards), (size - 1) / size / length * true)
    assert_same(groups(*case).expected_ascent(plain(), logits, rewards), (size - 1) / size * true)


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_over_tokens_climbs_the_reward_per_token(size, seed):
    # Divided by |o_i|, RLOO is no longer the gradient of E[r] but of E[(r - b) / |o|], b = E[r] held fixed.
    small, rewards = tree(3, 3), tree(3, 3).rewards(seed)
    logits = small.logits(seed)
    baseline = small.mean(logits, rewards).detach()
    per_token = gradient(small.mean(logits, (rewards - baseline) / small.lengths_Q), logits)
    objective = plain(baseline="leave_one_out", aggregation="seq_mean_token_mean")
    ascent = groups(3, 3, size).expected_ascent(objective, logits, rewards)
    assert_same(ascent, per_token)
    true = gradient(small.mean(logits, rewards), logits)
    assert_apart(ascent / ascent.norm(), true / true.norm())


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_conditional_advantages_of_live_groups_are_biased_though_the_gradient_is_not(size, p):
    # E[A_i | r_i = 1] is 1 - p over all groups; over those that are not degenerate it is larger.
    rewards = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * size)
    probability = (rewards * p + (1 - rewards) * (1 - p)).prod(1)
    group = torch.arange(len(rewards)).repeat_interleave(size)
    advantages = outcome_advantages(rewards.flatten(), group, baseline="leave_one_out", scale=None)
    first = advantages.reshape(rewards.shape)[:, 0]

    def mean_where(chosen):
        return ((probability * first)[chosen].sum() / probability[chosen].sum()).item()

    is_right, live = rewards[:, 0] == 1, rewards.amax(1) != rewards.amin(1)
    assert mean_where(is_right) == pytest.approx(1 - p, abs=1e-12)
    assert mean_where(is_right & live) == pytest.approx((1 - p) / (1 - p ** (size - 1)), abs=1e-12)


# The group's standard deviation -------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("ddof", [0, 1])
def test_grpo_weighs_prompts_by_their_expected_spread(case, seed, ddof):
    batch, logits, right, p, true = setting(case, seed)
    grpo = PRESETS["default"].replace(scale=GroupStd(ddof=ddof, epsilon=0.0), aggregation="seq_sum")
    assert_same(batch.expected_ascent(grpo, logits, right), std_weight(p, batch.size, ddof) * true)


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@pytest.mark.parametrize(
    ("size", "ddof", "weight"),
    [(2, 0, 1.0), (2, 1, 1 / math.sqrt(2)), (3, 0, math.sqrt(2)), (3, 1, 2 / math.sqrt(3))],
)
def test_a_group_of_two_or_three_has_no_difficulty_bias(seed, spread, size, ddof, weight):
    # A live group of two or three has the same spread whatever its number of right answers, so the std is a constant.
    small, right = tree(3, 3), tree(3, 3).right(seed)
    logits = small.logits(seed, spread)
    true = gradient(pass_rate(small, logits, right), logits)
    objective = plain(scale=GroupStd(ddof=ddof, epsilon=0.0))
    assert_same(groups(3, 3, size).expected_ascent(objective, logits, right), weight * true)


# MaxRL --------------------------------------------------------------------------------------------------------------


@every_case
def test_maxrl_as_shipped_climbs_the_log_pass_rate_to_order_one_less_than_the_group(case, seed):
    batch, logits, right, p, true = setting(case, seed)
    ascent = batch.expected_ascent(PRESETS["maxrl"], logits, right)
    assert_same(ascent, order(batch.size - 1, p) * true)
    # The same by autograd of what it climbs, -sum_k (1 - p)^k / k.
    rate = pass_rate(batch.tree, logits, right)
    assert_same(ascent, gradient(-sum((1 - rate) ** k / k for k in range(1, batch.size)), logits))
    # And against the log itself: what is missing is the geometric series' remainder.
    log_true = gradient(pass_rate(batch.tree, logits, right).log(), logits)
    assert_same(ascent, (1 - (1 - p) ** (batch.size - 1)) * log_true)


def test_maxrl_with_two_completions_is_plain_reinforce(seed):
    batch, logits, right, _, true = setting((3, 3, 2), seed)
    assert_same(batch.expected_ascent(PRESETS["maxrl"], logits, right), true)


def advantages_given(batch, right, rule):
    """c of advantages that the test works out per group: ``rule(rewards_RG) -> advantages_RG``, for credit "given"."""
    advantages_S = rule(right[batch.members_RG]).flatten()
    advantages_N = advantages_S[batch.sequence_N]
    weights_N = torch.full_like(advantages_N, 1 / batch.size)
    return advantages_N, weights_N


@every_case
@pytest.mark.parametrize("kind", ["reward over mean", "failures keep -1"])
def test_the_two_maxrl_estimators_of_full_order(case, seed, kind):
    # Neither is shipped; they show that the order G - 1 comes from the mean that is taken off where nothing is right.
    def rule(rewards_RG):
        mean = rewards_RG.mean(1, keepdim=True)
        over_mean = torch.where(mean > 0, rewards_RG / mean, 0.0)
        return over_mean if kind == "reward over mean" else over_mean - 1

    batch, logits, right, p, true = setting(case, seed)
    advantages, weights = advantages_given(batch, right, rule)
    logps = batch.tree.token_logps(logits.detach())[batch.place_N]
    c = coefficients(plain(baseline="none", credit="given"), logps, advantages, weights).total_N
    assert_same(batch.ascent(batch.probabilities(logits), c, logits), order(batch.size, p) * true)


@every_case
def test_reward_over_mean_without_a_baseline_has_full_order(case):
    # A group in which all are right has advantage 1 everywhere, and it counts: its scores do not add up to 0.
    batch, logits, right, p, true = setting(case, seed=0)
    objective = plain(baseline="none", scale=GroupMean())
    assert_same(batch.expected_ascent(objective, logits, right), order(batch.size, p) * true)


# pass@k and signs ---------------------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("kind", ["real", "binary"])
def test_passk_is_the_gradient_of_the_expected_maximum(case, seed, kind):
    batch, small = groups(*case), tree(*case[:2])
    logits = small.logits(seed)
    rewards = small.rewards(seed) if kind == "real" else small.right(seed)
    best = (batch.probabilities(logits) * rewards[batch.members_RG].amax(1)).sum()
    assert_same(batch.expected_ascent(PRESETS["passk"], logits, rewards), gradient(best, logits))


def test_passk_of_binary_rewards_is_the_gradient_of_the_chance_that_one_is_right(seed):
    batch, logits, right, p, true = setting((3, 3, 3), seed)
    assert_same(batch.expected_ascent(PRESETS["passk"], logits, right), 3 * (1 - p) ** 2 * true)


@pytest.mark.parametrize(("preset", "positive", "negative"), [(True, 0.1, 1.0), (False, 1.0, 0.0), (False, 0.0, 1.0)])
def test_weighting_signs_scales_the_gradient_of_the_pass_rate(seed, preset, positive, negative):
    # lambda 1[right] - 1[wrong] = (lambda + 1) r - 1, so in expectation lambda + 1 times the pass rate's gradient;
    # reward 0.5 off and doubled weights is how the preset writes it.
    batch, logits, right, _, true = setting((3, 3, 2), seed)
    changes = {} if preset else {"sign_weights": SignWeights(positive=2 * positive, negative=2 * negative)}
    objective = PRESETS["w_reinforce"].replace(aggregation="seq_sum", **changes)
    assert_same(batch.expected_ascent(objective, logits, right), (positive + negative) * true)


# Reference numbers --------------------------------------------------------------------------------------------------


def weight_of_many(objective, p, G):
    """The weight for a policy of two tokens, one of them right, from one group per number K of right completions: its
    members' scores are r - p, and K ~ Bin(G, p). Larger groups than tuples could be enumerated for."""
    counts = torch.arange(G + 1)
    rewards_KG = (torch.arange(G) < counts[:, None]).double()
    group = counts.repeat_interleave(G)
    advantages = outcome_advantages(
        rewards_KG.flatten(), group, baseline=objective.baseline, scale=objective.scale
    ).reshape(rewards_KG.shape)
    log_choose = [math.lgamma(G + 1) - math.lgamma(k + 1) - math.lgamma(G - k + 1) for k in range(G + 1)]
    log_choose = torch.tensor(log_choose, dtype=torch.float64)
    counts = counts.double()  # an integer tensor times a float is float32
    probability = (log_choose + counts * math.log(p) + (G - counts) * math.log(1 - p)).exp()
    return ((probability * (advantages * (rewards_KG - p)).mean(1)).sum() / (p * (1 - p))).item()


GRPO_8 = {0.02: 2.407, 0.1: 2.177, 0.3: 1.836, 0.5: 1.736}
GRPO_64 = {0.02: 5.818, 0.1: 3.229, 0.3: 2.145, 0.5: 1.969}
GRPO_LIMIT = {0.02: 7.143, 0.1: 3.333, 0.3: 2.182, 0.5: 2.0}
MAXRL_8 = {0.02: 6.594, 0.1: 5.217, 0.3: 3.059, 0.5: 1.984}
EXACT_STD = plain(scale=GroupStd(ddof=1, epsilon=0.0))
LAST_DIGIT = 5e-4  # the reference numbers are printed to three decimals


@pytest.mark.parametrize("p", GRPO_8)
def test_reference_weights_of_grpo_with_the_sample_std(p):
    assert weight_of_many(EXACT_STD, p, 8) == pytest.approx(GRPO_8[p], abs=LAST_DIGIT)
    assert weight_of_many(EXACT_STD, p, 64) == pytest.approx(GRPO_64[p], abs=LAST_DIGIT)
    for G in (8, 64):
        assert weight_of_many(EXACT_STD, p, G) == pytest.approx(std_weight(p, G, 1), abs=TOLERANCE)


@pytest.mark.parametrize("p", GRPO_8)
@pytest.mark.parametrize("ddof", [0, 1])
def test_the_weight_of_grpo_nears_one_over_the_standard_deviation(p, ddof):
    limit = 1 / math.sqrt(p * (1 - p))
    assert limit == pytest.approx(GRPO_LIMIT[p], abs=LAST_DIGIT)
    scale = plain(scale=GroupStd(ddof=ddof, epsilon=0.0))
    gaps = [abs(weight_of_many(scale, p, G) - limit) for G in (8, 64, 512)]
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_group_of_four_has_a_difficulty_bias(ddof):
    # One right or two of four spread differently, sqrt(3)/4 against 1/2; rare successes come as one.
    scale = plain(scale=GroupStd(ddof=ddof, epsilon=0.0))
    assert weight_of_many(scale, 0.02, 4) > 1.05 * weight_of_many(scale, 0.5, 4)


@pytest.mark.parametrize("p", MAXRL_8)
def test_reference_weights_of_maxrl(p):
    assert weight_of_many(PRESETS["maxrl"], p, 8) == pytest.approx(MAXRL_8[p], abs=LAST_DIGIT)
    assert weight_of_many(PRESETS["maxrl"], p, 64) == pytest.approx(order(63, p), abs=TOLERANCE)


@pytest.mark.parametrize("p", GRPO_8)
@pytest.mark.parametrize("G", [2, 8, 64])
def test_weights_that_do_not_depend_on_difficulty(p, G):
    assert weight_of_many(plain(baseline="leave_one_out"), p, G) == pytest.approx(1, abs=TOLERANCE)
    assert weight_of_many(plain(baseline=0.5), p, G) == pytest.approx(1, abs=TOLERANCE)
    assert weight_of_many(plain(), p, G) == pytest.approx((G - 1) / G, abs=TOLERANCE)
