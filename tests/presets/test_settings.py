"""From names, words, numbers and tables to an objective; what is refused, and with which words."""

import math

import pytest

from cohort.errors import ConfigError
from cohort.presets import PRESETS, TABLE, Objective, describe, nested, parts, preset, setting_names, table
from cohort.presets import trust_regions as rules
from tests.conftest import each

DEFAULT = PRESETS["default"]

# Names --------------------------------------------------------------------------------------------------------------


def test_every_preset_is_found_by_name_and_by_version():
    for name, row in PRESETS.items():
        assert preset(name) is preset(row.identity) is row


@each(
    ("name", "message"),
    [
        ("gpro", "unknown preset 'gpro'; did you mean .*grpo"),
        ("reinforcepp", "did you mean .*reinforce_pp"),
        ("DAPO", "did you mean dapo"),
        ("zzzz", "'cohort objective' lists all"),
        ("grpo@2", "preset grpo has version 1, not '2'"),
        ("grpo@one", "preset grpo has version 1, not 'one'"),
    ],
)
def test_a_name_or_version_that_does_not_exist(name, message):
    with pytest.raises(ConfigError, match=message):
        preset(name)


def test_a_newer_row_takes_the_name_and_the_older_keeps_its_version(monkeypatch):
    newer = PRESETS["grpo"].model_copy(update={"version": 2})
    monkeypatch.setattr(table, "TABLE", (*TABLE, newer))
    monkeypatch.setitem(PRESETS, "grpo", newer)
    assert preset("grpo").version == 2
    assert preset("grpo@1").version == 1
    with pytest.raises(ConfigError, match="has version 1, 2, not '3'"):
        preset("grpo@3")


def test_setting_names_are_the_parts_and_the_shorthands():
    assert {"kl", "trust_region", "beta", "epsilon", "epsilon_high"} <= set(setting_names())
    assert not {"name", "version", "source", "summary"} & set(setting_names())
    settings = PRESETS["dapo"].settings()
    assert Objective(**settings).settings() == settings


# Words, numbers and tables ------------------------------------------------------------------------------------------


@each(
    ("name", "given", "part"),
    [
        ("scale", "none", None),
        ("scale", None, None),
        ("scale", "group_mean", parts.GroupMean()),
        ("scale", "batch_std", parts.BatchStd()),
        ("scale", {"rule": "batch_std", "of": "centred"}, parts.BatchStd(of="centred")),
        ("scale", {"epsilon": 0.5}, parts.GroupStd(epsilon=0.5)),
        ("scale", parts.GroupStd(ddof=0), parts.GroupStd(ddof=0)),
        ("baseline", "leave_one_out", "leave_one_out"),
        ("baseline", "none", "none"),
        ("baseline", 1, 1.0),
        ("baseline", -0.25, -0.25),
        ("sign_weights", {"negative": 2}, parts.SignWeights(negative=2.0)),
        ("soft_overlong", {"max_length": 100}, parts.SoftOverlong(max_length=100)),
        ("soft_overlong", "soft_overlong", parts.SoftOverlong()),
        ("unlikeliness", {"strength": 0.5}, parts.Unlikeliness(strength=0.5)),
        ("group_filter", "drop_dead", parts.DropDead()),
        ("group_filter", {"rule": "dynamic_sampling", "max_rounds": 2}, parts.DynamicSampling(max_rounds=2)),
        ("group_filter", {"rule": "top_k", "k": 4}, parts.TopK(k=4)),
        ("trust_region", "none", None),
        ("trust_region", "cap", rules.Cap()),
        ("trust_region", {"high": 1.5}, rules.PPOClip(high=1.5)),
        ("trust_region", {"rule": "ppo_clip", "dual": 3}, rules.PPOClip(dual=3.0)),
        ("trust_region", "file.py:rule", rules.Custom(function="file.py:rule")),
        ("trust_region", {"rule": "custom", "function": "module:rule"}, rules.Custom(function="module:rule")),
        ("mismatch", "none", ()),
        ("mismatch", None, ()),
        ("mismatch", [], ()),
        ("mismatch", "veto", (parts.Veto(),)),
        ("mismatch", {"rule": "weight", "high": 3}, (parts.MismatchWeight(high=3.0),)),
        ("mismatch", parts.OffPolicyMask(threshold=1.0), (parts.OffPolicyMask(threshold=1.0),)),
        ("mismatch", ["veto", {"rule": "weight", "mode": "mask"}], (parts.Veto(), parts.MismatchWeight(mode="mask"))),
        ("entropy", {"coefficient": 0.01}, parts.EntropyBonus(coefficient=0.01)),
        ("kl", {"beta": 1}, parts.KL(beta=1.0, correction="token_ratio")),
        ("top_entropy", 0.2, 0.2),
        ("count_empty", False, False),
        ("aggregation_length", "none", None),
    ],
    ids=lambda value: None,
)
def test_a_part_from_a_word_a_number_or_a_table(name, given, part):
    got = getattr(DEFAULT.replace(**{name: given}), name)
    assert got == part
    assert type(got) is type(part)


