"""Seconds and memory of an update and of sampling as completions grow from 1k to 32k tokens, what each further token
costs, and what bounds it.

    python benchmarks/long.py
    python benchmarks/long.py --model tiny --lengths 1024 4096 --json
    python benchmarks/long.py --quick

Llama-like models: ``tiny`` (6 layers of width 256, the model of ``step.py``) and ``0.5b-width`` (4 layers of width 896
with 14 heads, as in Qwen2.5-0.5B). Both have a vocabulary of 4,096, so that the layers are seen and not the head.

*Update*: everything from a scored completion to the AdamW step, of one completion after a prompt of 64 tokens, in
passes of 1,024 tokens (the default on a CPU): longer completions are computed in pieces (docs/update.md). Memory is the
process's peak above what it held before, when weights, gradients and the optimizer's state were there. *Sampling*: one
completion of the greatest length after a prompt of 64; seconds and memory are read when it has reached each length.
Update and sampling have a process each, and lengths take turns from short to long.

The slope between two lengths is that of their logarithms: 1 for a cost in proportion to the length, 2 for its square.
``bound`` is what most of the floating-point operations are at that length: ``layers`` (products with weights, the same
for each token) or ``attention`` (in proportion to the length). ``bytes per token`` is what the memory grows by from the
length before; ``hidden states`` is what one token's hidden states of all layers take in the passes' precision, and the
goal is that an update's memory grows by no more. ``TFLOP`` leaves out what an update computes twice.

Linux only; the machine must be quiet for times. ``--quick`` goes to 1,024 tokens with the tiny model alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from common import MEBI, Memory, Side, Turns, build_model, make_tokenizer, progress, quiet
from memory import Tokens, cohort_side

from rollout import MODELS, Shape, hardware, only_this_on_stdout, resident, versions

SHAPES = {"tiny": MODELS["tiny"], "0.5b-width": Shape("qwen2", 896, 4, 14, 2, 64, 4864, 4096)}
PROMPT = 64


def sampling_side(turns: Turns, shape: Shape, lengths: Sequence[int]) -> None:
    """Samples one completion, and reports seconds and memory at each length."""
    quiet()
    from cohort.policy import Policy, resolve_precision
    from cohort.rollout import LocalEngine, RNGKey, Sampling, TokenEvent, Watch
    from cohort.types import Prompt

    model = build_model(shape, ())
    model.config.max_position_embeddings = PROMPT + max(lengths)
    policy = Policy(model, resolve_precision("auto", torch.device("cpu"), shape.hidden_size))
    engine = LocalEngine(policy, make_tokenizer(shape.vocab_size, None), ())
    prompt = Prompt(0, 0, tuple(range(1, 1 + PROMPT)), "", "", {})
    engine.generate([prompt], 1, Sampling(4), RNGKey(0, 0))
    turns.wait({"precision": str(policy.precision)})
    memory, rows = Memory(), []
    start = time.perf_counter()

    def on_token(event: TokenEvent) -> None:
        if event.position + 1 in lengths:
            above = (resident("VmHWM") - memory.before) / MEBI
            rows.append({"seconds": time.perf_counter() - start, "above": round(above, 1)})
            progress(f"sampling of {event.position + 1:,} tokens: {rows[-1]}")

    engine.generate([prompt], 1, Sampling(max(lengths)), RNGKey(0, 1), Watch(on_token))
    turns.wait({"rows": rows})


def operations(shape: Shape, length: int, *, backward: bool) -> tuple[float, float]:
    """Floating-point operations of a completion: of products with weights, and of attention."""
    width, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    layer = width * (2 * heads + 2 * keys) + 3 * width * shape.intermediate_size
    weights = 2 * length * (shape.num_hidden_layers * layer + width * shape.vocab_size)
    attention = 2 * 2 * heads * shape.num_hidden_layers * length * (PROMPT + length / 2)
    return (3 * weights, 3.5 * attention) if backward else (weights, attention)


def with_slopes(shape: Shape, lengths: Sequence[int], rows: list[dict[str, float]], *, backward: bool) -> list[Any]:
    """Each length's figures with what they grew by from the length before."""
    found: list[dict[str, Any]] = []
    for length, row in zip(lengths, rows, strict=True):
        weights, attention = operations(shape, length, backward=backward)
        bound = "attention" if attention > weights else "layers"
        found.append({"length": length, **row, "bound": bound, "teraflop": round((weights + attention) / 1e12, 3)})
    for (one, before), (other, after) in pairwise(zip(lengths, found, strict=True)):
        after["slope"] = round(math.log(after["seconds"] / before["seconds"]) / math.log(other / one), 2)
        after["bytes_per_token"] = round((after["above"] - before["above"]) * MEBI / (other - one))
    return found


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    shape, lengths = SHAPES[name], options.lengths
    with Side(cohort_side, shape, None, threads=options.threads) as side:
        precision, updates = side.first["precision"], []
        for length in lengths:
            updates.append(side.ask(Tokens(1, PROMPT, length, 1)))
            progress(f"{name}, update of {length:,} tokens: {updates[-1]}")
    with Side(sampling_side, shape, lengths, threads=options.threads) as side:
        sampled = side.ask()["rows"]
    itemsize = 2 if "bfloat16" in precision else 4
    return {
        "model": name,
        "precision": precision,
        "hidden_states_bytes": shape.num_hidden_layers * shape.hidden_size * itemsize,
        "cache_bytes": shape.cached_per_token * itemsize,
        "update": with_slopes(shape, lengths, updates, backward=True),
        "sampling": with_slopes(shape, lengths, sampled, backward=False),
    }


def show(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"cpu, {hardware('cpu')}, {options.threads} threads, load before {options.load}; ", end="")
    print(", ".join(f"{key} {value}" for key, value in versions([]).items()))
    for result in results:
        print(f"\n{result['model']}, {result['precision']} a pass; of one token, in all layers: hidden states", end=" ")
        print(f"{result['hidden_states_bytes']:,} bytes, keys and values {result['cache_bytes']:,} bytes\n")
        print("| | tokens | seconds | slope | TFLOP | bound | above the model, MiB | bytes per token |")
        print("|---|---|---|---|---|---|---|---|")
        for part in ("update", "sampling"):
            for row in result[part]:
                slope, grown = row.get("slope", ""), row.get("bytes_per_token")
                cells = [part, f"{row['length']:,}", f"{row['seconds']:.2f}", str(slope), f"{row['teraflop']:.3f}"]
                cells += [row["bound"], f"{row['above']:,.0f}", "" if grown is None else f"{grown:,}"]
                print(f"| {' | '.join(cells)} |")
        grown = result["update"][-1].get("bytes_per_token", 0)
        share = grown / result["hidden_states_bytes"]
        print(f"\nAt the end, a token of an update takes {share:.2f} times the memory of its hidden states", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16_384, 32_768])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short lengths, one model")
    parser.add_argument("--json", action="store_true", help="a JSON list on standard output, nothing else")
    options = parser.parse_args()
    if options.quick:
        options.model, options.lengths = ["tiny"], [256, 512, 1024]
    if min(options.lengths) < 1 or options.threads < 1:
        parser.error("--lengths and --threads must be at least 1")
    options.lengths.sort()
    options.load = round(os.getloadavg()[0], 2)
    return options


def main() -> None:
    options = parse()
    if not options.json:
        show([measure(name, options) for name in options.model], options)
        return
    with only_this_on_stdout() as stdout:
        stdout.write(json.dumps([measure(name, options) for name in options.model]) + "\n")


if __name__ == "__main__":
    main()
