"""Which models share their prompts and which do not, and why; and that either way is the plain forward pass: more
families, mixtures of experts, adapters of all kinds, checkpointing, shapes at the edge, models that do something else."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from cohort.policy import Policy, Precision, enable_checkpointing
from cohort.policy.choose import find_head
from cohort.policy.passes import PlainPasses
from tests.conftest import tiny_llama
from tests.policy.plain import assert_near, gradients, plain_logps, rows_of, shares
from tests.rollout.test_families import ATTENTION, COMMON
from tests.rollout.test_lean import disturbed

# peft asks transformers for something by its old name; pytest makes warnings errors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:Model has .tie_word_embeddings=True.",
)

SINGLE = Precision(torch.float32, torch.float32)
DOUBLE = Precision(torch.float64, torch.float64)
MIXED = Precision(torch.float32, torch.bfloat16)
LONG = tuple(range(20, 36))  # longer than a window of 6
PROMPTS = [(5, 9, 20), (5, 9, 20), (7,), LONG, (7,), LONG, (5, 9, 20)]
COMPLETIONS = [(4, 6, 1), (8, 8, 8, 8, 8, 1), (1,), (12, 13), tuple(range(3, 15)), (9,), (4,)]
WEIGHTS = torch.linspace(-1, 2, sum(map(len, COMPLETIONS)), dtype=torch.float64)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = EXPERTS | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GPT = COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
WINDOW = ATTENTION | {"sliding_window": 6}

SHARING = {
    "cohere2": ("cohere2", WINDOW),
    "exaone4": ("exaone4", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "glm4": ("glm4", ATTENTION),
    "olmo3": ("olmo3", WINDOW),
    "phi": ("phi", ATTENTION),
    "phi3 window": ("phi3", WINDOW),
}
SHARING_TOO = {
    name: (name, ATTENTION)
    for name in ("apertus", "arcee", "bitnet", "ernie4_5", "glm", "olmo", "persimmon", "seed_oss", "vaultgemma")
} | {"gpt_bigcode": ("gpt_bigcode", GPT), "jetmoe": ("jetmoe", ATTENTION)}
SHARING_EXPERTS = {
    "mixtral": ("mixtral", ATTENTION | {"num_local_experts": 4}),
    "mixtral window": ("mixtral", WINDOW | {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", ATTENTION | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("qwen3_moe", ATTENTION | EXPERTS | {"head_dim": 8}),
    "olmoe": ("olmoe", ATTENTION | EXPERTS),
    "granitemoe": ("granitemoe", ATTENTION | {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
NO_INTERFACE = "its attention cannot be replaced"
PADDED = {
    "falcon": ("falcon", COMMON | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}, NO_INTERFACE),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}, NO_INTERFACE),
    "nemotron": ("nemotron", ATTENTION, "it does not hand arguments on to its attention"),
    "diffllama": ("diffllama", ATTENTION, "from the model's forward pass"),
    "llama4": (
        "llama4_text",
        ATTENTION | {"num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8, "attention_chunk_size": 6},
        "which of its layers see only part of the tokens is not known",
    ),
    "lfm2": (
        "lfm2",
        ATTENTION | {"layer_types": ["conv", "full_attention"], "block_dim": 32, "conv_L_cache": 3},
        "from the model's forward pass",
    ),
    "phi3 longrope": (
        "phi3",
        ATTENTION
        | {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 64,
            },
        },
        "'longrope', which changes with the sequence's length",
    ),
}
PADDED_TOO = {
    "codegen": ("codegen", GPT | {"rotary_dim": 4}, NO_INTERFACE),
    "gpt_neo": (
        "gpt_neo",
        COMMON
        | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128, "window_size": 6}
        | {"attention_types": [[["global", "local"], 1]]},
        NO_INTERFACE,
    ),
    "mpt": ("mpt", COMMON | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, NO_INTERFACE),
    "biogpt": ("biogpt", ATTENTION, NO_INTERFACE),
    "recurrent_gemma": (
        "recurrent_gemma",
        ATTENTION | {"attention_window_size": 6, "head_dim": 8, "lru_width": 32, "num_hidden_layers": 3},
        "from the model's forward pass",
    ),
    "modernbert-decoder": ("modernbert-decoder", ATTENTION, "all logits at once"),
}
PADDED_EXPERTS = {
    "gpt_oss": (
        "gpt_oss",
        WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        "attention has sinks or biases",
    ),
    "phimoe": (
        "phimoe",
        WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "which of its layers see only part of the tokens is not known",
    ),
}


def slow(cases):
    return [pytest.param(name, marks=pytest.mark.slow) for name in cases]


def model_of(family, settings, **changes):
    torch.manual_seed(0)
    return disturbed(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings | changes)))


def policy_of(family, settings, precision=DOUBLE, **changes):
    return Policy(model_of(family, settings, **changes).to(precision.master), precision)


def assert_plain(policy, tolerance=1e-10, logp_tolerance=1e-12, prompts=PROMPTS, completions=COMPLETIONS):
    """Log-probs and gradients are those of the model's own forward pass, row by row. float64: sums in another order,
    relative to the largest number of each parameter's gradient; log-probs of up to about 10."""
    weights = torch.linspace(-1, 2, sum(map(len, completions)), dtype=policy.precision.master)
    ours, plain = policy.logps(prompts, completions, 0.8).logps_N, plain_logps(policy, prompts, completions, 0.8)
    torch.testing.assert_close(ours, plain, rtol=logp_tolerance, atol=10 * logp_tolerance)
    got, expected = (gradients(policy, (values * weights).sum()) for values in (ours, plain))
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-3
    assert_near(got, expected, tolerance)


