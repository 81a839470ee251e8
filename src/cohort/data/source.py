"""Rows from where the user has them: files, folders, data sets by name, or objects in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.data.files import Row, folder_files, iterate_file, read_file, readable
from cohort.data.rows import Rows, plain
from cohort.errors import DataError

Opener = Callable[[], Iterator[Row]]
"""Begins a new pass over rows that are not all read."""


def load_rows(source: str, *, split: str = "train", limit: int | None = None) -> Sequence[Row]:
    """Rows of a file, a folder or a data set by name, as a sequence.

    Args:
        source: see ``read_path``.
        split: which split, for a folder or a name.
        limit: the first so many rows only.

    Raises:
        DataError: no such file or data set, or a line that cannot be read (named by its number).
    """
    rows = Rows.of(read_path(source, split), {}, source)
    return rows if limit is None else rows.take(slice(limit))


def read_path(source: str, split: str) -> Any:
    """All rows of a source: a list of mappings, a ``pyarrow.Table`` or a ``datasets.Dataset``.

    Args:
        source: a .jsonl, .json, .csv or .parquet file (packed or not), a folder of such files or one that ``datasets``
            wrote, or a name for ``datasets.load_dataset`` ("name" or "name:configuration").
        split: which split, for a folder or a name.

    Raises:
        DataError: it is not there or cannot be read, or has no rows.
    """
    path = _path(source)
    if _is_file(path, source):
        return read_file(path)
    if not path.is_dir():
        return from_memory(_load_named(source, split), f"the data set {source!r}, split {split!r},", split)
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        import datasets

        return from_memory(_or_explained(source, datasets.load_from_disk, str(path)), str(path), split)
    return _united([read_file(file) for file in folder_files(path, split)], path)


def open_path(source: str, split: str) -> Opener:
    """The rows of a source one after another, without reading all of it.

    Raises:
        DataError: as ``read_path``; what a line holds is seen when it is reached.
    """
    path = _path(source)
    if _is_file(path, source):
        iterate_file(path)  # refuses what cannot be streamed
        return lambda: iterate_file(path)
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            rows = read_path(source, split)  # mapped into memory, not read
            return lambda: iter(rows)
        files = folder_files(path, split)
        for file in files:
            iterate_file(file)
        return lambda: itertools.chain.from_iterable(map(iterate_file, files))
    return passes_over(_load_named(source, split, streaming=True), f"the data set {source!r}")


def from_memory(rows: Any, what: str, split: str) -> Any:
    """Rows given in Python as a list of mappings, a ``pyarrow.Table`` or a ``datasets.Dataset``.

    Args:
        rows: one of these, a table of pandas or polars, anything else with a length and rows by index, or a
            ``datasets.DatasetDict``.
        what: what errors call it.
        split: which split of a ``DatasetDict``.

    Raises:
        DataError: it is none of them, has no rows, or rows that are not mappings.
    """
    rows = of_split(rows, what, split)
    if hasattr(rows, "iloc") and hasattr(rows, "columns"):  # of pandas; its missing values are NaN or NaT
        if not rows.columns.is_unique:
            raise DataError(f"{what} has two columns {rows.columns[rows.columns.duplicated()][0]!r}")
        rows = [plain(row) for row in rows.astype(object).where(rows.notna(), None).to_dict("records")]
    elif hasattr(rows, "to_dicts"):  # of polars
        rows = rows.to_dicts()
    if isinstance(rows, str | Mapping) or not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise DataError(
            f"{what} must have a length and rows by index, like a list of dicts or a datasets.Dataset; "
            f"got {type(rows).__name__}"
        )
    if len(rows) == 0:
        raise DataError(f"{what} has no rows")
    if hasattr(rows, "to_pylist") and hasattr(rows, "column_names"):
        return rows
    if hasattr(rows, "column_names") and hasattr(rows, "with_format"):
        return rows.with_format(None) if rows.format["type"] not in (None, "custom") else rows
    try:
        listed = list(rows) if isinstance(rows, list | tuple) else [rows[index] for index in range(len(rows))]
    except LookupError:
        raise DataError(f"{what} must give its rows by index; a {type(rows).__name__} does not") from None
    for index, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise DataError(f"{what} must hold one mapping of columns per row; row {index} is {type(row).__name__}")
    return listed


def passes_over(rows: Any, what: str) -> Opener:
    """Begins passes over rows. Those of a ``datasets.IterableDataset`` are plain dicts, whatever its format.

    Raises:
        DataError: at a row that cannot be read.
    """
    formatted = is_stream(rows) and hasattr(rows, "with_format")
    return lambda: explained(iter(rows.with_format(None) if formatted else rows), what)


def explained(rows: Iterator[Any], what: str) -> Iterator[Any]:
    """The rows, with what is raised as one of them is read as an error of ours."""
    for number in itertools.count():
        try:
            row = next(rows)
        except StopIteration:
            return
        except DataError:
            raise
        except (Exception, SystemExit) as error:  # of the user's own function
            raise DataError(f"{what}, row {number}: reading it raised {type(error).__name__}: {error}") from error
        yield row


def is_stream(rows: Any) -> bool:
    """Whether it is a ``datasets.IterableDataset`` or the like: passes over it can be begun, but it has no length."""
    return hasattr(rows, "__iter__") and not hasattr(rows, "__next__") and not hasattr(rows, "__len__")


def of_split(rows: Any, what: str, split: str) -> Any:
    """The split of a ``DatasetDict``; anything else as it is.

    Raises:
        DataError: it has no such split.
    """
    if not any(  # known by its name: ``datasets`` need not have been imported
        base.__name__ in ("DatasetDict", "IterableDatasetDict") for base in type(rows).__mro__
    ):
        return rows
    if split not in rows:
        raise DataError(
            f"{what} has no split {split!r}; it has: {', '.join(map(str, rows))}. Set data.train_split or "
            "data.eval_split, or give one of them"
        )
    return rows[split]


def _path(source: str) -> Path:
    """Where a file or folder of that name would be; looked at once, as no system takes every name."""
    try:
        path = Path(source).expanduser()
        path.is_file()
    except (OSError, RuntimeError) as error:  # too long a name, no such user
        raise DataError(f"cannot look for a file {source!r:.80}: {error!s:.80}") from None
    return path


def _is_file(path: Path, source: str) -> bool:
    if path.is_file():
        if not readable(path):
            iterate_file(path)  # says what can be read
        return True
    if path.is_dir():
        return False
    if readable(path) or path.is_absolute() or source.startswith((".", "~")):
        raise DataError(f"no data file {path}" + ("" if path.is_absolute() else f" (looked in {Path.cwd()})"))
    return False


def _united(read: Sequence[Any], folder: Path) -> Any:
    """The rows of several files as one source. A column that a file lacks is missing in its rows."""
    if len(read) == 1:
        return read[0]
    if all(hasattr(rows, "to_pylist") for rows in read):
        import pyarrow

        try:
            return pyarrow.concat_tables(read, promote_options="default")
        except pyarrow.ArrowException as error:
            raise DataError(f"the files of {folder} do not go together: {error}") from None
    return [row for rows in read for row in (rows.to_pylist() if hasattr(rows, "to_pylist") else rows)]


def _load_named(name: str, split: str, *, streaming: bool = False) -> Any:
    import datasets

    repository, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(repository, configuration or None, split=split, streaming=streaming)
    except Exception as error:  # the library raises many kinds: missing, offline, several configurations, bad split
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"cannot load the data set {name!r}, split {split!r} (there is no file or folder of that name in "
            f"{Path.cwd()}, so it is taken for a hub's; without a network only what is cached can be loaded): {detail}"
        ) from error


def _or_explained(name: str, load: Callable[[str], Any], path: str) -> Any:
    try:
        return load(path)
    except Exception as error:  # as above
        raise DataError(f"cannot load the data set in {name}: {error}") from error
