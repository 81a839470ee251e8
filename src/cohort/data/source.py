"""The rows of one source: read from where the user has them, then renamed, filtered, selected, and numbered.

JSON lines and CSV are read here, not by ``datasets``, for their errors: each names the file and the line.
"""

from __future__ import annotations

import ast
import csv
import dataclasses
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow
import pyarrow.parquet

from cohort.errors import DataError
from cohort.plugins import load_function
from cohort.shipped import shipped

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


# ----------------------------------------
# Files, folders, data sets by name, and objects in memory.


COMPRESSED = (".gz", ".zst")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
"""First words of file names that mark a split, and the split."""
IGNORED = (".", "_", "readme", "license", "licence", "dataset_infos")
"""Files of a data folder whose names begin so are ignored."""
MAX_CSV_CELL = 2**31 - 1
"""Maximum characters of a CSV cell; the default of the csv module is 131,072."""
READ_BYTES = 2**20
EXPECTED = ".jsonl, .json, .csv or .parquet file"
HUB_SECONDS = 10
UNREACHABLE = {"TransportError", "ConnectionError", "Timeout"}
"""Classes of errors of a hub that cannot be reached, in any HTTP library."""
Opener = Callable[[], Iterator[Row]]
"""Starts a new pass over streamed rows."""


def load_rows(path: str) -> Sequence[Row]:
    """Rows of a file, a folder or a data set by name; see ``read_source``."""
    return RowTable.of(read_source(path, path, "train"), {}, path)


def read_source(source: Any, where: str, split: str) -> Any:
    """All rows of a source: a list of mappings, a ``pyarrow.Table`` or a ``datasets.Dataset``.

    Args:
        source: a data file, a folder of data files or one that ``datasets`` wrote, a name for ``datasets.load_dataset``
            ("name" or "name:configuration"), "reasoning_gym:NAME", or an object that holds rows (see ``_from_memory``).
        where: what errors call the data.
        split: the split of a folder, a name or a ``datasets.DatasetDict``.

    Raises:
        DataError: the source does not exist, cannot be read, or has no rows.
    """
    if not isinstance(source, str):
        return _from_memory(source, where, split)
    if source.startswith(PREFIX):
        return list(procedural_rows(source)())
    files = _data_files(source, split)
    if files is None:
        return _from_memory(*_load_dataset(source, split, streaming=False), split)
    tables = [read_file(file) for file in files]
    if all(isinstance(table, pyarrow.Table) for table in tables):
        try:
            return pyarrow.concat_tables(tables, promote_options="default")
        except pyarrow.ArrowException as error:
            raise DataError(f"the files of {source} do not go together: {error}") from None
    return [row for rows in tables for row in (rows.to_pylist() if isinstance(rows, pyarrow.Table) else rows)]


def open_source(source: Any, where: str, split: str) -> Opener:
    """Passes over the rows of a source that never read it as a whole; see ``read_source``.

    Raises:
        DataError: as ``read_source``, or the source is a .json file. The content of a row is checked when it is read.
    """
    if isinstance(source, str) and source.startswith(PREFIX):
        return procedural_rows(source)
    if isinstance(source, str):
        files = _data_files(source, split)
        for file in files or []:
            if file_format(file) == ".json":
                raise DataError(f"cannot stream {file}, a single JSON value: write it as .jsonl, or unset streaming")
        if files is not None:
            return _passes(files)
        source, where = _load_dataset(source, split, streaming=True)
    if not is_stream(source):
        source = RowTable.of(_from_memory(source, where, split), {}, where)
    elif hasattr(source, "with_format"):  # an IterableDataset: without its format, rows are plain dicts
        source = source.with_format(None)
    return lambda: _errors_named(iter(source), where)