@pytest.mark.parametrize("name", [*SHARING, *slow(SHARING_TOO)])
def test_families_that_share(name):
    policy = policy_of(*(SHARING | SHARING_TOO)[name])
    assert shares(policy), policy.passes.description
    assert_plain(policy)


@pytest.mark.parametrize("name", [*PADDED, *slow(PADDED_TOO)])
def test_families_that_do_not(name):
    family, settings, reason = (PADDED | PADDED_TOO)[name]
    policy = policy_of(family, settings)
    assert policy.passes.description.startswith("prompts computed with every completion, padded")
    assert reason in policy.passes.description
    assert_plain(policy)


@pytest.mark.parametrize("name", SHARING_EXPERTS)
def test_experts_that_share(name):
    """In float32: transformers' product of the experts takes no float64. A token's experts are its own affair, so
    packing changes only the order of sums."""
    policy = policy_of(*SHARING_EXPERTS[name], SINGLE)
    assert shares(policy), policy.passes.description
    assert_plain(policy, 1e-4, 1e-5)


@pytest.mark.parametrize("name", PADDED_EXPERTS)
def test_experts_that_do_not(name):
    family, settings, reason = PADDED_EXPERTS[name]
    policy = policy_of(family, settings, SINGLE)
    assert isinstance(policy.passes, PlainPasses)
    assert reason in policy.passes.description
    assert_plain(policy, 1e-4, 1e-5)


# Heads ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_tied_and_untied(tied):
    policy = Policy(disturbed(tiny_llama(tie_word_embeddings=tied)).double(), DOUBLE)
    assert policy.passes.shared
    assert_plain(policy)
    assert ("lm_head.weight" in dict(policy.model.named_parameters())) != tied


def test_a_head_with_a_bias():
    model = tiny_llama()
    model.lm_head = nn.Linear(24, 37, bias=True)
    policy = Policy(disturbed(model).double(), DOUBLE)
    assert policy.passes.shared
    assert_plain(policy)


