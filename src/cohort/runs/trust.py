"""What the settings in a run folder may do: run no code that this account has not run before, and write nowhere else.

Anybody can make a run folder. Its settings name functions, programs and model code, which a command that reads them
would run. An account trusts the bytes of a ``config.toml`` in its place once it has started or resumed a run with them.
Other settings that name code need ``--trust RUN``; settings that name none need no trust.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cohort.config import GRPOConfig, hidden_settings, hide_secrets, load_config, setting_names, with_values
from cohort.config.account import account_records
from cohort.config.names import file_in, texts_of
from cohort.config.schema import Mark, marks_of, value_at
from cohort.errors import ConfigError, RunFolderError
from cohort.plugins import know_module_folders
from cohort.rewards.names import split_spec
from cohort.runs.starts import last_start

UNSAFE_ARGUMENTS = frozenset({"allow_unsandboxed", "allow_pickled_weights"})
"""Arguments of built-in rewards and reward models that lift a protection."""


def code_in(config: GRPOConfig) -> list[tuple[str, str]]:
    """What the settings would run besides Cohort's own code, and the protections that they lift: the settings, and what
    they name."""
    permits = [path for path, mark in marks_of(GRPOConfig).items() if mark.runs == "permit" and value_at(config, path)]
    found = [(path, text) for path, mark, text in texts_of(config) if _runs(path, mark, text)]
    return found + [(path, config.model.path or "true") for path in permits]


def _runs(setting: str, mark: Mark, text: str) -> bool:
    """Whether a text in a setting runs what a stranger may have written."""
    if setting == "reward.functions":  # a built-in reward and a reward model run nothing else
        name, values = split_spec(text)
        return ":" in name or not UNSAFE_ARGUMENTS.isdisjoint(values)
    return bool(text) if mark.runs == "command" else mark.runs == "code" and ":" in text


def _record(run: Path) -> Path:
    """The record that this account has run the settings in a folder."""
    key = hashlib.sha256(os.fsencode(run.resolve()) + b"\0" + (run / "config.toml").read_bytes())
    return account_records("runs") / key.hexdigest()


def remember(run: Path) -> None:
    """Record that this account runs the settings in a folder, and from which working directory."""
    with suppress(OSError):  # there may be no home to write to: then the folder needs --trust
        record = _record(run)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(str(Path.cwd()), encoding="utf-8")


def started_in(run: Path) -> Path | None:
    """The working directory in which this account has run the settings in a folder; None if it has not. What the folder
    itself says of this may be a stranger's."""
    try:
        return Path(_record(run).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def check_secrets(run: Path, config: GRPOConfig) -> None:
    """Check that no secret is missing in settings that were read from a run folder.

    Args:
        run: the run folder.
        config: its settings with the overrides.

    Raises:
        RunFolderError: a setting has ``***`` in the place of a secret.
    """
    if missing := hidden_settings(config):
        raise RunFolderError(
            f"{run} does not hold the secrets of {', '.join(missing)}: they are not written into a run "
            f"folder. Give the setting again, as in --{missing[0]} VALUE"
        )


def check_code(run: Path, config: GRPOConfig, trusted: str | None, *, given: Collection[str] = ()) -> None:
    """Check that settings that were read from a run folder name no code, unless this account has run them. Modules that
    they name are then looked for where it has. That nothing in the folder leads elsewhere is checked when it is taken
    to be written (``RunFolder.take``).

    Args:
        run: the run folder.
        config: the settings, with those that the user gave.
        trusted: the argument of ``--trust``; it must be this run folder, or inside it.
        given: names of settings that the user gave: code that they name may run.

    Raises:
        RunFolderError: they name unknown code, or ``trusted`` is another folder.
    """
    if trusted is not None and not Path(trusted).expanduser().resolve().is_relative_to(run.resolve()):
        raise RunFolderError(f"--trust {trusted} is not the run folder whose settings are used: {run}")
    named = [(setting, text) for setting, text in code_in(config) if setting not in given]
    home = started_in(run)
    if named and home is None and trusted is None:
        listed = "\n".join(f"  {setting}: {hide_secrets(text)}" for setting, text in named)
        raise RunFolderError(
            f"the settings in {run} name code, this account has not run them here, and a run folder may come from "
            f"anybody:\n{listed}\nNothing was run. If you know this code, give --trust {run}; or override the settings "
            "that name it"
        )
    if home is not None:
        modules = {text.partition("(")[0].rpartition(":")[0].partition(".")[0] for _, text in named}
        know_module_folders({module: str(home) for module in modules})


def check_files(run: Path) -> None:
    """Check that a run folder has files and folders only, before anything is written into it: a link could lead the
    writing elsewhere, and a pipe would block it. Links within the folder pass, and the folder itself may be a link.

    Raises:
        RunFolderError: an entry is something else.
    """
    top = run.resolve()
    for path, mode in _entries(run):
        if stat.S_ISLNK(mode):
            if not Path(os.path.realpath(path)).is_relative_to(top):
                raise RunFolderError(
                    f"{path} is a symbolic link to {path.readlink()}: nothing is written through links that lead out "
                    "of a run folder. Put what it points to in its place; the run folder itself may be a link"
                )
        elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise RunFolderError(f"{path} is neither a file nor a folder: remove it")


def _entries(folder: Path) -> Iterator[tuple[Path, int]]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):  # no folder yet
            raise RunFolderError(f"cannot read the run folder: {error}") from None

    for inner, folders, files in os.walk(folder, onerror=refuse):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):  # another process has removed it
                yield Path(inner, name), Path(inner, name).lstat().st_mode


