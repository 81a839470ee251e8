"""The rows of one source that a run uses: renamed, filtered, selected, and each with its place in the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cohort.data.files import Row
from cohort.errors import DataError
from cohort.plugins import load_function

BATCH = 1000
"""Rows that are read at a time."""
FEW = 5
"""So many values of a column are shown in an error."""

Keep = Callable[[Row, str], bool]
"""Whether a row is used. The string says which one it is, for errors."""


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Row]):
    """Rows in memory.

    ``held`` is a list of mappings, a ``pyarrow.Table`` or a ``datasets.Dataset``; of the latter two only what is asked
    for becomes Python objects.
    """

    held: Any
    columns: tuple[str, ...]
    """Of all rows together, renamed."""
    numbers: Sequence[int] | np.ndarray
    """Which rows of ``held`` they are."""
    new_names: Mapping[str, str]
    """Renamed columns: {old: new}."""
    places: Sequence[int] | None = None
    """Where each row of ``held`` stands in the source, when that is not all of it."""

    @classmethod
    def of(cls, held: Any, renames: Mapping[str, str], where: str) -> Rows:
        """All rows of ``held``.

        Args:
            held: see the class.
            renames: {new: old}.
            where: what errors call the data.

        Raises:
            DataError: an old name is not there, or a new one is already.
        """
        names = getattr(held, "column_names", None)
        if names is not None and getattr(held, "format", {}).get("type") == "custom":
            names = list(fetch(held, [0])[0])  # what a transform makes of them
        columns = list(names if names is not None else dict.fromkeys(column for row in held for column in row))
        new_names = check_renames(renames, columns, where)
        return cls(held, tuple(new_names.get(name, name) for name in columns), range(len(held)), new_names)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        """One row, by its place among these; or some."""
        if isinstance(index, slice):
            return [self.renamed(row) for row in fetch(self.held, self.numbers[index])]
        return self.renamed(fetch(self.held, [self.numbers[index]])[0])

    def renamed(self, row: Row) -> Row:
        """The row with its columns' new names."""
        return rename(row, self.new_names)

    def number(self, index: int) -> int:
        """Where a row stands in its source."""
        number = int(self.numbers[index])
        return number if self.places is None else self.places[number]

    def __iter__(self) -> Iterator[Row]:
        for _, rows in self.batches():
            yield from rows

    def batches(self) -> Iterator[tuple[int, list[Row]]]:
        """All rows in lists, each with the place of its first one."""
        for start in range(0, len(self), BATCH):
            yield start, self[start : start + BATCH]

    def take(self, indices: Any) -> Rows:
        """Some of these, by their places among them: a slice, or an array of indices or of booleans."""
        numbers = self.numbers[indices] if isinstance(indices, slice) else np.asarray(self.numbers)[indices]
        return replace(self, numbers=numbers)

    def where(self, keep: Keep, name: str) -> Rows:
        """Those that are to be kept."""
        kept = [
            keep(row, f"{name}, row {self.number(start + index)}")
            for start, rows in self.batches()
            for index, row in enumerate(rows)
        ]
        return self.take(np.flatnonzero(kept))


def fetch(held: Any, numbers: Any) -> list[Row]:
    """Rows by their numbers.

    Raises:
        DataError: a transform of the data set's own raised.
    """
    if isinstance(held, list):
        return [held[number] for number in numbers]
    chosen = slice(numbers.start, numbers.stop) if isinstance(numbers, range) and numbers.step == 1 else None
    if hasattr(held, "to_pylist"):
        rows: list[Row] = held[chosen].to_pylist() if chosen else _of_table(held, np.asarray(numbers, dtype=np.int64))
        return rows
    try:
        columns = held[chosen if chosen else list(map(int, numbers))]
    except Exception as error:
        raise DataError(f"reading rows of the data set raised {type(error).__name__}: {error}") from error
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _of_table(table: Any, numbers: np.ndarray) -> list[Row]:
    """Rows of a ``pyarrow.Table``, from one of its pieces after another: ``Table.take`` would first put the pieces of a
    column together, which costs as much as the whole table and fails where they have more than 2 GB of text."""
    if len(numbers) == 1:
        found: list[Row] = table.slice(int(numbers[0]), 1).to_pylist()
        return found
    pieces = table.to_batches()
    ends = np.cumsum([piece.num_rows for piece in pieces])
    piece_of = np.searchsorted(ends, numbers, side="right")
    rows: list[Row] = []
    for run in np.split(np.arange(len(numbers)), np.flatnonzero(np.diff(piece_of)) + 1):
        if len(run):
            number = piece_of[run[0]]
            start = ends[number] - pieces[number].num_rows
            rows += pieces[number].take((numbers[run] - start).tolist()).to_pylist()
    return rows


