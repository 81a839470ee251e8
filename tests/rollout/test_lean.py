"""The lean path computes what transformers computes, for every family it knows, with adapters, and over the weights as
they are now.

Gaps between logits are measured in standard deviations of the expected logits, where these are above 1: rounding errors
grow with what is rounded.
"""

import copy
import functools
import gc

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.errors import ModelError
from cohort.policy import Policy, Precision
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.local.cached import CachedBackend, LeanBody
from cohort.rollout.local.capacity import Capacity
from tests.conftest import family_model, telling
from tests.rollout.conftest import Way, cover, drawn_ids, each_way
from tests.rollout.test_local_engine import LetterTokenizer, prompts

# peft asks transformers for something by its old name; pytest makes warnings errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:.lora_bias=True. was passed",
    "ignore:Model has .tie_word_embeddings=True.",
)

FLOAT32 = Precision(torch.float32, torch.float32)
FLOAT64 = Precision(torch.float64, torch.float64)
BFLOAT16 = Precision(torch.float32, torch.bfloat16)

COMMON = {
    "vocab_size": 61,  # no multiple of anything
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "initializer_range": 0.2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "tie_word_embeddings": False,
}
WIDE = COMMON | {"head_dim": 12}  # 4 * 12 is not the hidden size
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "sliding_window": 6}


def common(kind, **changes):
    return kind, COMMON | changes


def wide(kind, **changes):
    return kind, WIDE | changes


