"""The table's numbers, written out: a row is never changed. Another number is a new row with a higher version."""

import math

import pytest

from cohort.presets import PRESETS, TABLE, describe
from cohort.presets.kl import KL, EntropyBonus
from cohort.presets.parts import (
    BatchStd,
    DropDead,
    DynamicSampling,
    GroupMean,
    GroupStd,
    MismatchWeight,
    OffPolicyMask,
    SignWeights,
    SoftOverlong,
    TopK,
    Unlikeliness,
    Veto,
)
from cohort.presets.trust_regions import (
    FIPO,
    GMPO,
    SAPO,
    Cap,
    Gamma,
    GradientPreservingClip,
    KLMask,
    Mask,
    PPOClip,
    Taper,
    TVMask,
)

DEFAULTS = {
    "soft_overlong": None,
    "unlikeliness": None,
    "reward_aggregation": "sum_then_normalize",
    "group_filter": None,
    "baseline": "group_mean",
    "scale": GroupStd(ddof=1, epsilon=1e-6),
    "sign_weights": None,
    "credit": "outcome",
    "discount": 1.0,
    "truncated": "keep",
    "truncated_penalty": 1.0,
    "ratio_anchor": "old",
    "ratio_level": "token",
    "trust_region": PPOClip(low=0.8, high=1.2, dual=None),
    "mismatch": (),
    "top_entropy": 1.0,
    "kl": KL(
        beta=0.0,
        direction="reverse",
        scope="token",
        place="loss",
        correction="token_ratio",
        anchor="old",
        estimator="sampled",
        top_k=None,
        target=None,
        horizon=10_000,
    ),
    "entropy": None,
    "aggregation": "seq_mean_token_mean",
    "aggregation_length": None,
    "denominator": "base",
    "count_empty": True,
}
"""Of "default", and of every other row where it says nothing else."""
OF_BATCH = {"direction": "reverse", "scope": "sequence", "place": "reward", "correction": "none"}
TO_SAMPLER = KL(direction="reverse", correction="token_ratio", anchor="sampler")
GSPO = PPOClip(low=0.9997, high=1.0004)
BY_TOKEN = {"aggregation": "token_mean"}

