"""What ``cohort eval`` is asked for: which model, and under which settings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
        """The settings: those of ``--config``, or of the run that the model comes from, or the defaults; over them what
        was given beside.

        Raises:
            ConfigError: a setting is wrong, or there is no data or no reward.
        """
        source, given = self._source(), [*self.overrides, *self._flags()]
        if self.reward:
            given = ["--reward.weights", "none", *given]  # the run's are of its own functions
        config = load_config(source, given) if source else apply_overrides({}, given)
        where = f" ({source} names none: the run may have been given them in Python)" if source else self._no_run()
        if not config.data.eval:
            raise ConfigError(f"no data to evaluate on: give --data FILE{where}")
        if not config.reward.functions:
            raise ConfigError(f"no reward function: give --reward NAME{where}")
        return config

    def _no_run(self) -> str:
        """Why there are no settings of a run, where that is not plain to see."""
        path = Path(self.model).expanduser()
        if not path.exists():
            return f" ({self.model} is no folder here, so it is taken for a hub id: there is no run to take it from)"
        held = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
        return "" if held else f" ({self.model} holds neither a model nor a run)"

    def _source(self) -> str | None:
        """The file of settings: what was given, or that of the run which the model comes from."""
        run = run_of(Path(self.model).expanduser()) if self.config is None else None
        return self.config if run is None else str(run / "config.toml")

    def _flags(self) -> list[str]:
        pairs: list[str] = []
        for name, setting in SETTINGS.items():
            value: Any = getattr(self, name)
            if name == "data":
                value = _sets(self.data)
            if value is None or (name == "reward" and not value):
                continue
            text = value if isinstance(value, str) else json.dumps(value)
            pairs += [f"--{setting}", text]
        return pairs

    def check_files(self, settings: GRPOConfig) -> None:
        """Look at the files to write; they are made when the numbers are there.

        Args:
            settings: what is read is not to be written over: their data and reward files, and where they are from.

        Raises:
            ConfigError: one exists, or cannot be made.
        """
        rewards = [f"{name.partition('.py:')[0]}.py" for name in settings.reward.functions if ".py:" in name]
        source = self._source()
        read = [*_paths(settings.data.eval), *rewards, *([source] if source else [])]
        for flag, file in (("--output", self.output), ("--json", self.json)):
            if file is None:
                continue
            path = Path(file).expanduser()
            self.check_output(flag, path)
            if any(_is_read(path, one) for one in read):
                raise ConfigError(f"{flag} {path} is a file that is read, of rows, rewards or settings: give another")
        written = [Path(file).expanduser().resolve() for file in (self.output, self.json) if file]
        if len(set(written)) < len(written):
            raise ConfigError("--output and --json are the same file: give two")


def _paths(given: Any) -> Iterator[str]:
    """Those of ``data.eval``: a path, a source, several of them, or sets of such under names."""
    if isinstance(given, Mapping | tuple):
        for item in given.values() if isinstance(given, Mapping) else given:
            yield from _paths(item)
    else:
        yield str(given.path if isinstance(given, Source) else given)


def _is_read(path: Path, name: str) -> bool:
    """Whether an existing file is what a name stands for: a file, a folder's files, or those of a pattern."""
    target, name = path.resolve(), str(Path(name).expanduser())
    read = {Path(found).resolve() for found in [name, *glob(name, recursive=True)]}  # noqa: PTH207 - may be absolute
    return path.exists() and any(target == one or (one.is_dir() and target.is_relative_to(one)) for one in read)


def _sets(given: Sequence[str]) -> str | None:
    """``--data`` as the setting takes it.

    >>> _sets(["a.jsonl"]), _sets(["x=a.jsonl", "y=b.jsonl"])
    ('a.jsonl', '{"x" = "a.jsonl", "y" = "b.jsonl"}')
    """
    if not given:
        return None
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    pairs = [one.partition("=") for one in given]
    if unnamed := [file for file, named, _ in pairs if not named]:
        raise ConfigError(f"--data with several files needs a name for each, NAME=FILE; {unnamed[0]} has none")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ConfigError("--data gives two files the same name")
    return "{" + ", ".join(f"{json.dumps(name)} = {json.dumps(file)}" for name, _, file in pairs) + "}"


def run_of(model: Path) -> Path | None:
    """The folder of the run that a model's folder is, or lies in: one of its checkpoints, ``best/`` or ``merged/``."""
    for folder in (model, model.parent, model.parent.parent):
        if (folder / "config.toml").is_file() and (folder / "objective.txt").is_file():
            return folder
    return None


def model_of(model: str) -> tuple[str, str]:
    """The folder or hub id of a model, and what is to be said of the choice. The folder of a run stands for its best
    model; where it kept none, for its newest checkpoint.

    Raises:
        ModelError: the run has no checkpoint yet.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir() or run_of(folder) != folder:
        return model, ""
    if (folder / "best").is_dir():
        note = json.loads((folder / "best" / "best.json").read_text(encoding="utf-8"))
        said = f"the best model of the run, after step {note['step']} ({note['metric']} {note['value']:.4g})"
        return str(folder / "best"), said
    run = RunFolder(folder)
    if not (steps := run.checkpoint_steps()):
        raise ModelError(f"{model} is the folder of a run that has no checkpoint yet")
    return str(run.checkpoint(steps[-1])), f"the newest checkpoint of the run, after step {steps[-1]}"
