"""Seconds and bytes of the store on the demo's run: what a step spends on recording and writing its tokens.

    python benchmarks/recording.py
    python benchmarks/recording.py --steps 20 --set objective.beta=0

Trains the demo's model as ``cohort demo`` does, and times inside each step: keeping what the updates saw
(``Updates.add``), making the table (``step_table``), writing it (``write_table``), comparing the texts of completions
(``text_metrics``), and the diagnosis with the health line. Prints medians over the steps but the
first, as seconds of wall clock and of processor time, their share of the step, and the bytes per drawn token: as
stored, and with random digits in every float, since the numbers of this small model repeat more than those of a large
one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from cohort.columns import ALL_DIFFERENT
from cohort.config import load_config
from cohort.demo.run import MODEL, SETTINGS
from cohort.demo.task import accuracy, problems
from cohort.report.diagnosis import Diagnosis, health_line
from cohort.runs import folder as run_folder
from cohort.runs.tables import write_table
from cohort.train import metrics as train_metrics
from cohort.train import store
from cohort.train.update import Updates
from cohort.trainer import GRPOTrainer

SPENT: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
"""Seconds of wall clock and of processor time of the present step, by what was timed."""


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which adds its time to ``SPENT``."""

    @wraps(function)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        start = now()
        try:
            return function(*arguments, **named)
        finally:
            SPENT[name] = [spent + end - begin for spent, end, begin in zip(SPENT[name], now(), start, strict=True)]

    return wrapped


def watch() -> None:
    """Time the parts of the store from now on."""
    Updates.add = timed("record", Updates.add)  # type: ignore[method-assign]
    store.step_table = timed("table", store.step_table)
    run_folder.write_table = timed("write", run_folder.write_table)
    train_metrics.text_metrics = timed("texts", train_metrics.text_metrics)


def steps_of(folder: Path, count: int, overrides: list[str]) -> list[dict[str, Any]]:
    """The time of each step but the first, and of the parts of the store in it."""
    settings = [f"run.max_steps={count + 1}", f"run.output_dir={folder}", "report.progress=false", *overrides]
    config = load_config(SETTINGS, [f"--{setting}" for setting in settings])
    trainer = GRPOTrainer(str(MODEL), accuracy, config, problems(8_000, held_out=False, seed=0))
    diagnosis = Diagnosis(config.model_dump())

    def diagnose(metrics: dict[str, Any]) -> str:
        diagnosis.step(metrics)
        return health_line(metrics, diagnosis.findings)

    found, start = [], now()
    for metrics in trainer.steps():
        timed("diagnose", diagnose)(metrics)
        whole = [end - begin for end, begin in zip(now(), start, strict=True)]
        found.append({"whole": whole, "tokens": metrics["tokens"], **SPENT})
        SPENT.clear()
        start = now()
    return found[1:]


def bytes_with_noise(path: Path) -> int:
    """The size of a file whose numbers of tokens have random digits."""
    table, rng = pyarrow.parquet.read_table(path), np.random.default_rng(0)
    for index, name in enumerate(table.column_names):
        if name in ALL_DIFFERENT:
            lists = table.column(name).combine_chunks()
            values = lists.values.to_numpy(zero_copy_only=False)
            noisy = (values * rng.uniform(0.5, 1.5, len(values)) + rng.normal(0, 1e-3, len(values))).astype(np.float32)
            offsets, nulls = lists.offsets, lists.is_null()
            changed = pyarrow.ListArray.from_arrays(offsets, noisy.astype(values.dtype), mask=nulls)
            table = table.set_column(index, name, changed)
    write_table(table, path.with_name("noise.parquet"))
    return path.with_name("noise.parquet").stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the run")
    options = parser.parse_args()
    watch()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        steps = steps_of(folder, options.steps, options.set)
        files = sorted((folder / "rollouts").iterdir())
        stored, noisy = [path.stat().st_size for path in files], bytes_with_noise(files[-1])
    tokens = statistics.median(step["tokens"] for step in steps)
    print(f"{len(steps)} steps of the demo; {tokens:,.0f} tokens and {statistics.median(stored):,.0f} bytes per step")
    print(f"bytes per token: {statistics.median(stored) / tokens:.1f}; with random digits {noisy / tokens:.1f}")
    print(f"{'':10}{'wall, ms':>10}{'share':>8}{'CPU, ms':>10}{'share':>8}")
    parts = ("record", "table", "write", "texts", "diagnose")
    for name in (*parts, "all"):
        spent = [
            [sum(step[part][kind] for part in parts if name in (part, "all")) for kind in (0, 1)] for step in steps
        ]
        cells = ""
        for kind in (0, 1):
            share = statistics.median(own[kind] / step["whole"][kind] for own, step in zip(spent, steps, strict=True))
            cells += f"{1000 * statistics.median(own[kind] for own in spent):>10.1f}{share:>8.2%}"
        print(f"{name:10}{cells}")


if __name__ == "__main__":
    main()
