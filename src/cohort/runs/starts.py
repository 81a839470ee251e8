"""``starts.jsonl`` of a run folder: a line for each process that started or resumed the run, with what it was given.

{"time": ..., "step": 0, "steps": 400, "folder": "/home/me", "overrides": ["run.max_steps"], "missing":
{"train_dataset": "rows in memory"}, "begun_by": "", "commit": "1f0c...-dirty", "facts": {...}}
"""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from cohort.config import load_config
from cohort.errors import RunFolderError
from cohort.runs.reader import Run
from cohort.runs.reading import read_best

T = TypeVar("T")
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
    """The working directory."""
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

    def line(self, step: int, steps: int, facts: Mapping[str, str]) -> dict[str, Any]:
        """The line of a start after ``step`` of the run's ``steps``."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        commit = _commit(self.folder)
        return {"time": when, "step": step, "steps": steps, **asdict(self), "commit": commit, "facts": dict(facts)}


def last_start(run: Path) -> Start:
    """How the run's last process was started; the defaults if no line can be read."""

    def start(line: Any) -> Start:
        missing = {str(name): str(what) for name, what in line["missing"].items()}
        return Start(str(line["folder"]), tuple(map(str, line["overrides"])), missing, str(line.get("begun_by", "")))

    return _newest(run, start) or Start()


def last_facts(run: Path) -> dict[str, str]:
    """The facts that the run's last process has recorded; empty if no line can be read."""
    return _newest(run, lambda line: {str(name): str(fact) for name, fact in line["facts"].items()}) or {}


def how_to_continue(run: Path) -> str:
    """How to continue a run, in words."""
    return CONTINUED_BY.get(last_start(run).begun_by, f"cohort resume {shlex.quote(str(run))}")


def latest_start_step(run: Path) -> int:
    """The latest step after which a process went on; 0 if none did. A run that went on had a checkpoint."""
    steps = (line.get("step") for line in Run(run).starts)
    return max((step for step in steps if type(step) is int), default=0)


def _newest(run: Path, read: Callable[[Any], T]) -> T | None:
    """What can be read of the last line of which that can be read."""
    for line in reversed(Run(run).starts):
        with suppress(TypeError, LookupError, AttributeError):
            return read(line)
    return None


# ----------------------------------------
# Starting a run again in its folder: only if it ended before its first checkpoint, so that nothing is lost.


log = logging.getLogger("cohort.runs")

WRITTEN = (
    *("journal", "first_prompt.txt", "objective.txt", "metrics.jsonl", "summary.json", STARTS),
    *("rollouts", "evaluations", "best", "checkpoints", "merged", "nonfinite", "replays", "trackers", "tensorboard"),
)
"""What a run writes beside its settings."""


def check_replaceable(run: Path) -> None:
    """Check that a run never had a complete checkpoint. A run whose checkpoints were removed must not be replaced.

    Raises:
        RunFolderError: names what shows that it had one.
    """
    found = [name for name in ("summary.json", "merged") if (run / name).exists()]
    found += ["best"] if _best_is_later(run) else []
    found += [f"{STARTS} (it went on from step {step})"] if (step := latest_start_step(run)) else []
    found += sorted(f"checkpoints/{path.name}" for path in (run / "checkpoints").glob("*") if path.suffix != ".part")
    if found:
        raise RunFolderError(
            f"{run} has no checkpoint to go on from, and it is not started again over what it has: "
            f"{', '.join(found)}. Put a checkpoint back, or choose another run.output_dir"
        )


def _best_is_later(run: Path) -> bool:
    """Whether the best model is of a step by which a checkpoint must exist. The first checkpoint may be in the writer's
    queue until the second is due."""
    every = load_config(run / "config.toml", of_run=True).run.save_steps
    step: int = read_best(run / "best" / "best.json")["step"] if (run / "best").exists() else 0
    return 0 < 2 * every < step


def clear(run: Path, *, keep_journal: bool = False) -> None:
    """Remove what a run without a checkpoint has written, except its settings: until the new ones take their place,
    they mark the folder as a run's. Logs how many steps are made again.

    Args:
        run: the folder.
        keep_journal: whether the new run would sample what the journal holds.

    Raises:
        RunFolderError: as ``check_replaceable``.
    """
    check_replaceable(run)
    if lost := max((row["step"] for row in Run(run).rows), default=0):
        again = "starts again at step 1" + (" and reads what it has sampled" if keep_journal else "")
        log.warning("%s has metrics up to step %d and no checkpoint: the run %s", run, lost, again)
    for name in (one for one in WRITTEN if one != "journal" or not keep_journal):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
