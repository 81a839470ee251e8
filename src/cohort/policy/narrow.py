"""Linear layers of an update that compute in half precision over float32 weights, on a CPU.

As under autocast, each weight is cast once per update, and products are in half precision with float32 sums. Autocast
rounds a weight's gradient to half precision, makes a float32 copy of it and adds that to ``.grad``.

On processors that multiply pairs of bfloat16 numbers, kernels compute all three products of a layer. They read the
weights from two packed copies, one for each direction, and add a weight's gradient as it is. On others, torch computes
the products, and a kernel adds the gradient that autocast adds, without the copy.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.errors import ModelError
from cohort.native import call, has_pairs, many_rows, packed, packed_bias, require, room
from cohort.policy.device import kind_of

PANEL, HELD = 32, 4096
"""Numbers of the kernels: outputs that are laid out together, and most of them whose words weight_gradient.c holds."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module keeps what its call runs beside ``forward``."""
KNOWN = ("cohort.", "torch.distributed.")
"""Packages whose hooks are accounted for: this one, and FSDP2."""
PRODUCT = 2**23
"""Maximum size of a product in half precision that torch computes and that is added to a gradient."""


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
        self.matrices: dict[int, Matrix] = {}
        """Its own, and that of layers side by side of which it is the first, by the number of layers."""

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled("cpu"):
            return functional.linear(x, self.module.weight, self.module.bias)
        return self.beside([self], x)

    def beside(self, layers: Sequence[_Narrow], x: Tensor) -> Tensor:
        """The outputs of layers side by side, of which it is the first; biases for all of them or none."""
        weights, biases = [layer.module.weight for layer in layers], [layer.module.bias for layer in layers]
        bias = biases[0] if len(layers) == 1 or biases[0] is None else torch.cat([*biases])
        if len(layers) not in self.matrices:
            self.matrices[len(layers)] = Matrix([weight.detach() for weight in weights], bias, self.dtype)
        out: Tensor = _Linear.apply(x.to(self.dtype), self.matrices[len(layers)], bias, *weights)  # type: ignore[no-untyped-call]
        return out


