"""What the log says of an update: causes, sums that add up, known answers, and the value where every ratio is 1."""

import dataclasses
import math
import re

import pytest
import torch

from cohort.errors import ConfigError
from cohort.objective import (
    PRESETS,
    Cause,
    TokenStatistics,
    UpdateTokens,
    applied_entropy_coefficient,
    coefficients,
    explain,
    k1,
    k3,
    next_beta,
    next_entropy_coefficient,
    token_statistics,
)
from cohort.objective.explain import coefficient_table
from cohort.presets import describe
from cohort.presets.parts import KL, EntropyBonus
from cohort.presets.trust_regions import KLMask, TVMask
from tests.conftest import each
from tests.objective.batches import doubles, longs, random_batch, update_tokens, weights_of

CAUSES = [f"cause_{cause.name.lower()}" for cause in Cause]
OF_SHARES = ("kl_top",)
"""The largest shares of the tokens at hand: not a sum over tokens."""


def with_beta(name):
    return PRESETS[name].replace(beta=0.3)


def statistics(objective, batch):
    return token_statistics(objective, update_tokens(objective, batch))


# Causes -------------------------------------------------------------------------------------------------------------


@each("name", PRESETS)
def test_causes_add_up_to_the_number_of_tokens(name):
    batch = random_batch(0)
    tokens = update_tokens(with_beta(name), batch)
    sums = token_statistics(with_beta(name), tokens).sums
    assert sum(sums[cause] for cause in CAUSES) == sums["tokens"] == sums["all_tokens"] == len(batch.logps)
    silent = tokens.coefficients.policy_N == 0
    active = torch.isin(tokens.coefficients.cause_N, torch.tensor([Cause.ACTIVE, Cause.HELD]))
    assert torch.equal(active, ~silent)


def causes_of(settings, gaps, advantages, *, weights=None, base=None, sampler_gaps=None, sequence=None):
    """The causes of tokens with these log-ratios to the old policy."""
    logps = torch.full((len(gaps),), -3.0, dtype=torch.float64)
    ones = torch.ones_like(logps)
    got = coefficients(
        PRESETS["default"].replace(**settings),
        logps,
        doubles(*advantages),
        ones if weights is None else doubles(*weights),
        sequence_N=torch.arange(len(gaps)) if sequence is None else longs(*sequence),
        old_logps_N=logps - doubles(*gaps),
        sampler_logps_N=logps - doubles(*(gaps if sampler_gaps is None else sampler_gaps)),
        base_weights_N=ones if base is None else doubles(*base),
    )
    return [Cause(cause).name for cause in got.cause_N.tolist()]


def test_each_cause_is_met():
    assert causes_of({}, [0.0, 0.0, 0.0], [1, 0, -1]) == ["ACTIVE", "NO_ADVANTAGE", "ACTIVE"]
    assert causes_of({}, [0.5, -0.5], [1, -1]) == ["CLIPPED_HIGH", "CLIPPED_LOW"]
    assert causes_of({}, [-25.0, 25.0], [1, -1]) == ["HELD", "HELD"]
    assert causes_of({}, [0.0, 0.0], [1, 1], weights=[0, 1]) == ["LOW_ENTROPY", "ACTIVE"]
    assert causes_of({}, [0.0, 0.0], [1, 1], weights=[0, 1], base=[0, 1]) == ["MASKED", "ACTIVE"]
    mismatch = {"mismatch": {"rule": "weight", "mode": "mask"}}
    assert causes_of(mismatch, [0.0, 0.0], [1, 1], sampler_gaps=[0.0, 1.0]) == ["ACTIVE", "MISMATCH"]
    masked = {"mismatch": "off_policy_mask"}
    assert causes_of(masked, [0.0, 0.0], [1, -1], sampler_gaps=[-1.0, -1.0]) == ["ACTIVE", "OFF_POLICY"]
    # r^3 e^(2 (1 - r)) at r = e^20 is an exact 0.
    assert causes_of({"trust_region": "gamma"}, [20.0], [-1]) == ["VANISHED"]


