"""What ``rollout.lag`` hides: seconds of a training step with lag 0, 1 and 2, in one run.

    python benchmarks/lag.py                            all parts
    python benchmarks/lag.py --parts reward --rounds 3

reward: an async reward that takes 1 s.
judge: an async reward that takes longer than sampling and training together, 4 s unless ``--judge`` says otherwise: its
    time is hidden behind one step by lag 1, behind two by lag 2.
none: a reward that takes no time. Sampling and training then compete for the same cores.

A step is everything between the metrics of two steps, writing included. The first steps, until the lag is reached, are
left out. Each round runs the sides one after another, each time another one first; the last line is JSON with medians
over all steps of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import build_model, make_rows, make_tokenizer

import cohort
from rollout import Shape, hardware

SHAPE = Shape("qwen2", 256, 4, 8, 4, 32, 768, 4096)
PROMPT, LIMIT = 32, 64


def slow(seconds: float) -> Callable[..., Any]:
    async def reward(completion: str, **_: Any) -> float:
        await asyncio.sleep(seconds)
        return float(sum(map(ord, completion)) % 7)

    return reward


def steps(lag: int, reward: Callable[..., Any], options: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of each step after the first ones, and what of its rollout was hidden."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        config = cohort.GRPOConfig(
            lag=lag,
            prompts_per_step=options.prompts,
            num_generations=8,
            max_completion_length=LIMIT,
            max_concurrent=8 * options.prompts,
            max_steps=options.steps + lag + 1,
            save_steps=0,
            precision="float32",
            device="cpu",
            output_dir=str(Path(folder) / "run"),
            progress=False,
            check_saved=False,
        )
        rows = make_rows(4 * options.prompts, PROMPT, SHAPE.vocab_size)
        trainer = cohort.GRPOTrainer(
            build_model(SHAPE, ()), reward, config, rows, processing_class=make_tokenizer(SHAPE.vocab_size, None)
        )
        before = time.perf_counter()
        for metrics in trainer.steps():
            now = time.perf_counter()
            if lag < metrics["step"] <= options.steps + lag:  # the last one begins no rollout
                hidden = metrics.get("seconds/rollout_hidden", 0.0)
                found.append({"step": now - before, "hidden": hidden, "update": metrics["seconds/update"]})
            before = time.perf_counter()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("reward", "judge", "none"), default=["reward", "judge", "none"])
    parser.add_argument("--lags", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--judge", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seconds = {"reward": 1.0, "judge": options.judge, "none": 0.0}
    print(f"{hardware('cpu')}, {options.threads} threads, torch {torch.__version__}")
    report: dict[str, Any] = {}
    for part in options.parts:
        measured: dict[int, list[dict[str, float]]] = {lag: [] for lag in options.lags}
        for number in range(options.rounds):
            first = number % len(options.lags)
            for lag in options.lags[first:] + options.lags[:first]:
                measured[lag] += steps(lag, slow(seconds[part]), options)
        medians = {
            lag: {name: statistics.median(one[name] for one in some) for name in some[0]}
            for lag, some in measured.items()
        }
        print(f"{part} ({seconds[part]:g} s)")
        for lag, numbers in medians.items():
            times = medians[options.lags[0]]["step"] / numbers["step"]
            print(f"  lag {lag}: {numbers['step']:6.2f} s a step, {numbers['hidden']:5.2f} s hidden, x {times:.2f}")
        report[part] = medians
    print(json.dumps(report))


if __name__ == "__main__":
    main()