def rename(row: Row, new_names: Mapping[str, str]) -> Row:
    """A row with other names for its columns; {old: new}."""
    return {new_names.get(name, name): value for name, value in row.items()} if new_names else row


def check_renames(renames: Mapping[str, str], columns: Sequence[str], where: str) -> dict[str, str]:
    """Renames as {old: new}.

    Raises:
        DataError: an old name is not there, is renamed twice, or a new one is already there; a name is no string, or
            of two columns.
    """
    if other := [name for name in columns if not isinstance(name, str)]:
        raise DataError(f"{where}: column names must be strings, got {other[0]!r:.60}")
    if len(set(columns)) < len(columns):
        raise DataError(f"{where} has two columns {max(columns, key=columns.count)!r}")
    new_names = {old: new for new, old in renames.items()}
    if missing := [old for old in renames.values() if old not in columns]:
        raise DataError(f"{where}: data.columns names column {missing[0]!r}; there are: {', '.join(columns)}")
    if len(new_names) < len(renames):
        raise DataError(f"{where}: data.columns gives one column two new names: {dict(renames)}")
    if clash := [new for new in renames if new in columns and new not in new_names]:
        raise DataError(
            f"{where}: data.columns calls a column {clash[0]!r}, and there is one of that name: rename it too"
        )
    return new_names


def make_filter(spec: str | Mapping[str, Any], columns: Sequence[str], where: str) -> Keep:
    """A filter of the settings as a function.

    Raises:
        DataError: there is no such function, or a condition is of a column that is not there.
    """
    if isinstance(spec, str):
        return _by_function(spec)
    if missing := [column for column in spec if column not in columns]:
        raise DataError(f"{where}: data.filter names column {missing[0]!r}; there are: {', '.join(columns)}")
    conditions = [(column, _condition(column, wanted)) for column, wanted in spec.items()]
    return lambda row, where: all(holds(row.get(column), where) for column, holds in conditions)


def explain_none_left(rows: Rows, spec: str | Mapping[str, Any]) -> str:
    """What the columns of a filter hold that left no row."""
    if isinstance(spec, str):
        return ""
    seen: dict[str, dict[str, None]] = {column: {} for column in spec}
    for row in rows[:BATCH]:
        for column, values in seen.items():
            values[repr(row.get(column))[:60]] = None
    said = [
        f"{column} is {', '.join(list(values)[:FEW])}{', ...' * (len(values) > FEW)}" for column, values in seen.items()
    ]
    return f" (in the first rows {'; '.join(said)})"


def plain(value: Any) -> Any:
    """A value with lists for NumPy's arrays in it, and Python's numbers for NumPy's."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def as_number(value: Any) -> float | None:
    """A number, or a string that spells one, as all values of a .csv file are; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | np.number):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return None if np.isnan(number) else number


def _by_function(spec: str) -> Keep:
    function = load_function(spec, what="filter", error=DataError)

    def keep(row: Row, where: str) -> bool:
        try:
            answer = function(dict(row))
        except (Exception, SystemExit) as error:
            raise DataError(f"{where}: data.filter ({spec}) raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool | np.bool_):
            raise DataError(f"{where}: data.filter ({spec}) must return True or False, got {answer!r:.60}")
        return bool(answer)

    return keep


def _condition(column: str, wanted: Any) -> Callable[[Any, str], bool]:
    """Of one column's value. A row without one satisfies none."""
    if not isinstance(wanted, Mapping):
        allowed = wanted if isinstance(wanted, list) else [wanted]

        def among(value: Any, _: str) -> bool:
            value = plain(value)
            # 1 and True are equal in Python; as a label they are not meant to be.
            return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)

        return among
    low, high = wanted.get("min", -np.inf), wanted.get("max", np.inf)

    def within(value: Any, where: str) -> bool:
        if value is None or value == "":
            return False
        if (number := as_number(value)) is None:
            raise DataError(f"{where}: data.filter asks for a number in column {column!r}, got {value!r:.60}")
        return bool(low <= number <= high)

    return within
