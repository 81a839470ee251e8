"""What several ranks need before they train together: settings that allow it, and the same model and data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from cohort.config import GRPOConfig
from cohort.errors import ConfigError, ModelError
from cohort.parallel import Layout, World
from cohort.parallel.full import released
from cohort.policy import Policy
from cohort.policy.choose import MAX_GAP
from cohort.rollout import Engine, LocalEngine


def check_ranks(config: GRPOConfig, world: World) -> None:
    """Refuse settings that several ranks cannot serve.

    Raises:
        ConfigError: names the setting and what to do.
    """
    if world.size == 1:
        return
    if config.model.dropout:
        raise ConfigError(
            f"model.dropout draws from the global random generator, whose state a checkpoint stores once, and there "
            f"are {world.size} ranks: set model.dropout = false, or train with one rank"
        )
    if config.model.device.startswith("cuda:"):
        raise ConfigError(
            f"model.device is {config.model.device!r} on each of {world.size} ranks: set 'auto' or 'cuda', which is "
            "the device of the rank's number on its machine"
        )


def check_same(world: World, facts: Mapping[str, str]) -> None:
    """Check that every rank has read the same.

    Raises:
        ConfigError: names the first difference and its rank. Raised on every rank.
    """
    each = world.gather(dict(facts))
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


def divide_policy(layout: Layout, policy: Policy, reference: Policy | None) -> None:
    """Divide the policy, and a reference with weights of its own, over the ranks. Every rank must call.

    How the models are run was chosen when they were whole, so that no rank falls back to a slower way afterwards.

    Raises:
        ModelError: the divided model computes something else.
    """
    own = [] if reference is None or reference.model is policy.model else [reference]
    for each in (policy, *own):
        before = trial_logps(each) if layout.passes_exchange else None
        layout.shard(each.model)
        if before is not None:
            with released(each.model):
                gap = float((trial_logps(each) - before).abs().max())
            if not gap <= MAX_GAP[each.precision.compute]:
                raise ModelError(
                    f"divided over the ranks, the model computes log-probabilities that are {gap:.3g} nats off: set "
                    "parallel.layout to 'optimizer' or 'replicate'"
                )


def trial_logps(policy: Policy) -> Tensor:
    """Log-probs of a few tokens, computed as in an update: FSDP2 does more in passes with a graph."""
    token, length = 1, 5
    with policy.compute():
        return policy.logps([(token,) * length], [(token,) * length], 1.0).logps_N.detach()


def update_engine(engine: Engine, policy: Policy, layout: Layout) -> None:
    """Give an engine the policy's present weights, whole if it copies or sends them. Every rank must call."""
    reads = isinstance(engine, LocalEngine) and engine.trained is engine.policy
    with nullcontext() if reads else layout.whole(policy.model):
        engine.update_weights(policy.version)
