"""Prompts of data that is read during the run and never as a whole."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cohort.config import DataConfig
from cohort.data.loader import DataCursor, PromptLoader, ReadPosition
from cohort.data.prompts import PromptSet
from cohort.data.rows import Row
from cohort.errors import DataError
from cohort.types import Prompt
from cohort.watchdog import waiting

DRAWS = 1024
"""Random numbers drawn at a time."""


class StreamingLoader(PromptLoader):
    """Prompts of streamed sources; see ``PromptLoader``.

    Sources without weights follow one another in their lane. A dropped row is replaced by the next row of its lane, so
    weights are shares of the prompts used. A resumed run reads the rows before its cursor again, but does not tokenize
    them.
    """

    def __init__(self, prompts: PromptSet, config: DataConfig, *, seed: int) -> None:
        super().__init__(prompts, config, seed=seed)
        numbers = list(range(len(prompts.data.sources)))
        self._sources_of_lanes = [[number] for number in numbers] if prompts.data.weights else [numbers]
        self._is_conversation = prompts.prompt(0, uid=0).is_conversation
        self._begin(DataCursor())

    @waiting("data")
    def fetch(self, cursor: DataCursor, count: int, skip: int = 0) -> list[Prompt]:
        """See ``PromptLoader``."""
        self._seek(cursor, cursor.position + skip)
        return [self._next_prompt() for _ in range(count)]

    def advance(self, cursor: DataCursor, used: int, rewards: Mapping[int, float]) -> tuple[DataCursor, dict[str, int]]:  # noqa: ARG002
        """See ``PromptLoader``. The metrics count the step's dropped and truncated rows."""
        end = cursor.position + used
        self._seek(cursor, end)
        before, now = cursor.read or ReadPosition([]), copy.deepcopy(self._read)
        changes = {name: getattr(now, name) - getattr(before, name) for name in ("dropped", "truncated")}
        return DataCursor(end, now), {f"prompts/{name}": count for name, count in changes.items()}

    def _describe_order(self) -> str:
        if self._config.order == "sequential":
            return "in the order of the data"
        return f"shuffled within a buffer of {self._config.shuffle_buffer:,} rows, anew for each epoch"

    def _begin(self, cursor: DataCursor) -> None:
        """Open the sources at a cursor, without rendering or tokenizing the rows before it."""
        self._position = cursor.position
        self._read = copy.deepcopy(cursor.read) or ReadPosition([0] * len(self._sources_of_lanes))
        read = enumerate(self._read.rows)
        self._lanes = [itertools.islice(self._rows_of_lane(lane), count, None) for lane, count in read]

    def _seek(self, cursor: DataCursor, position: int) -> None:
        """Move to a position, from the present one if possible, otherwise from the cursor. The sources stay open
        between calls only to save reading.
        """
        start = cursor if cursor.read else DataCursor()
        if not start.position <= self._position <= position:
            self._begin(start)
        while self._position < position:
            self._next_prompt()

    def _next_prompt(self) -> Prompt:
        # Until the prompt is made, no position is valid: after an error, the next call starts from its cursor again.
        position, self._position = self._position, -1
        lane, _ = self._interleaving.at(position)
        first_epoch = None
        for epoch, source, row_number, row in self._lanes[lane]:
            self._read.rows[lane] += 1
            first_epoch = epoch if first_epoch is None else first_epoch
            if epoch > first_epoch + 1:
                break
            if prompt := self._prompt(source, row_number, row, position):
                self._position = position + 1
                return prompt
            self._read.dropped += 1
        data = self.prompts.data
        where = data.sources[lane].rows.where if data.weights else data.name
        raise DataError(f"{where}: data.overlong_prompts drops every prompt of an epoch")

    def _prompt(self, number: int, row_number: int, row: Row, uid: int) -> Prompt | None:
        """The prompt of a row; None if it is dropped."""
        prompts, source, limit = self.prompts, self.prompts.data.sources[number], self.prompts.limit
        where = f"{source.rows.where}, row {row_number}"
        (ids,) = prompts.renderers[number].token_ids([row], [where])
        if limit is not None and len(ids) > limit.tokens:
            limit.check(np.array([len(ids)]), source.rows.where, lambda _: f"row {row_number}")
            if limit.rule == "drop":
                return None
            ids = ids[-limit.tokens :]
            self._read.truncated += 1
        prompts.check_row(ids, f"the prompt of {where}")
        prompt = prompts.render(number, row, row_number, ids, uid)
        if prompt.is_conversation is not self._is_conversation:
            first = prompts.data.sources[0]
            raise DataError(
                f"text and conversations are mixed: the prompts of {where} and of {first.rows.where}, row "
                f"{first.rows.numbers[0]}, are of two kinds. Set data.format to 'chat'"
            )
        return prompt

    def _rows_of_lane(self, lane: int) -> Iterator[tuple[int, int, int, Row]]:
        """The rows of a lane, epoch after epoch: epoch, source, number of the row in the source, row."""
        streams = [(number, self.prompts.data.sources[number].stream) for number in self._sources_of_lanes[lane]]
        for epoch in itertools.count():
            rows: Iterator[tuple[int, int, Row]]
            rows = ((number, *row) for number, stream in streams if stream for row in stream())
            if self._config.order != "sequential":
                rows = buffer_shuffled(rows, self._config.shuffle_buffer, self._generator(epoch, lane))
            first = next(rows, None)
            if first is None:
                raise DataError(f"{self.prompts.data.name}: an epoch has no rows; can the data be read only once?")
            for row in itertools.chain([first], rows):
                yield epoch, *row


def buffer_shuffled(items: Iterator[Any], size: int, generator: np.random.Generator) -> Iterator[Any]:
    """The items in random order within a buffer: each item is drawn from ``size`` items and replaced by the next one.
    If there are at most ``size`` items, every order is equally likely.

    >>> list(buffer_shuffled(iter(range(5)), 1, np.random.default_rng(0)))
    [0, 1, 2, 3, 4]
    """
    buffer = list(itertools.islice(items, size))
    while drawn := list(itertools.islice(items, DRAWS)):
        for item, at in zip(drawn, generator.integers(size, size=len(drawn)).tolist(), strict=True):
            yield buffer[at]
            buffer[at] = item
    yield from (buffer[at] for at in generator.permutation(len(buffer)))