def _passes(files: Sequence[Path]) -> Opener:
    """Passes over the rows of files, which must stay as they are at the first one.

    Raises:
        DataError: when rows are read, a file is gone, or has another size or time of change than at first. The rows
            before it are those of a run's earlier steps, which a resumed run reads again.
    """
    first = {file: _size_and_time(file) for file in files}

    def check(file: Path) -> None:
        if _size_and_time(file) != first[file]:
            raise DataError(
                f"{file} has changed since this run began to read it: put the former file back, or start a new run"
            )

    def rows() -> Iterator[Row]:
        for file in files:
            check(file)
            yield from iterate_file(file)
            check(file)

    return rows


def _size_and_time(file: Path) -> tuple[int, int]:
    with _explained(file):
        state = file.stat()
    return state.st_size, state.st_mtime_ns


def is_stream(rows: Any) -> bool:
    """Whether the rows are re-iterable and without a length, like those of a ``datasets.IterableDataset``."""
    return hasattr(rows, "__iter__") and not hasattr(rows, "__next__") and not hasattr(rows, "__len__")


def select_split(rows: Any, where: str, split: str) -> Any:
    """The split of a ``DatasetDict``; anything else is returned unchanged.

    Raises:
        DataError: there is no such split.
    """
    # Compared by name: importing ``datasets`` takes a second, and nobody else may have imported it.
    if not {"DatasetDict", "IterableDatasetDict"} & {base.__name__ for base in type(rows).__mro__}:
        return rows
    if split not in rows:
        remedy = "Set data.train_split or data.eval_split, or pass one of the splits"
        raise DataError(f"{where} has no split {split!r}; it has: {', '.join(map(str, rows))}. {remedy}")
    return rows[split]


def _from_memory(rows: Any, where: str, split: str) -> Any:
    """Rows given in Python: a list of mappings, a table of pandas, polars or pyarrow, a ``datasets.Dataset``, or any
    object with a length and rows by index.

    Raises:
        DataError: ``rows`` is none of these, is empty, or has a row that is not a mapping.
    """
    rows = select_split(rows, where, split)
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):  # pandas, where a missing value is NaN or NaT
        if not rows.columns.is_unique:
            raise DataError(f"{where} has two columns {rows.columns[rows.columns.duplicated()][0]!r}")
        rows = [plain(row) for row in rows.astype(object).where(rows.notna(), None).to_dict("records")]
    elif hasattr(rows, "to_dicts"):  # polars
        rows = rows.to_dicts()
    if isinstance(rows, str | Mapping) or not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        like = "like a list of dicts or a datasets.Dataset"
        raise DataError(f"{where} must have a length and rows by index, {like}; got {type(rows).__name__}")
    if len(rows) == 0:
        raise DataError(f"{where} has no rows")
    if hasattr(rows, "column_names"):  # of pyarrow or datasets; a transform of the user's is a "custom" format
        formatted = hasattr(rows, "with_format") and rows.format["type"] not in (None, "custom")
        return rows.with_format(None) if formatted else rows
    try:
        listed = list(rows) if isinstance(rows, list | tuple) else [rows[index] for index in range(len(rows))]
    except LookupError:
        raise DataError(f"{where} must give its rows by index; a {type(rows).__name__} does not") from None
    if other := [index for index, row in enumerate(listed) if not isinstance(row, Mapping)]:
        kind = type(listed[other[0]]).__name__
        raise DataError(f"{where} must hold one mapping of columns per row; row {other[0]} is {kind}")
    return listed


def _data_files(source: str, split: str) -> list[Path] | None:
    """The data files that a path names; None if it is for ``datasets`` to load.

    Raises:
        DataError: the path names a file that does not exist, or as ``folder_files``.
    """
    try:
        path = Path(shipped(source, "data set", DataError)).expanduser()
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # the name is too long, or its user does not exist
        raise DataError(f"cannot look for a file {source!r:.80}: {error!s:.80}") from None
    if is_file:
        return [path]
    if path.is_dir():
        saved = (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()
        return None if saved else folder_files(path, split)
    if file_format(path) or path.is_absolute() or source.startswith((".", "~")):
        raise DataError(f"no data file {path}" + ("" if path.is_absolute() else f" (looked in {Path.cwd()})"))
    return None


def _load_dataset(source: str, split: str, *, streaming: bool) -> tuple[Any, str]:
    """A folder that ``save_to_disk`` wrote, or a data set by name; and what errors call it."""
    import datasets

    try:
        if Path(source).expanduser().is_dir():
            return datasets.load_from_disk(str(Path(source).expanduser())), source
        repository, _, configuration = source.partition(":")
        with _without_attempts(repository):
            found = datasets.load_dataset(repository, configuration or None, split=split, streaming=streaming)
        return found, f"the data set {source!r}, split {split!r},"
    except Exception as error:  # datasets raises many kinds: missing, offline, several configurations, no such split
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"cannot load the data set {source!r}, split {split!r} (a name that is no file or folder in {Path.cwd()} "
            f"is looked up on the Hugging Face hub; without a network, only cached data sets can be loaded): {detail}"
        ) from error


