"""Mistakes found in other libraries, each named after its number in the list they were collected in."""

import dataclasses
import math

import pytest
import torch

from cohort.errors import ConfigError
from cohort.objective import (
    PRESETS,
    Outcomes,
    coefficients,
    kl_correction,
    kl_multiplier,
    mismatch_weights,
    outcome_advantages,
    token_advantages,
    token_weights,
    top_entropy_tokens,
)
from cohort.presets.parts import KL, GroupMean, MismatchWeight
from tests.objective.batches import coefficients_of, random_batch, weights_of


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def longs(*values):
    return torch.tensor(values, dtype=torch.long)


def test_trap_1_a_default_epsilon_never_becomes_cispos_cap():
    # A cap of 0.2 would scale every gradient by 0.2, on-policy too.
    batch = random_batch(0).on_policy()
    expected = batch.advantages_N * weights_of(PRESETS["cispo"], batch)
    assert torch.equal(coefficients_of(PRESETS["cispo"], batch).policy_N, expected)
    with pytest.raises(ConfigError, match="would scale every on-policy gradient"):
        PRESETS["default"].replace(trust_region={"rule": "cap", "high": 0.2})
    with pytest.raises(ConfigError, match="bounds of the PPO clip"):
        PRESETS["cispo"].replace(epsilon=0.2)
    assert PRESETS["default"].replace(trust_region="cap").trust_region == PRESETS["cispo"].trust_region


@pytest.mark.parametrize("level", ["sequence_mean", "sequence_mean_token", "sequence_product"])
def test_trap_2_the_kl_is_never_corrected_by_the_policy_terms_sequence_ratio(level):
    batch = random_batch(0)
    by_token = PRESETS["default"].replace(beta=0.1)
    by_sequence = by_token.replace(ratio_level=level)
    assert torch.equal(coefficients_of(by_sequence, batch).kl_N, coefficients_of(by_token, batch).kl_N)
    # No correction is a geometric mean.
    gaps, sequence = doubles(0.2, 0.6), longs(0, 0)
    for correction in ("token_ratio", "prefix_product", "sequence_weight"):
        weight = kl_correction(KL(correction=correction), gaps, sequence)
        assert (weight.log() - 0.4).abs().min() > 0.1


def test_trap_3_the_kls_correction_is_to_the_sampler_where_the_sampler_drew():
    batch = random_batch(0)
    to_sampler = PRESETS["grpo_v32"].replace(beta=0.1)
    ratio = (batch.logps - batch.sampler).exp()
    expected = -0.1 * weights_of(to_sampler, batch) * ratio * (batch.logps - batch.ref)
    torch.testing.assert_close(coefficients_of(to_sampler, batch).kl_N, expected, rtol=1e-12, atol=0)
    # Whatever the old policy was.
    elsewhere = dataclasses.replace(batch, old=batch.old - 0.7)
    assert torch.equal(coefficients_of(to_sampler, elsewhere).kl_N, coefficients_of(to_sampler, batch).kl_N)
    for name, row in PRESETS.items():
        if row.ratio_anchor == "sampler":
            assert row.kl.anchor == "sampler", name


def test_trap_4_dr_grpo_alone_takes_the_spread_out():
    # In one preset: no standard deviation and a constant length.
    rewards, group, sequence = doubles(10.0, 0.0), longs(0, 0), longs(0, 0, 0, 1)
    got = token_advantages(PRESETS["dr_grpo"], Outcomes(rewards, group, sequence, 50))
    assert got.tolist() == [5.0, 5.0, 5.0, -5.0]
    weights = token_weights(sequence, 2, aggregation=PRESETS["dr_grpo"].aggregation, length=50)
    assert weights.tolist() == [1 / 100] * 4


@pytest.mark.parametrize("name", ["bnpo", "gmpo", "dapo"])
def test_trap_5_no_mean_is_taken_over_a_microbatch(name):
    # Gradients of microbatches add up to that of the minibatch: the weights are made once, for all of it.
    batch, objective = random_batch(0), PRESETS[name].replace(beta=0.0)
    weights_N, whole = weights_of(objective, batch), coefficients_of(objective, batch).policy_N
    parts = torch.zeros_like(whole)
    for s in range(6):
        here = batch.sequence_N == s
        got = coefficients(
            objective,
            batch.logps[here],
            batch.advantages_N[here],
            weights_N[here],
            sequence_N=torch.zeros(int(here.sum()), dtype=torch.long),
            old_logps_N=batch.old[here],
        )
        parts[here] = got.policy_N
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=0)


