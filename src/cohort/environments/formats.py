"""Formats of tool calls, learned from the text that a chat template writes for known calls.

The places of names and arguments tell what surrounds them. For Qwen's template and two calls:

    opening    <tool_call>
    body       {"name": "first", "arguments": {...}}
    closing    </tool_call>

gpt-oss's channels have a reader of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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


@dataclass(frozen=True, slots=True)
class Format:
    """A format of tool calls."""

    find: Callable[[str], list[Found]]
    """Finds the calls in a text, malformed ones included. Never raises."""
    textual: bool = False
    """Whether the format writes all values as text, which is to be read by the tool's schema."""
    channels: bool = False
    """Whether the text consists of gpt-oss's channels."""


def learn(rendering: Rendering) -> Iterator[Format]:
    """The formats that a rendering may be in. Whether one reads other calls too is for the caller to check."""
    if "<|channel|>" in rendering.text:
        yield Format(_find_in_channels, channels=True)
    for bodies in locate(rendering):
        yield _delimited(rendering.text, bodies)


# -- literals ----------------------------------------------------------------------------------------------------------


def _delimited(text: str, bodies: Bodies) -> Format:
    """The format of bodies between the literals that surround them in the text."""
    (first, first_end), (_, last_end) = bodies.places[0], bodies.places[-1]
    before, after = text[:first], text[last_end:]
    opening, closing = before, after
    if len(bodies.places) > 1:
        between = text[first_end : bodies.places[1][0]]
        closing = common_start(between, after)
        opening = common_end(before, between.removeprefix(closing))
    outer = before.removesuffix(opening).strip(), after.removeprefix(closing).strip()
    return Format(_Delimited(opening, closing, outer, bodies).find, bodies.textual)


class _Delimited:
    """Finds bodies between an opening and a closing literal.

    An opening begins a call if a body seems to follow, or if the closing follows and the opening has the whitespace
    that the template writes. Otherwise it is text that mentions the opening.

    Args:
        opening, closing: the literals. Without an opening, a call is at the start of the text.
        outer: what is before the first and after the last call of a turn.
        bodies: what reads a body.
    """

    def __init__(self, opening: str, closing: str, outer: tuple[str, str], bodies: Bodies) -> None:
        self._bodies, self._closing = bodies, closing.strip()
        self._word = opening.split(maxsplit=1)[0] if opening.strip() else ""
        first = rf"(?:{flexible(outer[0])}\s*)?" if outer[0] else ""
        if opening.strip():
            exact = rf"(?P<exact>{re.escape(opening.lstrip())})"
            pattern = rf"{first}(?:{exact}|{flexible(opening)})"
        else:
            pattern = rf"\A\s*+{first}(?:<\|python_tag\|>\s*+)?(?P<exact>)(?={bodies.begins})"
        self._opens = re.compile(pattern)
        self._begins = re.compile(rf"\s*+(?={bodies.begins})")
        self._closes = re.compile(flexible(closing))
        last = rf"(?:\s*{flexible(outer[1])})?" if outer[1] else ""
        self._ends = re.compile((rf"\s*+{flexible(closing)}" if closing.strip() else "") + last)

    def find(self, text: str) -> list[Found]:
        """The calls in a text."""
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
            calls, end = self._bodies.read(text, start)
            ends = self._ends.match(text, end)
            rest = text[end:].strip()
            if ends is None and (rest or self._bodies.textual):
                raise Malformed(f"expected {self._closing or 'nothing'} after it, got {rest[:MAX_SHOWN]!r}")
        except Malformed as error:
            calls = [ToolCall("", error=f"invalid tool call: {error}")]
            ends = self._ends.match(text, closed.start()) if closed else None
        return Found(opened.start(), ends.end() if ends else len(text), tuple(calls))


# -- gpt-oss -----------------------------------------------------------------------------------------------------------

_MESSAGE = re.compile(r"<\|message\|>(.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]{1,64})")


def _find_in_channels(text: str) -> list[Found]:
    found, position = [], 0
    for match in _MESSAGE.finditer(text):
        recipient = _RECIPIENT.search(text, position, match.start())
        if recipient:
            try:
                value, end = decoded(match[1].strip(), 0)
                if end < len(match[1].strip()):
                    raise Malformed("more text after the JSON object")
                call = ToolCall(recipient[1], arguments_of(value))
            except Malformed as error:
                call = ToolCall(recipient[1], error=f"invalid tool call: {error}")
            found.append(Found(position, match.end(), (call,)))
        position = match.end()
    return found


def content_of_channels(text: str) -> tuple[str, str]:
    """What the policy wrote to the user, and its thoughts, in a text of gpt-oss's channels without calls."""
    parts: tuple[list[str], list[str]] = ([], [])
    position = 0
    for match in _MESSAGE.finditer(text):
        parts["<|channel|>analysis" in text[position : match.start()]].append(match[1])
        position = match.end()
    return "\n".join(parts[0]) if position else text, "\n".join(parts[1])
