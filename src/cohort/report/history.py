"""Read a run folder, whatever state it is in: for everything that looks at runs.

A folder can be complete, in progress, killed, of another version, damaged or hostile. Nothing of it is run, nothing
outside of it is read, and what cannot be used is left out and named in ``RunHistory.missing``. Importing this module
imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Self

from cohort.config import GRPOConfig, to_toml
from cohort.config.of_run import only_settings, was_started
from cohort.errors import RunFolderError

# ----------------------------------------
# Read files of a run folder that is not trusted: regular files inside of the folder, of bounded size. Importing this
# module imports no torch.


MAX_FILE = 1 << 24
"""Bytes of a file that is read whole. Larger files are left out."""
MAX_DEPTH = 50
"""Nested tables of settings and JSON. Deeper ones are left out."""
MAX_NUMBER = 1e100
"""Numbers of JSON are below this, or None: so that their squares and sums are finite too."""
NAMES = ("config.toml", "metrics.jsonl", "starts.jsonl", "summary.json")
"""Files of a run that are asked about by name."""
DAMAGE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What reading a damaged file raises."""


def json_object(text: str) -> dict[str, Any]:
    """The JSON object in a text; numbers that are NaN or not below ``MAX_NUMBER`` become None.

    Raises:
        ValueError: it is not JSON, something else than an object, or nested deeper than ``MAX_DEPTH``.
        RecursionError: it is nested deeper than Python reads.
    """
    found = json.loads(text, parse_constant=lambda _: None, parse_float=_float, parse_int=_int)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, got {type(found).__name__}")
    return {key: _plain(value) if isinstance(value, dict | list) else value for key, value in found.items()}


def toml_table(text: str) -> dict[str, Any]:
    """The table in a TOML file in types of JSON: dates as text. Floats may be infinite.

    Raises:
        ValueError: it is not TOML, or nested deeper than ``MAX_DEPTH``.
        RecursionError: it is nested deeper than Python reads.
    """
    return {key: _plain(value, _scalar) for key, value in tomllib.loads(text).items()}


def flat(table: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested tables, with names like ``section.key``."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{name}{key}.")
        else:
            yield f"{name}{key}", value


@cache
def default_settings() -> Mapping[str, Any]:
    """The default of every setting by ``section.key``, as ``config.toml`` writes it."""
    return dict(flat(tomllib.loads(to_toml(GRPOConfig()))))


def run_folder(path: str | Path) -> Path:
    """The path of a folder that holds a run.

    Raises:
        RunFolderError: it does not exist, or holds none.
    """
    folder = Path(path).expanduser()
    try:
        if folder.is_file() and folder.name in NAMES:
            raise RunFolderError(f"{folder} is a file of a run: give its folder, {folder.parent}")
        if not folder.is_dir():
            found = "is not a folder" if folder.exists() else "does not exist"
            raise RunFolderError(f"{folder} {found}: expected a run folder")
        if was_started(folder):
            return folder
        if settings := only_settings(folder):
            raise RunFolderError(settings)
        runs = sorted(one.name for one in islice(folder.iterdir(), 1000) if (one / "config.toml").is_file())
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        if isinstance(error, RunFolderError):
            raise
        raise RunFolderError(f"cannot read the run folder {str(path)!r}: {error}") from None
    above = folder.parent.parent
    hint = f" It holds the runs {', '.join(runs[:5])}{', ...' if len(runs) > 5 else ''}." if runs else ""
    hint = hint or (f" Its run is {above}." if (above / "config.toml").is_file() else "")
    raise RunFolderError(f"{folder} is not a run folder: it has none of {', '.join(NAMES)}.{hint}")


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a path, its links followed, is in a folder."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def inside(folder: Path, path: Path, *, directory: bool = False) -> Path:
    """The path, if it is an ordinary file of the folder, or a folder in it.

    Raises:
        OSError: it is something else: a pipe would block, a link could lead to any file of the account.
    """
    if not is_inside(folder, path):
        raise OSError("it leads out of the run folder")
    if not path.exists():
        raise FileNotFoundError("it is missing")
    if not (path.is_dir() if directory else path.is_file()):
        raise OSError(f"it is not a {'folder' if directory else 'file'}")
    return path


def read_file(folder: Path, name: str) -> bytes:
    """The bytes of a file of a run folder.

    Raises:
        OSError: it is missing, no ordinary file, larger than ``MAX_FILE``, or leads out of the folder.
    """
    with inside(folder, folder / name).open("rb") as file:
        text = file.read(MAX_FILE + 1)
    if len(text) > MAX_FILE:
        raise OSError(f"it is larger than {MAX_FILE:,} bytes")
    return text


def _plain(value: Any, scalar: Callable[[Any], Any] = lambda value: value, depth: int = 1) -> Any:
    """Nested dicts and lists with ``scalar`` of what is in them."""
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    if isinstance(value, dict):
        return {key: _plain(one, scalar, depth + 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, scalar, depth + 1) for one in value]
    return scalar(value)


