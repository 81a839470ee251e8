"""Everything that needs a GPU, in at most ten minutes on one: tests, ``cohort doctor --gpu``, decoding and updates.

    python benchmarks/gpu.py --out gpu.json               on the machine with the GPU (``make gpu`` does this)
    python benchmarks/gpu.py --render gpu.json            the tables for docs/benchmarks.md
    python benchmarks/gpu.py --out x.json --device cpu --tiny   does everything work? The times mean nothing

Parts run one after another, each in a process of its own with a time limit, and a part that fails or takes too long
does not stop the others. Results are written after each part. Only torch and what ``pyproject.toml`` names is needed;
Cohort itself need not be installed (CONTRIBUTING.md says how to carry packages to a machine without an index).

decode   random weights of Qwen3's shapes, in bfloat16: 32 prompts of 128 tokens with 8 completions of 96 each, ours
         against ``transformers.generate`` as TRL calls it, with autocast over float32 weights and with bfloat16
         weights, the faster of which counts.
update   one AdamW step on 8 prompts of 128 tokens with 8 completions of 32 to 512 tokens each (log-uniform), ours
         against a plain one: completions padded to the longest, the prompt repeated, all logits at once with torch's
         cross entropy, autocast, so many rows a pass as ``--rows`` says, of which the fastest counts. Both step the
         same float32 weights with the same fused AdamW.

The sides of a part take turns in one process, after a warm-up; figures are medians. A ratio above 1 means that Cohort
is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rollout import (
    GROUP,
    MODELS,
    Job,
    Shape,
    Side,
    Workload,
    generate_side,
    hardware,
    measure,
    only_this_on_stdout,
    versions,
)
from rollout import cohort_side as decode_side

ROOT = Path(__file__).parents[1]
TESTS = ("tests/gpu", "tests/cuda_rules")
"""Where tests for a real device are: those marked ``gpu`` are run. The whole trainers of ``cuda_rules`` belong here."""
SHAPES = ("qwen3-0.6b", "qwen3-1.7b")
TINY = Shape("qwen3", 64, 2, 4, 2, 16, 128, 512)
LIMITS = {"machine": 30, "tests": 180, "doctor": 90, "decode": 75, "update": 75}
"""Seconds of a part, at most."""


@dataclass(frozen=True)
class Size:
    """Prompts that are decoded and updated; tokens of a prompt, a decoded completion and the longest updated one."""

    decoded: int = 32
    updated: int = 8
    prompt: int = 128
    completion: int = 96
    longest: int = 512
    repeats: int = 3


SMALL = Size(2, 2, 8, 8, 32, 1)


# ---- parts, each in a process of its own


def machine(_shape: Shape, _size: Size, options: argparse.Namespace) -> dict[str, Any]:
    found = {"hardware": hardware(options.device), "versions": versions([])}
    if options.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"cuda": torch.version.cuda, "capability": f"{properties.major}.{properties.minor}"}
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return found


def decode(shape: Shape, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    workload = Workload(size.prompt, size.completion, has_ends=False)
    job = Job(workload, shape, options.device, size.decoded * GROUP, torch.get_num_threads(), "")
    model = shape.model(job.device, torch.float32)
    half = copy.deepcopy(model).bfloat16()
    sides = [
        replace(decode_side(job, model, "bfloat16"), precision="bfloat16 over float32 weights"),
        generate_side(job, model, "bfloat16"),
        replace(generate_side(job, half, "float32"), precision="bfloat16 weights"),
    ]
    for side in sides:
        side.run(0)
    found = compared(sides, peaks_of(job, sides, size.repeats), unit="tokens/s")
    return found | {"steps_per_second": round(size.completion / sides[0].median, 1)}


def peaks_of(job: Job, sides: Sequence[Side], repeats: int) -> list[int | None]:
    """Time warm sides in turns, after a call of each for the peak of its memory above what was there, in bytes."""
    found: list[int | None] = []
    for side in sides:
        if job.device != "cuda":
            found.append(None)
            continue
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        side.run(0)
        found.append(torch.cuda.max_memory_allocated() - before)
    measure(job, sides, repeats)
    return found


def update(shape: Shape, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    from common import laid_out

    from cohort.config import OptimConfig
    from cohort.objective import PRESETS
    from cohort.policy import Policy, Precision
    from cohort.rollout import Sampling
    from cohort.train import Optimizer, StepContext, TokenBudget, part_of
    from cohort.train import update as cohort_update

    device, draw = options.device, random.Random(0)
    model = shape.model(device, torch.float32)
    optimizer = Optimizer(model, OptimConfig(learning_rate=1e-6), 1)
    prompts = [[draw.randrange(shape.vocab_size) for _ in range(size.prompt)] for _ in range(size.updated)]
    lengths = [round(math.exp(draw.uniform(math.log(32), math.log(size.longest)))) for _ in range(GROUP * size.updated)]
    completions = [[draw.randrange(shape.vocab_size) for _ in range(length)] for length in lengths]
    advantages = [1.0 - 2.0 * (number % 2) for number in range(len(completions))]
    batch = laid_out(prompts, completions, advantages, device)
    policy = Policy(model, Precision(torch.float32, torch.bfloat16))
    context = StepContext(policy, optimizer, PRESETS["default"], Sampling(size.longest), TokenBudget(16_384))
    whole = part_of(batch, range(batch.num_sequences))

    def ours(_seed: int) -> list[int]:
        norms["cohort"] = context.within_memory(cohort_update, batch, whole).grad_norm
        optimizer.zero_grad()
        return lengths

    def plain(rows: int) -> Callable[[int], list[int]]:
        def run(_seed: int) -> list[int]:
            norms[f"plain, {rows} rows"] = plain_update(model, optimizer, prompts, completions, advantages, rows)
            return lengths

        return run

    norms: dict[str, float] = {}
    job = Job(Workload(size.prompt, size.longest, has_ends=True), shape, device, len(lengths), 1, "")
    sides = [Side("cohort", "bfloat16 over float32 weights", ours)]
    sides += [Side("plain", f"bfloat16 autocast, {rows} rows a pass", plain(rows)) for rows in options.rows]
    kept, missing = [], {}
    for side in sides:  # more rows than fit are no reason to have no figure
        try:
            side.run(0)
            kept.append(side)
        except torch.OutOfMemoryError:
            if side is sides[0]:
                raise
            missing[f"{side.name}, {side.precision}"] = "out of memory"
            optimizer.zero_grad()
    found = compared(kept, peaks_of(job, kept, size.repeats), unit="drawn tokens/s")
    return found | {"grad_norms": norms, "unavailable": missing}


def plain_update(
    model: Any,
    optimizer: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    advantages: Sequence[float],
    rows: int,
) -> float:
    """A GRPO step as it is often written: the clipped loss of the mean over sequences of means over tokens, with padded
    rows. Returns the gradient's norm."""
    device = next(model.parameters()).device
    longest, width = max(map(len, completions)), len(prompts[0])
    group = len(completions) // len(prompts)
    for start in range(0, len(completions), rows):
        own = range(start, min(start + rows, len(completions)))
        ids = torch.zeros(len(own), width + longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, number in enumerate(own):
            tokens = [*prompts[number // group], *completions[number]]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        ids, mask = ids.to(device), mask.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            output = model(input_ids=ids, attention_mask=mask, logits_to_keep=longest + 1, use_cache=False)
        logits = output.logits[:, :-1]
        targets, seen = ids[:, -longest:], mask[:, -longest:]
        losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        logps = -losses.view_as(targets)
        ratio = (logps - logps.detach()).exp()
        advantage = torch.tensor([advantages[number] for number in own], device=device)[:, None]
        per_token = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) * seen
        (per_token.sum(1) / seen.sum(1)).sum().div(len(completions)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for rule in optimizer.rules:
        rule.step()
    optimizer.zero_grad()
    return float(norm)


def compared(sides: Sequence[Side], peaks: Sequence[int | None], *, unit: str) -> dict[str, Any]:
    """What the sides took; the ratio is to the fastest of the others."""
    ours, *others = sides
    found = {
        "unit": unit,
        "sides": [
            {
                "name": side.name,
                "setting": side.precision,
                "seconds": [round(spent, 4) for spent in side.seconds],
                "tokens": sum(side.lengths[0]),
                "rate": round(side.tokens_per_second, 1),
                "peak_mib": None if most is None else round(most / 2**20),
            }
            for side, most in zip(sides, peaks, strict=True)
        ],
    }
    if others:
        found["ratio"] = round(min(side.median for side in others) / ours.median, 3)
    return found


WORKERS: dict[str, Callable[[Shape, Size, argparse.Namespace], dict[str, Any]]] = {
    "machine": machine, "decode": decode, "update": update,
}  # fmt: skip


def worker(options: argparse.Namespace) -> None:
    """One part; prints its result as JSON."""
    with only_this_on_stdout() as stdout:
        shape = TINY if options.tiny else MODELS[options.model]
        result = WORKERS[options.worker](shape, SMALL if options.tiny else Size(), options)
        stdout.write(json.dumps(result) + "\n")


# ---- all of them


def run_part(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Run a command for at most so long, with all that it starts; its output, and what became of it."""
    start = time.perf_counter()
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    problem = ""
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        problem = f"it had not ended after {seconds:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, errors = process.communicate()
    if process.returncode and not problem:
        last = (errors.strip() or out.strip() or "no word").splitlines()[-1]
        problem = f"exit code {process.returncode}: {last}"
    return {"seconds": round(time.perf_counter() - start, 1), "problem": problem, "out": out, "errors": errors[-4000:]}


def run_tests(found: dict[str, Any]) -> dict[str, Any]:
    """Adds what pytest said: its last line, and the tests that failed."""
    lines = found.pop("out").strip().splitlines()
    found["summary"] = next((line.strip("= ") for line in reversed(lines) if re.search(r" in \d", line)), "no summary")
    found["failed"] = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    found["tail"] = lines[-40:] if found["problem"] else []
    return found


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    own = [sys.executable, __file__, "--device", options.device, *(["--tiny"] if options.tiny else [])]
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-rfE",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        *TESTS,
    ]
    if options.device == "cpu":
        pytest.append("--collect-only")
    doctor = [sys.executable, "-m", "cohort", "doctor", "--gpu", "--json", "--device", options.device]
    commands = {"machine": [*own, "--worker", "machine"], "tests": pytest, "doctor": doctor}
    for shape in ("tiny",) if options.tiny else SHAPES:
        for name in ("decode", "update"):
            rows = ["--rows", *map(str, options.rows)]
            commands[f"{name} {shape}"] = [*own, "--worker", name, *([] if options.tiny else ["--model", shape]), *rows]
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "device": options.device, "tiny": options.tiny
    }  # fmt: skip
    result["parts"], until = {}, time.monotonic() + 60 * options.minutes
    for name, command in commands.items():
        left = min(LIMITS[name.split()[0]], until - time.monotonic())
        print(f"{name}: at most {left:.0f} s", file=sys.stderr, flush=True)
        found = run_part(command, max(1.0, left))
        if name == "tests":
            found = run_tests(found)
        else:
            with contextlib.suppress(json.JSONDecodeError):
                found["result"] = json.loads(found.pop("out"))
        result["parts"][name] = found
        print(f"  {found['seconds']} s {found['problem'] or found.get('summary', '')}", file=sys.stderr, flush=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return result


# ---- report


def render(result: dict[str, Any]) -> str:
    """The results as Markdown."""
    parts = result["parts"]
    about = parts["machine"].get("result", {"hardware": "unknown", "versions": {}})
    facts = [about["hardware"]]
    if "cuda" in about:
        facts.append(f"{about['memory_gib']} GiB, capability {about['capability']}, CUDA {about['cuda']}")
    facts += [f"{name} {version}" for name, version in about["versions"].items()]
    lines = [f"{result['date']}, {', '.join(facts)}.", ""]
    if result["tiny"] or result["device"] == "cpu":
        lines += ["**Tiny, or on a CPU: these figures mean nothing.**", ""]
    lines += [
        "| part | side | setting | seconds | rate | above the weights, MiB | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, part in parts.items():
        if name.split()[0] not in ("decode", "update"):
            continue
        if "result" not in part:
            lines.append(f"| {name} | not measured: {part['problem']} | | | | | |")
            continue
        found = part["result"]
        others = [statistics.median(side["seconds"]) for side in found["sides"][1:]]
        for side in found["sides"]:
            spent = side["seconds"]
            is_best = side["name"] != "cohort" and statistics.median(spent) == min(others)
            cells = [
                name, side["name"], side["setting"],
                f"{statistics.median(spent):.3f} [{min(spent):.3f} to {max(spent):.3f}]",
                f"{side['rate']:,.0f} {found['unit']}", "" if side["peak_mib"] is None else f"{side['peak_mib']:,}",
                f"{found['ratio']:.2f}" if is_best else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines += [f"| {name} | {side} | {why} | | | | |" for side, why in found.get("unavailable", {}).items()]
    tests, doctor = parts.get("tests"), parts.get("doctor", {})
    if tests:
        lines += ["", f"Tests ({', '.join(TESTS)}): {tests['summary']}{tests['problem'] and '; ' + tests['problem']}"]
        lines += [f"- failed: `{one}`" for one in tests["failed"]]
    lines += ["", "| `cohort doctor --gpu` | | |", "|---|---|---|"]
    for finding in doctor.get("result", {}).get("findings", ()):
        lines.append(f"| {finding['check']} | {finding['status']} | {finding['found'].replace(chr(10), '; ')} |")
    if "result" not in doctor:
        lines.append(f"| | | not made: {doctor.get('problem', '')} |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--render", type=Path, metavar="JSON", help="print the tables of a result, and run nothing")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--minutes", type=float, default=10, help="of all parts together, at most")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16], help="of a pass of the plain update")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=SHAPES, default=SHAPES[0], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not options.render and not torch.cuda.is_available():
        parser.error("torch.cuda.is_available() is False: 'cohort doctor --gpu' says what is needed")
    return options


def main() -> int:
    options = parse()
    if options.worker:
        worker(options)
        return 0
    result = json.loads(options.render.read_text()) if options.render else run_all(options)
    print(render(result))
    return int(any(part["problem"] for part in result["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
