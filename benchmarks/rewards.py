"""What the reward runner costs beside the functions: per sample, in each place where a function can be called; and how
long async functions that wait take together.

    python benchmarks/rewards.py

Each line compares the runner with the plainest way of doing the same in the same process, in alternating rounds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import torch

from cohort import reward
from cohort.config import RewardConfig
from cohort.rewards import RewardRunner
from cohort.types import Completion, FinishReason, Group, Prompt

PROMPTS, GROUP, ROUNDS = 64, 16, 9


def length(completion, answer, **_):
    return float(len(completion) - len(answer))


def lengths(completions, answer, **_):
    return [float(len(text) - len(gold)) for text, gold in zip(completions, answer, strict=True)]


@reward(per="group")
def of_group(completions, answer, **_):
    return [float(len(text) - len(answer)) for text in completions]


async def length_async(completion, answer, **_):
    return float(len(completion) - len(answer))


async def judge(completion):
    await asyncio.sleep(1.0)
    return float(bool(completion))


def rollout(prompts: int, size: int) -> list[Group]:
    """Groups of completions of about 200 tokens."""
    text, ids = "word " * 200, tuple(range(200))
    made = Completion.of_tokens(ids, (-1.0,) * 200, FinishReason.EOS, text, 0)
    return [
        Group(Prompt(p, p, ids, text, text, {"answer": str(p), "question": text}), (made,) * size)
        for p in range(prompts)
    ]


def median_and_range(numbers: Sequence[float], form: str) -> str:
    return f"{form.format(statistics.median(numbers))} ({form.format(min(numbers))} to {form.format(max(numbers))})"


def main() -> None:
    torch.set_num_threads(2)
    groups = rollout(PROMPTS, GROUP)
    samples = PROMPTS * GROUP
    pairs = [(c.text, g.prompt.columns["answer"]) for g in groups for c in g.completions]
    cases = (
        ("per batch, in this process", lengths, {}),
        ("per group, in this process", of_group, {}),
        ("per sample, in this process", length, {}),
        ("per sample, cached", length, {"cache": True}),
        ("per sample, async", length_async, {}),
        ("per sample, in 1 worker process", length, {"workers": 1}),
        ("per sample, in 2 worker processes", length, {"workers": 2}),
    )
    print(
        f"{samples} completions of 200 tokens; the runner beside a plain loop over the same function, {ROUNDS} rounds"
    )
    for name, function, settings in cases:
        runner = RewardRunner([function], settings=RewardConfig(**settings))
        runner.score(groups[:1])  # workers are started
        ours, plain = [], []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            runner.score(groups)
            ours.append(time.perf_counter() - start)
            start = time.perf_counter()
            [length(completion=text, answer=answer) for text, answer in pairs]
            plain.append(time.perf_counter() - start)
        runner.close()
        costs = [1e3 * (a - b) / samples for a, b in zip(ours, plain, strict=True)]
        print(f"  {name:36} {median_and_range(costs, '{:.3f}')} ms a sample (goal: under 1)")

    groups = rollout(8, 8)
    runner = RewardRunner([judge])
    times = []
    for _ in range(3):
        start = time.perf_counter()
        runner.score(groups)
        times.append(time.perf_counter() - start)
    print(f"64 async rewards that wait 1 s each: {median_and_range(times, '{:.2f}')} s (one after another: 64)")


if __name__ == "__main__":
    main()