def test_a_table_changes_only_the_numbers_it_names():
    objective = DEFAULT.replace(trust_region={"low": 0.7, "dual": 3.0}).replace(trust_region={"high": 1.3})
    assert objective.trust_region == rules.PPOClip(low=0.7, high=1.3, dual=3.0)
    assert objective.replace(trust_region={"dual": "none"}).trust_region == rules.PPOClip(low=0.7, high=1.3)
    assert objective.replace(kl={"scope": "token"}).kl == DEFAULT.kl


def test_another_rule_begins_from_its_own_numbers():
    narrow = DEFAULT.replace(trust_region={"low": 0.95, "high": 1.05})
    for own in (rules.Cap(), rules.Mask(), rules.SAPO(), rules.Gamma(), rules.TVMask(), rules.KLMask(), rules.FIPO()):
        assert narrow.replace(trust_region=own.rule).trust_region == own
        assert narrow.replace(trust_region={"rule": own.rule}).trust_region == own
    assert narrow.replace(trust_region={"rule": "cap", "low": 0.5}).trust_region == rules.Cap(low=0.5, high=5.0)
    assert PRESETS["cispo"].replace(trust_region="ppo_clip").trust_region == rules.PPOClip(low=0.8, high=1.2)
    assert DEFAULT.replace(ratio_level="sequence_mean", trust_region="gmpo").trust_region == rules.GMPO()


def test_a_changed_objective_keeps_its_name():
    changed = PRESETS["dapo"].replace(beta=0.1)
    assert changed.identity == "dapo@1"
    assert PRESETS["dapo"].beta == 0.0


# Shorthands ---------------------------------------------------------------------------------------------------------


def test_beta_is_the_kls_weight_and_changes_nothing_else():
    assert DEFAULT.replace(beta=0.04).kl == DEFAULT.kl.model_copy(update={"beta": 0.04})
    assert PRESETS["grpo"].replace(beta=0).kl == PRESETS["grpo"].kl.model_copy(update={"beta": 0.0})
    both = DEFAULT.replace(beta=0.1, kl={"direction": "forward", "target": 0.02})  # as a settings file has it
    assert both.kl == parts.KL(beta=0.1, direction="forward", correction="token_ratio", target=0.02)


@each(
    ("settings", "low", "high"),
    [
        ({"epsilon": 0.1}, 0.9, 1.1),
        ({"epsilon": 0.1, "epsilon_high": 0.3}, 0.9, 1.3),
        ({"epsilon_high": 0.3}, 0.8, 1.3),
        ({"epsilon": 0.99}, 0.01, 1.99),
    ],
)
def test_epsilons_are_the_clips_bounds(settings, low, high):
    rule = DEFAULT.replace(**settings).trust_region
    assert (rule.low, rule.high) == pytest.approx((low, high), rel=1e-15)
    assert type(rule) is rules.PPOClip
    assert DEFAULT.replace(trust_region="fipo", **settings).trust_region.high == pytest.approx(high, rel=1e-15)


