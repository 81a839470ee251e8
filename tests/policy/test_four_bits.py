"""Products of weights in four bits on a CPU: exact on every processor. Weights here are values that NF4 holds exactly."""

import pytest
import torch

from cohort.config import LoraConfig, ModelConfig
from cohort.errors import ModelError
from cohort.policy import load_model, load_policy
from cohort.policy.load import Precision
from cohort.policy.narrow import dequantized, use_exact_products
from tests.conftest import tiny_llama

SHAPES = [(24, 24), (8, 80), (3, 10), (32, 128), (5, 336)]
"""Outputs and inputs. With AVX512, bitsandbytes misreads rows of 80 and 336 weights: multiples of 16, and not of 64."""


def layer_of(outputs, inputs, nested=False):
    """A layer, and its weights: in each block of 64 a scale times values of NF4, one of which is 1."""
    from bitsandbytes.functional import get_4bit_type  # the import takes seconds
    from bitsandbytes.nn import Linear4bit

    generator = torch.Generator().manual_seed(inputs)
    values = get_4bit_type("nf4", device="cpu")[torch.randint(16, (outputs * inputs,), generator=generator)]
    values[::64] = 1.0
    scales = torch.arange(1.0, 1 + len(values[::64])).repeat_interleave(64)[: len(values)]
    weights = (values * scales).reshape(outputs, inputs)
    layer = Linear4bit(inputs, outputs, quant_type="nf4", compress_statistics=nested, compute_dtype=torch.float32)
    layer.load_state_dict({"weight": weights, "bias": torch.randn(outputs, generator=generator)})
    return layer.to("cpu").eval(), weights


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_weights_are_those_that_were_quantized(outputs, inputs):
    layer, weights = layer_of(outputs, inputs)
    torch.testing.assert_close(dequantized(layer.weight, torch.float32), weights, rtol=0, atol=0)
    torch.testing.assert_close(dequantized(layer.weight, torch.bfloat16), weights.bfloat16(), rtol=0, atol=0)
    nested, _ = layer_of(outputs, inputs, nested=True)
    # Scales in 8 bits: half a step near 1 of the code of 8 bits is below 1%, of the largest scale.
    torch.testing.assert_close(dequantized(nested.weight, torch.float32), weights, rtol=0, atol=0.01 * weights.max())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_and_gradients_are_those_of_the_weights(outputs, inputs):
    """Also after a pass without gradients, after which bitsandbytes packs weights on processors with AVX512-BF16."""
    layer, weights = layer_of(outputs, inputs)
    layer.support_avx512bf16_for_cpu = True
    use_exact_products(torch.nn.Sequential(layer))
    x, along = torch.randn(2, 3, inputs), torch.randn(2, 3, outputs)
    with torch.no_grad():
        layer(x)
    x.requires_grad_()
    product = layer(x)
    found = product.detach(), *torch.autograd.grad(product, (x, layer.bias), along)
    exact = [one.detach().double().requires_grad_() for one in (x, layer.bias)]
    product = torch.nn.functional.linear(exact[0], weights.double(), exact[1])
    expected = product.detach(), *torch.autograd.grad(product, exact, along.double())
    for one, other in zip(found, expected, strict=True):  # float32: sums of at most 336 terms
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
    assert len(layer.state_dict()["weight"]) == (outputs * inputs + 1) // 2  # as it was


def test_what_cannot_be_exact_is_refused(tmp_path):
    from bitsandbytes.functional import _convert_weight_packed_for_cpu

    tiny_llama().save_pretrained(tmp_path)
    settings = {"path": str(tmp_path), "device": "cpu", "precision": "float32", "quantization": "4bit"}
    with pytest.raises(
        ModelError, match="DoRA on four bits on a CPU needs rows of a multiple of 64 weights, .* have 24"
    ):
        load_policy(settings["path"], ModelConfig(**settings, lora=LoraConfig(rank=2, variant="dora")), None)
    single = Precision(torch.float32, torch.float32)
    model = load_model("cohort:demo", single, torch.device("cpu"), quantization="4bit")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data, _ = _convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj for inference.*load the model anew"):
        use_exact_products(model)
