"""How much of a step its arithmetic and its memory traffic take: the matrix products of the update alone, and one read
of the weights per decode step, beside the real step, in one run.

    python benchmarks/floor.py
    python benchmarks/floor.py --case A 0.5b --repeats 5 --json
    python benchmarks/floor.py --quick

The cases A, B and C are those of ``step.py`` (8 prompts x 8 completions, the tiny model). ``0.5b`` is a model of 0.5 B
parameters with a vocabulary of 151,936 (shape of Qwen2.5-0.5B), 2 prompts x 8 completions, 128 + 64 tokens.

The *update's floor* is the time of its matrix products, with the run's precision and threads, on the model's own
weights: for every linear layer the product of the forward pass and the two of the backward pass, over the prompts once
and all completions; for the head over completions alone; and for attention two products forward and five backward (one
of them is repeated), over half of the square of each prompt and over prompt and half of the completion. Passes have as
many tokens as the update's. Norms, activations, softmax, the log-softmax of the head and the optimizer are left out: no
program can do without them, so 100% is not within reach.

The *decode floor* is the time of one read of all weights, in the precision that decoding computes in, times the decode
steps. Weights that fit the processor's caches are read from there: the read is measured in a loop over all of them, as
decoding does. ``products`` beside it is the time of one decode step's products for all sequences: where many sequences
are decoded at once, it is the larger of the two.

A real step, the products and the reads take turns; shares are of medians. Needs a quiet machine: shares of a busy one
are too low. ``--quick`` has one short repeat with a model of two layers: it shows that everything works, and its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import GROUP, build_model, progress, quiet, spread
from step import Job, cohort_trainer
from torch import Tensor, nn

from rollout import MODELS, WORKLOADS, Workload, hardware, only_this_on_stdout, versions

CASES = {
    **{name: Job(workload, MODELS["tiny"]) for name, workload in WORKLOADS.items()},
    "0.5b": Job(Workload(128, 64, False), MODELS["qwen2.5-0.5b"], prompts=2),
}
ATTENTION_PRODUCTS = 7
"""Scores and values forward; backward the scores again, and the gradients of queries, keys, scores and values."""


def small(job: Job) -> Job:
    """The same with short texts and a model of two layers and a small vocabulary."""
    shape = replace(job.shape, num_hidden_layers=2, vocab_size=4096)
    return replace(job, workload=replace(job.workload, prompt=16, limit=8), shape=shape)


@dataclass(frozen=True)
class Floor:
    """The products and the reads of one case, on copies of the model's weights in the precision of the passes."""

    job: Job
    layers: Sequence[Tensor]
    """Of every linear layer but the head, [out, in]."""
    head: Tensor
    tokens_a_pass: int

    @classmethod
    def of(cls, job: Job, model: Any, dtype: torch.dtype, tokens_a_pass: int) -> Floor:
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
        with torch.no_grad():
            weights = [module.weight.to(dtype, copy=True) for module in linear]
            return cls(job, weights, head.weight.to(dtype, copy=True), tokens_a_pass)

    def update(self, mean_length: float) -> None:
        """All products of an update of completions of this mean length."""
        workload, completions = self.job.workload, self.job.prompts * GROUP
        drawn = round(completions * mean_length)
        for weight in self.layers:
            self._linear(weight, self.job.prompts * workload.prompt)
            self._linear(weight, drawn)
        self._linear(self.head, drawn)
        for _ in range(self.job.shape.num_hidden_layers):
            self._attention(self.job.prompts, workload.prompt, workload.prompt / 2)
            self._attention(completions, round(mean_length), workload.prompt + mean_length / 2)

    def _linear(self, weight: Tensor, tokens: int) -> None:
        gradient = torch.zeros_like(weight)
        for start in range(0, tokens, self.tokens_a_pass):
            count = min(self.tokens_a_pass, tokens - start)
            given, back = weight.new_zeros(count, weight.shape[1]), weight.new_zeros(count, weight.shape[0])
            given @ weight.T
            back @ weight
            gradient.addmm_(back.T, given)

    def _attention(self, rows: int, queries: int, keys: float) -> None:
        shape = self.job.shape
        batch = rows * shape.num_attention_heads
        left = self.head.new_zeros(batch, queries, shape.head_dim)
        right = self.head.new_zeros(batch, shape.head_dim, max(1, round(keys)))
        for _ in range(ATTENTION_PRODUCTS):
            torch.bmm(left, right)

    def read(self) -> float:
        """Read all weights once, as 64-bit integers, whose sum is as fast as memory is."""
        return sum(float(weight.view(-1).view(torch.int64).sum()) for weight in self._all)

    def decode(self) -> None:
        """The products of one decode step for all sequences, without attention."""
        count = self.job.prompts * GROUP
        for weight in self._all:
            weight.new_zeros(count, weight.shape[1]) @ weight.T

    @property
    def _all(self) -> list[Tensor]:
        return [*self.layers, self.head]

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self._all)


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    model = build_model(job.shape, job.ends)
    trainer = cohort_trainer(job, model, options.precision, None)
    precision = trainer.policy.precision
    steps = trainer.steps()
    next(steps)
    floor = Floor.of(job, model, precision.compute, trainer.budget.tokens)
    times: dict[str, list[float]] = {}
    decode_steps, length = 0.0, 0.0
    for repeat in range(options.repeats):
        metrics = next(steps)
        length, decode_steps = metrics["length/mean"], metrics["length/max"]
        found = {
            "update": metrics["seconds/update"],
            "generate": metrics["seconds/generate"],
            "products": seconds_of(partial(floor.update, length)),
            "read": seconds_of(floor.read) * decode_steps,
            "decode_products": seconds_of(floor.decode) * decode_steps,
        }
        for key, value in found.items():
            times.setdefault(key, []).append(value)
        progress(f"{name}, repeat {repeat + 1}: " + ", ".join(f"{key} {value:.3f} s" for key, value in found.items()))
    steps.close()
    median = {key: statistics.median(values) for key, values in times.items()}
    return {
        "case": name,
        "quick": options.quick,
        "precision": str(precision),
        "weights_mib": round(floor.num_bytes / 2**20, 1),
        "mean_length": round(length, 1),
        "decode_steps": decode_steps,
        "seconds": {key: spread(values) for key, values in times.items()},
        "share_of_update": round(median["products"] / median["update"], 3),
        "share_of_generate": round(median["read"] / median["generate"], 3),
        "share_of_generate_products": round(median["decode_products"] / median["generate"], 3),
        "share_of_step": round((median["products"] + median["read"]) / (median["update"] + median["generate"]), 3),
    }


