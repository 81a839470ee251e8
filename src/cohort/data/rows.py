"""The rows of one source in memory: renamed, filtered, selected, and numbered as in the source."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow

from cohort.errors import DataError
from cohort.plugins import load_function

Row = Mapping[str, Any]
BATCH = 1000
"""Rows read at a time."""
MAX_LISTED_VALUES = 5
"""Maximum number of values listed in an error."""

Keep = Callable[[Row, str], bool]
"""Whether a row is used. The string names the row in errors."""


@dataclass(frozen=True, slots=True)
class RowTable(Sequence[Row]):
    """Rows in memory with their new column names and their numbers in the source.

    Rows of a ``pyarrow.Table`` or a ``datasets.Dataset`` become Python objects only when they are asked for.
    """

    stored: Any
    """A list of mappings, a ``pyarrow.Table`` or a ``datasets.Dataset``."""
    columns: tuple[str, ...]
    """The new names of all columns that any row has."""
    numbers: Sequence[int] | np.ndarray
    """The number of each row in its source."""
    new_names: Mapping[str, str]
    """{old: new}."""
    where: str
    """What errors call the source."""

    @classmethod
    def of(cls, stored: Any, renames: Mapping[str, str], where: str) -> RowTable:
        """All rows of ``stored``.

        Args:
            stored: see the class.
            renames: {new: old}.
            where: what errors call the data.

        Raises:
            DataError: the renames do not fit the columns; see ``check_renames``.
        """
        if getattr(stored, "format", {}).get("type") == "custom":  # a transform makes the columns of the data set
            columns = list(_fetch(stored, 0, 1)[0])
        elif isinstance(stored, list):
            columns = list(dict.fromkeys(column for row in stored for column in row))
        else:
            columns = list(stored.column_names)
        new_names = check_renames(renames, columns, where)
        columns = [new_names.get(name, name) for name in columns]
        return cls(stored, tuple(columns), range(len(stored)), new_names, where)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return [rename(row, self.new_names) for row in _fetch(self.stored, start, stop)[::step]]
        index = range(len(self))[index]
        return self[index : index + 1][0]

    def __iter__(self) -> Iterator[Row]:
        return (row for row, _ in self.named())

    def named(self) -> Iterator[tuple[Row, str]]:
        """Each row, and what errors call it."""
        for batch in self.batches():
            yield from zip(*batch, strict=True)

    def batches(self) -> Iterator[tuple[list[Row], list[str]]]:
        """The rows in lists, and what errors call each row."""
        for start in range(0, len(self), BATCH):
            numbers = self.numbers[start : start + BATCH]
            yield self[start : start + BATCH], [f"{self.where}, row {number}" for number in numbers]

    def select(self, indices: Sequence[int] | np.ndarray) -> RowTable:
        """The rows at ascending indices."""
        stored: Any
        if isinstance(self.stored, list):
            stored = [self.stored[index] for index in indices]
        elif isinstance(self.stored, pyarrow.Table):
            # Not Table.take: it joins the chunks of a column, which fails beyond 2 GB of text.
            stored = self.stored.filter(pyarrow.array(np.isin(np.arange(len(self)), indices)))
        else:
            stored = self.stored.select(indices)
        return replace(self, stored=stored, numbers=np.asarray(self.numbers)[indices])

    def filter(self, spec: str | Mapping[str, Any]) -> RowTable:
        """The rows that ``data.filter`` accepts.

        Raises:
            DataError: there are none, or as ``make_filter``.
        """
        keep = make_filter(spec, self.columns, self.where)
        kept = np.flatnonzero([keep(row, where) for row, where in self.named()])
        if not len(kept):
            raise DataError(f"{self.where}: data.filter leaves none of {counted(self)}{_values(self, spec)}")
        return self.select(kept)


def _fetch(stored: Any, start: int, stop: int) -> list[Row]:
    if isinstance(stored, list):
        return stored[start:stop]
    if isinstance(stored, pyarrow.Table):
        return list(stored.slice(start, stop - start).to_pylist())
    try:
        columns = stored[start:stop]
    except Exception as error:  # of the user's own transform
        raise DataError(f"reading rows of the data set raised {type(error).__name__}: {error}") from error
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def rename(row: Row, new_names: Mapping[str, str]) -> Row:
    """The row under new column names, {old: new}."""
    return {new_names.get(name, name): value for name, value in row.items()} if new_names else row


def check_renames(renames: Mapping[str, str], columns: Sequence[str], where: str) -> dict[str, str]:
    """Renames as {old: new}.

    Raises:
        DataError: an old name does not exist or is renamed twice, a new name exists already, or a column name is not a
            string or occurs twice.
    """
    if other := [name for name in columns if not isinstance(name, str)]:
        raise DataError(f"{where}: column names must be strings, got {other[0]!r:.60}")
    if len(set(columns)) < len(columns):
        raise DataError(f"{where} has two columns {max(columns, key=columns.count)!r}")
    new_names = {old: new for new, old in renames.items()}
    for old in new_names:
        check_column(old, columns, f"{where}: data.columns")
    if len(new_names) < len(renames):
        raise DataError(f"{where}: data.columns gives one column two new names: {dict(renames)}")
    if clash := [new for new in renames if new in columns and new not in new_names]:
        raise DataError(f"{where}: data.columns renames a column to {clash[0]!r}, which exists: rename that one too")
    return new_names


def check_column(column: str, columns: Collection[str], what: str, known: str = "there are") -> None:
    """Check that a column that ``what`` names exists.

    Raises:
        DataError: it does not.
    """
    if column not in columns:
        raise DataError(f"{what} names column {column!r}; {known}: {', '.join(columns)}")


def make_filter(spec: str | Mapping[str, Any], columns: Sequence[str], where: str) -> Keep:
    """``data.filter`` as a function.

    Raises:
        DataError: the function or a column of a condition does not exist.
    """
    if isinstance(spec, str):
        return _user_filter(spec)
    for column in spec:
        check_column(column, columns, f"{where}: data.filter")
    return lambda row, where: all(_meets(row.get(column), wanted, column, where) for column, wanted in spec.items())


def _values(rows: RowTable, spec: str | Mapping[str, Any]) -> str:
    """The values of the columns of a filter that leaves no row."""
    if isinstance(spec, str):
        return ""
    found = []
    for column in spec:
        values = list(dict.fromkeys(repr(row.get(column))[:60] for row in rows[:BATCH]))
        more = ", ..." if len(values) > MAX_LISTED_VALUES else ""
        found.append(f"{column} is {', '.join(values[:MAX_LISTED_VALUES])}{more}")
    return f" (in the first rows {'; '.join(found)})"


def plain(value: Any) -> Any:
    """The value with Python's numbers and lists in place of NumPy's."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def as_number(value: Any) -> float | None:
    """A number, or a string that spells one as in a .csv file; None for anything else, NaN included."""
    if isinstance(value, bool) or not isinstance(value, int | float | str | np.number):
        return None
    with suppress(ValueError, OverflowError):
        return None if np.isnan(number := float(value)) else number
    return None


