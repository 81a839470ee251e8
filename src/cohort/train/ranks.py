"""What several ranks need before they train together: settings that allow it, and the same model and data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn

from cohort.config import GRPOConfig
from cohort.errors import ConfigError
from cohort.parallel import Layout, World, layout_of


def checked_layout(config: GRPOConfig, world: World) -> Layout:
    """The layout of the settings.

    Raises:
        ConfigError: something else in the settings excludes it, or several ranks; says what to do.
    """
    if world.size > 1 and config.model.device.startswith("cuda:"):
        raise ConfigError(
            f"model.device is {config.model.device!r} on each of {world.size} ranks: set 'auto' or 'cuda', which is "
            "the device of the rank's number on its machine"
        )
    return layout_of(config.parallel.layout, world)


def seed_of(seed: int, world: World) -> int:
    """The seed of a rank's global random generators, so that dropout differs between ranks; rank 0 has the run's."""
    return (seed + world.rank * 0x9E3779B1) % 2**32


def check_same(world: World, config: GRPOConfig, facts: Mapping[str, str]) -> None:
    """Check that every rank has the same settings, and the same further facts.

    Raises:
        ConfigError: names the first difference and its rank. Raised on every rank.
    """
    sections = {f"settings [{name}]": repr(getattr(config, name)) for name in type(config).model_fields}
    each = world.gather(sections | dict(facts))
    for rank, others in enumerate(each):
        for name, value in each[0].items():
            if others.get(name) != value:
                raise ConfigError(
                    f"rank {rank} of {world.size} has other {name} than rank 0 ({others.get(name)!s:.200}, not "
                    f"{value!s:.200}): start every rank with the same settings, files and seeds"
                )


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights, from the sum of each tensor's bytes: it tells a model that is initialised at random
    on each rank from one that is loaded."""
    sums = [
        (name, int(tensor.detach().contiguous().flatten().view(torch.uint8).sum(dtype=torch.int64)))
        for name, tensor in model.state_dict().items()
    ]
    return hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
