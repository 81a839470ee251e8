"""What an update takes, against TRL 1.16.0 on the same model and tokens: memory with a large vocabulary, time and
memory with a long prompt.

    python benchmarks/memory.py
    python benchmarks/memory.py --part prompt --repeats 3 --json

An update is everything from the scored completions to the AdamW step. Ours is ``cohort.train.update``, with the default
settings unless said otherwise; TRL's is ``GRPOTrainer._compute_loss`` and ``backward`` for each micro-batch, clipping
and AdamW, with activations kept. Same weights, same tokens, same objective, no KL term.

``vocabulary``: V = 151,936 and about 0.1 B parameters, completions of 512 tokens after prompts of 64, in groups of 8.
The figure is the process's peak above what it held before the update, when weights, gradients and the optimizer's state
were already there. Every measurement has a new process. TRL is measured with all completions in one micro-batch and
with one at a time, in both precisions, and the one that takes less memory counts. ``memory_ratio`` is Cohort's default
(1,024 tokens a pass) over TRL's with 16 completions at once; ``memory_ratio_one`` has both at one completion a pass.

``prompt``: the tiny model of ``step.py``, one prompt of 2,048 tokens and G completions of 64. Seconds against G make a
line; its slope is what one more completion costs. ``own`` is the slope with a prompt of 8 tokens instead: what its own
64 tokens cost. Both sides and all G take turns.

Linux only. Needs about 12 GiB; ``--vocabulary`` and ``--width`` scale the first part down.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import (
    GROUP,
    LEARNING_RATE,
    MEBI,
    Memory,
    MissingError,
    Side,
    Turns,
    build_model,
    even_tokens,
    laid_out,
    make_rows,
    make_tokenizer,
    progress,
    quiet,
    spread,
    trl_config,
    trl_trainer,
)

from rollout import MODELS, Shape, hardware, only_this_on_stdout, versions

NEEDED = 12 * 2**30
LONG, SHORT, OWN = 2048, 8, 64
SIZES = (8, 16, 32, 64)
TRL_PRECISIONS = ("bfloat16 autocast", "float32")
TRL_LONG_BATCH = 8
"""All 64 completions with their prompts at once would take tens of gigabytes."""


@dataclass(frozen=True)
class Tokens:
    """Completions in groups, by their sizes."""

    completions: int
    prompt: int
    length: int
    group: int

    def draw(self, vocab_size: int) -> tuple[list[list[int]], list[list[int]], list[float]]:
        """Prompts (repeated for their groups), completions and advantages."""
        source = random.Random(3)

        def some(count: int) -> list[int]:
            return [source.randrange(1, vocab_size) for _ in range(count)]

        of_group = [some(self.prompt) for _ in range(-(-self.completions // self.group))]
        prompts = [of_group[s // self.group] for s in range(self.completions)]
        return prompts, [some(self.length) for _ in prompts], [source.gauss(0, 1) for _ in prompts]


FIRST = Tokens(2, 8, 8, 2)
"""Makes gradients and the optimizer's state, and loads whatever a side loads in its first update."""


# ---- the sides: each waits for ``Tokens`` and makes an update on them


def in_turns(turns: Turns, first: dict[str, Any], update: Callable[[Any], Any], prepare: Callable[..., Any]) -> None:
    update(prepare(FIRST))
    report = first
    while True:
        batch = prepare(turns.wait(report))
        memory = Memory()
        start, used = time.perf_counter(), time.process_time()
        found = update(batch)
        report = {"seconds": time.perf_counter() - start, "processor": time.process_time() - used, **memory.figures()}
        report |= found or {}


def cohort_side(
    turns: Turns, shape: Shape, token_budget: int | None, precision: str = "auto", count: bool = False
) -> None:
    """Ours. Without a number, passes have as many tokens as a run takes where memory is plentiful. ``count``: also
    count the bytes of live tensors, which takes some time."""
    quiet()
    from cohort.config import OptimConfig
    from cohort.objective import PRESETS
    from cohort.policy import Policy, resolve_precision
    from cohort.rollout import Sampling
    from cohort.train import Optimizer, StepContext, TokenBudget, UpdateResult, part_of, update
    from cohort.train.memory import PLAIN_TOKENS, LiveBytes
    from cohort.types import TokenBatch

    model = build_model(shape, ())
    policy = Policy(model, resolve_precision(precision, torch.device("cpu"), shape.hidden_size))
    optimizer = Optimizer(model, OptimConfig(learning_rate=LEARNING_RATE), 1)
    tokens_a_pass = token_budget or PLAIN_TOKENS
    context = StepContext(policy, optimizer, PRESETS["default"], Sampling(1), TokenBudget(tokens_a_pass))

    def prepare(tokens: Tokens) -> TokenBatch:
        prompts, completions, advantages = tokens.draw(shape.vocab_size)
        return laid_out(prompts[:: tokens.group], completions, advantages)

    def run(batch: TokenBatch) -> dict[str, float]:
        live = LiveBytes()
        with live if count else contextlib.nullcontext():
            result = update(context, batch, part_of(batch, range(batch.num_sequences)))
        assert isinstance(result, UpdateResult), result
        assert result.grad_norm > 0, "no step was made"
        return {"live": round(live.peak / MEBI, 1)} if count else {}

    in_turns(turns, {"precision": f"{policy.precision}, {tokens_a_pass} tokens"}, run, prepare)


