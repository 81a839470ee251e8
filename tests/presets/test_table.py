"""The table: no row changes, every row is described with its numbers, and the numbers that a rule has by default."""

import hashlib
import json
import math

from cohort.presets import PRESETS, TABLE, describe, parts
from cohort.presets import trust_regions as rules
from cohort.presets.objective import ABOUT
from tests.conftest import each

FINGERPRINTS = {
    "default@1": "c26ac54fd187",
    "grpo@1": "967fe78c2405",
    "grpo_r1@1": "0d0b17f5cbc0",
    "grpo_v32@1": "28220467e299",
    "dr_grpo@1": "22ffe9516846",
    "bnpo@1": "7f085f05daca",
    "dapo@1": "9013f33b3906",
    "lite_ppo@1": "bcbafb02f357",
    "rloo@1": "6c7402b63e82",
    "reinforce_pp@1": "c264fe8bbc98",
    "reinforce_pp_baseline@1": "870a4963cec9",
    "gspo@1": "9b0f3725da8f",
    "gspo@2": "9b0f3725da8f x 4",
    "gspo_token@1": "49afa7f254a7",
    "gspo_token@2": "49afa7f254a7 x 4",
    "luspo@1": "be27afebd1aa",
    "luspo@2": "be27afebd1aa x 4",
    "gmpo@1": "d9c183a2d8fa",
    "gmpo@2": "d9c183a2d8fa x 8",
    "cispo@1": "0c64f77be663",
    "cispo@2": "0c64f77be663 x 4",
    "scalerl@1": "a559ce927c6e",
    "sapo@1": "cb582832a286",
    "sapo@2": "cb582832a286 x 4",
    "vespo@1": "aae742625c38",
    "dppo_tv@1": "2d59fc708459",
    "dppo_kl@1": "d0bdae983211",
    "maxrl@1": "832e308537ea",
    "intellect2@1": "47c7f3a64768",
    "gdpo@1": "4addd9073699",
    "mo_grpo@1": "44c0e390ce02",
    "gfpo@1": "a1786aeebc7f",
    "w_reinforce@1": "c826098c251c",
    "passk@1": "0914de9fc71e",
    "ce_gppo@1": "f9ff79ed99ee",
    "ce_gppo@2": "f9ff79ed99ee x 4",
    "topr@1": "b2a5989182bd",
}
"""Of every row that was ever published."""


def fingerprint(row):
    """Of all settings; numbers to 12 digits, as ``exp`` may differ in the last one between machines. With the number of
    minibatches where a row has several."""
    settings = json.loads(row.model_dump_json(exclude=set(ABOUT)), parse_float=lambda text: f"{float(text):.12g}")
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12] + (
        f" x {row.minibatches}" if row.minibatches > 1 else ""
    )


def test_a_row_never_changes():
    # Another number is a new row with a higher version: add its fingerprint, and leave the others as they are.
    assert {row.identity: fingerprint(row) for row in TABLE} == FINGERPRINTS


def test_names_and_versions_are_told_apart():
    identities = [row.identity for row in TABLE]
    assert len(set(identities)) == len(identities)
    for name, row in PRESETS.items():
        assert row.name == name
        assert row.version == max(other.version for other in TABLE if other.name == name)


def test_presets_that_are_another_one_with_one_update_carry_several():
    """Rows that differ in ratio and trust region alone have one gradient at r = 1."""
    same = {}
    for row in PRESETS.values():
        rest = {name: part for name, part in row.settings().items() if not name.startswith(("ratio", "trust"))}
        if row.ratio_anchor == "old":
            same.setdefault(repr({**rest, "kl": row.kl if row.beta else None}), []).append(row)
    alike = [sorted((row.name, row.minibatches) for row in rows) for rows in same.values() if len(rows) > 1]
    assert sorted(alike) == [
        [("bnpo", 1), ("ce_gppo", 4), ("cispo", 4)],
        [("default", 1), ("gmpo", 8), ("gspo", 4), ("gspo_token", 4), ("sapo", 4)],
    ]
    assert all(8 % row.minibatches == 0 for row in TABLE)  # rollout.prompts_per_step is 8 by default


@each("row", TABLE, ids=lambda row: row.identity)
def test_a_description_has_the_numbers(row):
    text = describe(row)
    rule, parts = row.trust_region, (row.scale, row.group_filter, row.soft_overlong, row.sign_weights, *row.mismatch)
    numbers = [number for part in (rule, *parts) if part is not None for number in part.numbers().values()]
    shown = [f"{number:.4g}" for number in numbers if type(number) is float and number]
    for expected in [f"{row.identity}: {row.summary}", row.source, f"beta = {row.beta:g}", *shown]:
        assert expected in text
    assert "None" not in text
    assert row.summary
    assert "arXiv" in row.source or "TRL" in row.source


