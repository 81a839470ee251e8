"""Seconds of a training step with another commit's package, over those with the present one.

    python benchmarks/commits.py BASE
    python benchmarks/commits.py BASE --steps 40 --prompts 4

Two processes of each side hold a run of the demo's model, and take turns step by step in random order; each computes on
one thread and reports its processor time. The two processes of one side show the noise: a ratio means something where
it lies outside of their ratio.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def side(prompts: int) -> None:
    """A run that makes one step for each line of standard input, and writes its seconds."""
    import torch

    import cohort

    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    torch.set_num_threads(1)
    rows = [{"prompt": f"{n * 37 % 9000 + 1000}+{n * 91 % 9000 + 1000}"} for n in range(50 * prompts)]

    def distinct(completion: str, **_: object) -> float:
        return len(set(completion)) / 10

    with tempfile.TemporaryDirectory() as folder:
        config = cohort.GRPOConfig(
            prompts_per_step=prompts,
            num_generations=8,
            max_completion_length=24,
            max_steps=100_000,
            save_steps=0,
            precision="float32",
            device="cpu",
            output_dir=str(Path(folder) / "run"),
            progress=False,
            log_completions=False,
        )
        model = str(Path(cohort.__file__).parent / "demo" / "model")
        steps = cohort.GRPOTrainer(model, distinct, config, rows).steps()
        print("ready", file=output, flush=True)
        for _ in sys.stdin:
            before = time.process_time()
            next(steps)
            print(time.process_time() - before, file=output, flush=True)


def start(source: Path, prompts: int) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "side", "--prompts", str(prompts)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str]) -> float:
    assert process.stdin
    assert process.stdout
    process.stdin.write("step\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    if options.base == "side":
        return side(options.prompts)
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", options.base, "src"], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        sources = {"base": Path(folder) / "src", "now": ROOT / "src"}
        names = [(name, number) for number in (1, 2) for name in sources]
        processes = {name: start(sources[name[0]], options.prompts) for name in names}
        for process in processes.values():
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        seconds: dict[tuple[str, int], list[float]] = {name: [] for name in names}
        for _ in range(options.steps):
            for name in random.sample(names, len(names)):
                seconds[name].append(ask(processes[name]))
        for process in processes.values():
            process.kill()
    seconds = {name: some[3:] for name, some in seconds.items()}  # the first steps warm up

    def ratio(one: tuple[str, int], other: tuple[str, int]) -> float:
        return statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))

    for name, some in seconds.items():
        print(f"{name[0]:4} {name[1]}  {statistics.median(some):.4f} s of processor time a step")
    print("now / base  " + "  ".join(f"{ratio(('now', a), ('base', b)):.3f}" for a in (1, 2) for b in (1, 2)))
    print(f"base / base {ratio(('base', 2), ('base', 1)):.3f}, now / now {ratio(('now', 2), ('now', 1)):.3f}")
    return None


if __name__ == "__main__":
    main()
