"""What several ranks need before they train together: settings that allow it, and the same model and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TypeGuard

from torch import Tensor

from cohort.config import GRPOConfig
from cohort.errors import ConfigError, ModelError
from cohort.parallel import Layout, World, layout_of, together
from cohort.parallel.full import released
from cohort.policy import Policy
from cohort.policy.choose import MAX_GAP
from cohort.policy.load import resolve_device
from cohort.rollout import Engine, LocalEngine
from cohort.train.memory import TokenBudget


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
    if config.parallel.offload and resolve_device(config.model.device).type != "cuda":
        raise ConfigError("parallel.offload needs CUDA, and the model's device is the CPU: set it to false")
    return layout_of(config.parallel.layout, world, offload=config.parallel.offload)


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


def divide_policy(layout: Layout, policy: Policy, reference: Policy | None) -> None:
    """Divide the policy, and a reference with weights of its own, over the ranks. Every rank must call.

    How the models are run was chosen when they were whole, so that no rank falls back to a slower way afterwards.

    Raises:
        ModelError: the divided model computes something else.
    """
    own = [] if reference is None or reference.model is policy.model else [reference]
    if layout.passes_exchange and reference is not None:
        for each in own:  # each model's weights are divided, also those that both have
            each.share_nothing(policy)
        reference.passes  # noqa: B018 - chosen now
    for each in (policy, *own):
        before = trial_logps(each) if layout.passes_exchange else None
        layout.shard(each.model, each.precision.compute)
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


def common_budget(layout: Layout, measure: Callable[[], TokenBudget]) -> TokenBudget:
    """The measured budget, with the fewest tokens of all ranks: they cut the same packs. Every rank must call."""
    # A rank that fails in a pass that exchanges weights cannot tell the others: its error ends the run.
    budget = measure() if layout.passes_exchange else together(layout.world, measure)
    budget.tokens = min(layout.world.gather(budget.tokens))
    return budget


@contextmanager
def whole_to_sample(layout: Layout, engine: Engine) -> Iterator[None]:
    """Around sampling: weights that the engine reads where they are trained are whole. Every rank must call."""
    if not reads_trained(engine):
        yield
        return
    with layout.whole(engine.policy.model):
        yield
    if layout.passes_exchange:
        engine.sleep()  # copies in compute precision would be whole, too


def reads_trained(engine: Engine) -> TypeGuard[LocalEngine]:
    """Whether an engine samples with the very weights that are trained."""
    return isinstance(engine, LocalEngine) and engine.trained is engine.policy


def update_engine(engine: Engine, policy: Policy, layout: Layout) -> None:
    """Give an engine the policy's present weights, whole if it copies or sends them. Every rank must call."""
    with nullcontext() if reads_trained(engine) else layout.whole(policy.model):
        engine.update_weights(policy.version)
