"""Every preset's coefficients against autograd of its paper's objective, and what all share."""

import dataclasses
import math

import pytest
import torch

from cohort.objective import PRESETS, Cause, coefficients
from tests.conftest import each
from tests.objective.batches import Batch, coefficients_of, random_batch, weights_of
from tests.objective.surrogates import (
    POLICY,
    cispo,
    dppo,
    fixed,
    geometric,
    gradient_of,
    kl_of,
    min_clip,
    ppo,
    product,
    seq_mean,
    token_mean,
    two_sided,
)

SEED = 7
"""A batch in which every rule that silences does so on both sides; see below."""
BETA = 0.3
ROUNDING = {"rtol": 0, "atol": 1e-12}
"""float64 sums of some 15 terms of order 1, reached by two roads; ratios up to e^8 in products bring it near 1e-12."""


def with_beta(name):
    """The preset with a KL term that can be seen."""
    return PRESETS[name].replace(beta=BETA)


def plain(name):
    return PRESETS[name].replace(beta=0.0)


def test_every_preset_has_a_surrogate():
    assert set(POLICY) == set(PRESETS)


@each("name", POLICY)
def test_the_policy_term_is_the_gradient_of_the_papers_objective(name):
    batch = random_batch(SEED)
    expected, value = gradient_of(POLICY[name], batch)
    got = coefficients_of(plain(name), batch)
    torch.testing.assert_close(got.policy_N, expected, **ROUNDING)
    assert got.kl_N.abs().max() == 0
    assert (weights_of(PRESETS[name], batch) * got.value_N).sum().item() == pytest.approx(value, rel=1e-12, abs=1e-12)


@each("name", POLICY)
def test_the_kl_term_is_the_gradient_of_the_papers_objective(name):
    batch, surrogate = random_batch(SEED), kl_of(name)
    got = coefficients_of(with_beta(name), batch)
    expected = torch.zeros_like(batch.logps) if surrogate is None else -BETA * gradient_of(surrogate, batch)[0]
    torch.testing.assert_close(got.kl_N, expected, **ROUNDING)
    torch.testing.assert_close(got.total_N, got.policy_N + got.kl_N, rtol=0, atol=0)
    assert torch.equal(got.policy_N, coefficients_of(plain(name), batch).policy_N)


def policy_value(objective, batch):
    return (weights_of(objective, batch) * coefficients_of(objective, batch).value_N).sum().item()


def test_the_batches_are_away_from_every_bound():
    # Else the comparison above would be of subgradients.
    batch = random_batch(SEED)
    bounds = torch.tensor([0.8, 1.2, 1.28, math.exp(-0.4), math.exp(0.4), 4.0, 5.0], dtype=torch.float64).log()
    for anchor in (batch.old, batch.sampler):
        assert ((batch.logps - anchor)[:, None] - bounds).abs().min() > 0.01
    narrow = torch.tensor([1 - 3e-4, 1 + 4e-4, 1 - 2e-3, 1 + 2.5e-3], dtype=torch.float64)
    means = torch.stack([geometric(batch, batch.logps, i) for i, tokens in enumerate(batch.tokens) if tokens])
    assert (means[:, None] - narrow).abs().min() > 1e-5
    products = torch.stack([product(batch.logps, batch.old, tokens) for tokens in batch.tokens if tokens])
    assert (products[:, None] - torch.tensor([0.8, 1.2])).abs().min() > 1e-5


@each(
    "name", [name for name in POLICY if name not in ("cispo", "scalerl", "sapo", "vespo", "grpo_r1", "ce_gppo", "topr")]
)
def test_the_batches_meet_the_bounds_of_every_rule_that_silences(name):
    causes = coefficients_of(plain(name), random_batch(SEED)).cause_N
    for cause in (Cause.ACTIVE, Cause.CLIPPED_LOW, Cause.CLIPPED_HIGH):
        assert (causes == cause).any(), cause


# Rules and levels that no preset uses -------------------------------------------------------------------------------


