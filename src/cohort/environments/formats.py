"""Formats of tool calls, learned from the text that a chat template writes for known calls.

The places of names and arguments tell what surrounds them. For Qwen's template and two calls:

    opening    <tool_call>
    body       {"name": "first", "arguments": {...}}
    closing    </tool_call>

gpt-oss's channels have a reader of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from cohort.environments.bodies import (
    MAX_SHOWN,
    Bodies,
    Malformed,
    Rendering,
    arguments_of,
    common_end,
    common_start,
    decoded,
    flexible,
    locate,
)
from cohort.environments.contract import ToolCall


@dataclass(frozen=True, slots=True)
class Found:
    """Calls in a text. ``start`` and ``end`` include the literals around them."""

    start: int
    end: int
    calls: tuple[ToolCall, ...]


def formats_of(rendering: Rendering) -> Iterator[Format]:
    """The formats that a rendering may be in. Whether one reads other calls too is for the caller to check."""
    return (Format(rendering.text, bodies) for bodies in locate(rendering))


class Format:
    """A format of calls: bodies between an opening and a closing literal, which are found in a turn with calls.

    An opening begins a call if a body seems to follow, or if the closing follows and the opening has the whitespace
    that the template writes. Otherwise it is text that mentions the opening. Without an opening, a call is at the start
    of the text.

    Args:
        turn: what a template renders.
        bodies: those in the turn, and what reads others.
    """

    def __init__(self, turn: str, bodies: Bodies) -> None:
        (first, first_end), (_, last_end) = bodies.places[0], bodies.places[-1]
        before, after = turn[:first], turn[last_end:]
        opening, closing = before, after
        if len(bodies.places) > 1:
            between = turn[first_end : bodies.places[1][0]]
            closing = common_start(between, after)
            opening = common_end(before, between.removeprefix(closing))
        self.bodies, self._closing = bodies, closing.strip()
        self._word = opening.split(maxsplit=1)[0] if opening.strip() else ""
        begin, end = before.removesuffix(opening).strip(), after.removeprefix(closing).strip()
        first_literal = rf"(?:{flexible(begin)}\s*)?" if begin else ""
        last_literal = rf"(?:\s*{flexible(end)})?" if end else ""
        if opening.strip():
            exact = rf"(?P<exact>{re.escape(opening.lstrip())})"
            pattern = rf"{first_literal}(?:{exact}|{flexible(opening)})"
        else:
            pattern = rf"\A\s*+{first_literal}(?:<\|python_tag\|>\s*+)?(?P<exact>)(?={bodies.begins})"
        self._opens = re.compile(pattern)
        self._begins = re.compile(rf"\s*+(?={bodies.begins})")
        self._closes = re.compile(flexible(closing))
        self._ends = re.compile((rf"\s*+{flexible(closing)}" if closing.strip() else "") + last_literal)

    def find(self, text: str) -> list[Found]:
        """The calls in a text, malformed ones included. Never raises."""
        found: list[Found] = []
        position = 0 if self._word in text else len(text)
        while (opened := self._opens.search(text, position)) is not None:
            one = self._read(text, opened)
            if one is not None:
                found.append(one)
            position = max(one.end if one else 0, opened.end(), opened.start() + 1)
        return found

    def _read(self, text: str, opened: re.Match[str]) -> Found | None:
        begun = self._begins.match(text, opened.end())
        start = begun.end() if begun else opened.end()
        closed = self._closes.search(text, start) if self._closing else None
        if begun is None and (closed is None or opened["exact"] is None):
            return None
        try:
            calls, end = self.bodies.read(text, start)
            ends = self._ends.match(text, end)
            rest = text[end:].strip()
            if ends is None and (rest or self.bodies.textual):
                raise Malformed(f"expected {self._closing or 'nothing'} after it, got {rest[:MAX_SHOWN]!r}")
        except Malformed as error:
            calls = [ToolCall("", error=f"invalid tool call: {error}")]
            ends = self._ends.match(text, closed.start()) if closed else None
        return Found(opened.start(), ends.end() if ends else len(text), tuple(calls))


# -- gpt-oss -----------------------------------------------------------------------------------------------------------

_MESSAGE = re.compile(r"<\|message\|>(.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]{1,64})")


def read_channels(text: str) -> tuple[str, str, list[ToolCall]]:
    """What the policy wrote to the user, its thoughts, and its calls."""
    said, thoughts, calls, position = list[str](), list[str](), list[ToolCall](), 0
    for match in _MESSAGE.finditer(text):
        header, position = text[position : match.start()], match.end()
        recipient = _RECIPIENT.search(header)
        if recipient:
            calls.append(_call(recipient[1], match[1].strip()))
        if not recipient or calls[-1].error:
            (thoughts if "<|channel|>analysis" in header else said).append(match[1])
    rest = text[position:].strip() if position else text
    return "\n".join(said) if said or thoughts else rest, "\n".join(thoughts), calls


def _call(name: str, body: str) -> ToolCall:
    try:
        value, end = decoded(body, 0)
        if end < len(body):
            raise Malformed("more text after the JSON object")
        return ToolCall(name, arguments_of(value))
    except Malformed as error:
        return ToolCall(name, error=f"invalid tool call: {error}")
