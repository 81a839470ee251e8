"""Which implementation runs which model, and why; log-probs and gradients are those of the model's own forward pass for
families, mixtures of experts, heads and adapters of all kinds."""

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from cohort.policy import Policy, recurrent
from cohort.policy.choose import find_head
from cohort.policy.compute import enable_checkpointing
from cohort.policy.custom_attention import CustomAttention
from cohort.policy.lean import LeanLayers
from cohort.policy.passes import PlainPasses, SharedPasses
from tests.conftest import telling, tiny_llama
from tests.families.configs import ATTENTION, OLDER, small_model
from tests.policy.plain import (
    COMPLETIONS,
    DOUBLE,
    LORA,
    MIXED,
    PROMPTS,
    SINGLE,
    TEMPERATURE,
    assert_near,
    assert_plain,
    gradients,
    plain_logps,
    policy_of,
    shares,
    weighted,
    with_peft,
)
from tests.rollout.test_lean import FAMILIES as LEAN
from tests.rollout.test_lean import TELLING as LEAN_TELLING

# peft asks transformers for something by its old name; pytest makes warnings errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning", "ignore:Model has .tie_word_embeddings=True."
)

PACKED = ["gpt2", "gpt_neox", "opt", "phi", "starcoder2"]
PACKED_SLOW = ["apertus", "arcee", "bitnet", "jetmoe", "olmo", "persimmon", "gpt_bigcode"]
PACKED_EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"]
PACKED_EXPERTS += ["gpt_oss", "deepseek_v3"]  # sinks; keys and values of different width
DELTA_RULE = ["qwen3_5_text", "qwen3_next", "olmo_hybrid"]
MAMBA = ["falcon_h1", "granitemoehybrid", "bamba", "nemotron_h", "zamba2", "mamba2"]
RECURRENT = [*DELTA_RULE, *MAMBA, "lfm2", "lfm2_moe"]
FIXED, WRONG = "custom attention: its attention cannot be replaced", "from the model's forward pass"
UNKNOWN_WINDOW = "which of its layers see only part of the tokens is not known"
PADDED = {
    **dict.fromkeys(["falcon", "gptj", "bloom"], FIXED),
    "nemotron": "it does not hand arguments on to its attention",
    "diffllama": WRONG,
    "llama4_text": UNKNOWN_WINDOW,
    "llama": "'dynamic', which changes with the sequence's length",
}
PADDED_SLOW = dict.fromkeys(["codegen", "gpt_neo", "mpt", "biogpt"], FIXED) | {
    "stablelm": "",
    "recurrent_gemma": WRONG,
    "modernbert-decoder": "all logits at once",
}
PADDED_SINGLE = {"phimoe": UNKNOWN_WINDOW, "mamba": ""}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", LEAN_TELLING)
def test_lean_families(name):
    policy = policy_of(*LEAN[name])
    assert shares(policy), policy.passes.description
    assert isinstance(policy.passes.body, LeanLayers)
    assert_plain(policy)


TELLING = ("gpt2", "opt", "starcoder2")


@pytest.mark.parametrize("name", [*telling(PACKED, *TELLING), *slow(PACKED_SLOW)])
def test_families_with_custom_attention(name):
    policy = policy_of(name)
    assert shares(policy), policy.passes.description
    assert isinstance(policy.passes.body, CustomAttention)
    assert_plain(policy)


@pytest.mark.parametrize("name", telling(RECURRENT, "qwen3_5_text", "falcon_h1", "lfm2"))
def test_recurrent_families(name, monkeypatch):
    """With rows of several chunks; and with layers that are recomputed, whose forward pass nests contexts."""
    monkeypatch.setattr(recurrent, "LONGEST_CHUNK", 4)
    policy = Policy(small_model(name).double(), DOUBLE)
    if OLDER and not shares(policy) and "does not hand arguments on" in policy.passes.description:
        pytest.skip("the installed transformers hands no arguments on to these layers")
    assert shares(policy), policy.passes.description
    assert_plain(policy)
    expected = gradients(policy, weighted(policy))
    enable_checkpointing(policy.model)
    recomputed = Policy(policy.model, DOUBLE)
    with recomputed.training():
        assert shares(recomputed), recomputed.passes.description
        assert_near(gradients(recomputed, weighted(recomputed)), expected, 1e-12)  # the same operations


