"""What ``cohort doctor`` predicts against what the run then costs: memory, and the time of a step.

    python benchmarks/doctor.py
    python benchmarks/doctor.py --model qwen3-0.6b --prompts 4 --length 64 --steps 2 --json

The checks run in one process and the run in another, both with the same random model, prompts of 64 tokens and a reward
that costs next to nothing. ``memory`` is what the run adds at its peak to what the process held with the model loaded.
A ratio is prediction over measurement.

Linux only: memory is read from /proc.
"""

from __future__ import annotations

import argparse
import json
from statistics import median
from typing import Any

import torch
from common import Memory, Side, Turns, build_model, even_tokens, make_rows, make_tokenizer

from cohort import GRPOConfig, GRPOTrainer
from cohort.doctor import examine
from rollout import MODELS, only_this_on_stdout

MEBI = 2**20


def trainer_of(options: argparse.Namespace) -> GRPOTrainer:
    """A trainer whose completions end after ``length / 2`` tokens on average, if they are not cut before."""
    shape = MODELS[options.model]
    ends = range(max(1, 2 * shape.vocab_size // options.length))
    config = GRPOConfig(
        prompts_per_step=options.prompts,
        num_generations=8,
        max_completion_length=options.length,
        max_steps=options.steps,
        save_steps=options.save_steps,
        output_dir="run",
        device="cpu",
        precision="float32",
        progress=False,
    )
    rows = make_rows(max(64, options.prompts), 64, shape.vocab_size)
    tokenizer = make_tokenizer(shape.vocab_size, None)
    return GRPOTrainer(build_model(shape, ends), even_tokens, config, rows, processing_class=tokenizer)


def predict(turns: Turns, options: argparse.Namespace) -> None:
    numbers = {finding.check: dict(finding.numbers) for finding in examine(trainer_of(options), ["answers"])}
    turns.wait(numbers)


def measure(turns: Turns, options: argparse.Namespace) -> None:
    trainer = trainer_of(options)
    memory = Memory()
    steps = [metrics["seconds/step"] for metrics in trainer.steps()]
    turns.wait({"step": median(steps), "memory": memory.figures()["above"]})


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Predictions, measurements and their ratios. Memory is in MiB, time in seconds."""
    with Side(predict, options, threads=options.threads) as side:
        found = side.first
    with Side(measure, options, threads=options.threads) as side:
        measured = side.first
    predicted = {
        "step": found["time"]["step"],
        "memory": (found["memory"]["needed"] + found["memory"]["copy"]) / MEBI,
    }
    return {
        name: {
            "predicted": round(predicted[name], 3),
            "measured": round(measured[name], 3),
            "ratio": round(predicted[name] / measured[name], 2),
        }
        for name in predicted
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--length", type=int, default=256, help="maximum length of a completion")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--save-steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with only_this_on_stdout() as out:
        found = compare(options)
        if options.json:
            print(json.dumps({"options": vars(options), **found}), file=out)
            return
        for name, row in found.items():
            unit = "s" if name == "step" else "MiB"
            text = f"predicted {row['predicted']:>10,.2f}  measured {row['measured']:>10,.2f} {unit:<4}"
            print(f"{name:<8}{text} ratio {row['ratio']:.2f}", file=out)


if __name__ == "__main__":
    main()
