"""The scripts of ``examples/trl`` under TRL 1.16.0 and under Cohort, with only the import changed.

    python benchmarks/trl_scripts.py                       both sides of all scripts; needs the extra "bench"
    python benchmarks/trl_scripts.py --sides cohort --scripts quickstart dapo

Each run is a process of its own in a folder with the models and data sets of ``trl_hub.py``; nothing is downloaded. The
sides take turns, script by script. "script" are the seconds of the script after its libraries were imported, "train"
those of its calls of ``train()``. Rewards are means over the first and the last quarter of the log history.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import runpy
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "trl"
SCRIPTS = {
    "quickstart": "quickstart.py",
    "gsm8k_xml": "gsm8k_xml.py",
    "countdown": "countdown.py --config recipes/countdown.yaml",
    "open_r1": "open_r1.py --config recipes/open_r1.yaml",
    "command": "--config recipes/command.yaml",
    "reward_model": "reward_model.py",
    "callbacks": "callbacks.py",
    "dapo": "dapo.py",
    "gspo": "gspo.py",
    "async_rewards": "async_rewards.py",
    "tools": "tools.py",
    "resume": "resume.py",
}
"""Name to arguments. ``command`` is the command line of both sides: trl grpo, and python -m cohort.trl."""
SIDES = {"trl": ("trl", "trl.scripts.grpo"), "cohort": ("cohort.trl", "cohort.trl")}
"""Side to the module that scripts import, and to that of the command."""
LIMIT_SECONDS = 1800.0


def with_import(source: str, package: str) -> str:
    """A script for TRL that imports another package in its place.

    >>> with_import("from trl import GRPOConfig\\nfrom trl.rewards import accuracy_reward", "cohort.trl")
    'from cohort.trl import GRPOConfig\\nfrom cohort.trl.rewards import accuracy_reward'
    """
    return re.sub(r"^(\s*(?:from|import)) trl\b", rf"\1 {package}", source, flags=re.MULTILINE)


def prepare(folder: Path, hub: Path, package: str) -> None:
    """Fill a folder with the models and data sets, the recipes, and the scripts with their imports changed."""
    for owner in hub.iterdir():
        (folder / owner.name).symlink_to(owner.resolve(), target_is_directory=True)
    (folder / "recipes").symlink_to(EXAMPLES / "recipes", target_is_directory=True)
    for script in EXAMPLES.glob("*.py"):
        (folder / script.name).write_text(with_import(script.read_text(encoding="utf-8"), package), encoding="utf-8")


def run_script(side: str, name: str, folder: Path) -> dict[str, Any]:
    """Run a script in this process; what it took, and what its trainers logged."""
    package, command = SIDES[side]
    for needed in ("torch", "transformers", "datasets", "peft", package):
        importlib.import_module(needed)
    found: dict[str, Any] = {"train": 0.0, "history": []}
    trainer = importlib.import_module(package).GRPOTrainer
    train = trainer.train

    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        try:
            return train(self, *arguments, **named)
        finally:
            found["train"] += time.perf_counter() - begun
            found["history"], found["steps"] = self.state.log_history, self.state.global_step

    trainer.train = timed
    file, *arguments = shlex.split(SCRIPTS[name])
    with contextlib.chdir(folder):
        sys.path.insert(0, str(folder))
        begun = time.perf_counter()
        try:
            if file.endswith(".py"):
                sys.argv = [file, *arguments]
                runpy.run_path(file, run_name="__main__")
            else:
                sys.argv = [command, file, *arguments]
                runpy.run_module(command, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                raise
        found["script"] = time.perf_counter() - begun
    return found


def measure(side: str, name: str, hub: Path, *, show: bool = False) -> dict[str, Any]:
    """Run a script in a process of its own; ``run_script``'s report, or ``error``: the end of its output."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, report = Path(temporary) / "work", Path(temporary) / "report.json"
        folder.mkdir()
        prepare(folder, hub, SIDES[side][0])
        own = [sys.executable, __file__, "--child", side, name, str(folder), str(report)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(Path(temporary) / "cache")}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
        output = None if show else subprocess.PIPE
        try:
            ended = subprocess.run(
                own, env=environment, check=False, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {LIMIT_SECONDS:g} s"}
        if ended.returncode or not report.exists():
            text = (ended.stdout or b"").decode(errors="replace")
            return {"error": text[-4000:], "code": ended.returncode}
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def summary(found: dict[str, Any]) -> str:
    """The cells of a side: seconds of the script, of ``train()``, and the rewards."""
    if "error" in found:
        return "failed | | "
    rewards = [entry["reward"] for entry in found["history"] if "reward" in entry]
    some = max(1, len(rewards) // 4)
    ends = f"{statistics.mean(rewards[:some]):.2f} to {statistics.mean(rewards[-some:]):.2f}" if rewards else ""
    return f"{found['script']:.1f} | {found['train']:.1f} | {ends}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--hub", type=Path, help="folder that trl_hub.py has filled; made where it does not exist")
    parser.add_argument("--show", action="store_true", help="show what the scripts print")
    parser.add_argument("--json", type=Path, help="file for all figures, with the log histories")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    if options.child:
        side, name, folder, report = options.child
        found = run_script(side, name, Path(folder))
        Path(report).write_text(json.dumps(found, default=float), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        hub = options.hub or Path(temporary) / "hub"
        if not hub.exists():
            import trl_hub

            trl_hub.build(hub)
        heads = [f"{side}: script, s | train, s | reward" for side in options.sides]
        print(f"| script | updates | {' | '.join(heads)} |", "|---" * (2 + 3 * len(heads)) + "|", sep="\n", flush=True)
        failed, reports = False, {}
        for name in options.scripts:
            sides = {side: measure(side, name, hub, show=options.show) for side in options.sides}
            reports[name] = sides
            steps = " / ".join(dict.fromkeys(str(found.get("steps", "-")) for found in sides.values()))
            print(f"| {name} | {steps} | {' | '.join(map(summary, sides.values()))} |", flush=True)
            for side, found in sides.items():
                if "error" in found:
                    failed = True
                    print(f"---- {name} under {side}:\n{found['error']}", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(reports, indent=1), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
