"""What several ranks cost and gain on this machine, and a model of larger ones.

    python benchmarks/scale.py
    python benchmarks/scale.py --repeats 9 --json
    python benchmarks/scale.py --smoke                  seconds, to see that it runs; its figures mean nothing

1. Workload A of ``step.py`` (8 prompts of 64 tokens, 8 completions of 128 tokens each, one AdamW step, ours in its
   default settings) on 1 rank of 1 thread, 2 ranks of 1 thread, and 1 rank of 2 threads. Each is a trainer in
   processes of its own, and all take turns, a step each, after one to warm up. ``gain`` is the first's median over the
   second's, ``against threads`` the second's over the third's. The share of exchanges is the trainer's metric.
2. Bytes and seconds of exchanges between two ranks: all-reduces, the gather of a rollout, weights through files in
   shared memory.
3. ``simulator.py`` with costs fitted to steps with 4 and 12 prompts on one rank, how much slower a rank is while
   another computes beside it (two single ranks at once), and the exchanges of 2. Its prediction stands beside the
   measured steps with 8 prompts on 1 and 2 ranks, which it was not fitted to. If one of them is more than 15% off,
   nothing more is printed, and the exit code is 1.
4. The same model for GPUs, from published figures of the hardware and stated assumptions; only the host's work is
   measured, here. Predictions, not measurements.

The machine must be quiet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import simulator
import torch
from common import LEARNING_RATE, Side, Turns, build_model, even_tokens, make_rows, make_tokenizer, progress, spread
from common import temporary_run as free_folder
from simulator import Costs, Load, even_load, fitted, random_load, simulate

from rollout import GROUP, MEBI, MINIATURE, MODELS, WORKLOADS, Shape, Workload, hardware, only_this_on_stdout, versions

PROMPTS = 8
PARTS = ("generate", "update", "other")
WITHIN = 0.15
ACROSS_GPUS = (8, 64, 512)
PROMPTS_PER_GPU, LENGTHS = 8, {"prompt": 512, "mean": 2048, "limit": 8192}
PASS_TOKENS = 16_384  # optim.microbatch_tokens on CUDA


@dataclass(frozen=True)
class Job:
    workload: Workload
    shape: Shape
    prompts: int

    @property
    def load(self) -> Load:
        return even_load(self.prompts, GROUP, self.workload.prompt, self.workload.limit)


@dataclass(frozen=True)
class Crew:
    """Processes that make a step together: the ranks of one world, or worlds of one rank each."""

    job: Job
    processes: int = 1
    threads: int = 1
    one_world: bool = True


# ---- the sides


def rank_side(turns: Turns, job: Job, variables: dict[str, str]) -> None:
    """A rank of a trainer: makes a step when it is told "go", else measures what it is told."""
    os.environ.update(variables)
    import cohort

    config = cohort.GRPOConfig(
        prompts_per_step=job.prompts,
        num_generations=GROUP,
        max_completion_length=job.workload.limit,
        learning_rate=LEARNING_RATE,
        device="cpu",
        order="sequential",
        max_steps=1_000_000,
        save_steps=0,
        progress=False,
        log_completions=False,
        output_dir=variables.get("FOLDER") or free_folder(),
    )
    rows = make_rows(32 * job.prompts, job.workload.prompt, job.shape.vocab_size)
    tokenizer = make_tokenizer(job.shape.vocab_size, None)
    trainer = cohort.GRPOTrainer(build_model(job.shape, []), even_tokens, config, rows, processing_class=tokenizer)
    steps = trainer.steps()
    report: dict[str, Any] = {"parameters": sum(p.numel() for p in trainer.policy.model.parameters())}
    while True:
        word = turns.wait(report)
        if word != "go":
            report = {"result": EXCHANGES[word](trainer.world, job)}
            continue
        trainer.world.barrier()
        start = time.perf_counter()
        metrics = next(steps)
        seconds = time.perf_counter() - start
        parts = {name: metrics[f"seconds/{name}"] for name in ("generate", "update")}
        report = {
            "seconds": seconds,
            **parts,
            "other": seconds - sum(parts.values()),
            "share": metrics.get("parallel/exchange_share", 0.0),
            "waiting": metrics.get("parallel/waiting_seconds", 0.0) / seconds,
            "load": metrics.get("parallel/load") or 1.0,
            "tokens": round(metrics["length/mean"] * job.prompts * GROUP),
        }


@contextlib.contextmanager
def at_work(crew: Crew, stack: contextlib.ExitStack, folder: Path) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Start a crew; gives a function that tells all of it a word and returns their reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(crew.processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def start(rank: int) -> Side:
        several = crew.processes > 1 and crew.one_world
        variables = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "FOLDER": str(folder)} if several else {}
        return stack.enter_context(Side(rank_side, crew.job, variables, threads=crew.threads))

    with ThreadPoolExecutor(crew.processes) as threads:
        sides = list(threads.map(start, range(crew.processes)))
        yield lambda word: list(threads.map(lambda side: side.ask(word), sides))


# ---- exchanges, measured inside of ranks


def timed(world: Any, repeats: int, run: Callable[[], Any]) -> float:
    """Median seconds of an exchange, the slowest rank's."""
    found = []
    for _ in range(repeats + 2):
        world.barrier()
        start = time.perf_counter()
        run()
        found.append(max(world.gather(time.perf_counter() - start)))
    return statistics.median(found[2:])