def test_epsilon_beside_a_dual_bound_and_an_uneven_clip():
    assert PRESETS["intellect2"].replace(epsilon=0.1).trust_region.dual == 4.0
    objective = DEFAULT.replace(epsilon=0.1, trust_region={"dual": 1.15})
    assert objective.trust_region == rules.PPOClip(low=0.9, high=1.1, dual=1.15)
    assert PRESETS["dapo"].replace(epsilon_high=0.4).trust_region == rules.PPOClip(low=0.8, high=1.4)
    with pytest.raises(
        ConfigError, match=r"range \[0.8, 1.28\] of this objective is asymmetric: set epsilon_high as well"
    ):
        PRESETS["dapo"].replace(epsilon=0.1)


@each("name", ["cispo", "dppo_tv"])
@each("setting", ["epsilon", "epsilon_high"])
def test_epsilon_is_never_reinterpreted_by_another_rule(name, setting):
    with pytest.raises(ConfigError, match="bounds of the PPO clip, and this objective has trust_region"):
        PRESETS[name].replace(**{setting: 0.2})


# Dotted names -------------------------------------------------------------------------------------------------------


def test_dotted_names_become_tables():
    kl = {"beta": 0.1}
    settings = {"kl": kl, "kl.scope": "token", "scale": "none", "top_entropy": 0.5}
    assert nested(settings) == {"kl": {"beta": 0.1, "scope": "token"}, "scale": "none", "top_entropy": 0.5}
    assert kl == {"beta": 0.1}
    with pytest.raises(ConfigError, match=r"top_entropy is given both as 0.5 and by its parts \(top_entropy.x\)"):
        nested({"top_entropy": 0.5, "top_entropy.x": 1})


def test_a_rule_by_name_and_its_number_by_a_dotted_name_in_any_order():
    settings = nested({"trust_region": "cap", "trust_region.high": 8.0})
    assert settings == {"trust_region": {"rule": "cap", "high": 8.0}}
    assert DEFAULT.replace(**settings).trust_region == rules.Cap(high=8.0)
    assert nested({"trust_region.high": 8.0, "trust_region": "cap"}) == settings


# Settings that do not exist or have the wrong kind ------------------------------------------------------------------

WRONG = [
    ({"bata": 1}, "unknown objective setting 'bata'; did you mean beta?"),
    ({"scale": {"ddof": 1.5}}, "scale.ddof: expected a whole number, got 1.5"),
    ({"soft_overlong": {"rule": "soft"}}, "soft_overlong: expected a table of its numbers .cache_share, max_length."),
    ({"group_filter": {"k": 4}}, "group_filter is a table without its rule: expected rule = one of none, drop_dead"),
    ({"mismatch": {"high": 3}}, r"mismatch\[0\] is a table without its rule"),
    ({"mismatch": ["veto", "vetoo"]}, r"mismatch\[1\]: expected one of weight, veto, .*did you mean veto"),
    ({"mismatch": 3}, "mismatch: expected a list of tables, got 3"),
    ({"kl": {"target": 0.1}}, "kl.target moves beta"),
    ({"kl": "reverse"}, "kl: expected a table of its numbers .beta, direction"),
    ({"kl": {"scope": "tokens"}}, "kl.scope: expected 'token' or 'sequence', got 'tokens'; did you mean token?"),
    ({"aggregation": "token_men"}, "aggregation: expected .*got 'token_men'; did you mean token_mean?"),
    ({"baseline": "mean"}, "baseline: expected one of none, group_mean, .*a number, or a function as .*, got 'mean'"),
    ({"baseline": True}, "baseline: expected .*got True"),
    ({"top_entropy": "0.5"}, "top_entropy: expected a number, got '0.5'"),
    ({"count_empty": 1}, "count_empty: expected true or false, got 1"),
    ({"aggregation_length": 2.5}, "aggregation_length: expected a whole number, got 2.5"),
    ({"beta": "much"}, "beta: expected a number, got 'much'"),
    ({"beta": 0.1, "kl": {"beta": 0.2}}, "given twice: as beta and as kl.beta"),
    ({"epsilon": 0}, "epsilon and epsilon_high must be greater than 0"),
    ({"epsilon": 0.1, "epsilon_high": 0}, "epsilon and epsilon_high must be greater than 0"),
    ({"epsilon": "wide"}, "epsilon: expected a number, got 'wide'"),
    ({"trust_region": "none", "epsilon": 0.2}, "this objective has no trust region"),
    ({"epsilon": 28}, "epsilon .28. is the distance of the ratio's lower bound from 1"),
    ({"kl": "k3"}, "k3 as a loss is kl = 'k3_legacy'"),
    ({"mismatch": {"rule": "weight", "low": 3}}, "mismatch weight: low"),
    ({"mismatch": {"rule": "weight", "low": 1.5}}, "mismatch weight: .* must contain 1"),
    ({"mismatch": {"rule": "veto", "low": 2}}, "veto: .* must contain 1"),
]


