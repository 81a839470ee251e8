"""``cohort demo tool``: a small model learns when and how to call a calculator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.demo.run import prepare, show_end
from cohort.demo.tool_task import Row, calls, products, right, sums
from cohort.evaluation import Evaluation
from cohort.report.describe import announce
from cohort.trainer import GRPOTrainer

MODEL = Path(__file__).parent / "tool_model"
SETTINGS = Path(__file__).parent / "tool.toml"
TRAIN_PRODUCTS = 4_000
EVAL_PRODUCTS = 400


def run_tool_demo(*, seed: int, output_dir: str | None, started: float) -> dict[str, Any]:
    """Run the demo and return its summary.

    Args:
        seed: seed of sampling and of the order of problems. The same seed gives the same numbers on the same machine.
        output_dir: the run folder. None: the next free runs/demo-NNN.
        started: the time at which the command started, for the times in the summary.

    Raises:
        RunFolderError: the output folder holds another run.
    """
    folder, config = prepare(SETTINGS, seed, output_dir)
    easy, hard = sums(), products(TRAIN_PRODUCTS, held_out=False, seed=0)
    rows = [*easy * (len(hard) // len(easy)), *hard]  # about half of each kind; the trainer shuffles them
    trainer = GRPOTrainer(str(MODEL), [right, calls], config, rows)
    trainer.started = started
    evaluated = {"hard": products(EVAL_PRODUCTS, held_out=True, seed=0), "easy": easy}
    announce(
        "Teaching a small language model when to call a calculator, and how. It knows small\n"
        "sums by heart, but often asks for them; it guesses most products; some of its calls\n"
        "are garbled. The reward: 1 for the right answer, minus 0.1 per call.\n"
    )
    before = trainer.evaluations(evaluated)
    trainer.train()
    after = trainer.evaluations(evaluated)
    summary = trainer.summary | {"before": _means(before), "after": _means(after), "seed": seed}
    folder.write_summary(summary)
    console = Console(width=None if Console().is_terminal else 100)
    console.print(_episodes(evaluated, before, after, trainer.tokenizer))
    console.print(_numbers(before, after))
    show_end(
        console,
        summary,
        folder.path,
        f"See what it did:\n  cohort report {folder.path}\n\n"
        "Next, with your own model, data, reward and tools (see 'cohort docs episodes'):\n"
        "  cohort train my.toml --environment.tools FILE.py:FUNCTION",
    )
    return summary


def _means(found: Mapping[str, Evaluation]) -> dict[str, dict[str, float]]:
    """For each kind of problem, the share that is right and the number of calls per problem."""
    return {
        kind: {name: one.estimates[f"rewards/{name}"].mean for name in ("right", "calls")}
        for kind, one in found.items()
    }


def _numbers(before: Mapping[str, Evaluation], after: Mapping[str, Evaluation]) -> Table:
    table = Table(title=f"{EVAL_PRODUCTS} held-out products and all sums, one sample each, 95% interval")
    for column in ("", "before", "after"):
        table.add_column(column)
    for kind in before:
        for name, shown, form in (("right", "right", ".1%"), ("calls", "calls per problem", ".2f")):
            pair = (found[kind].estimates[f"rewards/{name}"] for found in (before, after))
            cells = (f"{one.mean:{form}}  ({one.low:{form}} to {one.high:{form}})" for one in pair)
            table.add_row(f"{kind}: {shown}", *cells)
    return table


def _episodes(
    evaluated: Mapping[str, Sequence[Row]],
    before: Mapping[str, Evaluation],
    after: Mapping[str, Evaluation],
    tokenizer: Any,
) -> Table:
    """Episodes side by side. Of each kind: one with a garbled call before, and one in which the model has learnt to
    call (hard) or not to call (easy). Episodes that are right after the training come first.
    """
    table = Table(title="The same problems and random numbers before and after", show_lines=True)
    for column in ("problem", "before", "after"):
        table.add_column(column)
    for kind, rows in evaluated.items():
        columns = (found[kind].table.column("token_ids").to_pylist() for found in (before, after))
        examples = [(row, *map(tokenizer.decode, pair)) for row, *pair in zip(rows, *columns, strict=True)]
        examples.sort(key=lambda one: _last_turn(one[2]) != one[0]["answer"])
        garbled = [one for one in examples if "Error: " in one[1]]
        called = [tuple("<tool_call>" in text for text in one[1:]) for one in examples]
        learnt = (False, True) if kind == "hard" else (True, False)
        changed = [one for one, pair in zip(examples, called, strict=True) if pair == learnt and one not in garbled]
        for row, *texts in [*garbled[:1], *changed[:1]]:
            table.add_row(f"{row['question']}\n= {row['answer']}", *(_marked(text, row["answer"]) for text in texts))
    return table


def _last_turn(text: str) -> str:
    return text.removesuffix("<|end|>").rpartition("<|assistant|>")[2]


def _marked(text: str, answer: str) -> str:
    """An episode for the terminal: the tool's answers in colour, then whether its own answer is right.

    >>> print(_marked("<tool_call>...</tool_call><|end|><|tool|>6<|assistant|>6<|end|>", "6"))
    <tool_call>...</tool_call>
    [cyan]tool: 6[/]
    6
    [green]right
    """
    turns = []
    for turn in text.removesuffix("<|end|>").split("<|end|>"):
        read, marker, drawn = turn.rpartition("<|assistant|>")
        if marker:
            turns.append(f"[cyan]tool: {escape(read.removeprefix('<|tool|>'))}[/]")
        turns.append(escape(drawn))
    return "\n".join([*turns, "[green]right" if _last_turn(text) == answer else "[red]wrong"])
