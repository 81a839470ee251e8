"""Saving models: in the background from a copy, or at once from live tensors, which every rank takes part in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from cohort.errors import DiskError, out_of_memory
from cohort.parallel import World, on_main, together
from cohort.rollout.backend import free_bytes
from cohort.runs.checkpoints import Content, copied, num_copied_bytes, write_content
from cohort.runs.durable import replaced, sync_path
from cohort.runs.writer import Write, Writer

Replace: TypeAlias = Callable[[Content, World], None]
"""Writes a content in place of an older one. Of a copy, with a world of its own."""
COPY_SHARE = 0.5
"""Share of the free memory that a copy may take while it is written; the next step needs the rest."""


def save_in_background(writer: Writer, kind: str, content: Content, replace: Replace, world: World) -> bool:
    """Copy the content and write the copy in the background, until it is written or a newer one comes. Returns whether
    there was memory for the copy."""
    if not on_main(world, partial(_has_room, writer, kind, content)):
        return False
    try:
        copy = copied(content, write=world.is_main)
    except (RuntimeError, MemoryError) as error:
        if world.size > 1 or not out_of_memory(error):
            raise
        return False
    if world.is_main:
        writer.in_background(Write(kind, content.step, partial(replace, copy, World())))
    return True


def save_now(writer: Writer, kind: str, content: Content, replace: Replace, world: World) -> bool:
    """Write the content. Returns whether the disk took it."""
    try:
        replace(content, world)
    except DiskError as error:
        on_main(world, partial(writer.missed, kind, content.step, error))
        return False
    on_main(world, partial(writer.made_up_for, kind))
    return True


def replace(target: Path, content: Content, world: World, *, check: Callable[[], None], metrics: Path) -> None:
    """Write a folder in place of an older one. Every rank must call, unless the content is a copy.

    Args:
        target: the folder.
        content: what to write.
        world: the ranks.
        check: raises if the run's folder has gone.
        metrics: the run's metrics: a resumed run has the lines of its steps.
    """

    def write() -> None:
        if world.size == 1:  # other ranks wait for what the block exchanges
            check()
        with replaced(target) if world.is_main else nullcontext(target) as folder:
            write_content(folder, content, write=world.is_main)
            if world.is_main:
                check()
                with suppress(FileNotFoundError):  # there is none yet
                    sync_path(metrics)

    together(world, write)


def _has_room(writer: Writer, kind: str, content: Content) -> bool:
    """Whether there is memory for a copy, once the last one of this kind is written."""
    writer.free(kind)
    free = free_bytes(torch.device("cpu"))
    return free is not None and num_copied_bytes(content) < free * COPY_SHARE
