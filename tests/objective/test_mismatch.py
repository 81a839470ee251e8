"""Sampler and trainer disagreeing: every rule by hand."""

import math

import pytest
import torch

from cohort.objective import PRESETS, Cause, coefficients, mismatch_weights, token_weights
from cohort.presets.parts import MismatchWeight, OffPolicyMask, Veto
from tests.conftest import each
from tests.objective.batches import doubles

RHO = (4.0, 0.25, 1.0, 8.0, 0.5)
"""Of two interleaved sequences: (4, 1, 0.5), with product 2, and (0.25, 8), with product 2."""
SEQUENCE = torch.tensor([0, 1, 0, 1, 0])
SQRT2 = 2**0.5
CBRT2 = 2 ** (1 / 3)


def weigh(*rules, rho=RHO, gap=None, advantages=None, sequence=SEQUENCE):
    """The rules on tokens with these old / sampler, and log(sampler / policy) ``gap``."""
    sampler = torch.full((len(rho),), -1.0, dtype=torch.float64)
    logps = sampler if gap is None else sampler - doubles(*gap)
    a_N = torch.ones_like(sampler) if advantages is None else doubles(*advantages)
    return mismatch_weights(rules, sampler + doubles(*rho).log(), sampler, logps, a_N, sequence)


@each(
    ("level", "mode", "low", "high", "weights"),
    [
        ("token", "truncate", 0.0, 2.0, [2.0, 0.25, 1.0, 2.0, 0.5]),
        ("token", "truncate", 0.4, 5.0, [4.0, 0.4, 1.0, 5.0, 0.5]),
        ("token", "mask", 0.4, 5.0, [4.0, 0.0, 1.0, 0.0, 0.5]),
        ("token", "reject", 0.4, 5.0, [1.0, 0.0, 1.0, 0.0, 1.0]),
        ("sequence", "truncate", 0.0, 1.5, [1.5] * 5),
        ("sequence", "truncate", 0.0, 3.0, [2.0] * 5),
        ("sequence", "mask", 0.5, 3.0, [2.0] * 5),
        ("sequence", "mask", 0.5, 1.5, [0.0] * 5),
        ("sequence", "reject", 0.5, 3.0, [1.0] * 5),
        ("geometric", "truncate", 0.0, 1.3, [CBRT2, 1.3, CBRT2, 1.3, CBRT2]),
        ("geometric", "mask", 0.5, 1.3, [CBRT2, 0.0, CBRT2, 0.0, CBRT2]),
        ("geometric", "reject", 0.5, 1.3, [1.0, 0.0, 1.0, 0.0, 1.0]),
        ("geometric", "mask", 0.5, 2.0, [CBRT2, SQRT2, CBRT2, SQRT2, CBRT2]),
    ],
)
def test_weights_by_hand(level, mode, low, high, weights):
    got = weigh(MismatchWeight(level=level, mode=mode, low=low, high=high))
    torch.testing.assert_close(got.weight_N, doubles(*weights), rtol=1e-14, atol=0)
    dropped = [mode != "truncate" and weight == 0 for weight in weights]
    assert got.dropped_N.tolist() == dropped
    assert not got.off_policy_N.any()


@each(
    ("level", "low", "kept"),
    [
        ("sequence", 0.45, [True] * 5),
        ("sequence", 0.55, [False] * 5),
        ("geometric", 0.75, [True, False, True, False, True]),
        ("geometric", 0.7, [True] * 5),
    ],
)
def test_a_level_drops_whole_sequences_below_its_bound(level, low, kept):
    # rho turned round: products of 1/2, geometric means of 2^(-1/3) = 0.794 and 2^(-1/2) = 0.707.
    got = weigh(MismatchWeight(level=level, mode="reject", low=low), rho=[1 / rho for rho in RHO])
    assert got.weight_N.tolist() == [float(keep) for keep in kept]


@pytest.mark.parametrize("mode", ["mask", "reject"])
def test_a_token_on_a_bound_stays(mode):
    got = weigh(MismatchWeight(mode=mode, low=1.0, high=2.0), rho=(1.0, 1.0), sequence=torch.tensor([0, 0]))
    assert got.weight_N.tolist() == [1.0, 1.0]


def test_a_veto_drops_the_whole_sequence():
    assert weigh(Veto(low=0.3, high=10.0)).weight_N.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert weigh(Veto(low=0.2, high=5.0)).weight_N.tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert weigh(Veto(low=0.2, high=3.0)).weight_N.tolist() == [0.0] * 5
    assert weigh(Veto(low=0.2, high=10.0)).weight_N.tolist() == [1.0] * 5
    assert weigh(Veto(low=0.3, high=10.0)).dropped_N.tolist() == [False, True, False, True, False]


