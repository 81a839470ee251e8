"""Trust regions: the region tables, equality at the bounds, and what the rules become at the ends of their numbers."""

import math

import pytest
import torch

from cohort.errors import ConfigError
from cohort.objective import PRESETS, Cause, coefficients, ppo_clip_multiplier, trust_region
from cohort.objective.trust import bernoulli_kl, ppo_clip_sides
from cohort.objective.user_function import loaded
from cohort.presets import trust_regions as rules
from tests.conftest import each
from tests.objective.batches import doubles

LOW, HIGH, DUAL = 0.8, 1.28, 3.0


def apply(rule, ratios, advantages, logps=None, sequence=None):
    """The rule on token ratios."""
    ratios, advantages = doubles(*ratios), doubles(*advantages)
    logps = torch.full_like(ratios, -1.0) if logps is None else logps
    sequence_N = torch.arange(len(ratios)) if sequence is None else torch.tensor(sequence)
    return trust_region(rule, ratios.log(), advantages, logps, sequence_N=sequence_N)


# The clips ----------------------------------------------------------------------------------------------------------

REGIONS = [
    # advantage, ratio, phi, phi with dual, side, side with dual
    (1.0, 0.5, 0.5, 0.5, 0, 0),
    (1.0, 1.0, 1.0, 1.0, 0, 0),
    (1.0, 1.5, 0.0, 0.0, 1, 1),
    (1.0, 3.5, 0.0, 0.0, 1, 1),
    (-1.0, 0.5, 0.0, 0.0, -1, -1),
    (-1.0, 1.0, 1.0, 1.0, 0, 0),
    (-1.0, 1.5, 1.5, 1.5, 0, 0),
    (-1.0, 3.5, 3.5, 0.0, 0, 1),
    (-1.0, 40.0, 40.0, 0.0, 0, 1),
    (0.0, 0.5, 0.5, 0.5, 0, 0),
    (0.0, 1.0, 1.0, 1.0, 0, 0),
    (0.0, 1.5, 1.5, 1.5, 0, 0),
    (0.0, 3.5, 3.5, 3.5, 0, 0),
]


@each(("advantage", "ratio", "phi", "phi_dual", "side", "side_dual"), REGIONS)
def test_region_table_of_the_clip(advantage, ratio, phi, phi_dual, side, side_dual):
    for dual, expected, expected_side in ((None, phi, side), (DUAL, phi_dual, side_dual)):
        got = apply(rules.PPOClip(low=LOW, high=HIGH, dual=dual), [ratio], [advantage])
        assert got.phi_N.item() == pytest.approx(expected, rel=1e-14)
        assert got.side_N.item() == expected_side
        direct = ppo_clip_multiplier(doubles(ratio), doubles(advantage), LOW, HIGH, dual)
        assert direct.item() == expected


def test_a_token_on_the_bound_keeps_its_full_gradient():
    ratio, advantages = doubles(LOW, HIGH, DUAL), doubles(-1.0, 1.0, -1.0)
    assert ppo_clip_multiplier(ratio, advantages, LOW, HIGH, DUAL).tolist() == ratio.tolist()
    low, high = ppo_clip_sides(ratio, advantages, LOW, HIGH, DUAL)
    assert not low.any()
    assert not high.any()


# The other rules ----------------------------------------------------------------------------------------------------


def test_a_gradient_preserving_clip_keeps_the_bounds_gradient():
    rule = rules.GradientPreservingClip(low=0.8, high=1.2, beta_low=0.5, beta_high=0.75)
    got = apply(rule, [0.5, 0.5, 1.5, 1.5, 0.8, 1.2], [-1.0, 1.0, 2.0, -2.0, -1.0, 1.0])
    assert got.phi_N.tolist() == pytest.approx([0.4, 0.5, 0.9, 1.5, 0.8, 1.2], rel=1e-14)
    assert got.value_N.tolist() == pytest.approx([-0.4, 0.5, 1.8, -3.0, -0.8, 1.2], rel=1e-14)
    assert got.side_N.tolist() == [-1, 0, 1, 0, 0, 0]
    silent = apply(rules.GradientPreservingClip(beta_low=0.0, beta_high=0.0), [0.5, 1.5, 1.0], [-1.0, 1.0, 1.0])
    assert (
        silent.phi_N.tolist() == apply(rules.PPOClip(), [0.5, 1.5, 1.0], [-1.0, 1.0, 1.0]).phi_N.tolist() == [0, 0, 1]
    )


