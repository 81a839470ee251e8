"""Whole GRPO steps against TRL 1.16.0 on the same model: seconds, where they go, and memory.

    python benchmarks/step.py --workload A
    python benchmarks/step.py --workload B --repeats 3 --json
    python benchmarks/step.py --workload A B C --model qwen3_5-tiny

A step samples 8 completions for each of 8 prompts, scores them, works out advantages and makes one AdamW update, with
no KL term. The workloads are those of ``rollout.py``: A prompt 64, completion 128; B prompt 512, completion 64, both to
full length; C prompt 128, limit 256, a 64th of the vocabulary are end tokens.

Each side is its own trainer, doing all of its own work: TRL's ``GRPOTrainer`` in the midst of ``train()``, Cohort's in
``steps()`` with its default settings. Logs of completions, checkpoints and progress bars are off on both. Model,
prompts, reward (the number of even tokens), objective and optimizer are the same.

TRL runs in several settings (precision, completions per backward pass, its continuous batching), and the fastest one
counts. ``--trl-precisions``, ``--batches`` and ``--no-continuous`` restrict them, ``--patience`` gives up the ones
whose step takes longer: on a processor without bfloat16 units autocast takes minutes where float32 takes seconds.
Cohort and every setting have a process of their own and take turns, a step each, after one to warm up. ``ratio`` is
TRL's median over Cohort's. What a step did is read from the trainers and stands beside the times: completion tokens,
optimizer steps, the share of parameters that changed; a step that did less is an error.

Memory is the peak of a side's process over all its steps, and that less what it held once its model was built: weights
are not in it, gradients and the optimizer's state are. ``memory_ratio`` is of the latter, Cohort's over TRL's in its
fastest setting; ``memory_ratio_frugal`` over the least that any of TRL's settings took. Linux only.

``--model`` also takes one tiny model of today's architectures each: ``qwen3_5-tiny`` (gated delta rule),
``granite4-tiny`` (Mamba 2), ``lfm2-tiny`` (short convolutions), ``gpt-oss-tiny`` (sinks, windows, experts),
``qwen3_moe-tiny``. ``rollout.py`` compares the sampler alone on them. ``--quick`` makes one timed step of each side
with prompts of 32 and completions of 16 tokens: it shows that both sides work, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

from common import (
    GROUP,
    LEARNING_RATE,
    Memory,
    MissingError,
    Side,
    Turns,
    Witness,
    build_model,
    even_tokens,
    make_rows,
    make_tokenizer,
    progress,
    spread,
    temporary_run,
    train_in_turns,
    trl_config,
    trl_trainer,
)

from rollout import MINIATURE, MODELS, PRECISIONS, WORKLOADS, Shape, Workload, hardware, only_this_on_stdout, versions

PROMPTS = 8
COMPLETIONS = PROMPTS * GROUP
PARTS = ("generate", "update", "other")
TOO_SLOW = 1.8


@dataclass(frozen=True)
class Job:
    workload: Workload
    shape: Shape
    prompts: int = PROMPTS

    @property
    def ends(self) -> list[int]:
        """Tokens that end a completion."""
        count = self.shape.vocab_size // 64 if self.workload.has_ends else 0
        return random.Random(2).sample(range(1, self.shape.vocab_size), count)

    @property
    def rows(self) -> list[dict[str, str]]:
        return make_rows(32 * self.prompts, self.workload.prompt, self.shape.vocab_size)


WARM_UP = Job(Workload(8, 4, True), MINIATURE)
"""Loads whatever a side loads in its first step, before its memory is measured."""


@dataclass(frozen=True)
class Setting:
    """TRL's: how it computes the same."""

    precision: str
    batch: int
    continuous: bool = False

    def __str__(self) -> str:
        passes = f"{COMPLETIONS // self.batch} x {self.batch}"
        precision = "bfloat16 autocast" if self.precision == "bfloat16" else self.precision
        return f"{precision}, {passes}" + (", continuous batching" if self.continuous else "")


# ---- the sides