class Matrix:
    """Weights of layers with one input below each other, ``[outputs, inputs]``, and their biases, rounded to half
    precision: in the layouts of the kernels (packed_product.c), or as they are for torch."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weights = weights
        self.shape = sum(map(len, weights)), weights[0].shape[1]
        self.native = dtype == torch.bfloat16 and has_pairs()
        if self.native:
            self.copy: Tensor | None = packed(self.weights)
            self.transposed: Tensor | None = None
            self.bias = None if bias is None else packed_bias(bias.detach(), self.copy)
        else:
            self.bias = None if bias is None else bias.detach().to(dtype)
            self.copy = torch.empty(self.shape, dtype=dtype)
            for part, weight in zip(self.copy.split([*map(len, weights)]), weights, strict=True):
                part.copy_(weight)

    def outputs(self, x: Tensor) -> Tensor:
        """``x W^T + b``."""
        assert self.copy is not None
        if not self.native:
            return functional.linear(x, self.copy, self.bias)
        return many_rows(x, self.copy, self.bias, *self.shape)

    def inputs(self, grad: Tensor, *, last: bool = False) -> Tensor:
        """``grad W``, the gradient of x. ``last``: no product follows, so the memory of outputs is freed before."""
        if not self.native:
            assert self.copy is not None
            return grad @ self.copy
        if last:
            self.copy = None
        if self.transposed is None:
            self.transposed = packed(self.weights, transposed=True)
        return many_rows(grad, self.transposed, None, *reversed(self.shape))


def outputs_beside(modules: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """The outputs of linear layers side by side, by one product, inside ``narrow_linears`` and under autocast. None:
    they must be called one by one, as one has hooks, is of another kind, or has no bias while another has."""
    layers = [vars(module).get("forward") for module in modules]
    plain = [layer for layer in layers if isinstance(layer, _Narrow)]
    hooked = any(getattr(module, name) for module in modules for name in HOOKS)
    alike = len({layer.module.bias is None for layer in plain}) == 1
    if len(plain) < len(layers) or hooked or not alike or not torch.is_autocast_enabled("cpu"):
        return None
    return plain[0].beside(plain, x)


class _Linear(torch.autograd.Function):
    """``x W^T + b`` of layers side by side. The gradients of their weights are added to ``.grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Matrix, _bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rest = weights, matrix  # the parameters themselves: a saved tensor may be another object
        return matrix.outputs(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (weights, matrix) = ctx.saved_tensors, ctx.rest
        grad_x = matrix.inputs(grad) if ctx.needs_input_grad[0] else None
        grad_TO, x_TI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        fresh = [weight.grad is None for weight in weights]
        for weight in weights:
            if weight.grad is None:
                weight.grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
        grad_bias = grad_TO.new_empty(grad_TO.shape[1], dtype=weights[0].dtype) if ctx.needs_input_grad[2] else None
        add_gradients([weight.grad for weight in weights], grad_TO, x_TI, fresh=fresh, native=True, bias_O=grad_bias)
        return grad_x, None, grad_bias, *[None] * len(weights)


def changed_call(modules: Iterable[nn.Module]) -> str:
    """The class of the first module whose call does something else than its class says: it has a hook, or a forward
    function of its own. Empty: there is none. A hook that asks for gradients of embeddings changes nothing."""
    of_all = [hook for name in HOOKS for hook in getattr(torch.nn.modules.module, f"_global{name}").values()]
    for module in modules:
        added = of_all + [hook for name in HOOKS for hook in getattr(module, name).values()]
        added += [vars(module)["forward"]] if "forward" in vars(module) else []
        for one in added:
            function = getattr(one, "func", one)
            owner = getattr(function, "__module__", "") or type(function).__module__
            asks = "make_inputs_require_grad" in getattr(function, "__qualname__", "")
            if not asks and not owner.startswith(KNOWN):
                return type(module).__name__
    return ""


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


def add_gradients(
    totals: Sequence[Tensor],
    grad_TO: Tensor,
    x_TI: Tensor,
    *,
    fresh: Sequence[bool] = (False,),
    native: bool = False,
    bias_O: Tensor | None = None,
) -> None:
    """``total += grad^T x``, the gradient of a linear layer's matrix, for layers side by side.

    Args:
        totals: of each layer, ``[its outputs, I]`` in float32 or wider.
        grad_TO: the gradient of the layers' outputs, over tokens T.
        x_TI: their input, of the same dtype.
        fresh: of each total, whether it holds nothing yet; then it is written.
        native: native kernels may compute it.
        bias_O: where the sums of ``grad_TO`` over tokens are written, in float32 or wider. None: nowhere.
    """
    (tokens, outputs), inputs = grad_TO.shape, x_TI.shape[1]
    written = [*totals] if bias_O is None else [*totals, bias_O]
    narrow = all(each.dtype == torch.float32 for each in written) and grad_TO.dtype == x_TI.dtype == torch.bfloat16
    plain = all(each.device.type == "cpu" and each.is_contiguous() for each in written)
    if native and narrow and plain and tokens and has_pairs():
        fits = sum(map(len, totals)) == outputs and all(total.shape[1] == inputs for total in totals)
        require(fits and len(x_TI) == tokens, "a total of outputs and inputs")
        rows = [[total.data_ptr(), len(total), new] for total, new in zip(totals, fresh, strict=True)]
        call(
            "weight_gradient", grad=grad_TO.contiguous(), x=x_TI.contiguous(), totals=torch.tensor(rows), bias=bias_O,
            words=room(-(-min(outputs, HELD) // PANEL) * PANEL * -(-tokens // 2)), tokens=tokens, outputs=outputs,
            inputs=inputs,
        )  # fmt: skip
        return
    if bias_O is not None:
        torch.sum(grad_TO, 0, dtype=bias_O.dtype, out=bias_O)
    for total_OI, grad, new in zip(totals, grad_TO.split([*map(len, totals)], dim=1), fresh, strict=True):
        _add_gradient(total_OI.zero_() if new else total_OI, grad, x_TI, native=native)


def _add_gradient(total_OI: Tensor, grad_TO: Tensor, x_TI: Tensor, *, native: bool) -> None:
    """``total += grad^T x`` by torch."""
    outputs, inputs = total_OI.shape
    if grad_TO.dtype == total_OI.dtype:
        total_OI.addmm_(grad_TO.mT, x_TI)
        return
    if kind_of(total_OI.device) == "cuda" and total_OI.dtype == torch.float32:  # the product is added unrounded
        torch.addmm(total_OI, grad_TO.mT, x_TI, out_dtype=total_OI.dtype, out=total_OI)
        return
    size = max(1, PRODUCT // inputs)
    for start in range(0, outputs, size):
        rows, part = total_OI[start : start + size], grad_TO.mT[start : start + size] @ x_TI
        if native:
            add_narrow(rows, part)
        else:
            rows += part


# ----------------------------------------
# Exact products of linear layers whose weights bitsandbytes stores in four bits, on a CPU.
#
# On processors with AVX512, bitsandbytes 0.50 computes other products than those of the stored values:
#
# - With AVX512-BF16, a layer that is first used without gradients packs its weights for inference: it rounds their
#   scales and its inputs to bfloat16, and passes no gradient on from then. It fails unless its outputs are a multiple
#   of 32.
# - With any AVX512, the scales of a matrix are applied as if each row began with a new block. Values are wrong where
#   rows hold a multiple of 16 values that is not a multiple of the block.


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
