"""The completions being written: what each has drawn so far, and what it may draw next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import ConfigError
from cohort.rollout.backend import Capacity, moves_for_removal
from cohort.rollout.engine import Sampling
from cohort.rollout.philox import RNGKey
from cohort.rollout.sampling import Drawn, RowSettings, joined_support, support_of
from cohort.rollout.stops import StopStrings
from cohort.types import Completion, FinishReason, Prompt

DRAW_BLOCK = 64
"""Positions for which random numbers are made at a time."""


@dataclass(slots=True)
class Row:
    """A completion while it is being written. Its tokens lie in ``Rows``."""

    prompt_index: int
    sample: int
    prompt: Prompt
    sampling: Sampling
    stops: StopStrings
    matcher: Any = None
    """Where it stands in its grammar; None: it has none."""
    length: int = 0
    support: list[tuple[np.ndarray, bool]] = field(default_factory=list)

    @property
    def records_support(self) -> bool:
        """Whether what it draws from is kept."""
        return self.sampling.record_support and self.sampling.truncates


class Rows:
    """Rows, dense from 0 on; when some are removed, the last ones take their places, as in the backend.

    Args:
        capacity: how many rows, how many tokens.
        key: of the random numbers.
        end_token_ids: tokens that end a completion.
        vocabulary: V.
        keeps_seen: whether some row has a repetition penalty.
        like: a tensor of the logits' dtype and device.
    """

    def __init__(
        self,
        capacity: Capacity,
        key: RNGKey,
        end_token_ids: Sequence[int],
        vocabulary: int,
        *,
        keeps_seen: bool,
        like: Tensor,
    ) -> None:
        shape = (capacity.rows, capacity.completion_length)
        self.rows: list[Row] = []
        self._key = key
        self._tokens_ST = torch.zeros(shape, dtype=torch.long, device=like.device)
        self._logps_ST = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self._full_logps_ST = torch.zeros_like(self._logps_ST)
        self._lengths_S1 = torch.zeros(capacity.rows, 1, dtype=torch.long, device=like.device)
        self._uniforms_SW = torch.zeros(capacity.rows, DRAW_BLOCK, dtype=torch.float64, device=like.device)
        self._column = DRAW_BLOCK
        self._seen_SV = None
        if keeps_seen:
            self._seen_SV = torch.zeros(capacity.rows, vocabulary, dtype=torch.bool, device=like.device)
        ends = torch.zeros(vocabulary, dtype=torch.bool)
        ends[[end for end in end_token_ids if end < vocabulary]] = True
        self.ends_V = ends.to(like.device)
        self._settings: RowSettings | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, new: Sequence[Row]) -> None:
        """Begin rows."""
        first, count = len(self.rows), len(new)
        self.rows += new
        self._lengths_S1[first : first + count] = 0
        if self._column < DRAW_BLOCK:
            left = self._make_uniforms(new, DRAW_BLOCK - self._column)
            self._uniforms_SW[first : first + count, self._column :] = left
        if self._seen_SV is not None:
            self._seen_SV[first : first + count] = False
            for place, row in enumerate(new, first):
                self._seen_SV[place, list(row.prompt.token_ids)] = True
        self._settings = None

    def remove(self, places: Sequence[int]) -> None:
        """Forget rows."""
        tensors = [self._tokens_ST, self._logps_ST, self._full_logps_ST, self._lengths_S1, self._uniforms_SW]
        if self._seen_SV is not None:
            tensors.append(self._seen_SV)
        for source, place in moves_for_removal(places, len(self.rows)):
            self.rows[place] = self.rows[source]
            for tensor in tensors:
                tensor[place] = tensor[source]
        del self.rows[len(self.rows) - len(places) :]
        self._settings = None

    def uniforms(self) -> Tensor:
        """The number that decides each row's next draw, shape ``[S]``."""
        if self._column == DRAW_BLOCK:
            self._column = 0
            self._uniforms_SW[: len(self.rows)] = self._make_uniforms(self.rows, DRAW_BLOCK)
        self._column += 1
        return self._uniforms_SW[: len(self.rows), self._column - 1]

    def _make_uniforms(self, rows: Sequence[Row], count: int) -> Tensor:
        uids, samples, starts = (
            np.array(column, np.uint64)
            for column in zip(*((row.prompt.uid, row.sample, row.length) for row in rows), strict=True)
        )
        return torch.from_numpy(self._key.uniforms(uids, samples, starts, count)).to(self._uniforms_SW.device)

    def settings(self) -> RowSettings:
        """Each row's sampling settings."""
        if self._settings is None:
            samplings = [row.sampling for row in self.rows]
            self._settings = RowSettings.of(samplings, self.ends_V.device)
        return self._settings

    def seen(self) -> Tensor | None:
        """Which tokens each row's prompt and completion hold, ``[S, V]``; None where nobody asks."""
        return None if self._seen_SV is None else self._seen_SV[: len(self.rows)]

    def forbidden(self) -> Tensor | None:
        """What grammars and minimum lengths rule out of the next draw, boolean ``[S, V]``; None: nothing."""
        young = [place for place, row in enumerate(self.rows) if row.length < row.sampling.min_completion_length]
        constrained = [place for place, row in enumerate(self.rows) if row.matcher is not None]
        if not young and not constrained:
            return None
        forbidden_SV = torch.zeros(len(self.rows), len(self.ends_V), dtype=torch.bool)
        if constrained:
            forbidden_SV[constrained] = ~_allowed([self.rows[place].matcher for place in constrained], forbidden_SV)
        forbidden_SV = forbidden_SV.to(self.ends_V.device)
        for place in young:
            # Where a grammar allows nothing but the end, the text is complete: then it ends before the minimum.
            without_end_V = forbidden_SV[place] | self.ends_V
            if self.rows[place].matcher is None or not bool(without_end_V.all()):
                forbidden_SV[place] = without_end_V
        return forbidden_SV

    def forced(self) -> Tensor | None:
        """The token that is put next in each row, -1 where it is drawn; None: all are drawn."""
        forced = [
            row.sampling.forced_ids[row.length] if row.length < len(row.sampling.forced_ids) else -1
            for row in self.rows
        ]
        return torch.tensor(forced, device=self.ends_V.device) if max(forced) >= 0 else None

    def take(self, drawn: Drawn) -> None:
        """Write down what was drawn for every row."""
        count = len(self.rows)
        lengths_S1 = self._lengths_S1[:count]
        for held, values_S in (
            (self._tokens_ST, drawn.tokens_S),
            (self._logps_ST, drawn.logps_S),
            (self._full_logps_ST, drawn.full_logps_S),
        ):
            held[:count].scatter_(1, lengths_S1, values_S[:, None])
        lengths_S1.add_(1)
        if self._seen_SV is not None:
            self._seen_SV[:count].scatter_(1, drawn.tokens_S[:, None], True)
        for row in self.rows:
            row.length += 1
        if any(row.records_support for row in self.rows):
            whole = [(np.zeros(0, np.int32), True)] * count
            supports = whole if drawn.kept_SV is None else support_of(drawn.kept_SV)
            for row, support in zip(self.rows, supports, strict=True):
                if row.records_support:
                    row.support.append(support)

    def tail(self, place: int, count: int) -> list[int]:
        """The newest tokens of a row, at most so many."""
        length = self.rows[place].length
        tokens: list[int] = self._tokens_ST[place, max(0, length - count) : length].tolist()
        return tokens

    def completions(
        self, places: Sequence[int], reasons: Sequence[FinishReason], tokenizer: Any, version: int
    ) -> list[Completion]:
        """The given rows as they are, ended for the given reasons."""
        index = torch.tensor(places, device=self._tokens_ST.device)
        longest = max(self.rows[place].length for place in places)
        columns = [held[index, :longest].tolist() for held in (self._tokens_ST, self._logps_ST, self._full_logps_ST)]
        return [
            _completion(self.rows[place], reason, *values, tokenizer=tokenizer, version=version)
            for place, reason, *values in zip(places, reasons, *columns, strict=True)
        ]