def test_trap_5_the_entropy_threshold_is_the_minibatchs():
    values = doubles(5.0, 4.0, 3.0, 0.3, 0.2, 0.1)
    whole = top_entropy_tokens(values, 0.5)
    by_parts = torch.cat([top_entropy_tokens(values[:3], 0.5), top_entropy_tokens(values[3:], 0.5)])
    assert whole.tolist() == [True, True, True, False, False, False]
    assert whole.tolist() != by_parts.tolist()  # which is why a microbatch must not choose for itself


def test_trap_7_bounds_on_rho_are_not_turned_round():
    sampler = doubles(-1.0, -1.0)
    old = sampler + doubles(4.0, 0.25).log()
    rule = MismatchWeight(mode="mask", low=0.5, high=5.0)
    got = mismatch_weights((rule,), old, sampler, old, torch.ones_like(old), longs(0, 1))
    torch.testing.assert_close(got.weight_N, doubles(4.0, 0.0))


@pytest.mark.parametrize("name", [name for name, row in PRESETS.items() if row.group_relative])
def test_trap_8_a_group_of_one_has_advantage_zero_with_every_baseline_alike(name):
    alone = Outcomes(
        doubles(7.0),
        longs(0),
        longs(0, 0),
        10,
        by_function_SK=doubles(7.0)[:, None],
        weights_K=doubles(1.0),
        kl_N=doubles(0.0, 0.0),
    )
    assert token_advantages(PRESETS[name], alone).tolist() == [0.0, 0.0]


def test_trap_9_gdpo_normalises_over_completions_and_not_over_tokens():
    rewards, lengths = doubles(1.0, 0.0, 0.0, 4.0, 1.0, 2.0), longs(9, 1, 1, 1, 1, 1)
    group, sequence = longs(0, 0, 0, 1, 1, 1), torch.arange(6).repeat_interleave(lengths)
    outcomes = Outcomes(rewards, group, sequence, 10, by_function_SK=rewards[:, None], weights_K=doubles(1.0))
    objective = PRESETS["gdpo"].replace(scale={"epsilon": 0.0})
    per_completion = token_advantages(objective, outcomes)[lengths.cumsum(0) - 1]
    assert per_completion.mean().item() == pytest.approx(0.0, abs=1e-15)
    assert per_completion.std().item() == pytest.approx(1.0, rel=1e-12)
    over_tokens = token_advantages(objective, outcomes)
    assert abs(over_tokens.std().item() - 1) > 0.05


def test_trap_10_truncating_and_masking_are_not_the_same_gradient():
    logps, sampler, one = doubles(-1.0), doubles(-1.0 - math.log(8)), doubles(1.0)
    got = {}
    for mode in ("truncate", "mask", "reject"):
        objective = PRESETS["default"].replace(mismatch={"rule": "weight", "mode": mode, "high": 2.0})
        got[mode] = coefficients(
            objective, logps, one, one, sequence_N=longs(0), sampler_logps_N=sampler
        ).policy_N.item()
    assert got == {"truncate": 2.0, "mask": 0.0, "reject": 0.0}


def test_trap_13_a_single_completion_is_not_divided_by_an_epsilon():
    assert outcome_advantages(doubles(1.0), longs(0), scale=GroupMean(epsilon=1e-6)).tolist() == [0.0]


@pytest.mark.parametrize("gap", [-18.0, -11.0, 11.0, 18.0])
def test_trap_14_no_clamp_of_k3_takes_its_gradient_away(gap):
    # k3 itself is far above 10 here.
    logps, ref = doubles(-20.0), doubles(-20.0 + gap)
    assert kl_multiplier(logps, ref, direction="forward").item() == pytest.approx(1 - math.exp(gap), rel=1e-12)
    assert kl_multiplier(logps, ref, direction="reverse").item() == pytest.approx(-gap, rel=1e-12)


@pytest.mark.parametrize("gap", [-1e4, -30.0, 30.0, 1e4])
def test_trap_14_beyond_the_hold_the_gradient_stays_at_its_largest(gap):
    kappa = kl_multiplier(doubles(0.0), doubles(gap), direction="forward").item()
    assert kappa == pytest.approx(1 - math.exp(math.copysign(20.0, gap)), rel=1e-12)
    assert kl_multiplier(doubles(0.0), doubles(gap), direction="reverse").item() == -gap
