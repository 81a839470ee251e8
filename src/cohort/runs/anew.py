"""Starting a run again in its folder: only if it ended before its first checkpoint, so that nothing is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

from cohort.config import load_config
from cohort.errors import RunFolderError
from cohort.runs.reading import read_best
from cohort.runs.starts import STARTS

WRITTEN = (
    *("first_prompt.txt", "objective.txt", "metrics.jsonl", "summary.json", STARTS),
    *("rollouts", "evaluations", "best", "checkpoints", "merged", "nonfinite", "trackers", "tensorboard"),
)
"""What a run writes beside its settings."""


def check_replaceable(run: Path) -> None:
    """Check that a run has never had a whole checkpoint. One whose checkpoints were removed is not to be replaced.

    Raises:
        RunFolderError: names what shows that it had one.
    """
    found = [name for name in ("summary.json", "merged") if (run / name).exists()]
    found += ["best"] if _best_is_later(run) else []
    found += sorted(f"checkpoints/{path.name}" for path in (run / "checkpoints").glob("*") if path.suffix != ".part")
    if found:
        raise RunFolderError(
            f"{run} has no checkpoint to go on from, and it is not started again over what it has: "
            f"{', '.join(found)}. Put a checkpoint back, or choose another run.output_dir"
        )


def _best_is_later(run: Path) -> bool:
    """Whether the best model is of a step by which a checkpoint was written. The first may be written in the background
    until the second is due."""
    every = load_config(run / "config.toml").run.save_steps
    step: int = read_best(run / "best" / "best.json")["step"] if (run / "best").exists() else 0
    return 0 < 2 * every < step


def clear(run: Path) -> None:
    """Remove what a run without a checkpoint has written, except its settings: until the new ones take their place,
    they mark the folder as a run's.

    Raises:
        RunFolderError: as ``check_replaceable``.
    """
    check_replaceable(run)
    for name in WRITTEN:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