@contextmanager
def _without_attempts(repository: str) -> Iterator[None]:
    """Let ``datasets`` look only into its cache where the hub cannot be reached: it would try for half a minute."""
    import datasets
    import huggingface_hub

    with ExitStack() as stack:
        try:
            huggingface_hub.HfApi().dataset_info(repository, timeout=HUB_SECONDS)
        except Exception as error:  # of one of several HTTP libraries; load_dataset explains others better
            if UNREACHABLE & {kind.__name__ for kind in type(error).__mro__}:
                for settings in (huggingface_hub.constants, datasets.config):
                    stack.enter_context(mock.patch.object(settings, "HF_HUB_OFFLINE", True))
        yield


def _errors_named(rows: Iterator[Any], where: str) -> Iterator[Any]:
    """The rows; an exception of the user's own code becomes an error that names the row."""
    number = 0
    try:
        for row in rows:
            yield row
            number += 1
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"{where}, row {number}: reading it raised {type(error).__name__}: {error}") from error


def file_format(path: Path) -> str | None:
    """The suffix of a data file, without the compression; None if the file cannot be read."""
    suffix = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
    return suffix if suffix in READERS and (suffix != ".parquet" or path.suffix == suffix) else None


def read_file(path: Path) -> list[Row] | pyarrow.Table:
    """All rows of a file; of a Parquet file as a table, whose rows become Python objects only when they are used.

    Raises:
        DataError: the file cannot be read, a line is invalid, or there are no rows.
    """
    if file_format(path) == ".parquet":
        with _explained(path):
            rows = pyarrow.parquet.read_table(path)
    else:
        rows = list(iterate_file(path))
    if not len(rows):  # noqa: PLC1802 (the truth value of a table is not its length)
        raise DataError(f"{path} has no rows")
    return rows


def iterate_file(path: Path) -> Iterator[Row]:
    """The rows of a file, read one after another (of a .json file, at once).

    Raises:
        DataError: as ``read_file``; an unsupported format raises before the first row is read.
    """
    reader = READERS.get(file_format(path) or "")
    if reader is None:
        raise DataError(f"cannot read {path}: expected a {EXPECTED}, which may be compressed ({', '.join(COMPRESSED)})")
    return reader(path)


