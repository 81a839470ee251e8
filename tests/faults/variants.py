"""The runs that the harness kills: small, and each with several things that a resumed run could lose."""

import json
from pathlib import Path
from typing import Any

import tomli_w

from tests.conftest import DEMO_MODEL, tiny_llama

Settings = dict[str, dict[str, Any]]

REWARDS = '''
import random

def digits(completions, **_):
    """The share of digits."""
    return [sum(letter.isdigit() for letter in text) / (len(text) + 1) for text in completions]

def noisy(completions, **_):
    """Depends on the state of a global random generator, which a resumed run restores."""
    return [reward + random.random() for reward in digits(completions)]

def has_a_three(completions, **_):
    """0 or 1, so that some groups have equal rewards."""
    return [float("3" in text) for text in completions]
'''
EVALUATION = {"metric_for_best_model": "eval/reward/mean", "bootstrap_samples": 100}

VARIANTS: dict[str, Settings] = {
    # Four updates per rollout; a second epoch, which begins within a step; generators; an evaluation at every step.
    "updates": {
        "objective": {"minibatches": 2, "num_iterations": 2},
        "reward": {"functions": ["noisy"]},
        "data": {"eval": "eval.jsonl", "train_rows": 5},
        "eval": EVALUATION | {"eval_steps": 1},
        "run": {"save_steps": 1},
    },
    # A reference that moves, a KL and an entropy bonus whose weights adapt, few checkpoints.
    "reference": {
        "objective": {
            "beta": 0.05,
            "sync_ref_model": True,
            "ref_model_sync_steps": 2,
            "minibatches": 2,
            "kl": {"target": 0.01, "horizon": 20},
            "entropy": {"coefficient": 0.01, "target": 1.0},
        },
        "run": {"save_steps": 2, "save_total_limit": 1},
    },
    "lora": {
        "model": {"lora": {"rank": 2, "save_merged": True}},
        "data": {"eval": "eval.jsonl"},
        "eval": EVALUATION | {"eval_steps": 2},
        "objective": {"num_iterations": 2, "beta": 0.05},
        "run": {"save_steps": 1},
    },
    "dynamic": {
        "objective": {"group_filter": {"rule": "dynamic_sampling", "max_rounds": 3}},
        "reward": {"functions": ["has_a_three", "digits"], "weights": [1.0, 0.0]},
        "run": {"save_steps": 1, "save_total_limit": 2},
    },
    # The order of the second epoch depends on the rewards of the first. Rewards are computed in a worker process.
    "curriculum": {
        "data": {"order": "curriculum", "curriculum": "measured", "train_rows": 4},
        "reward": {"workers": 1},
        "run": {"save_steps": 2},
    },
    "stream": {
        "data": {"streaming": True, "shuffle_buffer": 5},
        "optim": {"optimizer": "muon", "lr_scheduler_type": "cosine", "warmup_steps": 2},
        "run": {"save_steps": 1},
    },
    # Rollouts are sampled ahead, beside the training: the journal has one more than the checkpoint.
    "lag": {"rollout": {"lag": 1}, "objective": {"minibatches": 2}, "run": {"save_steps": 1}},
    # Ends before its last step, by evaluations without a new best.
    "early": {
        "data": {"eval": "eval.jsonl"},
        "eval": EVALUATION | {"eval_steps": 1, "early_stopping_patience": 2},
        "run": {"save_steps": 2, "max_steps": 8},
    },
    # No checkpoint until the end: a killed run starts over.
    "unsaved": {"run": {"save_steps": 0}},
}


def write_inputs(place: Path) -> None:
    """The model, data and reward functions of all variants, and a config file for each."""
    from cohort.policy import load_tokenizer

    tokenizer = load_tokenizer(str(DEMO_MODEL))
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    rows = [{"prompt": f"{n}+{n * 7 % 13}"} for n in range(1, 21)]
    for name, some in (("train", rows), ("eval", rows[:3])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    (place / "rewards.py").write_text(REWARDS)
    for name, settings in VARIANTS.items():
        (place / f"{name}.toml").write_text(tomli_w.dumps(with_defaults(settings, place)))


def with_defaults(settings: Settings, place: Path) -> Settings:
    """The whole settings of a variant, without its output folder."""
    defaults: Settings = {
        "model": {"path": str(place / "model"), "device": "cpu", "precision": "float32"},
        "data": {"train": str(place / "train.jsonl")},
        "reward": {"functions": ["digits"]},
        "rollout": {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 5},
        "optim": {"learning_rate": 1e-2, "microbatch_tokens": 64},
        "run": {"max_steps": 3},
        "report": {"progress": False},
    }
    whole = {section: defaults.get(section, {}) | settings.get(section, {}) for section in {**defaults, **settings}}
    whole["reward"]["functions"] = [f"{place}/rewards.py:{name}" for name in whole["reward"]["functions"]]
    if "eval" in whole["data"]:
        whole["data"]["eval"] = str(place / whole["data"]["eval"])
    return whole