def _float(text: str) -> float | None:
    """A number; None if it is not below ``MAX_NUMBER``."""
    return number if abs(number := float(text)) < MAX_NUMBER else None


def _int(text: str) -> int | None:
    """As ``_float``."""
    return number if abs(number := int(text)) < MAX_NUMBER else None


def _scalar(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else str(value)


def reason(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


MAX_LINE = 1 << 22
"""Bytes of a line of a .jsonl file. Longer lines are left out."""
MAX_LINES_FILE = 1 << 30
"""Bytes that are read of a .jsonl file: 250,000 steps. The rest is left out."""
MAX_STEP = 2**53
"""Steps are below this, so that they are exact as float64 and in JavaScript."""
NUMBERS = {int, float, type(None)}
SHOWN_DAMAGE = 5
"""Damaged lines of a file that are named."""
TABLE = re.compile(r"step-(0|[1-9][0-9]{0,15})(?:-(.+))?\.parquet")
CHECKPOINT = re.compile(r"step-(0|[1-9][0-9]{0,15})")


@dataclass(frozen=True, slots=True, eq=False)
class RunHistory:
    """What a run folder holds. ``read`` makes one; it is a snapshot that does not follow a run in progress, and nothing
    in it is to be changed.

    All text comes from the folder and can be anything: escape it before it is shown.
    """

    path: Path
    settings: dict[str, Any]
    """``config.toml`` as nested tables, as written: keys may be unknown to this version, or missing. Empty: there is no
    such file. Floats may be infinite, dates are text."""
    metrics: list[dict[str, Any]]
    """The complete lines of ``metrics.jsonl`` by step. Step 0 is the evaluation before the first update. ``step`` is an
    int; every other value is a number below ``MAX_NUMBER``, or None. Of several lines of one step, the last counts."""
    summary: dict[str, Any] | None
    """``summary.json``; None if the run has not ended, or its end was not written."""
    starts: list[dict[str, Any]]
    """``starts.jsonl``: a line for each process that started or resumed the run."""
    rollout_steps: dict[int, Path]
    """The tables of completions by step, in order."""
    evaluation_files: dict[tuple[int, str], Path]
    """The tables of evaluations by step and name of the set (empty: the only set), in order."""
    checkpoints: dict[int, Path]
    """The folders of the checkpoints by step, in order."""
    absent: list[str]
    """Files that are not there, in words. Nothing is wrong with a run in progress that lacks some."""
    damaged: list[str]
    """Files and lines that cannot be used, in words."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The run in a folder.

        Raises:
            RunFolderError: the folder does not exist, or holds no run.
        """
        folder = run_folder(path)
        reader = _Reader(folder)
        settings = reader.whole("config.toml", toml_table, "the settings are unknown")
        summary = reader.whole("summary.json", json_object, "the run is in progress, or did not reach its end")
        metrics = reader.metrics()
        starts = reader.lines("starts.jsonl", "it is unknown when and where the run was started")
        rollouts = reader.tables("rollouts")
        if not rollouts:
            reader.absent.append("rollouts/ has no completions")
        return cls(
            path=folder,
            settings=settings or {},
            metrics=metrics,
            summary=summary,
            starts=[found for _, found in starts],
            rollout_steps={step: path for (step, name), path in rollouts.items() if not name},
            evaluation_files=reader.tables("evaluations"),
            checkpoints=reader.checkpoints(),
            absent=reader.absent,
            damaged=reader.damaged,
        )

    @property
    def missing(self) -> list[str]:
        """What is not there or damaged, in words."""
        return self.absent + self.damaged

    def keys(self) -> list[str]:
        """The metrics with a number in some step, in the order of their first appearance."""
        found: dict[str, None] = {}
        for line in self.metrics:
            if any(line[key] is not None for key in line.keys() - found.keys()):
                found |= dict.fromkeys(key for key, value in line.items() if value is not None)
        found.pop("step", None)
        return list(found)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps in which a metric has a number, and the numbers. Empty for an unknown key."""
        pairs = [(line["step"], line[key]) for line in self.metrics if line.get(key) is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def flat_settings(self) -> dict[str, Any]:
        """The settings by ``section.key``."""
        return dict(flat(self.settings))

    def text(self, name: str) -> str | None:
        """A text file of the folder, such as ``objective.txt``; bytes that are not UTF-8 are replaced. None: it is not
        there, is larger than ``MAX_FILE``, or leads out of the folder."""
        try:
            return read_file(self.path, name).decode("utf-8", "replace")
        except OSError:
            return None

    def json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the folder, such as ``best/best.json``, without NaN and infinity. None: as in
        ``text``, or it is damaged."""
        try:
            return json_object(read_file(self.path, name).decode())
        except DAMAGE:
            return None


class _Reader:
    """Reads the files of a folder, and collects what is absent or damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.absent: list[str] = []
        self.damaged: list[str] = []

    def whole(self, name: str, parse: Callable[[str], Any], without: str) -> Any:
        """What ``parse`` makes of a file; None without it."""
        try:
            return parse(read_file(self.folder, name).decode())
        except FileNotFoundError:
            self.absent.append(f"{name} is missing: {without}")
        except DAMAGE as error:
            self.damaged.append(f"{name} cannot be read: {reason(error)}")
        return None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` by step, the last of each step."""
        found: dict[int, dict[str, Any]] = {}
        reasons: list[tuple[int, str]] = []
        for number, line in self.lines("metrics.jsonl", "no step is complete yet"):
            metrics, problem = step_metrics(line)
            if problem:
                reasons.append((number, problem))
            if metrics is None:
                continue
            if metrics["step"] in found:
                reasons.append((number, f"step {metrics['step']} was written before; this line counts"))
            found[metrics["step"]] = metrics
        self._damaged_lines("metrics.jsonl", reasons)
        return [found[step] for step in sorted(found)]

    def lines(self, name: str, without: str) -> list[tuple[int, dict[str, Any]]]:
        """The JSON objects in the complete lines of a file, with the lines' numbers. A last line without its line break
        is being written, or was when the process was killed: it is left out."""
        found: list[tuple[int, dict[str, Any]]] = []
        reasons: list[tuple[int, str]] = []
        try:
            path = inside(self.folder, self.folder / name)
            for number, line in enumerate(_complete_lines(path), 1):
                if line is None:
                    reasons.append((number, f"it is longer than {MAX_LINE:,} bytes"))
                    continue
                try:
                    found.append((number, json_object(line.decode())))
                except DAMAGE as error:
                    reasons.append((number, reason(error)))
            if path.stat().st_size > MAX_LINES_FILE:
                self.damaged.append(f"{name} is larger than {MAX_LINES_FILE:,} bytes: the rest was not read")
        except FileNotFoundError:
            self.absent.append(f"{name} is missing: {without}")
        except OSError as error:
            self.damaged.append(f"{name} cannot be read: {reason(error)}")
        self._damaged_lines(name, reasons)
        return found

    def tables(self, kind: str) -> dict[tuple[int, str], Path]:
        """The tables of ``rollouts`` or ``evaluations`` by step and name of the set."""
        paths = ((TABLE.fullmatch(name), path) for name, path in self._entries(kind))
        return dict(sorted(((int(match[1]), match[2] or ""), path) for match, path in paths if match))

    def checkpoints(self) -> dict[int, Path]:
        """The folders of the checkpoints by step."""
        paths = ((CHECKPOINT.fullmatch(name), path) for name, path in self._entries("checkpoints", files=False))
        return dict(sorted((int(match[1]), path) for match, path in paths if match))

    def _entries(self, kind: str, *, files: bool = True) -> Iterator[tuple[str, Path]]:
        try:
            folder = inside(self.folder, self.folder / kind, directory=True)
            with os.scandir(folder) as entries:
                for entry in entries:
                    linked = entry.is_symlink() and not is_inside(self.folder, Path(entry.path))
                    if not linked and (entry.is_file() if files else entry.is_dir()):
                        yield entry.name, folder / entry.name
        except FileNotFoundError:
            return
        except OSError as error:
            self.damaged.append(f"{kind}/ cannot be read: {reason(error)}")

    def _damaged_lines(self, name: str, reasons: list[tuple[int, str]]) -> None:
        self.damaged += [f"{name}, line {number}: {text}" for number, text in reasons[:SHOWN_DAMAGE]]
        if len(reasons) > SHOWN_DAMAGE:
            self.damaged.append(f"{name}: {len(reasons) - SHOWN_DAMAGE} more damaged lines")


def step_metrics(line: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The numbers of a line of ``metrics.jsonl``, None if it has no step, and what is wrong with it, in words."""
    step = line.get("step")
    if type(step) is not int or not 0 <= step < MAX_STEP:
        return None, f"expected a step, got {step!r:.40}"
    if not set(map(type, line.values())) - NUMBERS:
        return line, ""
    unusable = [key for key, value in line.items() if type(value) not in NUMBERS]
    return {key: line[key] for key in line if key not in unusable}, f"{unusable[0]!r:.60} is not a number"


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The JSON objects in the complete lines of a file; damaged lines are left out."""
    return [one for _, one in _Reader(folder).lines(name, "")]


def stored_checkpoints(folder: Path) -> dict[int, Path]:
    """The folders of a run's checkpoints by step, in order; empty if they cannot be read."""
    return _Reader(folder).checkpoints()


def stored_rollouts(folder: Path) -> dict[int, Path]:
    """The tables of a run's completions by step, in order; empty if they cannot be read."""
    return {step: path for (step, name), path in _Reader(folder).tables("rollouts").items() if not name}


def _complete_lines(path: Path) -> Iterator[bytes | None]:
    """The lines of a file that end in a line break; None for those longer than ``MAX_LINE``."""
    with path.open("rb") as file:
        while (line := file.readline(MAX_LINE)) and file.tell() <= MAX_LINES_FILE:
            if line.endswith(b"\n"):
                yield line[:-1]
                continue
            while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            if rest:
                yield None
