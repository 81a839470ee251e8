"""Whole runs on several ranks."""

from __future__ import annotations

import torch

from cohort.policy import load_policy  # noqa: F401 - loaded before the clock of a test starts
from cohort.rewards import reward
from tests.conftest import DEMO_MODEL
from tests.train.harness import digits_reward, make_trainer, parameters


def tokenizer():
    from cohort.policy import load_tokenizer

    return load_tokenizer(str(DEMO_MODEL))


@reward(per="sample")
def digits(completion, **_):
    """Seen one at a time: each rank scores what it has sampled."""
    return sum(ch.isdigit() for ch in completion) / (len(completion) + 1)


@reward(per="group")
def longest(completions, **_):
    """Seen by group."""
    most = max(map(len, completions))
    return [len(text) / (most + 1) for text in completions]


def trained(folder, resume=False, model=None, **settings):
    """Train; returns the weights, the metrics of each step and the summary."""
    torch.use_deterministic_algorithms(True)
    trainer = make_trainer(
        tokenizer(), folder, model=model, **{"rewards": [digits, longest, digits_reward], **settings}
    )
    steps = list(trainer.steps(resume=resume))
    trainer.world.close()
    weights = {name: value.numpy() for name, value in parameters(trainer).items()}
    return weights, steps, trainer.summary


def precise(folder, **settings):
    return trained(folder, **{"precision": "float64", **settings})