FAMILIES = {
    "llama": wide("llama"),
    "llama biased, tied, ungrouped, llama3": wide(
        "llama",
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=LLAMA3,
        tie_word_embeddings=True,
        num_key_value_heads=4,
    ),
    "llama yarn": wide("llama", rope_parameters=YARN),
    "llama linear": wide("llama", rope_parameters=LINEAR),
    "mistral window, ratio 4": wide("mistral", sliding_window=6, num_key_value_heads=1),
    "mistral": wide("mistral", sliding_window=None),
    "qwen2": common("qwen2"),
    "qwen2 window, tied": common(
        "qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3 ratio 3": wide("qwen3", num_attention_heads=3, num_key_value_heads=1),
    "smollm3 ratio 3": wide(
        "smollm3", num_hidden_layers=4, no_rope_layer_interval=2, num_attention_heads=6, tie_word_embeddings=True
    ),
    "smollm3 window": wide("smollm3", **TURNS, no_rope_layers=[1, 0, 1, 1], use_sliding_window=True),
    "gemma": wide("gemma", num_key_value_heads=1, tie_word_embeddings=True),
    "gemma2": wide(  # caps so low that they bend most scores and logits
        "gemma2",
        sliding_window=6,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=2.0,
        tie_word_embeddings=True,
    ),
    "gemma3": wide(
        "gemma3_text",
        **TURNS,
        query_pre_attn_scalar=7,
        tie_word_embeddings=True,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": LINEAR},
    ),
    # Norms without a mean or with one, before or after a block, over a head or over all; rotations of all kinds;
    # joined matrices; MLPs beside the attention; multipliers.
    "cohere": common("cohere", logit_scale=3.0, tie_word_embeddings=True),
    "cohere2": common("cohere2", **TURNS, logit_scale=3.0),
    "cwm": wide("cwm", **TURNS),
    "ernie4_5": wide("ernie4_5", use_bias=True),
    "exaone4": wide("exaone4", **TURNS),
    "exaone4 without windows": wide("exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
    "glm": wide("glm", attention_bias=True),
    "glm4": wide("glm4"),
    "granite": wide(
        "granite", attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=3.0
    ),
    "helium": common("helium", head_dim=8),
    "hunyuan": wide("hunyuan_v1_dense"),
    "hyperclovax": wide("hyperclovax", use_post_norm=True, residual_multiplier=0.5),
    "ministral": wide("ministral", **TURNS),
    "olmo2": common("olmo2"),
    "olmo3": common(
        "olmo3",
        **TURNS,
        num_key_value_heads=1,
        rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}, "full_attention": YARN},
    ),
    "phi3": wide("phi3", sliding_window=6),
    "phi3 partly rotated": common("phi3", partial_rotary_factor=0.5),
    "seed_oss": wide("seed_oss"),
    # Sinks; experts, which the model's own modules compute.
    "gpt_oss": wide("gpt_oss", **TURNS, num_local_experts=4, num_experts_per_tok=2, rope_parameters=YARN),
    "qwen3_moe": wide("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "mixtral": wide("mixtral", num_local_experts=4, sliding_window=6),
    "vaultgemma": wide("vaultgemma", **TURNS, query_pre_attn_scalar=7),
    # Recurrent layers: short convolutions, the gated delta rule with a gate on attention, Mamba 2 in groups.
    "lfm2": common("lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, conv_bias=True),
    "qwen3_5": wide(
        "qwen3_5_text",
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
    ),
    "granite4": common(
        "granitemoehybrid",
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=2,
        mamba_expand=2,
        shared_intermediate_size=48,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
    ),
}
EXPERTS = {"gpt_oss", "mixtral", "qwen3_moe"}  # in bfloat16, rounding sends some tokens to other experts
TELLING = telling(
    FAMILIES,
    *("llama", "llama biased, tied, ungrouped, llama3", "mistral window, ratio 4", "qwen3 ratio 3"),
    *("smollm3 window", "gemma2", "gemma3", "cohere2", "glm4", "olmo3", "gpt_oss"),
    *("lfm2", "qwen3_5", "granite4"),
)
PROMPTS = [  # shorter and longer than a window, a pad of 8, a pad of 16
    (7,),
    (5, 9, 20),
    tuple(range(20, 27)),
    tuple(range(30, 46)),
    tuple(range(3, 20)),
    tuple(range(10, 50)),
]
OWNERS = [0, 0, 0, 1, 2, 3, 3, 3, 3, 3, 4, 5, 5]
STEPS = 19  # past a pad of 16


def disturbed(model, seed=3):
    """Norm weights start at 1 or 0 and biases at 0, where an error in them would not be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@functools.cache
def made(family):
    kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    return disturbed(family_model(kind, **settings))


def policy_of(family="llama", precision=FLOAT32):
    return Policy(copy.deepcopy(made(family)).to(precision.master), precision)


def engine_of(policy, **settings):
    return LocalEngine(policy, LetterTokenizer(), (1,), native_kernels=Way.native, **settings)


def lean(policy):
    """The engine's backend: that it is this one is part of what is tested."""
    backend = engine_of(policy).backend
    assert isinstance(backend.body, LeanBody), backend.description
    assert "off by" not in backend.description
    return backend


def bare(policy):
    """The same without the check that chooses it."""
    return CachedBackend(LeanBody(policy, native=Way.native))


def in_float32(family):
    """A policy that no test changes, and its engine."""
    return _in_float32(family, Way.native)


@functools.cache
def _in_float32(family, native):
    policy = policy_of(family)
    engine = engine_of(policy)
    assert isinstance(engine.backend.body, LeanBody), engine.backend.description
    assert "off by" not in engine.backend.description
    return policy, engine


@functools.cache
def truth(family):
    policy, _ = in_float32(family)
    return forward(policy, PROMPTS, OWNERS, continuations())


def continuations(owners=OWNERS, steps=STEPS):
    return torch.randint(61, (len(owners), steps), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def decoded(backend, all_prompts, owners, tokens_ST):
    """Logits after the prompt and after each of the given tokens, ``[S, 1 + T, V]``."""
    longest = max(map(len, all_prompts))
    backend.begin(Capacity(len(owners), len(all_prompts), longest, tokens_ST.shape[1] + 1))
    slots, prompt_slots = [*range(len(owners))][::-1], [*range(len(all_prompts))]
    logits = [backend.prefill(prompt_slots, all_prompts)[owners]]
    backend.add_rows(slots, owners)
    logits += [backend.step(slots, tokens_S) for tokens_S in tokens_ST.T]
    backend.end()
    return torch.stack(logits, 1)


@torch.no_grad()
def forward(policy, all_prompts, owners, tokens_ST):
    """The same by the model's own forward pass: padded on the right, where nothing sees it."""
    lengths = [len(all_prompts[owner]) for owner in owners]
    ids = torch.zeros(len(owners), max(lengths) + tokens_ST.shape[1], dtype=torch.long)
    for row, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
        ids[row, : length + tokens_ST.shape[1]] = torch.tensor([*all_prompts[owner], *tokens_ST[row].tolist()])
    with policy.compute():
        logits = policy.model(input_ids=ids, use_cache=False).logits
    return torch.stack([logits[row, n - 1 : n + tokens_ST.shape[1]] for row, n in enumerate(lengths)])


def gaps(logits, expected):
    """Differences in standard deviations of the expected logits of a place, where these are above 1."""
    return (logits - expected).abs() / expected.std(-1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize(("family", "native"), each_way(FAMILIES), indirect=["native"])
def test_prefill_and_decode_are_the_models_forward(family, native):
    _, engine = in_float32(family)
    logits = decoded(engine.backend, PROMPTS, OWNERS, continuations())
    assert truth(family).std() > 0.2  # not flat: what is compared says something
    # float32: sums in another order, 4 layers deep. Transformers' delta rule is itself 3e-5 from float64.
    assert gaps(logits, truth(family)).max() < (1e-4 if family == "qwen3_5" else 1e-5)


def test_adapters_of_experts_are_sampled_with():
    import peft

    names = ["gate_up_proj", "down_proj"]
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_parameters=[f"mlp.experts.{name}" for name in names])
    policy = Policy(peft.get_peft_model(copy.deepcopy(made("qwen3_moe")), config), FLOAT32)
    engine = engine_of(policy)  # chosen while the adapters have no effect
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    (group,) = engine.generate(prompts(PROMPTS[0]), 2, Sampling(8), RNGKey(1, 0))
    with torch.no_grad():
        ids = [drawn_ids(c) for c in group.completions]
        trained, *_ = policy.logps([group.prompt.token_ids] * 2, ids, 1.0)
    sampled = torch.tensor([lp for c in group.completions for lp in c.sampler_logps])
    torch.testing.assert_close(sampled, trained.double(), rtol=1e-5, atol=1e-5, check_dtype=False)  # float32


@pytest.mark.parametrize("family", TELLING)
def test_in_float64_to_its_rounding(family):
    policy = policy_of(family, FLOAT64)
    gap = gaps(
        decoded(bare(policy), PROMPTS, OWNERS, continuations()),
        forward(policy, PROMPTS, OWNERS, continuations()),
    )
    assert gap.max() < 1e-11  # float64 throughout, transformers' norms and softmaxes too; four layers deep


@pytest.mark.parametrize(
    ("family", "native"),
    each_way(telling(sorted(FAMILIES.keys() - EXPERTS), "llama", "qwen3 ratio 3", "gemma2", "gemma3")),
    indirect=["native"],
)
def test_bfloat16_is_as_near_the_truth_as_transformers(family, native):
    policy = policy_of(family, BFLOAT16)
    gap = gaps(decoded(bare(policy), PROMPTS, OWNERS, continuations()), truth(family))
    theirs = gaps(forward(policy, PROMPTS, OWNERS, continuations()).float(), truth(family))
    # 8 bits of mantissa, products of 32 to 48 terms, 2 to 4 layers.
    assert gap.mean() < 0.02
    # The delta rule amplifies roundings: transformers' own forward pass is 0.94 off.
    assert gap.max() < (1.0 if family == "qwen3_5" else 0.25)
    # Nothing is rounded that transformers does not round: not less exact by more than chance.
    assert gap.mean() < 1.1 * theirs.mean()
    assert gap.max() < 1.6 * theirs.max()


@pytest.mark.parametrize(("family", "native"), each_way(TELLING), indirect=["native"])
def test_refilled_rows_are_rows_alone_and_agree_with_the_trainer(family, native):
    policy, _ = in_float32(family)
    runs = []
    for size in (3, 1):
        engine = in_float32(family)[1]
        engine.max_batch_size = size
        runs.append(engine.generate(prompts(*PROMPTS[1:]), 2, Sampling(8, 1.1), RNGKey(1, 0)))
    pairs = [(g.prompt.token_ids, c) for g in runs[0] for c in g.completions]
    others = [c for g in runs[1] for c in g.completions]
    assert [drawn_ids(c) for _, c in pairs] == [drawn_ids(c) for c in others]
    with torch.no_grad():
        trained, *_ = policy.logps([p for p, _ in pairs], [drawn_ids(c) for _, c in pairs], 1.1)
    for completions in ([c for _, c in pairs], others):
        sampled = torch.tensor([lp for c in completions for lp in c.sampler_logps])
        torch.testing.assert_close(sampled, trained.double(), rtol=1e-5, atol=1e-5)  # float32; logits of up to 10


def test_rows_and_prompts_may_end_at_any_place(native):
    policy = policy_of("gemma3")
    backend = lean(policy)
    tokens_ST = continuations(range(7))
    owners = [0, 1, 2, 3, 4, 5, 3]
    expected = forward(policy, PROMPTS, owners, tokens_ST)
    backend.begin(Capacity(5, 4, 40, STEPS))
    at, slot_of = {}, {}  # how far each row is, and where

    def begin(rows, slots, prompts):
        backend.add_rows(slots, prompts)
        at.update(dict.fromkeys(rows, 0))
        slot_of.update(zip(rows, slots, strict=True))

    def end(*rows):
        backend.release([slot_of.pop(row) for row in rows])
        for row in rows:
            del at[row]

    def check(steps, *rows):
        for _ in range(steps):
            rows = rows or tuple(at)
            logits = backend.step([slot_of[row] for row in rows], torch.tensor([tokens_ST[r, at[r]] for r in rows]))
            for row in rows:
                at[row] += 1
            wanted = torch.stack([expected[row, at[row]] for row in rows])
            assert gaps(logits, wanted).max() < 1e-5  # float32

    backend.prefill([0, 1, 2, 3], PROMPTS[:4])
    begin([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3])
    check(3)
    check(1, 0, 2, 3)  # places 0, 2 and 3, while row 1 waits
    end(0, 2)
    check(2)  # places 1 and 3 of 4
    check(1, 3)  # while row 1 waits
    backend.remove_prompts([2, 0])
    backend.prefill([2, 0], [PROMPTS[4], PROMPTS[5]])
    begin([4, 5, 6], [4, 0, 2], [2, 0, 3])
    check(9)
    check(1, 4)  # place 4 of 5 alone: a copy
    end(3, 1)
    check(2)
    end(5, 6, 4)
    backend.remove_prompts([0, 1, 2, 3])
    backend.prefill([1], [PROMPTS[2]])
    begin([2], [3], [1])
    check(STEPS)
    backend.end()


@pytest.mark.parametrize("family", ["qwen3_5", "granite4"])
def test_recurrences_step_in_float32_whatever_the_products_are(family, monkeypatch):
    policy, dtypes = policy_of(family, BFLOAT16), set()
    backend, real = CachedBackend(LeanBody(policy, native=False)), torch.bmm

    def recorded(a, b, **named):
        out = real(a, b, **named)
        dtypes.add((a.dtype, out.dtype))
        return out

    monkeypatch.setattr(torch, "bmm", recorded)
    decoded(backend, PROMPTS[:2], [0, 1], continuations(range(2), 3))
    assert {out for given, out in dtypes if given == torch.float32} == {torch.float32}


# Adapters


def with_lora(model, adapters=("default",), **settings):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | settings
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings), adapter_name=adapters[0])
    for name in adapters[1:]:
        wrapped.add_adapter(name, LoraConfig(task_type="CAUSAL_LM", **(settings | {"r": 3, "lora_alpha": 5})))
    if len(adapters) > 1:
        wrapped.base_model.set_adapter(list(adapters))
    return wrapped


def lora_policy(family="llama", precision=FLOAT32, **settings):
    return Policy(with_lora(copy.deepcopy(made(family)).to(precision.master), **settings), precision)


def base_gap(policy):
    """How far the adapters move the logits: well over any tolerance, or nothing is shown."""
    moved = forward(policy, PROMPTS, OWNERS, continuations())
    with policy.model.disable_adapter():
        return gaps(moved, forward(policy, PROMPTS, OWNERS, continuations())).mean()


LORAS = {
    "two targets": {},
    "rslora": {"use_rslora": True},
    "one of qkv": {"target_modules": ["k_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "the head too": {"target_modules": ["q_proj", "lm_head", "down_proj"]},
    "dropout": {"lora_dropout": 0.5},
    "ranks and scales of their own": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"up_proj": 16},
    },
    "only one layer": {"layers_to_transform": [1]},
    "two active": {"adapters": ("default", "other")},
}


@pytest.mark.parametrize("kind", LORAS)
def test_lora_is_pefts_forward(kind):
    pytest.importorskip("peft")
    policy = lora_policy("qwen3 ratio 3", **LORAS[kind])
    assert base_gap(policy) > 0.01
    logits = decoded(lean(policy), PROMPTS, OWNERS, continuations())
    exact = forward(Policy(copy.deepcopy(policy.model).double(), FLOAT64), PROMPTS, OWNERS, continuations())
    own, pefts = (gaps(part, exact) for part in (logits, forward(policy, PROMPTS, OWNERS, continuations())))
    # Both round in float32, elsewhere: peft's largest error over these cases is 8e-6.
    assert own.max() < 2e-5
    assert own.mean() < 1.1 * pefts.mean()


@pytest.mark.parametrize(
    ("family", "native"),
    each_way(["llama biased, tied, ungrouped, llama3", "gemma3", "smollm3 window"]),
    indirect=["native"],
)
def test_lora_of_a_family(family, native):
    pytest.importorskip("peft")
    policy = lora_policy(family, target_modules="all-linear")
    logits = decoded(lean(policy), PROMPTS, OWNERS, continuations())
    exact = forward(Policy(copy.deepcopy(policy.model).double(), FLOAT64), PROMPTS, OWNERS, continuations())
    own, pefts = (gaps(part, exact) for part in (logits, forward(policy, PROMPTS, OWNERS, continuations())))
    # Both round in float32, elsewhere: peft's largest error over these cases is 8e-6.
    assert own.max() < 2e-5
    assert own.mean() < 1.1 * pefts.mean()


def triple_scale(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 3


def delete(model):
    model.set_adapter("other")
    model.delete_adapter("default")


ADAPTER_CHANGES = {
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "switched": lambda model: model.set_adapter("other"),
    "one more": lambda model: model.base_model.set_adapter(["default", "other"]),
    "scaled": triple_scale,
    "deleted": delete,
    "unloaded": lambda model: model.base_model.unload(),
    "trained": lambda model: [p.data.mul_(2) for n, p in model.named_parameters() if "lora_B" in n],
}


@pytest.mark.parametrize(
    ("change", "precision", "native"), each_way(cover(list(ADAPTER_CHANGES), [FLOAT32, BFLOAT16])), indirect=["native"]
)
def test_adapters_may_change_after_the_engine_was_made(change, precision, native):
    pytest.importorskip("peft")
    policy = lora_policy(precision=precision, adapters=("default", "other"))
    policy.model.base_model.set_adapter("default")
    backend = lean(policy)
    before = forward(policy, PROMPTS, OWNERS, continuations())
    ADAPTER_CHANGES[change](policy.model)
    policy.version += change == "trained"
    after = forward(policy, PROMPTS, OWNERS, continuations())
    bound = 1e-5 if precision is FLOAT32 else 0.03  # rounding of the dtype; in the mean for bfloat16
    assert gaps(before, after).mean() > 0.1
    gap = gaps(decoded(backend, PROMPTS, OWNERS, continuations()), after)
    assert (gap.max() if precision is FLOAT32 else gap.mean()) < bound


def test_an_adapter_that_is_switched_off_and_on_again():
    pytest.importorskip("peft")
    policy = lora_policy()
    backend = lean(policy)
    for _ in range(2):
        with policy.model.disable_adapter():
            gap = gaps(decoded(backend, PROMPTS, OWNERS, continuations()), truth("llama"))
            assert gap.max() < 1e-5  # float32: the base model itself
        gap = gaps(decoded(backend, PROMPTS, OWNERS, continuations()), truth("llama"))
        assert gap.mean() > 0.1


def test_an_adapter_merged_after_the_engine_was_made_is_an_error_that_says_so():
    pytest.importorskip("peft")
    policy = lora_policy()
    engine = engine_of(policy)
    policy.model.merge_adapter()
    with pytest.raises(ModelError, match=r"changed after the engine was made.* merged"):
        tokens_of(engine)
    policy.model.unmerge_adapter()
    assert tokens_of(engine)


@pytest.mark.parametrize(
    "kind", ["dora", "merged", "adapter bias", "saved module", "quantised", "subclass", "other norm"]
)
def test_what_is_not_plain_takes_another_path_and_says_so(kind):
    pytest.importorskip("peft")
    if kind in {"quantised", "subclass", "other norm"}:
        policy = policy_of()
        layer = policy.model.model.layers[1]
        if kind == "other norm":
            layer.input_layernorm = nn.LayerNorm(32)
        else:
            layer.mlp.up_proj = {"quantised": Quantised, "subclass": Doubling}[kind](layer.mlp.up_proj)
        word = {
            "quantised": "up_proj is a Quantised",
            "subclass": "up_proj is a Doubling",
            "other norm": "a norm is a LayerNorm",
        }[kind]
    else:
        settings = {"dora": {"use_dora": True}, "adapter bias": {"lora_bias": True}}.get(kind, {})
        if kind == "saved module":
            settings = {"modules_to_save": ["lm_head"]}
        policy = lora_policy(**settings)
        if kind == "merged":
            policy.model.merge_adapter()
        word = {"merged": "merged", "saved module": "lm_head is a"}.get(kind, "not plain LoRA")
    engine = engine_of(policy)
    assert not isinstance(getattr(engine.backend, "body", None), LeanBody)
    assert "lean" in engine.backend.description
    assert word in engine.backend.description
    groups = engine.generate(prompts(*PROMPTS), 2, Sampling(8), RNGKey(0, 0))
    pairs = [(g.prompt.token_ids, c) for g in groups for c in g.completions]
    with torch.no_grad():
        trained, *_ = policy.logps([p for p, _ in pairs], [drawn_ids(c) for _, c in pairs], 1.0)
    sampled = torch.tensor([lp for _, c in pairs for lp in c.sampler_logps])
    torch.testing.assert_close(sampled, trained.double(), rtol=1e-5, atol=1e-5)  # float32


class Quantised(nn.Module):
    """As quantised linears are: no ``weight`` that can be multiplied with."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.detach().abs().amax() / 127
        self.register_buffer("packed", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return nn.functional.linear(x, self.packed * self.scale)


class Doubling(nn.Linear):
    """A linear by its type's name, but not by what it computes."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, "dynamic"),
        ({"hidden_act": "gelu"}, "the activation is 'gelu'"),
    ],
)
def test_settings_that_are_not_known_take_another_path(settings, word):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **WIDE, **settings))
    backend = engine_of(Policy(model, FLOAT32)).backend
    assert not isinstance(getattr(backend, "body", None), LeanBody)
    assert word in backend.description


