"""A demo over several seeds: numbers before and after, and times. A table row per seed.

python benchmarks/demo_seeds.py --seeds 0 1 2
python benchmarks/demo_seeds.py tool --seeds 0 1 2 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COLUMNS = {"addition": ["before", "after"], "tool": ["hard right", "calls on hard", "easy right", "calls on easy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=tuple(COLUMNS), default="addition")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    columns = ["seed", *COLUMNS[arguments.task], "first update", "whole run", "updates", "completions"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "run")
            command = [sys.executable, "-m", "cohort", "demo", arguments.task, "--seed", str(seed)]
            subprocess.run([*command, "--output-dir", out], check=True, stdout=subprocess.DEVNULL)
            s = json.loads((Path(out) / "summary.json").read_text())
        times = f"{s['seconds_to_first_update']:.1f} s | {s['seconds']:.0f} s"
        numbers = " | ".join(tool(s) if arguments.task == "tool" else addition(s))
        print(f"| {seed} | {numbers} | {times} | {s['updates']} | {s['completions']:,} |", flush=True)


def addition(s: dict[str, Any]) -> list[str]:
    keys = ("accuracy_before", "accuracy_after")
    return [f"{s[k]:.1%} ({s[k + '_interval'][0]:.1%} to {s[k + '_interval'][1]:.1%})" for k in keys]


def tool(s: dict[str, Any]) -> list[str]:
    forms = {"right": ".0%", "calls": ".2f"}
    return [
        f"{s['before'][kind][name]:{form}} to {s['after'][kind][name]:{form}}"
        for kind in ("hard", "easy")
        for name, form in forms.items()
    ]


if __name__ == "__main__":
    main()
