"""Rows from where the user has them: files, folders, data sets by name, or objects in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow

from cohort.data.files import Row, file_format, folder_files, iterate_file, read_file
from cohort.data.rows import RowTable, plain
from cohort.errors import DataError

Opener = Callable[[], Iterator[Row]]
"""Starts a new pass over streamed rows."""


def load_rows(path: str) -> Sequence[Row]:
    """Rows of a file, a folder or a data set by name; see ``read_source``."""
    return RowTable.of(read_source(path, path, "train"), {}, path)


def read_source(source: Any, where: str, split: str) -> Any:
    """All rows of a source: a list of mappings, a ``pyarrow.Table`` or a ``datasets.Dataset``.

    Args:
        source: a data file, a folder of data files or one that ``datasets`` wrote, a name for ``datasets.load_dataset``
            ("name" or "name:configuration"), or an object that holds rows (see ``_from_memory``).
        where: what errors call the data.
        split: the split of a folder, a name or a ``datasets.DatasetDict``.

    Raises:
        DataError: the source does not exist, cannot be read, or has no rows.
    """
    if not isinstance(source, str):
        return _from_memory(source, where, split)
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
    if isinstance(source, str):
        files = _data_files(source, split)
        for file in files or []:
            if file_format(file) == ".json":
                raise DataError(f"cannot stream {file}, a single JSON value: write it as .jsonl, or unset streaming")
        if files is not None:
            return lambda: itertools.chain.from_iterable(map(iterate_file, files))
        source, where = _load_dataset(source, split, streaming=True)
    if not is_stream(source):
        source = RowTable.of(_from_memory(source, where, split), {}, where)
    elif hasattr(source, "with_format"):  # an IterableDataset: without its format, rows are plain dicts
        source = source.with_format(None)
    return lambda: _explained(iter(source), where)


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
        raise DataError(
            f"{where} has no split {split!r}; it has: {', '.join(map(str, rows))}. Set data.train_split or "
            "data.eval_split, or pass one of the splits"
        )
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
        raise DataError(
            f"{where} must have a length and rows by index, like a list of dicts or a datasets.Dataset; "
            f"got {type(rows).__name__}"
        )
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
        path = Path(source).expanduser()
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
        found = datasets.load_dataset(repository, configuration or None, split=split, streaming=streaming)
        return found, f"the data set {source!r}, split {split!r},"
    except Exception as error:  # datasets raises many kinds: missing, offline, several configurations, no such split
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"cannot load the data set {source!r}, split {split!r} (a name that is no file or folder in {Path.cwd()} "
            f"is looked up on the Hugging Face hub; without a network, only cached data sets can be loaded): {detail}"
        ) from error


def _explained(rows: Iterator[Any], where: str) -> Iterator[Any]:
    """The rows; an exception of the user's own code becomes an error that names the row."""
    for number in itertools.count():
        try:
            row = next(rows)
        except StopIteration:
            return
        except DataError:
            raise
        except (Exception, SystemExit) as error:
            raise DataError(f"{where}, row {number}: reading it raised {type(error).__name__}: {error}") from error
        yield row