def test_a_recurrence_that_is_not_replaced_is_named():
    """Its convolution is."""
    policy = Policy(small_model("kimi_linear"), SINGLE)
    assert "custom attention: its recurrent layers have a recurrence of their own" in policy.passes.description


@pytest.mark.parametrize("name", telling(PACKED_EXPERTS, "qwen3_moe", "gpt_oss", "deepseek_v3"))
def test_experts_with_custom_attention(name):
    """In float32: transformers' product of the experts takes no float64. Each token has its own experts, so packing
    changes only the order of sums."""
    policy = policy_of(name, precision=SINGLE)
    assert shares(policy), policy.passes.description
    assert_plain(policy, 1e-4, 1e-4)


@pytest.mark.parametrize("name", [*PADDED, *slow(PADDED_SLOW)])
def test_padded_families(name):
    policy = policy_of(name, ATTENTION | DYNAMIC if name == "llama" else None)
    assert policy.passes.description.startswith("prompts computed with every completion, padded")
    assert (PADDED | PADDED_SLOW)[name] in policy.passes.description
    assert_plain(policy)


@pytest.mark.parametrize("name", PADDED_SINGLE)
def test_padded_families_in_float32(name):
    """Experts and recurrent kernels compute in float32."""
    policy = policy_of(name, precision=SINGLE)
    assert isinstance(policy.passes, PlainPasses)
    assert PADDED_SINGLE[name] in policy.passes.description
    assert_plain(policy, 1e-4, 1e-4)


SOME = ["llama", "qwen2 window, tied", "qwen3 ratio 3", "smollm3 window", "gemma2", "gemma3", "cohere2", "starcoder2"]


def some(name, precision):
    return policy_of(*LEAN.get(name, (name, None)), precision)


@pytest.mark.parametrize("name", SOME)
def test_native_kernels_in_float32(name):
    # float32 has 6e-8; a gradient is a sum of some hundred terms that may cancel.
    assert_plain(some(name, SINGLE), 1e-4, 2e-5)


@pytest.mark.parametrize("name", SOME)
def test_the_error_of_bfloat16_is_that_of_the_plain_pass(name):
    policy, truth = some(name, MIXED), some(name, SINGLE)
    with torch.no_grad():
        exact = plain_logps(truth)
        ours = (policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N - exact).square().mean().sqrt()
        plain = (plain_logps(policy) - exact).square().mean().sqrt()
    assert ours < 2 * plain + 0.01  # both round to 8 bits at every product; neither is nearer in every case


# Heads


@pytest.mark.parametrize("head", ["bias", "beyond the embedding"])
def test_heads(head):
    model = tiny_llama()
    model.lm_head = nn.Linear(24, 37, bias=True) if head == "bias" else nn.Linear(24, 40, bias=False)
    policy = Policy(model.double(), DOUBLE)
    assert policy.vocab_size == model.lm_head.out_features
    assert shares(policy), policy.passes.description
    assert_plain(policy)


def test_a_head_that_is_not_a_linear_layer_needs_all_logits():
    class Tanh(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden).tanh()

    policy = Policy(tiny_llama().double(), DOUBLE)
    policy.model.lm_head.__class__ = Tanh
    assert find_head(policy) is None
    assert policy.passes.description == (
        "prompts computed with every completion, padded, all logits at once "
        "(its head is not a plain linear layer after a decoder)"
    )
    assert_plain(policy)


@pytest.mark.parametrize("linear", [True, False])
def test_padded_passes_of_a_model_that_could_share(linear):
    policy = policy_of(*LEAN["gemma2"])
    head = find_head(policy)
    policy.__dict__["passes"] = PlainPasses(policy, head if linear else type(head)())
    assert_plain(policy)


# Adapters