def test_a_taper_clamps_the_weight_by_the_advantages_sign():
    ratios, advantages = [0.25, 4.0, 0.25, 4.0, 4.0], [1.0, 1.0, -1.0, -1.0, 0.0]
    got = apply(rules.Taper(), ratios, advantages)  # log-probs are -1
    assert got.phi_N.tolist() == pytest.approx([1.0, 1.0, 0.25, 1.0, 1.0], rel=1e-14)
    assert got.value_N.tolist() == pytest.approx([-1.0, -1.0, 0.25, 1.0, 0.0], rel=1e-14)
    assert got.side_N.tolist() == [-1, 1, 0, 1, 1]
    wide = rules.Taper(positive_low=0.5, positive_high=2.0, negative_low=0.5, negative_high=3.0)
    assert apply(wide, ratios, advantages).phi_N.tolist() == pytest.approx([0.5, 2.0, 0.5, 3.0, 2.0], rel=1e-14)


@pytest.mark.parametrize(
    ("signed", "phi", "side"),
    [
        (False, [0.0, 0.0, 0.5, 2.0, 0.0, 0.0, 1.0], [-1, -1, 0, 0, 1, 1, 0]),
        (True, [0.4, 0.0, 0.5, 2.0, 0.0, 2.5, 1.0], [0, -1, 0, 0, 1, 0, 0]),
    ],
)
def test_the_mask_by_sign(signed, phi, side):
    rule = rules.Mask(low=0.5, high=2.0, signed=signed)
    ratios, advantages = doubles(0.4, 0.4, 0.5, 2.0, 2.5, 2.5, 1.0), doubles(1, -1, -1, 1, 1, -1, 0)
    # Bounds are met exactly only if the ratio is: log and exp of 0.5 and 2 come back exact.
    got = trust_region(rule, ratios.log(), advantages, torch.full_like(ratios, -1.0))
    torch.testing.assert_close(got.phi_N, doubles(*phi), rtol=1e-15, atol=0)
    torch.testing.assert_close(got.value_N, doubles(*phi) * advantages, rtol=1e-15, atol=0)
    assert got.side_N.tolist() == side


def test_cispo_keeps_its_gradient_where_ppo_has_none():
    ratios, advantages = [6.0, 0.2, 2.0], [1.0, -1.0, 1.0]
    assert apply(rules.PPOClip(), ratios, advantages).phi_N.tolist() == [0.0, 0.0, 0.0]
    got = apply(rules.Cap(low=0.5), ratios, advantages, logps=doubles(-0.7, -1.3, -1.0))
    torch.testing.assert_close(got.phi_N, doubles(5.0, 0.5, 2.0))
    torch.testing.assert_close(got.value_N, doubles(5.0 * -0.7, 0.5 * 1.3, -2.0))
    assert got.side_N.tolist() == [1, -1, 0]


@each(
    ("ratio", "advantage", "tau"),
    [(0.05, 2.0, 0.7), (1.0, 2.0, 0.7), (0.5, -2.0, 1.3), (1.7, -2.0, 1.3), (6.0, 2.0, 0.7)],
)
def test_sapo_is_the_ratio_times_a_squared_hyperbolic_secant(ratio, advantage, tau):
    got = apply(rules.SAPO(tau_positive=0.7, tau_negative=1.3), [ratio], [advantage])
    # rel: one rounding of float64 in each of about ten operations.
    assert got.phi_N.item() == pytest.approx(ratio / math.cosh(tau * (ratio - 1) / 2) ** 2, rel=1e-14)
    value = 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    assert got.value_N.item() == pytest.approx(value, rel=1e-14)


VESPO = {
    1.0: {0.25: 0.593, 0.5: 1.120, 1.0: 1.0, 1.5: 0.502, 2.0: 0.199, 4.0: 0.002},
    -1.0: {0.25: 0.070, 0.5: 0.340, 1.0: 1.0, 1.5: 1.242, 2.0: 1.083, 4.0: 0.159},
}


@pytest.mark.parametrize("advantage", VESPO)
def test_vespos_table(advantage):
    for ratio, phi in VESPO[advantage].items():
        assert apply(rules.Gamma(), [ratio], [advantage]).phi_N.item() == pytest.approx(
            phi, abs=5e-4
        )  # three printed digits


