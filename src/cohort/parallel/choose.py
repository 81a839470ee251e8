"""The layout of the settings."""

from __future__ import annotations

from cohort.parallel.full import Full
from cohort.parallel.layout import Layout
from cohort.parallel.sharded import Sharded
from cohort.parallel.world import World


def layout_of(name: str, world: World) -> Layout:
    """The layout of ``parallel.layout``. With one rank there is nothing to divide: all layouts are "replicate"."""
    layouts: dict[str, type[Layout]] = {"optimizer": Sharded, "full": Full}
    return (layouts.get(name, Layout) if world.size > 1 else Layout)(world)
