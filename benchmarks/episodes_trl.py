"""The part ``trl`` of ``episodes.py``: a GRPO step with a tool against TRL 1.16.0's own loop.

A register has entries; a lookup returns a line of some 75 tokens that names the next one. Each of 8 prompts asks to
follow the register from its entry 10: three calls (``--calls``), one after the other, then an answer. A tiny Qwen3
model first learns these conversations by heart, so that both sides draw as many tokens, calls and turns: a round in
which they differ by more than 0.1% is an error. The trajectories of a group are the same, or begin with a plan of four
digits that the policy draws at random (``--apart``), and then no two of them share a call. What Cohort computes once
for several trajectories of a group, it saves in the first case only.

Both sides have the model, tokenizer, chat template (Qwen3's, which TRL knows), tool, prompts, reward, objective,
optimizer, float32 and limits in common; each is its own trainer in a process of its own, and they take turns. TRL calls
``generate`` anew for each turn of the batch; of its settings for completions per backward pass, the fastest counts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    GROUP,
    LEARNING_RATE,
    MissingError,
    Side,
    Turns,
    Witness,
    progress,
    quiet,
    temporary_run,
    train_in_turns,
    trl_config,
    trl_trainer,
)
from episodes import chat_tokenizer

PROMPTS, FIRST = 8, 10
COUNTS = ("calls", "turns", "tokens")
DIGITS = 4
"""Of a plan."""
ENOUGH_LOSS, SHARPER = 0.004, 3.0
"""With logits 3 times as large, the probability of another token falls from some 4e-3 to 6e-8: at temperature 1, both
sides then draw the same texts."""
RARE = 1e-3
"""Share of the tokens in which the sides may differ: digits of a plan are never certain."""
WORDS = ["river", "stone", "cloud", "maple", "amber", "quiet", "north", "seven", "light", "paper", "glass", "winter"]
CONTROL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def lookup(entry: int) -> str:
    """Looks up an entry of the register.

    Args:
        entry: The number of the entry.
    """
    draw = random.Random(entry)
    return f"Entry {entry}: {' '.join(draw.choices(WORDS, k=12))}. See entry {(entry * 3 + 1) % 100}."


def question(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{WORDS[number]}: follow the register from entry {FIRST}."}]


def limit(calls: int) -> int:
    """Tokens of an episode, given ones included; a turn with its answer has about 110."""
    return 128 * (calls + 1)


def conversation(number: int, calls: int, plan: str) -> list[dict[str, Any]]:
    """What the model learns to say to a question."""
    messages, entry = question(number), FIRST
    for turn in range(calls):
        call = {"type": "function", "function": {"name": "lookup", "arguments": {"entry": entry}}}
        messages.append({"role": "assistant", "content": plan if turn == 0 else "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "lookup", "content": lookup(entry)})
        entry = (entry * 3 + 1) % 100
    return [*messages, {"role": "assistant", "content": f"It leads to entry {entry}."}]


def in_turns(completions: list[Any], **_: Any) -> list[float]:
    """A reward of 0 and 1 in turns: every trajectory has an advantage, so neither side may leave one out."""
    return [float(number % 2) for number in range(len(completions))]


def tokenizer_of() -> Any:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        raise MissingError("trl is not installed: the extra 'bench' has it")
    template = Path(found.origin).parent / "chat_templates/qwen3_instruct_2507.jinja"
    return chat_tokenizer(template.read_text(encoding="utf-8"), CONTROL)


def model_of(tokenizer: Any) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def learn(tokenizer: Any, path: Path, options: argparse.Namespace) -> None:
    """Train a model on the conversations, make it certain of them, and save its weights."""
    model, draw = model_of(tokenizer), random.Random(0)
    digits = DIGITS if options.apart else 0
    optimizer, certain = torch.optim.AdamW(model.parameters(), lr=2e-3), 0
    for step in range(options.learning_steps):
        plan = f"Plan {''.join(draw.choices('23456789', k=digits))}." if digits else ""
        found = _ids_and_labels(tokenizer, conversation(step % PROMPTS, options.calls, plan))
        ids, labels = (torch.tensor([values]) for values in found)
        logits, target = model(ids).logits[:, :-1], labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(logits[target != -100], target[target != -100], reduction="none")
        known, drawn = losses.sort().values.tensor_split([len(losses) - digits])  # digits are never certain
        optimizer.zero_grad()
        ((known.sum() + 0.1 * drawn.sum()) / len(losses)).backward()  # that they are equally likely is no matter
        optimizer.step()
        loss = known.mean().item()
        if step % 20 == 19:
            progress(f"learning by heart, step {step + 1}: loss {loss:.5f}")
        certain = certain + 1 if loss < ENOUGH_LOSS else 0
        if certain == PROMPTS:
            break
    with torch.no_grad():
        model.model.norm.weight *= SHARPER
    torch.save(model.state_dict(), path)


def _ids_and_labels(tokenizer: Any, messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """A conversation; labels are -100 but for what the model is to write, the end of its turn included."""

    def render(count: int, *, prompt: bool) -> list[int]:
        rendered = tokenizer.apply_chat_template(
            messages[:count], tools=[lookup], add_generation_prompt=prompt, return_dict=False
        )
        return list(rendered)

    ids = render(len(messages), prompt=False)
    labels = [-100] * len(ids)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = len(render(index, prompt=True)), len(render(index + 1, prompt=False))
            stop = start + ids[start:stop].index(tokenizer.eos_token_id) + 1
            labels[start:stop] = ids[start:stop]
    return ids, labels


def trained(tokenizer: Any, path: Path) -> Any:
    model = model_of(tokenizer)
    model.load_state_dict(torch.load(path))
    return model


# ---- the sides


def cohort_side(turns: Turns, path: Path, calls: int) -> None:
    import cohort

    tokenizer = tokenizer_of()
    model = trained(tokenizer, path)
    config = cohort.GRPOConfig(
        prompts_per_step=PROMPTS,
        num_generations=GROUP,
        max_completion_length=limit(calls),
        learning_rate=LEARNING_RATE,
        precision="float32",
        device="cpu",
        order="sequential",
        max_steps=1_000_000,
        save_steps=0,
        progress=False,
        log_completions=False,
        output_dir=temporary_run(),
    )
    rows = [{"prompt": question(n % PROMPTS)} for n in range(4 * PROMPTS)]
    trainer = cohort.GRPOTrainer(model, in_turns, config, rows, processing_class=tokenizer, tools=[lookup])
    cohort_steps(turns, trainer)


def cohort_steps(turns: Turns, trainer: Any) -> None:
    """A step of Cohort's trainer in each turn."""
    witness, steps, report = Witness(trainer.policy.model), trainer.steps(), {"setting": "float32"}
    rollout = trainer.args.rollout
    completions = rollout.prompts_per_step * rollout.num_generations
    while True:
        turns.wait(report)
        start, processor = time.perf_counter(), time.process_time()
        metrics = next(steps)
        seconds = time.perf_counter() - start
        report = {
            "seconds": seconds,
            "processor": time.process_time() - processor,
            "generate": metrics["seconds/generate"],
            "update": metrics["seconds/update"],
            "calls": metrics["episodes/calls"] * completions,
            "turns": metrics["episodes/turns"] * completions,
            "tokens": round(metrics["length/mean"] * completions),
            "well formed": metrics["episodes/calls"] * completions * (1 - (metrics["episodes/failed_call_share"] or 0)),
            "reward": metrics["reward/mean"],
            "distinct": metrics["completions/distinct_share"],
            "no advantage": metrics["tokens/no_advantage_share"],
            **witness.look(),
        }


