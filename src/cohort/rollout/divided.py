"""Sampling on several ranks: each samples its share of the prompts, and all get all groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from cohort.errors import EpisodeError
from cohort.parallel import World, agreed, prompt_shares
from cohort.rollout.engine import Sampler, Watch, samplings_of
from cohort.rollout.philox import RNGKey
from cohort.rollout.settings import Sampling
from cohort.types import Completion, Group, Prompt

log = logging.getLogger("cohort.rollout")


class DividedSampler(Sampler):
    """A sampler whose prompts are divided over the ranks.

    A draw depends on its key and the prompt's uid, so it is the same on any rank. Every rank calls ``generate`` with
    the same prompts; the callbacks of ``Watch`` are called for the rank's own. See ``parallel.prompt_shares``.

    Args:
        sampler: samples a rank's share.
        world: the ranks.
        weights: a block in which the sampler's weights are whole; see ``Layout.whole``.
    """

    def __init__(
        self, sampler: Sampler, world: World, weights: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.sampler = sampler
        self.world = world
        self.weights = weights

    def on(self, world: World) -> DividedSampler:
        """The same with exchanges in another group of the same ranks."""
        return DividedSampler(self.sampler, world, self.weights)

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: Sampling | Sequence[Sampling],
        key: RNGKey,
        watch: Watch | None = None,
    ) -> list[Group]:
        """As ``Sampler.generate``. Raises as ``parallel.agreed`` when a rank fails."""
        samplings = samplings_of(prompts, num_generations, sampling)
        shares = prompt_shares(prompts, self.world.size)
        own = shares[self.world.rank]
        sampled: list[Group] = []

        def sample_own() -> tuple[list[tuple[Prompt | None, tuple[Completion, ...]]], str]:
            failure = ""
            if own or getattr(self.sampler, "together", False):
                mine, theirs = [prompts[index] for index in own], [samplings[index] for index in own]
                mapped = watch and _renumbered(watch, own)
                try:
                    sampled.extend(self.sampler.generate(mine, num_generations, theirs, key, mapped))
                except EpisodeError as error:
                    if error.failed is None:
                        raise
                    sampled.extend(error.failed)
                    failure = str(error)
            return [  # the other ranks have the prompts, unless an environment has added to one
                (None if group.prompt is prompts[index] else group.prompt, group.completions)
                for index, group in zip(own, sampled, strict=True)
            ], failure

        groups: list[Group | None] = [None] * len(prompts)
        with self.weights():
            each = agreed(self.world, sample_own)
        for indices, (found, _) in zip(shares, each, strict=True):
            for index, (prompt, completions) in zip(indices, found, strict=True):
                groups[index] = Group(prompt or prompts[index], completions)
        failures = [failure for found, failure in each if found]
        if failures and all(failures):  # every episode of every rank
            raise EpisodeError(failures[0])
        if failure := each[self.world.rank][1]:
            log.warning("%s on this rank, and are left out", failure)
        for index, group in zip(own, sampled, strict=True):
            groups[index] = group
        return [group for group in groups if group is not None]

    def metrics(self) -> dict[str, float]:
        """Each number's mean over the ranks that have it."""
        each = self.world.gather(self.sampler.metrics())
        names = dict.fromkeys(name for some in each for name in some)
        values = {name: [some[name] for some in each if name in some] for name in names}
        return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _renumbered(watch: Watch, own: Sequence[int]) -> Watch:
    """The callbacks, given the caller's indices of prompts."""
    on_token, on_completion, on_prompt = watch.on_token, watch.on_completion, watch.on_prompt
    return replace(
        watch,
        on_token=on_token and (lambda event: on_token(replace(event, prompt_index=own[event.prompt_index]))),
        on_completion=on_completion and (lambda index, *rest: on_completion(own[index], *rest)),
        on_prompt=on_prompt and (lambda index, prompt: on_prompt(own[index], prompt)),
    )
