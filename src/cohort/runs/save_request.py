"""A request to a run for a checkpoint, as a file in its folder: it also reaches a run on another machine."""

from __future__ import annotations

from pathlib import Path

NAME = "save.request"


def request_save(folder: Path) -> Path:
    """Ask the run in a folder for a checkpoint. Returns the file, which the run removes when it has written one."""
    file = folder / NAME
    file.touch()
    return file


def save_requested(folder: Path) -> bool:
    """Whether a checkpoint is asked for."""
    return (folder / NAME).exists()


def save_answered(folder: Path) -> None:
    """A checkpoint is written."""
    (folder / NAME).unlink(missing_ok=True)
