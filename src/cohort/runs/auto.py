"""Whether a run is to be started, resumed, or is complete: one command goes on after any end of a process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, Literal

from cohort.config import GRPOConfig, load_config
from cohort.runs.anew import check_replaceable
from cohort.runs.folder import RunFolder

Resume = bool | Literal["auto"]
"""``train(resume=...)``. True: the folder must hold a run. "auto": it may."""


class Beginning(StrEnum):
    """How a process begins with a run."""

    NEW = "new"
    """From the first step, in a folder without a run."""
    AGAIN = "again"
    """From the first step, in the folder of a run that ended before its first checkpoint."""
    RESUMED = "resumed"
    """From a checkpoint."""
    COMPLETE = "complete"
    """There is nothing to do."""


def find_run(folder: RunFolder, config: GRPOConfig, resume: Resume, allowed: Collection[str] = ()) -> Beginning:
    """How to begin a run with these settings. A run whose checkpoints were removed, or are all set aside, does not
    start again. A complete run whose newest checkpoint is damaged goes on from the one before.

    Args:
        folder: the run folder.
        config: the settings.
        resume: whether to resume. False: the folder must hold no run.
        allowed: keys of changes that are allowed though they change results.

    Raises:
        RunFolderError: the folder holds something else, or a run with other settings.
    """
    if not resume or (resume == "auto" and not folder.is_run):
        folder.check_free()
        return Beginning.NEW
    if folder.is_run:
        folder.take()
    folder.check_settings(config, allowed)
    saved = load_config(folder.path / "config.toml", of_run=True)
    steps = folder.checkpoint_steps()
    ended = folder.has_summary and resume == "auto" and not _goes_further(saved, config, folder.read_summary())
    if ended and (not steps or folder.check_resumable(config, allowed) == steps[-1]):
        folder.close()
        return Beginning.COMPLETE
    if not steps:
        check_replaceable(folder.path)
    return Beginning.RESUMED if steps else Beginning.AGAIN


def _goes_further(saved: GRPOConfig, now: GRPOConfig, summary: Mapping[str, Any]) -> bool:
    """Whether a complete run is to train on: it is given another end, or another patience after it stopped early."""
    ends = [(config.run.max_steps, config.run.num_epochs) for config in (saved, now)]
    patience = [config.eval.early_stopping_patience for config in (saved, now)]
    return ends[0] != ends[1] or (bool(summary.get("stopped_early")) and patience[0] != patience[1])
