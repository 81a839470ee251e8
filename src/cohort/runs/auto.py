"""Whether a run is to be started, resumed, or is complete: one command goes on after any end of a process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from cohort.config import GRPOConfig, load_config
from cohort.runs.anew import check_replaceable
from cohort.runs.folder import RunFolder

Resume = bool | Literal["auto"]
"""``train(resume=...)``. True: the folder must hold a run. "auto": it may."""


def find_run(folder: RunFolder, config: GRPOConfig, resume: Resume, allowed: Collection[str] = ()) -> bool | None:
    """Whether a run with these settings goes on from a checkpoint (True), starts from the first step (False), or is
    complete (None). A run that ended before its first checkpoint starts again in its folder; one whose checkpoints were
    removed, or are all set aside, does not.

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
        return False
    if folder.is_run:
        folder.take()
    folder.check_settings(config, allowed)
    saved = load_config(folder.path / "config.toml")
    if folder.has_summary and resume == "auto" and not _goes_further(saved, config, folder.read_summary()):
        folder.close()
        return None
    goes_on = bool(folder.checkpoint_steps())
    if not goes_on:
        check_replaceable(folder.path)
    return goes_on


def _goes_further(saved: GRPOConfig, now: GRPOConfig, summary: Mapping[str, Any]) -> bool:
    """Whether a complete run is to train on: it is given another end, or another patience after it stopped early."""
    ends = [(config.run.max_steps, config.run.num_epochs) for config in (saved, now)]
    patience = [config.eval.early_stopping_patience for config in (saved, now)]
    return ends[0] != ends[1] or (bool(summary.get("stopped_early")) and patience[0] != patience[1])