def test_the_first_cause_that_applies_is_named():
    everything = {"mismatch": [{"rule": "weight", "mode": "mask"}, "off_policy_mask"]}
    # Clipped, held, of low entropy, dropped twice and without advantage at once; then less and less of it.
    gaps, sampler_gaps = [-25.0] * 5, [-50.0] * 4 + [-25.0]
    got = causes_of(
        everything,
        [*gaps, -25.0],
        [-1, 0, -1, -1, -1, -1],
        weights=[0, 0, 0, 1, 1, 1],
        base=[0, 1, 1, 1, 1, 1],
        sampler_gaps=[*(-g for g in sampler_gaps), -25.0],
    )
    assert got == ["MASKED", "NO_ADVANTAGE", "LOW_ENTROPY", "MISMATCH", "MISMATCH", "OFF_POLICY"]
    assert causes_of({}, [-25.0], [-1]) == ["CLIPPED_LOW"]


# Sums ---------------------------------------------------------------------------------------------------------------


def tokens_of(tokens: UpdateTokens, sequences):
    return tokens.select(torch.isin(tokens.sequence_N, torch.tensor(sequences)))


@each("name", PRESETS)
def test_statistics_of_a_batch_cut_in_two_add_up(name):
    objective = with_beta(name)
    tokens = update_tokens(objective, random_batch(0))
    whole = token_statistics(objective, tokens)
    parts = [token_statistics(objective, tokens_of(tokens, cut)) for cut in ([0, 4, 5], [1, 2, 3])]
    both = parts[0] + parts[1]
    assert both.sums.keys() == whole.sums.keys()
    for key in whole.sums.keys() - set(OF_SHARES):
        assert both.sums[key] == pytest.approx(whole.sums[key], rel=1e-12, abs=1e-12), key
    assert both.maxima == (parts[1] + parts[0]).maxima == whole.maxima
    for key, values in whole.values.items():
        assert torch.equal(both.values[key].sort().values, values.sort().values), key


def test_masked_tokens_are_counted_and_nothing_else():
    objective = with_beta("default")
    tokens = update_tokens(objective, random_batch(0))
    loss_N = torch.arange(len(tokens.logps_N)) % 3 != 0
    junk = {name: getattr(tokens, name).clone() for name in ("logps_N", "entropy_N", "sampler_logps_N", "old_logps_N")}
    for values in junk.values():
        values[~loss_N] = math.nan
    base_N = tokens.base_weights_N * loss_N
    got = coefficients(
        objective,
        junk["logps_N"],
        tokens.advantages_N,
        base_N,
        sequence_N=tokens.sequence_N,
        old_logps_N=junk["old_logps_N"],
        ref_logps_N=tokens.ref_logps_N,
    )
    dirty = dataclasses.replace(tokens, **junk, weights_N=base_N, base_weights_N=base_N, coefficients=got)
    clean = token_statistics(objective, dirty.select(loss_N)).sums
    sums = token_statistics(objective, dirty).sums
    masked = int((~loss_N).sum())
    assert sums["cause_masked"] == masked
    assert sums["all_tokens"] == clean["all_tokens"] + masked
    for key in clean.keys() - {"cause_masked", "all_tokens"}:
        assert sums[key] == pytest.approx(clean[key], rel=1e-14), key


def test_no_tokens_at_all():
    objective = with_beta("default")
    nothing = tokens_of(update_tokens(objective, random_batch(0)), [3])
    got = token_statistics(objective, nothing)
    assert set(got.sums.values()) == {0.0}
    assert set(got.maxima.values()) == {0.0}


