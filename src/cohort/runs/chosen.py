"""The run that a model belongs to: which of its models is meant, and its settings wherever the command is called."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from cohort.config import GRPOConfig
from cohort.config.beside import SUFFIXES, with_files
from cohort.errors import ConfigError, ModelError, RunFolderError
from cohort.plugins import know_module_folders
from cohort.runs.checkpoints import saved_identity
from cohort.runs.durable import MANIFEST, check_whole
from cohort.runs.folder import RunFolder
from cohort.runs.reading import read_best
from cohort.runs.starts import last_start, with_whole_names
from cohort.runs.trust import check_run_settings, module_origin, texts_in

NAMES = (
    "data.eval",
    "data.filter",
    "reward.functions",
    "environment.tools",
    "environment.factory",
    "environment.history",
    "environment.parser",
)
"""The settings of evaluations and sampling that name files of the folder in which the run was started."""


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
    if any(folder.glob("checkpoints/step-*")):  # of a run that lacks files, which is said elsewhere
        return
    raise ModelError(
        f"{model} is neither a run nor a model folder: it has no config.json, and no run was started in it"
    )


def check_not_in_run(folder: Path) -> None:
    """Refuse a misspelt model in the folder of a run, instead of taking it for a hub id.

    Raises:
        RunFolderError: there is no such folder, and the folder above it is a run's.
    """
    if not folder.exists():
        for run in (folder.parent, folder.parent.parent):
            if run != Path() and run_of(run) == run:
                raise RunFolderError(f"there is no {folder}. {_models(run)}: give {run} and --checkpoint")


def settings_of_run(
    run: Path,
    config: GRPOConfig,
    trusted: str | None,
    *,
    given: Collection[str] = (),
    read: Collection[str] | None = None,
    unused: Sequence[str] = (),
) -> GRPOConfig:
    """A run's settings with names that are right in the working folder. Relative names of files belong to the working
    folder if they are there, else to the folder in which the run was started.

    Args:
        run: the run folder.
        config: its settings, with what overrides them.
        trusted, given, read, unused: as ``check_run_settings``. ``given`` names belong to the working folder.

    Raises:
        RunFolderError: as ``check_run_settings``; or a file that the settings name is not there.
    """
    names = [name for name in NAMES if not any(one == name or one.startswith(f"{name}.") for one in given)]
    names = [name for name in names if read is None or name in read]
    home, run = _home(run, config, names), run.absolute()
    trusted = None if trusted is None else str(Path(trusted).expanduser().absolute())
    with contextlib.chdir(home or Path.cwd()):
        _check_files(run, config, names)
        check_run_settings(run, config, trusted, given=given, read=read, unused=unused)
        if home is not None:
            config = with_whole_names(config, names)
    if home is not None:
        know_module_folders({name: str(home) for name in _modules_of(home, config, names)})
    return config


def _modules_of(home: Path, config: GRPOConfig, names: Collection[str]) -> Iterator[str]:
    """The top-level modules that the settings name, and that would not be the same without ``home``."""
    for name in _modules(config, names):
        if module_origin(name, [*sys.path, str(home)]) != module_origin(name, sys.path):
            yield name


def _check_files(run: Path, config: GRPOConfig, names: Collection[str]) -> None:
    """Check that the files are there that can be nothing else: they may have moved since the run."""
    missing = {file: name for name, file, certain in _files(config, names) if certain and not _is_file(Path(file))}
    if not missing:
        return
    listed = ", ".join(f"{file} ({name})" for file, name in missing.items())
    file, name = next(iter(missing.items()))
    began = last_start(run).folder
    example = "FILE.py:NAME" if file.endswith(".py") else "FILE"
    raise RunFolderError(
        f"the settings of {run} name {listed}, which {'is' if len(missing) == 1 else 'are'} not there"
        + (f"; the run was started in {began}" if began and not Path(file).is_absolute() else "")
        + f". If it has moved, name it where it is now, as in --{name} {example}"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.expanduser().is_file()
    except (OSError, RuntimeError, ValueError):  # too long, of an unknown user, with a NUL
        return False


def _home(run: Path, config: GRPOConfig, names: Collection[str]) -> Path | None:
    """The folder in which the run was started, if it has files that the settings name and this one has not."""
    with contextlib.suppress(OSError):
        began = last_start(run).working_directory(run)
        files = [Path(file) for _, file, _ in _files(config, names)]
        for module in _modules(config, names):
            files += [Path(f"{module}.py"), Path(module)]
        if began is not None and any(
            not file.is_absolute() and (began / file).exists() and not file.exists() for file in files
        ):
            return began
    return None


def _files(config: GRPOConfig, names: Collection[str]) -> list[tuple[str, str, bool]]:
    """What the settings name that may be a file or a folder: the setting, the name, and whether it is that of a .py
    file or of a file of data, which can be nothing else."""
    found = []
    for setting in names:

        def note(name: str, is_code: bool, setting: str = setting) -> str:
            is_data = Path(name).suffix in SUFFIXES and not set("*?[:") & set(name)
            found.append((setting, name, is_code or is_data))
            return name

        with_files(_value(config, setting), setting, note)
    return found


def _modules(config: GRPOConfig, names: Collection[str]) -> set[str]:
    """The top-level modules of the functions that the settings name, as in "module:function"."""
    texts = [text for name in names for text in texts_in(_value(config, name)) if name != "data.eval"]
    sources = {text.partition("(")[0].rpartition(":")[0] for text in texts}
    return {source.partition(".")[0] for source in sources if source and not source.endswith(".py")} - {""}


def _value(config: GRPOConfig, setting: str) -> Any:
    section, _, key = setting.partition(".")
    return getattr(getattr(config, section), key)


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
    if names := facts.get("tools") or facts.get("tools and environments"):
        raise ConfigError(
            f"{model} was trained with tools or environments that were passed in Python ({names}): name them, as in "
            f"--environment.tools file.py:function or --environment.factory file.py:Class; or {instead}"
        )


def why_unnamed(run: Path, argument: str) -> str:
    """Why a run's settings do not name an argument of the trainer, in words."""
    what = last_start(run).missing.get(argument)
    return f"{run} was started from Python, with {what} as {argument}" if what else f"the settings of {run} name none"
