"""Linear layers of an update that compute in half precision over float32 weights, on a CPU.

As under autocast, each weight is cast once per update, and a pass gives its gradient in half precision. Autocast makes
a float32 copy of that and then adds it to ``.grad``; here a kernel adds it without the copy. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.native import call


@contextmanager
def narrow_linears(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, the linear layers of a model compute so under autocast to ``dtype``. Weights must not change
    there, and native kernels must be available. Layers whose weight has a hook, is frozen or is not float32 are left
    alone."""
    linears = [module for module in model.modules() if type(module) is nn.Linear and "forward" not in vars(module)]
    linears = [module for module in linears if module.weight.dtype == torch.float32 and takes_in_place(module.weight)]
    for module in linears:
        module.forward = _Narrow(module, dtype)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for module in linears:
            del module.forward


class _Narrow:
    """The forward pass of a linear layer."""

    def __init__(self, module: nn.Linear, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.copy: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.module.weight, self.module.bias
        if torch.is_autocast_enabled("cpu"):
            if self.copy is None:
                self.copy = weight.detach().to(self.dtype)
            weight = _Cast.apply(weight, [self.copy]) if torch.is_grad_enabled() else self.copy  # type: ignore[no-untyped-call]
        return functional.linear(x, weight, bias)


class _Cast(torch.autograd.Function):
    """A weight's copy, whose gradient is added to the weight's ``.grad``."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: list[Tensor]) -> Tensor:
        ctx.weight = weight  # the parameter itself: a saved tensor may be another object
        return copy[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = grad.to(weight.dtype)
        else:
            add_narrow(weight.grad, grad)
        return None, None


def takes_in_place(weight: Tensor) -> bool:
    """Whether a weight's gradient may be added to ``.grad``: it is a parameter, and no hook waits for the gradient."""
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return weight.is_leaf and weight.requires_grad and not hooks


def add_narrow(total: Tensor, part: Tensor) -> None:
    """``total += part``; native kernels must be available. Torch would first make a copy of the part in the dtype of
    the total."""
    fits = total.dtype == torch.float32 and part.dtype == torch.bfloat16 and total.shape == part.shape
    if fits and total.device.type == "cpu" and total.is_contiguous() and part.is_contiguous():
        call("add", total=total, part=part, count=total.numel())
    else:
        total += part