def folder_files(folder: Path, split: str) -> list[Path]:
    """The data files of a folder (or of its only subfolder), sorted by name.

    If file names begin with a split ("train", "test", "validation"), only the files of ``split`` are returned. An exact
    match goes before a synonym ("dev" for "validation").

    Raises:
        DataError: there are no files, no files of the split, unreadable files, several subfolders, or files with and
            without a split in their names.
    """
    entries = sorted(path for path in folder.iterdir() if not path.name.lower().startswith(IGNORED))
    files = [path for path in entries if path.is_file()]
    subfolders = [path for path in entries if path.is_dir()]
    if unreadable := [path for path in files if file_format(path) is None]:
        raise DataError(
            f"cannot read {unreadable[0]}: every file of a data folder must be a {EXPECTED} "
            "(compressed or not; README, LICENSE and names that begin with '.' or '_' are ignored)"
        )
    if len(subfolders) == 1 and not files:
        return folder_files(subfolders[0], split)
    if subfolders:
        names = _names(subfolders)
        raise DataError(f"the folder {folder} has subfolders ({names}): set one as the path, or list them as sources")
    if not files:
        raise DataError(f"the folder {folder} has no data files: expected at least one {EXPECTED}")
    first_words = {path: re.split("[-_.]", path.name.lower())[0] for path in files}
    with_split = [path for path in files if first_words[path] in SPLITS]
    if not with_split:
        if split not in ("train", "test"):
            raise DataError(f"the folder {folder} has no split {split!r}: no file name has one ({_names(files)})")
        return files
    if others := [path for path in files if path not in with_split]:
        raise DataError(
            f"{folder}: the names of some files begin with a split ({_names(with_split)}), others do not "
            f"({_names(others)}). Move them to separate folders, or list the files to use as sources"
        )
    exact = [path for path in files if first_words[path] == split]
    if found := exact or [path for path in files if SPLITS[first_words[path]] == SPLITS.get(split)]:
        return found
    known = ", ".join(sorted({SPLITS[word] for word in first_words.values()}))
    raise DataError(f"the folder {folder} has no split {split!r}; it has: {known}. Set data.train_split or eval_split")


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {path}: {error}") from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The decompressed lines and their numbers, from 1; without a byte order mark."""
    with _explained(path), pyarrow.input_stream(path) as stream:
        for number, line in enumerate(io.BufferedReader(stream, READ_BYTES), start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not UTF-8: {error.reason} at byte {error.start}") from None


def _iterate_jsonl(path: Path) -> Iterator[Row]:
    for number, line in read_lines(path):
        if line.isspace():
            continue
        where = f"{path}, line {number}"
        yield _checked_row(_parse_json(line.rstrip("\r\n"), where), where)  # the end could move an error's position


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # not JSONDecodeError alone: an integer may have too many digits
        raise DataError(f"{where}: not valid JSON: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys must differ: which of two values a reader takes is not defined."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r:.80} occurs twice in an object")
    return found


def _checked_row(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with columns, got {type(row).__name__}")
    return row


def _iterate_json(path: Path) -> Iterator[Row]:
    """A list of objects, an object of columns, or either under the single key "data"."""
    value = _parse_json("".join(line for _, line in read_lines(path)), str(path))
    if isinstance(value, dict) and value.keys() == {"data"}:
        inner = value["data"]  # a list of anything but objects is a column named "data"
        if isinstance(inner, dict) or (isinstance(inner, list) and (not inner or isinstance(inner[0], dict))):
            value = inner
    if isinstance(value, list):
        yield from (_checked_row(row, f"{path}, item {index}") for index, row in enumerate(value))
    elif isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        if len({len(column) for column in value.values()}) > 1:
            lengths = ", ".join(f"{name} {len(column)}" for name, column in value.items())
            raise DataError(f"{path}: the columns have different lengths: {lengths}")
        yield from (dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True))
    else:
        raise DataError(
            f"{path}: expected a list of objects, an object of columns (lists of the same length), or either under the "
            f'key "data"; got {"an object" if isinstance(value, dict) else type(value).__name__}'
        )


def _iterate_csv(path: Path) -> Iterator[Row]:
    """Every value stays the string that the file holds: "007" is an answer, not a number."""
    csv.field_size_limit(MAX_CSV_CELL)
    reader = csv.reader((line for _, line in read_lines(path)), strict=True)
    try:
        header = next(reader, [])
        if not header:
            raise DataError(f"{path} has no rows")
        if len(set(header)) < len(header) or "" in header:
            raise DataError(f"{path}: the header must name each column once, got {header!r:.200}")
        for cells in filter(None, reader):  # a blank line has no cells
            if len(cells) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(cells)} values for {len(header)} columns "
                    f"({', '.join(header)}): quote values that contain commas"
                )
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from None


def _iterate_parquet(path: Path) -> Iterator[Row]:
    with _explained(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(1000):
            yield from batch.to_pylist()


READERS = {".jsonl": _iterate_jsonl, ".json": _iterate_json, ".csv": _iterate_csv, ".parquet": _iterate_parquet}