def trl_side(turns: Turns, path: Path, calls: int, batch: int) -> None:
    tokenizer = tokenizer_of()
    model = trained(tokenizer, path)
    config = trl_config(
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=PROMPTS * GROUP // batch,
        max_completion_length=limit(calls),
    )
    rows = [{"prompt": question(n % PROMPTS)} for n in range(4 * PROMPTS)]
    trainer = trl_trainer(model, config, rows, tokenizer, in_turns, tools=[lookup])
    trl_steps(turns, trainer, f"float32, {PROMPTS * GROUP // batch} x {batch}")


def trl_steps(turns: Turns, trainer: Any, setting: str) -> None:
    """A step of TRL's trainer in each turn."""
    witness = Witness(trainer.model)
    counts = dict.fromkeys(COUNTS, 0)
    loop, processor = trainer._tool_call_loop, [0.0]

    def counted(*arguments: Any, **named: Any) -> Any:
        result = loop(*arguments, **named)
        mask, completions, _, _, calls, *_ = result
        counts["calls"] = counts["well formed"] = calls
        counts["turns"] = sum(message["role"] == "assistant" for one in completions for message in one)
        counts["tokens"] = sum(map(sum, mask))
        return result

    trainer._tool_call_loop = counted

    def turn(seconds: float) -> None:
        if not seconds:
            turns.wait({"setting": setting})
            processor[0] = time.process_time()
            return
        generate, rollout = (trainer.parts[part] for part in ("generate", "rollout"))
        report = {"seconds": seconds, "processor": time.process_time() - processor[0]}
        report |= {"generate": generate, "update": seconds - rollout}
        report["reward"] = trainer._metrics["train"]["reward"][-1]
        turns.wait(report | counts | witness.look())
        processor[0] = time.process_time()

    train_in_turns(trainer, turn)


