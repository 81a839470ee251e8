"""Prompts are computed once, and neither the cut into microbatches nor checkpointing changes a gradient."""

import pytest
import torch

from cohort.policy import Policy, enable_checkpointing, passes
from tests.conftest import tiny_llama
from tests.policy.plain import (
    COMPLETIONS,
    DOUBLE,
    LONG,
    LORA,
    MIXED,
    PROMPTS,
    SINGLE,
    TEMPERATURE,
    WEIGHTS,
    WINDOW,
    assert_near,
    assert_plain,
    gradients,
    model_of,
    rows_of,
    weighted,
    with_peft,
)

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ALL, SINGLES, SOME = [range(7)], [[s] for s in range(7)], [[3, 0], [1, 6, 2], [5], [4]]
MODELS = {
    "llama": lambda: tiny_llama(tie_word_embeddings=False),
    "gemma2": lambda: model_of("gemma2", WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 8}),
    "gpt2": lambda: model_of("gpt2"),
    "lora": lambda: with_peft(LORA),
    "falcon": lambda: model_of("falcon"),
}


def trained_gradients(policy, cuts):
    """As in an update: prompts read once, completions cut by cut, prompts backward once."""
    policy.model.zero_grad()
    weights = WEIGHTS.to(policy.precision.master).split([len(ids) for ids in COMPLETIONS])
    found = []
    with policy.training(), policy.compute():
        prefixes = policy.passes.read(list(dict.fromkeys(PROMPTS)))
        for cut in cuts:
            rows = rows_of([PROMPTS[s] for s in cut], [COMPLETIONS[s] for s in cut], prefixes.prompt_ids)
            logps_N = policy.states(prefixes, rows, TEMPERATURE).logps().logps_N
            (logps_N * torch.cat([weights[s] for s in cut])).sum().backward()
            found.append(logps_N.detach())
        prefixes.backward()
    grads = {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}
    return torch.cat(found), grads


@pytest.mark.parametrize(
    ("name", "cuts"),
    [("llama", ALL), ("llama", SINGLES), ("gemma2", SINGLES), ("gpt2", SOME), ("lora", SOME), ("falcon", SOME)],
)
def test_cuts_change_no_gradient(name, cuts):
    """Leaves and many microbatches give the gradient of one graph."""
    policy = Policy(MODELS[name]().double(), DOUBLE)
    value = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N
    expected = gradients(policy, (value * WEIGHTS).sum())
    logps_N, got = trained_gradients(policy, cuts)
    pieces = value.detach().split([len(ids) for ids in COMPLETIONS])
    torch.testing.assert_close(logps_N, torch.cat([pieces[s] for cut in cuts for s in cut]), rtol=0, atol=1e-12)
    assert_near({key: got.get(key, torch.zeros_like(grad)) for key, grad in expected.items()}, expected, 1e-12)


@pytest.mark.parametrize(
    ("name", "prompts", "completions"),
    [
        ("llama", [(7,)], [(3,)]),
        ("gemma2", [(7,)], [(3, 4, 5, 6)]),
        ("gpt2", [(7,), (7,), (8,)], [(3,), (4, 5), (6,)]),
        ("gemma2", [LONG, LONG], [(3,), (4,)]),
        ("llama", [(7, 8)], [(3,)]),
        ("gpt2", [(7, 8), (7,), (8, 7)], [(3,), (4, 5), (6,)]),
        ("llama", [LONG, LONG], [(3, 4), (3, 4)]),
        ("gemma2", [(7,), LONG, (7,)], [LONG, (3,), LONG]),
    ],
)
def test_shapes_at_the_edge(name, prompts, completions):
    policy = Policy(MODELS[name]().double(), DOUBLE)
    assert policy.passes.shared
    assert_plain(policy, prompts=prompts, completions=completions)


def test_prompts_go_through_the_model_once(monkeypatch):
    """The embedding sees each prompt's tokens once, whatever the number of its completions."""
    policy = Policy(tiny_llama(), SINGLE)
    assert policy.passes.shared
    monkeypatch.setattr(passes, "in_like_shapes", lambda rows: rows)  # without padding
    seen = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _m, inputs, _out: seen.append(inputs[0].numel()))
    policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert sum(seen) == sum(len(prompt) - 1 for prompt in set(PROMPTS)) + sum(map(len, COMPLETIONS))


