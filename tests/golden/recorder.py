"""Record the numbers that a refactoring must not change, as a flat mapping from names to numbers, strings and lists.

``tests/golden`` compares a recording in float64 with the committed one. ``scripts/compare_commits.py`` runs this file
against the packages of two commits and compares the recordings bit by bit; it always runs the file of the present tree.
So everything below goes through surfaces that stay: ``GRPOTrainer`` with its settings, the command line, and the files
of a run folder. The inner interfaces that are called are in the section "Calls that follow the code": change those
functions together with the code, and let them accept the old interface too where both commits are to be compared.

    python tests/golden/recorder.py OUT.json --only presets,runs,engine --precision float64,float32
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("GOMP_SPINCOUNT", "4000")

import numpy as np
import torch
import transformers

import cohort
from cohort import GRPOConfig, GRPOTrainer
from cohort.cli import main
from cohort.presets import PRESETS

Record = dict[str, Any]

transformers.utils.logging.disable_progress_bar()

TOKENIZER = Path(cohort.__file__).parent / "demo" / "model"
CLOCK_KEYS = ("time", "seconds", "tokens_per_second", "memory/")
RENAMED: dict[str, str] = {}
"""Old to new names of metrics and of statistics, so that a recording of an older commit is comparable."""


# Calls that follow the code -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Tokens of S sequences, sequence by sequence, with log-probs under four policies and rewards."""

    logps: torch.Tensor
    old: torch.Tensor
    sampler: torch.Tensor
    ref: torch.Tensor
    entropy: torch.Tensor
    advantages: torch.Tensor
    sequence: torch.Tensor
    group: torch.Tensor
    drawn: torch.Tensor
    truncated: torch.Tensor
    rewards: torch.Tensor
    by_function: torch.Tensor
    token_rewards: torch.Tensor


def advantages_of(objective: Any, batch: Batch) -> torch.Tensor:
    """One advantage per token."""
    from cohort.objective import Outcomes, token_advantages

    outcomes = Outcomes(
        rewards_S=batch.rewards,
        group_S=batch.group,
        sequence_N=batch.sequence,
        max_length=6,
        by_function_SK=batch.by_function,
        weights_K=torch.tensor([1.0, 0.5], dtype=torch.float64),
        token_rewards_N=batch.token_rewards,
        truncated_S=batch.truncated,
        sampler_logps_N=batch.sampler,
        kl_N=batch.old - batch.ref,
    )
    return token_advantages(objective, outcomes)


def coefficients_of(objective: Any, batch: Batch) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient's coefficients of every token, and the sums and maxima that the log is made of."""
    from cohort.objective import UpdateTokens, coefficients, token_statistics, token_weights

    loss = batch.drawn & ~batch.truncated[batch.sequence] if objective.truncated == "mask" else batch.drawn
    weights = token_weights(
        batch.sequence,
        len(batch.group),
        aggregation=objective.aggregation,
        group_S=batch.group,
        length=objective.aggregation_length,
        counted_N=loss,
        count_empty=objective.count_empty,
    )
    policies = {
        "sequence_N": batch.sequence,
        "old_logps_N": batch.old,
        "sampler_logps_N": batch.sampler,
        "ref_logps_N": batch.ref if objective.beta else None,
    }
    found = coefficients(objective, batch.logps, batch.advantages, weights, base_weights_N=weights, **policies)
    tokens = UpdateTokens(
        logps_N=batch.logps,
        entropy_N=batch.entropy,
        collision_N=batch.entropy / 7,
        advantages_N=batch.advantages,
        weights_N=weights,
        base_weights_N=weights,
        coefficients=found,
        **policies,
    )
    statistics = token_statistics(objective, tokens)
    names = ("policy_N", "kl_N", "cause_N", "value_N", "log_ratio_N", "acted_NM")
    maxima = {f"max_{key}": value for key, value in statistics.maxima.items()}
    return {name: getattr(found, name) for name in names}, statistics.sums | maxima


def rollout_columns(folder: Path, step: int) -> Record:
    """What a rollout's table says of the samples."""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(folder / "rollouts" / f"step-{step}.parquet")
    names = ("token_ids", "sampler_logps", "completion", "finish_reason", "reward", "advantage")
    return {name: table.column(name).to_pylist() for name in names}