def cohort_trainer(job: Job, model: Any, precision: str, microbatch_tokens: int | None) -> Any:
    import cohort

    config = cohort.GRPOConfig(
        prompts_per_step=job.prompts,
        num_generations=GROUP,
        max_completion_length=job.workload.limit,
        learning_rate=LEARNING_RATE,
        precision=precision,
        device="cpu",
        order="sequential",
        max_steps=1_000_000,
        save_steps=0,
        progress=False,
        log_completions=False,
        output_dir=temporary_run(),
        **({"microbatch_tokens": microbatch_tokens} if microbatch_tokens else {}),
    )
    tokenizer = make_tokenizer(job.shape.vocab_size, None)
    return cohort.GRPOTrainer(model, even_tokens, config, job.rows, processing_class=tokenizer)


def cohort_side(turns: Turns, job: Job, precision: str, microbatch_tokens: int | None) -> None:
    next(cohort_trainer(WARM_UP, build_model(WARM_UP.shape, WARM_UP.ends), precision, microbatch_tokens).steps())
    model = build_model(job.shape, job.ends)
    memory = Memory()
    trainer = cohort_trainer(job, model, precision, microbatch_tokens)
    witness = Witness(model)
    steps = trainer.steps()
    report: dict[str, Any] = {"precision": str(trainer.policy.precision)}
    while True:
        turns.wait(report)
        start = time.perf_counter()
        metrics = next(steps)
        seconds = time.perf_counter() - start
        parts = {name: metrics[f"seconds/{name}"] for name in ("generate", "update")}
        report = {
            "seconds": seconds,
            **parts,
            "other": seconds - sum(parts.values()),
            "tokens": round(metrics["length/mean"] * COMPLETIONS),
            "longest": metrics["length/max"],
            "memory": memory.figures(),
            **witness.look(),
        }


def trl_side(turns: Turns, job: Job, setting: Setting) -> None:
    warm_up = make_trl(WARM_UP, build_model(WARM_UP.shape, WARM_UP.ends), setting, max_steps=1)
    warm_up.train()
    model = build_model(job.shape, job.ends)
    memory = Memory()
    trainer = make_trl(job, model, setting)
    witness = Witness(model)

    def turn(seconds: float) -> None:
        if not seconds:
            turns.wait({"precision": setting.precision})
            return
        generate, rollout = (trainer.parts[part] for part in ("generate", "rollout"))
        report = {
            "seconds": seconds,
            "generate": generate,
            "update": seconds - rollout,
            "other": rollout - generate,
            "tokens": trainer.tokens,
            "longest": trainer.longest,
        }
        turns.wait(report | {"memory": memory.figures(), **witness.look()})

    train_in_turns(trainer, turn)