# Numbers out of their range -----------------------------------------------------------------------------------------

RETURNS = {"credit": "return_to_go"}
POSITIVE, NOT_NEGATIVE, AT_LEAST_1 = "a number above 0", "a number of at least 0", "a number of at least 1"
RANGES = [
    ("top_entropy", {}, (0, 1.01), r"a number in \(0, 1\]"),
    ("discount", RETURNS, (-0.1, 1.1), r"a number in \[0, 1\]"),
    ("truncated_penalty", {"truncated": "penalize"}, (-1,), NOT_NEGATIVE),
    ("truncated_penalty", {"truncated": "penalize"}, (math.nan,), "a finite number"),
    ("aggregation_length", {"aggregation": "constant"}, (0,), AT_LEAST_1),
    ("scale.ddof", {}, (-1, 2), r"a number in \[0, 1\]"),
    ("scale.epsilon", {}, (-1,), NOT_NEGATIVE),
    ("scale.epsilon", {"scale.rule": "batch_std"}, (-1,), NOT_NEGATIVE),
    ("scale.epsilon", {"scale.rule": "group_mean"}, (-1,), NOT_NEGATIVE),
    ("sign_weights.positive", {}, (-1,), NOT_NEGATIVE),
    ("sign_weights.negative", {}, (-1,), NOT_NEGATIVE),
    ("soft_overlong.cache_share", {}, (0, 1.1), r"a number in \(0, 1\]"),
    ("soft_overlong.max_length", {}, (0,), AT_LEAST_1),
    ("unlikeliness.strength", {}, (-0.1, 1.1), r"a number in \[0, 1\]"),
    ("group_filter.max_rounds", {"group_filter.rule": "dynamic_sampling"}, (0,), AT_LEAST_1),
    ("group_filter.k", {"group_filter.rule": "top_k"}, (1,), "a number of at least 2"),
    ("trust_region.low", {}, (-0.1, math.nan), NOT_NEGATIVE),
    ("trust_region.tau_positive", {"trust_region.rule": "sapo"}, (0,), POSITIVE),
    ("trust_region.tau_negative", {"trust_region.rule": "sapo"}, (0,), POSITIVE),
    ("trust_region.k_positive", {"trust_region.rule": "gamma"}, (-1,), NOT_NEGATIVE),
    ("trust_region.lambda_negative", {"trust_region.rule": "gamma"}, (-1,), NOT_NEGATIVE),
    ("trust_region.low", {"trust_region.rule": "tv_mask"}, (-1,), NOT_NEGATIVE),
    ("trust_region.high", {"trust_region.rule": "tv_mask"}, (-1, math.nan), NOT_NEGATIVE),
    ("trust_region.cap", {"trust_region.rule": "tv_mask"}, (0.5,), AT_LEAST_1),
    ("trust_region.cap", {"trust_region.rule": "kl_mask"}, (0.5,), AT_LEAST_1),
    ("trust_region.threshold", {"trust_region.rule": "kl_mask"}, (-1,), NOT_NEGATIVE),
    ("trust_region.half_life", {"trust_region.rule": "fipo"}, (0,), POSITIVE),
    ("trust_region.safety", {"trust_region.rule": "fipo"}, (0,), POSITIVE),
    (r"mismatch\[0\].threshold", {"mismatch": [{"rule": "off_policy_mask"}]}, (-1,), NOT_NEGATIVE),
    ("kl.beta", {}, (-0.1,), NOT_NEGATIVE),
    ("kl.beta", {}, (math.inf, math.nan), "a finite number"),
    ("kl.target", {"kl.beta": 0.1}, (0,), POSITIVE),
    ("kl.horizon", {"kl.beta": 0.1, "kl.target": 0.1}, (0,), AT_LEAST_1),
    ("kl.top_k", {"kl.beta": 0.1}, (0,), AT_LEAST_1),
    ("entropy.coefficient", {}, (-1,), NOT_NEGATIVE),
    ("entropy.target", {}, (0,), POSITIVE),
    ("entropy.step", {"entropy.coefficient": 0.1}, (0,), POSITIVE),
    ("baseline", {}, (math.nan, math.inf), "a finite number"),
]