# Presets --------------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, Record] = {
    "kl_forward_sequence": {"beta": 0.3, "kl": {"direction": "forward", "scope": "sequence"}},
    "kl_prefix": {"beta": 0.3, "kl": {"direction": "reverse", "correction": "prefix_product"}},
    "kl_advantage": {"beta": 0.3, "kl": {"place": "advantage"}},
    "ratio_prefix": {"ratio_level": "prefix_product", "trust_region": "none"},
    "ratio_self": {"ratio_anchor": "self", "trust_region": "none"},
    "mask": {"trust_region": {"rule": "mask", "low": 0.5, "high": 1.4, "signed": True}},
    "fipo": {"trust_region": {"rule": "fipo", "half_life": 2.0, "weight_low": 0.9, "weight_high": 1.3, "safety": 1.4}},
    "mismatch": {
        "mismatch": [
            {"rule": "weight", "level": "token", "mode": "truncate", "high": 1.5},
            {"rule": "weight", "level": "geometric", "mode": "mask", "low": 0.6, "high": 1.7},
            {"rule": "veto", "low": 0.5, "high": 2.1},
            {"rule": "off_policy_mask", "threshold": 0.2},
        ]
    },
    "opo": {"baseline": "length_weighted", "scale": {"rule": "batch_std", "of": "raw"}},
    "penalize": {"truncated": "penalize", "soft_overlong": {"rule": "soft_overlong", "cache_share": 0.5}},
    "unlikely": {"unlikeliness": {"rule": "unlikeliness", "strength": 0.25}, "truncated": "zero"},
    "process": {"credit": "process"},
    "given": {"credit": "given", "baseline": "none", "scale": "none"},
    "discounted": {"credit": "return_to_go", "discount": 0.9},
    "gdpo_leave_one_out": {"reward_aggregation": "normalize_sum_normalize", "baseline": "leave_one_out"},
}


def objectives() -> dict[str, Any]:
    """Every preset, with a KL that can be seen beside it as the preset has it; and parts that no preset uses."""
    found = {}
    for name in PRESETS:
        settings: Record = {"preset": name, "num_generations": 4, "max_completion_length": 6}
        if name == "gfpo":
            settings["group_filter"] = {"k": 2}
        found[name] = GRPOConfig(**settings).resolved_objective
        if not PRESETS[name].beta:
            found[f"{name}+kl"] = GRPOConfig(**settings, beta=0.3).resolved_objective
    return found | {name: GRPOConfig(**changes).resolved_objective for name, changes in VARIANTS.items()}


def random_batch(seed: int, dtype: torch.dtype) -> Batch:
    """Three groups of four sequences. One sequence is empty, one unscored; the last group's rewards are equal."""
    random = np.random.Generator(np.random.PCG64(seed))

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        return torch.from_numpy(low + (high - low) * random.random(shape))

    lengths = np.array([3, 1, 5, 0, 2, 4, 6, 2, 1, 3, 4, 2])
    count = int(lengths.sum())
    sequence = torch.from_numpy(np.repeat(np.arange(12), lengths))
    logps = uniform(count, low=-4.0, high=-1.2)
    rewards, by_function = uniform(12), uniform(12, 2)
    rewards[5] = by_function[5] = torch.nan
    by_function[1, 0] = torch.nan
    rewards[8:] = 0.25
    token_rewards = uniform(count)
    token_rewards[uniform(count) < 0.4] = torch.nan
    return Batch(
        logps=logps.to(dtype),
        old=(logps - uniform(count, low=-0.8, high=0.8)).to(dtype),
        sampler=(logps - uniform(count, low=-0.8, high=0.8)).to(dtype),
        ref=(logps - uniform(count, low=-1.0, high=1.0)).to(dtype),
        entropy=uniform(count, high=3.0).to(dtype),
        advantages=uniform(12, low=-1.5, high=1.5)[sequence].to(dtype),
        sequence=sequence,
        group=torch.from_numpy(np.repeat(np.arange(3), 4)),
        drawn=uniform(count) > 0.1,
        truncated=uniform(12) < 0.3,
        rewards=rewards,
        by_function=by_function,
        token_rewards=token_rewards,
    )