def masked(signed):
    def term(r, a):
        low, high = r < 0.5, r > 1.4
        if signed:
            low, high = low and a < 0, high and a > 0
        return 0.0 * r if low or high else r * a

    return lambda b, lp: seq_mean(b, lambda i, n: term(torch.exp(lp[n] - b.old[n]), b.advantages_S[i]))


def fipo(b, lp):
    """PPO's clip times clip(exp(sum of 2^(-(k - t) / 2) log r_k), 0.9, 1.3), at most 1 where A < 0 and r > 1.4."""

    def term(i, n):
        later = b.tokens[i][b.tokens[i].index(n) :]
        future = sum(2 ** (-j / 2) * (lp[k] - b.old[k]) for j, k in enumerate(later))
        weight = torch.clamp(torch.exp(fixed(future)), 0.9, 1.3)
        r, a = torch.exp(lp[n] - b.old[n]), b.advantages_S[i]
        if a < 0 and r > 1.4:
            weight = torch.clamp(weight, max=1.0)
        return weight * min_clip(r, a, 0.8, 1.2)

    return seq_mean(b, term)


def prefix(b, lp):
    """The product of the ratios up to a token; those before it carry no gradient."""

    def term(i, n):
        earlier = b.tokens[i][: b.tokens[i].index(n)]
        return fixed(product(lp, b.old, earlier)) * torch.exp(lp[n] - b.old[n]) * b.advantages_S[i]

    return seq_mean(b, term)


def capped_product(b, lp):
    def weight(i):
        return fixed(torch.clamp(product(lp, b.old, b.tokens[i]), 0.5, 2.0))

    return seq_mean(b, lambda i, n: weight(i) * b.advantages_S[i] * lp[n])


def weighed(b, lp):
    """PPO's clip times min(rho, 1.5), where the sequence's geometric mean of rho is in [0.6, 1.7]."""

    def weight(i, n):
        rho = torch.exp(b.old - b.sampler)
        mean = torch.exp(sum(b.old[k] - b.sampler[k] for k in b.tokens[i]) / len(b.tokens[i]))
        return torch.clamp(rho[n], max=1.5) * (1.0 if 0.6 <= mean <= 1.7 else 0.0)

    return seq_mean(b, lambda i, n: weight(i, n) * min_clip(torch.exp(lp[n] - b.old[n]), b.advantages_S[i], 0.8, 1.2))


def unclipped_product(b, lp):
    """(1/B) sum_i (1/|o_i|) W_i A_i"""
    terms = [
        product(lp, b.old, tokens) * a / len(tokens)
        for tokens, a in zip(b.tokens, b.advantages_S, strict=True)
        if tokens
    ]
    return sum(terms) / len(b.tokens)


def log_policy(b, lp):
    return seq_mean(b, lambda i, n: b.advantages_S[i] * lp[n])


OTHERS = {
    "mask": ({"trust_region": {"rule": "mask", "low": 0.5, "high": 1.4}}, masked(False)),
    "signed mask": ({"trust_region": {"rule": "mask", "low": 0.5, "high": 1.4, "signed": True}}, masked(True)),
    "fipo": (
        {"trust_region": {"rule": "fipo", "half_life": 2.0, "weight_low": 0.9, "weight_high": 1.3, "safety": 1.4}},
        fipo,
    ),
    "prefix product": ({"trust_region": "none", "ratio_level": "prefix_product"}, prefix),
    "sequence product": ({"trust_region": "none", "ratio_level": "sequence_product"}, unclipped_product),
    "capped product": (
        {"trust_region": {"rule": "cap", "low": 0.5, "high": 2.0}, "ratio_level": "sequence_product"},
        capped_product,
    ),
    "no trust region": ({"trust_region": "none"}, ppo(seq_mean, 0, math.inf)),
    "self": ({"trust_region": "none", "ratio_anchor": "self"}, log_policy),
    "clip against the sampler": ({"ratio_anchor": "sampler"}, ppo(seq_mean, 0.8, 1.2, anchor="sampler")),
    "dual clip": ({"trust_region": {"dual": 1.4}}, two_sided(seq_mean, 0.8, 1.2, 1.4)),
    "cap below": ({"trust_region": {"rule": "cap", "low": 0.9, "high": 1.4}}, cispo(seq_mean, 0.9, 1.4)),
    "tv mask with a low cap": (
        {
            "ratio_anchor": "sampler",
            "trust_region": {"rule": "tv_mask", "low": 0.05, "high": 0.3, "cap": 1.4},
            "aggregation": "token_mean",
        },
        dppo(lambda p, mu, a: not (a > 0 and p - mu > 0.3) and not (a < 0 and mu - p > 0.05), cap=1.4),
    ),
    "mismatch weights": (
        {
            "mismatch": [
                {"rule": "weight", "high": 1.5},
                {"rule": "weight", "level": "geometric", "mode": "reject", "low": 0.6, "high": 1.7},
            ]
        },
        weighed,
    ),
}


