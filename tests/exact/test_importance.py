"""Samples from another policy: which ratio makes the expected gradient exact, and what the others give instead."""

import pytest
import torch

from cohort.objective import Objective
from cohort.presets.parts import MismatchWeight

from .tabular import assert_apart, assert_same, gradient, groups, tree

TREE = tree(3, 3)
LEVELS = ("token", "sequence_mean", "sequence_mean_token", "sequence_product", "prefix_product")
baselines = pytest.mark.parametrize("baseline", ["none", "leave_one_out", "group_mean"])


def objective(**parts):
    return Objective(**{"baseline": "leave_one_out", "scale": None, "aggregation": "seq_sum"} | parts)


def true_gradient(logits, rewards, small=TREE):
    return gradient(small.mean(logits, rewards), logits)


def pair(seed, small=TREE):
    return small.logits(seed), small.logits(seed + 100).detach()


@baselines
@pytest.mark.parametrize("anchor", ["old", "sampler"])
def test_the_ratio_of_whole_sequences_is_unbiased(seed, baseline, anchor):
    logits, other = pair(seed)
    rewards = TREE.rewards(seed)
    chosen = objective(baseline=baseline, ratio_level="sequence_product", ratio_anchor=anchor)
    ascent = groups(3, 3, 2).expected_ascent(chosen, logits, rewards, **{anchor: other})
    shrunk = 0.5 if baseline == "group_mean" else 1.0  # (G - 1) / G, as on-policy
    assert_same(ascent, shrunk * true_gradient(logits, rewards))


@pytest.mark.parametrize("level", LEVELS)
def test_for_a_single_token_all_levels_are_one_and_unbiased(seed, level):
    small = tree(3, 1)
    logits, old = pair(seed, small)
    rewards = small.rewards(seed)
    for size in (2, 3, 4):
        ascent = groups(3, 1, size).expected_ascent(objective(ratio_level=level), logits, rewards, old=old)
        assert_same(ascent, true_gradient(logits, rewards, small))


def suffix_from(logits, drawn_from, rewards, prefix_of):
    """Gradient of sum_t E[R] in which token t follows the current policy with a gradient, the tokens before it
    ``prefix_of`` without one, and those after it the sampler."""
    total = 0.0
    rows, fixed, sampled = (table.log_softmax(-1) for table in (logits, prefix_of.detach(), drawn_from))
    places = {prefix: place for place, prefix in enumerate(TREE.prefixes)}
    for sequence, reward in zip(TREE.sequences, rewards.tolist(), strict=True):
        for t, token in enumerate(sequence):
            before = sum(fixed[places[sequence[:u]], sequence[u]] for u in range(t))
            after = sum(sampled[places[sequence[:u]], sequence[u]] for u in range(t + 1, len(sequence)))
            total = total + reward * (before + rows[places[sequence[:t]], token] + after).exp()
    return gradient(total, logits)


def test_the_token_ratio_keeps_the_samplers_prefixes_and_continuations(seed):
    logits, old = pair(seed)
    rewards = TREE.rewards(seed)
    ascent = groups(3, 3, 2).expected_ascent(objective(ratio_level="token"), logits, rewards, old=old)
    assert_same(ascent, suffix_from(logits, old, rewards, prefix_of=old))


def test_the_prefix_product_has_the_policys_prefixes_and_the_samplers_continuations(seed):
    # The weight ends at the token. A reward that comes later was drawn with the sampler's later tokens.
    logits, old = pair(seed)
    rewards = TREE.rewards(seed)
    ascent = groups(3, 3, 2).expected_ascent(objective(ratio_level="prefix_product"), logits, rewards, old=old)
    assert_same(ascent, suffix_from(logits, old, rewards, prefix_of=logits))