OTHER_TEXTS = [
    ({}, "A_i = (R_i - mean(R_group)) / (std(R_group, ddof 1) + 1e-06); 0 where all rewards of the group are equal"),
    ({"kl": {"beta": 0.1, "direction": "forward", "correction": "none"}}, "kappa = 1 - ref/policy (k3 as a loss)"),
    ({"ratio_anchor": "sampler", "trust_region": "tv_mask"}, "p - p_sampler > 0.15, or A < 0 and p_sampler - p > 0.15"),
    ({"scale": {"rule": "batch_std", "unit": "token"}}, "all rewards of the batch, ddof 1, each token counting once"),
    ({"scale": "none", "kl": {"beta": 0.1, "place": "reward"}}, "subtracted from the reward: the gradient of KL("),
    ({"credit": "return_to_go"}, "; per token by returns to go, discount 1; 0 where"),
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
    ({"entropy": {"target": 0.3}}, "moves by 0.005 an update, up while the entropy is at most 0.3"),
    ({"kl": {"beta": 0.1, "target": 0.02}}, "toward a KL of 0.02 per token"),
    ({"kl": {"beta": 0.1, "estimator": "full", "correction": "none"}}, "over the vocabulary"),
    (
        {"kl": {"beta": 0.1, "estimator": "full", "correction": "prefix_product", "top_k": 64}},
        "the 64 likeliest tokens and a bucket for the rest, weighted by the product of earlier ratios to old",
    ),
    ({"kl": {"beta": 0.1, "place": "advantage"}}, "log(old/ref) of the token, subtracted from the advantage"),
    ({"kl": {"beta": 0.1, "scope": "sequence"}}, "per sequence: kappa = product of policy/old over the sequence * sum"),
    ({"kl": {"beta": 0.1, "correction": "prefix_product"}}, "product of policy/old up to the token * "),
    ({"unlikeliness": {"strength": 0.3}}, "R (1 - 0.3 rank/G)"),
    ({"soft_overlong": {"max_length": 500}}, "L = 500"),
    ({"group_filter": {"rule": "top_k", "k": 3, "metric": "reward_per_token"}}, "the 3 best completions"),
    ({"baseline": "length_weighted"}, "sum(|o_j| R_j) / sum(|o_j|)"),
    ({"baseline": "none"}, "A_i = R_i"),
    ({"scale": {"rule": "group_mean", "epsilon": 0.1}}, "(mean(R_group) + 0.1)"),
    ({"credit": "process"}, "sum over the steps that end at t or later"),
    ({"credit": "turns", "baseline": "leave_one_out", "scale": "none"}, "of the group that reached it; 0 if none did)"),
    ({"credit": "given", "baseline": "none", "scale": "none"}, "as the reward function gives it"),
    ({"truncated": "zero"}, "cut completions have advantage 0"),
    ({"truncated": "penalize", "truncated_penalty": 0.7}, "have 0.7 subtracted"),
    ({"aggregation": "constant", "aggregation_length": 77}, "L = 77"),
    ({"aggregation": "token_sum"}, "the sum over all tokens"),
    ({"aggregation": "constant"}, "L = max_completion_length"),
    ({"count_empty": False}, "do not count"),
]


@each(("settings", "text"), OTHER_TEXTS, ids=lambda value: None)
def test_a_description_of_other_parts(settings, text):
    assert text in describe(PRESETS["default"].replace(**settings))


def test_a_description_says_what_was_changed():
    assert "changed" not in describe(PRESETS["dapo"])
    assert "changed" not in describe(PRESETS["dapo"].replace(epsilon=0.2, epsilon_high=0.28, beta=0))
    line = describe(PRESETS["dapo"].replace(beta=0.1, truncated="zero")).splitlines()[1]
    assert line.split(maxsplit=1) == ["changed", "truncated mask -> zero, kl.beta 0 -> 0.1"]
    last = describe(PRESETS["dapo"].replace(trust_region="cap", group_filter={"max_rounds": 2})).splitlines()[-1]
    assert last.split(maxsplit=1) == ["source", "DAPO, arXiv 2503.14476; CISPO (arXiv 2506.13585)"]


@each(
    ("part", "numbers"),
    [
        (rules.FIPO(), (0.8, 1.2, None, 32.0, 1.0, 1.2, 4.0)),
        (rules.Mask(), (0.5, 5.0, False)),
        (rules.Cap(), (0.0, 5.0)),
        (rules.SAPO(), (1.0, 1.05)),
        (rules.Gamma(), (2.0, 3.0, 3.0, 2.0)),
        (rules.TVMask(), (0.15, 0.15, 20.0)),
        (rules.KLMask(), (0.05, 20.0)),
        (rules.PPOClip(), (0.8, 1.2, None)),
        (rules.Taper(), (1.0, 1.0, 0.0, 1.0)),
        (rules.GradientPreservingClip(), (0.8, 1.2, 1.0, 1.0)),
        (rules.GMPO(), (math.exp(-0.4), math.exp(0.4))),
        (parts.MismatchWeight(), ("token", "truncate", 0.0, 2.0)),
        (parts.Veto(), (1e-4, 1e4)),
        (parts.OffPolicyMask(), (0.5,)),
        (parts.SoftOverlong(), (0.2, None)),
        (parts.Unlikeliness(), (0.25,)),
        (parts.DynamicSampling(), (4,)),
        (parts.TopK(), (8, "shortest")),
        (parts.EntropyBonus(coefficient=0.1), (0.1, None, 0.005, 0.0, None)),
    ],
    ids=lambda value: getattr(value, "rule", None),
)
def test_the_numbers_a_part_has_of_its_own(part, numbers):
    # What a rule begins from when it is named alone.
    assert tuple(part.numbers().values()) == numbers
