"""The head in float32 under a model that computes in half precision: logits are not rounded to half precision, in the
update and in the sampler. Source: ScaleRL (arXiv 2510.13786)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cohort.errors import ModelError


def use_float32_head(model: Any) -> None:
    """Let the model's head compute in float32. Copies of the model do so too.

    Raises:
        ModelError: the head is not a plain linear layer, or adapters train it.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(f"model.float32_head needs a head that is a plain linear layer, got a {type(head).__name__}")
    head.register_forward_hook(_in_float32)


def is_float32(head: Any) -> bool:
    """Whether a head computes in float32 whatever the rest of the model computes in."""
    return _in_float32 in getattr(head, "_forward_hooks", {}).values()


def _in_float32(head: nn.Linear, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
    with torch.autocast(inputs[0].device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return functional.linear(inputs[0].float(), head.weight.float(), bias)
