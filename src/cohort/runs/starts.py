"""``starts.jsonl`` of a run folder: a line for each process that started or resumed the run, with what it was given.

{"time": ..., "step": 0, "steps": 400, "folder": "/home/me", "overrides": ["run.max_steps"], "missing":
{"train_dataset": "rows in memory"}, "begun_by": "", "commit": "1f0c...-dirty", "facts": {...}}
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

STARTS = "starts.jsonl"
CONTINUED_BY = {
    "cohort.trl": "the same script and train(resume_from_checkpoint=True)",
    "python -m cohort.trl": "the same command and --resume_from_checkpoint true",
}
"""How to continue a run that ``cohort resume`` does not continue, by what began it."""


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it has been removed
        return ""


@cache
def _commit(folder: str) -> str:
    """The commit of a folder, with "-dirty" after it if files differ from it; empty outside of git."""
    command = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=5, cwd=folder or None
        ).stdout.strip()
    except (OSError, ValueError, subprocess.SubprocessError):  # no git, no repository, or one that takes long
        return ""


@dataclass(frozen=True, slots=True)
class Start:
    """How a process was started."""

    folder: str = field(default_factory=_working_directory)
    """The working directory, to which relative names in the settings belong."""
    overrides: tuple[str, ...] = ()
    """The settings that the command line gave, by name. Their values are in ``config.toml``."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What was given in Python and has no name, and what it is."""
    begun_by: str = ""
    """A key of ``CONTINUED_BY``, or empty."""

    def needed(self, *, adapters: bool) -> dict[str, str]:
        """The entries of ``missing`` that a checkpoint does not hold. With ``adapters``, it does not hold the model."""
        held = {"processing_class"} if adapters else {"processing_class", "model"}
        return {name: what for name, what in self.missing.items() if name not in held}

    def to_give_again(self) -> list[str]:
        """A line that names what is missing; empty if nothing is."""
        missing = ", ".join(f"{name} ({what})" for name, what in self.missing.items())
        return [f"without a name in the run folder, so to be given again to resume: {missing}"] if missing else []

    def working_directory(self, run: Path) -> Path | None:
        """``folder``, if it is here: absolute, and not in the run folder, which may come from a stranger."""
        path = Path(self.folder)
        there = path.is_absolute() and path.is_dir() and not path.resolve().is_relative_to(run.resolve())
        return path if there else None

    def line(self, step: int, steps: int, facts: Mapping[str, str]) -> dict[str, Any]:
        """The line of a start after ``step`` of the run's ``steps``."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        commit = _commit(self.folder)
        return {"time": when, "step": step, "steps": steps, **asdict(self), "commit": commit, "facts": dict(facts)}


def last_start(run: Path) -> Start:
    """How the run's last process was started; the defaults if no line can be read."""
    for line in reversed(_lines(run)):
        with suppress(TypeError, LookupError, AttributeError):
            missing = {str(name): str(what) for name, what in line["missing"].items()}
            begun_by = str(line.get("begun_by", ""))
            return Start(str(line["folder"]), tuple(map(str, line["overrides"])), missing, begun_by)
    return Start()


def how_to_continue(run: Path) -> str:
    """How to continue a run, in words."""
    return CONTINUED_BY.get(last_start(run).begun_by, f"cohort resume {shlex.quote(str(run))}")


def latest_start_step(run: Path) -> int:
    """The latest step after which a process went on; 0 if none did. A run that went on had a checkpoint."""
    steps = (line.get("step") for line in _lines(run) if isinstance(line, dict))
    return max((step for step in steps if type(step) is int), default=0)


def _lines(run: Path) -> list[Any]:
    """What the whole lines of a run's ``starts.jsonl`` hold: a kill may have left half a line."""
    try:
        texts = (run / STARTS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for text in texts:
        with suppress(ValueError, RecursionError):
            found.append(json.loads(text))
    return found
