"""A model's weights for the sampler's matrix products, in compute precision.

If that is the dtype of the weights, these are the trainer's parameters themselves. If not (bfloat16 over float32), one
copy in compute precision is made per update; matrices that share an input lie side by side in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from cohort.native import NativeProduct, PackedProduct, multiplies
from cohort.policy.anatomy import Anatomy, Layer
from cohort.policy.device import kind_of
from cohort.policy.experts import NarrowExperts, PreparedExperts
from cohort.policy.head import is_float32
from cohort.policy.parts import Experts, Gated, Joint, Linear, Norm

T = TypeVar("T", bound="Prepared")


class Product:
    """Linears over the same input, ``y_i = x W_i^T + b_i``, adapters included: what a ``Joint`` computes.

    Args:
        linears: the layers.
        dtype: of computation and output.
        widths: of the parts of the output; otherwise each linear's output is one.
        native: whether native kernels compute products where they are meant for them.
    """

    def __init__(
        self, linears: Sequence[Linear], dtype: torch.dtype, widths: Sequence[int] = (), *, native: bool = False
    ) -> None:
        self.linears = tuple(linears)
        self._dtype = dtype
        self._casts = any(
            linear.weight.dtype != dtype or getattr(linear.module, "is_table", False) for linear in linears
        )
        self._weights: list[Tensor] = []
        self._biases: list[Tensor | None] = []
        self._wants_native = native
        self._native: NativeProduct | PackedProduct | None = None
        self._outputs = [linear.weight.shape[0] for linear in linears]
        self.widths = tuple(widths or self._outputs)
        self._adapters: list[tuple[int, Tensor, Tensor, float]] = []

    @torch.no_grad()
    def refresh(self) -> None:
        """Read the present weights."""
        weights: list[Tensor] = [linear.weight.detach() for linear in self.linears]
        biases = [None if linear.bias is None else linear.bias.detach() for linear in self.linears]
        bias = _side_by_side(biases, weights, self._dtype) if self._casts else None
        if self._casts and self._wants_native and self._dtype == torch.bfloat16 and PackedProduct.takes(weights):
            if not isinstance(self._native, PackedProduct):
                self._native = PackedProduct(self._outputs, weights[0].shape[1])
            self._native.pack(weights, bias)
        else:
            self._read(weights, biases, bias)
        self._adapters = []
        for number, linear in enumerate(self.linears):
            for adapter in linear.adapters:
                pair = adapter.a.detach().to(self._dtype), adapter.b.detach().to(self._dtype)
                self._adapters.append((number, *pair, adapter.scale))

    def _read(self, weights: list[Tensor], biases: list[Tensor | None], bias: Tensor | None) -> None:
        if self._casts:
            if not self._weights:
                self._weights = [weights[0].new_empty(sum(self._outputs), weights[0].shape[1], dtype=self._dtype)]
            # One linear at a time, which avoids a temporary matrix in the precision of the weights.
            for part, weight in zip(self._weights[0].split(self._outputs), weights, strict=True):
                part.copy_(weight)
            self._biases = [bias]
        else:
            self._weights, self._biases = weights, biases
        takes = self._wants_native and multiplies(self._weights)
        self._native = NativeProduct(self._weights, self._biases) if takes else None

    def beside(self, x: Tensor) -> Sequence[Tensor]:
        """See ``Joint``. ``x`` of shape ``[N, in]``."""
        if x.dtype != self._dtype:
            x = x.to(self._dtype)
        if self._native is not None:
            outs: Sequence[Tensor] = [self._native(x)]
        else:
            outs = [functional.linear(x, w, b) for w, b in zip(self._weights, self._biases, strict=True)]
        if self._adapters:
            by_linear = outs if len(outs) == len(self.linears) else outs[0].split_with_sizes(self._outputs, -1)
            for number, a, b, scale in self._adapters:
                by_linear[number].add_(functional.linear(functional.linear(x, a), b), alpha=scale)
        return outs

    def apart(self, outs: Sequence[Tensor]) -> Sequence[Tensor]:
        """See ``Joint``."""
        # Called a hundred times per decode step, so it bypasses torch's wrapper.
        return outs if len(outs) == len(self.widths) else outs[0].split_with_sizes(self.widths, -1)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """See ``Joint``."""
        return self.apart(self.beside(x))


class Single(Product):
    """The product of one linear: what a ``Linear`` computes."""

    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """``[N, in]`` to ``[N, out]``."""
        (y,) = self.beside(x)
        return y


def _side_by_side(biases: Sequence[Tensor | None], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    if all(bias is None for bias in biases):
        return None
    pairs = zip(biases, weights, strict=True)
    return torch.cat([w.new_zeros(w.shape[0]) if bias is None else bias for bias, w in pairs]).to(dtype)


class PreparedNorm:
    """A ``Norm`` whose factor is made once per update."""

    def __init__(self, norm: Norm) -> None:
        self._norm, self.eps, self.centred = norm, norm.eps, norm.centred

    @property
    def weight(self) -> Tensor:
        """See ``Norm``."""
        return self._norm.weight

    def refresh(self) -> None:
        """Read the present weights."""
        weight = self._norm.weight
        self._factor = self._norm.factor(torch.promote_types(weight.dtype, torch.float32)).detach()

    def factor(self, dtype: torch.dtype) -> Tensor:
        """See ``Norm``."""
        return self._factor.to(dtype)


Prepared = Product | PreparedNorm | PreparedExperts | NarrowExperts


class DecoderWeights:
    """A model whose matrix products are computed in one dtype.

    Args:
        anatomy: the model.
        dtype: of the products.
        native: see ``Product``; whether native kernels compute experts, too.
    """

    def __init__(self, anatomy: Anatomy, dtype: torch.dtype, *, native: bool = False) -> None:
        self.dtype, self._native = dtype, native
        self._prepared: list[Prepared] = []
        self.anatomy = replace(anatomy, layers=tuple(map(self._layer, anatomy.layers)), norm=self._norm(anatomy.norm))
        """Its layers, with prepared parts in place of linear maps, norms and experts."""
        head_dtype = torch.float32 if is_float32(anatomy.head.module) else dtype
        self.head = self._made(Single([anatomy.head], head_dtype, native=native))
        self.refreshed = 0
        """How often the weights were read: once per update that changed them."""
        self._stamp: tuple[object, ...] = ()
        self._read = anatomy.parameters()

    def _made(self, part: T) -> T:
        self._prepared.append(part)
        return part

    def _single(self, linear: Linear) -> Any:
        return self._made(Single([linear], self.dtype, native=self._native))

    def _joint(self, joint: Joint) -> Any:
        return self._made(Product(joint.linears, self.dtype, joint.widths, native=self._native))

    def _layer(self, layer: Layer) -> Layer:
        qkv, output = self._joint(layer.qkv), self._single(layer.output)
        if isinstance(layer.mlp, Gated):
            mlp: Gated | Experts = Gated(self._joint(layer.mlp.gate_up), self._single(layer.mlp.down))
        else:
            mlp = replace(layer.mlp, prepared=self._experts(layer.mlp.module))
        around = ("before_attention", "after_attention", "before_mlp", "after_mlp")
        norms: dict[str, Any] = {name: self._norm(getattr(layer, name)) for name in around}
        if layer.qk_norms is not None:
            norms["qk_norms"] = tuple(map(self._norm, layer.qk_norms))
        return replace(layer, qkv=qkv, output=output, mlp=mlp, **norms)

    def _norm(self, norm: Norm | None) -> Any:
        return None if norm is None else self._made(PreparedNorm(norm))

    def _experts(self, module: Any) -> PreparedExperts | NarrowExperts | None:
        """None: the module computes them in every step anew."""
        found: PreparedExperts | NarrowExperts | None = None
        if module is not None and kind_of(next(module.parameters()).device) == "cuda":
            found = NarrowExperts(module, self.dtype)
        elif self._native:
            found = PreparedExperts.of(module, self.dtype)
        return None if found is None else self._made(found)

    def refresh(self, version: int) -> None:
        """Read the weights again if they have changed. ``version`` counts updates, torch counts changes in place, and
        the address shows replaced storage. A write through ``.data`` changes neither: raise the version then."""
        stamp = (version, *((weight.data_ptr(), weight._version) for weight in self._read))
        if stamp == self._stamp:
            return
        for part in self._prepared:
            part.refresh()
        self._stamp = stamp
        self.refreshed += 1
