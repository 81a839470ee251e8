"""The data of a run: its sources with their settings applied, and their shares of the prompts."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from cohort.config import DataConfig, Source, shown_name
from cohort.config.schema import check_set_name, parse_slice
from cohort.data.render import Renderer, check_columns
from cohort.data.source import (
    BATCH,
    INDEX,
    PREFIX,
    SETTINGS,
    Row,
    RowTable,
    as_number,
    check_column,
    counted,
    is_stream,
    make_filter,
    open_source,
    read_source,
    rename,
    select_split,
)
from cohort.errors import DataError

RowStream = Callable[[], Iterator[tuple[int, Row]]]
"""Starts a pass over the used rows of a streamed source, each with its number in the source."""


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """One source of rows after renaming, filter and selection."""

    rows: RowTable
    """The rows used; of a streamed source, the first of them."""
    config: DataConfig
    """How rows become prompts: the settings of ``[data]``, overridden by those of the source."""
    name: str
    """Empty if the data has a single source."""
    weight: Fraction | None
    description: str
    """The number of rows, and how many each setting left."""
    stream: RowStream | None = None
    """Set if the rows are read during the run."""


class Interleaving:
    """Sources taking turns so evenly that no source is ever a whole prompt away from its share.

    Of the first p prompts, a source with weight w of the total W has ``floor(p w / W)`` or ``ceil(p w / W)``. Of the
    sources that one more prompt keeps within ``ceil``, the turn goes to the smallest ``(count + 1) / w``; among equals,
    to the first listed. Source: M. L. Balinski and H. P. Young, "The quota method of apportionment" (1975).

    Args:
        weights: one or more positive numbers; a common factor changes nothing.

    >>> order = Interleaving([Fraction(2), Fraction(1)])
    >>> [order.at(position) for position in range(6)]
    [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]
    """

    def __init__(self, weights: Sequence[Fraction | int]) -> None:
        whole = [int(weight * math.lcm(*(weight.denominator for weight in weights))) for weight in weights]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        self._period = sum(self._weights)
        """After so many prompts every source has exactly its share, and all repeats."""
        self._turns: list[tuple[int, int]] = []
        self._counts = [0] * len(weights)

    def at(self, position: int) -> tuple[int, int]:
        """The source of the prompt at a position, and the number of earlier prompts from that source."""
        cycle, within = divmod(position, self._period)
        while len(self._turns) <= within:
            self._extend()
        source, count = self._turns[within]
        return source, count + cycle * self._weights[source]

    def epoch_length(self, sizes: Sequence[int]) -> int:
        """Prompts until every row of every source has been used: ``max_i ceil(n_i W / w_i)``."""
        return max(-(-size * self._period // weight) for size, weight in zip(sizes, self._weights, strict=True))

    def _extend(self) -> None:
        after = len(self._turns) + 1
        allowed = [i for i, count in enumerate(self._counts) if count * self._period < after * self._weights[i]]
        source = min(allowed, key=lambda i: (Fraction(self._counts[i] + 1, self._weights[i]), i))
        self._turns.append((source, self._counts[source]))
        self._counts[source] += 1


@dataclass(frozen=True, slots=True)
class Data:
    """All sources of a training or evaluation set."""

    sources: tuple[LoadedSource, ...]
    name: str

    def __len__(self) -> int:
        return sum(len(source.rows) for source in self.sources)

    @property
    def streams(self) -> bool:
        """Whether the rows are read during the run."""
        return self.sources[0].stream is not None

    @property
    def weights(self) -> list[Fraction] | None:
        """The weights of the sources; None if every row is used once per epoch."""
        weights = [source.weight for source in self.sources if source.weight is not None]
        return weights if len(weights) > 1 else None

    def epoch_length(self, sizes: Sequence[int] | None = None) -> int | None:
        """Prompts until every row has been used at least once; None for streamed data.

        Args:
            sizes: number of prompts per source; None: of rows.
        """
        sizes = sizes or [len(source.rows) for source in self.sources]
        if self.streams:
            return None
        return Interleaving(self.weights).epoch_length(sizes) if self.weights else sum(sizes)

    def curriculum_values(self, curriculum: str) -> np.ndarray:
        """The sort key of each row, ascending.

        Args:
            curriculum: a column; with "-" before its name, the order is descending.

        Raises:
            DataError: there is no such column, or a row has no number in it.
        """
        column, sign = curriculum.removeprefix("-"), -1.0 if curriculum.startswith("-") else 1.0
        values: list[float] = []
        for source in self.sources:
            check_column(column, source.rows.columns, f"{source.rows.where}: data.curriculum")
            for row, where in source.rows.named():
                if (value := as_number(row.get(column))) is None:
                    wanted = f"needs a number in column {column!r}"
                    raise DataError(f"{where}: data.curriculum {wanted}, got {row.get(column)!r:.60}")
                values.append(sign * value)
        return np.array(values)

    def describe(self) -> list[str]:
        """The sources in words, with their shares if they have weights."""
        if len(self.sources) == 1:
            return [f"data: {self.sources[0].description}"]
        how = "taking turns by their weights" if self.weights else "one after another, every row once per epoch"
        lines = [f"data: {len(self.sources)} sources, {how}"]
        for source in self.sources:
            words = "  " if source.description.startswith(source.name) else f"  {source.name}: "
            share = float(source.weight / sum(self.weights)) if self.weights and source.weight else None
            lines.append(words + source.description + (f", {share:.1%} of the prompts" if share else ""))
        return lines


def load_data(
    given: Any, config: DataConfig, *, evaluation: bool = False, name: str | None = None, mixed: bool = False
) -> Data | None:
    """The training or evaluation data, checked as far as that needs no tokenizer; None if there is none.

    Args:
        given: data passed in Python, see ``docs/data.md``. None: ``data.train`` or ``data.eval``.
        config: the settings.
        evaluation: load the evaluation data.
        name: what errors call the data.
        mixed: allow text next to conversations.

    Raises:
        DataError: a source cannot be read, settings do not fit its columns, no row is left, or a row cannot be a
            prompt; the error names the row.
    """
    name = name or ("the evaluation data" if evaluation else "the training data")
    sources = _sources(given, config.eval if evaluation else config.train, name)
    if not sources:
        return None
    _check_together(sources, config, evaluation)
    if evaluation:  # data.filter and data.select are for the training rows
        config = config.model_copy(update={"filter": None, "select": None, "train_rows": config.eval_rows})
    default_split = config.eval_split if evaluation else config.train_split
    splits = [source.split or default_split for source in sources]
    rows = [select_split(source.path, name, split) for source, split in zip(sources, splits, strict=True)]
    streams = not evaluation and (config.streaming or any(map(is_stream, rows)))
    loaded = []
    for source, source_name, split, path in zip(sources, _names(sources, name), splits, rows, strict=True):
        where = f"{name}, source {source_name!r}" if source_name else name
        settings = _source_settings(source, config)
        if streams or is_stream(path):
            table, words, stream = _open(path, settings, where, split, evaluation=evaluation)
        else:
            table, words, stream = *_read(path, settings, where, split), None
        weight = None if source.weight is None else Fraction(str(source.weight))
        words = f"{shown_name(path)}: {words}" if isinstance(path, str) else words
        loaded.append(LoadedSource(table, settings, source_name, weight, words, stream))
    data = Data(tuple(loaded), name)
    _check_rows(data, mixed)
    if not evaluation and config.curriculum not in (None, "measured"):
        data.curriculum_values(config.curriculum)
    return data


def load_sets(given: Any, config: DataConfig) -> dict[str, Data]:
    """The evaluation sets by name; a set without a name is called "". Empty if there is no evaluation.

    Args:
        given: data passed in Python: what ``load_data`` takes, or a dict of that by name. None: ``data.eval``.
        config: the settings.

    Raises:
        DataError: a name is not allowed, or as ``load_data``.
    """
    given = config.eval if given is None else given
    if type(given) is dict:  # not a DatasetDict, which is a dict of splits
        if not given:
            raise DataError("eval_dataset has no sets: pass rows, rows by name, or None")
        try:
            for name in given:
                check_set_name(name)
        except ValueError as error:
            raise DataError(f"eval_dataset: {error}") from None
    else:
        given = {"": given}
    names = {name: f"the evaluation data {name!r}" if name else None for name in given}
    sets = {name: load_data(rows, config, evaluation=True, name=names[name]) for name, rows in given.items()}
    return {name: data for name, data in sets.items() if data is not None}


def _sources(given: Any, configured: Any, name: str) -> list[Source]:
    given = configured if given is None else given
    if given is None or (isinstance(given, str) and not given):
        return []
    if not isinstance(given, list | tuple) or not any(isinstance(item, Source) for item in given):
        given = [given]  # rows, or one source
    elif other := [item for item in given if not isinstance(item, Source | str)]:
        raise DataError(f"{name}: expected only sources or only rows; one item among sources is {other[0]!r:.80}")
    return [item if isinstance(item, Source) else Source(path=item) for item in given]


def _check_together(sources: list[Source], config: DataConfig, evaluation: bool) -> None:
    limits = {"eval_rows": "rows"} if evaluation else {"select": "select", "train_rows": "rows"}
    for setting, instead in limits.items():
        if len(sources) > 1 and getattr(config, setting) is not None:
            raise DataError(f"data.{setting} is for a single source: set {instead} in each source's table")
    weighted = [source.weight is not None for source in sources]
    if evaluation and any(weighted):
        raise DataError("data.eval: weights are for training; an evaluation uses every row once")
    if any(weighted) and not all(weighted):
        raise DataError(f"data.train: source {weighted.index(False)} has no weight: give every source one, or none")


def _names(sources: list[Source], name: str) -> list[str]:
    """The name of each source; empty for a single one."""
    if len(sources) == 1:
        return [""]
    unnamed = (s.path if isinstance(s.path, str) else f"source {number}" for number, s in enumerate(sources))
    names = [source.name or other for source, other in zip(sources, unnamed, strict=True)]
    if len(set(names)) < len(names):
        raise DataError(f"{name}: two sources are called {max(names, key=names.count)!r}: give each its own name")
    return names


def _source_settings(source: Source, config: DataConfig) -> DataConfig:
    """The settings overridden by those of a source; ``train_rows`` becomes the limit of the source."""
    update = source.model_dump(include=set(DataConfig.model_fields), exclude_none=True)
    if "prompt_column" in update:
        update.setdefault("prompt_template", None)
    return config.model_copy(update=update | {"train_rows": source.rows or config.train_rows})


def _check_rows(data: Data, mixed: bool) -> None:
    first: dict[bool, str] = {}
    for source in data.sources:
        check_columns(source.rows.columns, source.rows.where)
        renderer = Renderer(source.config)
        for row, where in source.rows.named():
            first.setdefault(isinstance(renderer.make(row, where), str), where)
        if len(first) > 1 and not mixed:
            raise DataError(
                f"text and conversations are mixed: the prompt of {first[True]} is a string, that of {first[False]} a "
                "list of messages. Set data.format to 'chat' to turn the strings into user messages"
            )


def _read(path: Any, settings: DataConfig, where: str, split: str) -> tuple[RowTable, str]:
    """The rows that the settings leave of a source, and their description."""
    rows = RowTable.of(read_source(path, where, split), settings.columns, where)
    counts = [counted(rows)]
    if settings.filter is not None:
        rows = rows.filter(settings.filter)
        counts.append(f"data.filter leaves {len(rows):,}")
    if settings.select is not None:
        chosen = range(len(rows))[parse_slice(settings.select)]
        if not chosen:
            raise DataError(f"{where}: data.select = {settings.select!r} leaves no row: {'; '.join(counts)}")
        rows = rows.select(chosen)
        counts.append(f"data.select ({settings.select}) {len(rows):,}")
    if settings.train_rows is not None and settings.train_rows < len(rows):
        rows = rows.select(range(settings.train_rows))
        counts.append(f"the first {len(rows):,} of these")
    return rows, "; ".join(counts)


def _open(
    path: Any, settings: DataConfig, where: str, split: str, *, evaluation: bool
) -> tuple[RowTable, str, RowStream | None]:
    """The first rows of a streamed source, their description, and the stream. An evaluation reads all of its rows."""
    if evaluation and settings.train_rows is None:
        raise DataError(f"{where}: a {type(path).__name__} has no length: set data.eval_rows")
    selected = parse_slice(settings.select or ":")
    if min(selected.start or 0, selected.stop or 0) < 0:
        raise DataError(f"{where}: data.select = {settings.select!r} counts from the end, which a stream does not know")
    opener = open_source(path, where, split)
    first = list(itertools.islice(opener(), BATCH))
    if not first:
        raise DataError(f"{where} has no rows")
    sample = RowTable.of([row for row in first if isinstance(row, Mapping)], settings.columns, where)
    keep = None if settings.filter is None else make_filter(settings.filter, sample.columns, where)

    def kept() -> Iterator[tuple[int, Row]]:
        for number, row in enumerate(opener()):
            if not isinstance(row, Mapping):
                raise DataError(f"{where}, row {number}: expected a mapping of columns, got {type(row).__name__}")
            renamed = rename(row, sample.new_names)
            if keep is None or keep(renamed, f"{where}, row {number}"):
                yield number, renamed

    def stream() -> Iterator[tuple[int, Row]]:
        used = itertools.islice(kept(), selected.start, selected.stop, selected.step)
        return itertools.islice(used, settings.train_rows)

    used = list(itertools.islice(stream(), None if evaluation else BATCH))
    if not used:
        raise DataError(f"{where}: no row is left by data.filter and data.select")
    numbers, rows = map(list, zip(*used, strict=True))
    table = RowTable(rows, tuple(dict.fromkeys(itertools.chain(sample.columns, *rows))), numbers, {}, where)
    if evaluation:
        return table, f"the first {counted(rows)} of a stream", None
    words = [f"data.{setting}" for setting in ("filter", "select") if getattr(settings, setting) is not None]
    return table, ", ".join(["streamed", *words]), stream


# ----------------------------------------
# Whether evaluation items of reasoning-gym are held out of training.


def check_held_out(train: Data, sets: Mapping[str, Data]) -> None:
    """Check that no evaluation set has items of the training data.

    Raises:
        DataError: two sources are of the same data set with the same settings, and their ranges of ``seed + index``
            overlap.
    """
    for settings, numbers, where, _ in _ranges(train):
        for other, held_out, other_where, seed in (found for data in sets.values() for found in _ranges(data)):
            if other == settings and max(numbers.start, held_out.start) < min(numbers.stop, held_out.stop):
                raise DataError(
                    f"{where} and {other_where} have items of {PREFIX}{settings['name']} in common. An item is made "
                    f"from seed + index, here {numbers.start} to {numbers.stop - 1} and {held_out.start} to "
                    f"{held_out.stop - 1}: set offset={max(numbers.stop - seed, 0)} or more in data.eval"
                )


def _ranges(data: Data) -> Iterator[tuple[dict[str, Any], range, str, int]]:
    """Of each source made here: its settings without the seed and size, ``seed + index`` of its items, what errors call
    it, and its seed."""
    for source in data.sources:
        if {SETTINGS, INDEX}.issubset(source.rows.columns):
            first, last = source.rows[0], source.rows[-1]
            try:  # a file can have columns of these names too
                settings = dict(ast.literal_eval(first[SETTINGS]))
                seed, size = settings.pop("seed"), settings.pop("size")
                numbers = range(seed + first[INDEX], seed + (size if source.stream else last[INDEX] + 1))
            except (ValueError, TypeError, LookupError, SyntaxError, MemoryError, RecursionError):
                raise DataError(
                    f"{source.rows.where}: the columns {SETTINGS} and {INDEX} are those of rows that Cohort makes, and "
                    "hold something else: rename them with data.columns"
                ) from None
            yield settings, numbers, source.rows.where, seed
