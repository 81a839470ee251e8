"""Put known bugs into a copy of the tree, one at a time, and check that the tests named for each catch it.

``python scripts/mutants.py [WORD ...]`` tries the mutants of ``tests/mutants.toml`` whose file or text contains one of
the words; without words, all of them. ``--check`` only looks whether every text still occurs in its file. The exit code
is 1 where a mutant survives, a text is not found, or the tests fail without any mutant.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests" / "mutants.toml"


@dataclass(frozen=True)
class Mutant:
    """A bug: in a file, a text that occurs ``count`` times is replaced."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    count: int = 1

    @property
    def problem(self) -> str | None:
        """Why the mutant does not fit the present tree, if it does not."""
        file = ROOT / self.path
        if not file.exists():
            return f"{self.path} does not exist"
        if (found := file.read_text().count(self.old)) != self.count:
            return f"{self.path}: expected {self.count} times, found {found} times: {self.old}"
        missing = [test for test in self.tests if not (ROOT / test).exists()]
        return f"{', '.join(missing)} does not exist, for {self.path}: {self.old}" if missing else None


def mutants() -> list[Mutant]:
    """All of the list."""
    found = []
    for file in tomllib.loads(LIST.read_text())["file"]:
        for entry in file["mutants"]:
            path, tests = f"src/cohort/{file['path']}", tuple(entry.get("tests", file["tests"]))
            found.append(Mutant(path, entry["old"], entry["new"], tests, entry.get("count", 1)))
    return found


def run_tests(tree: Path, tests: Iterable[str], timeout: float = 300) -> tuple[bool, str | None]:
    """Whether the tests pass, and the first that fails. A run that takes too long counts as a failure."""
    pinned = {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=os.environ | pinned, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return False, None
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode and not failed:
        sys.exit(f"pytest did not run: {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, failed[1] if failed else None


def killer(tree: Path, mutant: Mutant) -> tuple[bool, str | None]:
    """Whether the mutant's tests pass with it in the tree, and which fails first."""
    file = tree / mutant.path
    text = file.read_text()
    file.write_text(text.replace(mutant.old, mutant.new))
    try:
        return run_tests(tree, mutant.tests)
    finally:
        file.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--check", action="store_true", help="only look whether the texts are found")
    arguments = parser.parse_args()
    chosen = [m for m in mutants() if not arguments.words or any(w in f"{m.path} {m.old}" for w in arguments.words)]
    if problems := [problem for mutant in chosen if (problem := mutant.problem)]:
        sys.exit(f"{LIST.name} does not fit the tree:\n" + "\n".join(problems))
    print(f"{len(chosen)} mutants, every text found", flush=True)
    if arguments.check:
        return
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        for part in ("src", "tests", "examples", "docs"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        survivors, killers = 0, set()
        for mutant in chosen:
            start = time.perf_counter()
            survived, failed = killer(tree, mutant)
            survivors += survived
            killers |= {failed} if failed else set()
            verdict, took = "SURVIVES" if survived else "dies", time.perf_counter() - start
            print(f"{verdict:8} {took:4.0f} s  {mutant.path.removeprefix('src/cohort/')}: {mutant.old}", flush=True)
        print(f"{len(chosen) - survivors} of {len(chosen)} die")
        passed, failed = run_tests(tree, sorted(killers), timeout=1800) if killers else (True, None)
        if not passed:
            sys.exit(f"a test fails without any mutant: {failed}")
    if survivors:
        sys.exit(1)


if __name__ == "__main__":
    main()
