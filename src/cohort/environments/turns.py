"""Turns as tokens, as messages and in print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from cohort.environments.bridge import Bridge
from cohort.environments.calls import CallParser, ParsedTurn
from cohort.environments.contract import Answer
from cohort.rollout.trajectory import decode
from cohort.types import Group, Message

READ_PER_TOKEN = 16
"""Characters of a long answer that are tokenized at first, at its start and at its end, for each token that it may
have."""


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How turns are written as tokens, and read from them."""

    tokenizer: Any
    bridge: Bridge
    """What the chat template writes between turns."""
    parser: CallParser | None
    """Finds the calls in a turn. None: there are no tools."""
    rewrite: Callable[[list[Message]], list[Message]] | None = None
    """What the policy is to read instead of all messages so far; None: as ``environment.history`` says."""

    def describe(self) -> str:
        """What stands between turns, and how calls are found, for the start of the run."""
        lines = [self.bridge.describe()]
        if self.parser:
            lines.append(f"calls are found by {self.parser.name}")
        return "\n".join(lines)

    def parse(self, token_ids: Sequence[int], prefix: str) -> ParsedTurn:
        """What the policy wrote in a turn.

        Args:
            token_ids: the drawn tokens, without an end token.
            prefix: the text before them.
        """
        if self.parser is None:
            text = decode(self.tokenizer, token_ids)
            return ParsedTurn(text, (), {"role": "assistant", "content": text})
        return self.parser.parse(self.text(token_ids), prefix)

    def shortened(self, answer: Answer, limit: int) -> Answer:
        """The answer with at most about ``limit`` tokens of content in each message: a note replaces the middle."""
        return replace(answer, messages=tuple(self._shortened(message, limit) for message in answer.messages))

    def _shortened(self, message: Message, limit: int) -> Message:
        content = message.get("content")
        if not isinstance(content, str):
            return message
        reach, encode = READ_PER_TOKEN * limit, partial(self.tokenizer.encode, add_special_tokens=False)
        token_ids = encode(content[:reach])
        while reach < len(content) and len(token_ids) <= 2 * limit:  # a cut changes the tokens beside it, not so many
            reach *= 4
            token_ids = encode(content[:reach])
        if len(token_ids) <= limit:
            return message
        count, about, last_ids = len(token_ids), "", token_ids
        if reach < len(content):
            count, about, last_ids = count * len(content) // reach, "about ", encode(content[-reach:])
        head, tail = token_ids[: (limit + 1) // 2], last_ids[max(0, len(last_ids) - limit // 2) :]
        note = f"\n[{about}{count - limit:,} tokens are left out here]\n"
        return {**message, "content": f"{self.text(head)}{note}{self.text(tail)}"}

    def prefix(self, token_ids: Sequence[int]) -> str:
        """The text before a turn, for ``parse``; empty where that needs none."""
        return self.text(token_ids) if self.parser else ""

    def text(self, token_ids: Sequence[int]) -> str:
        """Token ids decoded, special tokens included."""
        return decode(self.tokenizer, token_ids, special=True)


def first_episode(groups: Sequence[Group], tokenizer: Any) -> str:
    """The first usable completion in words, its drawn tokens between ⟦ and ⟧; empty if there is none."""
    pairs = [(group.prompt, one) for group in groups for one in group.completions if one.finish_reason.usable]
    if not pairs:
        return ""
    prompt, completion = pairs[0]
    pieces = [prompt.text]
    for number, segment in enumerate(completion.segments):
        drawn = segment.is_drawn.tolist()
        pieces += ["\n--- rewritten:\n"] if number else []
        for is_drawn, run in groupby(range(len(drawn)), key=drawn.__getitem__):
            text = decode(tokenizer, segment.token_ids[list(run)].tolist(), special=True)
            pieces.append(f"⟦{text}⟧" if is_drawn else text)
    count = len(completion.episode.turns) if completion.episode else 1
    turns = "1 turn" if count == 1 else f"{count} turns"
    head = f"the first episode: {turns}, finish reason {completion.finish_reason}; the policy drew what is in ⟦ ⟧"
    return f"{head}\n{''.join(pieces)}"