def _allowed(matchers: Sequence[Any], like_SV: Tensor) -> Tensor:
    """What each grammar allows next. A grammar that has come to a dead end allows nothing: its row ends in an error,
    and the rest go on."""
    allowed_SV = torch.zeros(len(matchers), like_SV.shape[1], dtype=torch.bool)
    for matcher, row_V in zip(matchers, allowed_SV, strict=True):
        try:
            matcher.fill(row_V)
        except ConfigError:
            row_V.fill_(False)
    return allowed_SV


def _completion(
    row: Row,
    reason: FinishReason,
    tokens: list[int],
    logps: list[float],
    full_logps: list[float],
    *,
    tokenizer: Any,
    version: int,
) -> Completion:
    # The token of an error was not drawn, so it is not part of the completion.
    length, given = row.length - (reason is FinishReason.ERROR), len(row.sampling.forced_ids)
    reweighted = row.sampling.reweights or bool(given)
    return Completion.of_tokens(
        tokens[:length],
        logps[given:length],
        reason,
        decode(tokenizer, tokens[:length]),
        version,
        drawn=[n >= given for n in range(length)] if given else None,
        full_logps=full_logps[given:length] if reweighted else None,
        support=joined_support(row.support[given:length]) if row.support else None,
    )


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out, spaces as they are."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text