# ----------------------------------------
# Settings that are read from a run folder.


def settings_of_run(
    run: Path, config: GRPOConfig, trusted: str | None, *, given: Collection[str] = (), unused: Sequence[str] = ()
) -> GRPOConfig:
    """A run's settings, checked, with the defaults of those that are not used.

    Args:
        run: the run folder.
        config: its settings, with what overrides them.
        trusted, given: as ``check_code``.
        unused: sections and settings.

    Raises:
        RunFolderError: as ``check_code`` and ``check_secrets``; or a file that the settings name is not there.
    """
    config = without(config, unused)
    _check_named_files(run, config, given)
    check_code(run, config, trusted, given=given)
    check_secrets(run, config)
    return config


def without(config: GRPOConfig, unused: Sequence[str]) -> GRPOConfig:
    """The settings with the defaults of some settings or sections."""
    for path in unused:
        section, _, key = path.partition(".")
        new: Any = getattr(GRPOConfig(), section)
        new = getattr(config, section).model_copy(update={key: getattr(new, key)}) if key else new
        config = config.model_copy(update={section: new})
    return config


def _check_named_files(run: Path, config: GRPOConfig, given: Collection[str]) -> None:
    """Check that the files exist that the settings name: they may have moved since the run."""
    missing: dict[str, str] = {}
    for setting, mark, text in texts_of(config):
        name, is_certain = file_in(text, mark)
        if setting not in given and (is_certain or Path(name).is_absolute()) and not _exists(name):
            missing[name] = setting
    if not missing:
        return
    listed = ", ".join(f"{name} ({setting})" for name, setting in missing.items())
    name, setting = next(iter(missing.items()))
    began = last_start(run).folder
    example = "FILE.py:NAME" if name.endswith(".py") else "FILE"
    raise RunFolderError(
        f"the settings of {run} name {listed}, which {'is' if len(missing) == 1 else 'are'} not there"
        + (f"; the run was started in {began}" if began and not Path(name).is_absolute() else "")
        + f". If it has moved, name it where it is now, as in --{setting} {example}"
    )


def _exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, of an unknown user, with a NUL
        return False


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
        saved = load_config(run / "config.toml", of_run=True)
        config = with_values(config, {name: value_at(saved, name) for name in names})
    except ConfigError as error:
        raise RunFolderError(f"the overrides that {run} was started with do not fit: {error}") from None
    of_a_model = any(name.startswith("model.") for name in names)  # what the user permits is for another model
    own = [name for name, mark in marks_of(GRPOConfig).items() if not (of_a_model and mark.runs == "permit")]
    check_code(run, config, trusted, given={*own} - {*names})
    check_secrets(run, config)
    return config, (*names, *given)
