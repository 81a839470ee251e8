"""Layout ``full``: FSDP2 holds a shard of every weight, gradient and optimizer state, and gathers weights per layer.

FSDP2 gathers a module's weights before its ``forward`` and frees them after it; in the backward pass it gathers them
again, and then scatters the sums of the gradients. Passes that do not go through ``forward`` use ``call_gathered``.

Where matrix products are in half precision, a layer's matrices are gathered in it. Autocast would round them so, and
their gradients too, which are added up in float32: results have the same bits. The rest of such a layer (norms, biases,
routers, convolutions) is used in float32. Since FSDP2 wants gradients of one dtype in a layer, and the rest is small,
it is held as in the layout ``optimizer``: whole on every rank, with its gradient and the optimizer's state divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from cohort.errors import ConfigError, ModelError
from cohort.parallel.layout import Layout
from cohort.parallel.sharded import Sharded, rank_mesh
from cohort.parallel.world import World

T = TypeVar("T")
METHOD, WHOLE = "cohort_call", "cohort_whole"
"""The method of a sharded module that ``call_gathered`` uses; whether its weights stay gathered, as in sampling, whose
decode steps would spend a third of their time in FSDP's hooks."""
SMALL = 1 / 16
"""Most of a layer that every rank holds whole."""


def call_gathered(module: nn.Module, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, with the module's own weights gathered as in its ``forward``, and gathered again in the
    backward pass when a gradient reaches the result. Without sharding, the call alone.

    The arguments are the tensors that the module's input gradients belong to; everything else is to be bound into the
    function, since FSDP2 copies the containers and dataclasses in which it finds tensors. The result holds every tensor
    through which gradients come back, and no views.
    """
    method: Callable[..., T] | None = getattr(module, METHOD, None)
    whole = getattr(module, WHOLE, False) and not torch.is_grad_enabled()
    return function(*arguments) if method is None or whole else method(function, *arguments)


def is_gathered(module: nn.Module) -> bool:
    """Whether a module's weights are gathered when it is called, and freed afterwards."""
    return hasattr(module, METHOD)


@contextmanager
def released(model: nn.Module) -> Iterator[None]:
    """A block of forward passes without a backward pass, after which the root's weights are freed as well. Until then
    they stay gathered, and what is written to them is lost."""
    try:
        yield
    finally:
        if is_gathered(model):
            model.reshard()  # type: ignore[operator]


def class_before_sharding(module: nn.Module) -> type:
    """The class of a module; of a sharded one, whose class FSDP2 replaces by a subclass, the class before."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed.fsdp"))


class Full(Sharded):
    """See the module.

    Args:
        world: the ranks.
        offload: whether shards, their gradients and the optimizer's state are in main memory. Needs CUDA.

    Raises:
        ConfigError: PyTorch is too old.
    """

    passes_exchange = True

    def __init__(self, world: World, *, offload: bool = False) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"parallel.layout 'full' needs PyTorch 2.13 or later, and this is {torch.__version__}: update it, or "
                "set parallel.layout to 'optimizer'"
            )
        super().__init__(world)
        self._offload = offload
        self._layers: dict[int, list[Any]] = {}

    def shard(self, model: nn.Module, compute: torch.dtype = torch.float32) -> None:
        """See ``Layout``. Each decoder layer is gathered by itself; embedding, head and last norm with the root, in the
        dtype that they are trained in."""
        from torch.distributed import fsdp

        layers: list[Any] = decoder_layers(model)
        where = fsdp.CPUOffloadPolicy() if self._offload else fsdp.OffloadPolicy()
        shard = partial(fsdp.fully_shard, mesh=rank_mesh(self.world, model), offload_policy=where)
        narrow = fsdp.MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
        for module in layers:
            rest = used_wide(module) if compute.itemsize < torch.float32.itemsize else None
            policy = fsdp.MixedPrecisionPolicy() if rest is None else narrow
            shard(module, reshard_after_forward=True, mp_policy=policy, ignored_params=rest)
        # The head runs outside of the root's forward pass, so that the root keeps its weights until the backward pass.
        shard(model, reshard_after_forward=False)
        for module in (*layers, model):
            assert isinstance(module, fsdp.FSDPModule)
            # Gradients are summed, not averaged: each token is weighted over all ranks. Neither setting is recursive.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            setattr(module, METHOD, lambda function, *arguments: function(*arguments))
            fsdp.register_fsdp_forward_method(module, METHOD)  # type: ignore[arg-type]
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        self._layers[id(model)] = layers

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """See ``Layout``."""
        layers = self._layers[id(model)]
        modules: list[Any] = [*layers, model]
        for module in modules:
            # Forward passes in the block do not free weights: ranks make different numbers of them.
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
            setattr(module, WHOLE, True)
        try:
            yield
        finally:
            for module in modules:
                setattr(module, WHOLE, False)
                module.reshard()
                module.set_reshard_after_forward(module is not model, recurse=False)


def used_wide(layer: nn.Module) -> set[nn.Parameter] | None:
    """The parameters of a layer that autocast does not round: all but the matrices of linear layers and experts. None:
    they are too much of it."""
    wide = set(layer.parameters())
    most = SMALL * sum(weight.numel() for weight in wide)
    for module in layer.modules():
        # What transformers computes as experts has this attribute.
        axes = 2 if type(module) is nn.Linear else 3 if hasattr(module, "is_transposed") else None
        wide -= {weight for weight in module.parameters(recurse=False) if weight.ndim == axes}
    return wide if sum(weight.numel() for weight in wide) <= most else None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers keeps on one device: the decoder's layers.

    Raises:
        ModelError: the model does not name them.
    """
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ModelError(
            f"parallel.layout 'full' gathers weights per layer, and {type(model).__name__} does not name its layers "
            "(_no_split_modules): set parallel.layout to 'optimizer' or 'replicate'"
        )
    return layers


# ----------------------------------------
# The layout of the settings.


def layout_of(name: str, world: World, *, offload: bool = False) -> Layout:
    """The layout of ``parallel.layout`` and ``parallel.offload``. With one rank there is nothing to divide: without
    ``offload``, all layouts are "replicate"."""
    if name == "full" and (world.size > 1 or offload):
        return Full(world, offload=offload)
    return (Sharded if name == "optimizer" and world.size > 1 else Layout)(world)