def make_trl(job: Job, model: Any, setting: Setting, **more: Any) -> Any:
    if setting.continuous:
        # Its cache of the size that is needed: by default it takes half of the machine's memory.
        page = 64
        pages = -(-(job.workload.prompt + job.workload.limit) // page)
        cache = {"num_blocks": COMPLETIONS * (1 + pages), "page_size": page, "max_batch_tokens": 512}
        more |= {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": cache}
    config = trl_config(
        per_device_train_batch_size=setting.batch,
        gradient_accumulation_steps=COMPLETIONS // setting.batch,
        max_completion_length=job.workload.limit,
        bf16=setting.precision == "bfloat16",
        **more,
    )
    # It must have an end token. The one outside of the vocabulary is never drawn, and looking for it costs nothing.
    tokenizer = make_tokenizer(job.shape.vocab_size, job.ends[0] if job.ends else job.shape.vocab_size)
    return trl_trainer(model, config, job.rows, tokenizer, even_tokens)


# ---- measuring


def checked(job: Job, before: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """A step that did less than it was asked is not to be timed."""
    full = COMPLETIONS * job.workload.limit
    done = report["optimizer_steps"] - before.get("optimizer_steps", 0)
    tokens_right = report["tokens"] <= full if job.workload.has_ends else report["tokens"] == full
    if not before:  # the step to warm up: ours allocates the optimizer's state by a step that changes nothing
        done = min(done, 1)
    if done != 1 or not tokens_right or report["changed"] < 1:
        raise RuntimeError(f"expected one AdamW step on all weights and {full} tokens at most, got {report}")
    return report


def candidates(options: argparse.Namespace) -> list[Setting]:
    """TRL's settings: precisions, completions of a backward pass, and continuous batching, in float32 only: under bf16
    TRL turns the trained weights themselves into bfloat16."""
    found = [Setting(precision, batch) for batch in options.batches for precision in options.trl_precisions]
    return [*found, Setting("float32", options.batches[-1], continuous=True)] if options.continuous else found


def run_in_turns(job: Job, options: argparse.Namespace) -> tuple[str, dict[Setting | str, Any]]:
    """Reports of Cohort and of each of TRL's settings, a step each in turns, the first of each to warm up; and the
    precision of ours. What is far slower than TRL's fastest after its first timed step does no more."""
    reports: dict[Setting | str, list[dict[str, Any]]] = {}
    missing: dict[Setting | str, str] = {}
    with contextlib.ExitStack() as stack:
        sides: dict[Setting | str, Side] = {}
        ours = Side(cohort_side, job, options.precision, options.microbatch_tokens, threads=options.threads)
        sides["cohort"] = stack.enter_context(ours)
        for setting in candidates(options):
            try:
                sides[setting] = stack.enter_context(Side(trl_side, job, setting, threads=options.threads))
            except MissingError as error:
                missing[setting] = str(error)
        for repeat in range(1 + options.repeats):
            first = repeat % len(sides)
            order = list(sides)
            for name in [*order[first:], *order[:first]]:
                own = reports.setdefault(name, [])
                try:
                    patience = None if name == "cohort" else options.patience
                    own.append(checked(job, own[-1] if own else {}, sides[name].ask(patience=patience)))
                except MissingError as error:
                    missing[name] = str(error)
                    del reports[name], sides[name]
                    continue
                progress(f"{name}: {own[-1]}")
            if repeat == 1:
                times = {name: own[-1]["seconds"] for name, own in reports.items() if name != "cohort"}
                for name in [name for name, spent in times.items() if spent > TOO_SLOW * min(times.values())]:
                    sides.pop(name).close()
        return ours.first["precision"], {**reports, **missing}


def median(reports: list[dict[str, Any]], key: str) -> float:
    return statistics.median(report[key] for report in reports[1:])


def measure(job: Job, name: str, options: argparse.Namespace) -> dict[str, Any]:
    precision, found = run_in_turns(job, options)
    missing = {str(name): why for name, why in found.items() if isinstance(why, str)}
    reports = {name: own for name, own in found.items() if not isinstance(own, str)}
    tried = {setting: own for setting, own in reports.items() if isinstance(setting, Setting)}
    if "cohort" not in reports or not tried:
        raise SystemExit("; ".join(f"{name}: {why}" for name, why in missing.items()))
    whole = [setting for setting, own in tried.items() if len(own) > options.repeats]
    best = min(whole, key=lambda setting: median(tried[setting], "seconds"))
    sides = {"cohort": reports["cohort"], "trl": tried[best]}
    memory = {name: own[-1]["memory"] for name, own in sides.items()}
    seconds = {name: spread([report["seconds"] for report in own[1:]]) for name, own in sides.items()}
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(sides["trl"][1:], sides["cohort"][1:], strict=True)]
    least = min(own[-1]["memory"]["above"] for own in tried.values())
    return {
        "workload": name,
        "quick": options.quick,
        "model": options.model,
        "completions": COMPLETIONS,
        "ratio": round(seconds["trl"]["median"] / seconds["cohort"]["median"], 3),
        "ratio_of_rounds": spread(ratios),
        "memory_ratio": round(memory["cohort"]["above"] / memory["trl"]["above"], 3),
        "memory_ratio_frugal": round(memory["cohort"]["above"] / least, 3),
        "memory_ratio_absolute": round(memory["cohort"]["peak"] / memory["trl"]["peak"], 3),
        "seconds": seconds,
        "parts": {name: {part: round(median(own, part), 4) for part in PARTS} for name, own in sides.items()},
        "tokens": {name: [report["tokens"] for report in own[1:]] for name, own in sides.items()},
        "work": {
            name: {
                "optimizer_steps": own[-1]["optimizer_steps"] - own[0]["optimizer_steps"],
                "changed": min(report["changed"] for report in own),
                "longest": max(report["longest"] for report in own),
            }
            for name, own in sides.items()
        },
        "memory_mib": memory,
        "settings": {
            "cohort": f"{options.microbatch_tokens or 'default'} tokens a pass, {precision}",
            "trl": str(best),
        },
        "trl_settings": {
            str(setting): {part: round(median(own, part), 4) for part in ("seconds", *PARTS)}
            | {"steps": len(own) - 1, "memory_mib": own[-1]["memory"]}
            for setting, own in tried.items()
        },
        "unavailable": missing,
        "repeats": options.repeats,
        "threads": options.threads,
        "hardware": hardware("cpu"),
        "load_before": options.load,
        "versions": versions([]),
    }


# ---- report


def show(job: Job, result: dict[str, Any]) -> None:
    print(f"Workload {result['workload']}: {job.workload}, {PROMPTS} prompts x {GROUP} completions, one update a step")
    print(f"{result['model']}, cpu, {result['hardware']}, {result['threads']} threads", end=", ")
    print(f"load before {result['load_before']}; " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()))
    print(f"medians of {result['repeats']} steps, in turns; memory of each side's process\n")
    print("| side | setting | step, s | generate | update | other | tokens a step | peak MiB | above the model, MiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, setting in result["settings"].items():
        seconds, parts, memory = (result[key][name] for key in ("seconds", "parts", "memory_mib"))
        spent = f"{seconds['median']:.3f} [{seconds['min']:.3f} to {seconds['max']:.3f}]"
        split = " | ".join(f"{parts[part]:.3f}" for part in PARTS)
        tokens = statistics.mean(result["tokens"][name])
        print(f"| {name} | {setting} | {spent} | {split} | {tokens:,.0f}", end=" | ")
        print(f"{memory['peak']:,.0f} | {memory['above']:,.0f} |")
    print(f"\nWork in {result['repeats']} steps: ", end="")
    print(
        "; ".join(
            f"{name} {work['optimizer_steps']} AdamW steps, {work['changed']:.0%} of the parameters changed in each"
            for name, work in result["work"].items()
        )
    )
    print("\n| TRL's settings | steps | step, s | generate | update | peak MiB | above the model, MiB |")
    print("|---|---|---|---|---|---|---|")
    for setting, tried in result["trl_settings"].items():
        times = " | ".join(f"{tried[part]:.3f}" for part in ("seconds", "generate", "update"))
        memory = tried["memory_mib"]
        print(f"| {setting} | {tried['steps']} | {times} | {memory['peak']:,.0f} | {memory['above']:,.0f} |")
    for setting, why in result["unavailable"].items():
        print(f"| {setting} | | {why} | | | | |")
    rounds = result["ratio_of_rounds"]
    print(f"\nTRL / Cohort, seconds of a step: {result['ratio']:.2f}", end=" ")
    print(f"(of single rounds: {rounds['min']:.2f} to {rounds['max']:.2f})")
    print(f"Cohort / TRL, peak above the model: {result['memory_ratio']:.2f}", end="")
    print(f"; against TRL's most frugal setting: {result['memory_ratio_frugal']:.2f}", end="")
    print(f"; whole processes: {result['memory_ratio_absolute']:.2f}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, nargs="+", required=True)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto", help="ours")
    parser.add_argument("--microbatch-tokens", type=int, help="ours; default: the trainer's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 16, 8], help="TRL's completions a pass")
    parser.add_argument("--trl-precisions", choices=PRECISIONS, nargs="+", default=list(PRECISIONS), help="TRL's")
    parser.add_argument("--patience", type=float, default=900, help="seconds after which a step of TRL is given up")
    parser.add_argument("--no-continuous", dest="continuous", action="store_false", help="do not try it for TRL")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="does everything work? The times mean nothing")
    parser.add_argument(
        "--json", action="store_true", help="a JSON object per workload on standard output, nothing else"
    )
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.batches, options.continuous = 1, options.batches[:1], False
    if min(options.repeats, options.threads) < 1 or any(b < 1 or COMPLETIONS % b for b in options.batches):
        parser.error(f"--repeats and --threads must be at least 1, --batches must divide {COMPLETIONS}")
    options.load = round(os.getloadavg()[0], 2)
    return options


def main() -> None:
    options = parse()
    for name in options.workload:
        workload = replace(WORKLOADS[name], prompt=32, limit=16) if options.quick else WORKLOADS[name]
        job = Job(workload, MODELS[options.model])
        if not options.json:
            show(job, measure(job, name, options))
            continue
        with only_this_on_stdout() as stdout:
            stdout.write(json.dumps(measure(job, name, options)) + "\n")


if __name__ == "__main__":
    main()
