"""The KL term over sequences: what each setting's expected gradient is the gradient of.

Two gradients of the KL between whole sequences are told apart. "Full" is that of KL(policy || reference) itself.
"Partial" is the sum over prefixes of how often each is visited times the gradient of the next token's KL there: the
same value, but what a token does to the prefixes that follow is not counted.
"""

import pytest
import torch

from cohort.objective import PRESETS, Objective, k1, k2, k3, kl_correction
from cohort.presets.parts import KL

from .tabular import assert_apart, assert_same, conditional_kls, gradient, groups, sequence_kl, tree

TREE, ONE = tree(3, 3), groups(3, 3, 1)
SEQUENCE_L = TREE.sequence_L
NO_REWARD = torch.zeros(len(TREE.sequences), dtype=torch.float64)
BETA = 0.7


def policies(seed):
    """Current policy, the policy that samples, and the reference."""
    return TREE.logits(seed), TREE.logits(seed + 100).detach(), TREE.logits(seed + 200).detach()


def partial(weights_P, logits, ref, direction="reverse"):
    """``sum over prefixes of weight * grad KL`` of the next token."""
    first, second = (logits, ref) if direction == "reverse" else (ref, logits)
    return gradient((weights_P * conditional_kls(first, second)).sum(), logits)


def full(logits, ref, direction="reverse"):
    return gradient(sequence_kl(TREE, *((logits, ref) if direction == "reverse" else (ref, logits))), logits)


def kl_descent(logits, ref, *, old=None, sampler=None, aggregation="seq_sum", **kl):
    """The expected gradient of Cohort's KL term alone: no reward, so no policy term. Divided by beta."""
    objective = Objective(baseline="none", scale=None, aggregation=aggregation, kl=KL(beta=BETA, **kl))
    return -ONE.expected_ascent(objective, logits, NO_REWARD, old=old, sampler=sampler, ref=ref) / BETA


def as_loss(logits, drawn_from, term_L):
    """Expected gradient of a term used as a loss: tokens drawn with no gradient through the draw."""
    probability_L = TREE.logps(drawn_from).exp().detach()[SEQUENCE_L]
    return gradient((probability_L * term_L).sum(), logits)


def drawn_mean(drawn_from, term_L):
    """Expected sum over a sequence's tokens."""
    return TREE.mean(drawn_from, TREE.per_sequence(term_L)).detach()


def log_pair(logits, ref):
    return TREE.token_logps(logits), TREE.token_logps(ref)


# Values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased_for_the_reverse_kl_on_policy(seed, estimator):
    logits, _, ref = policies(seed)
    assert_same(drawn_mean(logits, estimator(*log_pair(logits, ref))), sequence_kl(TREE, logits, ref).detach())


@pytest.mark.parametrize("estimator", [k1, k3])
def test_off_policy_the_mean_needs_a_weight(seed, estimator):
    logits, old, ref = policies(seed)
    log_ratio = (TREE.token_logps(logits) - TREE.token_logps(old)).detach()
    term = estimator(*log_pair(logits, ref)).detach()
    kls, exact = conditional_kls(logits, ref).detach(), sequence_kl(TREE, logits, ref).detach()
    assert_apart(drawn_mean(old, term), exact)
    weight = {
        name: kl_correction(KL(correction=name), log_ratio, SEQUENCE_L) for name in ("token_ratio", "prefix_product")
    }
    # The token's ratio: the right KL at each prefix, prefixes as the sampler visits them. The product: both right.
    assert_same(drawn_mean(old, weight["token_ratio"] * term), (TREE.visits(old) * kls).sum())
    assert_same(drawn_mean(old, weight["prefix_product"] * term), exact)
    assert_apart((TREE.visits(old) * kls).sum(), exact)


# The estimators as losses, by autograd ------------------------------------------------------------------------------


def test_the_estimators_as_rewards(seed):
    # Detached and times the score: k1 gives the reverse KL, k3 the reverse less the forward, k2 neither.
    logits, _, ref = policies(seed)
    visits, pair = TREE.visits(logits), log_pair(logits, ref)
    reverse, forward = (partial(visits, logits, ref, direction) for direction in ("reverse", "forward"))
    as_reward = {e: as_loss(logits, logits, e(*pair).detach() * TREE.token_logps(logits)) for e in (k1, k2, k3)}
    assert_same(as_reward[k1], reverse)
    assert_same(as_reward[k3], reverse - forward)
    for exact in (reverse, forward, reverse - forward):
        assert_apart(as_reward[k2], exact)


# Cohort's coefficients, on-policy -----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("correction", ["none", "token_ratio", "prefix_product"])
def test_token_scope_is_the_partial_gradient_on_policy(seed, direction, correction):
    logits, _, ref = policies(seed)
    exact = partial(TREE.visits(logits), logits, ref, direction)
    assert_same(kl_descent(logits, ref, direction=direction, correction=correction), exact)
    # Old log-probs that are the current ones change nothing.
    assert_same(kl_descent(logits, ref, old=logits.detach(), direction=direction, correction=correction), exact)


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("correction", ["none", "sequence_weight"])
def test_sequence_scope_is_the_full_gradient_on_policy(seed, direction, correction):
    logits, _, ref = policies(seed)
    exact = full(logits, ref, direction)
    assert_same(kl_descent(logits, ref, direction=direction, scope="sequence", correction=correction), exact)


