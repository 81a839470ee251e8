"""Rows from where the user has them: files, data sets by name, or objects in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.errors import DataError

Row = Mapping[str, Any]


def load_rows(source: str, *, split: str = "train", limit: int | None = None) -> Sequence[Row]:
    """Rows of a .jsonl or .parquet file, or of a data set by name.

    Args:
        source: a path that ends in .jsonl or .parquet, or a name for ``datasets.load_dataset`` ("name" or
            "name:configuration").
        split: which split, for a name.
        limit: the first so many rows only.

    Raises:
        DataError: no such file or data set, or a line that cannot be read (named by its number).
    """
    path = Path(source).expanduser()
    match path.suffix:
        case ".jsonl":
            rows: Sequence[Row] = _read_jsonl(_existing(path))
        case ".parquet":
            rows = _read_parquet(_existing(path))
        case suffix:
            if path.is_file() or suffix in (".json", ".csv", ".txt"):
                raise DataError(f"cannot read {source}: expected a .jsonl or .parquet file, or a data set's name")
            rows = _load_named(source, split)
    return first_rows(rows, limit)


def first_rows(rows: Sequence[Row], limit: int | None) -> Sequence[Row]:
    """The first ``limit`` rows; all of them for None."""
    return rows if limit is None or limit >= len(rows) else [rows[index] for index in range(limit)]


def check_rows(rows: Any, what: str) -> Sequence[Row]:
    """Rows given in Python: a list of dicts, a ``datasets.Dataset``, or anything else with a length and an index.

    Raises:
        DataError: no length, no rows, or rows that are not mappings.
    """
    if isinstance(rows, str | Mapping) or not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise DataError(
            f"{what} must have a length and rows by index, like a list of dicts or a datasets.Dataset; "
            f"got {type(rows).__name__}"
        )
    if len(rows) == 0:
        raise DataError(f"{what} has no rows")
    try:
        first = rows[0]
    except LookupError:  # a pandas table, say, whose brackets take column names
        raise DataError(f"{what} must give its rows by index; a {type(rows).__name__} does not") from None
    if not isinstance(first, Mapping):
        raise DataError(f"{what} must hold one mapping of columns per row; row 0 is {type(first).__name__}")
    checked: Sequence[Row] = rows
    return checked


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"no data file {path}" + ("" if path.is_absolute() else f" (looked in {Path.cwd()})"))
    return path


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    try:
        text = path.read_text(encoding="utf-8-sig")  # -sig: some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object with columns, got {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def _load_named(name: str, split: str) -> Sequence[Row]:
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        rows = datasets.load_dataset(repository, configuration or None, split=split)
    except Exception as error:  # the library raises many kinds: missing, offline, several configurations, bad split
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"cannot load the data set {name!r}, split {split!r}: {detail}") from error
    if len(rows) == 0:
        raise DataError(f"the data set {name!r}, split {split!r}, has no rows")
    checked: Sequence[Row] = rows
    return checked
