"""A model's weights for the sampler's matrix products, in compute precision.

If that is the dtype of the weights, these are the trainer's parameters themselves. If not (bfloat16 over float32), one
copy in compute precision is made per update; matrices that share an input lie side by side in it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cohort.native import (
    call,
    empty_packed,
    has_pairs,
    load,
    pack,
    packed_bias,
    require,
    room,
    structure,
    threads_for,
)
from cohort.policy.anatomy import Anatomy
from cohort.policy.device import kind_of
from cohort.policy.experts import NarrowExperts, PreparedExperts
from cohort.policy.head import is_float32
from cohort.policy.parts import Experts, Gated, Linear, Norm

# ----------------------------------------
# The matrix products of the sampler by native kernels: in float32 from the weights where they are (product.c), in
# bfloat16 from a packed copy (packed_product.c).


CHUNK = 64
"""Rows that the kernel works on at a time."""
LANES = 8
"""Numbers per vector that the kernel is meant for. Processors with fewer have faster products in their libraries."""


def multiplies(weights: Sequence[Tensor]) -> bool:
    """Whether the kernel, which must be available, takes these matrices."""
    alike = all(w.dtype == torch.float32 and w.device.type == "cpu" and w.is_contiguous() for w in weights)
    return alike and load().cohort_lanes() >= LANES


class NativeProduct:
    """``y = x W^T + b`` of matrices side by side, which share their input.

    Args:
        weights: ``[out_i, in]``; read at each call.
        biases: ``[out_i]``, or None.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self._weights = weights
        self._biases = [None if bias is None else bias.contiguous() for bias in biases]
        pairs = zip(weights, self._biases, strict=True)
        rows = [[w.data_ptr(), 0 if bias is None else bias.data_ptr(), len(w)] for w, bias in pairs]
        self._parts = torch.tensor(rows, dtype=torch.int64)
        self._in, self._out = weights[0].shape[1], sum(map(len, weights))
        like = all(bias is None or bias.dtype == torch.float32 for bias in self._biases)
        require(like and multiplies(weights), "float32 matrices on the CPU")
        require(all(w.shape[1] == self._in for w in weights), "matrices of one input")

    def __call__(self, x: Tensor) -> Tensor:
        """``[S, in]`` to ``[S, all outputs]``."""
        require(x.dtype == torch.float32 and x.shape[1:] == (self._in,), "an input for each column")
        y = x.new_empty(len(x), self._out)
        call(
            "product", x=x.contiguous(), parts=self._parts, turned=room(self._in * CHUNK), y=y, rows=len(x),
            out=self._out, count=len(self._parts), threads=threads_for(self._out * self._in), **{"in": self._in},
        )  # fmt: skip
        return y