def test_a_model_that_computes_something_else_is_found_out(monkeypatch):
    policy = policy_of("mistral window, ratio 4")
    kind = type(policy.model.model.layers[0].self_attn)
    forward = kind.forward

    def more(self, *given, **named):
        output = forward(self, *given, **named)
        return (output[0] * 1.5, *output[1:])

    monkeypatch.setattr(kind, "forward", more)
    backend = engine_of(policy).backend
    assert not isinstance(getattr(backend, "body", None), LeanBody)
    assert "off by" in backend.description


# Weights


def tokens_of(engine):
    groups = engine.generate(prompts(*PROMPTS), 2, Sampling(12), RNGKey(0, 0))
    return [drawn_ids(c) for g in groups for c in g.completions]


def noise_like(weight):
    return 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))


def step_optimizer(policy):
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=0.1)
    for parameter in policy.model.parameters():
        parameter.grad = noise_like(parameter)
    optimizer.step()


def load(policy, **arguments):
    policy.model.load_state_dict(
        {name: weight + noise_like(weight) for name, weight in policy.model.state_dict().items()}, **arguments
    )


def replace(policy, name):
    module, _, leaf = name.rpartition(".")
    owner = policy.model.get_submodule(module)
    setattr(owner, leaf, nn.Parameter(getattr(owner, leaf).detach() + 3 * noise_like(getattr(owner, leaf))))


