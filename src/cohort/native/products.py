"""Products of matrices by native kernels: in float32 from the weights where they are (product.c), in bfloat16 from a
copy in the layout of the kernels that multiply pairs of such numbers (packed_product.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cohort.native.build import load
from cohort.native.calls import call, has_pairs, require, room, structure, threads_for


def empty_packed(outputs: int, inputs: int) -> Tensor:
    """Memory for a matrix of ``[outputs, inputs]``: ``[panels, pairs of inputs, outputs of a panel, 2]``. The library
    must be available."""
    panel = 2 * load().cohort_lanes()
    return torch.empty(-(-outputs // panel), -(-inputs // 2), panel, 2, dtype=torch.bfloat16)


def pack(packed: Tensor, weights: Sequence[Tensor], *, transposed: bool = False) -> None:
    """Pack matrices below each other, or the transpose of that, into the memory of ``empty_packed``.

    Args:
        packed: written.
        weights: contiguous, ``[out_i, in]`` in float32 or bfloat16.
        transposed: the packed matrix is ``[in, all outputs]``.
    """
    call(
        "pack_transposed" if transposed else "pack", packed=packed,
        parts=torch.tensor([[weight.data_ptr(), len(weight)] for weight in weights]), count=len(weights),
        out=sum(map(len, weights)), narrow=weights[0].dtype == torch.bfloat16, **{"in": weights[0].shape[1]},
    )  # fmt: skip


def packed(weights: Sequence[Tensor], *, transposed: bool = False) -> Tensor:
    """Matrices below each other, ``[out_i, in]``, or the transpose of that, as ``many_rows`` reads them."""
    sizes = sum(map(len, weights)), weights[0].shape[1]
    memory = empty_packed(*(reversed(sizes) if transposed else sizes))
    pack(memory, [weight.contiguous() for weight in weights], transposed=transposed)
    return memory


def many_rows(x: Tensor, matrix: Tensor, bias: Tensor | None, outputs: int, inputs: int) -> Tensor:
    """``x W^T + b`` in bfloat16 of a matrix that is ``packed``, for the many rows of an update. ``bias``: from
    ``packed_bias``."""
    require(x.dtype == torch.bfloat16 and x.shape[-1] == inputs, "an input for each column")
    y = x.new_empty(*x.shape[:-1], outputs)
    x = (functional.pad(x, (0, 1)) if inputs % 2 else x).contiguous()
    sizes = {"rows": y.numel() // outputs, "out": outputs, "in": inputs + inputs % 2}
    call("many_rows", y=y, x=x, packed=matrix, bias=bias, **sizes)
    return y


def packed_bias(bias_O: Tensor, packed: Tensor) -> Tensor:
    """A bias rounded to bfloat16, in float32, with zeros for the outputs that the last panel lacks."""
    return functional.pad(bias_O.bfloat16().float(), (0, -len(bias_O) % packed.shape[2]))


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
