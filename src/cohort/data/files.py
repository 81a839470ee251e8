"""Rows of files and folders: .jsonl, .json, .csv and .parquet, whole or one after another.

A row's place in its file is what errors name: a line's number where there are lines.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cohort.errors import DataError

Row = Mapping[str, Any]

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
PACKED = (".gz", ".zst")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
"""How the names of a folder's files begin where each split has its own, and which split that is."""
IGNORED = ("readme", "license", "licence", "dataset_infos")
MOST_CELL = 2**31 - 1
"""Characters of a CSV cell; the library's own limit is 131,072."""


def readable(path: Path) -> bool:
    """Whether the name is one of a file that can be read."""
    return _kind(path) is not None


def read_file(path: Path) -> Any:
    """All rows of a file: a list of dicts, or a ``pyarrow.Table``, which holds its rows packed.

    Raises:
        DataError: it cannot be read, a line of it is not what it should be, or it has no rows.
    """
    rows: Any
    if _kind(path) == ".parquet":
        import pyarrow.parquet

        with _explained(path):
            rows = pyarrow.parquet.read_table(path)
    else:
        rows = _read_json(path) if _kind(path) == ".json" else list(iterate_file(path))
    if not len(rows):
        raise DataError(f"{path} has no rows")
    return rows


def iterate_file(path: Path) -> Iterator[Row]:
    """The rows of a file one after another, without reading all of it.

    Raises:
        DataError: as ``read_file``; and a .json file, which is one value, cannot be read so.
    """
    match _kind(path):
        case ".jsonl":
            return _iterate_jsonl(path)
        case ".csv":
            return _iterate_csv(path)
        case ".parquet":
            return _iterate_parquet(path)
        case ".json":
            raise DataError(f"cannot stream {path}, which is one JSON value: write it as .jsonl, or unset streaming")
        case _:
            raise DataError(
                f"cannot read {path}: expected a {_named()} file, which may be packed ({', '.join(PACKED)})"
            )


def folder_files(folder: Path, split: str) -> list[Path]:
    """The data files of a folder, by name; of its only subfolder, where it has nothing else. Where their names begin
    with a split's ("train", "test", "validation"), those of the split: those that call it as it is asked for, or else
    those that call it otherwise ("dev").

    Raises:
        DataError: there is none, none of the split, one that cannot be read, several subfolders have some, or the names
            of some begin with a split's and those of others do not.
    """
    entries = sorted(path for path in folder.iterdir() if not _ignored(path))
    found = [path for path in entries if path.is_file()]
    subfolders = [path for path in entries if path.is_dir()]
    if unreadable := [path for path in found if not readable(path)]:
        raise DataError(
            f"cannot read {unreadable[0]}: every file of a data folder must be a {_named()} file "
            f"(packed or not; README, LICENSE and names that begin with '.' or '_' are passed over)"
        )
    if len(subfolders) == 1 and not found:
        return folder_files(subfolders[0], split)
    if subfolders:
        names = ", ".join(path.name for path in subfolders)
        raise DataError(
            f"the folder {folder} has subfolders ({names}): give the one with the data, or each as a source"
        )
    if not found:
        raise DataError(f"the folder {folder} has no data files: expected {_named()} files")
    named = [path for path in found if _split_word(path) in SPLITS]
    if not named and split not in ("train", "test"):
        listed = ", ".join(path.name for path in found)
        raise DataError(
            f"the folder {folder} has no splits by the names of its files ({listed}), so it has no {split!r}"
        )
    if not named:
        return found
    if others := [path.name for path in found if path not in named]:
        raise DataError(
            f"{folder}: the names of some files begin with a split's ({', '.join(path.name for path in named)}), those "
            f"of others do not ({', '.join(others)}): which are meant? Put them into folders of their own, or give "
            "files as sources"
        )
    if chosen := [path for path in named if _split_word(path) == split]:
        return chosen
    if chosen := [path for path in named if SPLITS[_split_word(path)] == SPLITS.get(split)]:
        return chosen
    names = ", ".join(sorted({SPLITS[_split_word(path)] for path in named}))
    raise DataError(f"the folder {folder} has no split {split!r}; it has: {names}. Set data.train_split or eval_split")


def _kind(path: Path) -> str | None:
    suffix = Path(path.stem).suffix if path.suffix in PACKED else path.suffix
    packed_parquet = suffix == ".parquet" and path.suffix in PACKED
    return suffix if suffix in SUFFIXES and not packed_parquet else None


def _named() -> str:
    return ", ".join(SUFFIXES[:-1]) + " or " + SUFFIXES[-1]


def _ignored(path: Path) -> bool:
    return path.name.lower().startswith((".", "_", *IGNORED))


def _split_word(path: Path) -> str:
    return path.name.lower().replace("-", ".").replace("_", ".").split(".")[0]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of reading, as one of ours with the file's name."""
    import zlib

    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    """A file's bytes, unpacked."""
    with _explained(path):
        if path.suffix == ".gz":
            with gzip.open(path) as unpacked:
                yield unpacked
        elif path.suffix == ".zst":
            import pyarrow

            with pyarrow.input_stream(str(path), compression="zstd") as stream:
                yield io.BufferedReader(stream)
        else:
            with path.open("rb") as file:
                yield file


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """A text file's lines with their numbers, from 1; a byte order mark, with which some editors begin, left out."""
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not UTF-8 text: {error.reason} at byte {error.start}"
                ) from None


def _iterate_jsonl(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        if line.isspace():
            continue
        try:
            row = json.loads(line.rstrip("\r\n"))  # else an error's place may be in a next line
        except (ValueError, RecursionError) as error:  # a number of too many digits is a ValueError of another kind
            raise DataError(f"{path}, line {number}: not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected an object with columns, got {type(row).__name__}")
        yield row


def _read_json(path: Path) -> Sequence[Row]:
    """A list of objects, an object of columns, or either under the single key "data"."""
    text = "".join(line for _, line in _lines(path))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from None
    if isinstance(value, dict) and value.keys() == {"data"} and isinstance(value["data"], list | dict):
        inner = value["data"]
        value = inner if isinstance(inner, dict) or not inner or isinstance(inner[0], dict) else value
    if isinstance(value, list):
        for index, row in enumerate(value):
            if not isinstance(row, dict):
                raise DataError(f"{path}, item {index}: expected an object with columns, got {type(row).__name__}")
        return value
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        lengths = {name: len(column) for name, column in value.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(f"{path}: the columns are of different lengths: {said}")
        return [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    raise DataError(
        f"{path}: expected a list of objects, an object of columns (lists of the same length), or either under the "
        f'key "data"; got {"an object" if isinstance(value, dict) else type(value).__name__}'
    )


def _iterate_csv(path: Path) -> Iterator[Row]:
    """Every value is a string as it stands in the file: what looks like a number may be an answer with its zeros."""
    csv.field_size_limit(MOST_CELL)
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    try:
        header = next(reader, [])
        if not header:
            raise DataError(f"{path} has no rows")
        if len(set(header)) < len(header) or "" in header:
            raise DataError(f"{path}: the header must name each column once, got {header!r:.200}")
        for cells in reader:
            if not cells:  # a blank line
                continue
            if len(cells) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(cells)} values for {len(header)} columns "
                    f"({', '.join(header)}): quote values that hold commas"
                )
            yield dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from None


def _iterate_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    with _explained(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(1000):
            yield from batch.to_pylist()
