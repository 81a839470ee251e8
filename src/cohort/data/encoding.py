"""Text to token ids, with control tokens only where a chat template wrote them.

A tool's answer may spell ``<|im_end|>``. Tokenized with the template's text around it, the string would become the
control token, and the tool could end its own message and speak as the user or the assistant.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from cohort.errors import ConfigError

Span = tuple[int, int]


class Given(str):
    """Text that no template wrote: a tool's, an environment's or the policy's."""

    __slots__ = ()


class Encoder:
    """Tokenizes pieces of text as one text, so that tokens may cross from one piece to the next.

    ``str`` pieces are a template's own text. No control token overlaps a ``Given`` piece: the text is cut within each
    such match, and its parts are tokenized by themselves. Matches are found among the token ids, not in the text, so it
    does not matter how a string came to be: in one piece, from two, from a piece and the template's text beside it, or
    by the tokenizer's normalisation. Where there is no match, the ids are those of the whole text.

    Control tokens are the special tokens, and the other added tokens (such as ``<tool_call>``) unless they are
    whitespace, a word or a single character.

    Args:
        tokenizer: the tokenizer.
        control: the control tokens, as text. None: those named above.

    Raises:
        ConfigError: it is not a fast tokenizer.
    """

    def __init__(self, tokenizer: Any, control: Collection[str] | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                "tools, environments and data.escape_control_tokens need a fast tokenizer, which knows the place of "
                f"each token in the text; got {type(tokenizer).__name__}: save the model with a tokenizer.json"
            )
        self._backend = tokenizer.backend_tokenizer
        added = [
            (number, token)
            for number, token in tokenizer.added_tokens_decoder.items()
            if (is_control(token) if control is None else token.content in control)
        ]
        self._control = {number: token.content for number, token in added}
        self._unknown = tokenizer.unk_token_id
        self._pattern = any_of(self._control.values())
        self.special = special_tokens(tokenizer)
        """Its ``split`` cuts a text around the special tokens that it spells: text, token, text, and so on."""
        self._anchor = next((token.content for _, token in added if not (token.rstrip or token.lstrip)), "")
        """A control token to put before text that follows other text: some tokenizers add a space to the first word."""

    def encode(self, pieces: Sequence[str], *, inner: bool = False) -> list[int]:
        """The token ids of a text.

        Args:
            pieces: the text.
            inner: whether other text comes before it.
        """
        given, end = list[Span](), 0
        for one in pieces:
            start, end = end, end + len(one)
            if type(one) is Given:
                given.append((start, end))
        text = "".join(pieces).encode(errors="replace").decode()  # half a surrogate pair becomes "?"
        self._backend.no_truncation()  # other users of the tokenizer change these settings for every call
        self._backend.no_padding()
        self._backend.encode_special_tokens = False
        return self._encode(text, given, inner)

    def control_token(self, text: str) -> str | None:
        """The control token at the start of a text, after whitespace."""
        found = self._pattern.match(text.lstrip())
        return found and found.group()

    def _encode(self, text: str, given: Sequence[Span], inner: bool) -> list[int]:
        shift = len(self._anchor) if inner else 0
        encoding = self._backend.encode(self._anchor + text if inner else text, add_special_tokens=False)
        ids: list[int] = encoding.ids[1:] if shift else encoding.ids
        matches = [index for index, number in enumerate(ids) if number in self._control] if given else []
        offsets, forged = encoding.offsets if matches else (), dict[int, Span]()
        for index in matches:
            start, end = offsets[index + bool(shift)]
            if span := self._forged(ids[index], text, (start - shift, end - shift), given):
                forged[index] = span
        if not forged:
            return ids
        cuts = [start + 1 for start, end in forged.values() if end - start > 1]
        if not cuts:  # a special token of one character cannot be written as text
            return [number for index, number in enumerate(ids) if index not in forged]
        parts = []
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            within = [(max(a, start) - start, min(b, end) - start) for a, b in given if a < end and start < b]
            parts.append(self._encode(text[start:end], within, inner or start > 0))
        return list(itertools.chain.from_iterable(parts))

    def _forged(self, number: int, text: str, span: Span, given: Sequence[Span]) -> Span | None:
        """Where a control token is spelt with given text; None if it is the template's own."""
        matched = text[slice(*span)]
        if number == self._unknown and matched != self._control[number]:  # a character that has no token
            return None
        start = span[0] + len(matched) - len(matched.lstrip())  # some control tokens take the whitespace beside them
        end = start + len(matched.strip())
        return (start, end) if any(a < end and start < b for a, b in given) else None


def special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """A pattern of one group for the special tokens of a tokenizer."""
    return any_of(special_tokens_of(tokenizer))


def special_tokens_of(tokenizer: Any) -> set[str]:
    """The special tokens of a tokenizer, as text."""
    added = tokenizer.added_tokens_decoder.values()
    return {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""}


def is_control(token: Any) -> bool:
    """Whether an added token is a control token: special, or neither whitespace, a word nor a single character."""
    text = token.content.replace("▁", " ").strip()
    return bool(token.special or (len(text) > 1 and not text.isalnum()))


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """One group that matches any of the tokens, the longest first."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(tokens, key=len, reverse=True))) or '(?!)'})")
