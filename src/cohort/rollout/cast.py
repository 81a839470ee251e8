"""Copies of a model's matrices in the compute dtype, for many small passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cohort.parallel.full import is_gathered
from cohort.policy import Policy


class CastWeights:
    """Matrices of linear layers in the compute dtype, which stand for the model's own inside ``used``: autocast would
    cast them again in each decode step. Matrices that an embedding shares stay as they are. Without autocast, or with
    weights that are gathered per layer, there are none.

    Args:
        policy: its present weights are copied.
    """

    @torch.no_grad()
    def __init__(self, policy: Policy) -> None:
        compute, modules = policy.precision.compute, list(policy.model.modules())
        embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
        shared = {id(weight) for module in embeddings for weight in module.parameters()}
        casts = compute.itemsize < policy.precision.master.itemsize and not is_gathered(policy.model)
        linears = [module for module in modules if casts and type(module) is nn.Linear]
        self._pairs: list[tuple[nn.Linear, Tensor]] = [
            (linear, linear.weight.to(compute))
            for linear in linears
            if linear.weight.dtype != compute and id(linear.weight) not in shared
        ]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the copies inside the block, which needs no gradients."""
        before = [module.weight.data for module, _ in self._pairs]
        try:
            for module, copy in self._pairs:
                module.weight.data = copy
            yield
        finally:
            for (module, _), weight in zip(self._pairs, before, strict=True):
                module.weight.data = weight
