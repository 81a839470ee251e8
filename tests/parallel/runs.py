"""Whole runs on several ranks."""

from __future__ import annotations

import importlib
import os
import signal
import time

import pytest
import torch

from cohort.policy import load_tokenizer
from cohort.rewards import reward
from tests.conftest import DEMO_MODEL
from tests.train.harness import ROWS, break_after, digits_reward, make_trainer, parameters
from tests.train.test_objectives import mostly_dead


@reward(per="sample")
def digits(completion, **_):
    """Seen one at a time: each rank scores what it has sampled."""
    return sum(ch.isdigit() for ch in completion) / (len(completion) + 1)


@reward(per="group")
def longest(completions, **_):
    """Seen by group."""
    most = max(map(len, completions))
    return [len(text) / (most + 1) for text in completions]


def tokenizer():
    return load_tokenizer(str(DEMO_MODEL))


REWARDS = [digits, longest, digits_reward]
"""One of each kind: per sample, per group, and of the whole rollout."""


def trained(folder, resume=False, model=None, close=True, **settings):
    """Train; returns the weights, the metrics of each step and the summary."""
    trainer = make_trainer(tokenizer(), folder, model=model, **{"rewards": REWARDS, **settings})
    steps = list(trainer.steps(resume=resume))
    if close:
        trainer.world.close()
    weights = {name: value.numpy() for name, value in parameters(trainer).items()}
    return weights, steps, trainer.summary


def precise(folder, **settings):
    return trained(folder, **{"precision": "float64", **settings})


# Faults ---------------------------------------------------------------------------------------------------------------


UPDATE = importlib.import_module("cohort.train.update")  # the room has a function of this name


class FaultError(Exception):
    """Of no type that Cohort knows."""


def fails_once(rank, error, *, at=1):
    """A function's wrapper that raises in call number ``at`` on one rank."""
    calls = []

    def wrap(function):
        def wrapped(*arguments, **settings):
            calls.append(1)
            if len(calls) == at and int(os.environ["RANK"]) == rank:
                raise error
            return function(*arguments, **settings)

        return wrapped

    return wrap


@reward(per="sample")
def broken_on_rank_1(completion, trainer_state, **_):
    """Breaks its contract: a list for one completion."""
    broken = os.environ.get("RANK") == "1" and trainer_state.global_step == 1
    return [1.0, 2.0] if broken else len(completion) % 3 * 1.0


def faults(folder, names):
    """What faults on one rank become, by name."""
    from cohort.errors import EpisodeError, NonFiniteError, RewardError
    from cohort.rollout import LocalEngine

    passes, sampling = (UPDATE, "backward_passes"), (LocalEngine, "generate")
    evaluation = {"eval_rows": ROWS[:3], "eval_steps": 1, "eval_on_start": False}
    memory = torch.OutOfMemoryError("made up")
    kinds = {
        "nothing": (None, None, {"save_steps": 1}),
        "memory": (passes, fails_once(1, memory), {"microbatch_tokens": 64}),
        "nonfinite": (passes, fails_once(1, NonFiniteError("NaN at token 3")), {}),
        "reward": (None, None, {"rewards": broken_on_rank_1}),
        "episode": (sampling, fails_once(1, EpisodeError("all failed"), at=2), {}),
        "interrupt": (sampling, fails_once(0, KeyboardInterrupt(), at=2), {}),
        "unknown": (passes, fails_once(1, FaultError("a bug")), {}),
        "evaluation": (sampling, fails_once(1, RewardError("no judge"), at=2), evaluation),
    }
    return {name: faulty(folder / name, *kinds[name]) for name in names}


def faulty(folder, place, wrap, settings):
    """A run of two steps with a faulty function: how it ended."""
    with pytest.MonkeyPatch.context() as patch:
        if place:
            patch.setattr(*place, wrap(getattr(*place)))
        try:
            weights, steps, summary = trained(folder, close=False, max_steps=2, **settings)
        except BaseException as error:
            return type(error).__name__, str(error)
    return "trained", weights, [line["updates_nonfinite"] for line in steps], summary["updates"]


def killed(folder, place):
    """Killed on rank 1 in step 2, or on rank 0 while it writes a checkpoint; returns when the others noticed."""
    import cohort.runs.folder as runs
    from cohort.rollout import LocalEngine

    module, attribute, at, rank = {
        "sampling": (LocalEngine, "generate", 2, 1),
        "update": (UPDATE, "backward_passes", 2, 1),
        "checkpoint": (runs, "write_content", 2, 0),
    }[place]
    real, calls = getattr(module, attribute), []

    def wrapped(*arguments, **settings):
        calls.append(1)
        if len(calls) == at and int(os.environ["RANK"]) == rank:
            (folder.parent / "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **settings)

    setattr(module, attribute, wrapped)
    try:
        trained(folder, max_steps=3, save_steps=1)
    except BaseException as error:
        return type(error).__name__, str(error), time.time() - float((folder.parent / "killed").read_text())


# Runs of several kinds ------------------------------------------------------------------------------------------------


def with_tool(folder):
    """Episodes with a tool; returns the metrics of the steps."""
    from tests.environments import test_training as episodes

    made = episodes.trainer(
        folder, episodes.few_calls, [episodes.add], regex=episodes.CALL, max_turns=3, precision="float64"
    )
    return list(made.steps())


def with_environment(folder):
    """Episodes whose environments add to the prompt, and give the rewards."""
    from tests.environments import test_training as episodes

    settings = {"max_turns": 4, "regex": "[0-9]", "precision": "float64"}
    made = episodes.trainer(folder, environment_factory=episodes.Count, **settings)
    return list(made.steps())


def various(folder):
    """The metrics of runs that differ in what the ranks share. All but "first" in float64."""
    filtered = {"group_filter": {"rule": "dynamic_sampling", "max_rounds": 3}, "order": "sequential"}
    kinds = {
        "first": {"precision": "float32", "max_steps": 1, "log_completions": True},
        "one_prompt": {"prompts_per_step": 1, "max_steps": 2},
        "lora": {"lora": {"rank": 2}},
        "filtered": {**filtered, "rewards": mostly_dead, "max_steps": 2},
        "measured": {"term_norms_steps": 1, "entropy": {"coefficient": 0.01}, "beta": 0.1, "sync_ref_model": True},
        "minibatches": {"minibatches": 2, "num_iterations": 2, "preset": "dapo", "log_completions": True},
    }
    found = {}
    for name, settings in kinds.items():
        defaults = {"precision": "float64", "max_steps": 2, "close": False}
        found[name] = trained(folder / name, **defaults | settings)[1]
    found["tool"], found["environment"] = with_tool(folder / "tool"), with_environment(folder / "environment")
    return found


def stopped(folder, after, **settings):
    """A run that ends after a step, as one that is killed."""
    made = make_trainer(tokenizer(), folder, rewards=REWARDS, precision="float64", save_steps=1, **settings)
    break_after(made, after)


def resumed(folder, **settings):
    return precise(folder, resume=True, save_steps=1, **settings)[1]


def demo(folder):
    """The metrics of three steps of the demo, in float64."""
    from cohort import GRPOTrainer
    from cohort.config import load_config
    from cohort.demo.run import MODEL, SETTINGS
    from cohort.demo.task import accuracy, problems

    settings = {"run.output_dir": folder, "run.max_steps": 3, "model.precision": "float64", "report.progress": "false"}
    config = load_config(SETTINGS, [text for name, value in settings.items() for text in (f"--{name}", str(value))])
    return list(GRPOTrainer(str(MODEL), accuracy, config, problems(200, held_out=False, seed=0)).steps())
