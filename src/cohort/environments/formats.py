"""Formats of tool calls, learned from the text that a chat template writes for known calls.

Where names and arguments are in the text tells what surrounds them. For Qwen's template and two calls:

    <tool_call>\\n{"name": "first", "arguments": {...}}\\n</tool_call>\\n<tool_call>\\n{"name": "second", ...}\\n</tool_call>
    [ opening  ][               body                  ][   closing   ]

A body is a JSON object with a name and arguments, or a list of those; a name, then the arguments as a JSON object; a
name, then keys and values between tags; or a list of calls in Python's syntax. gpt-oss's channels have their own reader.
"""

from __future__ import annotations

import ast
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cohort.environments.contract import ToolCall

MAX_NESTED = 100
"""Maximum number of closing brackets that are tried as the end of a list of calls in Python's syntax."""
_NAME = r"[\w.\-]{1,64}"
_PIECES = re.compile(r"<[^<>]*>?|\[[^\[\]]*\]|\s+|[^<\[\s]+|\[")
"""Literals are compared tag by tag: tags that begin alike are different tags."""


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


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a template writes for an assistant's turn that consists of calls with text arguments, two of them each."""

    text: str
    """From the generation prompt, without thoughts, to the end of the turn."""
    calls: tuple[tuple[str, Mapping[str, str]], ...]


class _Malformed(Exception):  # noqa: N818 - an error of the policy, which reads it
    """A body is not a call."""


ReadBody = Callable[[str, int], tuple[list[ToolCall], int]]
"""Reads a body from a position on: the calls, and the position after the body. Raises ``_Malformed``."""


@dataclass(frozen=True, slots=True)
class _Bodies:
    """The bodies in a rendering: their places, what reads one, and a pattern for how one begins."""

    places: Sequence[tuple[int, int]]
    read: ReadBody
    begins: str
    textual: bool = False


def learn(rendering: Rendering) -> Iterator[Format]:
    """The formats that a rendering may be in. Whether one reads other calls too is for the caller to check."""
    for locate in (_json_bodies, _named_bodies, _tagged_bodies, _python_bodies):
        bodies = locate(rendering)
        if bodies is not None:
            yield _delimited(rendering.text, bodies)
    if "<|message|>" in rendering.text:
        yield Format(_find_in_channels, channels=True)


# -- literals ----------------------------------------------------------------------------------------------------------