@each(("name", "others", "numbers", "expected"), RANGES)
def test_a_number_out_of_its_range(name, others, numbers, expected):
    for number in numbers:
        if name.startswith("mismatch"):
            settings = {"mismatch": [{**others["mismatch"][0], "threshold": number}]}
        else:
            settings = nested({**others, name: number})
        with pytest.raises(ConfigError, match=f"{name}: expected {expected}, got {number}"):
            DEFAULT.replace(**settings)


BOUNDS = [
    ({"low": 1.2, "high": 1.2}, r"ppo_clip: low \(1.2\) must be below high \(1.2\)"),
    ({"low": 1.1}, r"ppo_clip: \[1.1, 1.2\] must contain 1, the ratio of a policy to itself"),
    ({"high": 0.28}, "an epsilon of 0.28 is high = 1.28"),
    ({"dual": 1.2}, r"ppo_clip: dual \(1.2\) must be above high"),
    ({"rule": "mask", "low": 6}, "mask: low"),
    ({"rule": "mask", "low": 2}, "mask: .* must contain 1"),
    ({"rule": "cap", "high": 0.2}, "would scale every on-policy gradient.*an epsilon of 0.2 is high = 1.2"),
    ({"rule": "gmpo", "low": 1.1}, "gmpo: .* must contain 1"),
    ({"rule": "gppo", "low": 1.1}, "gppo: .* must contain 1"),
    ({"rule": "fipo", "high": 0.9}, "is a bound on the ratio itself"),
    ({"rule": "fipo", "weight_low": 1.3}, "fipo weight: low"),
    ({"rule": "custom", "function": "rule"}, "expected module:function or file.py:function"),
    ({"rule": "sapo", "tau": 1.0}, "sapo has tau_positive, tau_negative|did you mean"),
    ({"rule": "none", "high": 2.0}, "trust_region is 'none' and has no high"),
    (min, "a user's rule is named 'module:function' or 'file.py:function'"),
    ("rules.py", "a user's rule is named 'module:function' or 'file.py:function'"),
    (3, "trust_region: expected one of .*or a table with its numbers, got 3"),
    ("capp", "trust_region: expected one of none, ppo_clip, .*got 'capp'; did you mean cap?"),
    ({"hihg": 2}, "unknown setting trust_region.hihg; did you mean high?"),
    ({"rule": "cap", "dual": 2}, "unknown setting trust_region.dual"),
    ({"low": "small"}, "trust_region.low: expected a number, got 'small'"),
    ({"low": True}, "trust_region.low: expected a number, got True"),
]

# Parts that cannot be combined --------------------------------------------------------------------------------------

SEQUENCE_KL = {"beta": 0.1, "scope": "sequence", "correction": "none"}
TOKEN_WHITENING = {"rule": "batch_std", "unit": "token"}
BY_REWARD = {"reward_aggregation": "normalize_then_sum"}
TURNS = {"credit": "turns", "baseline": "leave_one_out", "scale": "none"}
GIVEN = {"credit": "given", "baseline": "none", "scale": "none"}

