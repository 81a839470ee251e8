"""How long it takes to lay out a rollout and to cut it into microbatches.

    python benchmarks/layout.py                              8,192 completions of 1,024 tokens

Prints medians of seconds: ``lay_out``, the cut into packs, and all microbatches' rows.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from cohort.train import lay_out, packs, part_of
from cohort.train.layout import microbatches
from cohort.types import Completion, FinishReason, Group, Prompt


def rollout(completions: int, length: int, group: int) -> list[Group]:
    """Groups of completions of one turn, with prompts of 64 tokens."""
    random = np.random.default_rng(0)
    made = [
        Completion.of_tokens(random.integers(0, 50_000, length), random.normal(size=length), FinishReason.EOS)
        for _ in range(completions)
    ]
    return [
        Group(Prompt(p, p, (p, *range(63)), "", "", {}), tuple(made[p * group : (p + 1) * group]))
        for p in range(completions // group)
    ]


def main() -> None:
    """Measure and print a row of a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=8192)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--budget", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    groups = rollout(options.completions, options.length, options.group)
    seconds: dict[str, list[float]] = {"lay_out": [], "packs": [], "microbatches": []}
    for _ in range(options.repeats):
        start = time.perf_counter()
        batch = lay_out(groups, torch.device("cpu"))
        seconds["lay_out"].append(time.perf_counter() - start)
        start = time.perf_counter()
        part = part_of(batch, range(batch.num_sequences))
        cut = packs(batch, part, options.budget)
        seconds["packs"].append(time.perf_counter() - start)
        start = time.perf_counter()
        count = sum(1 for pack in cut for _ in microbatches(batch, part, pack))
        seconds["microbatches"].append(time.perf_counter() - start)
    print(f"{options.completions:,} completions of {options.length:,} tokens, {count:,} microbatches")
    print("| step | seconds |\n|---|---|")
    for name, values in seconds.items():
        print(f"| {name} | {statistics.median(values):.3f} |")


if __name__ == "__main__":
    main()
