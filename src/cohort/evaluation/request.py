"""The request of ``cohort eval``: the model and the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

from cohort.config import GRPOConfig, apply_overrides, load_config
from cohort.config.data import Source
from cohort.errors import ConfigError, ModelError
from cohort.flags import EvalFlags
from cohort.runs import RunFolder

SETTINGS = {
    "data": "data.eval",
    "rows": "data.eval_rows",
    "reward": "reward.functions",
    "n": "eval.num_generations_eval",
    "max_tokens": "eval.max_completion_length_eval",
    "temperature": "eval.temperature_eval",
    "top_k": "eval.top_k_eval",
    "top_p": "eval.top_p_eval",
    "min_p": "eval.min_p_eval",
    "k": "eval.pass_at_k",
    "maj": "eval.maj_at_k",
    "seed": "run.seed",
    "precision": "model.precision",
    "device": "model.device",
}
"""Flags that are short for a setting."""


@dataclass(frozen=True)
class Request(EvalFlags):
    """The arguments of ``cohort eval``; see its ``--help``."""

    model: str
    overrides: Sequence[str] = ()
    """``--section.key value`` pairs."""

    def settings(self) -> GRPOConfig:
        """The settings of ``--config``, of the run that the model comes from, or the defaults; flags override them.

        Raises:
            ConfigError: a setting is wrong, or there is no data or no reward.
        """
        source, given = self._source(), [*self.overrides, *self._flags()]
        if self.reward:
            given = ["--reward.weights", "none", *given]  # the run's weights belong to its own functions
        config = load_config(source, given) if source else apply_overrides({}, given)
        where = f" ({source} names none; they may have been passed in Python)" if source else self._no_run()
        if not config.data.eval:
            raise ConfigError(f"no data to evaluate on: give --data FILE{where}")
        if not config.reward.functions:
            raise ConfigError(f"no reward function: give --reward NAME{where}")
        return config

    def _no_run(self) -> str:
        """Why there are no settings of a run, if that is not obvious."""
        path = Path(self.model).expanduser()
        if not path.exists():
            return f" ({self.model} is not a folder here, so it is taken for a hub id, which has no run)"
        is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
        return "" if is_model else f" ({self.model} holds neither a model nor a run)"

    def _source(self) -> str | None:
        """The file of settings: ``--config``, or that of the run that the model comes from."""
        run = run_of(Path(self.model).expanduser())
        return str(run / "config.toml") if run and self.config is None else self.config

    def _flags(self) -> list[str]:
        values = {**vars(self), "data": _sets(self.data), "reward": self.reward or None}
        given = {setting: values[name] for name, setting in SETTINGS.items() if values[name] is not None}
        texts = {setting: value if isinstance(value, str) else json.dumps(value) for setting, value in given.items()}
        return [f"--{setting}={text}" for setting, text in texts.items()]

    def check_files(self, settings: GRPOConfig) -> None:
        """Check the output files before anything expensive; they are written at the end.

        Args:
            settings: the settings, whose data and reward files must not be overwritten.

        Raises:
            ConfigError: a file exists, is an input, or cannot be written.
        """
        rewards = [f"{name.partition('.py:')[0]}.py" for name in settings.reward.functions if ".py:" in name]
        read = [*_paths(settings.data.eval), *rewards, *filter(None, [self._source()])]
        given = {"--output": self.output, "--json": self.json}
        files = {flag: Path(file).expanduser() for flag, file in given.items() if file is not None}
        for flag, path in files.items():
            self.check_output(flag, path)
            if any(_is_read(path, one) for one in read):
                raise ConfigError(f"{flag} {path} is an input file of rows, rewards or settings: choose another")
        if len({path.resolve() for path in files.values()}) < len(files):
            raise ConfigError("--output and --json are the same file: choose two")


def _paths(given: Any) -> list[str]:
    """The paths in ``data.eval``: a path, a source, several of them, or named sets of them."""
    if not isinstance(given, Mapping | tuple):
        return [str(given.path if isinstance(given, Source) else given)]
    return [path for item in (given.values() if isinstance(given, Mapping) else given) for path in _paths(item)]


def _is_read(path: Path, name: str) -> bool:
    """Whether an existing file is one that a name stands for: a file, a file in a folder, or a match of a pattern."""
    target, name = path.resolve(), str(Path(name).expanduser())
    read = {Path(found).resolve() for found in [name, *glob(name, recursive=True)]}  # noqa: PTH207 - may be absolute
    return path.exists() and any(target == one or (one.is_dir() and target.is_relative_to(one)) for one in read)


def _sets(given: Sequence[str]) -> str | None:
    """``--data`` as a value of ``data.eval``.

    >>> _sets(["a.jsonl"]), _sets(["x=a.jsonl", "y=b.jsonl"])
    ('a.jsonl', '{"x" = "a.jsonl", "y" = "b.jsonl"}')
    """
    if not given:
        return None
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    pairs = [one.partition("=") for one in given]
    if unnamed := [file for file, named, _ in pairs if not named]:
        raise ConfigError(f"--data with several files needs a name for each, NAME=FILE: {unnamed[0]} has none")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ConfigError("--data gives two files the same name")
    return "{" + ", ".join(f"{json.dumps(name)} = {json.dumps(file)}" for name, _, file in pairs) + "}"


def run_of(model: Path) -> Path | None:
    """The run's folder, from that folder or one of its models: a checkpoint, ``best/`` or ``merged/``."""
    for folder in (model, model.parent, model.parent.parent):
        if (folder / "config.toml").is_file() and (folder / "objective.txt").is_file():
            return folder
    return None


def model_of(model: str) -> tuple[str, str]:
    """The folder or hub id of a model, and a note on the choice. The folder of a run stands for its best model or, if
    there is none, for its newest checkpoint.

    Raises:
        ModelError: the run has no checkpoint yet.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir() or run_of(folder) != folder:
        return model, ""
    if (folder / "best").is_dir():
        note = json.loads((folder / "best" / "best.json").read_text(encoding="utf-8"))
        value = f"{note['metric']} {note['value']:.4g}"
        return str(folder / "best"), f"the best model of the run, after step {note['step']} ({value})"
    run = RunFolder(folder)
    if not (steps := run.checkpoint_steps()):
        raise ModelError(f"{model} is the folder of a run that has no checkpoint yet")
    return str(run.checkpoint(steps[-1])), f"the newest checkpoint of the run, after step {steps[-1]}"