def record_presets(precision: str, seeds: tuple[int, ...] = (0, 1)) -> Record:
    """Coefficients, statistics and advantages of every objective on random batches."""
    record: Record = {}
    for seed in seeds:
        batch = random_batch(seed, getattr(torch, precision))
        for name, objective in objectives().items():
            tensors, statistics = coefficients_of(objective, batch)
            tensors["advantages_N"] = advantages_of(objective, batch)
            for key, tensor in tensors.items():
                record[f"{seed}/{name}/{key}"] = tensor.tolist()
            for key, value in statistics.items():
                record[f"{seed}/{name}/statistics/{RENAMED.get(key, key)}"] = value
    return record


# Models and runs ------------------------------------------------------------------------------------------------------

COMMON = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
ATTENTION = COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": ATTENTION,
    "qwen2": ATTENTION,
    "gemma2": ATTENTION | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8},
    "gpt2": COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024},
    "gpt_neox": {key: value for key, value in ATTENTION.items() if key != "num_key_value_heads"},
    "mixtral": ATTENTION | {"num_local_experts": 4},
}
SAMPLED_FAMILIES = ("qwen2", "gemma2", "gpt2", "gpt_neox", "mixtral")
"""Decoded in C or by the lean path, with sliding windows, with learned positions, by transformers' cache; a mixture of
experts, which torch computes in float32 only."""


def save_model(family: str, folder: Path, noise: float = 0.0) -> Path:
    """A small model with the demo's tokenizer. The weights come from numpy's uniform numbers, which are the same on
    every processor. ``noise``: relative size of a disturbance of the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads((TOKENIZER / "config.json").read_text())
    ids = {
        key: settings[key] for key in ("vocab_size", "pad_token_id", "eos_token_id") if settings.get(key) is not None
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family] | ids)).double()
    random, disturb = (np.random.Generator(np.random.PCG64(seed)) for seed in (0, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.from_numpy(random.random(parameter.shape) - 0.5)
            parameter.copy_(0.7 * values if parameter.ndim > 1 else parameter + 0.2 * values)
            parameter.mul_(1 + noise * torch.from_numpy(disturb.random(parameter.shape) - 0.5))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / name, folder / name)
    return folder


def digits(completions: list[str], **_: Any) -> list[float]:
    """The share of digits."""
    return [sum(letter.isdigit() for letter in text) / (len(text) + 1) for text in completions]


def has_a_three(completions: list[str], **_: Any) -> list[float]:
    """0 or 1, so that some groups have equal rewards."""
    return [float("3" in text) for text in completions]


ROWS = [{"prompt": f"{n}+{n * 7 % 13}" + "+9" * (n % 4)} for n in range(1, 21)]
SETTINGS: Record = {
    "prompts_per_step": 4,
    "num_generations": 4,
    "max_completion_length": 10,
    "learning_rate": 1e-2,
    "device": "cpu",
    "progress": False,
    "max_steps": 3,
}
RUNS: dict[str, Record] = {
    "full": {
        "preset": "grpo",
        "top_entropy": 0.5,
        "denominator": "after_masks",
        "aggregation": "token_mean",
        "entropy": {"coefficient": 0.01},
        "truncated": "mask",
        "term_norms_steps": 2,
        "max_completion_length": 14,
        "stop": ["1", "+"],
    },
    "lora": {
        "lora": {"rank": 4},
        "num_iterations": 2,
        "minibatches": 2,
        "beta": 0.05,
        "kl": {"estimator": "full", "correction": "prefix_product"},
        "group_filter": {"rule": "dynamic_sampling", "max_rounds": 3},
        "mismatch": [{"rule": "weight", "level": "token", "mode": "truncate", "high": 2.0}],
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "eval_steps": 2,
        "num_generations_eval": 2,
        "pass_at_k": [1, 2],
        "bootstrap_samples": 200,
    },
}
SAMPLED: Record = {
    "max_steps": 1,
    "prompts_per_step": 6,
    "max_completion_length": 14,
    "temperature": 0.9,
    "top_p": 0.9,
    "stop": ["+7", "1"],
    "min_completion_length": 3,
    "max_batch_size": 5,
}


def train(model: Path, folder: Path, precision: str, **settings: Any) -> Path:
    """A run in a folder of its own."""
    config = GRPOConfig(**SETTINGS | settings | {"precision": precision, "output_dir": str(folder)})
    eval_rows = ROWS[:6] if "eval_steps" in settings else None
    reward = has_a_three if "group_filter" in settings else digits
    GRPOTrainer(str(model), [reward], config, ROWS, eval_rows).train()
    return folder


def metrics_of(folder: Path) -> Record:
    """The metrics of every step, without those that depend on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        f"step{line['step']}/{RENAMED.get(key, key)}": value
        for line in lines
        for key, value in line.items()
        if not any(part in CLOCK_KEYS for part in key.split("/"))
    }


