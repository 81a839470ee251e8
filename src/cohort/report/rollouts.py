"""Read ``rollouts/step-N.parquet``: the completions of a step, with what the updates saw of each token.

Anybody can have written the file: what is read is of the documented types (``docs/store.md``), and of a bounded size.
Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray
from pyarrow import types

from cohort.columns import FACTS_KEY, PER_DRAWN_TOKEN, STORE_VERSION, TOKEN_NUMBERS, VERSION_KEY
from cohort.errors import RunFolderError

MAX_BYTES, MAX_ROWS = 2**31, 2**24
"""Memory of the columns that are read of a file, and completions of a file."""
BATCH_ROWS = 256
LIST = re.compile(r"\.list\.(element|item)$")
"""What follows the name of a column of lists in its path."""

TYPES: dict[str, Callable[[Any], bool]] = {
    "text": lambda kind: types.is_string(kind) or types.is_large_string(kind),
    "whole numbers": types.is_integer,
    "numbers": lambda kind: types.is_floating(kind) or types.is_integer(kind),
    "booleans": types.is_boolean,
    "anything": lambda _: True,
}
"""Checks of types by their names in words."""
LISTS_OF_INTEGERS = (
    *("prompt_ids", "token_ids", "segment_lengths", "turn_lengths"),
    *("support/token_ids", "support/counts"),
)
WITH_GAPS = ("no_gradient", "turn_rewards")
"""Columns of lists whose entries may be null."""
CHECKS = {
    **dict.fromkeys(("prompt", "completion", "finish_reason", "source", "messages"), "text"),
    **dict.fromkeys(("episode_error", "reward_error"), "text"),
    **dict.fromkeys(("group", "row", "weights_version", "minibatch", "update"), "whole numbers"),
    **dict.fromkeys(("reward", "advantage", "environment_reward"), "numbers"),
    **dict.fromkeys(LISTS_OF_INTEGERS, "lists of whole numbers"),
    **dict.fromkeys((*TOKEN_NUMBERS, "turn_rewards", "seconds/turns"), "lists of numbers"),
    **dict.fromkeys(("drawn", "support/excluded"), "lists of booleans"),
    "no_gradient": "lists of text",
}
"""What the columns hold, in words."""
PREFIXES = {"rewards/": "numbers", "seconds/reward/": "numbers", "extra/": "anything"}
"""What the columns whose names begin so hold."""


def _holds(kind: Any, words: str) -> bool:
    """Whether a type of arrow is what the words say; a column of nulls is anything."""
    if words.startswith("lists of ") and (types.is_list(kind) or types.is_large_list(kind)):
        return _holds(kind.value_type, words.removeprefix("lists of "))
    return types.is_null(kind) or (words in TYPES and TYPES[words](kind))


@dataclass(frozen=True, slots=True)
class StoredStep:
    """Completions of a step: some columns and rows of its file."""

    path: Path
    num_rows: int
    """Completions in the file."""
    names: tuple[str, ...]
    """All columns of the file that ``docs/store.md`` knows."""
    rows: Sequence[int]
    """The numbers of the rows that were read."""
    table: pyarrow.Table
    """The columns that were asked for and that the file has."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What holds for the whole step; empty for a table of an evaluation."""

    @classmethod
    def read(
        cls, path: str | Path, columns: Collection[str] | None = None, rows: Collection[int] | None = None
    ) -> StoredStep:
        """Read a file.

        Args:
            path: ``rollouts/step-N.parquet``.
            columns: names of columns; those that the file does not have are left out. None: all.
            rows: numbers of rows, from 0; None: all. They are returned in the file's order.

        Raises:
            RunFolderError: the file cannot be read, is damaged, is of a later version, has columns of other types, or
                is larger than ``MAX_BYTES``; or it has no such row.
        """
        path = Path(path)
        with _damage_named(path):
            if not path.is_file():
                raise OSError("it is not a file" if path.exists() else "it is missing")
            with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as file:
                facts = _facts(file.schema_arrow.metadata or {})
                names = _checked_names(file.schema_arrow)
                chosen = [name for name in names if columns is None or name in columns]
                count = file.metadata.num_rows
                if not 0 <= count <= MAX_ROWS:
                    raise ValueError(f"it has {count:,} rows, and a step has at most {MAX_ROWS:,} completions")
                numbers = list(range(count)) if rows is None else sorted(set(rows))
                if numbers and not 0 <= numbers[0] <= numbers[-1] < count:
                    raise ValueError(f"row {numbers[-1]} was asked for, and it has {count} rows")
                table = _read(file, chosen, numbers)
            if chosen and table.num_rows != len(numbers):
                raise ValueError(f"it says that it has {count:,} rows, and {table.num_rows:,} can be read")
            _check_values(table, names)
            return cls(path, count, tuple(names), numbers, table, facts)

    def __len__(self) -> int:
        """The number of rows that were read."""
        return len(self.rows)

    @property
    def step(self) -> int | None:
        """The step, from 1; None if neither the file nor its name says it."""
        number = self.facts.get("step", self.path.stem.removeprefix("step-"))
        return int(number) if str(number).isdecimal() else None

    def __contains__(self, name: object) -> bool:
        """Whether a column was read."""
        return name in self.table.column_names

    def values(self, name: str) -> list[Any]:
        """A column's values in Python's types; None in each row if it was not read."""
        return self.table.column(name).to_pylist() if name in self else [None] * len(self)

    def arrays(self, name: str) -> list[NDArray[Any] | None]:
        """A column of lists of numbers as arrays of its own dtype; None where the list is null."""
        if name not in self:
            return [None] * len(self)
        found: list[NDArray[Any] | None] = []
        column = self.table.column(name)
        if types.is_null(column.type) or types.is_null(column.type.value_type):
            column = column.cast(pyarrow.list_(pyarrow.float64()))
        for chunk in column.chunks:
            flat, offsets = chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()
            nulls = chunk.is_null().to_numpy(zero_copy_only=False)
            pieces = zip(offsets[:-1].tolist(), offsets[1:].tolist(), nulls.tolist(), strict=True)
            found += [None if null else flat[start:end] for start, end, null in pieces]
        return found


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raise what reading a damaged file raises as ``RunFolderError``."""
    try:
        yield
    except (OSError, ValueError, LookupError, ArithmeticError, RecursionError, pyarrow.ArrowException) as e:
        text = str(e).splitlines()[0] if str(e) else repr(e)
        raise RunFolderError(f"cannot read {path}: {text:.300}") from None


def _facts(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """The facts of the step, of a file whose version of the store is known."""
    version = int(metadata.get(VERSION_KEY.encode(), b"0"))
    if version > STORE_VERSION:
        raise ValueError(f"its version is {version}, of a newer Cohort; this one reads up to {STORE_VERSION}")
    facts = json.loads(metadata.get(FACTS_KEY.encode(), b"{}"))
    if not isinstance(facts, dict):
        raise ValueError(f"expected the facts of the step as a JSON object, got {type(facts).__name__}")
    return facts


def _checked_names(schema: pyarrow.Schema) -> list[str]:
    """The names of the known columns, all of them of the documented types."""
    names: list[str] = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        words = CHECKS.get(name) or next((PREFIXES[start] for start in PREFIXES if name.startswith(start)), None)
        if words is None:
            continue
        if name in names:
            raise ValueError(f"two columns have the name {name!r}")
        if not _holds(kind, words):
            raise ValueError(f"column {name!r} holds {kind}; expected {words}")
        names.append(name)
    return names


def _read(file: pyarrow.parquet.ParquetFile, columns: list[str], rows: list[int]) -> pyarrow.Table:
    """Some columns and rows, in batches, so that no more than ``MAX_BYTES`` are held whatever the file claims."""
    next(file.iter_batches(1, columns=columns), None)  # looks at what ``column`` below would end the process for
    _check_claims(file.metadata, set(columns))
    pieces, first, size = [], 0, 0
    wanted = np.array(rows, np.int64)
    for batch in file.iter_batches(BATCH_ROWS, columns=columns) if columns and rows else ():
        within = wanted[(wanted >= first) & (wanted < first + len(batch))] - first
        first += len(batch)
        kept = batch if len(within) == len(batch) else batch.take(pyarrow.array(within))
        size += kept.nbytes
        if size > MAX_BYTES:
            raise ValueError(f"it holds more than {MAX_BYTES:,} bytes: read fewer columns or rows")
        if len(within):
            pieces.append(kept)
    schema = pyarrow.schema([file.schema_arrow.field(name) for name in columns])
    return pyarrow.Table.from_batches(pieces, schema)


def _check_claims(metadata: Any, columns: set[str]) -> None:
    """Check what the file says of its size, before memory is allocated for it."""
    size = 0
    for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
        for column in (group.column(index) for index in range(group.num_columns)):
            if LIST.sub("", column.path_in_schema) in columns:
                size += max(column.total_uncompressed_size, column.num_values)
    if size > MAX_BYTES:
        raise ValueError(f"it holds more than {MAX_BYTES:,} bytes: read fewer columns or rows")


def _check_values(table: pyarrow.Table, names: Collection[str]) -> None:
    """Check that text is UTF-8, that lists have no gaps, and that the lists of a completion fit each other."""
    table.validate(full=True)
    lists = {
        name: table.column(name)
        for name in table.column_names
        if name in CHECKS and not types.is_null(kind := table.schema.field(name).type) and types.is_nested(kind)
    }
    for name, column in lists.items():
        if name not in WITH_GAPS and pyarrow.compute.list_flatten(column).null_count:
            raise ValueError(f"column {name!r} has lists with null entries")
    lengths = {name: pyarrow.compute.list_value_length(column).cast("double") for name, column in lists.items()}
    sums = {name: _sums(lists[name]) for name in ("drawn", "segment_lengths", "support/counts") if name in lists}
    drawn = [name for name in (*PER_DRAWN_TOKEN, "support/counts", "support/excluded") if name in lists]
    segments = [name for name in ("token_ids", "drawn") if name in lists]
    if "drawn" not in names:  # all tokens are drawn
        drawn += segments
    for of_length, of_sum in (
        (drawn, "drawn"),
        (segments, "segment_lengths"),
        (["support/token_ids"], "support/counts"),
    ):
        sizes = {name: lengths[name] for name in of_length if name in lists} | {
            n: sums[n] for n in [of_sum] if n in sums
        }
        _check_equal({name: np.asarray(size, np.float64) for name, size in sizes.items()})


def _sums(column: pyarrow.ChunkedArray) -> NDArray[np.float64]:
    """Sums of the lists of a column, none of whose entries is negative; NaN for null."""
    values = pyarrow.compute.list_flatten(column).cast("double").to_numpy()
    if (values < 0).any():
        raise ValueError("a length is negative")
    lengths = pyarrow.compute.list_value_length(column)
    counts = lengths.fill_null(0).to_numpy()
    sums = np.bincount(np.repeat(np.arange(len(counts)), counts), values, minlength=len(counts))
    return np.where(lengths.is_null().to_numpy(), np.nan, sums)


def _check_equal(sizes: Mapping[str, NDArray[np.float64]]) -> None:
    """Check that numbers of a completion's entries are equal where they are known."""
    known: NDArray[np.float64] | None = None
    for name, size in sizes.items():
        known = size if known is None else known
        wrong = np.flatnonzero(~(np.isnan(size) | np.isnan(known)) & (size != known))
        if len(wrong):
            others = ", ".join(other for other in sizes if other != name)
            raise ValueError(
                f"column {name!r} does not fit {others}: {size[wrong[0]]:g} and {known[wrong[0]]:g} entries"
            )
        known = np.where(np.isnan(known), size, known)
