"""A run goes on: what differs from before is found, the newest checkpoint is loaded, and the folder is prepared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from cohort.config import GRPOConfig, Schedule
from cohort.errors import ConfigError
from cohort.parallel import on_main, together
from cohort.runs.changes import describe as describe_changes
from cohort.runs.changes import fact_changes, refuse
from cohort.runs.checkpoints import load_checkpoint, saved_identity
from cohort.runs.facts import take_threads
from cohort.runs.folder import RunFolder
from cohort.runs.reading import damage_named
from cohort.train.parts import TrainerParts
from cohort.train.sample import drop_resized


class RunEndedError(ConfigError):
    """The run to resume has made all its steps, or stopped early."""


def resume(
    folder: RunFolder, parts: TrainerParts, schedule: Schedule, config: GRPOConfig, allowed: Collection[str]
) -> tuple[int, Schedule, list[str]]:
    """Continue a run from its newest whole checkpoint. Every rank must call.

    Args:
        folder: the run's folder.
        parts: the parts of this process, which take the checkpoint's state.
        schedule: of the settings.
        config: the settings, which the folder holds from now on.
        allowed: keys of changes that are allowed though they change results.

    Returns:
        The number of complete steps, the schedule of the rest, and what differs from before in words, line by line.

    Raises:
        RunFolderError: there is no whole checkpoint, or a change is not allowed.
        RunEndedError: the run has ended; the parts have the state of its end.
    """
    step = on_main(parts.world, partial(folder.check_resumable, config, allowed))
    checkpoint = folder.checkpoint(step)
    changes = together(parts.world, lambda: _changes(folder, checkpoint, parts, config, allowed))
    best = on_main(parts.world, folder.best_record)

    def restore() -> None:
        with damage_named(checkpoint):
            models = replace(parts.models, sampler=parts.copied_weights())
            saved = load_checkpoint(checkpoint, models, rank=parts.world.rank)
            parts.restore(saved, best)
        if config.optim.microbatch_tokens is None:  # sums in the order of the run, whatever memory is free now
            parts.budget.tokens = saved.microbatch_tokens or parts.budget.tokens

    together(parts.world, restore)
    if parts.updates and parts.reference is None:  # ``objective.beta`` was allowed to become 0 within a step
        parts.updates.ref_logps_N = None
    schedule = schedule.resumed(step, parts.cursor.position)
    drop_resized(parts, schedule)
    # Without a summary, the process was killed after the last step: the end is made now.
    if parts.metrics is None and on_main(parts.world, lambda: folder.has_summary):
        _check_incomplete(folder, parts, schedule, step)
    # A process that was killed after this evaluation has written the line that this one will write.
    written = step if parts.metrics is None else step - 1
    on_main(parts.world, lambda: folder.resume(config, step, written))
    return step, schedule, changes


def _changes(
    folder: RunFolder, checkpoint: Path, parts: TrainerParts, config: GRPOConfig, allowed: Collection[str]
) -> list[str]:
    """What differs from the run that wrote a checkpoint, in words. Takes its number of threads.

    Raises:
        RunFolderError: it changes results and is not allowed.
    """
    saved = saved_identity(checkpoint)
    note = "" if "threads" in allowed else take_threads(saved, parts.world.size)
    parts.facts["threads"] = str(torch.get_num_threads())
    changes = fact_changes(saved, parts.facts)
    refuse(folder.path, changes, allowed)
    return [*filter(None, [note]), *describe_changes([*folder.check_settings(config, allowed), *changes])]


def _check_incomplete(folder: RunFolder, parts: TrainerParts, schedule: Schedule, step: int) -> None:
    if step >= schedule.steps:
        raise RunEndedError(
            f"{folder.path} is complete: it is at step {step} of {schedule.steps}; "
            "raise run.num_epochs or run.max_steps to train longer"
        )
    if parts.best.exhausted:
        raise RunEndedError(
            f"{folder.path} stopped early, at step {step}: {parts.best.describe()}; "
            "raise eval.early_stopping_patience, or set it to 0, to train longer"
        )
