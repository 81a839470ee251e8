"""What the settings in a run folder may do: run no code that this account has not run before, and write nowhere else.

Anybody can make a run folder. Its settings name functions, programs and model code, which a command that reads them
would run. Code is known, and runs without a question, once this account has started a run that names it: from a config
file or in Python. Any other code needs ``--trust RUN``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from cohort.config import GRPOConfig, Source, hidden_settings, hide_secrets, load_config, setting_names, with_settings
from cohort.config.account import account_records
from cohort.config.beside import SUFFIXES, with_files
from cohort.errors import ConfigError, RunFolderError
from cohort.plugins import know_module_folders
from cohort.rewards.names import BUILTIN_REWARDS, split_spec
from cohort.runs.starts import last_start

BUILTIN_TOOLS = frozenset({"python", "calculator"})
UNSAFE_ARGUMENTS = frozenset({"allow_unsandboxed", "allow_pickled_weights"})
"""Arguments of built-in rewards and reward models that lift a protection."""
MODEL_CODE = ("model.trust_remote_code", "model.allow_pickled_weights")
"""Settings that lift a protection of models: of the one at ``model.path``, and of those in the run folder."""
_for_this_command: set[str] = set()
"""Keys of the code that runs because of ``--trust``, which is no record."""


@dataclass(frozen=True, slots=True)
class Code:
    """Something that a setting would run, or a place outside the run folder that it would write to."""

    setting: str
    """The setting's name: "reward.functions"."""
    text: str
    """What the setting names: "rewards.py:score"."""

    @property
    def origin(self) -> str:
        """The file that the name stands for here; empty if there is none. Elsewhere it may stand for another file."""
        source = self.text.partition("(")[0].rpartition(":")[0]
        try:
            if self.setting in MODEL_CODE:
                path = Path(self.text).expanduser()
                return str(path.resolve()) if path.is_dir() else ""  # a hub id is the same everywhere
            if source.endswith(".py"):
                return str(Path(source).expanduser().resolve())
        except (OSError, RuntimeError, ValueError):
            return ""
        return module_origin(source.partition(".")[0], [*sys.path, str(Path.cwd())])  # as plugins look

    @property
    def key(self) -> str:
        """A name for the record that this code was run. Secrets are not part of it."""
        return hashlib.sha256(json.dumps([self.setting, hide_secrets(self.text), self.origin]).encode()).hexdigest()


def module_origin(name: str, folders: Sequence[str]) -> str:
    """The file of a top-level module that is looked for in these folders, or the folders of a package without
    ``__init__.py``; empty if there is none."""
    try:
        spec = PathFinder.find_spec(name, folders)
    except (OSError, RuntimeError, ValueError, ImportError):
        return ""
    return str(spec.origin or list(spec.submodule_search_locations or ())) if spec else ""


def code_in(config: GRPOConfig, run: Path | None = None) -> list[Code]:
    """All code that the settings name, besides Cohort's own.

    Args:
        config: the settings.
        run: the folder of their run, whose models are loaded with the same flags as ``model.path``.
    """
    found = [Code("reward.functions", spec) for spec in config.reward.functions if not _is_safe_reward(spec)]
    environment = config.environment
    found += [Code("environment.tools", name) for name in environment.tools if name not in BUILTIN_TOOLS]
    factories = environment.factory if isinstance(environment.factory, Mapping) else {"": environment.factory}
    found += [Code("environment.factory", name) for name in factories.values() if name]
    found += [Code("environment.history", environment.history)] if ":" in environment.history else []
    found += [Code("environment.parser", environment.parser)] if environment.parser else []
    for name in ("train", "eval"):
        found += [Code(f"data.{name}", source.filter) for source in _sources(getattr(config.data, name))]
    found += [Code("data.filter", config.data.filter)] if isinstance(config.data.filter, str) else []
    found += [
        Code(f"objective.{name}", text)
        for name, value in config.objective.changes().items()
        for text in texts_in(value)
        if ":" in text
    ]
    models = [config.model.path, *([str(run.resolve())] if run else [])]
    for name in MODEL_CODE:
        found += [Code(name, path) for path in models if getattr(config.model, name.removeprefix("model."))]
    return found + _servers(config)


def _is_safe_reward(spec: str) -> bool:
    """Whether a reward is built in or a reward model, and runs nothing that a stranger wrote."""
    name, values = split_spec(spec)
    return (name in BUILTIN_REWARDS or ":" not in name) and not UNSAFE_ARGUMENTS & values.keys()


