"""From the settings to the rows of a run: sources, what of each is used, and their shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from cohort.config import DataConfig, Source
from cohort.config.data import parse_slice
from cohort.data.files import Row
from cohort.data.mixture import Turns
from cohort.data.rows import BATCH, Keep, Rows, as_number, check_renames, explain_none_left, make_filter, rename
from cohort.data.source import Opener, from_memory, is_stream, of_split, open_path, passes_over, read_path
from cohort.errors import DataError


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that are read while a run goes on: columns are renamed, then rows filtered, selected and counted."""

    open: Opener
    columns: tuple[str, ...]
    """Of the first rows, renamed."""
    new_names: Mapping[str, str]
    keep: Keep | None
    select: slice
    limit: int | None
    where: str

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """One pass: rows with their numbers in the source.

        Raises:
            DataError: a row cannot be read, or is no mapping.
        """
        used = itertools.islice(self._kept(), self.select.start, self.select.stop, self.select.step)
        return itertools.islice(used, self.limit)

    def _kept(self) -> Iterator[tuple[int, Row]]:
        for number, row in enumerate(self.open()):
            if not isinstance(row, Mapping):
                raise DataError(f"{self.where}, row {number}: expected a mapping of columns, got {type(row).__name__}")
            renamed = rename(row, self.new_names)
            if self.keep is None or self.keep(renamed, f"{self.where}, row {number}"):
                yield number, renamed

    def sample(self, count: int | None = BATCH) -> Rows:
        """The first rows of a pass, or all.

        Raises:
            DataError: there is none.
        """
        first = list(itertools.islice(self, count))
        if not first:
            raise DataError(f"{self.where}: no row is left by data.filter and data.select")
        rows = [row for _, row in first]
        columns = tuple(dict.fromkeys(itertools.chain(self.columns, *rows)))
        return Rows(rows, columns, range(len(rows)), {}, [number for number, _ in first])


@dataclass(frozen=True, slots=True)
class Part:
    """One source of rows."""

    rows: Rows
    """What is used of it; of a stream, the first rows of that."""
    config: DataConfig
    """How they become prompts: the settings with the source's own laid over them."""
    name: str
    """Empty where the data has one source only."""
    where: str
    """What errors call it."""
    weight: Fraction | None
    said: str
    """In words: how many rows, and how many each setting left."""
    stream: Stream | None = None


@dataclass(frozen=True, slots=True)
class Data:
    """All sources together."""

    parts: tuple[Part, ...]
    name: str

    @classmethod
    def of_rows(cls, rows: Sequence[Row], config: DataConfig, name: str) -> Data:
        """Rows as they are: only their columns are renamed."""
        used = Rows.of(from_memory(rows, name, "train"), config.columns, name)
        return cls((Part(used, config, "", name, None, _count(len(used))),), name)

    def __len__(self) -> int:
        """Rows of all sources; of streams, those that were read to look at them."""
        return sum(len(part.rows) for part in self.parts)

    def numbers(self, column: str) -> np.ndarray:
        """A column of numbers, of all rows in order.

        Raises:
            DataError: there is no such column, or a row has no number in it.
        """
        values: list[float] = []
        for part in self.parts:
            if column not in part.rows.columns:
                known = ", ".join(part.rows.columns)
                raise DataError(f"{part.where}: data.curriculum names column {column!r}; there are: {known}")
            for start, rows in part.rows.batches():
                for index, row in enumerate(rows, start=start):
                    if (number := as_number(row.get(column))) is None:
                        raise DataError(
                            f"{part.where}, row {part.rows.number(index)}: data.curriculum needs a number in column "
                            f"{column!r}, got {row.get(column)!r:.60}"
                        )
                    values.append(number)
        return np.array(values)

    @property
    def streams(self) -> bool:
        """Whether it is read while the run goes on."""
        return self.parts[0].stream is not None

    @property
    def epoch_length(self) -> int | None:
        """Prompts until every row has been used at least once; None for a stream, whose rows are not known."""
        if self.streams:
            return None
        return Turns(self.weights).epoch_length([len(part.rows) for part in self.parts]) if self.weights else len(self)

    @property
    def weights(self) -> list[Fraction] | None:
        """The sources' weights; None where every row is used once per epoch."""
        weights = [part.weight for part in self.parts if part.weight is not None]
        return weights if len(weights) > 1 else None


def load_data(given: Any, config: DataConfig, *, evaluation: bool = False, name: str | None = None) -> Data | None:
    """The training data, or the evaluation's; None where there is none.

    Args:
        given: what was given in Python; see ``docs/data.md``. None: what the settings name.
        config: the settings.
        evaluation: whether ``data.eval`` and the settings that belong to it are meant.
        name: what errors call it.

    Raises:
        DataError: a source cannot be read, settings do not fit its columns, or no row is left.
    """
    name = name or ("the evaluation data" if evaluation else "the training data")
    sources = _sources(given, config.eval if evaluation else config.train, name)
    if not sources:
        return None
    limit, own = (config.eval_rows, "eval_rows") if evaluation else (config.train_rows, "train_rows")
    if len(sources) > 1:
        for setting, value, instead in (
            ("select", None if evaluation else config.select, "select"),
            (own, limit, "rows"),
        ):
            if value is not None:
                raise DataError(f"data.{setting} is for a single source: set {instead} in each source's table")
    split = config.eval_split if evaluation else config.train_split
    sources = [
        source.model_copy(update={"path": of_split(source.path, name, source.split or split)}) for source in sources
    ]
    weighted = [source.weight is not None for source in sources]
    if any(weighted) and evaluation:
        raise DataError("data.eval: weights are for training; an evaluation uses every row once")
    if any(weighted) and not all(weighted):
        raise DataError(f"data.train: source {weighted.index(False)} has no weight: give every source one, or none")
    names = [_name(source, number) for number, source in enumerate(sources)]
    if len(set(names)) < len(names):
        raise DataError(f"{name}: two sources are called {max(names, key=names.count)!r}: give them a name each")
    streams = not evaluation and (config.streaming or any(is_stream(source.path) for source in sources))
    parts = []
    for source, called in zip(sources, names, strict=True):
        where = f"{name}, source {called!r}" if len(sources) > 1 else name
        read = _Reader(source, _settings(source, config, limit, evaluation), where, source.split or split, evaluation)
        parts.append(read.part(called if len(sources) > 1 else "", streams=streams))
    return Data(tuple(parts), name)


