"""Linear layers of an update in half precision over float32 weights, against autocast."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from cohort.native import Unavailable, load
from cohort.policy import Policy, enable_checkpointing
from cohort.policy.head import add_product
from cohort.policy.narrow import add_narrow, narrow_linears
from tests.conftest import each
from tests.policy.plain import MIXED, threads, tiny_llama

try:
    load()
except Unavailable as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

HALF = torch.bfloat16
PASSES = [((5, 9, 20), (4, 6, 1)), ((7, 2), (3,))]


def gradients(policy, *, in_place):
    """Of two passes over two prompts each, by the update's block, or by autocast alone."""
    policy.model.zero_grad()
    with policy.training(), policy.compute():
        block = policy.gradients_in_place() if in_place else torch.enable_grad()
        with block:
            for scale in (1.0, 3.0):
                logps_N = policy.logps(*zip(*PASSES, strict=True), 1.0).logps_N
                (logps_N * scale).sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_a_model_are_those_of_autocast(checkpointing):
    """Prompts and completions are one pass here, of which autocast adds up the gradients in bfloat16: off by one rounding
    of the sum and one of each part."""
    policy = Policy(tiny_llama(tie_word_embeddings=False, attention_bias=True), MIXED)
    if checkpointing:
        enable_checkpointing(policy.model)
    expected = gradients(policy, in_place=False)
    got = gradients(policy, in_place=True)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=3 * 2**-8 * float(value.abs().max()))
    assert not any("forward" in vars(module) for module in policy.model.modules())


def test_gradients_of_a_layer_are_those_of_autocast_bit_by_bit():
    layer, given = linear_of(), [torch.randn(rows, 40) for rows in (64, 7, 1)]
    found = []
    for block in (nullcontext(), narrow_linears(layer, HALF)):
        layer.zero_grad()
        x_grads = []
        with block, torch.autocast("cpu", HALF):
            for x in given:
                out = layer(x.requires_grad_())
                (out.float() * torch.arange(24)).sum().backward()
                x_grads, x.grad = [*x_grads, x.grad], None
        found.append([layer.weight.grad, layer.bias.grad, *x_grads])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts tensors made in float32 of a shape."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        of_shape = isinstance(out, torch.Tensor) and out.shape == (24, 40) and out.dtype == torch.float32
        given = [each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)]
        self.made += of_shape and out.untyped_storage()._cdata not in given
        return out


def linear_of(**kwargs):
    torch.manual_seed(1)
    return nn.Linear(40, 24, **kwargs)


def test_a_sum_of_gradients_is_the_only_float32_tensor_of_a_weights_size():
    layer, x = linear_of(), torch.randn(64, 40)
    with Copies() as copies, torch.autocast("cpu", HALF), narrow_linears(layer, HALF):
        for _ in range(3):
            layer(x).float().sum().backward()
    assert copies.made == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_with_hooks_or_frozen_weights_are_left_alone(frozen):
    layer = linear_of()
    if frozen:
        layer.weight.requires_grad_(False)
    else:
        layer.weight.register_hook(lambda grad: 3 * grad)
    with narrow_linears(layer, HALF):
        assert "forward" not in vars(layer)


def test_without_gradients_and_without_autocast_the_layer_computes_what_it_does():
    layer, x = linear_of(), torch.randn(7, 40)
    with torch.no_grad():
        with torch.autocast("cpu", HALF):
            narrow = layer(x)
        wide = layer(x)
        with narrow_linears(layer, HALF):
            assert torch.equal(layer(x), wide)
            with torch.autocast("cpu", HALF):
                assert torch.equal(layer(x), narrow)


@each("shape", [(1,), (3, 5), (4099,), (33, 1001)])
@each("count", [1, 2])
def test_adding_half_precision_is_exact_to_float32(shape, count):
    """Widening is exact, so each sum is rounded once, as by torch."""
    total, part = torch.randn(shape), torch.randn(shape).to(HALF)
    expected = total + part.float()
    with threads(count):
        add_narrow(total, part)
    assert torch.equal(total, expected)


def test_adding_in_another_order_of_memory():
    total, part = torch.randn(6, 8), torch.randn(8, 6).to(HALF).T
    expected = total + part.float()
    add_narrow(total, part)
    assert torch.equal(total, expected)


def test_kernels_that_are_switched_off_are_not_used(monkeypatch):
    monkeypatch.setattr("cohort.policy.narrow.call", lambda *_, **__: pytest.fail("a kernel was called"))
    total, left, right = torch.ones(3, 4), torch.ones(3, 2).bfloat16(), torch.ones(2, 4).bfloat16()
    add_product(total, left, right)
    assert total.tolist() == [[3.0] * 4] * 3