@each("name", OTHERS)
def test_rules_that_no_preset_uses(name):
    settings, surrogate = OTHERS[name]
    batch, objective = random_batch(0), PRESETS["default"].replace(**settings)
    expected, value = gradient_of(surrogate, batch)
    got = coefficients_of(objective, batch)
    torch.testing.assert_close(got.policy_N, expected, **ROUNDING)
    assert policy_value(objective, batch) == pytest.approx(value, rel=1e-12, abs=1e-12)


# The KL beside the policy term; tests/exact has the gradient of every form of it ----------------------------------


@pytest.mark.parametrize("kl", [{"place": "reward"}, {"place": "advantage"}, {"estimator": "full"}], ids=str)
def test_a_kl_outside_of_the_loss_or_over_the_vocabulary_adds_no_coefficient(kl):
    objective = PRESETS["default"].replace(scale="none", kl={"beta": BETA, **kl})
    got, batch = coefficients_of(objective, random_batch(0)), random_batch(0)
    assert got.kl_N.abs().max() == 0
    assert torch.equal(got.policy_N, coefficients_of(plain("default"), batch).policy_N)


@pytest.mark.parametrize("level", ["sequence_mean", "sequence_mean_token", "sequence_product"])
def test_the_kl_is_never_corrected_by_the_policy_terms_sequence_ratio(level):
    batch, by_token = random_batch(0), with_beta("default")
    by_sequence = coefficients_of(by_token.replace(ratio_level=level), batch)
    assert torch.equal(by_sequence.kl_N, coefficients_of(by_token, batch).kl_N)


def test_where_the_sampler_drew_the_kl_does_not_see_the_old_policy():
    batch, objective = random_batch(0), with_beta("grpo_v32")
    elsewhere = dataclasses.replace(batch, old=batch.old - 0.7)
    assert torch.equal(coefficients_of(objective, elsewhere).kl_N, coefficients_of(objective, batch).kl_N)
    assert all(row.kl.anchor == "sampler" for row in PRESETS.values() if row.ratio_anchor == "sampler")


# What all share -----------------------------------------------------------------------------------------------------


@each("name", POLICY)
def test_on_policy_every_preset_is_reinforce_with_its_mean(name):
    batch = random_batch(0).on_policy()
    got = coefficients_of(plain(name), batch)
    torch.testing.assert_close(got.policy_N, batch.advantages_N * weights_of(PRESETS[name], batch), rtol=1e-15, atol=0)
    assert got.cause_N.tolist() == [Cause.ACTIVE] * len(batch.logps)
    assert got.log_ratio_N.abs().max() == 0


ALL_RULES = {
    **{name: plain(name) for name in POLICY},
    **{n: PRESETS["default"].replace(**s) for n, (s, _) in OTHERS.items()},
}


@each("name", ALL_RULES)
def test_an_advantage_of_zero_is_no_gradient_whatever_the_ratio(name):
    batch = random_batch(0)
    far = dataclasses.replace(
        batch,
        old=batch.logps + 1e4 * (batch.old - batch.logps),
        sampler=batch.logps + 1e4 * (batch.sampler - batch.logps),
        advantages_S=torch.zeros_like(batch.advantages_S),
    )
    got = coefficients_of(ALL_RULES[name], far)
    assert got.policy_N.tolist() == [0.0] * len(batch.logps)
    assert set(got.cause_N.tolist()) == {Cause.NO_ADVANTAGE}


