"""Time and size of the page of a long run, and how long a browser takes to open it.

    python benchmarks/report.py
    python benchmarks/report.py --steps 1000 --completions 250 --tokens 300 --metrics 110

The run folder is made up: every step has a table of ``completions`` completions in groups of ten, with all columns of
docs/store.md that the page reads. Eight different tables are written; the steps are hard links to them. The opening
time is from the navigation until the microscope shows a group, in a headless Chromium, if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from cohort.report.page import write_report

VOCABULARY = 20_000
DIFFERENT = 8


def token_columns(rng: np.random.Generator, lengths: np.ndarray, group: np.ndarray) -> dict[str, Any]:
    """Token ids and what the update saw of each token."""
    count, offsets = int(lengths.sum()), np.concatenate([[0], lengths.cumsum()]).astype(np.int32)

    def lists(values: Any) -> Any:
        return pyarrow.ListArray.from_arrays(offsets, pyarrow.array(values))

    logps = -rng.exponential(0.5, count).astype(np.float32)
    moved = (rng.normal(0, 0.02, count)).astype(np.float32)
    causes = np.where(np.repeat(group % 4 == 0, lengths), "no_advantage", None)
    return {
        "token_ids": lists(rng.zipf(1.3, count) % VOCABULARY),
        "sampler_logps": lists(logps.astype(np.float64)),
        "old_logps": lists(logps),
        "logps": lists(logps + moved),
        "ref_logps": lists(logps + rng.normal(0, 0.1, count).astype(np.float32)),
        "ratio": lists(np.exp(moved)),
        "policy_coefficient": lists(rng.normal(0, 1e-3, count).astype(np.float32)),
        "kl_coefficient": lists(rng.normal(0, 1e-5, count).astype(np.float32)),
        "entropy": lists(rng.exponential(0.6, count).astype(np.float32)),
        "no_gradient": lists(pyarrow.array(causes, pyarrow.string())),
    }


def make_table(options: argparse.Namespace, seed: int) -> pyarrow.Table:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.gamma(2.0, options.tokens / 2, options.completions), 5, 8 * options.tokens).astype(int)
    group = np.arange(options.completions) // 10
    rewards = rng.integers(0, 2, options.completions).astype(float)
    return pyarrow.table(
        {
            "group": group,
            "row": group + seed,
            "prompt": [f"Prompt {number}: " + "what is the next number? " * 20 for number in group],
            "completion": ["word " * length for length in lengths],
            "finish_reason": np.where(lengths > 2 * options.tokens, "length", "eos"),
            "reward": rewards,
            "rewards/right": rewards,
            "rewards/format": rng.random(options.completions),
            "advantage": rewards - rewards.mean(),
            **token_columns(rng, lengths, group),
        }
    )


def make_run(folder: Path, options: argparse.Namespace) -> None:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.toml").write_text('[model]\npath = "made-up"\n')
    rng = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, options.steps + 1):
            line = {f"made/up_{number}": float(value) for number, value in enumerate(rng.random(options.metrics))}
            named = {"reward/mean": 1 - 1 / (1 + step / 100) + 0.1 * line["made/up_0"], "grad_norm": line["made/up_1"]}
            times = {
                "tokens": 1,
                "time": 1e9 + step,
                "seconds/step": 1.0,
                "seconds/update": 1.0,
                "tokens_per_second": 9.0,
            }
            file.write(json.dumps({"step": step, **named, **times, **line}) + "\n")
    for number in range(DIFFERENT):
        pyarrow.parquet.write_table(make_table(options, number), folder / f"table-{number}.parquet")
    for step in range(1, options.steps + 1):
        os.link(folder / f"table-{step % DIFFERENT}.parquet", folder / "rollouts" / f"step-{step}.parquet")
    words = {f"Ġw{number}": number for number in range(VOCABULARY)}
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    tokenizer = {"decoder": {"type": "ByteLevel"}, "model": {"vocab": words}}
    (folder / "checkpoints" / "step-1" / "tokenizer.json").write_text(json.dumps(tokenizer))


def opening_time(page: Path) -> str:
    """Seconds until the page is ready and its microscope shows a group."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        return "no chromium"
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = chromium
    profile = tempfile.mkdtemp()
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    browser = Chrome(options=options, service=ChromeService(driver))
    try:
        start = time.perf_counter()
        browser.get(page.as_uri())
        while not browser.execute_script("return document.querySelectorAll('.card').length"):
            time.sleep(0.01)
        return f"{time.perf_counter() - start:.2f} s"
    finally:
        browser.quit()
        shutil.rmtree(profile, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 1000), ("completions", 250), ("tokens", 300), ("metrics", 110)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        make_run(folder, options)
        start, used = time.perf_counter(), time.process_time()
        page = write_report([folder])
        seconds, processor = time.perf_counter() - start, time.process_time() - used
        size = page.stat().st_size / 1e6
        print("| steps | completions | written in | processor time | size | opens in |\n|---|---|---|---|---|---|")
        print(
            f"| {options.steps:,} | {options.steps * options.completions:,} | {seconds:.1f} s | {processor:.1f} s | "
            f"{size:.1f} MB | {opening_time(page)} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