@each(
    ("advantages", "threshold", "silenced"),
    [
        # Mean gaps: sequence 0 has (0.9 + 0.0 + 0.6) / 3 = 0.5, sequence 1 has (-1 + 0.2) / 2 = -0.4.
        ([-1, -1, -1, -1, -1], 0.45, [True, False, True, False, True]),
        ([-1, -1, -1, -1, -1], 0.55, [False] * 5),
        ([1, 1, 1, 1, 1], 0.45, [False] * 5),
        ([0, -1, 0, -1, 0], 0.45, [False] * 5),
        ([-1, 1, -1, 1, -1], 0.0, [True, False, True, False, True]),
    ],
)
def test_the_off_policy_mask_by_hand(advantages, threshold, silenced):
    got = weigh(OffPolicyMask(threshold=threshold), gap=(0.9, -1.0, 0.0, 0.2, 0.6), advantages=advantages)
    assert got.off_policy_N.tolist() == silenced
    assert got.weight_N.tolist() == [0.0 if drop else 1.0 for drop in silenced]
    assert not got.dropped_N.any()


def test_the_off_policy_mask_looks_at_the_current_policy_and_not_the_old():
    # old = sampler / 4, but the current policy agrees with the sampler.
    got = weigh(OffPolicyMask(threshold=0.5), rho=[0.25] * 5, gap=[0.0] * 5, advantages=[-1.0] * 5)
    assert got.weight_N.tolist() == [1.0] * 5


def test_an_unknown_sampler_log_prob_is_a_rho_of_one():
    old, sampler = doubles(-1.0, -1.0, -5.0), doubles(math.nan, -1.0 - math.log(4), math.nan)
    rules = (MismatchWeight(level="sequence", mode="mask", low=0.5, high=5.0), Veto(low=0.5, high=5.0))
    got = mismatch_weights(rules, old, sampler, old, torch.ones_like(old), torch.tensor([0, 0, 1]))
    torch.testing.assert_close(got.weight_N, doubles(4.0, 4.0, 1.0))
    masked = OffPolicyMask(threshold=0.5)
    gaps = mismatch_weights(
        (masked,), old, sampler, doubles(-9.0, -3.5, -9.0), -torch.ones_like(old), torch.tensor([0, 0, 1])
    )
    # Sequence 0: (0 + (-1 - log 4 + 3.5)) / 2 = 0.557; the unknown token adds 0 to the sum and 1 to the count.
    assert gaps.off_policy_N.tolist() == [True, True, False]


def test_several_rules_multiply():
    token, geometric = MismatchWeight(high=2.0), MismatchWeight(level="geometric", mode="mask", low=0.5, high=1.3)
    got = weigh(token, geometric)
    torch.testing.assert_close(got.weight_N, doubles(2 * CBRT2, 0.0, CBRT2, 0.0, 0.5 * CBRT2), rtol=1e-14, atol=0)
    assert torch.equal(got.weight_N, weigh(geometric, token).weight_N)
    twice = weigh(token, token)
    torch.testing.assert_close(twice.weight_N, doubles(4.0, 0.0625, 1.0, 4.0, 0.25), rtol=1e-14, atol=0)


def test_a_hugely_unlikely_token_stays_finite():
    got = weigh(MismatchWeight(level="sequence"), rho=(1e300, 1e-300), sequence=torch.tensor([0, 1]))
    torch.testing.assert_close(got.weight_N, doubles(2.0, math.exp(-20)), rtol=1e-12, atol=0)


def coefficients_with(rule, advantages):
    """On the tokens of RHO, the old policy the current one."""
    sampler = torch.full((5,), -3.0, dtype=torch.float64)
    logps = sampler + doubles(*RHO).log()
    objective = PRESETS["default"].replace(mismatch=rule, aggregation="token_mean")
    weights = token_weights(SEQUENCE, 2, aggregation="token_mean")
    return coefficients(objective, logps, doubles(*advantages), weights, sequence_N=SEQUENCE, sampler_logps_N=sampler)


def test_a_dropped_token_keeps_its_place_in_the_denominator():
    got = coefficients_with(MismatchWeight(mode="reject", low=0.3, high=2.0), [1.0] * 5)
    torch.testing.assert_close(got.policy_N, doubles(0.0, 0.0, 0.2, 0.0, 0.2))
    assert [Cause(cause).name for cause in got.cause_N.tolist()] == [
        "MISMATCH",
        "MISMATCH",
        "ACTIVE",
        "MISMATCH",
        "ACTIVE",
    ]


def test_the_weight_is_on_the_policy_term_only():
    sampler = torch.full((5,), -3.0, dtype=torch.float64)
    logps, ref = sampler + doubles(*RHO).log(), sampler - 0.3
    weights = token_weights(SEQUENCE, 2)
    kl = {"beta": 0.1, "correction": "none"}
    plain = PRESETS["default"].replace(kl=kl)
    others = {"sequence_N": SEQUENCE, "sampler_logps_N": sampler, "ref_logps_N": ref}
    weighed = coefficients(plain.replace(mismatch="weight"), logps, doubles(1, 1, 1, 1, 1), weights, **others)
    assert torch.equal(weighed.kl_N, coefficients(plain, logps, doubles(1, 1, 1, 1, 1), weights, **others).kl_N)