def test_padding_of_the_head_beyond_the_embedding():
    """More logits than tokens, as where a vocabulary is rounded up."""
    model = tiny_llama()
    model.lm_head = nn.Linear(24, 40, bias=False)
    policy = Policy(model.double(), DOUBLE)
    assert policy.vocab_size == 40
    assert shares(policy), policy.passes.description
    assert_plain(policy)


# Adapters -----------------------------------------------------------------------------------------------------------------


def with_peft(config, model=None, adapters=("default",)):
    """All its trainable numbers disturbed, so that it does something."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    kind = config.pop("kind", "LoraConfig")
    settings = {"task_type": "CAUSAL_LM"} | config
    wrapped = peft.get_peft_model(model or tiny_llama(), getattr(peft, kind)(**settings), adapter_name=adapters[0])
    for name in adapters[1:]:
        wrapped.add_adapter(name, getattr(peft, kind)(**settings))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad or ("lora_" in name and "magnitude" not in name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return wrapped


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
SHARED_ADAPTERS = {
    "lora": LORA,
    "all linear": LORA | {"target_modules": "all-linear"},
    "rslora": LORA | {"use_rslora": True},
    "dora": LORA | {"use_dora": True},
    "keys alone": LORA | {"target_modules": ["k_proj"]},
    "of the embedding": LORA | {"target_modules": ["q_proj", "embed_tokens"]},
    "a whole embedding": LORA | {"modules_to_save": ["embed_tokens"]},
    "dropout": LORA | {"lora_dropout": 0.5},
    "ia3": {"kind": "IA3Config", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
}
HEAD_ADAPTERS = {
    "of the head": LORA | {"target_modules": ["q_proj", "lm_head"]},
    "a whole head": LORA | {"modules_to_save": ["lm_head"]},
}


def double(wrapped):
    return Policy(wrapped.double(), DOUBLE)


@pytest.mark.parametrize("name", SHARED_ADAPTERS)
def test_adapters(name):
    policy = double(with_peft(dict(SHARED_ADAPTERS[name])))
    assert shares(policy), policy.passes.description
    before = policy.logps(PROMPTS, COMPLETIONS, 0.8).logps_N
    assert_plain(policy)
    with policy.model.disable_adapter():
        assert_near_values = plain_logps(policy, PROMPTS, COMPLETIONS, 0.8)
        assert (before - assert_near_values).abs().max() > 0.01  # the adapter does something
        off = policy.logps(PROMPTS, COMPLETIONS, 0.8).logps_N
        torch.testing.assert_close(off, assert_near_values, rtol=0, atol=1e-11)
    assert torch.equal(policy.logps(PROMPTS, COMPLETIONS, 0.8).logps_N, before)


@pytest.mark.parametrize("name", HEAD_ADAPTERS)
def test_adapters_of_the_head(name):
    """Its product is not one matrix's, so all logits are the model's own; and it says so."""
    policy = double(with_peft(dict(HEAD_ADAPTERS[name])))
    assert policy.passes.description == (
        "prompts computed with every completion, padded, all logits at once "
        "(its head is not a plain linear layer after a decoder)"
    )
    assert_plain(policy)


def test_two_adapters_at_once_and_one_after_the_other():
    wrapped = with_peft(dict(LORA), adapters=("default", "other"))
    wrapped.base_model.set_adapter(["default", "other"])
    policy = double(wrapped)
    assert policy.passes.shared
    assert_plain(policy)
    both = policy.logps(PROMPTS, COMPLETIONS, 0.8).logps_N
    wrapped.set_adapter("other")  # the passes are the model's as it is now, not as it was when they were chosen
    assert_plain(policy)
    assert (policy.logps(PROMPTS, COMPLETIONS, 0.8).logps_N - both).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_not_shared(kind):
    """Prompt learning puts tokens before every row: only the model's own forward pass knows of them."""
    policy = double(with_peft({"kind": kind, "num_virtual_tokens": 3}))
    assert isinstance(policy.passes, PlainPasses)
    assert "off by" in policy.passes.description or "Error" in policy.passes.description
    prompts, completions = PROMPTS[:4], COMPLETIONS[:4]
    weights = WEIGHTS[: sum(map(len, completions))]
    expected = []
    for prompt, completion in zip(prompts, completions, strict=True):
        with policy.compute():
            logits = policy.model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits[0]
        log_probs = torch.log_softmax(logits[-len(completion) - 1 : -1] / 0.8, -1)
        expected.append(log_probs.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1))
    ours, expected = policy.logps(prompts, completions, 0.8).logps_N, torch.cat(expected)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)
    assert_near(gradients(policy, (ours * weights).sum()), gradients(policy, (expected * weights).sum()), 1e-10)


