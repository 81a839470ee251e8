"""A GRPO step of a real pretrained model against TRL 1.16.0, its memory, and the sampler against ``generate``.

    python benchmarks/real.py SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/real.py FOLDER --prompts 4 --limit 16 --repeats 1      small and quick

MODEL is a folder or a GGUF file (extra "gguf"). Prompts are sums in words, in the model's chat template if it has one.
A step samples 8 completions for each prompt, scores them by the number of even tokens, and makes one AdamW update with
no KL term; the settings are those of ``step.py``. Four sides have a process of their own and take turns, a step each,
after one to warm up: Cohort and TRL in float32, and each in its fastest setting: Cohort's own choice for the machine,
and TRL under bfloat16. A ratio is TRL's median over Cohort's. Since all sides run in turns, other work on the machine
slows all of them; the ratios keep their meaning, and the seconds do not.

``--sampler`` compares Cohort's sampler with transformers' ``generate`` on the same prompts, in float32 and bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import time
from typing import Any

import torch
from common import (
    GROUP,
    LEARNING_RATE,
    Memory,
    MissingError,
    Side,
    Stop,
    Turns,
    Witness,
    even_tokens,
    progress,
    quiet,
    temporary_run,
    train_in_turns,
    trl_config,
    trl_trainer,
)

from cohort.policy import Precision, load_model, load_tokenizer
from rollout import hardware, only_this_on_stdout, versions

SIDES = {
    "cohort float32": ("cohort", "float32"),
    "trl float32": ("trl", "float32"),
    "cohort auto": ("cohort", "auto"),
    "trl bfloat16": ("trl", "bfloat16"),
}
SINGLE = Precision(torch.float32, torch.float32)


def rows_of(tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Prompts: sums of two numbers below 100."""
    draw = random.Random(1)
    texts = [
        f"What is {draw.randrange(10, 100)} + {draw.randrange(10, 100)}? Reply with the number only."
        for _ in range(count)
    ]
    if tokenizer.chat_template:
        return [{"prompt": [{"role": "user", "content": text}]} for text in texts]
    return [{"prompt": text} for text in texts]


def side(turns: Turns, kind: str, precision: str, options: argparse.Namespace) -> None:
    quiet()
    tokenizer = load_tokenizer(options.model)
    model = load_model(options.model, SINGLE, torch.device("cpu"))
    memory, rows = Memory(), rows_of(tokenizer, 8 * options.prompts)
    (cohort_steps if kind == "cohort" else trl_steps)(turns, model, tokenizer, rows, precision, options, memory)


def cohort_steps(
    turns: Turns, model: Any, tokenizer: Any, rows: Any, precision: str, options: argparse.Namespace, memory: Memory
) -> None:
    import cohort

    config = cohort.GRPOConfig(
        prompts_per_step=options.prompts,
        num_generations=GROUP,
        max_completion_length=options.limit,
        learning_rate=LEARNING_RATE,
        precision=precision,
        device="cpu",
        order="sequential",
        max_steps=1_000_000,
        save_steps=0,
        progress=False,
        log_completions=False,
        output_dir=temporary_run(),
    )
    trainer = cohort.GRPOTrainer(model, even_tokens, config, rows, processing_class=tokenizer)
    witness, steps, report = Witness(model), trainer.steps(), {"precision": str(trainer.policy.precision)}
    while True:
        try:
            turns.wait(report)
        except Stop:  # a loop that is left writes a checkpoint, which nobody needs
            os._exit(0)
        start = time.perf_counter()
        metrics = next(steps)
        report = {
            "seconds": time.perf_counter() - start,
            "generate": metrics["seconds/generate"],
            "update": metrics["seconds/update"],
            "tokens": round(metrics["length/mean"] * options.prompts * GROUP),
            "memory": memory.figures(),
            **witness.look(),
        }


def trl_steps(
    turns: Turns, model: Any, tokenizer: Any, rows: Any, precision: str, options: argparse.Namespace, memory: Memory
) -> None:
    config = trl_config(
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.prompts * GROUP // options.batch,
        max_completion_length=options.limit,
        bf16=precision == "bfloat16",
    )
    trainer = trl_trainer(model, config, rows, tokenizer, even_tokens)
    witness = Witness(model)

    def turn(seconds: float) -> None:
        if not seconds:
            turns.wait({"precision": precision})
            return
        report = {
            "seconds": seconds,
            "generate": trainer.parts["generate"],
            "update": seconds - trainer.parts["rollout"],
            "tokens": trainer.tokens,
            "memory": memory.figures(),
        }
        turns.wait(report | witness.look())

    train_in_turns(trainer, turn)


