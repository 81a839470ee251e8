"""Terms over the whole vocabulary: the same expected gradients as their sampled kin, without the sampling."""

import pytest
import torch

from cohort.objective import entropy, k2, k3, kl_correction, vocabulary_kl
from cohort.presets.parts import KL

from .tabular import assert_same, conditional_kls, gradient, tree
from .test_kl import as_loss, drawn_mean, kl_descent, log_pair, partial, policies

TREE = tree(3, 3)
directions = pytest.mark.parametrize("direction", ["reverse", "forward"])


def rows(logits):
    """Log-probs of the whole vocabulary at each token's place, shape ``[L, V]``."""
    return torch.log_softmax(logits, -1)[TREE.prefix_L]


def random_rows(seed, vocabulary=8, count=40):
    """Distributions of a larger vocabulary: policy (with gradient) and reference."""
    generator = torch.Generator().manual_seed(seed)
    logits, ref = (2 * torch.randn(count, vocabulary, dtype=torch.float64, generator=generator) for _ in range(2))
    return logits.requires_grad_(), ref.log_softmax(-1)


# KL -----------------------------------------------------------------------------------------------------------------


@directions
def test_on_policy_the_vocabulary_kl_is_the_partial_gradient(seed, direction):
    logits, _, ref = policies(seed)
    by_vocabulary = as_loss(logits, logits, vocabulary_kl(rows(logits), rows(ref), direction))
    assert_same(by_vocabulary, partial(TREE.visits(logits), logits, ref, direction))
    # The sampled multiplier has the same mean.
    assert_same(by_vocabulary, kl_descent(logits, ref, direction=direction))


def test_it_is_the_mean_of_the_sampled_k2_loss_and_of_the_ratio_times_k3(seed):
    logits, old, ref = policies(seed)
    by_vocabulary = as_loss(logits, logits, vocabulary_kl(rows(logits), rows(ref)))
    assert_same(by_vocabulary, as_loss(logits, logits, k2(*log_pair(logits, ref))))
    logps, ref_logps = log_pair(logits, ref)
    assert_same(by_vocabulary, as_loss(logits, logits, (logps - logps.detach()).exp() * k3(logps, ref_logps)))
    # Off-policy too, with the token's ratio on the sampled side and none needed on the other.
    off_policy = as_loss(logits, old, vocabulary_kl(rows(logits), rows(ref)))
    assert_same(off_policy, kl_descent(logits, ref, old=old, correction="token_ratio"))


@directions
def test_off_policy_only_the_prefixes_are_the_samplers_and_the_prefix_product_restores_them(seed, direction):
    logits, old, ref = policies(seed)
    kl_L = vocabulary_kl(rows(logits), rows(ref), direction)
    assert_same(as_loss(logits, old, kl_L), partial(TREE.visits(old), logits, ref, direction))
    settings = KL(direction=direction, estimator="full", correction="prefix_product")
    log_ratio = (TREE.token_logps(logits) - TREE.token_logps(old)).detach()
    weight = kl_correction(settings, log_ratio, TREE.sequence_L)
    # The token's own ratio has no part in it (it would only add variance): the tokens of a prefix share one weight.
    by_prefix = torch.zeros(len(TREE.prefixes), dtype=torch.float64).index_copy(0, TREE.prefix_L, weight)
    assert_same(weight, by_prefix[TREE.prefix_L])
    assert by_prefix[TREE.prefixes.index(())] == 1
    kl_L = vocabulary_kl(rows(logits), rows(ref), direction)
    assert_same(as_loss(logits, old, weight * kl_L), partial(TREE.visits(logits), logits, ref, direction))


@directions
def test_vocabulary_kl_against_the_plain_formula(seed, direction):
    logits, ref = random_rows(seed)
    log_probs = logits.log_softmax(-1)
    first, second = (logits, ref) if direction == "reverse" else (ref, logits)
    assert_same(vocabulary_kl(log_probs, ref, direction), conditional_kls(first, second))
    ours = gradient(vocabulary_kl(log_probs, ref, direction).sum(), logits)
    assert_same(ours, gradient(conditional_kls(first, second).sum(), logits))


# The top k and a bucket for the rest --------------------------------------------------------------------------------


def coarse_kl(p_V, q_V, k):
    """KL of the distributions over p's k likeliest tokens and "any other", where there is another."""
    leading = p_V.detach().argsort(descending=True)
    p_V, q_V = p_V[leading], q_V[leading]
    if k < len(p_V):
        p_V, q_V = (torch.cat([row[:k], row[k:].sum()[None]]) for row in (p_V, q_V))
    return (p_V * (p_V / q_V).log()).sum()


@directions
@pytest.mark.parametrize("k", range(1, 7))
def test_it_is_the_kl_of_the_coarse_distributions_and_so_is_its_gradient(seed, direction, k):
    # The support is that of the distribution that averages: the policy for reverse, the reference for forward.
    logits, ref = random_rows(seed, vocabulary=6, count=10)
    pair = (logits.softmax(-1), ref.exp())
    first, second = pair if direction == "reverse" else pair[::-1]
    expected = sum(coarse_kl(p_V, q_V, k) for p_V, q_V in zip(first, second, strict=True))
    ours = vocabulary_kl(logits.log_softmax(-1), ref, direction, top_k=k).sum()
    assert_same(ours.detach(), expected.detach())
    assert_same(gradient(ours, logits), gradient(expected, logits))


# Entropy ------------------------------------------------------------------------------------------------------------


def test_the_sampled_tokens_log_prob_has_the_entropys_mean_and_no_gradient(seed):
    logits = TREE.logits(seed)
    table = torch.log_softmax(logits, -1)
    entropies = -(table.exp() * table).sum(-1)
    true = gradient((TREE.visits(logits) * entropies).sum(), logits)
    assert true.abs().max() > 1e-2
    sampled, whole = -TREE.token_logps(logits), entropy(rows(logits))
    assert_same(drawn_mean(logits, sampled), drawn_mean(logits, whole))
    assert_same(as_loss(logits, logits, sampled), torch.zeros_like(logits))
    assert_same(as_loss(logits, logits, whole), true)
