"""Control tokens that the messages of rows spell.

A chat template marks turns with control tokens. A row whose text spells one, such as ``<|im_end|>``, ends its own turn
when it is tokenized, and may go on as another speaker: a forged system turn.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from cohort.data.chat import ANSWER, USER, render
from cohort.data.encoding import Encoder, Given, any_of, is_control, special_tokens_of
from cohort.types import Message

HOLE = "qzg{:06}"
"""A text that no template changes or contains."""


class TurnTokens:
    """The control tokens with which a chat template marks turns: the special tokens, and other added tokens that the
    template writes around messages. Tags within a turn, such as ``<think>``, are none: prompts speak of them.

    Args:
        tokenizer: the tokenizer, with the chat template in use.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        try:
            around = render(tokenizer, [USER, ANSWER, USER])
        except Exception:  # the template may require other conversations
            around = ""
        others = (token.content for token in tokenizer.added_tokens_decoder.values() if is_control(token))
        written = {*special_tokens_of(tokenizer), *(one for one in others if one in around)}
        self._tokens = {one for one in written if len(one.strip()) > 1}
        self._starts = {one[:2] for one in self._tokens}

    def spelt(self, messages: Sequence[Message]) -> str:
        """The first of the tokens that a message spells; empty if none does."""
        for text in itertools.chain.from_iterable(map(_texts, messages)):
            if any(start in text for start in self._starts) and (found := self._found_in(text)):
                return min(found, key=text.index)
        return ""

    def token_ids(self, messages: Sequence[Message], rendered: Callable[[Sequence[Message]], str]) -> list[int]:
        """The ids of a conversation in which what messages spell is plain text.

        Args:
            messages: the conversation.
            rendered: what the template makes of one.

        Raises:
            ConfigError: the tokenizer is not a fast one.
        """
        everything = repr(messages)
        free = (one for one in map(HOLE.format, itertools.count()) if one not in everything)
        changed, spelt = self.with_holes(messages, free)
        pieces = any_of(spelt).split(rendered(changed))
        return self._encoder.encode([Given(spelt[one]) if one in spelt else one for one in pieces])

    def with_holes(self, messages: Sequence[Message], free: Iterator[str]) -> tuple[list[Message], dict[str, str]]:
        """The messages with placeholders for the tokens that they spell, and the token of each placeholder."""
        tokens = {one for text in itertools.chain.from_iterable(map(_texts, messages)) for one in self._found_in(text)}
        spelt, pattern = dict[str, str](), any_of(tokens)

        def hole(found: re.Match[str]) -> str:
            spelt[one := next(free)] = found[0]
            return one

        return [_changed(message, lambda text: pattern.sub(hole, text)) for message in messages], spelt

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder(self._tokenizer, self._tokens)

    def _found_in(self, text: str) -> set[str]:
        return {one for one in self._tokens if one in text}


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    return [part["text"] for part in content] if isinstance(content, list) else [content or ""]


def _changed(message: Message, change: Callable[[str], str]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{**part, "text": change(part["text"])} for part in content]}
    return {**message, "content": change(content)} if content else message
