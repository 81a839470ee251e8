"""How the ranks hold parameters, gradients and optimizer state.

The loop asks a layout after loading, after a rank's passes, before and after the optimizer's step, and where the whole
weights are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from cohort.parallel.world import World

BUCKET_BYTES = 64 * 2**20
"""Gradients and weights travel in pieces of this size: few enough messages, little memory."""


class Layout:
    """How the ranks hold what is trained. This class is ``replicate``: every rank holds everything, gradients are added
    up after the passes, and each rank makes the same step."""

    passes_exchange = False
    """Whether forward and backward passes exchange weights, so that every rank must make the same number of them, and
    a rank cannot stop in the middle of them."""

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()

    def shard(self, model: nn.Module, compute: torch.dtype = torch.float32) -> None:
        """Divide a loaded model over the ranks, in place: after the reference was copied from it, before the optimizer
        is made.

        Args:
            model: the model.
            compute: the dtype of matrix products.
        """

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """What the optimizer steps, by the names of the model's parameters: the parameters that require a gradient, or
        this rank's shards of them. Called once, after ``shard``."""
        return trainable(model)

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up the gradients of all ranks, in place, after every rank has made its passes. A rank that made none has
        no gradients; a parameter that has none on any rank keeps none."""
        if self.world.size == 1:
            return
        known = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        some = [p for p, count in zip(parameters, self.world.sum_(known).tolist(), strict=True) if count]
        each = list(buckets(some))
        flats = (torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in b]) for b in each)
        for bucket, flat in zip(each, self.world.sums(flats), strict=True):
            for parameter, grad in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if parameter.grad is None:
                    parameter.grad = grad.view_as(parameter).clone()
                else:
                    parameter.grad.copy_(grad.view_as(parameter))

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the summed gradients to a norm of at most ``max_norm``, in place; returns the norm before, the same on
        every rank."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def stepped(self) -> None:
        """Let every rank have the weights that the optimizer's step has changed."""

    def whole(self, model: nn.Module) -> AbstractContextManager[None]:  # noqa: ARG002
        """A block in which every rank has the model's whole weights: to sample, evaluate, save. Entered on every
        rank."""
        return nullcontext()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters whose numbers travel in one message: of one type and device, at most ``BUCKET_BYTES`` unless
    one alone is larger."""
    bucket: list[nn.Parameter] = []
    filled = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        alike = not bucket or (parameter.dtype, parameter.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (filled + size > BUCKET_BYTES or not alike):
            yield bucket
            bucket, filled = [], 0
        bucket.append(parameter)
        filled += size
    if bucket:
        yield bucket
