"""``--resume auto``: one command starts a run, continues it after any end, and does nothing once it is complete."""

from __future__ import annotations

import shutil

from cohort.config import GRPOConfig, load_config
from cohort.errors import ConfigError, RunFolderError
from cohort.parallel import World, on_main
from cohort.runs.folder import RunFolder
from cohort.runs.lock import LOCK, lock


def resumes(config: GRPOConfig) -> bool | None:
    """``find_run`` for ``run.output_dir``; on several ranks, as rank 0 finds it.

    Raises:
        ConfigError: ``run.output_dir`` is not set.
    """
    if config.run.output_dir is None:
        raise ConfigError("to resume a run, set run.output_dir to its folder")
    folder = RunFolder(config.run.output_dir)
    world = World.of_environment(timeout=config.parallel.rank_timeout)
    return on_main(world, lambda: find_run(folder, config))


def find_run(folder: RunFolder, config: GRPOConfig) -> bool | None:
    """Whether a run with these settings is to be resumed (True), started (False), or is complete (None).

    A run that ended before its first checkpoint starts again: its files are removed. The same settings repeat the same
    steps.

    Raises:
        RunFolderError: the folder holds something else, or a run with other settings.
    """
    path = folder.path
    if not (path / "config.toml").exists():
        folder.check_free()
        return False
    lock(path)
    saved = load_config(path / "config.toml")
    same_end = (saved.run.max_steps, saved.run.num_epochs) == (config.run.max_steps, config.run.num_epochs)
    if folder.checkpoint_steps():
        folder.check_settings(config)
        return None if same_end and (path / "summary.json").exists() else True
    if saved != config:
        raise RunFolderError(
            f"{path} holds a run with other settings and no checkpoint: remove it, or choose another run.output_dir"
        )
    if (path / "summary.json").exists():
        return None
    for found in path.iterdir():
        if found.is_dir() and found.name != "logs":
            shutil.rmtree(found)
        elif found.is_file() and found.name != LOCK:
            found.unlink()
    return False