# Cohort's coefficients, off-policy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_token_ratio_keeps_the_samplers_prefixes(seed, direction):
    logits, old, ref = policies(seed)
    descent = kl_descent(logits, ref, old=old, direction=direction, correction="token_ratio")
    assert_same(descent, partial(TREE.visits(old), logits, ref, direction))
    assert_apart(descent, partial(TREE.visits(logits), logits, ref, direction))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("correction", ["prefix_product", "sequence_weight"])
def test_prefix_product_and_sequence_weight_restore_the_policys_prefixes(seed, direction, correction):
    logits, old, ref = policies(seed)
    descent = kl_descent(logits, ref, old=old, direction=direction, correction=correction)
    assert_same(descent, partial(TREE.visits(logits), logits, ref, direction))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_sequence_weight_with_sequence_scope_is_the_full_gradient(seed, direction):
    logits, old, ref = policies(seed)
    descent = kl_descent(logits, ref, old=old, direction=direction, scope="sequence", correction="sequence_weight")
    assert_same(descent, full(logits, ref, direction))


@pytest.mark.parametrize("correction", ["token_ratio", "prefix_product"])
def test_the_anchor_must_be_the_policy_that_sampled(seed, correction):
    logits, old, ref = policies(seed)
    sampler = TREE.logits(seed + 300).detach()
    visits = TREE.visits(sampler if correction == "token_ratio" else logits)
    right = kl_descent(logits, ref, old=old, sampler=sampler, correction=correction, anchor="sampler")
    assert_same(right, partial(visits, logits, ref))
    wrong = kl_descent(logits, ref, old=old, sampler=sampler, correction=correction, anchor="old")
    assert_apart(wrong, right)


# In the reward and in the advantage ---------------------------------------------------------------------------------


def with_reward(kl, **parts):
    return Objective(**{"baseline": "leave_one_out", "scale": None, "aggregation": "seq_sum", "kl": kl} | parts)


def reward_gradient(logits, rewards):
    return gradient(TREE.mean(logits, rewards), logits)


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_climbs_the_reward_less_beta_times_the_full_kl(seed, size):
    logits, _, ref = policies(seed)
    rewards = TREE.rewards(seed)
    rloo = PRESETS["rloo"].replace(beta=BETA)
    true = reward_gradient(logits, rewards) - BETA * full(logits, ref)
    assert_same(groups(3, 3, size).expected_ascent(rloo, logits, rewards, ref=ref), true)


@pytest.mark.parametrize("credit", ["outcome", "return_to_go"])
@pytest.mark.parametrize("scope", ["token", "sequence"])
def test_in_the_advantage_the_scope_decides(seed, scope, credit):
    logits, _, ref = policies(seed)
    rewards = TREE.rewards(seed)
    objective = with_reward(KL(beta=BETA, scope=scope, place="advantage"), credit=credit)
    kl = full(logits, ref) if scope == "sequence" else partial(TREE.visits(logits), logits, ref)
    ascent = groups(3, 3, 2).expected_ascent(objective, logits, rewards, ref=ref)
    assert_same(ascent, reward_gradient(logits, rewards) - BETA * kl)


@pytest.mark.parametrize("baseline", ["none", "leave_one_out"])
def test_returns_to_go_of_the_kl_are_the_full_gradient(seed, baseline):
    logits, _, ref = policies(seed)
    rewards = TREE.rewards(seed)
    kl = KL(beta=BETA, scope="sequence", place="reward")
    objective = with_reward(kl, baseline=baseline, credit="return_to_go")
    ascent = groups(3, 3, 2).expected_ascent(objective, logits, rewards, ref=ref)
    assert_same(ascent, reward_gradient(logits, rewards) - BETA * full(logits, ref))


@pytest.mark.parametrize("place", ["reward", "advantage"])
def test_a_discount_of_zero_leaves_the_partial_gradient(seed, place):
    # Each token answers for its own k1 only, and the last token for the reward (here none).
    logits, _, ref = policies(seed)
    kl = KL(beta=BETA, scope="sequence", place=place)
    objective = with_reward(kl, baseline="none", credit="return_to_go", discount=0.0)
    ascent = ONE.expected_ascent(objective, logits, NO_REWARD, ref=ref)
    assert_same(ascent, -BETA * partial(TREE.visits(logits), logits, ref))


def test_off_policy_a_kl_in_the_reward_is_the_old_policys(seed):
    # Its log-ratio is the old policy's and stays: with exact sequence weights the climb is that of a fixed reward.
    logits, old, ref = policies(seed)
    rewards = TREE.rewards(seed)
    kl = KL(beta=BETA, scope="sequence", place="reward")
    objective = with_reward(kl, ratio_level="sequence_product")
    ascent = groups(3, 3, 2).expected_ascent(objective, logits, rewards, old=old, ref=ref)
    fixed = (TREE.logps(old) - TREE.logps(ref)).detach()
    assert_same(ascent, reward_gradient(logits, rewards - BETA * fixed))
    assert_apart(ascent, reward_gradient(logits, rewards) - BETA * full(logits, ref))