KL_REWARD, KL_ADVANTAGE = {**SEQUENCE_KL, "place": "reward"}, {"beta": 0.1, "place": "advantage", "correction": "none"}
OVERLONG, RARE = {"soft_overlong": "soft_overlong"}, {"unlikeliness": "unlikeliness"}

COMBINATIONS = [
    # Settings that belong to another choice.
    ({"aggregation_length": 10}, "aggregation_length belongs to aggregation 'constant'"),
    ({"discount": 0.9}, "discount belongs to credit 'return_to_go'"),
    ({"truncated_penalty": 2.0}, "belongs to truncated 'penalize'"),
    ({"denominator": "after_masks"}, "set top_entropy"),
    ({"entropy": {"rule": "entropy"}}, "no effect with coefficient 0"),
    # Scale and group filter.
    ({"scale": "group_mean", **OVERLONG}, "soft_overlong makes negative ones"),
    ({"scale": "group_mean", "kl": KL_REWARD}, "scale 'group_mean' with the KL in the reward"),
    ({"kl": KL_REWARD}, "the KL in the reward with scale 'group_std' would divide beta"),
    ({"scale": TOKEN_WHITENING, "kl": {"beta": 0.1, "place": "reward"}}, "divide beta by the batch's spread"),
    ({"scale": "batch_std", "credit": "return_to_go", "kl": KL_REWARD}, "divide beta by the batch's spread"),
    ({"group_filter": "drop_dead", "baseline": "none"}, "group_filter 'drop_dead' drops groups of equal rewards"),
    ({"group_filter": "dynamic_sampling", "baseline": 0.5}, "group_filter 'dynamic_sampling' drops groups"),
    ({"group_filter": "drop_dead", **RARE}, "unlikeliness gives groups of equal rewards a gradient"),
    # Several rewards.
    ({**BY_REWARD, "credit": "process"}, "reward_aggregation 'normalize_then_sum' needs credit 'outcome'"),
    ({**BY_REWARD, "scale": "none", "kl": KL_REWARD}, "there is no single reward for the KL"),
    ({**BY_REWARD, **OVERLONG}, "there is no single reward to shape"),
    ({**BY_REWARD, **RARE}, "there is no single reward to shape"),
    ({"reward_aggregation": "normalize_sum_normalize", "scale": "batch_std"}, "normalises each reward in its group"),
    # Credit.
    ({"credit": "process", "baseline": "none"}, "credit 'process' normalises all step rewards of a group together"),
    ({"credit": "process", "scale": "batch_std"}, "credit 'process' normalises all step rewards of a group together"),
    ({"credit": "given", "scale": "none"}, "credit 'given' uses the advantages as they are"),
    ({"credit": "given", "baseline": "none"}, "credit 'given' uses the advantages as they are"),
    ({"credit": "process", **OVERLONG}, "soft_overlong is about a completion's one reward"),
    ({"credit": "process", **RARE}, "unlikeliness is about a completion's one reward"),
    ({**GIVEN, "group_filter": "top_k"}, "group_filter is about a completion's one reward"),
    ({"credit": "process", "scale": "none", "kl": KL_REWARD}, "needs a completion's one reward; credit 'process'"),
    ({"credit": "turns"}, "credit 'turns' compares a turn with the others that reached it: set baseline 'leave_one_"),
    ({"credit": "turns", "baseline": "leave_one_out"}, "credit 'turns' compares a turn .* and scale 'none'"),
    ({"credit": "turns", "scale": "none"}, "credit 'turns' compares a turn"),
    ({**TURNS, "group_filter": "drop_dead"}, "whose later turns may differ: .* set group_filter 'none'"),
    ({**TURNS, "kl": KL_REWARD}, "the KL in the reward needs .* credit 'turns' has none"),
    ({**TURNS, "ratio_level": "sequence_mean"}, "ratio_level 'sequence_mean' moves a completion as one"),
    ({**TURNS, **BY_REWARD}, "reward_aggregation 'normalize_then_sum' needs credit 'outcome'"),
    ({"baseline": "second_best", "scale": "batch_std"}, "baseline 'second_best' is an estimate of its own"),
    # Ratio, trust region and mismatch.
    ({"ratio_anchor": "self"}, "ratio_anchor 'self' makes every ratio 1"),
    ({"ratio_level": "sequence_mean", "credit": "return_to_go"}, "'sequence_mean' moves a completion as one"),
    ({"ratio_level": "sequence_product", "credit": "process"}, "'sequence_product' moves a completion as one"),
    ({"ratio_level": "sequence_mean", "kl": KL_ADVANTAGE}, "'sequence_mean' moves a completion as one"),
    ({"ratio_level": "sequence_mean", "top_entropy": 0.5}, "and top_entropy chooses single tokens"),
    ({"ratio_level": "sequence_mean", "mismatch": "weight"}, "and a mismatch weight of level 'token' weighs single"),
    ({"trust_region": "tv_mask", "ratio_level": "sequence_mean"}, "trust_region 'tv_mask' is about single tokens"),
    ({"trust_region": "kl_mask", "ratio_level": "sequence_mean"}, "trust_region 'kl_mask' is about single tokens"),
    ({"trust_region": "fipo", "ratio_level": "prefix_product"}, "trust_region 'fipo' is about single tokens"),
    ({"trust_region": "gmpo"}, "trust_region 'gmpo' is a geometric mean over the sequence"),
    ({"ratio_anchor": "sampler", "mismatch": {"rule": "weight"}}, "ratio_anchor 'sampler' carries the mismatch"),
    ({"ratio_anchor": "sampler", "mismatch": ["off_policy_mask", "veto"]}, "ratio_anchor 'sampler' carries"),
]
COMBINATIONS_OF_KL = [
    ({"top_k": 5}, "kl.top_k belongs to kl.estimator 'full'"),
    ({"horizon": 5}, "kl.horizon belongs to an adaptive KL"),
    (
        {"estimator": "full", "place": "advantage", "correction": "none"},
        "differentiates the logits: set kl.place 'loss'",
    ),
    ({"estimator": "full", "scope": "sequence", "correction": "none"}, "is a sum over tokens: set kl.scope 'token'"),
    ({"estimator": "full", "correction": "token_ratio"}, "has no sampled token to correct for"),
    ({"scope": "sequence", "correction": "token_ratio"}, "kl.scope 'sequence' with kl.correction 'token_ratio' is the"),
    ({"scope": "sequence", "correction": "prefix_product"}, "kl.correction 'prefix_product' is the gradient of no KL"),
    ({"correction": "none", "anchor": "sampler"}, "kl.anchor 'sampler' has no effect"),
    ({**KL_ADVANTAGE, "direction": "forward"}, "kl.place 'advantage' gives the reverse KL's gradient only"),
    ({"place": "advantage", "correction": "token_ratio"}, "is weighted by the policy term's ratio already"),
    ({"place": "reward", "scope": "token"}, "kl.place 'reward' is a reward of the whole completion"),
]
REFUSED = [
    *WRONG,
    *COMBINATIONS,
    *(({"trust_region": table}, message) for table, message in BOUNDS),
    *(({"scale": "none", "kl": {"beta": 0.1, **kl}}, message) for kl, message in COMBINATIONS_OF_KL),
]


