"""The trainer's passes against the model's own forward pass: log-probs and the gradient of every parameter, family by
family, and which way each family takes."""

import dataclasses

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cohort.policy import Policy, Precision, enable_checkpointing, head
from cohort.policy.choose import find_head
from cohort.policy.passes import PlainPasses, SharedPasses
from tests.conftest import tiny_llama
from tests.policy.plain import assert_near, gradients, plain_logps, rows_of, shares
from tests.rollout.test_families import ATTENTION, COMMON
from tests.rollout.test_lean import FAMILIES as LEAN

SINGLE = Precision(torch.float32, torch.float32)
DOUBLE = Precision(torch.float64, torch.float64)
MIXED = Precision(torch.float32, torch.bfloat16)
GENERATOR = torch.Generator().manual_seed(7)


def tokens(count):
    return tuple(torch.randint(2, 37, (count,), generator=GENERATOR).tolist())


# Prompts longer than the windows, shorter, and of one token; several completions of one, equal prompts apart.
LONG, SHORT, ONE = tokens(17), tokens(4), tokens(1)
PROMPTS = [LONG, LONG, SHORT, ONE, ONE, LONG]
COMPLETIONS = [tokens(9), tokens(2), tokens(7), tokens(5), tokens(1), tokens(8)]
WEIGHTS = torch.linspace(-1, 2, sum(map(len, COMPLETIONS)), dtype=torch.float64)

SHARING = {
    "phi3": ATTENTION,
    "olmo2": ATTENTION,
    "granite": ATTENTION | {"logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere": ATTENTION | {"logit_scale": 0.25},
    "starcoder2": ATTENTION | {"sliding_window": 6},
    "gpt_neox": {key: value for key, value in ATTENTION.items() if key != "num_key_value_heads"},
    "gpt2": COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": COMMON
    | {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"max_position_embeddings": 128, "word_embed_proj_dim": 32},
}
APART = {
    "mamba": COMMON | {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 8},
    "stablelm": ATTENTION,
    "bloom": COMMON | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}
"""Recurrent, or with an attention of their own that cannot be exchanged."""


def policy_of(family, settings, precision, **changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings | changes))
    return Policy(model.to(precision.master), precision)


CASES = [pytest.param(*case, id=name) for name, case in LEAN.items()] + [
    pytest.param(name, settings, id=name) for name, settings in SHARING.items()
]


def weighted(policy):
    return (policy.logps(PROMPTS, COMPLETIONS, 0.7).logps_N * WEIGHTS.to(policy.precision.master)).sum()


def plainly_weighted(policy):
    return (plain_logps(policy, PROMPTS, COMPLETIONS, 0.7) * WEIGHTS.to(policy.precision.master)).sum()


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_log_probs_and_gradients_are_those_of_the_plain_forward_pass(family, settings):
    """float64: sums in another order, of gradients that pass through some layers and are added up over tokens."""
    policy = policy_of(family, settings, DOUBLE)
    assert shares(policy), policy.passes.description
    with torch.no_grad():
        ours, plain = policy.logps(PROMPTS, COMPLETIONS, 0.7).logps_N, plain_logps(policy, PROMPTS, COMPLETIONS, 0.7)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-11)
    assert_near(gradients(policy, weighted(policy)), gradients(policy, plainly_weighted(policy)), 1e-10)


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_in_float32(family, settings):
    policy = policy_of(family, settings, SINGLE)
    with torch.no_grad():
        ours, plain = policy.logps(PROMPTS, COMPLETIONS, 0.7).logps_N, plain_logps(policy, PROMPTS, COMPLETIONS, 0.7)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    # float32 has 6e-8; a gradient is a sum of some hundred terms that may cancel.
    assert_near(gradients(policy, weighted(policy)), gradients(policy, plainly_weighted(policy)), 1e-4)


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_in_bfloat16_the_gap_to_the_truth_is_that_of_the_plain_pass(family, settings):
    policy, truth = policy_of(family, settings, MIXED), policy_of(family, settings, SINGLE)
    with torch.no_grad():
        exact = plain_logps(truth, PROMPTS, COMPLETIONS, 0.7)
        ours = (policy.logps(PROMPTS, COMPLETIONS, 0.7).logps_N - exact).square().mean().sqrt()
        plain = (plain_logps(policy, PROMPTS, COMPLETIONS, 0.7) - exact).square().mean().sqrt()
    assert ours < 2 * plain + 0.01  # both round to 8 bits at every product; neither is nearer in every case


