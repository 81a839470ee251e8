"""Processor time and memory of an update and of sampling as completions grow from 1k to 32k tokens, what each further
token costs, and what bounds it.

    python benchmarks/long.py
    python benchmarks/long.py --model tiny --lengths 1024 4096 --json
    python benchmarks/long.py --model 0.5b-width --layers 1 --part update --lengths 32768
    python benchmarks/long.py --quick

Llama-like models: ``tiny`` (6 layers of width 256, the model of ``step.py``) and ``0.5b-width`` (layers of width 896
with 14 heads, as in Qwen2.5-0.5B, which has 24; 4 unless ``--layers`` says otherwise). Both have a vocabulary of 4,096,
so that the layers are seen and not the head.

*Update*: everything from a scored completion to the AdamW step, of one completion after a prompt of 64 tokens, in
passes of 1,024 tokens: longer completions are computed in pieces (docs/update.md). The default on a CPU allows more to
small models.
*Sampling*: one completion of the greatest length after a prompt of 64; time and memory are read when it has reached
each length. Update and sampling have a process each, and lengths take turns from short to long. All lengths take about
an hour of processor time; ``--model``, ``--part`` and ``--lengths`` choose.

Time is that of the processor, over all threads: a busy machine and a low priority lengthen it little. ``slope`` between
two lengths is that of their logarithms: 1 for a cost in proportion to the length, 2 for its square. ``bound`` is what
most of the floating-point operations are at that length: ``layers`` (products with weights, the same for each token) or
``attention`` (in proportion to the length). ``TFLOP`` leaves out what an update computes twice. ``live`` is the peak of
the bytes of live tensors in the update, ``above the model`` the process's peak above what it held before, when weights,
gradients and the optimizer's state were there: it includes what the C library's allocator cannot use.
``bytes per token`` is what ``live`` grows by from the length before (in sampling, ``above the model``); ``hidden
states`` is what one token's hidden states take after all layers, in the precision of the residual stream (float32), and
the goal is that an update's memory grows by no more.

Linux only. ``--quick`` goes to 1,024 tokens with the tiny model alone.
"""

from __future__ import annotations

import argparse
import dataclasses
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


def sampling_side(turns: Turns, shape: Shape, lengths: Sequence[int], precision: str) -> None:
    """Samples one completion, and reports time and memory at each length."""
    quiet()
    from cohort.policy import Policy, resolve_precision
    from cohort.rollout import LocalEngine, RNGKey, Sampling, TokenEvent, Watch
    from cohort.types import Prompt

    model = build_model(shape, ())
    model.config.max_position_embeddings = PROMPT + max(lengths)
    policy = Policy(model, resolve_precision(precision, torch.device("cpu"), shape.hidden_size))
    engine = LocalEngine(policy, make_tokenizer(shape.vocab_size, None), ())
    prompt = Prompt(0, 0, tuple(range(1, 1 + PROMPT)), "", "", {})
    engine.generate([prompt], 1, Sampling(4), RNGKey(0, 0))
    turns.wait({"precision": str(policy.precision)})
    memory, rows = Memory(), []
    start, used = time.perf_counter(), time.process_time()

    def on_token(event: TokenEvent) -> None:
        if event.position + 1 in lengths:
            above = (resident("VmHWM") - memory.before) / MEBI
            seconds = {"seconds": time.perf_counter() - start, "processor": time.process_time() - used}
            rows.append(seconds | {"above": round(above, 1)})
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
        after["slope"] = round(math.log(after["processor"] / before["processor"]) / math.log(other / one), 2)
        memory = "live" if "live" in after else "above"
        after["bytes_per_token"] = round((after[memory] - before[memory]) * MEBI / (other - one))
    return found


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    shape, lengths = SHAPES[name], options.lengths
    if name == "0.5b-width":
        shape = dataclasses.replace(shape, num_hidden_layers=options.layers)
    result: dict[str, Any] = {
        "model": name,
        "layers": shape.num_hidden_layers,
        "precision": options.precision,
        "hidden_states_bytes": shape.num_hidden_layers * shape.hidden_size * 4,
        "cache_bytes": shape.cached_per_token * (2 if options.precision == "bfloat16" else 4),
        "update": [],
        "sampling": [],
    }
    if options.part != "sampling":
        with Side(cohort_side, shape, None, options.precision, True, threads=options.threads) as side:
            updates = []
            for length in lengths:
                updates.append(side.ask(Tokens(1, PROMPT, length, 1)))
                progress(f"{name}, update of {length:,} tokens: {updates[-1]}")
        result["update"] = with_slopes(shape, lengths, updates, backward=True)
    if options.part != "update":
        with Side(sampling_side, shape, lengths, options.precision, threads=options.threads) as side:
            result["sampling"] = with_slopes(shape, lengths, side.ask()["rows"], backward=False)
    return result


def show(results: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    print(f"cpu, {hardware('cpu')}, {options.threads} threads, load before {options.load}; ", end="")
    print(", ".join(f"{key} {value}" for key, value in versions([]).items()))
    for result in results:
        print(f"\n{result['model']}, {result['layers']} layers, {result['precision']}; of one token:", end=" ")
        print(
            f"hidden states {result['hidden_states_bytes']:,} bytes, keys and values {result['cache_bytes']:,} bytes\n"
        )
        print(
            "| | tokens | processor s | seconds | slope | TFLOP | bound | live, MiB | above the model | bytes a token |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for part in ("update", "sampling"):
            for row in result[part]:
                cells = [part, f"{row['length']:,}", f"{row['processor']:.2f}", f"{row['seconds']:.2f}"]
                cells += [str(row.get("slope", "")), f"{row['teraflop']:.3f}", row["bound"]]
                cells += [f"{row['live']:,.0f}" if "live" in row else "", f"{row['above']:,.0f}"]
                cells += [f"{row['bytes_per_token']:,}" if "bytes_per_token" in row else ""]
                print(f"| {' | '.join(cells)} |")
        for row in result["update"][1:]:
            share = row["bytes_per_token"] / result["hidden_states_bytes"]
            print(f"\nUp to {row['length']:,}: {share:.2f} times the hidden states of a token", end="", flush=True)
        print()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16_384, 32_768])
    parser.add_argument("--part", choices=("update", "sampling", "both"), default="both")
    parser.add_argument("--layers", type=int, default=4, help="of 0.5b-width")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
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