def test_gamma_with_fractions_where_an_advantage_of_zero_counts_as_positive():
    rule = rules.Gamma(k_positive=0.1, lambda_positive=0.3, k_negative=0.7, lambda_negative=0.9)
    got = apply(rule, [2.0, 2.0, 2.0], [1.0, -1.0, 0.0])
    positive, negative = 2**0.1 * math.exp(-0.3), 2**0.7 * math.exp(-0.9)
    torch.testing.assert_close(got.phi_N, doubles(positive, negative, positive), rtol=1e-14, atol=0)


def probabilities(rule, p, anchor, advantage):
    """The rule on one token of probability ``p``, drawn with probability ``anchor``."""
    logps, log_ratio = doubles(p).log(), (doubles(p) / anchor).log()
    return trust_region(rule, log_ratio, doubles(advantage), logps)


@each(
    ("p", "anchor", "advantage", "kept", "side"),
    [
        (0.6, 0.4, 1.0, False, 1),
        (0.6, 0.4, -1.0, True, 0),
        (0.4, 0.6, -1.0, False, -1),
        (0.4, 0.6, 1.0, True, 0),
        (0.5, 0.375, 1.0, True, 0),  # by 0.125 and not more: on the bound
        (0.375, 0.5, -1.0, True, 0),
        (0.6, 0.4, 0.0, True, 0),
    ],
)
def test_the_tv_mask_silences_what_moved_too_far_the_way_it_is_pushed(p, anchor, advantage, kept, side):
    got = probabilities(rules.TVMask(low=0.1251, high=0.1251), p, anchor, advantage)
    assert got.phi_N.item() == pytest.approx(p / anchor if kept else 0.0)
    assert got.side_N.item() == side


@each(
    ("p", "anchor", "advantage", "kept", "side"),
    [
        (0.9, 0.5, 1.0, False, 1),
        (0.9, 0.5, -1.0, True, 0),
        (0.1, 0.5, -1.0, False, -1),
        (0.1, 0.5, 1.0, True, 0),
        (0.55, 0.5, 1.0, True, 0),
    ],
)
def test_the_kl_mask_silences_what_moves_away(p, anchor, advantage, kept, side):
    got = probabilities(rules.KLMask(threshold=0.05), p, anchor, advantage)
    assert got.phi_N.item() == pytest.approx(p / anchor if kept else 0.0)
    assert got.side_N.item() == side


def test_the_kl_masks_direction_is_from_the_anchor():
    # KL(0.5 || 0.9) = 0.5 log(0.25 / 0.09) = 0.5108; KL(0.9 || 0.5) = 0.3681: a threshold between tells them apart.
    assert probabilities(rules.KLMask(threshold=0.45), 0.9, 0.5, 1.0).phi_N.item() == 0.0
    assert probabilities(rules.KLMask(threshold=0.45), 0.5, 0.1, 1.0).phi_N.item() == pytest.approx(5.0)


def test_the_two_way_kl_by_hand_and_at_its_ends():
    value = 0.3 * math.log(0.3 / 0.6) + 0.7 * math.log(0.7 / 0.4)
    assert bernoulli_kl(doubles(0.3).log(), doubles(0.6).log()).item() == pytest.approx(value, rel=1e-14)
    ends = bernoulli_kl(doubles(0.0, -math.inf, 0.0, -1e-12), doubles(0.0, -1.0, -5.0, -1e-13))
    assert torch.isfinite(ends).all()
    assert ends[0].item() == 0.0
    assert ends[1].item() == pytest.approx(-math.log(1 - math.exp(-1)), rel=1e-12)  # an anchor that never draws it


# Levels -------------------------------------------------------------------------------------------------------------


def test_gmpo_by_hand():
    # A > 0: log r = (0.6, -0.6) is clipped to (0.4, -0.6): G = e^-0.1. A < 0: to (0.6, -0.4): G = e^0.1.
    ratios = [math.exp(0.6), math.exp(-0.6)] * 2
    got = apply(rules.GMPO(), ratios, [1.0, 1.0, -1.0, -1.0], sequence=[0, 0, 1, 1])
    torch.testing.assert_close(got.phi_N, doubles(0.0, math.exp(-0.1), math.exp(0.1), 0.0))
    torch.testing.assert_close(got.value_N, doubles(*[math.exp(-0.1)] * 2, *[-math.exp(0.1)] * 2))
    assert got.side_N.tolist() == [1, 0, 0, -1]


