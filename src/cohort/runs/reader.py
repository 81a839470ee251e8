"""A run folder as data, whatever state it is in: what everything that looks at runs reads.

A folder can be complete, in progress, killed, of another version, damaged or hostile. Nothing of it is run, nothing
outside of it is read, and what cannot be used is left out and named in ``Run.missing``. Importing this module imports
numpy and nothing else that takes time.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from cohort.errors import ConfigError, RunFolderError

T = TypeVar("T")
Floats = NDArray[np.float64]
Row = dict[str, Any]
"""A line of ``metrics.jsonl``: ``step`` is an int; every other value is a number below ``MAX_NUMBER``, or None."""

NAMES = ("config.toml", "metrics.jsonl", "starts.jsonl", "summary.json")
"""Files of a run that are asked about by name."""
STARTED = (
    "starts.jsonl",
    "metrics.jsonl",
    "summary.json",
    "objective.txt",
    "first_prompt.txt",
    "checkpoints",
    "run.lock",
)
"""What shows that a run was started in a folder. A process that was killed while it wrote its settings has left the
lock."""
MAX_FILE = 1 << 24
"""Bytes of a file that is read whole. Larger files are left out."""
MAX_LINE = 1 << 22
"""Bytes of a line of a .jsonl file. Longer lines are left out."""
MAX_LINES_FILE = 1 << 30
"""Bytes that are read of a .jsonl file: 250,000 steps. The rest is left out."""
MAX_DEPTH = 50
"""Nested tables of settings and JSON. Deeper ones are left out."""
MAX_NUMBER = 1e100
"""Numbers of JSON are below this, or None: so that their squares and sums are finite too."""
MAX_STEP = 2**53
"""Steps are below this, so that they are exact as float64 and in JavaScript."""
MAX_TIME = 2.5e11
"""Times are before the year 9892; calendars end in 9999."""
MARK = 64
"""Bytes before the position by which a file that grows is recognised."""
SHOWN_DAMAGE = 5
"""Damaged lines of a file that are named."""
DAMAGE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
"""What reading a damaged file raises."""
TABLE = re.compile(r"step-(0|[1-9][0-9]{0,15})(?:-(.+))?\.parquet")
CHECKPOINT = re.compile(r"step-(0|[1-9][0-9]{0,15})")
NUMBERS = {int, float, type(None)}
AXES = {
    "step": "step",
    "updates": "optimizer updates",
    "tokens": "drawn tokens",
    "seconds": "training time, seconds",
    "time": "time (UTC)",
}
"""What a curve can be drawn over, and the label of the axis. ``tokens``, ``updates`` and ``seconds`` are sums from the
start of the run. ``seconds`` is that of the steps, without evaluations, writing, and pauses between a stop and a
resume. ``time`` is the Unix time in seconds."""


class Run:
    """What a run folder holds. Files are read when they are asked for; nothing of what comes back is to be changed. All
    text comes from the folder and can be anything: escape it before it is shown.

    Args:
        path: the folder. Whether it holds a run is not checked: see ``read``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._forget()

    def _forget(self) -> None:
        self._rows: dict[int, Row] = {}
        self._known: dict[str, Any] = {}
        """What is computed from the rows."""
        self._position, self._line, self._mark = 0, 0, b""
        self._identity: tuple[int, int] | None = None
        self._absent: dict[str, str] = {}
        self._damaged: dict[str, str] = {}
        self._bad_lines: dict[str, list[str]] = {}

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The run in a folder.

        Raises:
            RunFolderError: the folder does not exist, or holds no run.
        """
        return cls(run_folder(path))

    def refresh(self) -> tuple[bool, list[Row]]:
        """Read the lines that ``metrics.jsonl`` has gained since the last look. A last line without its line break is
        being written, or was when the process was killed: it is left for later.

        Returns:
            Whether the file has been replaced or cut since, as a resumed run does (then all of it is read again), and
            the new rows in the order of their lines.
        """
        new: list[Row] = []
        replaced = False
        name = "metrics.jsonl"
        with self._reading(name, "no step is complete yet"), inside(self.path, self.path / name).open("rb") as file:
            status = os.fstat(file.fileno())
            if replaced := not self._follows(file, status):
                self._forget()
            self._identity = status.st_dev, status.st_ino
            file.seek(self._position)
            for line in complete_lines(file):
                self._line, self._position = self._line + 1, file.tell()
                new += self._take(line)
            file.seek(max(0, self._position - MARK))
            self._mark = file.read(min(MARK, self._position))
            self._note_length(name, file)
        if new:
            last = list(islice(reversed(self._rows), len(new) + 1))
            if last != sorted(last, reverse=True):  # of a long run, that takes a while
                self._rows = dict(sorted(self._rows.items()))
            self._known.clear()
        return replaced, new

    def _follows(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Whether a file begins with the bytes that were read."""
        file.seek(max(0, self._position - MARK))
        same = file.read(min(MARK, self._position)) == self._mark and status.st_size >= self._position
        return self._position == 0 or (same and self._identity == (status.st_dev, status.st_ino))

    def _take(self, line: bytes | None) -> list[Row]:
        """The row in a line, if it has one."""
        row, problem = _row(line)
        if row is not None:
            again = f"step {row['step']} was written before; this line counts"
            problem = problem or (again if row["step"] in self._rows else "")
            self._rows[row["step"]] = row
        if problem:
            self._bad_lines.setdefault("metrics.jsonl", []).append(f"metrics.jsonl, line {self._line}: {problem}")
        return [] if row is None else [row]

    @property
    def rows(self) -> list[Row]:
        """The lines of ``metrics.jsonl`` by step. Step 0 is the evaluation before the first update. Of several lines of
        one step, the last counts."""
        if self._identity is None:  # it was not read yet
            self.refresh()
        return self._once("rows", lambda: list(self._rows.values()))

    def keys(self) -> list[str]:
        """The metrics with a number in some step, in the order of their first appearance."""

        def made() -> list[str]:
            found: dict[str, None] = {}
            for row in self.rows:
                if any(row[key] is not None for key in row.keys() - found.keys()):
                    found |= dict.fromkeys(key for key, value in row.items() if value is not None)
            found.pop("step", None)
            return list(found)

        return self._once("keys", made)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """The steps in which a metric has a number, and the numbers. Empty for an unknown key."""
        pairs = [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]
        return [step for step, _ in pairs], [value for _, value in pairs]

    def column(self, key: str) -> Floats:
        """A metric over the rows, float64 ``[T]``; NaN where a row has no number."""

        def made() -> Floats:
            values = (row.get(key) for row in self.rows)
            return np.array([np.nan if value is None else value for value in values], np.float64)

        return self._once(f"column {key}", made)

    def axis(self, name: str) -> Floats:
        """Where each row ends on an axis, float64 ``[T]``. Steps whose line is damaged or missing count like the next
        one; a step without the numbers counts like the one before, and is NaN with none before. All are NaN if no step
        has the numbers.

        ``updates`` are optimizer steps: minibatches without those whose gradient was 0. ``tokens`` are all sampled
        tokens: ``tokens_per_second * seconds/step``.

        Raises:
            ConfigError: the axis is unknown.
        """
        if name not in AXES:
            raise ConfigError(f"unknown axis {name!r}: expected one of {', '.join(AXES)}")
        return self._once(f"axis {name}", lambda: self._axis(name))

    def _axis(self, name: str) -> Floats:
        if name == "step":
            return self.column("step")
        if name == "time":
            times = (row.get("time") for row in self.rows)
            return np.array([np.nan if t is None or not 0 <= t < MAX_TIME else round(t, 6) for t in times], np.float64)
        places, total, before, known = [], 0.0, 0, None
        for row in self.rows:
            step, given = row["step"], _increment(row, name)
            known = known if given is None else max(0.0, round(given, 6))  # so that distances are 0 or not tiny
            if step and known is not None:
                total += known * (step - before)
                before = step
            places.append(np.nan if step and known is None else total)
        return np.array(places, np.float64) if known is not None else np.full(len(places), np.nan)

    def _once(self, name: str, make: Callable[[], T]) -> T:
        """What is computed from the rows, until there are new ones."""
        if name not in self._known:
            self._known[name] = make()
        found: T = self._known[name]
        return found

    # The other files.

    @property
    def settings(self) -> dict[str, Any]:
        """``config.toml`` as nested tables, as written: keys may be unknown to this version, or missing. Empty: there
        is no such file. Floats may be infinite, dates are text."""
        return self._once("settings", lambda: self._whole("config.toml", toml_table, "the settings are unknown") or {})

    def flat_settings(self) -> dict[str, Any]:
        """The settings by ``section.key``."""
        return dict(flat(self.settings))

    @property
    def summary(self) -> dict[str, Any] | None:
        """``summary.json``; None if the run has not ended, or its end was not written."""
        return self._whole("summary.json", json_object, "the run is in progress, or did not reach its end")

    @property
    def starts(self) -> list[dict[str, Any]]:
        """``starts.jsonl``: a line for each process that started or resumed the run."""
        name, found = "starts.jsonl", list[tuple[dict[str, Any] | None, str]]()
        without = "it is unknown when and where the run was started"
        with self._reading(name, without), inside(self.path, self.path / name).open("rb") as file:
            found += map(_object, complete_lines(file))
            self._note_length(name, file)
        problems = ((number, problem) for number, (_, problem) in enumerate(found, 1) if problem)
        self._bad_lines[name] = [f"{name}, line {number}: {problem}" for number, problem in problems]
        return [one for one, _ in found if one is not None]

    @property
    def rollouts(self) -> dict[int, Path]:
        """The tables of completions by step, in order."""
        return {step: path for (step, name), path in self._numbered("rollouts").items() if not name}

    @property
    def evaluations(self) -> dict[tuple[int, str], Path]:
        """The tables of evaluations by step and name of the set (empty: the only set), in order."""
        return self._numbered("evaluations")

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The folders of the checkpoints by step, in order."""
        return {step: path for (step, name), path in self._numbered("checkpoints", folders=True).items() if not name}

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

    @property
    def absent(self) -> list[str]:
        """Files that are not there, in words. Nothing is wrong with a run in progress that lacks some."""
        self._look()
        return list(self._absent.values())

    @property
    def damaged(self) -> list[str]:
        """Files and lines that cannot be used, in words."""
        self._look()
        shown = list(self._damaged.values())
        for name, texts in self._bad_lines.items():
            shown += texts[:SHOWN_DAMAGE]
            if len(texts) > SHOWN_DAMAGE:
                shown.append(f"{name}: {len(texts) - SHOWN_DAMAGE} more damaged lines")
        return shown

    @property
    def missing(self) -> list[str]:
        """What is not there or damaged, in words."""
        return self.absent + self.damaged

    def _look(self) -> None:
        """Read every file once, so that what is wrong with it is known."""
        _ = self.settings, self.summary, self.rows, self.starts, self.evaluations, self.checkpoints
        if not self.rollouts:
            self._absent["rollouts"] = "rollouts/ has no completions"

    def _whole(self, name: str, parse: Callable[[str], T], without: str) -> T | None:
        """What ``parse`` makes of a file; None without it."""
        found = None
        with self._reading(name, without):
            found = parse(read_file(self.path, name).decode())
        return found  # noqa: RET504  (the block may have ended with an error)

    def _numbered(self, kind: str, *, folders: bool = False) -> dict[tuple[int, str], Path]:
        """The tables or folders ``step-N[-NAME]`` in a folder of the run, in order."""
        found = {}
        with self._reading(f"{kind}/", ""):
            folder = inside(self.path, self.path / kind, directory=True)
            with os.scandir(folder) as entries:
                for entry in entries:
                    linked = entry.is_symlink() and not is_inside(self.path, Path(entry.path))
                    match = None if linked else (CHECKPOINT if folders else TABLE).fullmatch(entry.name)
                    if match and (entry.is_dir() if folders else entry.is_file()):
                        found[int(match[1]), "" if folders else match[2] or ""] = folder / entry.name
        return dict(sorted(found.items()))

    def _note_length(self, name: str, file: BinaryIO) -> None:
        if os.fstat(file.fileno()).st_size > MAX_LINES_FILE:
            self._damaged[name] = f"{name} is larger than {MAX_LINES_FILE:,} bytes: the rest was not read"

    @contextmanager
    def _reading(self, name: str, without: str) -> Iterator[None]:
        """Note that a file is absent (``without``: what that means; empty: nothing), or why it cannot be read."""
        self._damaged.pop(name, None)
        self._absent.pop(name, None)
        try:
            yield
        except FileNotFoundError:
            if without:
                self._absent[name] = f"{name} is missing: {without}"
        except DAMAGE as error:
            self._damaged[name] = f"{name} cannot be read: {reason(error)}"


def _increment(row: Row, axis: str) -> float | None:
    """What a step adds on an axis; None: its row does not tell."""
    if axis == "seconds":
        return row.get("seconds/step")
    if axis == "updates":
        updates = row.get("updates")
        return None if updates is None else updates - (row.get("updates_skipped") or 0)
    rate, seconds = row.get("tokens_per_second"), row.get("seconds/step")
    return None if rate is None or seconds is None else float(round(rate * seconds))


def _row(line: bytes | None) -> tuple[Row | None, str]:
    """The numbers of a line of ``metrics.jsonl``, None if it has no step, and what is wrong with it, in words."""
    found, problem = _object(line)
    if found is None:
        return None, problem
    step = found.get("step")
    if type(step) is not int or not 0 <= step < MAX_STEP:
        return None, f"expected a step, got {step!r:.40}"
    if not set(map(type, found.values())) - NUMBERS:
        return found, ""
    unusable = [key for key, value in found.items() if type(value) not in NUMBERS]
    return {key: found[key] for key in found if key not in unusable}, f"{unusable[0]!r:.60} is not a number"


def _object(line: bytes | None) -> tuple[dict[str, Any] | None, str]:
    """The JSON object in a line, or why there is none, in words."""
    if line is None:
        return None, f"it is longer than {MAX_LINE:,} bytes"
    try:
        return json_object(line.decode()), ""
    except DAMAGE as error:
        return None, reason(error)


# ----------------------------------------
# Files of a folder that is not trusted: regular files inside of the folder, of bounded size.


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


def was_started(folder: Path) -> bool:
    """Whether a run was started in a folder."""
    return any((folder / name).exists() for name in STARTED)


def only_settings(folder: Path) -> str:
    """Why a folder with a ``config.toml`` is not a run folder, in words; empty if a run was started there, or it has
    none."""
    if was_started(folder) or not (folder / "config.toml").is_file():
        return ""
    return (
        f"{folder} is not a run folder: it has settings, but no run was started here (no starts.jsonl): did you mean "
        f"'cohort train {folder / 'config.toml'}'?"
    )


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


def complete_lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file from its position on that end in a line break, without it; None for those longer than
    ``MAX_LINE``."""
    while (line := file.readline(MAX_LINE)) and file.tell() <= MAX_LINES_FILE:
        if line.endswith(b"\n"):
            yield line[:-1]
            continue
        while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
            pass
        if rest:
            yield None


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
