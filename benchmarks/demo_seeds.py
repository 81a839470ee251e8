"""The demo over several seeds: accuracy before and after, and times. A table row per seed.

python benchmarks/demo_seeds.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    print("| seed | before | after | first update | whole run | updates | completions |\n|---|---|---|---|---|---|---|")
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "run")
            command = [sys.executable, "-m", "cohort.cli", "demo", "--seed", str(seed), "--output-dir", out]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            s = json.loads((Path(out) / "summary.json").read_text())
        before, after = (f"{s[k]:.1%} ({s[k + '_interval'][0]:.1%} to {s[k + '_interval'][1]:.1%})" for k in KEYS)
        times = f"{s['seconds_to_first_update']:.1f} s | {s['seconds']:.0f} s"
        print(f"| {seed} | {before} | {after} | {times} | {s['updates']} | {s['completions']:,} |", flush=True)


KEYS = ("accuracy_before", "accuracy_after")

if __name__ == "__main__":
    main()