# Checkpointing --------------------------------------------------------------------------------------------------------------


def trained_gradients(policy, cuts):
    """As the update does it: prompts read once, completions cut by cut, prompts backward once."""
    policy.model.zero_grad()
    weights = WEIGHTS.to(policy.precision.master).split([len(ids) for ids in COMPLETIONS])
    passes, found = policy.passes, []
    with policy.training(), policy.compute():
        prefixes = passes.read(list(dict.fromkeys(PROMPTS)))
        for cut in cuts:
            rows = rows_of([PROMPTS[s] for s in cut], [COMPLETIONS[s] for s in cut], prefixes.prompt_ids)
            states = policy.states(prefixes, rows, 0.8)
            logps_N = states.logps().logps_N
            (logps_N * torch.cat([weights[s] for s in cut])).sum().backward()
            found.append(logps_N.detach())
        prefixes.backward()
    grads = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return torch.cat(found), grads


ALL, SINGLES, SOME = [range(7)], [[s] for s in range(7)], [[3, 0], [1, 6, 2], [5], [4]]
MODELS = {
    "llama": lambda: tiny_llama(),
    "gemma2": lambda: model_of("gemma2", WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "gpt2": lambda: model_of("gpt2", GPT),
    "lora": lambda: with_peft(dict(LORA)),
    "falcon": lambda: model_of("falcon", PADDED["falcon"][1]),
}


@pytest.mark.parametrize("precision", [DOUBLE, SINGLE, MIXED], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_changes_no_bit(name, precision):
    policy = Policy(MODELS[name]().to(precision.master), precision)
    assert policy.passes.shared == (name != "falcon")
    logps_N, plain = trained_gradients(policy, SOME)
    enable_checkpointing(policy.model)
    again_N, checkpointed = trained_gradients(policy, SOME)
    assert torch.equal(logps_N, again_N)
    assert plain.keys() == checkpointed.keys()
    for key, grad in plain.items():
        assert torch.equal(grad, checkpointed[key]), key


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_without_a_block_around_the_backward_pass(name):
    policy = Policy(MODELS[name]().double(), DOUBLE)
    expected = gradients(policy, (policy.logps(PROMPTS, COMPLETIONS, 0.8).logps_N * WEIGHTS).sum())
    enable_checkpointing(policy.model)
    with policy.training():
        value = (policy.logps(PROMPTS, COMPLETIONS, 0.8).logps_N * WEIGHTS).sum()
    policy.model.zero_grad()
    policy.model.train()
    value.backward()
    policy.model.eval()
    got = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    for key, grad in expected.items():
        assert torch.equal(grad, got.get(key, torch.zeros_like(grad))), key


@pytest.mark.parametrize("checkpointing", [False, True])
def test_attached_prompts_may_be_gone_through_again_and_again(checkpointing):
    """As the norms of the terms take them: one graph, a backward pass through all of it after each microbatch."""
    policy = Policy(MODELS["llama"]().double(), DOUBLE)
    _, expected = trained_gradients(policy, SINGLES)
    policy.model.zero_grad()
    if checkpointing:
        enable_checkpointing(policy.model)
    weights = WEIGHTS.split([len(ids) for ids in COMPLETIONS])
    with policy.training(), policy.compute():
        prefixes = policy.passes.read(list(dict.fromkeys(PROMPTS)), attached=True)
        for prompt, completion, weights_T in zip(PROMPTS, COMPLETIONS, weights, strict=True):
            logps_N = policy.states(prefixes, rows_of([prompt], [completion], prefixes.prompt_ids), 0.8).logps().logps_N
            (logps_N * weights_T).sum().backward(retain_graph=True)
        prefixes.backward()  # nothing is left to send
    assert_near({name: p.grad for name, p in policy.model.named_parameters()}, expected, 1e-12)


@pytest.mark.parametrize("name", ["llama", "lora"])
def test_checkpointing_of_the_older_kind_that_a_model_came_with(name):
    """Reentrant checkpointing runs layers without a graph, where keys and values would lose their gradient."""
    policy = Policy(MODELS[name]().double(), DOUBLE)
    _, expected = trained_gradients(policy, SOME)
    policy.model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: out.requires_grad_())
    policy.model.activation_checkpointing_enable({"use_reentrant": True})
    _, got = trained_gradients(policy, SOME)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_checkpointing_functions_are_the_models_own_again():
    policy = Policy(tiny_llama(), SINGLE)
    enable_checkpointing(policy.model)
    layers = policy.model.model.layers
    own = [layer._gradient_checkpointing_func for layer in layers]
    trained_gradients(policy, ALL)
    assert all(layer._gradient_checkpointing_func is before for layer, before in zip(layers, own, strict=True))


# Shapes and cuts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "falcon"])
@pytest.mark.parametrize("cuts", [ALL, SINGLES, SOME], ids=["all", "singles", "some"])
def test_leaves_and_cuts_are_one_graph(name, cuts):
    """``read`` with leaves and ``backward`` after many microbatches, beside the whole in one graph."""
    policy = Policy(MODELS[name]().double(), DOUBLE)
    value = policy.logps(PROMPTS, COMPLETIONS, 0.8).logps_N
    expected = gradients(policy, (value * WEIGHTS).sum())
    logps_N, got = trained_gradients(policy, cuts)
    order = [s for cut in cuts for s in cut]
    pieces = value.detach().split([len(ids) for ids in COMPLETIONS])
    torch.testing.assert_close(logps_N, torch.cat([pieces[s] for s in order]), rtol=0, atol=1e-12)
    assert_near({key: got.get(key, torch.zeros_like(grad)) for key, grad in expected.items()}, expected, 1e-12)


@pytest.mark.parametrize(
    ("prompts", "completions"),
    [
        ([(7,)], [(3,)]),
        ([(7,)], [(3, 4, 5, 6)]),
        ([(7,), (7,), (8,)], [(3,), (4, 5), (6,)]),
        ([LONG], [(3,)]),
        ([LONG, LONG], [(3,), (4,)]),
        ([LONG, LONG], [(3, 4), (3, 4)]),
        ([(7,), LONG, (7,)], [LONG, (3,), LONG]),
        ([(5, 6), (5, 7), (5, 6)], [(3, 3), (3, 3), (3, 3)]),
    ],
    ids=lambda value: str([len(row) for row in value]),
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_shapes_at_the_edge(name, prompts, completions):
    policy = Policy(MODELS[name]().double(), DOUBLE)
    assert policy.passes.shared
    assert_plain(policy, prompts=prompts, completions=completions)


def test_gradients_reach_the_prompts_and_nothing_is_owed_twice():
    policy = Policy(tiny_llama(tie_word_embeddings=False).double(), DOUBLE)
    trained_gradients(policy, SINGLES)
    rows = policy.model.get_input_embeddings().weight.grad.abs().sum(-1)
    for token in (20, 21, 34):  # in the middle of a prompt alone
        assert rows[token] > 0


def test_reading_without_gradients_leaves_nothing_to_send_back():
    policy = Policy(tiny_llama(), SINGLE)
    with torch.no_grad():
        prefixes = policy.passes.read([LONG])
    assert all(not part.requires_grad for parts in prefixes.keys_values.values() for part in parts)
    prefixes.backward()
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    prefixes = policy.passes.read([LONG])  # with them, but no completion followed
    prefixes.backward()
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_leaves_add_up_in_float32(name):
    """In bfloat16, gradients of a prompt's keys from many microbatches would be rounded at each addition."""
    policy = Policy(MODELS[name](), MIXED)
    with policy.compute():
        prefixes = policy.passes.read([LONG])
    assert {part.dtype for parts in prefixes.keys_values.values() for part in parts} == {torch.float32}
    _, whole = trained_gradients(policy, ALL)
    _, cut = trained_gradients(policy, SINGLES)
    _, exact = trained_gradients(Policy(MODELS[name](), SINGLE), ALL)

    def gap(one, other):
        return sum((one[key] - other[key]).square().sum() for key in other).sqrt()

    size = gap(exact, {key: torch.zeros_like(grad) for key, grad in exact.items()})
    assert gap(whole, exact) < 0.1 * size  # 8 bits, two layers
    assert gap(cut, exact) < 1.2 * gap(whole, exact)  # cutting adds next to nothing to it


# Models that do something else ------------------------------------------------------------------------------------------------


class OwnAttention(modeling_llama.LlamaAttention):
    """Claims the interface by its class and computes by itself."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scaling, enable_gqa=True
        ).transpose(1, 2)
        return self.o_proj(out.reshape(*shape[:-2], -1)), None


class Forgetful(modeling_llama.LlamaAttention):
    """Uses the interface and hands nothing on."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values)


class Failing(modeling_llama.LlamaAttention):
    """Cannot do what no padded batch needs."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        if "cohort_packed" in kwargs:
            raise ValueError("unexpected argument cohort_packed")
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


def with_attention(kind):
    model = tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return Policy(model.double().eval(), DOUBLE)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnAttention, "off by"),
        (Forgetful, "custom attention: it does not hand arguments on to its attention"),
        (Failing, "custom attention: ValueError: unexpected argument cohort_packed"),
    ],
)
def test_a_model_that_does_not_use_the_interface(kind, reason):
    policy = with_attention(kind)
    before = policy.model.config._attn_implementation
    assert isinstance(policy.passes, PlainPasses)
    assert reason in policy.passes.description
    assert policy.passes.head.linear is policy.model.lm_head  # the head is still computed in chunks
    assert policy.model.config._attn_implementation == before
    assert_plain(policy)


def test_sinks_and_dropout_of_attention_are_not_shared():
    policy = policy_of("olmo2", ATTENTION, SINGLE)
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with policy.training(), pytest.raises(Exception, match="attention has dropout"):
        policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert policy.model.config._attn_implementation != "cohort_packed"


def test_choosing_leaves_no_trace():
    """Neither in the random numbers, nor in the mode, nor in gradients."""
    policy = Policy(tiny_llama(), SINGLE)
    policy.model.train()
    before = torch.get_rng_state()
    assert policy.passes.shared
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.model.training
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_a_copy_has_passes_of_its_own():
    policy = Policy(tiny_llama(), SINGLE)
    assert policy.passes.shared
    frozen = policy.copy_frozen()
    with torch.no_grad():
        expected = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N
        for parameter in policy.model.parameters():
            parameter.zero_()
        assert torch.equal(frozen.logps(PROMPTS, COMPLETIONS, 1.0).logps_N, expected)


def test_the_plain_way_with_its_own_head_and_all_logits():
    for linear in (True, False):
        policy = Policy(MODELS["gpt2"]().double(), DOUBLE)
        head = find_head(policy)
        policy.__dict__["passes"] = PlainPasses(policy, head if linear else type(head)())
        assert_plain(policy)