ROWS = {
    "default@1": {},
    "grpo@1": {"kl": KL(beta=0.04, direction="forward", correction="none")},
    "grpo_r1@1": {
        "trust_region": PPOClip(low=0.0, high=11.0),
        "kl": KL(beta=0.001, direction="forward", correction="none"),
    },
    "grpo_v32@1": {
        "scale": None,
        "ratio_anchor": "sampler",
        "mismatch": (OffPolicyMask(threshold=0.5),),
        "kl": KL(beta=0.001, direction="reverse", correction="token_ratio", anchor="sampler"),
    },
    "dr_grpo@1": {"scale": None, "aggregation": "constant"},
    "bnpo@1": BY_TOKEN,
    "dapo@1": {
        "soft_overlong": SoftOverlong(cache_share=0.2, max_length=None),
        "group_filter": DynamicSampling(max_rounds=4),
        "truncated": "mask",
        "trust_region": PPOClip(low=0.8, high=1.28),
        **BY_TOKEN,
    },
    "lite_ppo@1": {"scale": BatchStd(of="raw", unit="sample", ddof=1, epsilon=1e-6), **BY_TOKEN},
    "rloo@1": {
        "baseline": "leave_one_out",
        "scale": None,
        "ratio_level": "sequence_product",
        "kl": KL(beta=0.05, **OF_BATCH),
        "aggregation": "seq_sum",
    },
    "reinforce_pp@1": {
        "baseline": "batch_mean",
        "scale": BatchStd(of="centred", unit="token", ddof=1, epsilon=1e-6),
        "credit": "return_to_go",
        "kl": KL(beta=0.01, **OF_BATCH),
        **BY_TOKEN,
    },
    "reinforce_pp_baseline@1": {
        "scale": BatchStd(of="centred", unit="sample", ddof=1, epsilon=1e-6),
        "kl": KL(beta=0.01, direction="reverse", correction="none"),
        **BY_TOKEN,
    },
    "gspo@1": {"ratio_level": "sequence_mean", "trust_region": GSPO},
    "gspo_token@1": {"ratio_level": "sequence_mean_token", "trust_region": GSPO},
    "luspo@1": {
        "ratio_level": "sequence_mean",
        "trust_region": PPOClip(low=0.998, high=1.0025),
        "aggregation": "seq_sum",
    },
    "gmpo@1": {"ratio_level": "sequence_mean", "trust_region": GMPO(low=math.exp(-0.4), high=math.exp(0.4))},
    "cispo@1": {"trust_region": Cap(low=0.0, high=5.0), **BY_TOKEN},
    "scalerl@1": {
        "group_filter": DropDead(),
        "scale": BatchStd(of="centred", unit="sample", ddof=1, epsilon=1e-6),
        "trust_region": Cap(low=0.0, high=5.0),
        "aggregation": "prompt_mean",
    },
    "sapo@1": {"trust_region": SAPO(tau_positive=1.0, tau_negative=1.05)},
    "vespo@1": {
        "ratio_anchor": "sampler",
        "kl": TO_SAMPLER,
        "ratio_level": "sequence_product",
        "trust_region": Gamma(k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0),
        **BY_TOKEN,
    },
    "dppo_tv@1": {
        "scale": None,
        "ratio_anchor": "sampler",
        "kl": TO_SAMPLER,
        "trust_region": TVMask(low=0.15, high=0.15, cap=20.0),
        **BY_TOKEN,
    },
    "dppo_kl@1": {
        "scale": None,
        "ratio_anchor": "sampler",
        "kl": TO_SAMPLER,
        "trust_region": KLMask(threshold=0.05, cap=20.0),
        **BY_TOKEN,
    },
    "maxrl@1": {"scale": GroupMean(epsilon=0.0), "aggregation": "seq_sum"},
    "intellect2@1": {
        "trust_region": PPOClip(low=0.8, high=1.2, dual=4.0),
        "kl": KL(beta=0.001, direction="forward", correction="none"),
        **BY_TOKEN,
    },
    "gdpo@1": {
        "reward_aggregation": "normalize_sum_normalize",
        "scale": GroupStd(ddof=1, epsilon=1e-4),
        **BY_TOKEN,
    },
    "mo_grpo@1": {"reward_aggregation": "normalize_then_sum", **BY_TOKEN},
    "gfpo@1": {"group_filter": TopK(k=8, metric="shortest"), **BY_TOKEN},
    "w_reinforce@1": {
        "baseline": 0.5,
        "scale": None,
        "sign_weights": SignWeights(positive=0.2, negative=2.0),
        **BY_TOKEN,
    },
    "ce_gppo@1": {
        "trust_region": GradientPreservingClip(low=0.8, high=1.2, beta_low=0.75, beta_high=1.0),
        **BY_TOKEN,
    },
    "topr@1": {
        "baseline": 0.5,
        "scale": None,
        "sign_weights": SignWeights(positive=2.0, negative=2.0),
        "ratio_level": "sequence_product",
        "trust_region": Taper(positive_low=1.0, positive_high=1.0, negative_low=0.0, negative_high=1.0),
        "aggregation": "seq_sum",
    },
    "passk@1": {"baseline": "second_best", "scale": None, "aggregation": "seq_sum"},
}


def test_no_row_was_taken_away():
    assert set(ROWS) <= {row.identity for row in TABLE}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.identity)
def test_the_numbers_of_a_row(row):
    expected = {**DEFAULTS, **ROWS[row.identity]}
    got = dict(row.settings())
    rule, wanted = got.pop("trust_region"), expected.pop("trust_region")
    assert got == expected
    assert type(rule) is type(wanted)
    for name, number in wanted.numbers().items():
        # 1 - 3e-4 and 0.9997 differ by a rounding.
        close = number if number is None else pytest.approx(number, rel=1e-15, abs=0)
        assert getattr(rule, name) == close, name


def test_names_and_versions_are_told_apart():
    identities = [row.identity for row in TABLE]
    assert len(set(identities)) == len(identities)
    for name, row in PRESETS.items():
        assert row.name == name
        assert row.version == max(other.version for other in TABLE if other.name == name)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.identity)
def test_every_row_says_where_it_is_from(row):
    assert row.summary
    assert "arXiv" in row.source or "TRL" in row.source