@each(("settings", "message"), REFUSED, ids=lambda value: None)
def test_a_setting_that_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DEFAULT.replace(**settings)


ALLOWED = [
    {"scale": "none", "kl": KL_REWARD},
    {"kl": {**KL_REWARD, "beta": 0.0}},
    {"kl": {**SEQUENCE_KL, "place": "advantage"}, "ratio_level": "sequence_mean"},
    {"kl": KL_ADVANTAGE, "ratio_level": "sequence_mean_token"},
    {
        "credit": "return_to_go",
        "scale": TOKEN_WHITENING,
        "baseline": "batch_mean",
        "kl": {"beta": 0.1, "place": "reward"},
    },
    {"credit": "return_to_go", "discount": 0.9, "ratio_level": "prefix_product"},
    {"credit": "return_to_go", "scale": TOKEN_WHITENING, "baseline": "batch_mean"},
    {"credit": "process", "scale": "none"},
    {**TURNS, "group_filter": "top_k", **OVERLONG},
    {**TURNS, "kl": KL_ADVANTAGE, **RARE},
    GIVEN,
    {"baseline": "second_best"},
    {"ratio_anchor": "sampler", "mismatch": "off_policy_mask"},
    {"ratio_anchor": "self", "trust_region": "none", "mismatch": "veto"},
    {"group_filter": "top_k", "baseline": "none"},
    {"ratio_level": "sequence_product", "trust_region": "cap", "top_entropy": 0.5, "mismatch": "weight"},
    {"group_filter": "drop_dead", "baseline": "length_weighted"},
    {"aggregation": "constant", "aggregation_length": 10},
    {**BY_REWARD, "kl": {**SEQUENCE_KL, "place": "advantage"}},
    {"kl": {"beta": 0.1, "estimator": "full", "correction": "prefix_product", "anchor": "sampler", "top_k": 8}},
]