def write_data(policy):
    for parameter in policy.model.parameters():
        parameter.data.add_(noise_like(parameter))
    policy.version += 1


def swap_data(policy):
    for parameter in policy.model.parameters():
        parameter.data = parameter.data + noise_like(parameter)


def widen(policy):
    """As ``resize_token_embeddings``: other modules than there were."""
    head = nn.Linear(32, 61, bias=False)
    head.weight = nn.Parameter(policy.model.lm_head.weight.detach() + noise_like(policy.model.lm_head.weight))
    policy.model.lm_head = head


CHANGES = {
    "an optimizer step": step_optimizer,
    "load_state_dict": load,
    "load_state_dict, assigned": lambda policy: load(policy, assign=True),
    "a linear's parameter replaced": lambda policy: replace(policy, "model.layers.1.mlp.down_proj.weight"),
    "the head replaced": lambda policy: replace(policy, "lm_head.weight"),
    "a norm's parameter replaced": lambda policy: replace(policy, "model.norm.weight"),
    "the embedding replaced": lambda policy: replace(policy, "model.embed_tokens.weight"),
    "a module replaced": widen,
    ".data written and the version raised": write_data,
    ".data exchanged": swap_data,
}


@pytest.mark.parametrize(
    ("change", "precision", "family", "native"),
    each_way(cover(list(CHANGES), [FLOAT32, BFLOAT16], ["llama", "llama", "gemma3"])),
    indirect=["native"],
)
def test_changes_of_the_weights_are_seen_at_once(family, precision, change, native):
    if family == "gemma3" and change in {"the head replaced", "the embedding replaced", "a module replaced"}:
        pytest.skip("its head is its embedding")
    policy = policy_of(family, precision)
    backend = bare(policy)
    tokens_ST = continuations()[:, :3]
    before = decoded(backend, PROMPTS, OWNERS, tokens_ST)
    CHANGES[change](policy)
    after = forward(policy, PROMPTS, OWNERS, tokens_ST)
    assert gaps(before, after).mean() > 0.1
    gap = gaps(decoded(backend, PROMPTS, OWNERS, tokens_ST), after)
    if precision is FLOAT32:
        assert gap.max() < 1e-5
    else:
        assert gap.mean() < 0.04  # two roundings to bfloat16


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_weights_are_made_once_per_update(family):
    policy = policy_of(family, BFLOAT16)
    engine = engine_of(policy)
    made_once = engine.backend.body.weights.refreshed
    assert made_once == 1  # by the check that chose the path
    for update in range(3):
        for _ in range(3):
            tokens_of(engine)
        assert engine.backend.body.weights.refreshed == made_once + update
        step_optimizer(policy)
        policy.version += 1


