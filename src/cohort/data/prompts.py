"""A data set as prompts: every row is rendered, tokenized and checked before the first sample."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np

from cohort.config import DataConfig
from cohort.data.load import Data, load_data
from cohort.data.render import Renderer, ToolsOf
from cohort.data.source import Row, plain, rename
from cohort.errors import DataError
from cohort.types import Prompt


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """Maximum length of a prompt."""

    tokens: int
    why: str
    """The setting or model property that the limit comes from."""
    rule: str = "error"
    """``data.overlong_prompts``."""
    context: int | None = None
    """Context length of the model, if the limit comes from it."""
    lower: str = "rollout.max_completion_length"
    """The setting or flag that leaves prompts more of the context when it is lower."""

    @classmethod
    def of(
        cls,
        config: DataConfig,
        context: int | None,
        completion: int,
        setting: str = "rollout.max_completion_length",
        lower: str = "",
    ) -> LengthLimit | None:
        """The smaller of ``data.max_prompt_length`` and the context length less a completion; None if neither is known.

        Args:
            config: the settings.
            context: context length of the model in tokens, if known.
            completion: maximum length of a completion in tokens.
            setting: the setting that ``completion`` comes from.
            lower: the setting or flag that errors say to lower; empty: ``setting``.
        """
        limits: list[tuple[int, str, int | None]] = []
        if config.max_prompt_length is not None:
            limits.append((config.max_prompt_length, "data.max_prompt_length", None))
        if context is not None:
            whole = f"the model's context of {context:,}"
            why = f"{whole} less {setting}, {completion:,}"
            if context <= completion:
                why = f"{setting} ({completion:,}) leaves no room for a prompt in {whole} tokens"
            limits.append((max(0, context - completion), why, context))
        if not limits:
            return None
        tokens, why, of_context = min(limits, key=lambda limit: limit[0])
        return cls(tokens, why, config.overlong_prompts, of_context, lower or setting)

    def check(self, lengths: np.ndarray, name: str, row_name: Callable[[int], str]) -> None:
        """Apply the rule "error".

        Args:
            lengths: tokens of prompts.
            name: what errors call the data.
            row_name: what errors call the row of a prompt, by its index.

        Raises:
            DataError: the rule is "error" and there are overlong prompts, or a completion alone fills the context.
        """
        count, longest = int((lengths > self.tokens).sum()), int(lengths.argmax())
        remedy = "raise data.max_prompt_length"
        if self.context is not None:
            remedy = f"lower {self.lower}"
            if (room := self.context - int(lengths[longest])) > 0:
                remedy = f"set {self.lower} to at most {room:,}"
        if self.context is not None and self.tokens < 1:
            raise DataError(f"{self.why}: {remedy}; the longest prompt has {lengths[longest]:,}")
        if not count or self.rule != "error":
            return
        raise DataError(
            f"{name}: {count:,} of {len(lengths):,} prompts have more than {self.tokens:,} tokens ({self.why}); the "
            f"longest, {row_name(longest)}, has {lengths[longest]:,}. Either {remedy}, or set data.overlong_prompts to "
            "'drop', which leaves such rows out, or to 'truncate_left', which keeps the last tokens of such prompts"
        )


class PromptSet:
    """All rows of a data set as prompts, tokenized once.

    Args:
        rows: what ``load_data`` returned or takes.
        tokenizer: the tokenizer of the policy.
        config: the settings. Each source of ``Data`` has its own.
        name: what errors call the data.
        limit: maximum length of a prompt.
        mixed: allow text next to conversations.
        tools: with tools or an environment, the JSON schemas that a row's conversation is rendered with. None: the run
            has neither, and the column ``tools`` may hold schemas.

    Raises:
        DataError: a row cannot be a prompt, or prompts are too long; the error names the row.
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
        tools: ToolsOf | None = None,
    ) -> None:
        data = rows if isinstance(rows, Data) else load_data(rows, config, name=name, mixed=mixed)
        assert data is not None
        self.data, self.name, self.limit = data, data.name, limit
        self._tokenizer = tokenizer
        self._token_limits: tuple[int | None, np.ndarray] = (None, np.array([], np.int32))
        self.columns = tuple(dict.fromkeys(column for source in data.sources for column in source.rows.columns))
        self.renderers = [Renderer(source.config, tokenizer, tools) for source in data.sources]
        batches: list[np.ndarray] = []
        lengths: list[int] = []
        contents = {column: hashlib.sha256() for column in self.columns}
        for source, renderer in zip(data.sources, self.renderers, strict=True):
            for batch in source.rows.batches():
                for column, content in contents.items():
                    content.update(_as_bytes([row.get(column) for row in batch[0]]))
                token_ids = renderer.token_ids(*batch)
                lengths += map(len, token_ids)
                batches.append(np.fromiter(itertools.chain.from_iterable(token_ids), np.int32))
        self.contents = {column: content.hexdigest()[:12] for column, content in contents.items()}
        """A hash of each column; of streamed data, of the first rows."""
        self._flat, self._ends = np.concatenate(batches), np.cumsum(lengths)
        self._starts = self._ends - lengths
        self._bounds = np.cumsum([0, *(len(source.rows) for source in data.sources)])
        self.row_indices = np.arange(len(data))
        """The index of each prompt's row among all rows of ``data``."""
        self.dropped = self.truncated = 0
        if limit is not None:
            self._apply(limit)

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each prompt."""
        return self._ends - self._starts

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt. Of streamed data, ``data.max_prompt_length`` if it is set, otherwise the
        longest of the first prompts: a pass of this length is tried for its memory, so the context length would be too
        much.
        """
        if self.data.streams and self.limit and self.data.sources[0].config.max_prompt_length is not None:
            return self.limit.tokens
        return int(self.lengths.max())

    @property
    def epoch_length(self) -> int | None:
        """Prompts until every row has been used at least once; None for streamed data."""
        return self.data.epoch_length([len(prompts) for prompts in self.ranges()])

    def lanes(self) -> list[range]:
        """The indices of the prompts of each source that has a weight; otherwise all together."""
        return self.ranges() if self.data.weights else [range(len(self))]

    def ranges(self) -> list[range]:
        """The indices of the prompts of each source."""
        bounds = np.searchsorted(self.row_indices, self._bounds).tolist()
        return [range(start, end) for start, end in itertools.pairwise(bounds)]

    def prompt(self, index: int, uid: int) -> Prompt:
        """One of the prompts. Its ``row_index`` counts all rows of the source, those that a filter leaves out too."""
        number, row_index = self._locate(index)
        rows = self.data.sources[number].rows
        token_ids = self._flat[self._starts[index] : self._ends[index]].tolist()
        return self.render(number, rows[row_index], int(rows.numbers[row_index]), token_ids, uid)

    def render(self, number: int, row: Row, row_number: int, token_ids: Sequence[int], uid: int) -> Prompt:
        """The prompt of a row of source ``number``, with these token ids."""
        source = self.data.sources[number]
        where = f"{source.rows.where}, row {row_number}"
        text, content, prefill, arguments = self.renderers[number].decode(row, where, token_ids)
        columns = {column: row.get(column) for column in self.columns} | dict(row)
        escaped = {"escaped": source.config.escape_control_tokens}
        return Prompt(
            uid, row_number, tuple(token_ids), text, content, columns, prefill, source.name, arguments, **escaped
        )

    def original(self, index: int) -> Row:
        """The columns of a prompt's row under their names in the source, before ``data.columns``."""
        number, row_index = self._locate(index)
        rows = self.data.sources[number].rows
        row = dict.fromkeys(rows.columns) | dict(rows[row_index])
        return rename(row, {new: old for old, new in rows.new_names.items()})

    @property
    def fingerprint(self) -> str:
        """Hash of the token ids of all prompts and the weights of the sources."""
        sources = zip(self.data.sources, self.ranges(), strict=True)
        shares = [(source.name, str(source.weight), len(prompts)) for source, prompts in sources]
        found = hashlib.sha256(repr(shares).encode())
        found.update(self.lengths.astype(np.int64).tobytes())
        for start, end in zip(self._starts, self._ends, strict=True):
            found.update(self._flat[start:end].tobytes())
        return found.hexdigest()

    def keys(self) -> list[int]:
        """A number for each prompt, equal for equal token ids. Other processes have other numbers."""
        return [hash(self._flat[start:end].tobytes()) for start, end in zip(self._starts, self._ends, strict=True)]

    def __getitem__(self, chosen: slice) -> list[Prompt]:
        """Prompts in order; the uid of a prompt is its index."""
        return [self.prompt(index, uid=index) for index in range(len(self))[chosen]]

    def describe(self) -> list[str]:
        """Sources and lengths in words, one line each."""
        number = f"streamed; of the first {len(self):,}:" if self.data.streams else f"{len(self):,};"
        return [*self.data.describe(), f"prompts: {number} {self.describe_lengths()}"]

    def describe_lengths(self) -> str:
        """The prompts' lengths in words, and how many prompts were dropped or truncated."""
        # The smallest length that at least so large a share of the lengths does not exceed.
        found = np.percentile(self.lengths, (0, 50, 99, 100), method="inverted_cdf")
        least, median, most, greatest = map(int, found)
        words = f"{least:,} to {greatest:,} tokens, median {median:,}, 99% at most {most:,}"
        if self.dropped:
            words += f"; {self.dropped:,} longer prompts dropped (data.overlong_prompts)"
        if self.truncated:
            words += f"; {self.truncated:,} longer prompts cut to their last tokens (data.overlong_prompts)"
        return words

    @property
    def spelt(self) -> list[str]:
        """The control tokens of the template that messages of rows spell, each with the name of its row."""
        return [one for renderer in self.renderers for one in renderer.spelt]

    def _locate(self, index: int) -> tuple[int, int]:
        """The source of a prompt, and the index of its row there."""
        row_index = self.row_indices[index]
        number = int(np.searchsorted(self._bounds, row_index, side="right")) - 1
        return number, int(row_index - self._bounds[number])

    def check_tokens(self, vocabulary: int | None, refused: Collection[int] = ()) -> None:
        """Check the tokens of all prompts, and those of rows that are streamed later.

        Args:
            vocabulary: tokens that the model has embeddings for; None: unknown.
            refused: ids of tokens that stand for images and the like.

        Raises:
            DataError: a prompt holds a token that is refused, or that the model lacks.
        """
        self._token_limits = (vocabulary, np.array(sorted(refused), np.int32))
        if self._is_refused(self._flat).any():
            for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
                self.check_row(self._flat[start:end], f"{self.name}: the prompt of {self._row_name(index)}")

    def check_row(self, token_ids: Sequence[int] | np.ndarray, what: str) -> None:
        """``check_tokens`` of one prompt. Raises ``DataError``, which calls it ``what``."""
        ids = np.asarray(token_ids)
        for token in ids[self._is_refused(ids)].tolist():
            if token in self._token_limits[1]:
                raise DataError(
                    f"{what} holds token {token}, which stands for an image, a video or sound: Cohort trains on text "
                    "alone. Remove it from the prompt"
                )
            raise DataError(
                f"{what} holds token {token} ({self._tokenizer.convert_ids_to_tokens(token)!r}), and the model has "
                f"embeddings of {self._token_limits[0]:,} tokens: resize them after adding tokens to the tokenizer "
                "(model.resize_token_embeddings), use the model's own tokenizer, or leave such rows out with "
                "data.filter"
            )

    def _is_refused(self, ids: np.ndarray) -> np.ndarray:
        vocabulary, refused = self._token_limits
        return np.isin(ids, refused) | (ids >= (np.inf if vocabulary is None else vocabulary))

    def _row_name(self, index: int) -> str:
        number, row_index = self._locate(index)
        source = self.data.sources[number]
        return f"{source.rows.where}, row {source.rows.numbers[row_index]}".removeprefix(f"{self.name}, ")

    def _apply(self, limit: LengthLimit) -> None:
        limit.check(self.lengths, self.name, self._row_name)
        fits = self.lengths <= limit.tokens
        count = int((~fits).sum())
        if limit.rule != "drop":
            self._starts = np.maximum(self._starts, self._ends - limit.tokens)
            self.truncated = count
            return
        self._starts, self._ends, self.row_indices = self._starts[fits], self._ends[fits], self.row_indices[fits]
        self.dropped = count
        read = " of the first {:,} rows (checked before the run)" if self.data.streams else ""
        if not len(self):
            raise DataError(
                f"{self.name}: every prompt{read.format(count)} has more than {limit.tokens:,} tokens ({limit.why}), "
                "and data.overlong_prompts is 'drop': nothing is left"
            )
        for source, prompts in zip(self.data.sources, self.ranges(), strict=True):
            if self.data.weights and not prompts:
                dropped = f"data.overlong_prompts has dropped every prompt{read.format(len(source.rows))}"
                raise DataError(f"{source.rows.where}: {dropped}, and the source has a weight")


def _as_bytes(values: list[Any]) -> bytes:
    """A batch of a column, for its hash. Objects that JSON lacks count by their text or, without one, their type."""
    try:
        return json.dumps(values, skipkeys=True, default=_text_of).encode()
    except (TypeError, ValueError, RecursionError):
        return repr([type(value).__name__ for value in values]).encode()


def _text_of(value: Any) -> str:
    text = repr(plain(value)) if isinstance(value, np.ndarray | np.generic | bytes | date | Decimal) else ""
    return text or type(value).__name__


def unknown_tokens(prompts: Sequence[Prompt], tokenizer: Any) -> int:
    """How many tokens of the prompts are the unknown token: text that the tokenizer cannot express."""
    return sum(one.token_ids.count(tokenizer.unk_token_id) for one in prompts)