def show(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"cpu, {hardware('cpu')}, {options.threads} threads, load before {options.load}; ", end="")
    print(", ".join(f"{key} {value}" for key, value in versions([]).items()))
    print(f"medians of {options.repeats}" + ("; QUICK: these figures mean nothing" if options.quick else "") + "\n")
    print(
        "| case | precision | update, s | its products | share | generate, s | reads of the weights | share |", end=""
    )
    print(" products of decoding | share | both floors of both parts |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        median = {key: value["median"] for key, value in result["seconds"].items()}
        cells = [
            result["case"],
            result["precision"],
            f"{median['update']:.3f}",
            f"{median['products']:.3f}",
            f"{result['share_of_update']:.0%}",
            f"{median['generate']:.3f}",
            f"{median['read']:.3f}",
            f"{result['share_of_generate']:.0%}",
            f"{median['decode_products']:.3f}",
            f"{result['share_of_generate_products']:.0%}",
            f"{result['share_of_step']:.0%}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="does everything work? The figures mean nothing")
    parser.add_argument("--json", action="store_true", help="a JSON list on standard output, nothing else")
    options = parser.parse_args()
    if min(options.repeats, options.threads) < 1:
        parser.error("--repeats and --threads must be at least 1")
    options.repeats = 1 if options.quick else options.repeats
    options.load = round(os.getloadavg()[0], 2)
    return options


def main() -> None:
    options = parse()
    quiet()
    torch.set_num_threads(options.threads)
    with contextlib.ExitStack() as stack:
        stdout = stack.enter_context(only_this_on_stdout()) if options.json else None
        stack.enter_context(contextlib.chdir(stack.enter_context(tempfile.TemporaryDirectory())))
        jobs = {name: small(CASES[name]) if options.quick else CASES[name] for name in options.case}
        results = [measure(name, job, options) for name, job in jobs.items()]
        if stdout:
            stdout.write(json.dumps(results) + "\n")
        else:
            show(results, options)


if __name__ == "__main__":
    main()