def live_tensors():
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]


def new_tensors(before):
    """Of those that live now, with ordinary storage."""
    found = [tensor for tensor in live_tensors() if id(tensor) not in before]
    return [tensor for tensor in found if tensor.layout is torch.strided]


NOT_COPIED = cover(["llama biased, tied, ungrouped, llama3", "gemma2", "qwen3 ratio 3"], [FLOAT32, FLOAT64])


@pytest.mark.parametrize(("family", "precision"), telling(NOT_COPIED, *NOT_COPIED[:2]))
def test_no_copy_of_the_weights_is_held_where_none_is_needed(family, precision):
    policy = policy_of(family, precision)
    before = {id(tensor) for tensor in live_tensors()}
    engine = engine_of(policy)
    tokens_of(engine)
    own = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    smallest = min(p.numel() for p in policy.model.parameters() if p.ndim == 2)
    copies = [
        tuple(tensor.shape)
        for tensor in new_tensors(before)
        if tensor.untyped_storage().data_ptr() not in own
        and tensor.numel() >= smallest
        # The rotations of all positions, of [positions, head_dim].
        and tensor.shape[-1] != engine.backend.body.anatomy.head_dim
        and tensor.ndim > 1  # unlike the native product's room for its input
    ]
    assert copies == []
    layers = engine.backend.body.weights.anatomy.layers
    held = [weight for layer in layers for weight in layer.qkv._weights + layer.mlp.down._weights]
    assert {weight.data_ptr() for weight in held} <= {parameter.data_ptr() for parameter in policy.model.parameters()}


def test_bfloat16_holds_one_copy():
    policy = policy_of("llama", BFLOAT16)
    before = {id(tensor) for tensor in live_tensors()}
    engine = engine_of(policy)
    tokens_of(engine)
    halves = [tensor for tensor in new_tensors(before) if tensor.dtype == torch.bfloat16]
    shown = {tensor.untyped_storage().data_ptr(): tensor.numel() for tensor in halves}
    matrices = sum(p.numel() for n, p in policy.model.named_parameters() if p.ndim == 2 and "embed" not in n)
    # The native kernel fills the head's last panel: 61 outputs take the room of 64.
    assert sum(shown.values()) - matrices in (0, 3 * 32)
    assert not [
        tensor
        for tensor in new_tensors(before)
        if tensor.dtype == torch.float32 and tensor.ndim == 2 and tensor.numel() >= 32 * 32 and tensor.shape[1] != 12
    ]
