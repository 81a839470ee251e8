"""Where a run writes: its folder, the same on every rank, and the logs of the ranks that do not print."""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cohort.config import GRPOConfig
from cohort.errors import ConfigError
from cohort.parallel import World, on_main
from cohort.runs.auto import Beginning, Resume, find_run
from cohort.runs.folder import RunFolder
from cohort.workers import close_at_exit

T = TypeVar("T")


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
