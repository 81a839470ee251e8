"""TRL's arithmetic of batches: how its numbers become prompts, minibatches and iterations of a rollout.

TRL cuts one *generation batch* into ``steps_per_generation`` (S) pieces of ``per_device_train_batch_size`` x processes
completions, goes through them ``num_iterations`` (mu) times, and makes an optimizer step every
``gradient_accumulation_steps`` (GA) pieces. Cohort's rollout is what the updates share:

| | prompts of a rollout | minibatches | iterations |
|---|---|---|---|
| S a multiple of GA | of one generation batch | S / GA | mu |
| GA = k S, k divides mu | of one | 1 | mu / k: k passes within one step have equal gradients |
| GA = k S, mu divides k | of k / mu | 1 | 1: the weights do not change between them |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.errors import ConfigError, DataError

FOLLOWING = ("steps_per_generation", "generation_batch_size")
"""Fields that follow from the others where they are unset."""
COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations", "num_iterations", *FOLLOWING)
"""Fields that hold positive integers."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The batches of a run, in TRL's terms and in Cohort's."""

    steps_per_generation: int
    generation_batch_size: int
    """Completions of one generation, over all processes."""
    accumulation: int
    """``gradient_accumulation_steps``."""
    trl_iterations: int
    """TRL's ``num_iterations``."""
    num_generations: int
    prompts_per_step: int
    """Prompts of a rollout."""
    minibatches: int
    num_iterations: int

    @classmethod
    def of(cls, args: Any, world_size: int) -> Batch:
        """The batches of TRL's arguments.

        Raises:
            ConfigError: a number does not divide another, or an optimizer step would share a generation or a group
                with another one.
        """
        per_device, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        group, iterations = args.num_generations, args.num_iterations
        for name in COUNTS:
            count = getattr(args, name)
            if (count or name not in FOLLOWING) and (not isinstance(count, int) or count < 1):
                raise ConfigError(f"{name} must be a positive integer, got {count!r}")
        if group < 2:
            raise ConfigError(f"num_generations must be at least 2 to compare the completions of a prompt, got {group}")
        steps, size = _generation(args, per_device * world_size)
        if size % group:
            raise ConfigError(
                f"generation_batch_size ({size}) must be divisible by num_generations ({group}): it is "
                f"per_device_train_batch_size ({per_device}) x processes ({world_size}) x steps_per_generation "
                f"({steps})"
            )
        prompts = size // group
        rollout = _rollout(prompts, steps, accumulation, iterations)
        batch = cls(steps, size, accumulation, iterations, group, *rollout)
        if batch.prompts_per_step % batch.minibatches:
            raise ConfigError(
                f"a generation of {prompts} prompts makes {batch.minibatches} optimizer steps (steps_per_generation "
                f"{steps} / gradient_accumulation_steps {accumulation}), and groups are not parted between them here: "
                f"raise gradient_accumulation_steps, or lower num_generations ({group})"
            )
        return batch

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps that use one rollout."""
        return self.minibatches * self.num_iterations

    def max_steps(self, args: Any, num_prompts: int | None) -> int:
        """Optimizer steps of the run as TRL counts them, ``state.max_steps``.

        An epoch of n prompts has floor(n / u) generations of u prompts, and the optimizer steps of those, rounded up.

        Args:
            args: ``max_steps``, or else ``num_train_epochs``, counts.
            num_prompts: prompts of the training data; None: streamed.

        Raises:
            ConfigError: the data is streamed, and ``max_steps`` is not set.
            DataError: the data has fewer prompts than one generation.
        """
        prompts = self.generation_batch_size // self.num_generations
        if num_prompts is None and args.max_steps <= 0:
            raise ConfigError("the training data is streamed, so its length is unknown: set max_steps")
        if num_prompts is not None and num_prompts < self.prompts_per_step:
            times = self.prompts_per_step // prompts
            unit = f"one update ({times} generations of " if times > 1 else "one generation ("
            raise DataError(
                f"the training data has {num_prompts} prompts, fewer than the {self.prompts_per_step} of {unit}"
                f"generation_batch_size {self.generation_batch_size} / num_generations {self.num_generations}): lower "
                "per_device_train_batch_size or gradient_accumulation_steps"
            )
        if args.max_steps > 0:
            return int(args.max_steps)
        return math.ceil(float(args.num_train_epochs) * self.updates_per_epoch(num_prompts or prompts))

    def blank_rows(self, args: Any, environments: Any) -> list[dict[str, Any]]:
        """Rows with blank prompts (Cohort refuses empty ones) for ``train_dataset=None``: the environment's ``reset``
        gives the prompts. One for each prompt of a generation, as in TRL, or of a rollout where that is more.

        Args:
            args: whose ``max_steps`` ends the run.
            environments: ``environment_factory``.

        Raises:
            ConfigError: there are several environments, or ``max_steps`` is not set.
        """
        if isinstance(environments, Mapping):
            raise ConfigError(
                "train_dataset is None, and environment_factory is a dict: pass rows with a column 'environment', or "
                "a single environment"
            )
        if args.max_steps <= 0:
            raise ConfigError("train_dataset is None, so nothing says how long an epoch is: set max_steps")
        count = max(self.prompts_per_step, self.generation_batch_size // self.num_generations)
        return [{"prompt": [{"role": "user", "content": " "}]} for _ in range(count)]

    def updates_per_epoch(self, num_prompts: int) -> int:
        """Optimizer steps of an epoch as TRL counts them."""
        generations = num_prompts // (self.generation_batch_size // self.num_generations)
        return math.ceil(generations * self.steps_per_generation * self.trl_iterations / self.accumulation)

    def rollouts(self, updates: int) -> int:
        """Rollouts that so many optimizer steps need. The last one is used in full."""
        return math.ceil(updates / self.updates_per_rollout)


def _generation(args: Any, piece: int) -> tuple[int, int]:
    """``steps_per_generation`` and ``generation_batch_size``, by TRL's rules; both may be given if they agree."""
    steps, size = args.steps_per_generation, args.generation_batch_size
    if size is None:
        steps = steps or args.gradient_accumulation_steps
        return steps, piece * steps
    if size % piece:
        raise ConfigError(
            f"generation_batch_size ({size}) must be divisible by per_device_train_batch_size x processes ({piece})"
        )
    if steps not in (None, size // piece):
        raise ConfigError(
            f"generation_batch_size ({size}) and steps_per_generation ({steps}) contradict each other: set one of them"
        )
    return size // piece, size


def _rollout(prompts: int, steps: int, accumulation: int, iterations: int) -> tuple[int, int, int]:
    """Prompts, minibatches and iterations of a rollout; see the table of this module."""
    if steps % accumulation == 0:
        return prompts, steps // accumulation, iterations
    if accumulation % steps == 0:
        passes = accumulation // steps
        if iterations % passes == 0:
            return prompts, 1, iterations // passes
        if passes % iterations == 0:
            return prompts * passes // iterations, 1, 1
    raise ConfigError(
        f"gradient_accumulation_steps ({accumulation}) and steps_per_generation ({steps}) with num_iterations "
        f"({iterations}) make optimizer steps that begin in one pass over a generation and end in another: set one to "
        "a multiple of the other"
    )