@pytest.mark.parametrize("name", ["default", "dapo", "dr_grpo"])
def test_sums_by_loops(name):
    objective, batch = with_beta(name), random_batch(1)
    weights = weights_of(objective, batch)
    tokens = dataclasses.replace(update_tokens(objective, batch), weights_N=3 * weights)
    sums, c = token_statistics(objective, tokens).sums, tokens.coefficients
    late = [n for places in batch.tokens for n in places[len(places) // 2 :]]
    ratio, rho = (batch.logps - batch.old).exp(), (batch.old - batch.sampler).exp()
    a = batch.advantages_N
    low, high = objective.trust_region.low, objective.trust_region.high
    size = 1 - 2 * batch.logps.exp() + batch.logps.exp() ** 2  # collision_N is p^2 here
    expected = {
        "policy_value": (3 * weights * c.value_N).sum(),
        "policy_l1": c.policy_N.abs().sum(),
        "kl_l1": c.kl_N.abs().sum(),
        "policy_sizes": (c.policy_N.abs() * size.sqrt()).sum(),
        "policy_energy": (c.policy_N**2 * size).sum(),
        "kl_energy": (c.kl_N**2 * size).sum(),
        "cross_energy": (c.policy_N * c.kl_N * size).sum(),
        "ratio": ratio.sum(),
        "ratio_squared": (ratio**2).sum(),
        "above_positive": ((a > 0) & (ratio > high)).sum(),
        "above_negative": ((a < 0) & (ratio > high)).sum(),
        "below_positive": ((a > 0) & (ratio < low)).sum(),
        "below_negative": ((a < 0) & (ratio < low)).sum(),
        "rho": rho.sum(),
        "rho_squared": (rho**2).sum(),
        "rho_k1": -rho.log().sum(),
        "rho_k1_late": -rho[late].log().sum(),
        "late_tokens": len(late),
        "rho_k3": (rho - 1 - rho.log()).sum(),
        "k1": k1(batch.logps, batch.ref).sum(),
        "k3": k3(batch.logps, batch.ref).sum(),
        "k3_squared": (k3(batch.logps, batch.ref) ** 2).sum(),
        "forward_coefficient": (1 - (batch.ref - batch.logps).exp()).sum(),
        "kl_value": (weights * k3(batch.logps, batch.ref)).sum(),
        "entropy": (-batch.logps / 2).sum(),
        "logp": batch.logps.sum(),
        "advantage": a.sum(),
        "logp_advantage": (batch.logps * a).sum(),
        "sequences": 5,
        "held": 0,
    }
    assert {key: sums[key] for key in expected} == pytest.approx({k: float(v) for k, v in expected.items()}, rel=1e-12)


def test_the_energy_of_a_token_is_its_gradient_in_the_logits():
    # |d logp / d logits|^2 over a vocabulary of four, by autograd.
    logits = torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    (gradient,) = torch.autograd.grad(log_probs[1], logits)
    logp, collision = log_probs[1:2].detach(), (log_probs.detach().exp() ** 2).sum()[None]
    sums = token_statistics(PRESETS["default"], tokens_by_hand(logp, [3.0], collision=collision)).sums
    assert sums["policy_energy"] == pytest.approx(9 * (gradient**2).sum().item(), rel=1e-12)


def tokens_by_hand(logps, advantages, old=None, sequence=None, collision=None):
    """Tokens with weights of 1, as the log sees them."""
    a_N, ones = doubles(*advantages), torch.ones_like(logps)
    old = logps if old is None else old
    return UpdateTokens(
        logps_N=logps,
        entropy_N=ones,
        collision_N=ones if collision is None else collision,
        advantages_N=a_N,
        weights_N=ones,
        base_weights_N=ones,
        sequence_N=torch.arange(len(logps)) if sequence is None else longs(*sequence),
        coefficients=coefficients(PRESETS["default"], logps, a_N, ones, old_logps_N=old),
        sampler_logps_N=old,
        old_logps_N=old,
    )


def test_the_effective_sample_size_by_sign_and_by_sequence():
    # Sequences of weights 2 * 3 = 6 and 0.5 with A > 0, and 4 with A < 0; A = 0 is in neither.
    logps = torch.full((5,), -9.0, dtype=torch.float64)
    got = tokens_by_hand(logps, [1, 1, 1, -1, 0], logps - doubles(2, 3, 0.5, 4, 7).log(), [0, 0, 1, 2, 3])
    sums = token_statistics(PRESETS["default"], got).sums
    assert (sums["ess_token_positive_n"], sums["ess_token_positive_w"]) == (3, pytest.approx(5.5))
    assert sums["ess_token_positive_w2"] == pytest.approx(4 + 9 + 0.25)
    assert (sums["ess_sequence_positive_n"], sums["ess_sequence_positive_w"]) == (2, pytest.approx(6.5))
    assert sums["ess_sequence_positive_w2"] == pytest.approx(36.25)
    assert (sums["ess_sequence_negative_n"], sums["ess_sequence_negative_w"]) == (1, pytest.approx(4.0))


def test_clipped_shares_of_tokens_and_of_sequences():
    # Ratios 0.5 and 1 where A < 0, 2 and 1 where A > 0, 0.5 and 2 where A is 0. The geometric means of the first two
    # sequences are 0.71 and 1.41.
    logps = torch.full((6,), -9.0, dtype=torch.float64)
    ratios, advantages = doubles(0.5, 1, 2, 1, 0.5, 2), [-1, -1, 1, 1, 0, 0]
    tokens = tokens_by_hand(logps, advantages, logps - ratios.log(), [0, 0, 1, 1, 2, 2])
    for level in ("token", "sequence_mean"):
        got = token_statistics(PRESETS["default"].replace(ratio_level=level), tokens)
        assert (got.sums["clipped_low"], got.sums["clipped_high"], got.sums["all_sequences"]) == (1, 1, 3)
        share = 0.5 if level == "token" else 1.0
        assert (got.maxima["not_clipped_low"], got.maxima["clipped_high"]) == (1.0, share)  # sequence 2: nothing below
    idle = TokenStatistics.of_idle(7, masked=3, sequences=2)
    low = token_statistics(PRESETS["default"], tokens_of(tokens, [0]))
    assert low.maxima["not_clipped_low"] == 0.5
    assert (low + TokenStatistics.of_idle(0)).maxima["not_clipped_low"] == 0.5
    assert (low + idle).maxima["not_clipped_low"] == 1.0
    assert (low + idle).sums["all_sequences"] == 3
    assert "clipped_low" not in token_statistics(PRESETS["sapo"], tokens).sums


@pytest.mark.parametrize(
    ("correction", "anchor"), [("none", "old"), ("token_ratio", "old"), ("token_ratio", "sampler")]
)
def test_the_kl_with_its_importance_weight(correction, anchor):
    kl, batch = {"beta": 0.3, "correction": correction, "anchor": anchor}, random_batch(1)
    objective = with_beta("default").replace(kl=kl)
    weights, weight = weights_of(objective, batch), (batch.logps - getattr(batch, anchor)).exp()
    weighted = k3(batch.logps, batch.ref) * (1 if correction == "none" else weight)
    sums = token_statistics(objective, update_tokens(objective, batch)).sums
    assert sums["k3_weighted"] == pytest.approx(weighted.sum().item(), rel=1e-12)
    assert sums["kl_value_weighted"] == pytest.approx((weights * weighted).sum().item(), rel=1e-12)


def test_maxima_and_unlikely_sequences():
    batch = random_batch(0)
    got = statistics(with_beta("default"), batch)
    assert got.maxima["kl_gap"] == pytest.approx((batch.ref - batch.logps).abs().max().item(), rel=1e-14)
    assert got.maxima["sampler_gap"] == pytest.approx((batch.old - batch.sampler).abs().max().item(), rel=1e-14)
    far = batch.sampler.clone()
    far[batch.tokens[2][0]] = batch.old[batch.tokens[2][0]] + math.log(2e4)
    assert statistics(with_beta("default"), dataclasses.replace(batch, sampler=far)).sums["unlikely_sequences"] == 1
    assert got.sums["unlikely_sequences"] == 0


def test_a_sampler_that_could_not_say():
    batch = random_batch(0)
    sampler = batch.sampler.clone()
    sampler[:4] = math.nan
    sums = statistics(with_beta("default"), dataclasses.replace(batch, sampler=sampler)).sums
    assert sums["rho"] == pytest.approx(4 + (batch.old - sampler)[4:].exp().sum().item(), rel=1e-12)
    assert all(math.isfinite(value) for value in sums.values())


# The value where every ratio is 1 -----------------------------------------------------------------------------------

LENGTHS = doubles(1, 2, 3, 5)
ADVANTAGES = doubles(1.5, -0.5, 0.5, -1.5)
COVARIANCE = float(((LENGTHS - LENGTHS.mean()) * (ADVANTAGES - ADVANTAGES.mean())).mean())
"""Cov(|o|, A) over completions, dividing by their number: here longer answers do worse: (1.5 - 1 + 1.5 - 7.5) / 4."""


def first_update(objective):
    """A batch of one group with centred advantages; its old policy is elsewhere, which must not matter."""
    batch = random_batch(0)
    sequence_N = torch.arange(4).repeat_interleave(LENGTHS.long())
    logps = batch.logps[: len(sequence_N)]
    batch = dataclasses.replace(
        batch,
        logps=logps,
        old=batch.old[: len(logps)],
        sampler=batch.sampler[: len(logps)],
        sequence_N=sequence_N,
        advantages_S=ADVANTAGES,
        group_S=longs(0, 0, 0, 0),
    )
    return batch, statistics(objective, batch).sums["policy_value_at_ratio_1"]


@each(
    ("name", "expected"),
    [
        ("default", 0.0),
        ("grpo_r1", 0.0),
        ("gspo", 0.0),
        ("gmpo", 0.0),
        ("rloo", 0.0),
        ("dapo", COVARIANCE / 2.75),  # over the mean length
        ("intellect2", COVARIANCE / 2.75),
        ("dppo_tv", COVARIANCE / 2.75),
        ("dr_grpo", COVARIANCE / 11),  # over the constant length
        ("luspo", COVARIANCE),
        ("maxrl", COVARIANCE),
        # (1/4) sum 2 A / tau, tau 1 or 1.05
        ("sapo", (2 / 4) * (1.5 + 0.5) * (1 - 1 / 1.05)),
    ],
)
def test_the_value_at_ratio_one(name, expected):
    _, value = first_update(PRESETS[name].replace(beta=0.0))
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-15)


@each("name", PRESETS)
def test_the_value_at_ratio_one_is_the_value_on_policy(name):
    batch = random_batch(0).on_policy()
    sums = statistics(PRESETS[name].replace(beta=0.0), batch).sums
    assert sums["policy_value_at_ratio_1"] == pytest.approx(sums["policy_value"], rel=1e-13, abs=1e-15)


# The table of an objective ------------------------------------------------------------------------------------------


@each(
    ("name", "rows"),
    [
        ("default", {0.5: (0.5, 0.0), 0.8: (0.8, -0.8), 1.0: (1.0, -1.0), 1.2: (1.2, -1.2), 4.0: (0.0, -4.0)}),
        ("intellect2", {4.0: (0.0, -4.0), 10.0: (0.0, 0.0)}),
        ("cispo", {0.25: (0.25, -0.25), 5.0: (5.0, -5.0), 10.0: (5.0, -5.0)}),
        ("dapo", {1.28: (1.28, -1.28), 1.5: (0.0, -1.5)}),
        # 0.08 at ratio 4 is a move by 0.24
        ("dppo_tv", {2.0: (2.0, -2.0), 4.0: (0.0, -4.0)}),
    ],
)
def test_the_coefficient_table(name, rows):
    table = coefficient_table(PRESETS[name])
    assert [row[0] for row in table] == sorted(row[0] for row in table)
    for ratio, expected in rows.items():
        # A bound is shown from its inner side, by a hair.
        (shown,) = [columns for at, *columns in table if at == pytest.approx(ratio, rel=1e-6)]
        assert shown == pytest.approx(expected, rel=1e-6)


@each("name", PRESETS)
def test_the_numbers_of_an_explanation_are_the_tables(name):
    text = explain(PRESETS[name]).removeprefix(describe(PRESETS[name]))
    text = text.replace("A = +1", "").replace("A = -1", "")
    shown = [float(word) for word in text.split() if re.fullmatch(r"-?[0-9][0-9.e-]*", word)]
    table = [number for row in coefficient_table(PRESETS[name]) for number in row]
    if isinstance(PRESETS[name].trust_region, TVMask | KLMask):
        shown = shown[1:]  # the token's probability
    for number, exact in zip(sorted(shown), sorted(table), strict=True):
        # Small ones are cut to 2 digits, very small ones to 1, so that the columns stay narrow.
        digits = 1e-3 if abs(exact) >= 0.1 else 0.06 if abs(exact) >= 1e-3 else 0.5
        assert number == pytest.approx(exact, rel=digits)


def test_other_objectives_can_be_explained():
    assert "toward a KL of 0.1" in explain(PRESETS["grpo"].replace(kl={"target": 0.1}))
    others = {"mismatch": ["veto", "off_policy_mask"]}, {"trust_region": "none", "ratio_anchor": "self"}
    for settings in (*others, {"top_entropy": 0.2}, {"kl": {"beta": 0.1, "estimator": "full"}}):
        assert "A = +1" in explain(PRESETS["default"].replace(**settings))


# Controllers --------------------------------------------------------------------------------------------------------


@each(
    ("measured", "completions", "beta"),
    [
        (0.01, 100, 0.1),
        (0.011, 100, 0.1 * (1 + 0.1 * 0.1)),
        (0.009, 100, 0.1 * (1 - 0.1 * 0.1)),
        (0.05, 100, 0.1 * 1.02),
        (0.0, 100, 0.1 * 0.98),
        (0.05, 1000, 0.1 * 1.2),
        (0.05, 5000, 0.1 * 1.2),
    ],
)
def test_beta_moves_toward_its_target(measured, completions, beta):
    kl = KL(beta=0.1, target=0.01, horizon=1000)
    assert next_beta(kl, 0.1, measured, completions) == pytest.approx(beta, rel=1e-12)
    assert next_beta(KL(beta=0.1), 0.07, measured, completions) == 0.07


@each(
    ("coefficient", "measured", "expected"),
    [(0.01, 0.1, 0.015), (0.01, 0.2, 0.015), (0.01, 0.21, 0.005), (0.002, 0.3, 0.0)],
)
def test_the_entropy_coefficient_moves(coefficient, measured, expected):
    bonus = EntropyBonus(target=0.2, step=0.005)
    assert next_entropy_coefficient(bonus, coefficient, measured) == pytest.approx(expected, abs=1e-18)
    assert next_entropy_coefficient(EntropyBonus(coefficient=0.3), 0.3, measured) == 0.3


def test_the_entropy_coefficient_stays_within_its_bounds():
    bonus = EntropyBonus(target=0.2, step=0.005, minimum=0.002, maximum=0.012)
    assert next_entropy_coefficient(bonus, 0.01, 0.1) == 0.012
    assert next_entropy_coefficient(bonus, 0.004, 0.3) == 0.002
    assert next_entropy_coefficient(bonus, 0.5, 0.3) == 0.495  # as in TRL, a fall has no maximum
    for settings, message in (
        ({"coefficient": 0.1, "maximum": 1.0}, "set entropy.target"),
        ({"target": 0.1, "minimum": 0.5, "maximum": 0.2}, "is below entropy.minimum"),
    ):
        with pytest.raises(ConfigError, match=message):
            PRESETS["default"].replace(entropy={"rule": "entropy", **settings})


def test_the_entropy_bonus_counts_only_at_or_below_its_target():
    bonus = EntropyBonus(target=0.2)
    assert applied_entropy_coefficient(bonus, 0.01, 0.2) == 0.01
    assert applied_entropy_coefficient(bonus, 0.01, 0.3) == 0.0
    assert applied_entropy_coefficient(bonus, 0.01, None) == 0.0
    assert applied_entropy_coefficient(EntropyBonus(coefficient=0.01), 0.01, None) == 0.01
    assert applied_entropy_coefficient(None, 0.01, 0.1) == 0.0