def test_prefixes_without_gradients_send_nothing_back():
    policy = Policy(tiny_llama(), SINGLE)
    with torch.no_grad():
        prefixes = policy.passes.read([LONG])
    assert all(not part.requires_grad for parts in prefixes.keys_values.values() for part in parts)
    prefixes.backward()
    policy.passes.read([LONG]).backward()  # with gradients enabled, but no completion followed
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
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


def test_the_models_attention_is_restored_after_a_pass_and_after_an_error(monkeypatch):
    policy = Policy(MODELS["gpt2"](), SINGLE)
    before = policy.model.config._attn_implementation
    policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert policy.model.config._attn_implementation == before
    monkeypatch.setattr("cohort.policy.passes.packed_attention", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert policy.model.config._attn_implementation == before


# Checkpointing


@pytest.mark.parametrize(
    ("name", "precision"),
    [("llama", DOUBLE), ("llama", SINGLE), ("gemma2", MIXED), ("gpt2", MIXED), ("lora", SINGLE), ("falcon", DOUBLE)],
)
def test_checkpointing_changes_no_bit(name, precision):
    policy = Policy(MODELS[name]().to(precision.master), precision)
    assert policy.passes.shared == (name != "falcon")
    logps_N, plain = trained_gradients(policy, SOME)
    enable_checkpointing(policy.model)
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in policy.model.modules()]
    again_N, checkpointed = trained_gradients(policy, SOME)
    assert torch.equal(logps_N, again_N)
    assert plain.keys() == checkpointed.keys()
    for key, grad in plain.items():
        assert torch.equal(grad, checkpointed[key]), key
    after = [getattr(module, "_gradient_checkpointing_func", None) for module in policy.model.modules()]
    assert all(one is other for one, other in zip(functions, after, strict=True))  # they are restored


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_without_a_block_around_the_backward_pass(name):
    policy = Policy(MODELS[name]().double(), DOUBLE)
    expected = gradients(policy, weighted(policy))
    enable_checkpointing(policy.model)
    with policy.training():
        value = weighted(policy)
    policy.model.zero_grad()
    policy.model.train()
    value.backward()
    policy.model.eval()
    got = {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}
    for key, grad in expected.items():
        assert torch.equal(grad, got.get(key, torch.zeros_like(grad))), key


@pytest.mark.parametrize("checkpointing", [False, True])
def test_attached_prompts_take_several_backward_passes(checkpointing):
    """As for the norms of terms: one graph, and a backward pass through all of it after each microbatch."""
    policy = Policy(MODELS["llama"]().double(), DOUBLE)
    _, expected = trained_gradients(policy, SINGLES)
    policy.model.zero_grad()
    if checkpointing:
        enable_checkpointing(policy.model)
    weights = WEIGHTS.split([len(ids) for ids in COMPLETIONS])
    with policy.training(), policy.compute():
        prefixes = policy.passes.read(list(dict.fromkeys(PROMPTS)), attached=True)
        for prompt, completion, weights_N in zip(PROMPTS, COMPLETIONS, weights, strict=True):
            rows = rows_of([prompt], [completion], prefixes.prompt_ids)
            logps_N = policy.states(prefixes, rows, TEMPERATURE).logps().logps_N
            (logps_N * weights_N).sum().backward(retain_graph=True)
        prefixes.backward()  # nothing is left to send
    assert_near({name: p.grad for name, p in policy.model.named_parameters()}, expected, 1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reentrant_checkpointing(name):
    """It runs layers without a graph, where keys and values would lose their gradient; it is replaced."""
    policy = Policy(MODELS[name]().double(), DOUBLE)
    _, expected = trained_gradients(policy, SOME)
    policy.model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: out.requires_grad_())
    newer = hasattr(policy.model, "activation_checkpointing_enable")
    enable = policy.model.activation_checkpointing_enable if newer else policy.model.gradient_checkpointing_enable
    enable({"use_reentrant": True})
    _, got = trained_gradients(policy, SOME)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)
