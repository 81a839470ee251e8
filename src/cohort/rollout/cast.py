"""Copies of a model's matrices in the compute dtype, for many small passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cohort.parallel.full import is_gathered
from cohort.policy import Policy
from cohort.policy.passes import base_of


class CastWeights:
    """Matrices of a decoder's linear layers in the compute dtype, which stand for the model's own inside ``used``:
    autocast would cast them again in each decode step. Without autocast, or with weights that are gathered per layer,
    there are none.

    Args:
        policy: its present weights are copied.
    """

    @torch.no_grad()
    def __init__(self, policy: Policy) -> None:
        compute = policy.precision.compute
        casts = compute.itemsize < policy.precision.master.itemsize and not is_gathered(policy.model)
        linears = [module for module in base_of(policy.model).get_decoder().modules() if type(module) is nn.Linear]
        self._casts: list[tuple[dict[str, Any], Tensor, Tensor]] = [
            (linear._parameters, linear.weight, linear.weight.to(compute))
            for linear in linears
            if casts and linear.weight.dtype != compute
        ]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the copies inside the block, which needs no gradients. The modules hold them in place of their weights,
        which stay as they are: a policy may share them with its snapshot, and may be saved while that samples."""
        try:
            for parameters, _, copy in self._casts:
                parameters["weight"] = copy
            yield
        finally:
            for parameters, weight, _ in self._casts:
                parameters["weight"] = weight
