"""A data set as prompts: every row rendered and tokenized once, and checked before the first sample."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cohort.config import DataConfig
from cohort.data.files import Row
from cohort.data.lengths import LengthLimit, describe_lengths
from cohort.data.load import Data, Part
from cohort.data.render import PromptMaker, Renderer, check_columns
from cohort.errors import DataError
from cohort.types import Prompt


def check_data(data: Data, *, mixed: bool = False) -> None:
    """Whether every row can be a prompt, as far as that can be known without a tokenizer.

    Args:
        data: the rows.
        mixed: text and conversations may stand side by side.

    Raises:
        DataError: a column is missing, a prompt is empty, or the format does not fit; the row is named.
    """
    first: dict[bool, str] = {}
    for part in data.parts:
        check_columns(part.rows.columns, part.where)
        maker = PromptMaker(part.config)
        for rows, wheres, _ in batches(part):
            for row, where in zip(rows, wheres, strict=True):
                is_text = isinstance(maker.make(row, where), str)
                first.setdefault(is_text, where)
        if len(first) > 1 and not mixed:
            raise DataError(
                f"text and conversations are mixed: the prompt of {first[True]} is a string, that of {first[False]} a "
                "list of messages. Set data.format to 'chat' to make user's messages of the strings"
            )


def batches(part: Part) -> Iterator[tuple[list[Row], list[str], int]]:
    """The rows of a source in lists, with what errors call each, and the place of the first."""
    for start, rows in part.rows.batches():
        numbers = (part.rows.number(start + index) for index in range(len(rows)))
        yield rows, [f"{part.where}, row {number}" for number in numbers], start


class PromptSet:
    """All rows of a data set as prompts, tokenized once.

    Args:
        rows: the data: rows, or what ``load_data`` gave.
        tokenizer: the policy's.
        config: which column or template makes the prompt, and its format. Of ``Data`` each source has its own.
        name: what errors call rows.
        limit: how long prompts may be; None: there is no limit.
        mixed: text and conversations may stand side by side.

    Raises:
        DataError: a row cannot be a prompt (it is named), or prompts are too long.
    """

    def __init__(
        self,
        rows: Sequence[Row] | Data,
        tokenizer: Any,
        config: DataConfig,
        *,
        name: str = "the training data",
        limit: LengthLimit | None = None,
        mixed: bool = False,
    ) -> None:
        self.data = data = rows if isinstance(rows, Data) else Data.of_rows(rows, config, name)
        check_data(data, mixed=mixed)
        self.name = data.name
        self.columns = tuple(dict.fromkeys(itertools.chain.from_iterable(part.rows.columns for part in data.parts)))
        self._renderers = [Renderer(part.config, tokenizer) for part in data.parts]
        sizes = [len(part.rows) for part in data.parts]
        self._part_of = np.repeat(np.arange(len(sizes)), sizes)
        self._row_of = np.concatenate([np.arange(size) for size in sizes])
        pieces: list[np.ndarray] = []
        lengths: list[int] = []
        for part, renderer in zip(data.parts, self._renderers, strict=True):
            for batch, wheres, _ in batches(part):
                ids = renderer.token_ids(batch, wheres)
                lengths += map(len, ids)
                pieces.append(np.fromiter(itertools.chain.from_iterable(ids), np.int32))
        self._flat = np.concatenate(pieces)
        self._ends = np.cumsum(lengths)
        self._starts = self._ends - lengths
        self.dropped = self.truncated = 0
        if limit is not None:
            self._fit(limit)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt."""
        return self._ends - self._starts

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.lengths.max())

    @property
    def places(self) -> np.ndarray:
        """Where each prompt's row stands among all rows of ``data``."""
        before = np.cumsum([0, *(len(part.rows) for part in self.data.parts)])
        places: np.ndarray = before[self._part_of] + self._row_of
        return places

    def ranges(self) -> list[range]:
        """Which of the prompts are of which source."""
        bounds = np.searchsorted(self._part_of, np.arange(len(self.data.parts) + 1)).tolist()
        return [range(start, end) for start, end in itertools.pairwise(bounds)]

    def where(self, index: int) -> str:
        """What errors call a prompt's row."""
        part = self.data.parts[self._part_of[index]]
        return f"{part.where}, row {part.rows.number(self._row_of[index])}"

    def prompt(self, index: int, uid: int) -> Prompt:
        """One of the prompts. Its ``row_index`` is its row's place in the source, before any filter."""
        number = int(self._part_of[index])
        part, row_index = self.data.parts[number], int(self._row_of[index])
        return self._renderers[number].prompt(
            part.rows[row_index],
            self.where(index),
            self._flat[self._starts[index] : self._ends[index]].tolist(),
            uid=uid,
            number=part.rows.number(row_index),
            source=part.name,
            columns=self.columns,
        )

    @property
    def fingerprint(self) -> str:
        """A hash of all prompts' tokens and of the sources' weights: equal for two runs on the same prompts."""
        sizes = map(len, self.ranges())
        shares = [(part.name, str(part.weight), size) for part, size in zip(self.data.parts, sizes, strict=True)]
        found = hashlib.sha256(repr(shares).encode())
        found.update(self.lengths.astype(np.int64).tobytes())
        for index in range(len(self)):
            found.update(self._flat[self._starts[index] : self._ends[index]].tobytes())
        return found.hexdigest()

    def all(self) -> list[Prompt]:
        """Every row once, in order; its uid is its place."""
        return [self.prompt(index, uid=index) for index in range(len(self))]

    def describe_lengths(self) -> str:
        """The prompts' lengths in words, and how many were dropped or cut."""
        words = describe_lengths(self.lengths)
        if self.dropped:
            words += f"; {self.dropped:,} longer prompts dropped (data.overlong_prompts)"
        if self.truncated:
            words += f"; {self.truncated:,} longer prompts cut to their last tokens (data.overlong_prompts)"
        return words

    def _fit(self, limit: LengthLimit) -> None:
        """Refuse, drop or cut what is too long."""
        lengths = self.lengths
        over = lengths > limit.tokens
        count, longest = int(over.sum()), int(lengths.argmax())
        row = self.where(longest).removeprefix(f"{self.name}, ")
        limit.check(count, len(self), row, int(lengths[longest]), self.name)
        if limit.rule == "drop":
            self._keep(~over)
            self.dropped = count
            if not len(self):
                seen = f" of the first {count:,} rows, which are looked at before a run," if self.data.streams else ""
                raise DataError(
                    f"{self.name}: every prompt{seen} has more than {limit.tokens:,} tokens ({limit.why}), and "
                    "data.overlong_prompts is 'drop': nothing is left"
                )
        else:
            self._starts = np.maximum(self._starts, self._ends - limit.tokens)
            self.truncated = count

    def _keep(self, kept: np.ndarray) -> None:
        self._part_of, self._row_of = self._part_of[kept], self._row_of[kept]
        self._starts, self._ends = self._starts[kept], self._ends[kept]
