"""Hooks and replaced functions of a model take part in sampling and in updates, or in neither way of computing it."""

import types

import pytest
import torch

from cohort.policy import Policy
from cohort.rollout.local.choose import choose_backend
from tests.conftest import tiny_llama
from tests.policy.plain import COMPLETIONS, LORA, PROMPTS, SINGLE, TEMPERATURE, plain_logps, with_peft

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning", "ignore:Full backward hook is firing:UserWarning"
)


def double(_module, _given, out):
    return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


def of_logits(_module, _given, out):
    out.logits = out.logits * 0.5
    return out


def first_half(grad):
    return grad * (torch.arange(len(grad)) < len(grad) / 2).view(-1, *[1] * (grad.ndim - 1))


def replace(module):
    forward = module.forward
    module.forward = types.MethodType(lambda _self, *given, **named: forward(*given, **named) * 3, module)


HOOKS = {
    "embedding": lambda model: model.model.embed_tokens.register_forward_hook(double),
    "before a projection": lambda model: model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(
        lambda _, given: (given[0] * 2,)
    ),
    "a norm": lambda model: model.model.layers[1].input_layernorm.register_forward_hook(double),
    "the last norm": lambda model: model.model.norm.register_forward_hook(double),
    "the head": lambda model: model.lm_head.register_forward_hook(double),
    "logits": lambda model: model.register_forward_hook(of_logits),
    "an MLP replaced": lambda model: replace(model.model.layers[0].mlp),
    "backward of a layer": lambda model: model.model.layers[0].register_full_backward_hook(
        lambda _, grads, __: (grads[0] * 2,) if grads[0] is not None else None
    ),
    "backward of the embedding": lambda model: model.model.embed_tokens.register_full_backward_pre_hook(
        lambda _, grads: (grads[0] * 2,)
    ),
    "backward of the head": lambda model: model.lm_head.register_full_backward_hook(
        lambda _, grads, __: (grads[0] * 2,)
    ),
    "rows of the embedding's gradient": lambda model: model.model.embed_tokens.weight.register_hook(first_half),
    "rows of the head's gradient": lambda model: model.lm_head.weight.register_hook(first_half),
    "rows of a projection's gradient": lambda model: model.model.layers[0].self_attn.o_proj.weight.register_hook(
        first_half
    ),
}


def gradients(policy, values_N):
    values_N.sum().backward()
    found = {name: one.grad.clone() for name, one in policy.model.named_parameters() if one.grad is not None}
    policy.model.zero_grad()
    return found


@pytest.mark.parametrize("kind", HOOKS)
def test_an_update_computes_with_hooks_what_the_model_computes(kind):
    policy = Policy(tiny_llama(), SINGLE)
    HOOKS[kind](policy.model)
    plain_N = plain_logps(policy)
    expected = gradients(policy, plain_N)
    with policy.training(), policy.compute(), policy.gradients_in_place():
        ours_N = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N
        found = gradients(policy, ours_N)
    torch.testing.assert_close(ours_N.detach(), plain_N.detach(), rtol=0, atol=1e-5)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4)


def test_hooks_of_adapters_take_part():
    policy = Policy(with_peft(LORA), SINGLE)
    policy.model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].register_forward_hook(double)
    torch.testing.assert_close(
        policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N, plain_logps(policy), rtol=0, atol=1e-5
    )
    assert "has a hook" in choose_backend(policy).description


def test_a_hook_on_every_module_takes_part():
    policy = Policy(tiny_llama(), SINGLE)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, given, out: double(module, given, out) if isinstance(module, torch.nn.Embedding) else None
    )
    try:
        ours_N, plain_N = policy.logps(PROMPTS, COMPLETIONS, TEMPERATURE).logps_N, plain_logps(policy)
        assert "has a hook" in choose_backend(policy).description
    finally:
        handle.remove()
    torch.testing.assert_close(ours_N, plain_N, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["embedding", "logits", "an MLP replaced"])
def test_a_sampler_runs_the_model_with_its_hooks(kind):
    policy = Policy(tiny_llama(), SINGLE)
    HOOKS[kind](policy.model)
    backend = choose_backend(policy)  # whose trial compares logits with the model's
    assert "has a hook, or a forward function that was replaced" in backend.description