def test_the_prefix_product_is_unbiased_for_a_reward_that_each_token_earns_at_once(seed):
    logits, old = pair(seed)
    generator = torch.Generator().manual_seed(seed)
    reward_PV = torch.randn(logits.shape, dtype=torch.float64, generator=generator)
    chosen = objective(baseline="none", credit="given", ratio_level="prefix_product")
    earned_L = reward_PV[TREE.prefix_L, TREE.token_L]
    nothing = torch.zeros(len(TREE.sequences), dtype=torch.float64)
    ascent = groups(3, 3, 1).expected_ascent(chosen, logits, nothing, old=old, token_rewards_L=earned_L)

    def at_the_prefixes_of(drawn_from):
        earned_P = (torch.softmax(logits, -1) * reward_PV).sum(-1)
        return gradient((TREE.visits(drawn_from) * earned_P).sum(), logits)

    assert_same(ascent, at_the_prefixes_of(logits))
    by_token = groups(3, 3, 1).expected_ascent(
        chosen.replace(ratio_level="token"), logits, nothing, old=old, token_rewards_L=earned_L
    )
    assert_same(by_token, at_the_prefixes_of(old))


# The weight between the sampler and the old policy ------------------------------------------------------------------

UNTOUCHED = {"mode": "truncate", "low": 0.0, "high": 1e6}
"""Bounds that no ratio of these trees reaches."""


@baselines
def test_a_sequence_mismatch_weight_is_unbiased(seed, baseline):
    # The old policy is the current one, the engine sampled from another.
    logits, sampler = pair(seed)
    rewards = TREE.rewards(seed)
    chosen = objective(baseline=baseline, mismatch=(MismatchWeight(level="sequence", **UNTOUCHED),))
    ascent = groups(3, 3, 2).expected_ascent(chosen, logits, rewards, sampler=sampler)
    assert_same(ascent, (0.5 if baseline == "group_mean" else 1.0) * true_gradient(logits, rewards))


def test_ratio_and_mismatch_weight_multiply_to_the_whole_ratio(seed):
    # Policy over old times old over sampler: three different policies.
    logits, old = pair(seed)
    sampler, rewards = TREE.logits(seed + 300).detach(), TREE.rewards(seed)
    for level in ("sequence", "token"):
        ratio_level = "sequence_product" if level == "sequence" else "token"
        chosen = objective(ratio_level=ratio_level, mismatch=(MismatchWeight(level=level, **UNTOUCHED),))
        ascent = groups(3, 3, 2).expected_ascent(chosen, logits, rewards, old=old, sampler=sampler)
        direct = objective(ratio_level=ratio_level, ratio_anchor="sampler")
        assert_same(ascent, groups(3, 3, 2).expected_ascent(direct, logits, rewards, sampler=sampler))
        if level == "sequence":
            assert_same(ascent, true_gradient(logits, rewards))


@pytest.mark.parametrize("mode", ["truncate", "mask", "reject"])
def test_bounds_that_act_cost_exactness(seed, mode):
    logits, sampler = pair(seed)
    rewards = TREE.rewards(seed)
    chosen = objective(mismatch=(MismatchWeight(level="sequence", mode=mode, low=0.5, high=2.0),))
    ascent = groups(3, 3, 2).expected_ascent(chosen, logits, rewards, sampler=sampler)
    assert_apart(ascent, true_gradient(logits, rewards))
    # What is left is exact for the weight that was used: RLOO's baseline is independent of the completion, and the
    # scores are no longer of mean 0, so it keeps a part.
    log_ratio = (TREE.logps(logits) - TREE.logps(sampler)).detach()
    ratio = log_ratio.exp()
    inside = (ratio >= 0.5) & (ratio <= 2.0)
    weight = {"truncate": ratio.clamp(0.5, 2.0), "mask": ratio * inside, "reject": inside.double()}[mode]
    centred = rewards - TREE.mean(sampler, rewards)
    expected = (TREE.logps(sampler).exp() * weight * centred * TREE.logps(logits)).sum()
    assert_same(ascent, gradient(expected, logits))