ADAPTERS = {
    "lora": LORA,
    "all linear, rslora": LORA | {"target_modules": "all-linear", "use_rslora": True},
    "dora": LORA | {"use_dora": True},
    "of the embedding": LORA | {"target_modules": ["q_proj", "embed_tokens"]},
    "a whole embedding": LORA | {"modules_to_save": ["embed_tokens"]},
    "dropout": LORA | {"lora_dropout": 0.5},
    "ia3": {"kind": "IA3Config", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name):
    policy = Policy(with_peft(ADAPTERS[name]).double(), DOUBLE)
    assert shares(policy), policy.passes.description
    before = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N
    assert_plain(policy)
    with policy.model.disable_adapter():
        off, plain = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N, plain_logps(policy)
        assert (before - plain).abs().max() > 0.01  # the adapter does something
        torch.testing.assert_close(off, plain, rtol=0, atol=1e-11)
    assert torch.equal(policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N, before)


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_adapters_of_the_head_need_all_logits(settings):
    policy = Policy(with_peft(LORA | settings).double(), DOUBLE)
    assert "all logits at once (its head is not a plain linear layer" in policy.passes.description
    assert_plain(policy)


def test_passes_follow_the_active_adapters():
    wrapped = with_peft(LORA, adapters=("default", "other"))
    wrapped.base_model.set_adapter(["default", "other"])
    policy = Policy(wrapped.double(), DOUBLE)
    assert policy.passes.shared
    assert_plain(policy)
    both = weighted(policy)
    wrapped.set_adapter("other")
    assert_plain(policy)
    assert abs(weighted(policy) - both) > 0.01


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_not_shared(kind):
    """Prompt learning puts tokens before every row: only the model's own forward pass knows of them."""
    policy = Policy(with_peft({"kind": kind, "num_virtual_tokens": 3}).double(), DOUBLE)
    assert isinstance(policy.passes, PlainPasses)
    assert "off by" in policy.passes.description or "Error" in policy.passes.description
    assert_plain(policy)


# Choosing


class OwnAttention(modeling_llama.LlamaAttention):
    """Computes attention by itself although its class supports the interface."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True
        ).transpose(1, 2)
        return self.o_proj(out.reshape(*shape[:-2], -1)), None


class Forgetful(modeling_llama.LlamaAttention):
    """Does not pass arguments on."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values)


class Failing(modeling_llama.LlamaAttention):
    """Refuses an argument of packed passes."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        if "cohort_packed" in kwargs:
            raise ValueError("unexpected argument cohort_packed")
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnAttention, "custom attention: off by"),
        (Forgetful, "custom attention: it does not hand arguments on to its attention"),
        (Failing, "custom attention: ValueError: unexpected argument cohort_packed"),
    ],
)
def test_models_that_do_not_use_the_interface(kind, reason):
    model = tiny_llama().double()
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    policy, before = Policy(model, DOUBLE), model.config._attn_implementation
    assert isinstance(policy.passes, PlainPasses)
    assert reason in policy.passes.description
    assert policy.passes.head.linear is model.lm_head  # the head is still computed in chunks
    assert model.config._attn_implementation == before
    assert_plain(policy)


def test_a_layer_of_another_class_does_not_run_lean():
    """What it computes is not known, even if it looks like the others."""

    class Other(type(tiny_llama().model.layers[0].mlp)):
        pass

    model = tiny_llama()
    model.model.layers[1].mlp.__class__ = Other
    policy = Policy(model, SINGLE)
    assert shares(policy)
    assert isinstance(policy.passes.body, CustomAttention)


def test_passes_that_compute_something_else_are_not_used(monkeypatch):
    real = SharedPasses.hidden

    def rolled(self, *arguments):
        found = real(self, *arguments)
        return found._replace(states=found.states.roll(1, 0))

    monkeypatch.setattr(SharedPasses, "hidden", rolled)
    policy = Policy(tiny_llama(), SINGLE)
    assert isinstance(policy.passes, PlainPasses)
    assert policy.passes.description.count("off by") == 2
    assert_near(gradients(policy, weighted(policy)), gradients(policy, weighted(policy, plain_logps)), 1e-4)


def test_choosing_leaves_no_trace():
    """Neither in random numbers nor in the mode nor in gradients."""
    policy = Policy(tiny_llama(), SINGLE)
    policy.model.train()
    before = torch.get_rng_state()
    assert policy.passes.shared
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.model.training
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_dropout_needs_padded_passes():
    """Every completion draws its own dropout."""
    assert isinstance(Policy(tiny_llama(attention_dropout=0.5), SINGLE, dropout=True).passes, PlainPasses)
    policy = policy_of("arcee", precision=SINGLE)
    assert policy.passes.shared
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy.model.train()
    with pytest.raises(Exception, match="attention has dropout"):
        policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert policy.model.config._attn_implementation != "cohort_packed"
