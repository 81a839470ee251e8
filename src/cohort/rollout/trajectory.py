"""One trajectory from its request to its end: its tokens, which of them were drawn, and their log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cohort.errors import DataError
from cohort.rollout.engine import EndedTurn, Request
from cohort.types import Completion, FinishReason, Routes, Segment, Support, compact_routes, joined_routes

# ----------------------------------------
# Detection of stop strings.


REPLACEMENT = "\ufffd"
"""What tokenizers decode an incomplete character to."""


class StopStrings:
    """Looks for stop strings in the newest text of a completion.

    Args:
        tokenizer: decodes. Special tokens are decoded to their text, so they can be stop strings.
        stops: the strings, none of them empty.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        # A token has at least one byte, so a stop string of n bytes is in the last n tokens. A few more are decoded,
        # because the first tokens of a text may lose a space or be part of a character.
        self.tail = max((len(stop.encode()) for stop in stops), default=0) + 4
        """Number of newest tokens that are decoded."""
        self._may_end: dict[int, bool] = {}

    def found(self, token_ids: Sequence[int]) -> bool:
        """Whether the newest token completed a stop string."""
        if not self._stops or not self._can_complete(token_ids[-1]):
            return False
        before, text = self._decode(token_ids[-self.tail : -1]), self._decode(token_ids[-self.tail :])
        same = next((n for n, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(before))
        # A stop string in the text before was ignored then, because the completion was too short to end.
        return any(text.find(stop, max(0, same - len(stop) + 1)) >= 0 for stop in self._stops)

    def _can_complete(self, token: int) -> bool:
        """Whether the token may contain the last character of a stop string. Most cannot, which saves decoding."""
        if token not in self._may_end:
            text = self._decode([token])
            # A token decoded alone can lose a leading space, and may be an incomplete character.
            last = {stop[-1] for stop in self._stops}
            unclear = not text or REPLACEMENT in text or any(character.isspace() for character in last)
            self._may_end[token] = unclear or any(character in text for character in last)
        return self._may_end[token]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


Kept = tuple[np.ndarray, bool]
"""The tokens that a draw could have given, or (True) could not have given."""


@dataclass(slots=True, eq=False)
class Prefix:
    """A text after which trajectories begin: their prompt, or the history of one of them."""

    token_ids: Sequence[int]
    slot: int | None = None
    """Where the backend keeps what it computed for it. None: nowhere."""
    users: int = 0
    """Trajectories after it that are not finished."""


@dataclass(slots=True, eq=False)
class Trajectory:
    """A trajectory that an engine works on. ``number`` is what ``submit`` returned for it."""

    number: int
    request: Request
    stops: StopStrings
    grammar: Any = None
    """The compiled grammar; None without one."""
    prefix: Prefix = field(default_factory=lambda: Prefix(()))
    """The text that is prefilled before the trajectory's own tokens; see ``Scheduler``."""
    slot: int | None = None
    """Where the backend keeps what it computed for the trajectory, while it is decoded or parked. None: nowhere."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the present segment, drawn and given."""
    unread: list[int] = field(default_factory=list)
    """Tokens at the end of ``tokens`` that the model has to read before the next draw."""
    turn_start: int = 0
    """Index in ``tokens`` of the first token of this turn."""
    limit: int = 0
    """Length of ``tokens`` at which the turn is cut."""
    has_stops: bool = False
    matcher: Any = None
    """State of the grammar in this turn."""
    logps: list[float] = field(default_factory=list)
    full_logps: list[float] | None = None
    """Log-probabilities under the full softmax; None where they equal ``logps``."""
    supports: list[Kept] | None = None
    """One entry per drawn token; None when supports are not recorded."""
    prompt_routes: Routes | None = None
    _routes: Routes | None = None
    """Of the present segment."""
    _given: list[tuple[int, int]] = field(default_factory=list)
    _segments: list[Segment] = field(default_factory=list)
    _offset: int = 0

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.full_logps = [] if sampling.reweights else None
        self.supports = [] if sampling.record_support and sampling.truncates else None
        self.has_stops = bool(sampling.stop)
        self.give(sampling.forced_ids)

    @property
    def position(self) -> int:
        """Position of the next token in the trajectory, all segments counted: the key of its random number."""
        return self._offset + len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens, drawn and given, that may still follow."""
        return self.request.sampling.max_completion_length - len(self.tokens)

    def extend(self, token_ids: Sequence[int], *, rewrite: bool, vocab_size: int) -> None:
        """Begin another turn after given tokens. See ``Engine.extend``."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise DataError(
                f"token ids from {min(token_ids)} to {max(token_ids)} given; the model has {vocab_size} tokens"
            )
        room = self.request.sampling.max_completion_length if rewrite else self.room
        if len(token_ids) >= room or (rewrite and not token_ids):
            raise DataError(
                f"{len(token_ids)} tokens given to trajectory {self.number}, which has room for {room}: leave room for "
                "one drawn token, and give at least one token to a rewrite"
            )
        if rewrite:
            self._segments.append(self._segment())
            self._offset += len(self.tokens)
            self.tokens, self.unread, self._given, self._routes = [], [], [], None
        else:
            self.unread = self.tokens[-1:]  # the model has not read the last drawn token
        self.give(token_ids)

    def give(self, token_ids: Sequence[int]) -> None:
        """Append tokens that are not drawn; a new turn begins after them."""
        sampling = self.request.sampling
        if token_ids:
            self._given.append((len(self.tokens), len(self.tokens) + len(token_ids)))
        self.tokens += token_ids
        self.unread += token_ids
        self.turn_start = len(self.tokens)
        turn = sampling.max_turn_length or sampling.max_completion_length
        self.limit = min(self.turn_start + turn, sampling.max_completion_length)

    def take_routes(self, experts_TLK: np.ndarray) -> None:
        """Record the experts of the prompt and of the segment's tokens but the last, after a turn was drawn. Those that
        are known from earlier turns are kept: what was drawn then was drawn with them.

        Raises:
            DataError: they are of fewer tokens.
        """
        before = len(self.request.prompt.token_ids) - 1
        if len(experts_TLK) < before + len(self.tokens):
            raise DataError(f"experts of {len(experts_TLK)} tokens came for {before + len(self.tokens)} tokens read")
        if self.prompt_routes is None:
            self.prompt_routes = compact_routes(experts_TLK[:before])
        known = 0 if self._routes is None else len(self._routes)
        newest = compact_routes(experts_TLK[before + known : before + len(self.tokens)])  # invalid draws were cut
        self._routes = joined_routes([(self._routes, known), (newest, len(newest))])

    def begin_turn(self) -> None:
        """Start the grammar, which also matches the forced tokens. In the middle of a turn, it goes on."""
        if self.grammar is not None and len(self.tokens) == self.turn_start:
            self.matcher = self.grammar.matcher()
            for token in () if self.logps else self.request.sampling.forced_ids:
                self.matcher.consume(token)

    def forget(self) -> None:
        """What was computed for it is gone: the model has to read all tokens of the segment again."""
        self.slot, self.unread = None, list(self.tokens)

    def stopped(self) -> bool:
        """Whether the newest token, a drawn one, completes a stop string in the text of this turn."""
        if len(self.tokens) < self.request.sampling.min_completion_length:
            return False
        return self.stops.found(self.tokens[max(self.turn_start, len(self.tokens) - self.stops.tail) :])

    def ended(self, reason: FinishReason, tokenizer: Any, version: int) -> EndedTurn:
        """The turn as it is handed back."""
        segments = (*self._segments, self._segment())
        completion = Completion(
            segments,
            np.array(self.logps, np.float64),
            reason,
            decode(tokenizer, [token for segment in segments for token in segment.token_ids.tolist()]),
            version,
            full_logps=None if self.full_logps is None else np.array(self.full_logps, np.float64),
            support=joined_support(self.supports) if self.supports else None,
            prompt_routes=self.prompt_routes,
        )
        room = self.room if self.request.continues and reason.usable else 0
        return EndedTurn(self.number, self.request, completion, len(self.tokens) - self.turn_start, room)

    def _segment(self) -> Segment:
        drawn = None
        if self._given:
            drawn = np.ones(len(self.tokens), np.bool_)
            for start, end in self._given:
                drawn[start:end] = False
        routes = self._routes
        if routes is not None and len(routes) < len(self.tokens):  # it ended after given tokens
            routes = joined_routes([(routes, len(routes)), (None, len(self.tokens) - len(routes))])
        return Segment(np.array(self.tokens, np.int64), drawn, routes)


def joined_support(draws: Sequence[Kept]) -> Support | None:
    """The support of a completion from those of its draws; None if every draw could give every token."""
    if all(excluded and not len(ids) for ids, excluded in draws):
        return None
    return Support(
        np.concatenate([ids for ids, _ in draws]),
        np.array([len(ids) for ids, _ in draws], np.int32),
        np.array([excluded for _, excluded in draws], np.bool_),
    )


def decode(tokenizer: Any, token_ids: Sequence[int], *, special: bool = False) -> str:
    """Text of token ids: special tokens left out unless ``special``, spaces not cleaned up."""
    ids, skip = list(token_ids), not special
    text: str
    if _decodes_directly(tokenizer.__class__):  # transformers' own method looks at the type of every id
        text = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    else:
        text = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


@functools.cache
def _decodes_directly(kind: type) -> bool:
    """Whether a class of tokenizers decodes by transformers' methods for fast tokenizers, with none of its own."""
    methods = [getattr(kind, name, None) for name in ("decode", "_decode", "backend_tokenizer")]
    modules = [getattr(getattr(method, "fget", method), "__module__", "") for method in methods]
    return modules == ["transformers.tokenization_utils_base", *["transformers.tokenization_utils_tokenizers"] * 2]
