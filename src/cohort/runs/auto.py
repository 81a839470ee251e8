"""Whether a run is to be started, resumed, or is complete: one command goes on after any end of a process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from cohort.config import GRPOConfig, load_config
from cohort.errors import ConfigError
from cohort.parallel import World, on_main
from cohort.runs.folder import RunFolder

Resume = bool | Literal["auto"]
"""``train(resume=...)``. True: the folder must hold a run. "auto": it may."""


def resumes(config: GRPOConfig, resume: Resume, allowed: Collection[str] = ()) -> bool | None:
    """``find_run`` for ``run.output_dir``; on several ranks, as rank 0 finds it.

    Raises:
        ConfigError: ``run.output_dir`` is not set.
    """
    if config.run.output_dir is None:
        raise ConfigError("to resume a run, set run.output_dir to its folder")
    folder = RunFolder(config.run.output_dir)
    world = World.of_environment(timeout=config.parallel.rank_timeout)
    return on_main(world, lambda: find_run(folder, config, resume, allowed))


def find_run(folder: RunFolder, config: GRPOConfig, resume: Resume, allowed: Collection[str] = ()) -> bool | None:
    """Whether a run with these settings goes on from a checkpoint (True), starts from the first step (False), or is
    complete (None). A run that ended before its first checkpoint starts again in its folder.

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
    same_end = (saved.run.max_steps, saved.run.num_epochs) == (config.run.max_steps, config.run.num_epochs)
    if folder.has_summary and same_end and resume == "auto":
        folder.close()
        return None
    return bool(folder.checkpoint_steps())
