"""Starting a run again in its folder: only if it ended before its first checkpoint, so that nothing is lost."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from cohort.config import load_config
from cohort.errors import RunFolderError
from cohort.runs.reading import read_best, read_metrics
from cohort.runs.starts import STARTS, latest_start_step

log = logging.getLogger("cohort.runs")

WRITTEN = (
    *("first_prompt.txt", "objective.txt", "metrics.jsonl", "summary.json", STARTS),
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


def clear(run: Path) -> None:
    """Remove what a run without a checkpoint has written, except its settings: until the new ones take their place,
    they mark the folder as a run's. Logs how many steps are lost.

    Raises:
        RunFolderError: as ``check_replaceable``.
    """
    check_replaceable(run)
    if lost := _last_step(run):
        log.warning("%s has metrics up to step %d and no checkpoint: the run starts again at step 1", run, lost)
    for name in WRITTEN:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _last_step(run: Path) -> int:
    """The last step with metrics; 0 without."""
    try:
        return max((metrics["step"] for _, metrics in read_metrics(run / "metrics.jsonl")), default=0)
    except RunFolderError:  # what is removed need not be whole
        return 0
