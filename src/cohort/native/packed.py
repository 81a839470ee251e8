"""Matrices in the layout of the kernels that multiply pairs of bfloat16 numbers: see packed_product.c."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cohort.native.build import load
from cohort.native.calls import call


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


def packed_bias(bias_O: Tensor, packed: Tensor) -> Tensor:
    """A bias rounded to bfloat16, in float32, with zeros for the outputs that the last panel lacks."""
    return functional.pad(bias_O.bfloat16().float(), (0, -len(bias_O) % packed.shape[2]))
