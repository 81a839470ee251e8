"""Where a run writes, and how it begins: its folder, the same on every rank; whether the run in it starts, resumes or
is complete; and the logs of ranks other than 0."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar

from cohort.config import GRPOConfig, load_config
from cohort.errors import ConfigError
from cohort.parallel import World, on_main
from cohort.runs.folder import RunFolder
from cohort.runs.starts import check_replaceable
from cohort.workers import close_at_exit

T = TypeVar("T")
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


def output_folder(config: GRPOConfig, world: World, *, resume: bool = False) -> RunFolder:
    """The folder of the settings, or the next free one under ``runs``, which rank 0 finds.

    Raises:
        ConfigError: ``resume`` without ``run.output_dir``.
    """
    if config.run.output_dir is not None:
        return RunFolder(config.run.output_dir, config.run)
    if resume:
        raise ConfigError("to resume a run, set run.output_dir to its folder")
    path = on_main(world, lambda: RunFolder.next_free("run").path)
    return RunFolder(path, config.run)


def find_folder(
    config: GRPOConfig, world: World, resume: Resume, allowed: Collection[str] = (), folder: RunFolder | None = None
) -> tuple[RunFolder, Beginning]:
    """The folder of the settings unless another is given, and how to begin with what is in it: ``output_folder`` and
    ``find_run``."""
    folder = folder or output_folder(config, world, resume=bool(resume))
    with closed_on_error(folder):
        return folder, on_main(world, lambda: find_run(folder, config, resume, allowed))


def template_time(config: GRPOConfig) -> str | None:
    """``data.template_time``; if it is unset, that of the run in ``run.output_dir``, which may be resumed."""
    known, folder = config.data.template_time, config.run.output_dir
    if known is None and folder is not None and RunFolder(folder).is_run:
        with suppress(ConfigError):  # said when the run is resumed
            known = load_config(Path(folder).expanduser() / "config.toml", of_run=True).data.template_time
    return known


def with_template_time(config: GRPOConfig, time: str | None) -> GRPOConfig:
    """The settings with ``data.template_time``, unless it is None."""
    return (
        config.model_copy(update={"data": config.data.model_copy(update={"template_time": time})}) if time else config
    )


@contextmanager
def closed_on_error(folder: RunFolder) -> Iterator[None]:
    """Close the folder if the block raises, so that another trainer of the process may take it."""
    try:
        yield
    except BaseException:
        folder.close()
        raise


def closing(folder: RunFolder, steps: Iterable[T]) -> Generator[T]:
    """The steps of a run, after which its folder is closed, however they end: also if they never begin, and when the
    interpreter exits before."""
    closed = _closed_after(folder, steps)
    next(closed)  # enters the block: a generator that is not in it is closed without leaving it
    close_at_exit(closed)
    return closed


def _closed_after(folder: RunFolder, steps: Iterable[Any]) -> Generator[Any]:
    try:
        yield
        yield from steps
    finally:
        folder.close()


def log_to(folder: RunFolder, world: World) -> None:
    """Send this process's log and warnings to ``logs/rank-N.log``, and not to the console, which is rank 0's. Does
    nothing on rank 0."""
    if world.is_main:
        return
    path = folder.path / "logs" / f"rank-{world.rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.captureWarnings(True)
    logging.getLogger().addHandler(handler)
