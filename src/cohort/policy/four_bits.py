"""Exact products of linear layers whose weights bitsandbytes stores in four bits, on a CPU.

On processors with AVX512, bitsandbytes 0.50 computes other products than those of the stored values:

- With AVX512-BF16, a layer that is first used without gradients packs its weights for inference: it rounds their scales
  and its inputs to bfloat16, and passes no gradient on from then. It fails unless its outputs are a multiple of 32.
- With any AVX512, the scales of a matrix are applied as if each row began with a new block. Values are wrong where rows
  hold a multiple of 16 values that is not a multiple of the block.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from cohort.errors import ModelError


def use_exact_products(model: Any) -> None:
    """Let the four-bit layers of a model that are on a CPU multiply by the values that their weights stand for:
    ``y = x W^T + b`` and ``dx = dy W``. Each pass dequantizes W anew. Other layers are not changed.

    Raises:
        ModelError: weights are packed for inference, or DoRA reads them through bitsandbytes, which may misread them.
    """
    for name, module in model.named_modules():
        layer = getattr(module, "base_layer", module)  # within peft's
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is None or not isinstance(layer, torch.nn.Linear) or layer.weight.device.type != "cpu":
            continue
        if getattr(state, "packing_format_for_cpu", False):
            raise ModelError(
                f"the given model has run without gradients, and bitsandbytes has packed the weights of {name} for "
                "inference, which cannot be undone exactly: load the model anew"
            )
        if not isinstance(layer, _ExactProducts):
            kind: Any = type(layer)
            layer.__class__ = _exact(kind)
        if getattr(module, "lora_magnitude_vector", ()) and state.shape[-1] % state.blocksize:
            raise ModelError(
                f"DoRA on four bits on a CPU needs rows of a multiple of {state.blocksize} weights, and those of "
                f"{name} have {state.shape[-1]}: set model.lora.variant to 'lora' or 'rslora', or "
                "model.quantization to 'none'"
            )


class _ExactProducts:
    """The forward pass of a layer, before that of bitsandbytes' class in its bases."""

    def forward(self: Any, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product: Tensor = _Product.apply(x.to(dtype), self.weight, bias)  # type: ignore[no-untyped-call]
        return product.to(x.dtype)


@functools.cache
def _exact(base: Any) -> Any:
    return type(f"Exact{base.__name__}", (_ExactProducts, base), {})


class _Product(torch.autograd.Function):
    """``x W^T + b`` of a frozen W in four bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        return torch.nn.functional.linear(x, dequantized(weight, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (gradient,) = gradients
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ dequantized(ctx.weight, gradient.dtype), None, of_bias


def dequantized(weight: Any, dtype: torch.dtype) -> Tensor:
    """The matrix that a four-bit weight stands for. It is read as one row, whose blocks every kernel counts right."""
    from bitsandbytes.functional import dequantize_4bit

    state = copy.copy(weight.quant_state)
    shape, state.shape, state.dtype = state.shape, torch.Size([state.shape.numel()]), dtype
    return dequantize_4bit(weight.data, state).reshape(shape)  # type: ignore[no-any-return]