def _delimited(text: str, bodies: _Bodies) -> Format:
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

    An opening begins a call if a body seems to follow, or if the closing follows and the opening has the whitespace that
    the template writes. Otherwise it is text that mentions the opening.

    Args:
        opening, closing: the literals. Without an opening, a call is at the start of the text.
        outer: what is before the first and after the last call of a turn.
        bodies: what reads a body.
    """

    def __init__(self, opening: str, closing: str, outer: tuple[str, str], bodies: _Bodies) -> None:
        self._bodies, self._closing = bodies, closing.strip()
        first = rf"(?:{_flexible(outer[0])}\s*)?" if outer[0] else ""
        if opening.strip():
            exact = rf"(?P<exact>{re.escape(opening.lstrip())})"
            pattern = rf"{first}(?:{exact}|{_flexible(opening)})"
        else:
            pattern = rf"\A\s*+{first}(?:<\|python_tag\|>\s*+)?(?P<exact>)(?={bodies.begins})"
        self._opens = re.compile(pattern)
        self._begins = re.compile(rf"\s*+(?={bodies.begins})")
        self._closes = re.compile(_flexible(closing))
        self._ends = re.compile(rf"\s*+{_flexible(closing)}" + (rf"(?:\s*{_flexible(outer[1])})?" if outer[1] else ""))

    def find(self, text: str) -> list[Found]:
        """The calls in a text."""
        found: list[Found] = []
        position = 0
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
            if ends is None and text[end:].strip():
                raise _Malformed(f"expected {self._closing or 'nothing'} after it, got {text[end:].strip()[:20]!r}")
        except _Malformed as error:
            calls = [ToolCall("", error=f"invalid tool call: {error}")]
            ends = self._ends.match(text, closed.start()) if closed else None
        return Found(opened.start(), ends.end() if ends else len(text), tuple(calls))


def _flexible(literal: str) -> str:
    """A pattern for the literal, with any whitespace where it has some, and none at its ends."""
    return r"\s*".join(map(re.escape, literal.split()))


def common_start(a: str, b: str) -> str:
    return "".join(os.path.commonprefix([_PIECES.findall(a), _PIECES.findall(b)]))


def common_end(a: str, b: str) -> str:
    return "".join(os.path.commonprefix([_PIECES.findall(a)[::-1], _PIECES.findall(b)[::-1]])[::-1])


# -- JSON objects with name and arguments ------------------------------------------------------------------------------


def _json_bodies(rendering: Rendering) -> _Bodies | None:
    places, names, position = [], [], 0
    while match := re.compile(r"[\[{]").search(rendering.text, position):
        try:
            calls, end = _read_json(rendering.text, match.start())
        except _Malformed:
            position = match.end()
            continue
        places.append((match.start(), end))
        names += [(call.name, call.arguments) for call in calls]
        position = end
    if names != list(rendering.calls):
        return None
    start = places[0][0]
    # Without an opening, what follows must look more like a call than any JSON object does.
    first_key = (
        re.compile(r'[\[\s]*\{\s*"\w+"').match(rendering.text, start) if not rendering.text[:start].strip() else None
    )
    return _Bodies(places, _read_json, _flexible(first_key[0]) if first_key else r"[\[{]")


def _read_json(text: str, position: int) -> tuple[list[ToolCall], int]:
    value, end = _decoded(text, position)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise _Malformed("the list of calls is empty")
    return [_call(one) for one in values], end


def _decoded(text: str, position: int) -> tuple[Any, int]:
    """A JSON value at a position, and the position after it. Line breaks in strings are accepted."""
    decoder = json.JSONDecoder(strict=False, parse_constant=_no_constant)
    try:
        return decoder.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise _Malformed(f"invalid JSON: {error.msg} at character {error.pos - position}") from None
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"invalid JSON: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _call(value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    table = function if isinstance(function, dict) else value
    if not isinstance(table, dict):
        raise _Malformed(f"expected a JSON object with a name and arguments, got {str(value)[:20]!r}")
    name = next((table[key] for key in ("name", "tool_name", "function") if key in table), None)
    if not isinstance(name, str):
        raise _Malformed("the name of the tool is missing")
    return ToolCall(name, _arguments(next((table[key] for key in ("arguments", "parameters") if key in table), {})))


def _arguments(value: Any) -> dict[str, Any]:
    """The arguments of a call; some templates write them as JSON text within the JSON object."""
    if isinstance(value, str):
        value, _ = _decoded(value.strip(), 0)
    if not isinstance(value, dict):
        raise _Malformed(f"the arguments must be a JSON object, got {str(value)[:20]!r}")
    return value


# -- names, then arguments as JSON objects -----------------------------------------------------------------------------


def _named_bodies(rendering: Rendering) -> _Bodies | None:
    text, places, separators, position = rendering.text, [], set(), 0
    for name, arguments in rendering.calls:
        start = text.find(name, position)
        brace = text.find("{", start)
        if start < 0 or brace < 0:
            return None
        try:
            value, position = _decoded(text, brace)
        except _Malformed:
            return None
        if value != arguments:
            return None
        places.append((start, position))
        separators.add(text[start + len(name) : brace])
    if len(separators) > 1:
        return None
    head = re.compile(rf"({_NAME})\s*{_flexible(separators.pop())}\s*(?=\{{)")

    def read(text: str, position: int) -> tuple[list[ToolCall], int]:
        match = head.match(text, position)
        if match is None:
            raise _Malformed("expected the name of a tool, then its arguments as a JSON object")
        value, end = _decoded(text, match.end())
        return [ToolCall(match[1], _arguments(value))], end

    return _Bodies(places, read, head.pattern)


# -- names, then keys and values between tags --------------------------------------------------------------------------


def _tagged_bodies(rendering: Rendering) -> _Bodies | None:
    """Reads ``NAME [after_name] ([open_key] KEY [to_value] VALUE [close_value])*``. Around a value, the whitespace that
    the template writes is not part of it."""
    text, places, position = rendering.text, [], 0
    gaps: list[str] = []  # what precedes each name, key and value
    for name, arguments in rendering.calls:
        for part in (name, *(one for pair in arguments.items() for one in pair)):
            start = text.find(part, position)
            if start < 0:
                return None
            gaps.append(text[position:start])
            if part == name:
                places.append((start, start))
            position = start + len(part)
        places[-1] = (places[-1][0], position)
    _, to_key, to_value, to_next_key = gaps[:4]
    close_value = common_start(to_next_key, gaps[5] if len(gaps) > 5 else text[position:])
    open_key = to_next_key.removeprefix(close_value)
    if not (close_value.strip() and open_key.strip() and to_value.strip() and to_key.endswith(open_key)):
        return None
    after_name = to_key.removesuffix(open_key)
    head = re.compile(rf"({_NAME})\s*{_flexible(after_name)}" + ("" if after_name.strip() else r"\s*(?=<)"))
    pair = re.compile(
        rf"\s*{_flexible(open_key)}\s*(?P<key>[^<>\n]{{1,64}}?)\s*{_flexible(to_value)}{_edge(to_value, '$')}"
        rf"(?P<value>.*?){_edge(close_value, '^')}{_flexible(close_value)}",
        re.DOTALL,
    )

    def read(text: str, position: int) -> tuple[list[ToolCall], int]:
        match = head.match(text, position)
        if match is None:
            raise _Malformed("expected the name of a tool")
        arguments: dict[str, Any] = {}
        end = match.end()
        while (match_pair := pair.match(text, end)) is not None:
            arguments[match_pair["key"]] = match_pair["value"]
            end = match_pair.end()
        return [ToolCall(match[1], arguments)], end

    ends = [end + len(close_value) for _, end in places]
    return _Bodies(
        [(start, end) for (start, _), end in zip(places, ends, strict=True)], read, head.pattern, textual=True
    )


def _edge(literal: str, side: str) -> str:
    """A pattern for the whitespace at one end of the literal, which may be missing."""
    space = re.search(r"\s+$" if side == "$" else r"^\s+", literal)
    return f"(?:{re.escape(space[0])})?" if space else ""


# -- lists of calls in Python's syntax ---------------------------------------------------------------------------------


def _python_bodies(rendering: Rendering) -> _Bodies | None:
    start = rendering.text.find(f"[{rendering.calls[0][0]}(")
    try:
        calls, end = _read_python(rendering.text, max(start, 0))
    except _Malformed:
        return None
    same = [(call.name, call.arguments) for call in calls] == list(rendering.calls)
    return _Bodies([(start, end)], _read_python, rf"\[\s*{_NAME}\(") if same else None


def _read_python(text: str, position: int) -> tuple[list[ToolCall], int]:
    if not text.startswith("[", position):
        raise _Malformed("expected [NAME(ARGUMENT=VALUE, ...), ...]")
    end = position
    for _ in range(MAX_NESTED):
        end = text.find("]", end) + 1
        if not end:
            break
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
                tree = ast.parse(text[position:end], mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        return [_python_call(node) for node in getattr(tree, "elts", [])], end
    raise _Malformed("expected [NAME(ARGUMENT=VALUE, ...), ...]")


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise _Malformed("expected NAME(ARGUMENT=VALUE, ...)")
    constants = {"true": True, "false": False, "null": None}
    for one in ast.walk(node):
        for field, value in ast.iter_fields(one):
            if isinstance(value, ast.Name) and value.id in constants and field != "func":
                setattr(one, field, ast.Constant(constants[value.id]))
            elif isinstance(value, list):
                value[:] = [
                    ast.Constant(constants[item.id]) if isinstance(item, ast.Name) and item.id in constants else item
                    for item in value
                ]
    try:
        return ToolCall(ast.unparse(node.func), {str(one.arg): ast.literal_eval(one.value) for one in node.keywords})
    except (ValueError, TypeError, RecursionError) as error:
        raise _Malformed(f"an argument is not a literal value ({error})") from None


# -- gpt-oss -----------------------------------------------------------------------------------------------------------

_MESSAGE = re.compile(r"<\|message\|>(.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]{1,64})")


def _find_in_channels(text: str) -> list[Found]:
    found, position = [], 0
    for match in _MESSAGE.finditer(text):
        recipient = _RECIPIENT.search(text, position, match.start())
        if recipient:
            try:
                value, end = _decoded(match[1].strip(), 0)
                if end < len(match[1].strip()):
                    raise _Malformed("more text after the JSON object")
                call = ToolCall(recipient[1], _arguments(value))
            except _Malformed as error:
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