def trl_side(turns: Turns, shape: Shape, batch_size: int, precision: str) -> None:
    """TRL's loss and its parts in the order in which transformers' ``Trainer`` goes through them."""
    config = trl_config(per_device_train_batch_size=GROUP, bf16=precision == "bfloat16 autocast")
    tokenizer = make_tokenizer(shape.vocab_size, shape.vocab_size)
    rows = make_rows(1, 8, shape.vocab_size)
    trainer = trl_trainer(build_model(shape, ()), config, rows, tokenizer, even_tokens)
    model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
    model.train()

    def prepare(tokens: Tokens) -> list[dict[str, torch.Tensor]]:
        prompts, completions, advantages = map(torch.tensor, tokens.draw(shape.vocab_size))
        whole = {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": completions,
            "completion_mask": torch.ones_like(completions),
            "advantages": advantages,
        }
        starts = range(0, tokens.completions, batch_size)
        return [{name: rows[start : start + batch_size] for name, rows in whole.items()} for start in starts]

    def run(batches: Sequence[dict[str, torch.Tensor]]) -> None:
        optimizer.zero_grad()
        trainer.current_gradient_accumulation_steps = len(batches)
        for batch in batches:
            trainer._compute_loss(model, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm > 0, "no step was made"
        optimizer.step()

    in_turns(turns, {"precision": precision}, run, prepare)


# ---- a large vocabulary


def vocabulary_part(options: argparse.Namespace) -> dict[str, Any]:
    heads = options.width // 64
    shape = Shape("qwen2", options.width, 7, heads, heads // 2, 64, 3 * options.width, options.vocabulary)
    rows = []

    def take(count: int, side: str, setting: str, work: Callable[..., None], *arguments: Any) -> None:
        tokens = Tokens(count, 64, 512, min(GROUP, count))
        try:
            with Side(work, shape, *arguments, threads=options.threads) as process:
                figures = {"precision": process.first["precision"], **process.ask(tokens)}
        except MissingError as error:
            figures = {"unavailable": str(error)}
        rows.append({"completions": count, "side": side, "setting": setting, **figures})
        progress(str(rows[-1]))

    for count in options.completions:
        take(count, "cohort", "default", cohort_side, None)
        take(count, "cohort", "one at a time", cohort_side, 512)
        for precision in TRL_PRECISIONS if count in options.trl_completions else ():
            take(count, "trl", "all at once", trl_side, count, precision)
            take(count, "trl", "one at a time", trl_side, 1, precision)

    def least(side: str, setting: str, count: int) -> float:
        found = [r["above"] for r in rows if (r["side"], r["setting"], r["completions"]) == (side, setting, count)]
        return min(found)

    counts = options.completions
    main = 16 if 16 in options.trl_completions else options.trl_completions[-1]
    of_default = [least("cohort", "default", count) for count in counts]
    default, frugal = least("cohort", "default", main), least("cohort", "one at a time", main)
    one = least("trl", "one at a time", main)
    return {
        "parameters": sum(p.numel() for p in build_model(shape, ()).parameters()),
        "vocabulary": options.vocabulary,
        "memory_ratio": round(default / least("trl", "all at once", main), 3),
        "memory_ratio_one": round(frugal / one, 3),
        "memory_ratio_default_to_one": round(default / one, 3),
        "growth": round(of_default[-1] / of_default[0], 3),
        "rows": rows,
    }


# ---- a long prompt


def slope(seconds: dict[int, float]) -> float:
    """Seconds per completion: the least-squares line over G."""
    return statistics.linear_regression(list(seconds), list(seconds.values())).slope


def prompt_part(options: argparse.Namespace) -> dict[str, Any]:
    shape = MODELS["tiny"]
    found: dict[str, dict[int, list[dict[str, float]]]] = {}
    with (
        Side(cohort_side, shape, None, threads=options.threads) as cohort,
        Side(trl_side, shape, TRL_LONG_BATCH, options.trl_precision, threads=options.threads) as trl,
    ):
        asked = {"cohort": (cohort, LONG), "own": (cohort, SHORT), "trl": (trl, LONG)}
        for _ in range(options.repeats):
            for size in SIZES:
                for name, (side, prompt) in asked.items():
                    report = side.ask(Tokens(size, prompt, OWN, size))
                    found.setdefault(name, {}).setdefault(size, []).append(report)
                    progress(f"G = {size}, {name}: {report}")
        precision = {"cohort": cohort.first["precision"], "own": cohort.first["precision"]}
    precision["trl"] = options.trl_precision
    seconds = {name: {g: spread([r["seconds"] for r in rs]) for g, rs in of.items()} for name, of in found.items()}
    slopes = {name: slope({g: times["median"] for g, times in of.items()}) for name, of in seconds.items()}
    return {
        "precision": precision,
        "seconds": seconds,
        "above_mib": {name: {g: max(r["above"] for r in rs) for g, rs in of.items()} for name, of in found.items()},
        "slope": {name: round(value, 5) for name, value in slopes.items()},
        "slope_over_own": round(slopes["cohort"] / slopes["own"], 3),
        "trl_slope_over_own": round(slopes["trl"] / slopes["own"], 3),
        "slope_ratio": round(slopes["trl"] / slopes["cohort"], 3),
    }


# ---- report


def show(result: dict[str, Any]) -> None:
    print(f"cpu, {result['hardware']}, {result['threads']} threads, load before {result['load_before']}; ", end="")
    print(", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    if part := result.get("vocabulary"):
        print(f"\nV = {part['vocabulary']:,}, {part['parameters'] / 1e6:.0f} M parameters, completions of 512 tokens")
        print("\n| completions | side | a pass | precision | peak above weights, gradients, optimizer, MiB | seconds |")
        print("|---|---|---|---|---|---|")
        for row in part["rows"]:
            start = f"| {row['completions']} | {row['side']} | {row['setting']} |"
            if "unavailable" in row:
                print(f"{start} | {row['unavailable']} | |")
                continue
            print(f"{start} {row['precision']} | {row['above']:,.0f} | {row['seconds']:.1f} |")
        print(f"\nCohort's default over TRL's all at once: {part['memory_ratio']:.2f}", end="")
        print(f"; over TRL's one at a time: {part['memory_ratio_default_to_one']:.2f}", end="")
        print(f"; both one at a time: {part['memory_ratio_one']:.2f}")
        print(f"Cohort's default, from the fewest completions to the most: x {part['growth']:.2f}")
    if part := result.get("prompt"):
        print(f"\nOne prompt of {LONG:,} tokens, G completions of {OWN}; own: a prompt of {SHORT} instead")
        print(f"TRL {TRL_LONG_BATCH} completions a pass; medians of {result['repeats']}\n")
        print("| | precision | " + " | ".join(f"G = {size}, s (MiB)" for size in SIZES) + " | seconds a completion |")
        print("|---|---|" + "---|" * (len(SIZES) + 1))
        for name, seconds in part["seconds"].items():
            cells = [f"{seconds[g]['median']:.2f} ({part['above_mib'][name][g]:,.0f})" for g in SIZES]
            print(f"| {name} | {part['precision'][name]} | {' | '.join(cells)} | {part['slope'][name]:.4f} |")
        print(f"\nOne more completion costs {part['slope_over_own']:.2f} times its own {OWN} tokens", end="")
        print(f"; TRL {part['trl_slope_over_own']:.2f} times; TRL / Cohort {part['slope_ratio']:.2f}", flush=True)


def available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("vocabulary", "prompt", "both"), default="both")
    parser.add_argument("--completions", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--trl-completions", type=int, nargs="+", default=[16, 32], help="TRL's, of these")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 128")
    parser.add_argument("--trl-precision", choices=TRL_PRECISIONS, default="float32", help="long prompt")
    parser.add_argument("--repeats", type=int, default=3, help="of the long prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    options = parser.parse_args()
    if options.width % 128 or min(options.repeats, options.threads, *options.completions) < 1:
        parser.error("--width must be a multiple of 128; --repeats, --threads and --completions at least 1")
    if options.part != "prompt" and options.vocabulary > 100_000 and available() < NEEDED:
        parser.error(f"{available() / 2**30:.1f} GiB are free, about {NEEDED >> 30} are needed: lower --vocabulary")
    if not set(options.trl_completions) <= set(options.completions):
        parser.error("--trl-completions must be among --completions")
    options.completions.sort()
    options.load = round(os.getloadavg()[0], 2)
    return options


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if options.part in ("vocabulary", "both"):
        result["vocabulary"] = vocabulary_part(options)
        result["memory_ratio"] = result["vocabulary"]["memory_ratio"]
    if options.part in ("prompt", "both"):
        result["prompt"] = prompt_part(options)
    return result | {
        "repeats": options.repeats,
        "threads": options.threads,
        "hardware": hardware("cpu"),
        "load_before": options.load,
        "versions": versions([]),
    }


def main() -> None:
    options = parse()
    if not options.json:
        show(benchmark(options))
        return
    with only_this_on_stdout() as stdout:
        stdout.write(json.dumps(benchmark(options)) + "\n")


if __name__ == "__main__":
    main()
