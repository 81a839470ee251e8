"""``cohort verify``: which files of a run folder are intact. Only bytes are read, and nothing is changed."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.parquet

from cohort.errors import RunFolderError
from cohort.lock import Lock
from cohort.runs.checkpoints import check_checkpoint
from cohort.runs.durable import MANIFEST, check_whole
from cohort.runs.folder import RunFolder
from cohort.runs.journal import load_rollout
from cohort.runs.reader import only_settings
from cohort.runs.reading import DAMAGE, metric_lines
from cohort.runs.trust import check_files


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of a file or folder."""

    name: str
    """Its path in the run's folder."""
    problem: str = ""
    """The damage; empty if it is intact."""
    note: str = ""
    """A remark that is no damage."""


def verify(path: Path) -> Iterator[Verdict]:
    """The verdicts on what a run folder holds, or on one checkpoint or best model.

    Raises:
        RunFolderError: the path is neither, or something in it leads elsewhere.
    """
    if (path / MANIFEST).is_file():
        yield _checked(path.name, check_checkpoint if (path / "state").exists() else check_whole, path)
        return
    if not (path / "config.toml").is_file():
        raise RunFolderError(f"{path} is neither a run folder nor a checkpoint: it has no config.toml, no {MANIFEST}")
    if settings := only_settings(path):
        raise RunFolderError(settings)
    check_files(path)
    try:
        Lock(path).check()
    except RunFolderError as error:
        yield Verdict("run.lock", note=f"{str(error).partition(':')[0]}. What is written now may look broken")
    except OSError as error:
        yield Verdict("run.lock", note=f"whether a process writes the folder is not known: {error.strerror}")
    yield _checked("config.toml", lambda file: tomllib.loads(file.read_text(encoding="utf-8")), path / "config.toml")
    run = RunFolder(path)
    for step in run.checkpoint_steps():
        yield _checked(f"checkpoints/step-{step}", check_checkpoint, run.checkpoint(step))
    if run.best.exists():
        yield _checked("best", check_whole, run.best)
    for left in sorted([*path.glob("best.*"), *path.glob("checkpoints/step-*.*")]):
        yield Verdict(str(left.relative_to(path)), note="being written, left by a killed process, or set aside")
    if (path / "metrics.jsonl").exists():
        yield _checked("metrics.jsonl", _check_metrics, path / "metrics.jsonl")
    if (path / "summary.json").exists():
        yield _checked("summary.json", lambda file: json.loads(file.read_bytes()), path / "summary.json")
    for step in run.journal_steps():
        yield _checked(f"journal/step-{step}.safetensors", load_rollout, run.journal(step))
    for table in sorted([*path.glob("rollouts/*.parquet"), *path.glob("evaluations/*.parquet")]):
        yield _checked(str(table.relative_to(path)), _check_table, table)


def _checked(name: str, check: Callable[[Path], object], path: Path) -> Verdict:
    try:
        check(path)
    except (RunFolderError, pyarrow.ArrowException, *DAMAGE) as error:
        return Verdict(name, str(error).splitlines()[0] if str(error) else type(error).__name__)
    return Verdict(name)


def _check_table(path: Path) -> None:
    pyarrow.parquet.read_table(path, page_checksum_verification=True)


def _check_metrics(path: Path) -> None:
    """Check that each line is whole and that no step is missing or doubled."""
    lines, rest = metric_lines(path)
    steps = [metrics["step"] for _, metrics in lines]
    for number, (before, step) in enumerate(pairwise(steps), 2):
        if step != before + 1:
            raise RunFolderError(f"line {number} is of step {step}; the line before it is of step {before}")
    if rest:
        raise RunFolderError(f"line {len(steps) + 1} is damaged: it has no end")