# rules.FIPO ---------------------------------------------------------------------------------------------------------------


def test_fipo_by_hand_on_three_tokens():
    # half-life 1: gamma = 1/2. log r = (0.1, -0.2, 0.08).
    # sums from each token on: 0.1 - 0.1 + 0.02 = 0.02;  -0.2 + 0.04 = -0.16;  0.08
    logs = (0.1, -0.2, 0.08)
    rule = rules.FIPO(half_life=1.0, weight_low=0.9, weight_high=1.05)
    got = apply(rule, [math.exp(x) for x in logs], [1.0] * 3, sequence=[0, 0, 0])
    weights = (math.exp(0.02), 0.9, 1.05)  # e^-0.16 = 0.852 and e^0.08 = 1.083 are held
    expected = doubles(*(w * math.exp(x) for w, x in zip(weights, logs, strict=True)))
    torch.testing.assert_close(got.phi_N, expected)
    torch.testing.assert_close(got.value_N, expected)


def test_fipo_never_enlarges_a_push_away_from_an_already_likely_token():
    rule = rules.FIPO(half_life=1.0, safety=4.0)
    # e^1.5 = 4.48 is above the safety bound, e^1.3 = 3.67 is not; both weights would be 1.2.
    phi = apply(rule, [math.exp(1.5), math.exp(1.3)], [-1.0, -1.0], sequence=[0, 1]).phi_N
    torch.testing.assert_close(phi, doubles(math.exp(1.5), 1.2 * math.exp(1.3)))
    positive = apply(rule, [1.1], [1.0]).phi_N  # a weight above 1 where A > 0: e^(log 1.1) = 1.1
    torch.testing.assert_close(positive, doubles(1.21))


# rules.Custom rules -------------------------------------------------------------------------------------------------------

RULES = """
import torch
def square(ratio_N, advantages_N):
    return ratio_N ** 2
def positive_only(ratio_N, advantages_N):
    return torch.where(advantages_N > 0, ratio_N, 0.0)
def wrong_shape(ratio_N, advantages_N):
    return ratio_N[:1]
def without_end(ratio_N, advantages_N):
    return torch.full_like(ratio_N, float("inf"))
def raises(ratio_N, advantages_N):
    return 1 / 0
def not_a_tensor(ratio_N, advantages_N):
    return 1.0
number = 3
"""


@pytest.fixture
def path(tmp_path):
    loaded.cache_clear()
    path = tmp_path / "rules_for_test.py"
    path.write_text(RULES)
    return path


def test_a_rule_of_your_own_from_a_file(path):
    rule = rules.Custom(function=f"{path}:square")
    got = apply(rule, [0.5, 3.0], [1.0, -2.0])
    torch.testing.assert_close(got.phi_N, doubles(0.25, 9.0))
    torch.testing.assert_close(got.value_N, doubles(0.25, -18.0))
    by_module = apply(rules.Custom(function="torch:minimum"), [0.5, 3.0], [1.0, 2.0])
    torch.testing.assert_close(by_module.phi_N, doubles(0.5, 2.0))


def test_a_rule_of_your_own_is_named_in_the_settings(path):
    objective = PRESETS["default"].replace(trust_region=f"{path}:positive_only")
    assert objective.trust_region == rules.Custom(function=f"{path}:positive_only")
    got = coefficients(
        objective, doubles(-1.0, -1.0), doubles(1.0, -1.0), doubles(0.5, 0.5), old_logps_N=doubles(-1.5, -1.5)
    )
    torch.testing.assert_close(got.policy_N, doubles(0.5 * math.exp(0.5), 0.0))
    assert got.cause_N.tolist() == [Cause.ACTIVE, Cause.VANISHED]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("{path}:wrong_shape", r"must return a tensor of shape \(2,\), got \(1,\)"),
        ("{path}:not_a_tensor", "got float"),
        ("{path}:without_end", "without_end returned a multiplier that is not finite"),
        ("{path}:raises", "raises raised ZeroDivisionError"),
        ("{path}:missing", "no function 'missing'"),
        ("{path}:number", "no function 'number'"),
        ("{path}.py:f", "no trust region file"),
        ("no_such_module_here:f", "cannot import"),
    ],
)
def test_what_a_rule_of_your_own_may_not_do(path, function, message):
    with pytest.raises(ConfigError, match=message):
        apply(rules.Custom(function=function.format(path=path)), [0.5, 3.0], [1.0, 1.0])
