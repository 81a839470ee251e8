"""The part ``demo`` of ``episodes.py``: steps of ``cohort demo tool`` against TRL 1.16.0's own loop.

Model, tokenizer, template, problems, calculator, rewards and settings are those of the demo: 32 problems x 8
trajectories a step, at most 4 turns and 96 tokens, AdamW, float32. Neither side writes logs or checkpoints. Both read
the same problems in the same order. TRL gets what it lacks: a ``response_template`` that reads the calls. Of its
settings (``--demo-batches``: completions of a backward pass; ``--continuous``), the fastest counts.

``--after N`` begins with the model after N steps of the demo, which Cohort trains first: the share of trajectories that
are copies of another one, or have no advantage, grows as the model learns.

The sides sample at temperature 1 with their own random numbers, so their work agrees on average only. An error is
raised if well-formed calls, turns or drawn tokens, over all rounds, differ by more than ``TOLERANCE``. Garbled calls
are not compared: Cohort counts them and answers with an error, after which another turn is drawn; TRL takes them for
text and ends the trajectory, which is less work.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import Side, Turns, quiet, temporary_run, trl_config, trl_trainer
from episodes_trl import Reports, cohort_steps, in_turns_of, show, trl_steps

TOLERANCE = {"well formed": 0.15, "turns": 0.1, "tokens": 0.1}
"""At the start, a trajectory makes 0.28 +- 0.45 calls: 3 standard errors of the difference between two sides are 15%
over 8 rounds of 256 trajectories. They are 3% of turns; the rest is room for what answers to garbled calls add."""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}


def demo_rows() -> list[dict[str, str]]:
    from cohort.demo.tool import TRAIN_PRODUCTS
    from cohort.demo.tool_task import products, sums

    easy, hard = sums(), products(TRAIN_PRODUCTS, held_out=False, seed=0)
    rows = [*easy * (len(hard) // len(easy)), *hard]
    random.Random(0).shuffle(rows)
    return rows


def demo_config() -> Any:
    from cohort.config import load_config
    from cohort.demo.tool import SETTINGS

    off = ["--data.order", "sequential", "--run.save_steps", "0", "--report.progress", "false"]
    off += ["--report.log_completions", "false", "--run.output_dir", temporary_run()]
    return load_config(SETTINGS, off)


def demo_model(path: Path | None) -> Any:
    """The demo's model, with the weights of a file if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    from cohort.demo.tool import MODEL

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if path is not None:
        model.load_state_dict(torch.load(path))
    return model


def demo_tokenizer() -> Any:
    from transformers import AutoTokenizer

    from cohort.demo.tool import MODEL

    return AutoTokenizer.from_pretrained(MODEL)


def cohort_side(turns: Turns, path: Path | None) -> None:
    cohort_steps(turns, cohort_trainer(path))


def cohort_trainer(path: Path | None) -> Any:
    from cohort import GRPOTrainer
    from cohort.demo.tool_task import calls, right

    model, rewards = demo_model(path), [right, calls]
    return GRPOTrainer(model, rewards, demo_config(), demo_rows(), processing_class=demo_tokenizer())


def learn(turns: Turns, steps: int, path: Path) -> None:
    """Train the demo's model for some steps, and save its weights."""
    import torch

    trainer = cohort_trainer(None)
    for _ in zip(range(steps), trainer.steps(), strict=False):
        pass
    torch.save(trainer.policy.model.state_dict(), path)
    turns.wait({"steps": steps})


def trl_side(turns: Turns, path: Path | None, batch: int, continuous: bool) -> None:
    from cohort.environments.tools import calculator

    ours, tokenizer = demo_config(), demo_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    completions, limit = (
        ours.rollout.prompts_per_step * ours.rollout.num_generations,
        ours.rollout.max_completion_length,
    )
    more: dict[str, Any] = {}
    if continuous:  # with a cache of the size that is needed
        cache = {"num_blocks": completions * 4, "page_size": 32, "max_batch_tokens": 512}
        more |= {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": cache}
    config = trl_config(
        num_generations=ours.rollout.num_generations,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=completions // batch,
        max_completion_length=limit,
        max_tool_calling_iterations=ours.environment.max_turns - 1,
        learning_rate=ours.optim.learning_rate,
        lr_scheduler_type=ours.optim.lr_scheduler_type,
        warmup_steps=ours.optim.warmup_steps,
        max_steps=ours.run.max_steps,
        reward_weights=list(ours.reward.weights),
        **more,
    )

    def right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return [float(one[-1]["content"] == own) for one, own in zip(completions, answer, strict=True)]

    def calls(completions: list[Any], **_: Any) -> list[float]:
        return [float(sum(len(message.get("tool_calls", ())) for message in one)) for one in completions]

    rows = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in demo_rows()]
    trainer = trl_trainer(demo_model(path), config, rows, tokenizer, [right, calls], tools=[calculator])
    trl_steps(turns, trainer, f"float32, {completions // batch} x {batch}" + ", continuous batching" * continuous)


def compare(options: argparse.Namespace) -> None:
    quiet()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder).resolve() / "weights.pt" if options.after else None
        if path:
            Side(learn, options.after, path, threads=options.threads).close()

        def side(work: Any, *arguments: Any) -> Side:
            return stack.enter_context(Side(work, path, *arguments, threads=options.threads))

        sides = {"cohort": side(cohort_side)}
        for batch in options.demo_batches:
            sides[f"trl, {batch} a pass"] = side(trl_side, batch, False)
        if options.continuous:
            sides["trl, continuous batching"] = side(trl_side, options.demo_batches[0], True)
        reports = in_turns_of(sides, options.repeats)
    start = f"step {options.after} of the demo's run" if options.after else "the shipped model"
    show(reports, f"`cohort demo tool`, from {start} on")
    ours = reports["cohort"]
    shares = {"distinct": "distinct trajectories of all", "no advantage": "tokens without an advantage"}
    print("; ".join(f"{name}: {statistics.mean(one[key] for one in ours):.0%}" for key, name in shares.items()))
    rewards = {name: statistics.mean(one["reward"] for one in own) for name, own in reports.items()}
    print("mean reward: " + ", ".join(f"{name} {value:.3f}" for name, value in rewards.items()), flush=True)
    check_work(reports)


def check_work(reports: Reports) -> None:
    """On average, all sides draw as many tokens, well-formed calls and turns."""
    for key, tolerance in TOLERANCE.items():
        means = {name: statistics.mean(one[key] for one in own) for name, own in reports.items()}
        off = {name: mean / means["cohort"] - 1 for name, mean in means.items()}
        print(
            f"{'well-formed calls' if key == 'well formed' else key} a step: "
            + ", ".join(f"{name} {means[name]:,.1f} ({off[name]:+.1%})" for name in means)
        )
        if max(map(abs, off.values())) > tolerance:
            raise RuntimeError(f"expected as many {key} of all sides within {tolerance:.0%}, got {means}")
