"""Show that the present working tree computes the same numbers, bit for bit, as another commit on this machine.

Run ``python scripts/compare_commits.py BASE [--only presets,runs,engine,demo]``. Both sides run
``tests/golden/recorder.py`` of the present tree, each against its own package, in processes with a fixed number of
threads. The exit code is 1 where a number differs. Names that only the present tree has are listed and allowed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORDER = ROOT / "tests" / "golden" / "recorder.py"
PARTS = ("presets", "engine", "runs", "demo")


def export(commit: str, folder: Path) -> None:
    """The package of a commit, as files below a folder."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)


def record(source: Path, part: str, arguments: argparse.Namespace, place: Path) -> dict[str, Any]:
    """What the recorder finds in the package below ``source``."""
    output = place / "record.json"
    threads = {f"{library}_NUM_THREADS": str(arguments.threads) for library in ("OMP", "MKL", "OPENBLAS")}
    environment = os.environ | threads | {"MKL_DYNAMIC": "FALSE", "PYTHONPATH": str(source), "PYTHONWARNINGS": "ignore"}
    environment |= {"COHORT_CACHE": str(place / f"cache-{source.parent.name}")}
    command = [sys.executable, str(RECORDER), str(output), "--only", part, "--precision", arguments.precision]
    command += ["--seeds", arguments.seeds]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{part} failed with {source}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(output.read_text())
    output.unlink()
    return found


def same(one: Any, other: Any) -> bool:
    """Equal to the bit; NaN equals NaN, and 0.0 differs from -0.0."""
    return json.dumps(one) == json.dumps(other)


def first_difference(one: Any, other: Any, where: str = "") -> str:
    """The first place at which two values differ, with both values."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            if not same(*pair):
                return first_difference(*pair, f"{where}[{index}]")
    return f"{where} was {one!r:.200}, is {other!r:.200}"


def compare(part: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Print a row of the table; return what differs."""
    gone = [f"{name} is gone" for name in before if name not in after]
    changed = [
        f"{name}{first_difference(value, after[name])}"
        for name, value in before.items()
        if name in after and not same(value, after[name])
    ]
    added = [name for name in after if name not in before]
    different = gone + changed
    print(f"{part:8}  {len(before):6} compared  {len(different):5} different  {len(added):4} new", flush=True)
    if added:
        print(f"          new: {', '.join(added[:5])}{', ...' if len(added) > 5 else ''}")
    return different


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--seeds", default="0,1,2,3", help="of the demo (90 s each, on each side)")
    parser.add_argument("--precision", default="float64,float32,bfloat16", help="of presets, runs and engine")
    parser.add_argument("--threads", type=int, default=1, help="of each process; the demo chooses its own")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        (place / "base").mkdir()
        export(arguments.base, place / "base")
        for part in parts:
            sides = [record(source, part, arguments, place) for source in (place / "base" / "src", ROOT / "src")]
            if different := compare(part, *sides):
                print("\n".join(different[:20]))
                sys.exit(1)


if __name__ == "__main__":
    main()
