"""Layout ``full``: FSDP2 holds a shard of every weight, gradient and optimizer state, and gathers weights per layer.

FSDP2 gathers a module's weights before its ``forward`` and frees them after it; in the backward pass it gathers them
again, and then scatters the sums of the gradients. Passes that do not go through ``forward`` use ``call_gathered``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cohort.errors import ConfigError, ModelError
from cohort.parallel.layout import Layout
from cohort.parallel.sharded import clip_sharded, rank_mesh
from cohort.parallel.world import World

T = TypeVar("T")
METHOD = "cohort_call"
"""The method of a sharded module that ``call_gathered`` uses."""


def call_gathered(module: nn.Module, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, with the module's own weights gathered as in its ``forward``, and gathered again in the
    backward pass when a gradient reaches the result. Without sharding, the call alone.

    The arguments are the tensors that the module's input gradients belong to; everything else is to be bound into the
    function, since FSDP2 copies the containers and dataclasses in which it finds tensors. The result holds every tensor
    through which gradients come back, and no views.
    """
    method: Callable[..., T] | None = getattr(module, METHOD, None)
    return function(*arguments) if method is None else method(function, *arguments)


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


class Full(Layout):
    """See the module. Weights are gathered in the dtype that they are trained in.

    Raises:
        ConfigError: PyTorch is too old.
    """

    passes_exchange = True

    def __init__(self, world: World) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise ConfigError(
                f"parallel.layout 'full' needs PyTorch 2.13 or later, and this is {torch.__version__}: update it, or "
                "set parallel.layout to 'optimizer'"
            )
        super().__init__(world)
        self._layers: dict[int, list[Any]] = {}

    def shard(self, model: nn.Module) -> None:
        """See ``Layout``. Each decoder layer is gathered by itself; embedding, head and last norm with the root."""
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        mesh = rank_mesh(self.world, model)
        layers: list[Any] = decoder_layers(model)
        for module in layers:
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        # The head runs outside of the root's forward pass, so that the root keeps its weights until the backward pass.
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in (*layers, model):
            assert isinstance(module, FSDPModule)
            # Gradients are summed, not averaged: each token is weighted over all ranks. Neither setting is recursive.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            setattr(module, METHOD, _run)
            register_fsdp_forward_method(module, METHOD)  # type: ignore[arg-type]
        model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
        self._layers[id(model)] = layers

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See ``Layout``. The passes have done it."""

    def clip_gradients(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See ``Layout``."""
        return clip_sharded(parameters, max_norm)

    @contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """See ``Layout``."""
        layers = self._layers[id(model)]
        modules: list[Any] = [*layers, model]
        for module in modules:
            # Forward passes in the block do not free weights: ranks make different numbers of them.
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
            for layer in layers:
                layer.set_reshard_after_forward(True, recurse=False)


def _run(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


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