@each("settings", ALLOWED, ids=lambda value: None)
def test_their_neighbours_are_allowed(settings):
    changed = DEFAULT.replace(**settings)
    assert changed != DEFAULT
    assert describe(changed)


# What an objective says of itself -----------------------------------------------------------------------------------


@each(
    ("objective", "expected"),
    [
        (DEFAULT, {"advantages_need_logps": False, "token_advantages": False, "group_relative": True}),
        (PRESETS["rloo"], {"advantages_need_logps": True, "token_advantages": False, "group_relative": True}),
        (PRESETS["grpo"], {"advantages_need_logps": False, "token_advantages": False, "group_relative": True}),
        (PRESETS["reinforce_pp"], {"advantages_need_logps": True, "token_advantages": True, "group_relative": False}),
        (PRESETS["w_reinforce"], {"group_relative": False}),
        (PRESETS["maxrl"], {"group_relative": True}),
        (DEFAULT.replace(baseline="none"), {"group_relative": True}),
        (DEFAULT.replace(baseline="none", scale="none"), {"group_relative": False}),
        (PRESETS["lite_ppo"].replace(baseline="batch_mean"), {"group_relative": False}),
        (DEFAULT.replace(kl=KL_ADVANTAGE), {"token_advantages": True, "advantages_need_logps": True}),
        (DEFAULT.replace(kl={**SEQUENCE_KL, "place": "advantage"}), {"token_advantages": False}),
        (DEFAULT.replace(kl={**SEQUENCE_KL, "place": "advantage", "beta": 0.0}), {"advantages_need_logps": False}),
    ],
    ids=lambda value: None,
)
def test_what_follows_from_the_parts(objective, expected):
    assert {name: getattr(objective, name) for name in expected} == expected


def test_k3_legacy_is_the_papers_kl():
    changed = PRESETS["grpo_v32"].replace(kl="k3_legacy", beta=0.04)
    assert changed.kl == PRESETS["grpo"].kl
    assert PRESETS["default"].replace(kl="k3_legacy").kl == parts.KL(direction="forward")


def test_what_a_moved_kl_implies_need_not_be_said():
    moved = DEFAULT.replace(scale=None, kl={"beta": 0.1, "place": "reward"})
    assert moved.kl == parts.KL(beta=0.1, place="reward", scope="sequence")
    moved = PRESETS["vespo"].replace(kl={"beta": 0.1, "place": "advantage"}, ratio_level="token")
    assert moved.kl == parts.KL(beta=0.1, place="advantage")
    assert DEFAULT.replace(kl={"scope": "sequence"}).kl == parts.KL(scope="sequence", correction="sequence_weight")
    assert DEFAULT.replace(kl={"estimator": "full"}).kl == parts.KL(estimator="full")


@each("field", ["aggregation", "credit", "truncated", "ratio_anchor", "ratio_level", "baseline"])
def test_a_word_that_does_not_exist_is_refused_when_made(field):
    with pytest.raises(ConfigError, match=f"{field}: expected one of"):
        Objective(**{field: "foo"})