def _sources(given: Any) -> Iterator[Any]:
    """The sources in ``data.train`` or ``data.eval`` that have a function as filter."""
    for one in given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else ():
        if isinstance(one, tuple):
            yield from _sources(one)
        elif isinstance(one, Source) and isinstance(one.filter, str):
            yield one


def texts_in(value: Any) -> Iterator[str]:
    """The texts in a setting's value: itself, or those in a table or a list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for item in value.values() for text in texts_in(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in texts_in(item))


def _servers(config: GRPOConfig) -> list[Code]:
    """What sampling on servers runs, connects to, and writes to."""
    if config.rollout.engine != "vllm":
        return []
    vllm = config.vllm
    given = {
        "vllm.python": [vllm.python] if vllm.start else [],
        "vllm.arguments": vllm.arguments if vllm.start else [],
        "vllm.url": vllm.url,
        "vllm.folder": [vllm.folder],
    }
    return [Code(name, text) for name, texts in given.items() for text in texts if text]


def remember(config: GRPOConfig, run: Path) -> None:
    """Record the code that the settings of a run name as known, unless it runs because of ``--trust``: this account has
    started or resumed the run with it."""
    for code in (code for code in code_in(config, run) if code.key not in _for_this_command):
        record = account_records("known_code") / code.key
        try:
            record.parent.mkdir(parents=True, exist_ok=True)
            if not record.exists():
                record.write_text(f"{code.setting}: {hide_secrets(code.text)}\n{code.origin}\n", encoding="utf-8")
        except OSError:  # there may be no home to write to: then the code needs --trust
            return


def check_secrets(run: Path, config: GRPOConfig, unused: Sequence[str] = ()) -> None:
    """Check that no secret is missing in settings that were read from a run folder.

    Args:
        run: the run folder.
        config: its settings with the overrides.
        unused: beginnings of the names of settings that are not used.

    Raises:
        RunFolderError: a setting has ``***`` in the place of a secret.
    """
    if missing := [name for name in hidden_settings(config.model_dump()) if not name.startswith(tuple(unused))]:
        raise RunFolderError(
            f"{run} does not hold the secrets of {', '.join(dict.fromkeys(missing))}: they are not written into a run "
            f"folder. Give the setting again, as in --{missing[0]} VALUE"
        )


def check_code(
    run: Path,
    config: GRPOConfig,
    trusted: str | None,
    *,
    given: Collection[str] = (),
    read: Collection[str] | None = None,
) -> None:
    """Check that settings that were read from a run folder name no code that this account has not run. That nothing in
    the folder leads elsewhere is checked when it is taken to be written (``RunFolder.take``).

    Args:
        run: the run folder.
        config: the settings, with those that the user gave.
        trusted: the argument of ``--trust``; it must be this run folder, or inside it.
        given: names of settings that the user gave: code that they name may run.
        read: names of the settings that were read from the run folder. None: all but ``given``.

    Raises:
        RunFolderError: they name unknown code, or ``trusted`` is another folder.
    """
    if trusted is not None and not Path(trusted).expanduser().resolve().is_relative_to(run.resolve()):
        raise RunFolderError(f"--trust {trusted} is not the run folder whose settings are used: {run}")
    named = [code for code in code_in(config, run) if code.setting not in given]
    if read is not None and "model.path" in read:  # a flag for another model
        read = {*read, *MODEL_CODE}
    from_run = [code for code in named if read is None or code.setting in read]
    unknown = [code for code in from_run if not (account_records("known_code") / code.key).exists()]
    if trusted is not None:
        _for_this_command.update(code.key for code in unknown)
    elif unknown:
        listed = "\n".join(f"  {code.setting}: {hide_secrets(code.text)}" for code in unknown)
        raise RunFolderError(
            f"the settings in {run} name code that you have not run before, and a run folder may come from anybody:\n"
            f"{listed}\nNothing was run. If you know this code, give --trust {run}; or override the settings that name "
            "it"
        )


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
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another process has removed it
                    mode = entry.stat(follow_symlinks=False).st_mode
                    yield Path(entry.path), mode
                    if stat.S_ISDIR(mode):
                        yield from _entries(Path(entry.path))
    except (FileNotFoundError, NotADirectoryError):  # no folder yet
        return
    except OSError as error:
        raise RunFolderError(f"cannot read the run folder: {error}") from None


# ----------------------------------------
# Settings that are read from a run folder: what they may name, and the working folder that their names belong to.


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
