"""``cohort demo``: a whole GRPO run on an embedded task, in about 90 seconds on two cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cohort.config import GRPOConfig, load_config
from cohort.demo.task import accuracy, problems
from cohort.evaluation import Estimate, Evaluation
from cohort.report.describe import announce
from cohort.runs.folder import RunFolder
from cohort.trainer import GRPOTrainer

MODEL = Path(__file__).parent / "model"
SETTINGS = Path(__file__).parent / "demo.toml"
TRAIN_PROBLEMS = 8_000
EVAL_PROBLEMS = 500
EXAMPLES = 3


def run_demo(*, seed: int, output_dir: str | None, started: float) -> dict[str, Any]:
    """Run the demo and return its summary.

    Args:
        seed: seed of sampling and of the order of problems. The same seed gives the same numbers on the same machine.
        output_dir: the run folder. None: the next free runs/demo-NNN.
        started: the time at which the command started, for the times in the summary.

    Raises:
        RunFolderError: the output folder holds another run.
    """
    folder, config = prepare(SETTINGS, seed, output_dir)
    trainer = GRPOTrainer(str(MODEL), accuracy, config, problems(TRAIN_PROBLEMS, held_out=False, seed=0))
    held_out = problems(EVAL_PROBLEMS, held_out=True, seed=0)
    trainer.started = started
    announce(
        "Teaching a small language model to carry. The model adds four-digit numbers and\n"
        "writes out each step. Its training examples left out carries, so it forgets more\n"
        "than half of them.\n"
    )
    before = trainer.evaluations(held_out)[""]
    trainer.train()
    after = trainer.evaluations(held_out)[""]
    summary = trainer.summary
    for name, found in (("before", before.reward), ("after", after.reward)):
        summary |= {f"accuracy_{name}": found.mean, f"accuracy_{name}_interval": [found.low, found.high]}
    summary["seed"] = seed
    folder.write_summary(summary)
    show_results(held_out, before, after, summary, folder.path)
    return summary


def prepare(settings: Path, seed: int, output_dir: str | None) -> tuple[RunFolder, GRPOConfig]:
    """The free run folder of a demo, and its settings. Also sets torch's threads: matrices this small gain nothing from
    more than two, and the rounding of sums depends on their number.

    Raises:
        RunFolderError: the folder holds another run.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine
    torch.set_num_threads(max(1, min(2, (os.cpu_count() or 1) // ranks)))
    folder = RunFolder(output_dir) if output_dir else RunFolder.next_free("demo")
    folder.check_free()
    return folder, load_config(settings, ["--run.seed", str(seed), "--run.output_dir", str(folder.path)])


def show_results(
    held_out: Sequence[dict[str, str]], before: Evaluation, after: Evaluation, summary: dict[str, Any], folder: Path
) -> None:
    """Print completions side by side, the accuracy before and after, and the next commands."""
    console = Console(width=None if Console().is_terminal else 100)
    table = Table(title=f"{EXAMPLES} held-out problems, with the same random numbers before and after", show_lines=True)
    for column in ("problem", "before", "after"):
        table.add_column(column)
    # Show problems whose completion changed, if there are enough.
    texts = (evaluation.table.column("completion").to_pylist() for evaluation in (before, after))
    examples = list(zip(held_out, *texts, strict=True))
    examples.sort(key=lambda example: example[1] == example[2])
    for row, old, new in examples[:EXAMPLES]:
        question = f"{row['question']}\n= {row['answer']}"
        table.add_row(question, *(_marked(text, row["answer"]) for text in (old, new)))
    console.print(table)
    console.print(
        f"accuracy on {EVAL_PROBLEMS} held-out problems (one sample each, 95% interval):\n"
        f"  before  {_percent(before.reward)}\n"
        f"  after   {_percent(after.reward)}"
    )
    show_end(
        console,
        summary,
        folder,
        f"See what it did:\n  cohort report {folder}\n\n"
        "Next, with your own model, data and reward:\n"
        "  cohort config > my.toml        every setting with its meaning\n"
        "  cohort train my.toml --model.path MODEL --data.train FILE.jsonl \\\n"
        "      --reward.functions FILE.py:FUNCTION",
    )


def show_end(console: Console, summary: dict[str, Any], folder: Path, next_steps: str) -> None:
    """Print what the run did, where it is, and what to do next."""
    console.print(
        f"{summary['updates']} updates on {summary['completions']:,} completions in {summary['seconds']:.0f} s, "
        f"the first after {summary['seconds_to_first_update']:.1f} s\n"
        f"run folder: {folder} (metrics.jsonl, rollouts/, checkpoints/)"
    )
    console.print(f"\n{next_steps}", markup=False, highlight=False, soft_wrap=True)


def _marked(text: str, answer: str) -> str:
    return f"{text}\n{'[green]right' if accuracy([text], [answer]) == [1.0] else '[red]wrong'}"


def _percent(estimate: Estimate) -> str:
    return f"{estimate.mean:.1%}  ({estimate.low:.1%} to {estimate.high:.1%})"