def with_junk(batch: Batch, junk: float):
    """The batch with a token of junk before and after every token, and which places are the real ones."""
    places = torch.arange(3 * len(batch.logps)) % 3 == 1

    def spread(values, filling):
        out = torch.full((len(places),), filling, dtype=values.dtype)
        out[places] = values
        return out

    logps = {name: spread(getattr(batch, name), junk) for name in ("logps", "old", "sampler", "ref")}
    sequence_N = torch.arange(len(places)) % len(batch.advantages_S)
    sequence_N[places] = batch.sequence_N
    return dataclasses.replace(batch, **logps, sequence_N=sequence_N), places


@each(("number", "name"), list(enumerate(ALL_RULES)))
def test_masked_tokens_may_be_anything_and_change_nothing(number, name):
    batch, objective = random_batch(1), ALL_RULES[name].replace(beta=BETA)
    junk = (math.nan, math.inf, -math.inf)[number % 3]
    dirty, places = with_junk(batch, junk)
    weights_N = torch.zeros(len(places), dtype=torch.float64)
    weights_N[places] = weights_of(objective, batch)
    got, clean = coefficients_of(objective, dirty, weights_N), coefficients_of(objective, batch)
    for name, expected in clean._asdict().items():
        value = getattr(got, name)
        torch.testing.assert_close(value[places], expected, rtol=1e-14, atol=1e-15)
        assert (value[~places] == (Cause.MASKED if name == "cause_N" else 0)).all()


@each("name", POLICY)
def test_low_entropy_tokens_have_no_policy_term_but_a_kl_term(name):
    batch, objective = random_batch(2), with_beta(name)
    base_N = weights_of(objective, batch)
    chosen_N = torch.arange(len(batch.logps)) % 2 == 0
    got = coefficients(
        objective,
        batch.logps,
        batch.advantages_N,
        base_N * chosen_N,
        sequence_N=batch.sequence_N,
        old_logps_N=batch.old,
        sampler_logps_N=batch.sampler,
        ref_logps_N=batch.ref,
        base_weights_N=base_N,
    )
    all_tokens = coefficients_of(objective, batch)
    assert torch.equal(got.policy_N, all_tokens.policy_N * chosen_N)
    assert torch.equal(got.kl_N, all_tokens.kl_N)
    assert set(got.cause_N[~chosen_N].tolist()) == {Cause.LOW_ENTROPY}
    assert torch.equal(got.cause_N[chosen_N], all_tokens.cause_N[chosen_N])


@each("name", ["default", "gspo", "rloo", "dapo"])
def test_without_an_old_policy_the_ratio_is_one(name):
    batch, objective = random_batch(0), plain(name)
    weights_N = weights_of(objective, batch)
    got = coefficients(objective, batch.logps, batch.advantages_N, weights_N, sequence_N=batch.sequence_N)
    torch.testing.assert_close(got.total_N, batch.advantages_N * weights_N, rtol=0, atol=0)


def test_an_unknown_sampler_log_prob_is_a_ratio_of_one():
    batch = random_batch(0)
    unknown = dataclasses.replace(batch, sampler=torch.full_like(batch.logps, math.nan))
    for name in ("vespo", "dppo_tv", "dppo_kl", "grpo_v32"):
        expected = batch.advantages_N * weights_of(PRESETS[name], batch)
        torch.testing.assert_close(coefficients_of(plain(name), unknown).policy_N, expected, rtol=1e-15, atol=0)


def test_means_of_the_surrogates_differ():
    # Else a preset with another denominator would pass with the wrong one.
    batch = random_batch(0)
    assert abs(seq_mean(batch, lambda i, n: batch.logps[n]) - token_mean(batch, lambda i, n: batch.logps[n])) > 1e-3
