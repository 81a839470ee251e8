"""The matrix products of a decode step in float32, by a kernel that reads the weights where they are: see product.c."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.native import call, load, require, room, threads_for

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
