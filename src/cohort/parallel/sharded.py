"""Layout ``optimizer``: every rank holds the weights; gradients and the optimizer's state are divided.

After the passes, the gradients are summed over the ranks and each rank keeps its rows of the sums. It steps its rows
of the weights, and the ranks exchange them. No pass exchanges anything, so that ranks may make different numbers of
passes and repeat them. (FSDP2 without resharding would hold the shards beside the weights, and needs a pass of weight
0 to scatter the sums, with hooks that a failed pass leaves half done.)

A row is an entry of a weight's first axis. Rank r has the rows from ``r * ceil(rows / size)`` on, as many: fewer at the
end, as in ``torch.chunk`` and FSDP2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cohort.errors import ModelError
from cohort.parallel.layout import Layout, buckets, trainable
from cohort.parallel.world import World


@dataclass(frozen=True, slots=True)
class Shard:
    """The rows of a weight that belong to this rank."""

    whole: nn.Parameter
    """The weight of the model."""
    part: nn.Parameter
    """A DTensor over the ranks; its local tensor is a view of the rows in ``whole``."""
    rows: int
    """Rows of every rank but the last ones."""

    @classmethod
    def of(cls, whole: nn.Parameter, world: World, mesh: Any, name: str) -> Shard:
        """Cut a weight's rows."""
        if not whole.ndim:
            raise ModelError(f"parallel.layout 'optimizer' divides rows, and {name} is a number: set 'replicate'")
        rows = -(-len(whole) // world.size)
        local = whole.detach()[world.rank * rows : (world.rank + 1) * rows]
        return cls(whole, nn.Parameter(_divided(local, mesh, whole)), rows)

    @property
    def local(self) -> Tensor:
        """The rows, without a graph."""
        local: Tensor = self.part.detach().to_local()  # type: ignore[attr-defined]
        return local

    def padded(self, values: Tensor, size: int) -> Tensor:
        """Rows as ``size`` ranks have them, with zeros for those that are missing, ``[size, numbers of a rank]``."""
        missing = size * self.rows - len(values)
        return functional.pad(values, (0, 0) * (values.ndim - 1) + (0, missing)).reshape(size, self.width)

    @property
    def width(self) -> int:
        """Numbers of every rank but the last ones."""
        return self.rows * self.whole.shape[1:].numel()


class Sharded(Layout):
    """See the module."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._shards: list[Shard] = []

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """See ``Layout``."""
        wanted, mesh = trainable(model), rank_mesh(self.world, model)
        for name, weight in wanted.items():
            if not hasattr(weight, "device_mesh"):  # of FSDP2's shards
                self._shards.append(Shard.of(weight, self.world, mesh, name))
                wanted[name] = self._shards[-1].part
        return wanted

    @torch.no_grad()
    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: ARG002 - their shards are known
        """See ``Layout``. The gradients of the weights end up in those of their shards."""
        size = self.world.size
        if not self._shards:
            return
        known = torch.tensor([shard.whole.grad is not None for shard in self._shards], dtype=torch.int32)
        counts = self.world.sum_(known).tolist()
        each = _in_buckets([shard for shard, count in zip(self._shards, counts, strict=True) if count])

        def rows(shard: Shard) -> Tensor:
            grad, shard.whole.grad = shard.whole.grad, None  # freed as soon as the bucket holds a copy
            return shard.padded(torch.zeros_like(shard.whole) if grad is None else grad, size)

        sums = self.world.scatter_sums(torch.cat([rows(shard) for shard in shards], dim=1) for shards in each)
        for shards, own in zip(each, sums, strict=True):
            for shard, piece in zip(shards, own[0].split([shard.width for shard in shards]), strict=True):
                local = piece.view(shard.rows, *shard.whole.shape[1:])[: len(shard.local)]
                shard.part.grad = _divided(local, shard.part.device_mesh, shard.whole)  # type: ignore[attr-defined]

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See ``Layout``. Some gradients may be in main memory and others on a GPU; the norm is where the first is."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms: list[Tensor] = []
        for device in dict.fromkeys(grad.device for grad in grads):
            norm: Any = nn.utils.get_total_norm([grad for grad in grads if grad.device == device])
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        total = norms[0] if len(norms) == 1 else nn.utils.get_total_norm(norms)
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total

    @torch.no_grad()
    def stepped(self) -> None:
        """See ``Layout``. Every rank gets the rows that the others have stepped."""
        each = _in_buckets(self._shards)
        flats = (torch.cat([shard.padded(shard.local, 1) for shard in shards], dim=1) for shards in each)
        for shards, everyone in zip(each, self.world.joins(flats), strict=True):
            for shard, pieces in zip(shards, everyone.split([shard.width for shard in shards], dim=1), strict=True):
                weight = shard.whole
                weight.copy_(pieces.reshape(-1, *weight.shape[1:])[: len(weight)])


def rank_mesh(world: World, model: nn.Module) -> Any:
    """The ranks as torch's device mesh. One rank that ``torchrun`` has not started gets a group of its own."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    weight: Any = next(model.parameters())
    if hasattr(weight, "device_mesh"):
        return weight.device_mesh
    device = weight.device.type
    if world.size == 1 and not dist.is_initialized():
        backend = {"cuda": "cpu:gloo,cuda:nccl"}.get(device, "gloo")
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device, (world.size,))


def _in_buckets(shards: Sequence[Shard]) -> list[list[Shard]]:
    by_weight = {shard.whole: shard for shard in shards}
    return [[by_weight[weight] for weight in bucket] for bucket in buckets(list(by_weight))]


def _divided(local: Tensor, mesh: Any, whole: Tensor) -> Tensor:
    """A tensor of the shape of ``whole``, of which each rank has its own rows."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Rows

    made: Tensor = DTensor.from_local(local, mesh, [Rows(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    return made
