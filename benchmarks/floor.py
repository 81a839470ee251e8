"""How much of a step its arithmetic and its memory traffic take: the matrix products of the update alone, and the
weights' reads and products of decoding, beside the real step, in one run.

    python benchmarks/floor.py
    python benchmarks/floor.py --case A 0.5b --repeats 5 --json
    python benchmarks/floor.py --quick

The cases A, B and C are those of ``step.py`` (8 prompts x 8 completions, the tiny model). ``0.5b`` is a model of 0.5 B
parameters with a vocabulary of 151,936 (shape of Qwen2.5-0.5B), 2 prompts x 8 completions, 128 + 64 tokens.

The *floor of products* of the update is the time of its matrix products, with the run's precision and threads: for
every linear layer the product of the forward pass and the two of the backward pass, over the prompts once and all
completions; for the head over completions alone; and for attention two products forward and five backward (scores are
computed twice) over the tokens that are seen. Each shape of a linear layer's product is timed by torch on warm memory,
with as many tokens as a pass of the update, and its other passes are charged by their arithmetic. Attention's are
charged by their arithmetic at the highest rate that any linear layer's product reached in the same repeat: in the
shapes of single heads, libraries are slower than a fused kernel, so their time would be no floor. ``at the best rate``
charges all products so. Norms, activations, softmaxes, the log-softmax of the head and the optimizer are left out: no
program can do without them, so 100% is not within reach.

The *floor of reads* of decoding is the time of one read of all weights, in the precision that decoding computes in, per
decode step. Weights that fit the processor's caches are read from there: the read is measured in a loop over all of
them, as decoding does. The *floor of decode products* is the arithmetic of all prompts' and drawn tokens' linear layers
and of the head for each drawn token, at the same highest rate. Where many sequences are decoded at once it is the
larger of the two, and the one that counts.

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
from collections import Counter
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
HEAD_TOKENS = 512
"""Tokens whose logits the update computes at a time."""


def small(job: Job) -> Job:
    """The same with short texts and a model of two layers and a small vocabulary."""
    shape = replace(job.shape, num_hidden_layers=2, vocab_size=4096)
    return replace(job, workload=replace(job.workload, prompt=16, limit=8), shape=shape)


@dataclass(frozen=True)
class Arithmetic:
    """Floating-point operations of a step, two for each product of two numbers."""

    job: Job
    mean_length: float
    """Of the completions."""

    @property
    def prompt_tokens(self) -> int:
        return self.job.prompts * self.job.workload.prompt

    @property
    def drawn_tokens(self) -> int:
        return round(self.job.prompts * GROUP * self.mean_length)

    def linear(self, numbers: int, *, head: bool = False) -> int:
        """Of one product of an update with matrices of so many numbers, over all tokens."""
        return 2 * numbers * (self.drawn_tokens + (0 if head else self.prompt_tokens))

    @property
    def attention(self) -> float:
        """Of an update: every token sees those before it and itself."""
        prompt, length, shape = self.job.workload.prompt, self.mean_length, self.job.shape
        seen = self.job.prompts * prompt * (prompt + 1) / 2
        seen += self.job.prompts * GROUP * length * (prompt + (length + 1) / 2)
        heads = shape.num_attention_heads * shape.num_hidden_layers
        return ATTENTION_PRODUCTS * 2 * shape.head_dim * heads * seen

    def decode(self, numbers: int, head: int) -> int:
        """Of decoding, without attention: all linear layers have so many numbers, and the head its own."""
        return self.linear(numbers) + self.linear(head, head=True)


@dataclass(frozen=True)
class Weights:
    """Copies of a model's matrices in the precision of the passes."""

    layers: Sequence[Tensor]
    """Of every linear layer but the head, [out, in]."""
    head: Tensor

    @classmethod
    def of(cls, model: Any, dtype: torch.dtype) -> Weights:
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
        with torch.no_grad():
            return cls([module.weight.to(dtype, copy=True) for module in linear], head.weight.to(dtype, copy=True))

    @property
    def shapes(self) -> Counter[torch.Size]:
        """How many layers have a matrix of each shape."""
        return Counter(weight.shape for weight in self.layers)

    @property
    def numbers(self) -> int:
        """Of the layers, without the head."""
        return sum(weight.numel() for weight in self.layers)

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.layers, self.head))

    def read(self) -> float:
        """Read all weights once, as 64-bit integers, whose sum is as fast as memory is."""
        return sum(float(weight.view(-1).view(torch.int64).sum()) for weight in (*self.layers, self.head))


def product_rates(weight: Tensor, tokens: int, least: float = 0.05) -> list[float]:
    """Operations per second of the three products of a linear layer of an update, on warm memory: the output, the
    gradient of the input, that of the weight. Each is repeated for ``least`` seconds; the fastest counts."""
    given, back = weight.new_ones(tokens, weight.shape[1]), weight.new_ones(tokens, weight.shape[0])
    out, grad_given, gradient = torch.empty_like(back), torch.empty_like(given), torch.zeros_like(weight)
    products = (
        partial(torch.mm, given, weight.T, out=out),
        partial(torch.mm, back, weight, out=grad_given),
        partial(torch.mm, back.T, given, out=gradient),
    )
    rates = []
    for product in products:
        product()
        times = [seconds_of(product)]
        while sum(times) < least or len(times) < 3:
            times.append(seconds_of(product))
        rates.append(2 * weight.numel() * tokens / min(times))
    return rates


