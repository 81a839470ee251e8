"""Settings that are read from a run folder: what they may name, and the working folder that their names belong to."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from cohort.config import GRPOConfig, load_config, setting_names, with_settings
from cohort.config.beside import SUFFIXES, with_files
from cohort.errors import ConfigError, RunFolderError
from cohort.plugins import know_module_folders
from cohort.runs.starts import last_start
from cohort.runs.trust import check_code, check_files, check_secrets, module_origin, texts_in

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
        trusted, given, read, unused: as ``check_code`` and ``check_secrets``. ``given`` names belong to the working
            folder.

    Raises:
        RunFolderError: as ``check_code`` and ``check_secrets``; or a file that the settings name is not there.
    """
    names = [name for name in NAMES if not any(one == name or one.startswith(f"{name}.") for one in given)]
    names = [name for name in names if read is None or name in read]
    home, run = _home(run, config, names), run.absolute()
    trusted = None if trusted is None else str(Path(trusted).expanduser().absolute())
    with contextlib.chdir(home or Path.cwd()):
        _check_files(run, config, names)
        check_code(run, config, trusted, given=given, read=read)
        check_secrets(run, config, unused)
        if home is not None:
            config = with_whole_names(config, names)
    if home is not None:
        know_module_folders({name: str(home) for name in _modules_of(home, config, names)})
    return config


def _modules_of(home: Path, config: GRPOConfig, names: Collection[str]) -> Iterator[str]:
    """The top-level modules that the settings name and that only ``home`` has."""
    for name in _modules(config, names):
        if module_origin(name, [*sys.path, str(home)]) != module_origin(name, sys.path):
            yield name


def _check_files(run: Path, config: GRPOConfig, names: Collection[str]) -> None:
    """Check that names which can only be those of files exist: the files may have moved since the run."""
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


def with_whole_names(config: GRPOConfig, names: Collection[str]) -> GRPOConfig:
    """The settings with absolute names of the files that are in the working directory.

    Args:
        config: the settings.
        names: the settings to look at.
    """
    table: dict[str, Any] = config.model_dump(exclude_none=True)
    for name in names:
        *parents, key = name.split(".")
        section: Any = table
        for parent in parents:
            section = section.get(parent, {})
        if key in section:
            section[key] = with_files(section[key], name, _whole)
    return GRPOConfig(**table)


def _whole(name: str, _is_code: bool) -> str:
    try:
        is_file = not Path(name).is_absolute() and Path(name).exists()
    except (OSError, ValueError):  # no name of a file: too long
        is_file = False
    return str(Path(name).absolute()) if is_file else name


def with_overrides_of_start(
    config: GRPOConfig, overrides: tuple[str, ...], trusted: str | None = None
) -> tuple[GRPOConfig, tuple[str, ...]]:
    """Settings for ``--resume`` of a run that was started with overrides: they apply again unless they are given anew.

    Args:
        config: the settings of a config file with ``overrides``, which name the run folder.
        overrides: the ``--section.key value`` pairs given now.
        trusted: the argument of ``--trust``.

    Returns:
        The settings, and the names of all settings that command lines have given.
    """
    given = setting_names(overrides)
    run = Path(config.run.output_dir).expanduser() if config.run.output_dir else None
    if run is None or not (run / "config.toml").exists():
        return config, given
    check_files(run)
    try:
        # A name may go on within a setting, as in environment.factory.NAME: what it changes is the setting.
        started = setting_names([f"--{name}=" for name in last_start(run).overrides])
        # The ranks are of this command, and with them how they share the work.
        kept = (name for name in started if not name.startswith("parallel.") and name != "run.output_dir")
        names = [name for name in kept if name not in given]
        config = with_settings(config, load_config(run / "config.toml", of_run=True), names)
    except ConfigError as error:
        raise RunFolderError(f"the overrides that {run} was started with do not fit: {error}") from None
    check_code(run, config, trusted, read=names)
    check_secrets(run, config)
    return config, (*names, *given)
