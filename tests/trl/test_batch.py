"""TRL's arithmetic of batches, against its data path followed by hand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from cohort.errors import ConfigError, DataError
from cohort.trl.config import Batch
from tests.conftest import each


def arguments(**changed: Any) -> Any:
    args = {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": None,
        "generation_batch_size": None,
        "num_generations": 4,
        "num_iterations": 1,
        "max_steps": -1,
        "num_train_epochs": 3.0,
    }
    return SimpleNamespace(**{**args, **changed})


def updates_of_trl(
    generations: int, *, steps: int, accumulation: int, iterations: int
) -> list[tuple[tuple[int, int], ...]]:
    """The optimizer steps of TRL's loop: for each, the pieces (generation, number) whose gradients it adds up."""
    pieces = [(g, piece) for g in range(generations) for _ in range(iterations) for piece in range(steps)]
    return [tuple(pieces[at : at + accumulation]) for at in range(0, len(pieces), accumulation)]


def is_made_of_rollouts(updates: list[tuple[tuple[int, int], ...]], steps: int) -> bool:
    """Whether pieces weigh the same in an update, updates use the same pieces or different ones, and each uses whole
    generations or a part of one."""
    sets = [set(pieces) for pieces in updates]
    same_weight = all(len({pieces.count(one) for one in pieces}) == 1 for pieces in updates)
    whole = all(len({generation for generation, _ in used}) == 1 or len(used) % steps == 0 for used in sets)
    return same_weight and whole and all(a == b or not a & b for a, b in itertools.combinations(sets, 2))


@each("steps", [1, 2, 3, 4])
@each("accumulation", [1, 2, 3, 4, 6, 8])
@each("iterations", [1, 2, 3, 4])
def test_an_update_here_uses_the_prompts_that_it_uses_in_trl(steps: int, accumulation: int, iterations: int):
    args = arguments(
        per_device_train_batch_size=16,
        steps_per_generation=steps,
        gradient_accumulation_steps=accumulation,
        num_iterations=iterations,
    )
    trl = updates_of_trl(24, steps=steps, accumulation=accumulation, iterations=iterations)
    try:
        batch = Batch.of(args, 1)
    except ConfigError:
        assert not is_made_of_rollouts(trl, steps)
        return
    generations_of_rollout = batch.prompts_per_step * args.num_generations // batch.generation_batch_size
    per_rollout = trl[: batch.updates_per_rollout]
    assert {generation for pieces in per_rollout for generation, _ in pieces} == set(range(generations_of_rollout))
    for pieces in per_rollout:
        share = len(set(pieces)) / (generations_of_rollout * steps)
        assert share == 1 / batch.minibatches
        assert len({pieces.count(one) for one in pieces}) == 1
    assert all(generation >= generations_of_rollout for generation, _ in trl[batch.updates_per_rollout])


@each(
    ("changed", "world_size", "expected"),
    [
        ({}, 1, (2, 1, 1)),
        ({"gradient_accumulation_steps": 4}, 2, (16, 1, 1)),
        ({"steps_per_generation": 4, "num_iterations": 2}, 1, (8, 4, 2)),
        ({"generation_batch_size": 64}, 2, (16, 4, 1)),
        ({"generation_batch_size": 64, "steps_per_generation": 8}, 1, (16, 8, 1)),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 2, "num_iterations": 2}, 1, (2, 1, 1)),
    ],
)
def test_prompts_minibatches_and_iterations(changed: dict[str, int], world_size: int, expected: tuple[int, ...]):
    batch = Batch.of(arguments(**changed), world_size)
    assert (batch.prompts_per_step, batch.minibatches, batch.num_iterations) == expected


@each(
    ("changed", "words"),
    [
        ({"num_generations": 3}, "generation_batch_size (8) must be divisible by num_generations (3)"),
        ({"generation_batch_size": 12}, "must be divisible by per_device_train_batch_size x processes (8)"),
        ({"generation_batch_size": 16, "steps_per_generation": 1}, "contradict each other"),
        ({"num_generations": 1}, "at least 2"),
        ({"num_generations": None}, "num_generations must be a positive integer, got None"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be a positive integer"),
        ({"steps_per_generation": 16, "per_device_train_batch_size": 1, "num_generations": 8}, "groups are not parted"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "begin in one pass"),
    ],
)
def test_what_does_not_divide_is_refused_in_the_terms_of_trl(changed: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as caught:
        Batch.of(arguments(**changed), 1)
    assert words in str(caught.value)


def test_the_run_has_as_many_updates_as_in_trl():
    # 11 prompts: an epoch has 5 generations of 2 prompts, each of 4 pieces seen twice, 2 pieces to an update.
    args = arguments(
        per_device_train_batch_size=2, steps_per_generation=4, gradient_accumulation_steps=2, num_iterations=2
    )
    batch = Batch.of(args, 1)
    assert batch.updates_per_epoch(11) == 20
    assert batch.max_steps(args, 11) == 60
    assert batch.rollouts(60) == 15
    args.num_train_epochs = 0.5
    assert batch.max_steps(args, 11) == 10
    args.max_steps = 7
    assert (batch.max_steps(args, None), batch.rollouts(7)) == (7, 2)


def test_data_that_does_not_fill_a_generation_is_refused():
    args = arguments()
    with pytest.raises(DataError, match="1 prompts, fewer than the 2 of one generation"):
        Batch.of(args, 1).max_steps(args, 1)
    with pytest.raises(ConfigError, match="set max_steps"):
        Batch.of(args, 1).max_steps(args, None)
    args = arguments(steps_per_generation=1, gradient_accumulation_steps=4)
    with pytest.raises(DataError, match=r"the 8 of one update \(4 generations of generation_batch_size 8 / "):
        Batch.of(args, 1).max_steps(args, 7)
