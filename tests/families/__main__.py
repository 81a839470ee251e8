"""Measure model types and write the table of docs/models.md: ``make families``, or for some types only
``python -m tests.families TYPE ...``, which prints."""

from __future__ import annotations

import importlib.metadata
import math
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from tests.families.configs import LEFT_OUT, MODEL_TYPES
from tests.families.measure import Measured, measure

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- begin: make families -->", "<!-- end: make families -->"
UPDATES = {"prompts computed once": "shared", "prompts computed with every": "padded", "refused": "refused"}
SAMPLERS = {
    "lean": "lean",
    "transformers' cache, static batches: rows wait for the last of their batch, in": "static, one length",
    "transformers' cache, static": "static",
    "without a cache": "no cache",
    "prompts once per group": "shared",
}


def main() -> int:
    """Measure; returns the exit code."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    chosen, rows = sys.argv[1:] or MODEL_TYPES, []
    for model_type in chosen:
        rows.append(measure(model_type))
        print(row_of(rows[-1]), *rows[-1].failures, flush=True)
    if chosen == MODEL_TYPES:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table_of(rows)}\n{END}{rest.partition(END)[2]}")
    return int(any(row.failures for row in rows))


def table_of(rows: list[Measured]) -> str:
    """The table, with the versions it was made with and what is not in it."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "peft", "torch"))
    head = "| model type | update | sampling | sampled | gradient | checkpointed | cut | LoRA | why no better update |"
    left = [f"- {reason}: {', '.join(names.split())}" for reason, names in LEFT_OUT.items()]
    lines = [f"Made with {versions}.", "", head, "|---" * 9 + "|", *map(row_of, rows), "", "Not measured:", "", *left]
    return "\n".join(lines)


def row_of(row: Measured) -> str:
    """A line of the table."""
    errors = (row.sampled, row.gradient, row.checkpointed, row.cut, row.lora)
    update = named(row.update, UPDATES) + (", all logits" if "all logits at once" in row.update else "")
    if update == "shared" and row.sampler.startswith("lean"):
        update = "lean"
    why = row.update.partition(" (")[2].removesuffix(")").removeprefix("custom attention: ")
    why = "; ".join([why] * bool(why) + row.refused).replace("|", "\\|").replace("<", "&lt;")
    cells = [row.model_type, update, named(row.sampler, SAMPLERS), *map(shown, errors), why]
    return f"| {' | '.join(cells)} |"


def named(description: str, names: dict[str, str]) -> str:
    """The short name of an implementation."""
    return next((name for start, name in names.items() if description.startswith(start)), "")


def shown(error: float | str | None) -> str:
    """An error as a power of ten, so that rounding does not change the table."""
    if isinstance(error, float):
        return f"1e{math.ceil(math.log10(error)):03d}" if error else "0"
    return error or ""


if __name__ == "__main__":
    sys.exit(main())