def reductions(world: Any, _job: Job) -> list[tuple[int, float]]:
    """Bytes and seconds of all-reduces."""
    sizes = [4, MEBI, 8 * MEBI, 32 * MEBI, 128 * MEBI]
    return [(size, timed(world, 5, partial(world.sum_, torch.ones(size // 4)))) for size in sizes]


def gathers(world: Any, job: Job) -> list[tuple[int, int, float]]:
    """Tokens, bytes and seconds of the exchange of rollouts: one of the workload, and one of eight times the tokens."""
    from cohort.types import Completion, FinishReason

    found = []
    for times in (1, 8):
        draw, length = random.Random(world.rank), job.workload.limit
        own = [
            Completion.of_tokens(
                [draw.randrange(job.shape.vocab_size) for _ in range(length)],
                [-draw.random() for _ in range(length)],
                FinishReason.LENGTH,
            )
            for _ in range(times * job.prompts * GROUP // world.size)
        ]
        size = sum(world.gather(len(pickle.dumps(own, pickle.HIGHEST_PROTOCOL))))
        found.append((len(own) * length * world.size, size, timed(world, 5, partial(world.gather, own))))
    return found


def files(_world: Any, job: Job) -> tuple[int, float, float]:
    """Bytes of the weights, and seconds to write them to shared memory and to read them from there."""
    from safetensors.torch import load_file, save_file

    weights = {name: tensor.contiguous() for name, tensor in build_model(job.shape, []).state_dict().items()}
    weights.pop("lm_head.weight", None)  # tied
    shared = Path("/dev/shm")
    times = []
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        path = Path(folder) / "weights.safetensors"
        for _ in range(5):
            start = time.perf_counter()
            save_file(weights, path)
            written = time.perf_counter()
            loaded = load_file(path)
            sum(float(tensor.flatten()[0]) for tensor in loaded.values())
            times.append((written - start, time.perf_counter() - written))
        size = path.stat().st_size
    return size, *(statistics.median(column) for column in zip(*times, strict=True))


EXCHANGES: dict[str, Callable[[Any, Job], Any]] = {"reductions": reductions, "gathers": gathers, "files": files}


# ---- measuring


def crews(options: argparse.Namespace) -> dict[str, Crew]:
    """What takes turns."""
    workload, shape = WORKLOADS["A"], MODELS[options.model]
    if options.smoke:
        workload, shape = Workload(8, 4, False), MINIATURE
    few, job, many = (Job(workload, shape, prompts) for prompts in (PROMPTS // 2, PROMPTS, 3 * PROMPTS // 2))
    return {
        "1 rank x 1 thread": Crew(job),
        "2 ranks x 1 thread": Crew(job, processes=2),
        "1 rank x 2 threads": Crew(job, threads=2),
        "few": Crew(few),
        "many": Crew(many),
        "neighbours": Crew(few, processes=2, one_world=False),
    }


def run_in_turns(found: dict[str, Crew], repeats: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Reports of each crew's first process, without the first step; and the exchanges between two ranks."""
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in found}
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        asks = {
            name: stack.enter_context(at_work(crew, stack, Path(folder) / str(number)))
            for number, (name, crew) in enumerate(found.items())
        }
        for repeat in range(1 + repeats):
            names = list(asks)
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                each = asks[name]("go")
                slowest = max(each, key=lambda report: float(report["seconds"]))
                reports[name].append(slowest)
                progress(f"{name}: {slowest['seconds']:.3f} s")
        exchanges = {word: asks["2 ranks x 1 thread"](word)[0]["result"] for word in EXCHANGES}
    return {name: own[1:] for name, own in reports.items()}, exchanges


def median(reports: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.median(report[key] for report in reports)


def costs_of(
    reports: dict[str, list[dict[str, Any]]], found: dict[str, Crew], exchanges: dict[str, Any]
) -> tuple[Costs, float]:
    """The simulator's costs, and the bytes of a gradient."""
    parts = {name: {part: median(reports[name], part) for part in PARTS} for name in ("few", "many", "neighbours")}
    costs = fitted(parts["few"], parts["many"], found["few"].job.load, found["many"].job.load)
    both = ("generate", "update")
    slower = sum(parts["neighbours"][part] for part in both) / sum(parts["few"][part] for part in both)
    (_, latency), *_, (size, seconds) = exchanges["reductions"]
    (_, _, small_seconds), (tokens, received, large_seconds) = exchanges["gathers"]
    small_received = exchanges["gathers"][0][1]
    return replace(
        costs,
        gather_bytes=received / tokens,
        gather_byte=max(0.0, (large_seconds - small_seconds) / (received - small_received)),
        latency=latency,
        reduce_byte=max(0.0, seconds - latency) / size,
        neighbour=max(1.0, slower),
    ), float(exchanges["files"][0])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found = crews(options)
    reports, exchanges = run_in_turns(found, options.repeats)
    costs, gradient_bytes = costs_of(reports, found, exchanges)
    seconds = {name: spread([report["seconds"] for report in own]) for name, own in reports.items()}
    one, two, threads = (seconds[name]["median"] for name in list(found)[:3])
    predicted = {}
    for ranks, name in ((1, "1 rank x 1 thread"), (2, "2 ranks x 1 thread")):
        step = simulate(costs, found[name].job.load, ranks, gradient_bytes)
        measured = seconds[name]["median"]
        predicted[name] = {**asdict(step), "seconds": step.seconds, "measured": measured}
        predicted[name]["off"] = step.seconds / measured - 1
    job = found["1 rank x 1 thread"].job
    uneven = random_load(16, GROUP, job.workload.prompt, job.workload.limit // 2, job.workload.limit)
    return {
        "model": "miniature" if options.smoke else options.model,
        "prompts": job.prompts,
        "gain": round(one / two, 3),
        "against_threads": round(two / threads, 3),
        "share": round(median(reports["2 ranks x 1 thread"], "share"), 4),
        "waiting": round(median(reports["2 ranks x 1 thread"], "waiting"), 4),
        "load": round(median(reports["2 ranks x 1 thread"], "load"), 4),
        "uneven_load": round(simulator.update_shares(uneven, 2)[1], 4),
        "seconds": seconds,
        "parts": {name: {part: round(median(own, part), 4) for part in PARTS} for name, own in reports.items()},
        "exchanges": exchanges,
        "costs": asdict(costs),
        "predicted": predicted,
        "within": all(abs(one["off"]) <= WITHIN for one in predicted.values()),
        "gpus": gpu_rows(costs),
        "repeats": options.repeats,
        "hardware": hardware("cpu"),
        "load_before": options.load,
        "versions": versions([]),
    }


def gpu_rows(costs: Costs) -> list[dict[str, Any]]:
    """Predictions for models and numbers of GPUs."""
    found = []
    for model in simulator.MODELS:
        for ranks in ACROSS_GPUS:
            row: dict[str, Any] = {"model": model.name, "gpus": ranks}
            found.append(row)
            placement = simulator.place(simulator.H100, model, ranks)
            if placement is None:
                row["bound"] = "memory"
                continue
            load = random_load(PROMPTS_PER_GPU * ranks, GROUP, **LENGTHS)
            own = simulator.costs_on(simulator.H100, model, placement, ranks, costs)
            passes = -(-round(simulator.update_shares(load, ranks)[0]) // PASS_TOKENS)
            step = simulate(own, load, ranks, simulator.reduced_bytes(model, placement, passes))
            # FSDP2 gathers the next layer while it computes one.
            hidden = min(step.reduction, step.update) if placement.layout == "full" else 0.0
            step = replace(step, reduction=step.reduction - hidden)
            row |= {
                **asdict(placement),
                "engine": placement.engine,
                **asdict(step),
                "seconds": step.seconds,
                "bound": step.bound,
            }
            row["tokens_per_gpu"] = load.tokens / ranks / step.seconds
    return found


# ---- report


def show(result: dict[str, Any]) -> None:
    print(f"Workload A, {result['prompts']} prompts x {GROUP} completions, one update a step; model {result['model']}")
    print(f"{result['hardware']}; load before {result['load_before']}; ", end="")
    print(", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print(f"medians of {result['repeats']} steps, in turns\n\n| side | step, s | generate | update | other |")
    print("|---|---|---|---|---|")
    names = {"few": "1 rank, 4 prompts", "many": "1 rank, 12 prompts", "neighbours": "the same with 4, two at once"}
    for name, seconds in result["seconds"].items():
        parts = " | ".join(f"{result['parts'][name][part]:.3f}" for part in PARTS)
        spent = f"{seconds['median']:.3f} [{seconds['min']:.3f} to {seconds['max']:.3f}]"
        print(f"| {names.get(name, name)} | {spent} | {parts} |")
    print(f"\ngain of 2 ranks: {result['gain']:.2f}; against 2 threads: {result['against_threads']:.2f}")
    print(f"exchanges: {result['share']:.1%} of a step; waiting for the slower rank: {result['waiting']:.1%}")
    print(f"largest share over the mean: {result['load']:.3f}; ", end="")
    print(f"with uneven lengths and 8 groups a rank: {result['uneven_load']:.3f}")
    show_exchanges(result["exchanges"])
    show_predictions(result)


def show_exchanges(exchanges: dict[str, Any]) -> None:
    print("\n| between 2 ranks, gloo | bytes | seconds | per MB |\n|---|---|---|---|")
    for size, seconds in exchanges["reductions"]:
        print(f"| all-reduce | {size:,} | {seconds:.5f} | {seconds / size * 1e6 * 1e3:.3f} ms |")
    for tokens, size, seconds in exchanges["gathers"]:
        what = f"gather of a rollout, {tokens:,} tokens, {size / tokens:.1f} bytes each"
        print(f"| {what} | {size:,} | {seconds:.5f} | {seconds / size * 1e6 * 1e3:.3f} ms |")
    size, written, read = exchanges["files"]
    for what, seconds in (("written to", written), ("read from", read)):
        print(f"| weights {what} files in shared memory | {size:,} | {seconds:.5f} | {seconds / size * 1e9:.3f} ms |")


def show_predictions(result: dict[str, Any]) -> None:
    costs = result["costs"]
    print(f"\nsimulator: a rank is {costs['neighbour']:.2f} times slower while another computes beside it\n")
    print("| side | sampling | exchange | control | update | reduction | predicted | measured | off |")
    print("|---|---|---|---|---|---|---|---|---|")
    columns = ("sampling", "exchange", "control", "update", "reduction", "seconds", "measured")
    for name, row in result["predicted"].items():
        print(f"| {name} | " + " | ".join(f"{row[column]:.3f}" for column in columns) + f" | {row['off']:+.1%} |")
    if not result["within"]:
        print(f"\nThe prediction is more than {WITHIN:.0%} off: no predictions for larger machines.")
        return
    gpu = simulator.H100
    print(
        f"\nPredictions for {gpu.name}, not measurements. Published: {gpu.flops / 1e12:.0f} bf16 TFLOPS, "
        f"{gpu.memory / 1e9:.0f} GB at {gpu.memory_rate / 1e12:.2f} TB/s, NVLink {gpu.link / 1e9:.0f} and InfiniBand "
        f"{gpu.network / 1e9:.0f} GB/s per GPU and direction.\nAssumed: {gpu.train_share:.0%} of the TFLOPS in "
        f"updates, {gpu.decode_share:.0%} in decoding, {gpu.memory_share:.0%} of memory's and {gpu.link_share:.0%} of "
        f"links' rates, {gpu.filled:.0%} of memory for weights, gradients and optimizer. A decode step takes, besides "
        f"what it reads, {gpu.step_seconds * 1e3:.0f} ms with vLLM (assumed); with the local engine the host's "
        f"{simulator.STEP_LAUNCHES} operations and {simulator.LAYER_LAUNCHES} more per layer (counted), each "
        f"{gpu.launch_seconds * 1e6:.0f} us (estimated).\n{PROMPTS_PER_GPU} prompts per GPU, {GROUP} completions each; "
        "prompts of "
        f"{LENGTHS['prompt']} tokens, completions of {LENGTHS['mean']} on average, log-normal, at most "
        f"{LENGTHS['limit']}. Control is this machine's measured time per token.\n"
    )
    print("| model | GPUs | layout | GB | sampling, s | exchange | control | update | reduction | step", end="")
    print(" | tokens/s/GPU | bound by |\n" + "|---" * 12 + "|")
    for row in result["gpus"]:
        if "layout" not in row:
            print(f"| {row['model']} | {row['gpus']} | none fits" + " | " * 8 + " | memory |")
            continue
        layout = row["layout"] + (f", vLLM split over {row['split']}" if row["split"] > 1 else "")
        parts = " | ".join(f"{row[part]:.1f}" for part in columns[:6])
        print(f"| {row['model']} | {row['gpus']} | {layout} | {row['bytes'] / 1e9:.0f} | {parts}", end=" | ")
        print(f"{row['tokens_per_gpu']:,.0f} | {row['bound']} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--smoke", action="store_true", help="a miniature model, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    options.load = round(os.getloadavg()[0], 2)
    return options


def main() -> int:
    options = parse()
    if options.json:
        with only_this_on_stdout() as stdout:
            result = measure(options)
            stdout.write(json.dumps(result) + "\n")
    else:
        result = measure(options)
        show(result)
    return 0 if result["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