def compare(options: argparse.Namespace) -> None:
    quiet()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = options.weights or Path(folder) / "weights.pt"
        if not path.exists():
            learn(tokenizer_of(), path, options)
        path = path.resolve()
        sides = {"cohort": stack.enter_context(Side(cohort_side, path, options.calls, threads=options.threads))}
        for batch in options.batches:
            side = stack.enter_context(Side(trl_side, path, options.calls, batch, threads=options.threads))
            sides[f"trl, {batch} a pass"] = side
        reports = in_turns_of(sides, options.repeats, check_work)
    alike = "no two alike" if options.apart else "those of a group alike"
    show(reports, f"{PROMPTS} x {GROUP} trajectories, {alike}, with {options.calls} calls of a tool")


Reports = dict[str, list[dict[str, Any]]]
"""Of each side, those of its steps."""


def in_turns_of(sides: dict[str, Side], repeats: int, check: Callable[[Reports], None] | None = None) -> Reports:
    """Steps of all sides in turns, each time another one first; those of the first round, to warm up, are left out."""
    reports: Reports = {name: [] for name in sides}
    for repeat in range(1 + repeats):
        for name in [*sides][repeat % len(sides) :] + [*sides][: repeat % len(sides)]:
            report = sides[name].ask()
            progress(f"{name}: {report}")
            if repeat:
                reports[name].append(report)
        if repeat and check:
            check(reports)
    return reports


def check_work(reports: Reports) -> None:
    """All sides draw as many calls and turns in a round, and as many tokens but for rare draws of others."""
    work = {name: [round(own[-1][key]) for key in COUNTS] for name, own in reports.items()}
    first = next(iter(work.values()))
    if any(one[:2] != first[:2] or abs(one[2] - first[2]) > RARE * first[2] for one in work.values()):
        raise RuntimeError(f"expected the same calls, turns and tokens of all sides, got {work}")


def show(reports: Reports, what: str) -> None:
    def median(name: str, key: str) -> float:
        return statistics.median(report[key] for report in reports[name])

    print(f"\nA GRPO step of {what}, float32")
    print("\n| side | step, s | processor | generate | update | calls | turns | tokens drawn |")
    print("|---|---|---|---|---|---|---|---|")
    for name, own in reports.items():
        seconds = [report["seconds"] for report in own]
        split = " | ".join(f"{median(name, part):.2f}" for part in ("processor", "generate", "update"))
        counts = " | ".join(f"{median(name, part):,.0f}" for part in COUNTS)
        spent = f"{statistics.median(seconds):.2f} [{min(seconds):.2f} to {max(seconds):.2f}]"
        print(f"| {name} | {spent} | {split} | {counts} |")
    best = min((name for name in reports if name != "cohort"), key=lambda name: median(name, "seconds"))
    rounds = [b["seconds"] / a["seconds"] for a, b in zip(reports["cohort"], reports[best], strict=True)]
    ratio = median(best, "seconds") / median("cohort", "seconds")
    processor = median(best, "processor") / median("cohort", "processor")
    print(f"\n{best} / cohort: {ratio:.2f} (single rounds {min(rounds):.2f} to {max(rounds):.2f}); ", end="")
    print(f"processor: {processor:.2f} (goal: at least 5)", flush=True)