@pytest.mark.parametrize("family", APART)
def test_models_whose_prompts_cannot_be_read_by_themselves(family):
    policy = policy_of(family, APART[family], DOUBLE)
    assert policy.passes.description.startswith("prompts computed with every completion, padded")
    with torch.no_grad():
        ours, plain = policy.logps(PROMPTS, COMPLETIONS, 0.7).logps_N, plain_logps(policy, PROMPTS, COMPLETIONS, 0.7)
    torch.testing.assert_close(ours, plain, rtol=0, atol=1e-7)  # some of their kernels compute in float32
    assert_near(gradients(policy, weighted(policy)), gradients(policy, plainly_weighted(policy)), 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral window, ratio 4"])
def test_however_the_completions_are_cut(name, checkpointing):
    """Prompts read once, completions in microbatches of one: the same gradient as all at once in one graph."""
    policy = policy_of(*LEAN[name], DOUBLE)
    if checkpointing:
        enable_checkpointing(policy.model)
    whole = gradients(policy, weighted(policy))
    policy.model.zero_grad()
    with policy.training(), policy.compute():
        prefixes = policy.passes.read(list(dict.fromkeys(PROMPTS)))
        start = 0
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
            logps_N = policy.states(prefixes, rows_of([prompt], [completion], prefixes.prompt_ids), 0.7).logps().logps_N
            (logps_N * WEIGHTS[start : start + len(completion)]).sum().backward()
            start += len(completion)
        prefixes.backward()
    cut = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in policy.model.named_parameters()}
    assert_near(cut, whole, 1e-10)


def test_prompts_go_through_the_model_once(monkeypatch):
    """Tokens that the embedding sees: each prompt's once, whatever the number of its completions."""
    policy = policy_of(*LEAN["llama"], SINGLE)
    assert policy.passes.shared
    monkeypatch.setattr(head, "LIKE_SHAPES", 1)
    seen = []
    policy.model.get_input_embeddings().register_forward_hook(lambda _m, inputs, _out: seen.append(inputs[0].numel()))
    policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert sum(seen) == sum(len(prompt) - 1 for prompt in set(PROMPTS)) + sum(map(len, COMPLETIONS))


def test_the_models_own_attention_is_back_after_a_pass_and_after_an_error(monkeypatch):
    policy = Policy(tiny_llama(), SINGLE)
    own = policy.model.config._attn_implementation
    policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert policy.model.config._attn_implementation == own
    monkeypatch.setattr("cohort.policy.passes.packed_attention", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        policy.logps(PROMPTS, COMPLETIONS, 1.0)
    assert policy.model.config._attn_implementation == own


def test_a_pass_that_computes_something_else_is_not_taken(monkeypatch):
    real = SharedPasses.hidden

    def off(self, *arguments):
        found = real(self, *arguments)
        return found._replace(states_NH=found.states_NH.roll(1, 0))

    monkeypatch.setattr(SharedPasses, "hidden", off)
    policy = Policy(tiny_llama(), SINGLE)
    assert isinstance(policy.passes, PlainPasses)
    assert "off by" in policy.passes.description
    torch.testing.assert_close(
        policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N, plain_logps(policy, PROMPTS, COMPLETIONS), rtol=0, atol=1e-5
    )


def test_dropout_that_is_kept_is_drawn_for_every_completion():
    assert isinstance(Policy(tiny_llama(attention_dropout=0.5), SINGLE, dropout=True).passes, PlainPasses)


def test_rotations_that_look_at_the_length():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    policy = policy_of("llama", LEAN["llama"][1], SINGLE, rope_parameters=rope)
    assert "'dynamic', which changes with the sequence's length" in policy.passes.description


def test_a_head_that_is_no_plain_layer_keeps_all_logits():
    policy = Policy(tiny_llama(), DOUBLE)
    policy.model.double()

    class Odd(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden).tanh()

    policy.model.lm_head.__class__ = Odd
    assert find_head(policy) is None
    assert policy.passes.description.startswith("prompts computed with every completion, padded, all logits at once")
    torch.testing.assert_close(
        policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N, plain_logps(policy, PROMPTS, COMPLETIONS), rtol=0, atol=1e-11
    )


def test_the_plain_way_is_right_too():
    """Forced, for a model that would share."""
    policy = policy_of(*LEAN["gemma2"], DOUBLE)
    expected = gradients(policy, weighted(policy))
    policy.__dict__["passes"] = PlainPasses(policy, find_head(policy))
    assert_near(gradients(policy, weighted(policy)), expected, 1e-10)
    policy.__dict__["passes"] = PlainPasses(policy, dataclasses.replace(find_head(policy), linear=None))
    assert_near(gradients(policy, weighted(policy)), expected, 1e-10)
