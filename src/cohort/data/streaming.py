"""Prompts of data that is read while the run goes on."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cohort.config import DataConfig
from cohort.data.files import Row
from cohort.data.lengths import LengthLimit
from cohort.data.load import Part
from cohort.data.loader import DataCursor, ReadPosition
from cohort.data.mixture import Turns
from cohort.data.order import check_weighted, describe_sources, pass_generator
from cohort.data.prompts import PromptSet
from cohort.data.render import Renderer
from cohort.errors import DataError
from cohort.types import Prompt

Numbered = tuple[int, Row]
"""A row with its number in its source."""
DRAWS = 1024
"""Random numbers drawn at a time."""


class StreamingLoader:
    """Pass after pass over streamed sources; see ``PromptLoader``.

    Sources with weights are lanes of their own; without weights all are one lane, one after another. The row that comes
    next in a lane takes the place of one that is dropped, so weights are shares of what is used. What stands at a place
    follows from the place, the seed and the size of the shuffle buffer alone. To go on where the last whole step ended,
    the rows before are read again, without being tokenized.

    Args:
        sample: the prompts of the data's first rows, which have been looked at.
        tokenizer: the policy's.
        config: the order, and the buffer's size.
        limit: how long prompts may be. A longer one is refused when it comes, dropped or cut.
        seed: decides the orders.
    """

    def __init__(
        self, sample: PromptSet, tokenizer: Any, config: DataConfig, limit: LengthLimit | None, *, seed: int
    ) -> None:
        self.sample = sample
        self._data = data = sample.data
        self._limit = limit
        self._config = config
        self._seed = seed
        self._renderers = [Renderer(part.config, tokenizer) for part in data.parts]
        self._turns = Turns(data.weights) if data.weights else None
        self._is_text = isinstance(sample.prompt(0, uid=0).prompt, str)
        check_weighted(sample)
        self._begin(DataCursor())

    epoch_length = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt there can be, where the settings say; else of the longest that was looked at. A
        pass of this length is tried for its memory, so the context's end is no guess to make."""
        if self._limit is None or self._config.max_prompt_length is None:
            return self.sample.longest
        return self._limit.tokens

    @property
    def fingerprint(self) -> str:
        """A hash of the prompts that were looked at."""
        return self.sample.fingerprint

    def fetch(self, cursor: DataCursor, count: int, skip: int = 0) -> list[Prompt]:
        """See ``PromptLoader``.

        Raises:
            DataError: a row cannot be a prompt, or every row of an epoch is dropped.
        """
        self._seek(cursor, cursor.position + skip)
        return [self._next_prompt() for _ in range(count)]

    def advance(
        self,
        cursor: DataCursor,
        count: int,
        rewards: Mapping[int, float],  # noqa: ARG002 (of the protocol)
    ) -> tuple[DataCursor, dict[str, int]]:
        """See ``PromptLoader``. The metrics count the step's dropped and truncated rows."""
        end = cursor.position + count
        self._seek(cursor, end)
        before, now = cursor.read or ReadPosition([]), copy.deepcopy(self._read)
        return DataCursor(end, now), {
            "prompts/dropped": now.dropped - before.dropped,
            "prompts/truncated": now.truncated - before.truncated,
        }

    def describe(self) -> list[str]:
        """The data in words: sources, lengths, order."""
        buffered = f"shuffled within {self._config.shuffle_buffer:,} rows, anew for each epoch"
        return [
            *describe_sources(self.sample),
            f"prompts: streamed; of the first {len(self.sample):,}: {self.sample.describe_lengths()}",
            f"order: {'as the data is' if self._config.order == 'sequential' else buffered}",
        ]

    def _begin(self, cursor: DataCursor) -> None:
        """Open the sources at a cursor, without rendering or tokenizing the rows before it."""
        listed = list(enumerate(self._data.parts))
        of_lanes = [[item] for item in listed] if self._turns else [listed]
        self._lanes = [self._lane(parts, lane) for lane, parts in enumerate(of_lanes)]
        self._position, self._read = cursor.position, copy.deepcopy(cursor.read or ReadPosition([0] * len(of_lanes)))
        for rows, count in zip(self._lanes, self._read.rows, strict=True):
            next(itertools.islice(rows, count, count), None)

    def _seek(self, cursor: DataCursor, position: int) -> None:
        """Move to a position, from the present one or else from the cursor. The sources stay open between calls only
        to save reading: what is read depends on the position alone.
        """
        start = cursor if cursor.read else DataCursor()
        if not start.position <= self._position <= position:
            self._begin(start)
        while self._position < position:
            self._next_prompt()

    def _next_prompt(self) -> Prompt:
        lane = self._turns.at(self._position)[0] if self._turns else 0
        first_epoch = None
        for number, epoch, (row_number, row) in self._lanes[lane]:
            self._read.rows[lane] += 1
            first_epoch = epoch if first_epoch is None else first_epoch
            if epoch > first_epoch + 1:
                break
            if prompt := self._prompt(number, row_number, row, self._position):
                self._position += 1
                return prompt
            self._read.dropped += 1
        where = self._data.parts[lane].where if self._turns else self._data.name
        raise DataError(f"{where}: data.overlong_prompts drops every prompt of an epoch")

    def _prompt(self, number: int, row_number: int, row: Row, place: int) -> Prompt | None:
        part, renderer = self._data.parts[number], self._renderers[number]
        where = f"{part.where}, row {row_number}"
        (ids,) = renderer.token_ids([row], [where])
        if self._limit is not None and len(ids) > self._limit.tokens:
            self._limit.check(1, 1, f"row {row_number}", len(ids), part.where)
            if self._limit.rule == "drop":
                return None
            ids = ids[-self._limit.tokens :]
            self._read.truncated += 1
        if isinstance(renderer.maker.make(row, where), str) is not self._is_text:
            first = self._data.parts[0]
            raise DataError(
                f"text and conversations are mixed: the prompts of {where} and of {first.where}, row "
                f"{first.rows.number(0)}, are of two kinds. Set data.format to 'chat'"
            )
        columns = self.sample.columns
        return renderer.prompt(row, where, ids, uid=place, number=row_number, source=part.name, columns=columns)

    def _lane(self, parts: list[tuple[int, Part]], lane: int) -> Iterator[tuple[int, int, Numbered]]:
        """Pass after pass over sources that follow one another: source, epoch and row."""
        for epoch in itertools.count():
            rows: Iterator[tuple[int, Numbered]]
            rows = ((number, row) for number, part in parts for row in part.stream or ())
            if self._config.order != "sequential":
                rows = buffer_shuffled(rows, self._config.shuffle_buffer, pass_generator(self._seed, epoch, lane))
            count = 0
            for number, row in rows:
                count += 1
                yield number, epoch, row
            if not count:
                raise DataError(f"{self._data.name}: a pass over the data has no rows; can it be read only once?")


def buffer_shuffled(items: Iterator[Any], size: int, generator: np.random.Generator) -> Iterator[Any]:
    """The items in an order that is random over about ``size`` of them: each is drawn from a buffer, whose place the
    next item takes. With no more items than ``size`` every order is equally likely.

    >>> list(buffer_shuffled(iter(range(5)), 1, np.random.default_rng(0)))
    [0, 1, 2, 3, 4]
    """
    buffer = list(itertools.islice(items, size))
    while drawn := list(itertools.islice(items, DRAWS)):
        for item, at in zip(drawn, generator.integers(size, size=len(drawn)).tolist(), strict=True):
            yield buffer[at]
            buffer[at] = item
    yield from (buffer[at] for at in generator.permutation(len(buffer)))