NUMBERS = {
    "default": ["clip(r, 0.8, 1.2)", "beta = 0", "1/(B |o|)", "ddof 1", "1e-06", "r = policy / old, per token"],
    "grpo": ["clip(r, 0.8, 1.2)", "beta = 0.04", "1 - ref/policy", "k3 as a loss", "KL(ref || policy)"],
    "grpo_r1": ["clip(r, 0, 11)", "beta = 0.001", "k3 as a loss"],
    "grpo_v32": ["policy / sampler", "> 0.5", "beta = 0.001", "policy/sampler * log(policy/ref)", "KL(policy || ref)"],
    "dr_grpo": ["1/(B L)", "max_completion_length", "A_i = (R_i - mean(R_group));"],
    "bnpo": ["1/sum |o|"],
    "dapo": ["clip(r, 0.8, 1.28)", "4 rounds", "0.8 L", "0.2 L", "cut completions leave every term", "1/sum |o|"],
    "lite_ppo": ["std of all rewards of the batch", "ddof 1"],
    "rloo": [
        "mean of the others",
        "product of its tokens' ratios",
        "beta = 0.05",
        "subtracted from the reward",
        ": 1/B",
    ],
    "reinforce_pp": ["mean(R of the batch)", "discount 1", "each token counting once", "beta = 0.01"],
    "reinforce_pp_baseline": ["centred rewards", "beta = 0.01", "kappa = log(policy/ref)"],
    "gspo": ["clip(r, 0.9997, 1.0004)", "geometric mean"],
    "gspo_token": ["clip(r, 0.9997, 1.0004)", "with a gradient per token"],
    "luspo": ["clip(r, 0.998, 1.0025)", ": 1/B"],
    "gmpo": ["[0.6703, 1.492]"],
    "cispo": ["clip(r, 0, 5) A log(policy)"],
    "scalerl": ["clip(r, 0, 5)", "1/(P sum |o| of the group)", "left out"],
    "sapo": ["tau 1 (A > 0), 1.05 (A <= 0)", "sech^2"],
    "vespo": ["(2, 3) where A >= 0", "(3, 2) where A < 0", "policy / sampler"],
    "dppo_tv": ["p - p_sampler > 0.15", "p_sampler - p > 0.15", "min(r, 20)"],
    "dppo_kl": ["> 0.05", "min(r, 20)", "KL(p_sampler || p)"],
    "maxrl": ["/ mean(R_group)", ": 1/B"],
    "intellect2": ["A < 0 and r > 4", "beta = 0.001"],
    "gdpo": ["normalised over the batch", "0.0001"],
    "mo_grpo": ["then their weighted sum"],
    "gfpo": ["the 8 best", "shortest"],
    "w_reinforce": ["R_i - 0.5", "0.2 where A > 0", "2 where A < 0"],
    "ce_gppo": ["0.75 * 0.8 where A < 0 and r < 0.8", "1 * 1.2 where A > 0 and r > 1.2"],
    "topr": ["[1, 1] where A >= 0, [0, 1] where A < 0", "product of its tokens' ratios", "2 where A > 0", ": 1/B"],
    "passk": ["G (R_max - R_second)", ": 1/B"],
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_description_holds_the_numbers(name):
    text = describe(PRESETS[name])
    for number in [f"{name}@", PRESETS[name].source, *NUMBERS[name]]:
        assert number in text
    assert "None" not in text


OTHER_TEXTS = [
    ({"trust_region": {"rule": "mask", "low": 0.4, "high": 3.0}}, "none where r outside [0.4, 3]"),
    ({"trust_region": {"rule": "mask", "high": 3.0, "signed": True}}, "A > 0 and r > 3, or A < 0 and r < 0.5"),
    ({"trust_region": {"rule": "fipo", "half_life": 16.0}}, "half-life 16), 1, 1.2), at most 1 where A < 0 and r > 4"),
    ({"trust_region": {"rule": "custom", "function": "a.py:b"}}, "phi = a.py:b(r, A)"),
    ({"trust_region": "none"}, "r A"),
    ({"trust_region": "none", "ratio_anchor": "self"}, "A log(policy)"),
    ({"ratio_level": "prefix_product"}, "the product of the ratios up to it"),
    ({"mismatch": {"rule": "weight", "high": 3.0}}, "times clip(rho, 0, 3); rho = old / sampler, per token"),
    ({"mismatch": {"rule": "weight", "mode": "mask", "low": 0.5}}, "times rho, none outside [0.5, 2]"),
    ({"mismatch": {"rule": "weight", "mode": "reject", "level": "geometric"}}, "its geometric mean"),
    ({"mismatch": {"rule": "weight", "level": "sequence"}}, "product over the sequence"),
    ({"mismatch": "veto"}, "outside [0.0001, 10000]"),
    ({"top_entropy": 0.2}, "the 0.2 of the minibatch's tokens of highest entropy; the others still count in"),
    ({"top_entropy": 0.2, "denominator": "after_masks"}, "are left out of the mean"),
    ({"entropy": {"coefficient": 0.01}}, "+ 0.01 * mean full-vocabulary entropy"),
    (
        {"entropy": {"coefficient": 0.01, "target": 0.3}},
        "moves by 0.005 an update, up while the entropy is at most 0.3",
    ),
    ({"kl": {"beta": 0.1, "target": 0.02}}, "toward a KL of 0.02 per token"),
    ({"kl": {"beta": 0.1, "estimator": "full", "correction": "none"}}, "over the vocabulary"),
    (
        {"kl": {"beta": 0.1, "estimator": "full", "correction": "prefix_product", "top_k": 64}},
        "the 64 likeliest tokens and a bucket for the rest, weighted by the product of earlier ratios to old",
    ),
    (
        {"kl": {"beta": 0.1, "place": "advantage", "correction": "none"}},
        "log(old/ref) of the token, subtracted from the advantage",
    ),
    (
        {"kl": {"beta": 0.1, "scope": "sequence", "correction": "sequence_weight"}},
        "per sequence: kappa = product of policy/old over the sequence * sum of log(policy/ref)",
    ),
    ({"kl": {"beta": 0.1, "correction": "prefix_product"}}, "product of policy/old up to the token * "),
    ({"unlikeliness": {"strength": 0.3}}, "R (1 - 0.3 rank/G)"),
    ({"soft_overlong": {"max_length": 500}}, "L = 500"),
    ({"group_filter": {"rule": "top_k", "k": 3, "metric": "reward_per_token"}}, "the 3 best completions"),
    ({"baseline": "length_weighted"}, "sum(|o_j| R_j) / sum(|o_j|)"),
    ({"baseline": "none"}, "A_i = R_i"),
    ({"scale": {"rule": "group_mean", "epsilon": 0.1}}, "(mean(R_group) + 0.1)"),
    ({"credit": "process"}, "sum over the steps that end at t or later"),
    ({"credit": "given", "baseline": "none", "scale": "none"}, "as the reward function gives it"),
    ({"truncated": "zero"}, "cut completions have advantage 0"),
    ({"truncated": "penalize", "truncated_penalty": 0.7}, "have 0.7 subtracted"),
    ({"aggregation": "constant", "aggregation_length": 77}, "L = 77"),
    ({"aggregation": "token_sum"}, "the sum over all tokens"),
    ({"count_empty": False}, "do not count"),
]


@pytest.mark.parametrize(("settings", "text"), OTHER_TEXTS, ids=lambda value: None)
def test_a_description_of_other_parts(settings, text):
    assert text in describe(PRESETS["default"].replace(**settings))


def test_a_description_says_what_was_changed():
    assert "changed" not in describe(PRESETS["dapo"])
    assert "changed" not in describe(PRESETS["dapo"].replace(epsilon=0.2, epsilon_high=0.28, beta=0))
    line = describe(PRESETS["dapo"].replace(beta=0.1, truncated="zero")).splitlines()[1]
    assert line.split(maxsplit=1) == ["changed", "truncated mask -> zero, kl.beta 0 -> 0.1"]


@pytest.mark.parametrize(
    ("part", "numbers"),
    [
        (FIPO(), (0.8, 1.2, None, 32.0, 1.0, 1.2, 4.0)),
        (Mask(), (0.5, 5.0, False)),
        (Cap(), (0.0, 5.0)),
        (SAPO(), (1.0, 1.05)),
        (Gamma(), (2.0, 3.0, 3.0, 2.0)),
        (TVMask(), (0.15, 0.15, 20.0)),
        (KLMask(), (0.05, 20.0)),
        (PPOClip(), (0.8, 1.2, None)),
        (Taper(), (1.0, 1.0, 0.0, 1.0)),
        (GradientPreservingClip(), (0.8, 1.2, 1.0, 1.0)),
        (GMPO(), (math.exp(-0.4), math.exp(0.4))),
        (MismatchWeight(), ("token", "truncate", 0.0, 2.0)),
        (Veto(), (1e-4, 1e4)),
        (OffPolicyMask(), (0.5,)),
        (SoftOverlong(), (0.2, None)),
        (Unlikeliness(), (0.25,)),
        (DynamicSampling(), (4,)),
        (TopK(), (8, "shortest")),
        (EntropyBonus(coefficient=0.1), (0.1, None, 0.005)),
    ],
    ids=lambda value: getattr(value, "rule", None),
)
def test_the_numbers_a_part_has_of_its_own(part, numbers):
    # What a rule begins from when it is named alone.
    assert tuple(part.numbers().values()) == numbers
