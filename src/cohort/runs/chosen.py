"""The run that a model belongs to, and which of its models is meant."""

from __future__ import annotations

import re
from pathlib import Path

from cohort.errors import ConfigError, ModelError, RunFolderError
from cohort.runs.checkpoints import saved_identity
from cohort.runs.durable import MANIFEST, check_whole
from cohort.runs.folder import RunFolder
from cohort.runs.reading import read_best
from cohort.runs.starts import last_start


def run_of(model: Path) -> Path | None:
    """The folder of the run that a model is of: the model is that folder, a checkpoint (``checkpoints/step-4``, or
    ``checkpoint-4`` of a run of TRL's scripts), ``best/`` or ``merged/``. Another model that lies in the folder is not
    the run's: it may be a stranger's."""
    if not model.is_dir():  # a hub id, which the working directory has nothing to do with
        return None
    for folder in (model, model.parent, model.parent.parent):
        if (folder / "config.toml").is_file() and (folder / "objective.txt").is_file():
            within = model.relative_to(folder).parts
            named = within in ((), ("best",), ("merged",)) or within[:1] == ("checkpoints",)
            of_run = named or (len(within) == 1 and re.fullmatch("checkpoint-[0-9]+", within[0]))
            return folder if of_run else None
    return None


def model_of(model: str, checkpoint: str | None = None) -> tuple[str, str]:
    """The folder or hub id of a model, and a note on the choice.

    Args:
        model: a folder or a hub id. The folder of a run stands for its best model or, if there is none, for its newest
            checkpoint.
        checkpoint: which model of a run: "best", "newest" or a step. None: as above.

    Raises:
        ConfigError: ``checkpoint`` is given, and ``model`` is not the folder of a run; or it is no such word.
        ModelError: the run has no checkpoint yet.
        RunFolderError: the run has no such model, or it is not as it was written.
    """
    folder = Path(model).expanduser()
    run = run_of(folder)
    if checkpoint is not None and (run is None or folder != run):
        raise ConfigError(f"--checkpoint chooses a model of a run, and {model} is not the folder of a run")
    if run is not None and folder == run / "checkpoints":
        raise ModelError(f"{model} holds the checkpoints of a run: give {run} and --checkpoint STEP. {_models(run)}")
    if run is None:
        check_not_in_run(folder)
        _check_model_folder(folder, model)
        return model, ""
    note = ""
    if folder == run:
        folder, note = _chosen(run, model, checkpoint)
    if (folder / MANIFEST).exists():
        check_whole(folder)
    return (str(folder) if note else model), note


def _chosen(run: Path, model: str, checkpoint: str | None) -> tuple[Path, str]:
    """One of a run's models, and a note."""
    steps = RunFolder(run).checkpoint_steps()
    if checkpoint == "best" or (checkpoint is None and (run / "best").is_dir()):
        if not (run / "best").is_dir():
            raise RunFolderError(
                f"{model} has no best model: it was not evaluated with eval.metric_for_best_model. {_models(run)}"
            )
        found = read_best(run / "best" / "best.json")
        what = f"the best model of the run, after step {found['step']} ({found['metric']} {found['value']:.4g})"
        return run / "best", what
    if not steps:
        raise ModelError(f"{model} is the folder of a run that has no checkpoint yet")
    if checkpoint in (None, "newest"):
        return RunFolder(run).checkpoint(steps[-1]), f"the newest checkpoint of the run, after step {steps[-1]}"
    if not checkpoint.isdecimal():
        raise ConfigError(f"--checkpoint: expected a step, 'best' or 'newest', got {checkpoint!r}")
    if int(checkpoint) not in steps:
        raise RunFolderError(f"{model} has no checkpoint of step {checkpoint}. {_models(run)}")
    return RunFolder(run).checkpoint(int(checkpoint)), f"the checkpoint of the run after step {int(checkpoint)}"


def _models(run: Path) -> str:
    """The models of a run in words."""
    steps = RunFolder(run).checkpoint_steps()
    best = ["best"] * (run / "best").is_dir()
    return f"It has: {', '.join([*best, *(f'step {step}' for step in steps)]) or 'no model yet'}"


def _check_model_folder(folder: Path, model: str) -> None:
    """Refuse a folder that holds nothing of a model, which is no run's either.

    Raises:
        ModelError: there is such a folder.
    """
    if not folder.is_dir() or any(folder.glob("*config.json")) or any(folder.glob("tokenizer*")):
        return
    if steps := sorted(folder.glob("checkpoints/step-*"), key=lambda path: (len(path.name), path.name)):
        raise ModelError(
            f"{model} has checkpoints, and not the config.toml and objective.txt of a run: give one of its "
            f"checkpoints, such as {steps[-1]}"
        )
    raise ModelError(
        f"{model} is neither a run nor a model folder: it has no config.json, and no run was started in it"
    )


def check_not_in_run(folder: Path) -> None:
    """Refuse a misspelt model in the folder of a run, or a misspelt run beside others, instead of taking it for a hub
    id.

    Raises:
        RunFolderError: there is no such folder, and the folder above it is a run's, or holds runs.
    """
    above = folder.parent
    if folder.exists() or above == Path():
        return
    for run in (above, above.parent):
        if run != Path() and run_of(run) == run:
            raise RunFolderError(f"there is no {folder}. {_models(run)}: give {run} and --checkpoint")
    if runs := sorted(one.name for one in above.glob("*") if run_of(one) == one):
        shown = ", ".join(runs[:5]) + (", ..." if len(runs) > 5 else "")
        raise RunFolderError(f"there is no {folder}. {above} holds the runs {shown}")


def check_nothing_missing(model: str, instead: str) -> None:
    """Check that the tools and environments that a run was trained with are in its settings.

    Args:
        model: the model in the request.
        instead: how to go on without them.

    Raises:
        ConfigError: they were passed in Python, without a name.
    """
    run = run_of(Path(model).expanduser())
    if run is None or not (steps := RunFolder(run).checkpoint_steps()):
        return
    try:
        facts = saved_identity(RunFolder(run).checkpoint(steps[-1]))
    except RunFolderError as error:
        raise ConfigError(f"cannot see what {model} was trained with: {error}. To go on, {instead}") from None
    if names := facts.get("tools"):
        raise ConfigError(
            f"{model} was trained with tools or environments that were passed in Python ({names}): name them, as in "
            f"--environment.tools file.py:function or --environment.factory file.py:Class; or {instead}"
        )


def why_unnamed(run: Path, argument: str) -> str:
    """Why a run's settings do not name an argument of the trainer, in words."""
    what = last_start(run).missing.get(argument)
    return f"{run} was started from Python, with {what} as {argument}" if what else f"the settings of {run} name none"
