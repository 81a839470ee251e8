"""Weights that are NaN or infinite are found before anything is computed with them or written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cohort.errors import NonFiniteError
from cohort.policy.device import kind_of


@torch.no_grad()
def check_finite_weights(weights: Mapping[str, Tensor], where: str) -> None:
    """Check this rank's part of some tensors. Reads each once, and allocates nothing of their size.

    Args:
        weights: by name; sharded or not. Those whose numbers take one byte, as quantized ones, are skipped.
        where: what the weights belong to, for the error.

    Raises:
        NonFiniteError: names the first tensor that holds a NaN or an infinity.
    """
    own = {name: _own(tensor) for name, tensor in weights.items()}
    own = {name: t for name, t in own.items() if t.is_floating_point() and t.element_size() > 1 and t.numel()}
    if not own or bool(_some_norm(list(own.values())).isfinite()):
        return
    for name, tensor in own.items():
        if count := int((~tensor.isfinite()).sum()):
            raise NonFiniteError(f"{name} of {where} has {count:,} NaN or infinite values of {tensor.numel():,}")


def _some_norm(tensors: Sequence[Tensor]) -> Tensor:
    """A number that is finite only if all numbers in the tensors are; it may overflow otherwise."""
    if kind_of(tensors[0].device) == "cuda":
        return nn.utils.get_total_norm(tensors, math.inf)  # one kernel for many tensors
    return torch.stack([tensor.sum().double() for tensor in tensors]).sum()  # ten times as fast on a CPU


def _own(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.detach()
    return local.to_local() if hasattr(local, "to_local") else local