def _user_filter(spec: str) -> Keep:
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


def _meets(value: Any, wanted: Any, column: str, where: str) -> bool:
    """Whether a value meets the condition of its column. A missing value meets none."""
    if not isinstance(wanted, Mapping):
        value = plain(value)
        allowed = wanted if isinstance(wanted, list) else [wanted]
        # 1 == True in Python; as labels they differ.
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
    if value is None or value == "":
        return False
    if (number := as_number(value)) is None:
        raise DataError(f"{where}: data.filter asks for a number in column {column!r}, got {value!r:.60}")
    return bool(wanted.get("min", -np.inf) <= number <= wanted.get("max", np.inf))


def counted(rows: Sized) -> str:
    """The number of rows in words."""
    return f"{len(rows):,} row{'' if len(rows) == 1 else 's'}"


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys must differ: which of two values a reader takes is not defined."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} occurs twice in an object")
    return found


# ----------------------------------------
# Rows made by a program: the data sets of the package reasoning-gym, by name.
#
#     reasoning_gym:NAME?size=1000&offset=0&seed=0&SETTING=VALUE
#
# The package makes the item with index i of most data sets from ``Random(seed + i)``. Seeds 0 and 1 therefore give
# the same items except one. Held-out items are those of other indices, not of another seed.


PREFIX = "reasoning_gym:"
SETTINGS, INDEX = "reasoning_gym", "reasoning_gym_index"
"""Columns from which the reward of the same name makes the item again: the arguments of ``create_dataset`` as a Python
literal, because JSON would turn tuples into lists, and the index."""
ORDER_OF_SETS = ("polynomial_multiplication", "isomorphic_strings", "ransom_note", "word_ladder")
"""Data sets whose items depend on the order of Python's sets, which differs between processes."""


def procedural_rows(source: str) -> Callable[[], Iterator[Row]]:
    """Passes over the rows that ``source`` describes: columns ``prompt``, ``answer``, and the two for the reward.

    Raises:
        DataError: the package is not installed; there is no such data set or setting, or a value is invalid; or the
            data set would have other items in another process.
    """
    name, _, query = source.removeprefix(PREFIX).partition("?")
    given = dict(_setting(part, source) for part in query.split("&") if part)
    settings = {"size": 500, "offset": 0, "seed": 0} | given
    size, offset = (settings.pop(key) for key in ("size", "offset"))
    for key, value, least in (("size", size, 1), ("offset", offset, 0), ("seed", settings["seed"], 0)):
        if type(value) is not int or value < least:
            raise DataError(f"{source}: {key} must be a whole number of at least {least}, got {value!r}")
    settings = {"name": name, **settings, "size": offset + size}
    dataset = _dataset(source, settings)

    def rows() -> Iterator[Row]:
        for index in range(offset, offset + size):
            try:
                item = dataset[index]
            except Exception as error:
                raise DataError(f"{source}: making item {index} raised {type(error).__name__}: {error}") from error
            yield {"prompt": item["question"], "answer": item["answer"], SETTINGS: repr(settings), INDEX: index}

    return rows


def _setting(text: str, source: str) -> tuple[str, Any]:
    """A setting and its value: a Python literal, true or false, or else text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise DataError(f"{source}: expected SETTING=VALUE, got {text!r}")
    if value in ("true", "false"):
        return key, value == "true"
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _dataset(source: str, settings: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError(f"{source} needs reasoning-gym: pip install 'cohort-rl[reasoning-gym]'") from None
    name = settings["name"]
    if name not in DATASETS or name == "composite":
        raise DataError(f"{source}: reasoning-gym has no data set {name!r}; it has: {', '.join(sorted(DATASETS))}")
    if name == "knight_swap" or (name in ORDER_OF_SETS and os.environ.get("PYTHONHASHSEED", "random") == "random"):
        instead = "" if name == "knight_swap" else ": set the environment variable PYTHONHASHSEED, for example to 0"
        raise DataError(f"{source}: the items of {name} are not the same in every process{instead}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    if unknown := [key for key in settings if key not in ("name", "size", "seed", *known)]:
        others = ", ".join(key for key in known if key not in ("size", "seed"))
        raise DataError(f"{source}: {name} has no setting {unknown[0]!r}; it has: size, offset, seed, {others}")
    try:
        return reasoning_gym.create_dataset(**settings)
    except Exception as error:  # an AssertionError of the data set's own check, most often
        raise DataError(f"{source}: {type(error).__name__}: {error}") from error