def floors(weights: Weights, arithmetic: Arithmetic, tokens_a_pass: int) -> dict[str, float]:
    """Seconds of the products of an update and of decoding, and the highest rate in operations per second."""
    representatives = {weight.shape: weight for weight in weights.layers}
    rates = {shape: product_rates(weight, tokens_a_pass) for shape, weight in representatives.items()}
    head_rates = product_rates(weights.head, min(HEAD_TOKENS, tokens_a_pass))
    best = max(*head_rates, *(rate for found in rates.values() for rate in found))
    of_head = arithmetic.linear(weights.head.numel(), head=True)
    seconds = sum(of_head / rate for rate in head_rates)
    for shape, count in weights.shapes.items():
        seconds += sum(arithmetic.linear(count * shape.numel()) / rate for rate in rates[shape])
    everything = 3 * (arithmetic.linear(weights.numbers) + of_head) + arithmetic.attention
    return {
        "products": seconds + arithmetic.attention / best,
        "products_at_best": everything / best,
        "decode_products": arithmetic.decode(weights.numbers, weights.head.numel()) / best,
        "best_rate": best,
    }


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, job: Job, options: argparse.Namespace) -> dict[str, Any]:
    model = build_model(job.shape, job.ends)
    trainer = cohort_trainer(job, model, options.precision, options.microbatch_tokens)
    precision = trainer.policy.precision
    steps = trainer.steps()
    for _ in range(options.warmup):
        next(steps)
    weights = Weights.of(model, precision.compute)
    times: dict[str, list[float]] = {}
    decode_steps, length = 0.0, 0.0
    for repeat in range(options.repeats):
        metrics = next(steps)
        length, decode_steps = metrics["length/mean"], metrics["length/max"]
        found = {
            "update": metrics["seconds/update"],
            "generate": metrics["seconds/generate"],
            **floors(weights, Arithmetic(job, length), trainer.budget.tokens),
            "read": min(seconds_of(weights.read) for _ in range(3)) * decode_steps,
        }
        for key, value in found.items():
            times.setdefault(key, []).append(value)
        progress(f"{name}, repeat {repeat + 1}: " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()))
    steps.close()
    median = {key: statistics.median(values) for key, values in times.items()}
    rates = times.pop("best_rate")
    decode_floor = max(median["read"], median["decode_products"])
    return {
        "case": name,
        "quick": options.quick,
        "precision": str(precision),
        "weights_mib": round(weights.num_bytes / 2**20, 1),
        "mean_length": round(length, 1),
        "decode_steps": decode_steps,
        "seconds": {key: spread(values) for key, values in times.items()},
        "best_gflops": round(statistics.median(rates) / 1e9, 1),
        "share_of_update": round(median["products"] / median["update"], 3),
        "share_of_update_at_best": round(median["products_at_best"] / median["update"], 3),
        "share_of_generate": round(median["read"] / median["generate"], 3),
        "share_of_generate_products": round(median["decode_products"] / median["generate"], 3),
        "share_of_step": round((median["products"] + decode_floor) / (median["update"] + median["generate"]), 3),
    }


def show(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"cpu, {hardware('cpu')}, {options.threads} threads, load before {options.load}; ", end="")
    print(", ".join(f"{key} {value}" for key, value in versions([]).items()))
    passes = f", passes of {options.microbatch_tokens:,} tokens" if options.microbatch_tokens else ""
    print(
        f"medians of {options.repeats}{passes}"
        + ("; QUICK: these figures mean nothing" if options.quick else "")
        + "\n"
    )
    print("| case | precision | best rate, GFLOP/s | update, s | its products | share | at the best rate |", end="")
    print(" generate, s | reads of the weights | share | products of decoding | share | both floors of a step |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for result in results:
        median = {key: value["median"] for key, value in result["seconds"].items()}
        cells = [
            result["case"],
            result["precision"],
            f"{result['best_gflops']:.0f}",
            f"{median['update']:.3f}",
            f"{median['products']:.3f}",
            f"{result['share_of_update']:.0%}",
            f"{result['share_of_update_at_best']:.0%}",
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
    parser.add_argument("--microbatch-tokens", type=int, help="default: the trainer's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--warmup", type=int, default=4, help="steps before; the process's memory grows during the first"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="does everything work? The figures mean nothing")
    parser.add_argument("--json", action="store_true", help="a JSON list on standard output, nothing else")
    options = parser.parse_args()
    if min(options.repeats, options.threads, options.warmup) < 1:
        parser.error("--repeats, --threads and --warmup must be at least 1")
    if options.quick:
        options.repeats = options.warmup = 1
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