def steps_in_turns(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The reports of each side's timed steps."""
    found: dict[str, list[dict[str, Any]]] = {}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name in options.sides:
            sides[name] = stack.enter_context(Side(side, *SIDES[name], options, threads=options.threads))
        for repeat in range(1 + options.repeats):
            for name, one in list(sides.items()):
                try:
                    report = one.ask(patience=options.patience)
                except MissingError as error:
                    progress(f"{name}: {error}")
                    sides.pop(name)
                    continue
                progress(f"{name}: {report}")
                if report["optimizer_steps"] < 1 or not report["changed"]:
                    raise RuntimeError(f"{name}: expected an AdamW step on the weights, got {report}")
                if repeat:
                    found.setdefault(name, []).append(report)
    return found


def sampler_against_generate(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the same number of drawn tokens, in turns, with no end token on either side."""
    from cohort.policy import Policy
    from cohort.rollout import LocalEngine, RNGKey, Sampling
    from cohort.types import Prompt

    tokenizer = load_tokenizer(options.model)
    rows = rows_of(tokenizer, options.prompts)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        texts = [
            tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
            if tokenizer.chat_template
            else row["prompt"]
            for row in rows
        ]
        ids = [tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"] for text in texts]
        own = load_model(options.model, SINGLE, torch.device("cpu"))
        engine = LocalEngine(Policy(own, Precision(torch.float32, dtype)), tokenizer, end_token_ids=())
        theirs = load_model(options.model, SINGLE, torch.device("cpu")).to(dtype)
        theirs.generation_config.eos_token_id = theirs.config.eos_token_id = None
        prompts = [Prompt(uid, uid, tuple(one), "", "", {}) for uid, one in enumerate(ids)]
        sampling = Sampling(max_completion_length=options.limit)
        tokenizer.padding_side = "left"
        repeated = [one for one in ids for _ in range(GROUP)]
        padded = tokenizer.pad({"input_ids": repeated}, return_tensors="pt")
        seconds: dict[str, list[float]] = {"cohort": [], "generate": []}
        for repeat in range(1 + options.repeats):
            start = time.perf_counter()
            engine.generate(prompts, GROUP, sampling, RNGKey(0, repeat))
            seconds["cohort"].append(time.perf_counter() - start)
            start = time.perf_counter()
            with torch.no_grad():
                theirs.generate(
                    **padded, do_sample=True, top_k=0, max_new_tokens=options.limit, pad_token_id=tokenizer.pad_token_id
                )
            seconds["generate"].append(time.perf_counter() - start)
        name = str(dtype).removeprefix("torch.")
        middle = {key: statistics.median(values[1:]) for key, values in seconds.items()}
        found[name] = {**middle, "ratio": middle["generate"] / middle["cohort"]}
        progress(f"sampler {name}: {found[name]}")
    return found


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of each side, and ratios of pairs of sides: seconds, and the peak above the model."""
    medians = {
        name: {key: round(statistics.median(one[key] for one in own), 3) for key in ("seconds", "generate", "update")}
        | {"above_mib": max(one["memory"]["above"] for one in own), "tokens": own[-1]["tokens"]}
        for name, own in found.items()
    }
    pairs = (("trl float32", "cohort float32"), ("trl float32", "cohort auto"), ("trl bfloat16", "cohort auto"))
    ratios = {
        f"{theirs} / {ours}": {
            key: round(medians[theirs][key] / medians[ours][key], 2) for key in ("seconds", "above_mib")
        }
        for theirs, ours in pairs
        if theirs in medians and ours in medians
    }
    return {"sides": medians, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--limit", type=int, default=32, help="drawn tokens of a completion at most")
    parser.add_argument("--batch", type=int, default=16, help="completions of TRL's backward pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=[*SIDES])
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds that a step may take")
    parser.add_argument("--sampler", action="store_true", help="also compare the sampler with generate")
    options = parser.parse_args()
    with only_this_on_stdout() as result:
        torch.set_num_threads(options.threads)
        load_tokenizer(options.model)  # a GGUF file is read once, before the sides ask for it
        found = summary(steps_in_turns(options)) if options.sides else {}
        if options.sampler:
            found["sampler"] = sampler_against_generate(options)
        print(json.dumps({"hardware": hardware("cpu"), "versions": versions([]), **found}, indent=1), file=result)


if __name__ == "__main__":
    main()
