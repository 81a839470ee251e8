"""Train several objectives over several seeds, and compare them.

    python compare.py [--jobs 2] [--section.key value ...]

Settings are passed on to every run. A complete run is not repeated, a stopped one continues. Change ALGORITHMS and
SEEDS to compare others; `cohort objective` lists the presets.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from cohort.report.series import grouped
from cohort.report.verdict import verdicts
from cohort.runs.reader import Run

CONFIG = Path(__file__).with_name("config.toml")
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
"""The presets. Each is compared with the first."""
SEEDS = (0, 1, 2)
"""At least three: an interval from two seeds is 12.7 standard errors wide."""


def train(algorithm: str, seed: int, settings: Sequence[str]) -> str:
    """Make one run, and return its folder."""
    folder = Path("runs", f"{algorithm}-{seed}")
    chosen = {"objective.preset": algorithm, "run.seed": seed, "run.output_dir": folder}
    overrides = [part for name, value in chosen.items() for part in (f"--{name}", str(value))]
    folder.parent.mkdir(exist_ok=True)
    with Path(f"{folder}.log").open("a") as log:
        command = [sys.executable, "-m", "cohort", "train", str(CONFIG), "--resume", "auto", *settings, *overrides]
        if subprocess.run(command, check=False, stdout=log, stderr=subprocess.STDOUT).returncode:
            said = Path(log.name).read_text().splitlines() or ["no output"]
            raise SystemExit(f"{folder} failed: {said[-1]} (see {log.name})")
    print(f"{folder} is complete", flush=True)
    return str(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time; 1 on a GPU")
    known, settings = parser.parse_known_args(arguments)
    if known.jobs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # runs that share the cores would wait for each other
    pool = ThreadPoolExecutor(known.jobs)
    jobs = [pool.submit(train, algorithm, seed, settings) for algorithm in ALGORITHMS for seed in SEEDS]
    try:
        for job in as_completed(jobs):
            job.result()
    except KeyboardInterrupt:
        sys.exit("stopped: the runs in progress end with a checkpoint. The same command continues")
    finally:
        pool.shutdown(cancel_futures=True)  # of Ctrl-C or a failure: no further run begins, and those that run end
    runs = [job.result() for job in jobs]
    for command in (["plot", "--key", "eval/reward/mean", "--x", "tokens", "--output", "compare.svg"], ["report"]):
        subprocess.run([sys.executable, "-m", "cohort", command[0], *runs, *command[1:]], check=True)
    for found in verdicts(grouped([Run.read(run) for run in runs])):
        if found.axis == "tokens":
            print(found.text)


if __name__ == "__main__":
    main()