@dataclass(frozen=True, slots=True)
class _Reader:
    source: Source
    settings: DataConfig
    """With the source's own; ``train_rows`` is the source's limit."""
    where: str
    split: str
    evaluation: bool

    def part(self, name: str, *, streams: bool) -> Part:
        weight = None if self.source.weight is None else Fraction(str(self.source.weight))
        path = self.source.path
        shown = f"{path}: " if isinstance(path, str) else ""
        if self.evaluation and is_stream(path):
            if self.settings.train_rows is None:
                raise DataError(f"{self.where}: a {type(path).__name__} has no length: set data.eval_rows")
            rows = self._stream().sample(None)
            return Part(rows, self.settings, name, self.where, weight, f"of a stream the first {_count(len(rows))}")
        if streams:
            stream = self._stream()
            said = f"{shown}streamed"
            for setting in ("filter", "select"):
                said += f", data.{setting}" if getattr(self.settings, setting) is not None else ""
            return Part(stream.sample(), self.settings, name, self.where, weight, said, stream)
        rows, said = self._select(Rows.of(self._read(), self.settings.columns, self.where))
        return Part(rows, self.settings, name, self.where, weight, shown + said)

    def _read(self) -> Any:
        path = self.source.path
        return read_path(path, self.split) if isinstance(path, str) else from_memory(path, self.where, self.split)

    def _select(self, rows: Rows) -> tuple[Rows, str]:
        """What the settings leave, and in words how many rows each left."""
        settings, said = self.settings, [_count(len(rows))]
        if settings.filter is not None:
            kept = rows.where(make_filter(settings.filter, rows.columns, self.where), self.where)
            if not len(kept):
                why = explain_none_left(rows, settings.filter)
                raise DataError(f"{self.where}: data.filter leaves none of {_count(len(rows))}{why}")
            rows = kept
            said.append(f"data.filter leaves {len(rows):,}")
        if settings.select is not None:
            rows = rows.take(parse_slice(settings.select))
            said.append(f"data.select ({settings.select}) {len(rows):,}")
        if settings.train_rows is not None and settings.train_rows < len(rows):
            rows = rows.take(slice(settings.train_rows))
            said.append(f"of these the first {len(rows):,}")
        if not len(rows):
            raise DataError(f"{self.where}: data.select = {settings.select!r} leaves no row: {'; '.join(said[:-1])}")
        return rows, "; ".join(said)

    def _stream(self) -> Stream:
        settings, path, select = self.settings, self.source.path, slice(None)
        if settings.select is not None:
            select = parse_slice(settings.select)
            if min(select.start or 0, 0 if select.stop is None else select.stop) < 0:
                raise DataError(
                    f"{self.where}: data.select = {settings.select!r} counts from the end, which a stream lacks"
                )
        opened: Opener
        if isinstance(path, str):
            opened = open_path(path, self.split)
        else:
            rows = path if is_stream(path) else from_memory(path, self.where, self.split)
            rows = rows.to_pylist() if hasattr(rows, "to_pylist") else rows
            opened = passes_over(rows, self.where)
        first = list(itertools.islice(opened(), BATCH))
        if not first:
            raise DataError(f"{self.where} has no rows")
        columns = list(dict.fromkeys(itertools.chain.from_iterable(row for row in first if isinstance(row, Mapping))))
        new_names = check_renames(settings.columns, columns, self.where)
        columns = [new_names.get(column, column) for column in columns]
        keep = None if settings.filter is None else make_filter(settings.filter, columns, self.where)
        return Stream(opened, tuple(columns), new_names, keep, select, settings.train_rows, self.where)


def _sources(given: Any, named: Any, name: str) -> list[Source]:
    if given is None:
        given = named
    if given is None or (isinstance(given, str) and not given):
        return []
    if isinstance(given, Source):
        return [given]
    if isinstance(given, list | tuple) and any(isinstance(item, Source) for item in given):
        if other := [item for item in given if not isinstance(item, Source | str)]:
            raise DataError(f"{name}: expected sources only, or rows only; among sources is {other[0]!r:.80}")
        return [item if isinstance(item, Source) else Source(path=item) for item in given]
    return [Source(path=given)]


def _name(source: Source, number: int) -> str:
    return source.name or (source.path if isinstance(source.path, str) else f"source {number}")


def _settings(source: Source, config: DataConfig, limit: int | None, evaluation: bool) -> DataConfig:
    """The settings with a source's own laid over them; the evaluation does not use the training rows' filter."""
    own = source.model_dump(include=set(DataConfig.model_fields), exclude_none=True)
    base: dict[str, Any] = {"train_rows": source.rows or limit}
    if evaluation:
        base |= {"filter": None, "select": None}
    if "prompt_column" in own and "prompt_template" not in own:
        base["prompt_template"] = None
    return config.model_copy(update=base | own)


def _count(number: int) -> str:
    return f"{number:,} row{'' if number == 1 else 's'}"