class PackedProduct:
    """``y = x W^T + b`` of matrices side by side in bfloat16, on processors that multiply pairs of such numbers. Holds
    a copy of the matrices in the kernel's own layout: see packed_product.c.

    Args:
        widths: outputs of each matrix.
        inputs: of all of them.
    """

    def __init__(self, widths: Sequence[int], inputs: int) -> None:
        self._widths, self._in, self._out = list(widths), inputs, sum(widths)
        self._packed = empty_packed(self._out, inputs)
        self._bias: Tensor | None = None
        self._call = structure("packed_product")(packed=self._packed.data_ptr(), out=self._out)
        self._call.__setattr__("in", inputs + inputs % 2)
        self._function = load().cohort_packed_product
        self._function.restype = None

    @staticmethod
    def takes(weights: Sequence[Tensor]) -> bool:
        """Whether matrices can be packed, and the processor has the units. The library must be available."""
        alike = {w.dtype for w in weights} in ({torch.float32}, {torch.bfloat16})
        return alike and all(w.device.type == "cpu" and w.is_contiguous() for w in weights) and has_pairs()

    def pack(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """Read matrices, ``[out_i, in]`` in float32 or bfloat16, and the bias of all outputs, rounded to bfloat16."""
        require(self.takes(weights), "contiguous float32 or bfloat16 matrices on the CPU")
        require([tuple(w.shape) for w in weights] == [(n, self._in) for n in self._widths], "matrices as announced")
        pack(self._packed, weights)
        self._bias = None if bias is None else packed_bias(bias, self._packed)
        self._call.bias = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """``[S, in]`` to ``[S, all outputs]``, both in bfloat16."""
        require(x.dtype == torch.bfloat16 and x.shape[1:] == (self._in,), "an input for each column")
        x = (functional.pad(x, (0, 1)) if self._in % 2 else x).contiguous()
        require(x.device.type == "cpu", "numbers on the CPU")
        y = x.new_empty(len(x), self._out)
        one = self._call  # filled in by hand: a small model's products take no longer than ``call`` does
        one.x, one.y, one.rows = x.data_ptr(), y.data_ptr(), len(x)
        one.threads = threads_for(self._packed.numel())
        self._function(ctypes.byref(one))
        return y


PACKED_ROWS = 64
"""Number of rows that packed matrices are laid out for. The layout suits other numbers too."""


class Product:
    """One or more linears over the same input: ``y_i = x W_i^T + b_i``, adapters included.

    Args:
        linears: the layers.
        dtype: of computation and output.
        widths: of the parts of the output; otherwise each linear's output is one.
        native: whether native kernels compute products where they are meant for them.
    """

    def __init__(
        self, linears: Sequence[Linear], dtype: torch.dtype, widths: Sequence[int] = (), *, native: bool = False
    ) -> None:
        self._linears = tuple(linears)
        self._dtype = dtype
        self._casts = any(
            linear.weight.dtype != dtype or getattr(linear.module, "is_table", False) for linear in linears
        )
        self._weights: list[Tensor] = []
        self._biases: list[Tensor | None] = []
        self._packed: Tensor | None = None
        self._wants_native = native
        self._native: NativeProduct | PackedProduct | None = None
        self._widths = [linear.weight.shape[0] for linear in linears]
        self._cuts = list(widths) if len(widths) > len(linears) else None
        self._adapters: list[tuple[int, Tensor, Tensor, float]] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the present weights."""
        weights: list[Tensor] = [linear.weight.detach() for linear in self._linears]
        biases = [None if linear.bias is None else linear.bias.detach() for linear in self._linears]
        bias = _side_by_side(biases, weights, self._dtype) if self._casts else None
        if self._casts and self._wants_native and self._dtype == torch.bfloat16 and PackedProduct.takes(weights):
            if not isinstance(self._native, PackedProduct):
                self._native = PackedProduct(self._widths, weights[0].shape[1])
            self._native.pack(weights, bias)
        else:
            self._read(weights, biases, bias)
        self._adapters = []
        for number, linear in enumerate(self._linears):
            for adapter in linear.adapters:
                pair = adapter.a.detach().to(self._dtype), adapter.b.detach().to(self._dtype)
                self._adapters.append((number, *pair, adapter.scale))

    def _read(self, weights: list[Tensor], biases: list[Tensor | None], bias: Tensor | None) -> None:
        if self._casts:
            if not self._weights:
                self._weights = [weights[0].new_empty(sum(self._widths), weights[0].shape[1], dtype=self._dtype)]
            # One linear at a time, which avoids a temporary matrix in the precision of the weights.
            for part, weight in zip(self._weights[0].split(self._widths), weights, strict=True):
                part.copy_(weight)
            self._biases = [bias]
            self._packed = _packed(self._weights[0])
            if self._packed is not None:
                self._weights = []
        else:
            self._weights, self._biases = weights, biases
        takes = self._wants_native and self._weights and multiplies(self._weights)
        self._native = NativeProduct(self._weights, self._biases) if takes else None

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """``x`` of shape ``[N, in]`` to the parts of the output, ``[N, out_i]``."""
        if x.dtype != self._dtype:
            x = x.to(self._dtype)
        if self._native is not None:
            parts = self._split(self._native(x))
        elif self._packed is not None:
            parts = self._split(torch.ops.mkldnn._linear_pointwise(x, self._packed, self._biases[0], "none", [], ""))
        elif self._casts:
            parts = self._split(functional.linear(x, self._weights[0], self._biases[0]))
        else:
            parts = [functional.linear(x, w, b) for w, b in zip(self._weights, self._biases, strict=True)]
        for number, a, b, scale in self._adapters:
            parts[number].add_(functional.linear(functional.linear(x, a), b), alpha=scale)
        return parts if self._cuts is None else parts[0].split_with_sizes(self._cuts, -1)

    def _split(self, both: Tensor) -> Sequence[Tensor]:
        # Called a hundred times per decode step, so it bypasses torch's wrapper.
        return both.split_with_sizes(self._widths, -1) if len(self._widths) > 1 else (both,)

    def __call__(self, x: Tensor) -> Tensor:
        """The output of a single linear."""
        (y,) = self.parts(x)
        return y


def _packed(weight: Tensor) -> Tensor | None:
    """A bfloat16 matrix on a CPU in oneDNN's own layout, which saves rearranging it in each product. None if oneDNN has
    no such layout, or no bfloat16 products on this processor. Products are bit-equal."""
    usable = kind_of(weight.device) == "cpu" and weight.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    if not usable or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return None
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return packed


def _side_by_side(biases: Sequence[Tensor | None], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([w.new_zeros(w.shape[0]) if bias is None else bias for bias, w in pairs]).to(dtype)


@dataclass(slots=True)
class LayerWeights:
    """The products of a layer."""

    qkv: Product
    output: Product
    gate_up: Product | None
    """None: the MLP has experts, which the model's own module computes."""
    down: Product | None
    experts: PreparedExperts | NarrowExperts | None = None
    """None: the model's own module computes them in every step anew, or there are none."""


class DecoderWeights:
    """The products and norm factors of a model.

    Args:
        anatomy: the model.
        dtype: of the products.
        native: see ``Product``; whether native kernels compute experts, too.
    """

    def __init__(self, anatomy: Anatomy, dtype: torch.dtype, *, native: bool = False) -> None:
        on_cuda = kind_of(anatomy.head.weight.device) == "cuda"

        def of_mlp(mlp: Gated | Experts) -> tuple[Any, Any, PreparedExperts | NarrowExperts | None]:
            if isinstance(mlp, Experts):
                prepared = PreparedExperts.of(mlp.module, dtype) if native else None
                return None, None, NarrowExperts(mlp.module, dtype) if on_cuda and mlp.module else prepared
            gate_up = Product(mlp.gate_up.linears, dtype, mlp.gate_up.widths, native=native)
            return gate_up, Product([mlp.down], dtype, native=native), None

        self.anatomy = anatomy
        self.dtype = dtype
        self.native = native
        self.layers = [
            LayerWeights(
                Product(layer.qkv.linears, dtype, layer.qkv.widths, native=native),
                Product([layer.output], dtype, native=native),
                *of_mlp(layer.mlp),
            )
            for layer in anatomy.layers
        ]
        head_dtype = torch.float32 if is_float32(anatomy.head.module) else dtype
        self.head = Product([anatomy.head], head_dtype, native=native)
        self.refreshed = 0
        """How often the weights were read: once per update that changed them."""
        self._factors: dict[int, Tensor] = {}
        self._stamp: tuple[object, ...] = ()
        self._read = anatomy.parameters()

    def refresh(self, version: int) -> None:
        """Read the weights again if they have changed. ``version`` counts updates, torch counts changes in place, and
        the address shows replaced storage. A write through ``.data`` changes neither: raise the version then."""
        stamp = (version, *((weight.data_ptr(), weight._version) for weight in self._read))
        if stamp == self._stamp:
            return
        for layer in self.layers:
            for product in (layer.qkv, layer.output, layer.gate_up, layer.down, layer.experts):
                if product is not None:
                    product.refresh()
        self.head.refresh()
        self._factors.clear()
        self._stamp = stamp
        self.refreshed += 1

    def factor(self, norm: Norm) -> Tensor:
        """The factor of a norm."""
        if not norm.shifted:
            return norm.weight.detach()
        key = id(norm.weight)
        if key not in self._factors:
            weight = norm.weight.detach()
            self._factors[key] = 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        return self._factors[key]
