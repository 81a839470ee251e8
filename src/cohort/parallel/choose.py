"""The layout of the settings."""

from __future__ import annotations

from cohort.parallel.full import Full
from cohort.parallel.layout import Layout
from cohort.parallel.sharded import Sharded
from cohort.parallel.world import World


def layout_of(name: str, world: World, *, offload: bool = False) -> Layout:
    """The layout of ``parallel.layout`` and ``parallel.offload``. With one rank there is nothing to divide: without
    ``offload``, all layouts are "replicate"."""
    if name == "full" and (world.size > 1 or offload):
        return Full(world, offload=offload)
    return (Sharded if name == "optimizer" and world.size > 1 else Layout)(world)
