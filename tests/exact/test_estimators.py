"""What a group estimator climbs on average, for every finite group size: the pass rate's gradient times a weight.

Binary rewards unless said otherwise; p is the probability of a right sequence. Every G-tuple is enumerated.
"""

import math

import pytest
import torch

from cohort.objective import PRESETS, Objective, outcome_advantages
from cohort.presets.parts import GroupMean, GroupStd, SignWeights
from tests.conftest import each

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


# The group's standard deviation -------------------------------------------------------------------------------------


@every_case
@pytest.mark.parametrize("ddof", [0, 1])
def test_grpo_weighs_prompts_by_their_expected_spread(case, seed, ddof):
    batch, logits, right, p, true = setting(case, seed)
    grpo = PRESETS["default"].replace(scale=GroupStd(ddof=ddof, epsilon=0.0), aggregation="seq_sum")
    assert_same(batch.expected_ascent(grpo, logits, right), std_weight(p, batch.size, ddof) * true)


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
MAXRL_8 = {0.02: 6.594, 0.1: 5.217, 0.3: 3.059, 0.5: 1.984}
EXACT_STD = plain(scale=GroupStd(ddof=1, epsilon=0.0))
LAST_DIGIT = 5e-4  # the reference numbers are printed to three decimals


@each("p", GRPO_8)
def test_reference_weights_of_grpo_with_the_sample_std(p):
    assert weight_of_many(EXACT_STD, p, 8) == pytest.approx(GRPO_8[p], abs=LAST_DIGIT)
    assert weight_of_many(EXACT_STD, p, 64) == pytest.approx(GRPO_64[p], abs=LAST_DIGIT)
    for G in (8, 64):
        assert weight_of_many(EXACT_STD, p, G) == pytest.approx(std_weight(p, G, 1), abs=TOLERANCE)


@each("p", MAXRL_8)
def test_reference_weights_of_maxrl(p):
    assert weight_of_many(PRESETS["maxrl"], p, 8) == pytest.approx(MAXRL_8[p], abs=LAST_DIGIT)
    assert weight_of_many(PRESETS["maxrl"], p, 64) == pytest.approx(order(63, p), abs=TOLERANCE)
