"""The places where a run meets requests: between two updates, between two steps, and when its sampling is cancelled.

A checkpoint that is written there is of this instant: the run that resumes from it is bit for bit the run that went on.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from cohort.errors import Stopped
from cohort.parallel import on_main
from cohort.runs.folder import RunFolder
from cohort.train.parts import TrainerParts


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