def weights_of(folder: Path) -> dict[str, np.ndarray]:
    """The trained weights of the last checkpoint."""
    from safetensors.torch import load_file

    last = max((folder / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    return {
        f"{file.stem}/{name}": tensor.double().numpy()
        for file in sorted(last.glob("*model*.safetensors"))
        for name, tensor in sorted(load_file(file).items())
    }


def record_runs(precision: str, noise: float = 0.0, *, every_weight: bool = True) -> Record:
    """Two runs: metrics of every step, samples, and final weights (or, of each tensor, sum and norm)."""
    record: Record = {}
    for name, settings in RUNS.items():
        with tempfile.TemporaryDirectory() as place:
            model = save_model("llama", Path(place, "model"), noise)
            folder = train(model, Path(place, "run"), precision, **settings)
            record |= {f"{name}/{key}": value for key, value in metrics_of(folder).items()}
            samples = rollout_columns(folder, 3)
            record |= {f"{name}/step3/{key}": samples[key] for key in ("token_ids", "advantage")}
            for key, values in weights_of(folder).items():
                summary = {"sum": float(values.sum()), "norm": float(np.linalg.norm(values))}
                kept = {"values": values.tolist()} if every_weight else summary
                record |= {f"{name}/weights/{key}/{what}": value for what, value in kept.items()}
    return record


def record_engine(precision: str, noise: float = 0.0) -> Record:
    """Samples of several families, with more completions than are decoded at a time; and of ``cohort generate``."""
    record: Record = {}
    for family in SAMPLED_FAMILIES:
        if (family, precision) == ("mixtral", "float64"):
            continue
        with tempfile.TemporaryDirectory() as place:
            model = save_model(family, Path(place, "model"), noise)
            folder = train(model, Path(place, "run"), precision, **SAMPLED)
            samples = rollout_columns(folder, 1)
            names = ("token_ids", "sampler_logps", "completion", "finish_reason")
            record |= {f"{family}/{key}": samples[key] for key in names}
            if family == "qwen2":
                flags = ["--n", "4", "--max-tokens", "8", "--top-k", "5", "--prefix", "3", "--regex", "[0-9]+"]
                flags += ["--batch-size", "3", "--precision", precision, "--output", str(Path(place, "out.jsonl"))]
                with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
                    code = main(["generate", str(model), "1+2", "7+8+9", *flags, "--device", "cpu"])
                record["generate/exit"] = code
                lines = Path(place, "out.jsonl").read_text().splitlines()
                record["generate/lines"] = found = [json.loads(line) for line in lines]
                for one in found:  # the prefix is one token, which was given: it has no log-probs
                    one["logps"], one["full_logps"] = one["logps"][1:], one["full_logps"][1:]
    return record


def record_demo(seed: int) -> Record:
    """The demo's metrics and accuracies."""
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(place, "run")
        assert main(["demo", "--seed", str(seed), "--output-dir", str(folder)]) == 0
        summary = json.loads((folder / "summary.json").read_text())
        accuracies = {f"summary/{key}": value for key, value in summary.items() if key.startswith("accuracy")}
        return metrics_of(folder) | accuracies


PARTS = {"presets": record_presets, "runs": record_runs, "engine": record_engine}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", default="presets,runs,engine", help="of: presets, runs, engine, demo")
    parser.add_argument("--precision", default="float64,float32")
    parser.add_argument("--seeds", default="0,1,2,3", help="of the demo")
    arguments = parser.parse_args()
    whole: Record = {}
    for part in arguments.only.split(","):
        if part == "demo":
            whole |= {f"demo/{s}/{k}": v for s in arguments.seeds.split(",") for k, v in record_demo(int(s)).items()}
            continue
        for precision in arguments.precision.split(","):
            if part != "presets" or precision != "bfloat16":
                whole |= {f"{part}/{precision}/{key}": value for key, value in PARTS[part](precision).items()}
    arguments.output.write_text(json.dumps(whole))
