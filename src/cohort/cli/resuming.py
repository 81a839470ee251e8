"""``cohort resume``: continue a run from its folder alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cohort.cli.app import ANY_TEXT, app
from cohort.cli.start import ALLOW_CHANGED, TRUST, run_training
from cohort.errors import RunFolderError


@app.command(
    sort_key=3,
    usage="Usage: cohort resume RUN [--allow-changed KEY] [--trust RUN] [--section.key value ...]",
    help_epilogue="Every setting of 'cohort config' can be given as --section.key value. It overrides the run's.",
)
def resume(
    run: str,
    /,
    *overrides: Annotated[str, ANY_TEXT, Parameter(show=False)],
    allow_changed: ALLOW_CHANGED = (),
    trust: TRUST = None,
) -> None:
    """Continue a run: from its newest checkpoint, or from the start if it has none. Nothing is done if it is complete.

    The run's settings are used; relative names in them belong to the folder that the run was started in. Names of files
    given here belong to the working directory if they are there, else to that folder too.

    What differs from the run so far is printed; what changes its results is refused.

    Args:
        run: The run folder.
        allow_changed: A setting or fact that may differ from the run's though it changes results. May be repeated.
        trust: Run the code that the settings in this run folder name, though this account has not run it before.
    """
    from cohort.config import load_config, setting_names
    from cohort.runs.folder import RunFolder
    from cohort.runs.settings import with_whole_names
    from cohort.runs.starts import CONTINUED_BY, last_start
    from cohort.runs.trust import check_code, check_secrets

    folder = RunFolder(Path(run).expanduser().resolve())
    folder.check_is_run()
    settings = load_config(folder.path / "config.toml", [*overrides, f"--run.output_dir={folder.path}"], of_run=True)
    start, names = last_start(folder.path), setting_names(overrides)
    if how := CONTINUED_BY.get(start.begun_by):
        raise RunFolderError(f"{folder.path} was begun with cohort.trl: continue it with {how}")
    given = {"data.train": "train_dataset", "data.eval": "eval_dataset", "reward.functions": "reward_funcs"}
    given |= {"environment.tools": "tools", "environment.factory": "environment_factory", "model.path": "model"}
    missing = {name: what for name, what in start.missing.items() if name not in {given.get(key) for key in names}}
    has_checkpoint, adapters = bool(folder.checkpoint_steps()), settings.model.lora.wanted
    if needed := replace(start, missing=missing).needed(adapters=adapters) if has_checkpoint else missing:
        names_of = {name: setting for setting, name in given.items()}
        flags = [f"--{names_of[name]} NAME" for name in needed if name in names_of]
        unknown = ", ".join(f"{name} ({what})" for name, what in needed.items())
        raise RunFolderError(
            f"{folder.path} was begun in Python, and its folder does not name {unknown}. Run its script "
            f"again, with train(resume='auto')" + (f"; or name them: {' '.join(flags)}" if flags else "")
        )
    working_folder = Path.cwd()
    settings = with_whole_names(settings, [name for name in names if name != "run.output_dir"])
    if began_in := start.working_directory(folder.path):
        os.chdir(began_in)  # to which the names in the settings belong
    check_code(folder.path, settings, trust and str(Path(working_folder, trust).expanduser()), given=names)
    check_secrets(folder.path, settings)
    run_training(settings, "auto", allow_changed, overrides=(*start.overrides, *names), missing=missing)
