"""A run stops and goes on: where it meets requests, and how a resumed run begins."""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cohort.config import GRPOConfig, Schedule
from cohort.errors import ConfigError, Stopped
from cohort.parallel import on_main, together
from cohort.runs.changes import describe as describe_changes
from cohort.runs.changes import fact_changes, refuse, take_threads
from cohort.runs.checkpoints import load_checkpoint, saved_identity
from cohort.runs.folder import RunFolder
from cohort.runs.reading import damage_named
from cohort.train.parts import TrainerParts
from cohort.train.sample import drop_resized

# ----------------------------------------
# The places where a run meets requests: between two updates, between two steps, and when its sampling is cancelled.
#
# A checkpoint that is written there is of this instant: the run that resumes from it is bit for bit the run that went
# on.


def stop_point(parts: TrainerParts, folder: RunFolder) -> None:
    """Write a checkpoint if one is asked for, and end the run if it is to stop. A request to one rank is one to all,
    and every rank must call.

    Raises:
        Stopped: the run is to stop, and the checkpoint is written.
    """
    requests, world = parts.requests, parts.world
    if world.is_main:
        requests.look(folder.save_request)
    asked = world.gather((requests.stop, requests.save, requests.reason))
    stop = next((reason for stops, _, reason in asked if stops), None)
    if stop is None and not any(saves for _, saves, _ in asked):
        return
    requests.save = False  # before it is written: a request meanwhile is for a newer one
    save_instant(parts, folder, wait=True)
    on_main(world, lambda: folder.save_request.unlink(missing_ok=True))
    if stop is not None:
        requests.met = True
        raise Stopped(f"stopped by {stop} {parts.where}; {folder.checkpoint(parts.complete_steps)} holds this instant")


def save_instant(parts: TrainerParts, folder: RunFolder, *, wait: bool = False) -> None:
    """Write a checkpoint of this instant, unless the newest one is. Every rank must call.

    Args:
        parts: the parts of the run.
        folder: its folder.
        wait: whether to return only when it is written.
    """
    parts.wait_for_pending()
    if parts.instant != parts.saved_instant:
        if folder.save_checkpoint(parts.models, parts.saved_state(), parts.world, wait=wait):
            parts.saved_instant = parts.instant
    elif wait:
        on_main(parts.world, folder.settle)


def saved_when_left(
    parts: TrainerParts, folder: RunFolder, steps: Generator[dict[str, Any]]
) -> Generator[dict[str, Any]]:
    """The steps of a run. When the loop that takes them is left, a checkpoint of this instant is written: by a process
    that trains alone, for every rank would have to come here."""
    try:
        yield from steps
    except GeneratorExit:
        if parts.world.size == 1:
            save_instant(parts, folder, wait=True)
        raise


@contextmanager
def with_resume_hint(how: str, *, show: bool) -> Iterator[None]:
    """Add to ``Stopped`` how to continue the run that the block trains.

    Args:
        how: how to continue the run, in words.
        show: whether to print it: Python prints nothing of a script that ends with a code.
    """
    try:
        yield
    except Stopped as stopped:
        stopped.text += f"; continue with {how}"
        if show:
            print(f"cohort: {stopped}", file=sys.stderr)
        raise


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
