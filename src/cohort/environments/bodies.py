"""Bodies of tool calls: where they are in a chat template's rendering of known calls, and what reads others like them.

A body is a JSON object with a name and arguments, or a list of those; a name, then the arguments as a JSON object; a
name, then keys and values between tags; or a list of calls in Python's syntax.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cohort.environments.contract import ToolCall
from cohort.environments.schemas import no_constant

MAX_SHOWN = 20
"""Characters of the policy's text in an error."""
MAX_NESTED = 100
"""Maximum number of closing brackets that are tried as the end of a list of calls in Python's syntax."""
_NAME = r"[\w.\-]{1,64}"
_PIECES = re.compile(r"<[^<>]*>?|\[[^\[\]]*\]|\s+|[^<\[\s]+|\[")
"""Literals are compared tag by tag: tags that begin alike are different tags."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """What a template writes for an assistant's turn that consists of calls with text arguments, two of them each."""

    text: str
    """From the generation prompt, without thoughts, to the end of the turn."""
    calls: Sequence[ToolCall]


class Malformed(Exception):  # noqa: N818 - an error of the policy, which reads it
    """A body is not a call."""


ReadBody = Callable[[str, int], tuple[list[ToolCall], int]]
"""Reads a body from a position on: the calls, and the position after the body. Raises ``Malformed``."""


@dataclass(frozen=True, slots=True)
class Bodies:
    """The bodies in a rendering: their places, what reads one, and a pattern for how one begins."""

    places: Sequence[tuple[int, int]]
    read: ReadBody
    begins: str
    textual: bool = False
    """Whether all values are text. The end of such a body is known only by the closing literal."""


def locate(rendering: Rendering) -> Iterator[Bodies]:
    """The bodies in a rendering, in each way in which they can be read."""
    for find in (_json_bodies, _named_bodies, _tagged_bodies, _python_bodies):
        bodies = find(rendering)
        if bodies is not None:
            yield bodies


# -- literals ----------------------------------------------------------------------------------------------------------


def flexible(literal: str) -> str:
    """A pattern for the literal, with any whitespace where it has some, and none at its ends."""
    return r"\s*".join(map(re.escape, literal.split()))


def common_start(a: str, b: str) -> str:
    """The tags, words and whitespace that both texts begin with."""
    return "".join(_common(_PIECES.findall(a), _PIECES.findall(b)))


def common_end(a: str, b: str) -> str:
    """The tags, words and whitespace that both texts end with."""
    return "".join(_common(_PIECES.findall(a)[::-1], _PIECES.findall(b)[::-1])[::-1])


def _common(a: list[str], b: list[str]) -> list[str]:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return [piece for piece, _ in pairs]


# -- JSON objects with name and arguments ------------------------------------------------------------------------------


def _json_bodies(rendering: Rendering) -> Bodies | None:
    bodies = _bodies(rendering, r"[\[{]", _read_json, r"[\[{]")
    if bodies and not rendering.text[: bodies.places[0][0]].strip():
        # Without an opening, what follows must look more like a call than any JSON object does.
        return replace(bodies, begins=r'\[?\s*\{\s*"(?:name|type|function|tool_name)"')
    return bodies


def _bodies(rendering: Rendering, pattern: str, read: ReadBody, begins: str) -> Bodies | None:
    """The bodies that can be read where the pattern matches. None: these are not the rendered calls."""
    places, found, position = [], list[ToolCall](), 0
    while match := re.compile(pattern).search(rendering.text, position):
        try:
            calls, position = read(rendering.text, match.start())
        except Malformed:
            position = match.end()
            continue
        places.append((match.start(), position))
        found += calls
    return Bodies(places, read, begins) if found == list(rendering.calls) else None


def _read_json(text: str, position: int) -> tuple[list[ToolCall], int]:
    value, end = decoded(text, position)
    values = value if isinstance(value, list) else [value]
    if not values:
        raise Malformed("the list of calls is empty")
    return [_call(one) for one in values], end


def decoded(text: str, position: int) -> tuple[Any, int]:
    """A JSON value at a position, and the position after it. Line breaks in strings are accepted.

    Raises:
        Malformed: there is none.
    """
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise Malformed(f"invalid JSON: {error.msg} at character {error.pos - position}") from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"invalid JSON: {error}") from None


_DECODER = json.JSONDecoder(strict=False, parse_constant=no_constant)


def _call(value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    table = function if isinstance(function, dict) else value
    if not isinstance(table, dict):
        raise Malformed(f"expected a JSON object with a name and arguments, got {str(value)[:MAX_SHOWN]!r}")
    name = next((table[key] for key in ("name", "tool_name", "function") if key in table), None)
    if not isinstance(name, str):
        raise Malformed("the name of the tool is missing")
    return ToolCall(name, arguments_of(next((table[key] for key in ("arguments", "parameters") if key in table), {})))


def arguments_of(value: Any) -> dict[str, Any]:
    """The arguments of a call; some templates write them as JSON text within the JSON object."""
    if isinstance(value, str):
        value, _ = decoded(value.strip(), 0)
    if not isinstance(value, dict):
        raise Malformed(f"the arguments must be a JSON object, got {str(value)[:MAX_SHOWN]!r}")
    return value


# -- names, then arguments as JSON objects -----------------------------------------------------------------------------


def _named_bodies(rendering: Rendering) -> Bodies | None:
    names = [call.name for call in rendering.calls]
    separator = rendering.text.partition(names[0])[2].partition("{")[0]
    head = re.compile(rf"({_NAME})\s*{flexible(separator)}\s*(?=\{{)")

    def read(text: str, position: int) -> tuple[list[ToolCall], int]:
        match = head.match(text, position)
        if match is None:
            raise Malformed("expected the name of a tool, then its arguments as a JSON object")
        value, end = decoded(text, match.end())
        return [ToolCall(match[1], arguments_of(value))], end

    return _bodies(rendering, "|".join(map(re.escape, names)), read, head.pattern)


# -- names, then keys and values between tags --------------------------------------------------------------------------


def _tagged_bodies(rendering: Rendering) -> Bodies | None:
    """Reads ``NAME [after_name] ([open_key] KEY [to_value] VALUE [close_value])*``. Around a value, the whitespace that
    the template writes is not part of it."""
    text = rendering.text
    parts = [part for call in rendering.calls for part in (call.name, *itertools.chain(*call.arguments.items()))]
    match = re.match("".join(f"(.*?){re.escape(part)}" for part in parts), text, re.DOTALL)
    if match is None:
        return None
    _, to_key, to_value, to_next_key, *gaps = match.groups()  # what precedes each name, key and value
    close_value = common_start(to_next_key, gaps[1] if len(gaps) > 1 else text[match.end() :])
    open_key = to_next_key.removeprefix(close_value)
    if not (close_value.strip() and open_key.strip() and to_value.strip() and to_key.endswith(open_key)):
        return None
    after_name = to_key.removesuffix(open_key)
    head = re.compile(rf"({_NAME})\s*{flexible(after_name)}" + ("" if after_name.strip() else r"\s*(?=<)"))
    pair = re.compile(
        rf"\s*{flexible(open_key)}\s*(?P<key>[^<>\n]{{1,64}}?)\s*{flexible(to_value)}{_edge(to_value, '$')}"
        rf"(?P<value>.*?){_edge(close_value, '^')}{flexible(close_value)}",
        re.DOTALL,
    )

    def read(text: str, position: int) -> tuple[list[ToolCall], int]:
        named = head.match(text, position)
        if named is None:
            raise Malformed("expected the name of a tool")
        arguments: dict[str, Any] = {}
        end = named.end()
        while (found := pair.match(text, end)) is not None:
            arguments[found["key"]] = found["value"]
            end = found.end()
        return [ToolCall(named[1], arguments)], end

    names = range(1, len(parts) + 1, 5)  # of a call, there are its name, two keys and two values
    ends = [*(match.start(name) for name in names[1:]), match.end()]
    places = [(match.end(name), end + len(close_value)) for name, end in zip(names, ends, strict=True)]
    return Bodies(places, read, head.pattern, textual=True)


def _edge(literal: str, side: str) -> str:
    """A pattern for the whitespace at one end of the literal, which may be missing."""
    space = re.search(r"\s+$" if side == "$" else r"^\s+", literal)
    return f"(?:{re.escape(space[0])})?" if space else ""


# -- lists of calls in Python's syntax ---------------------------------------------------------------------------------


def _python_bodies(rendering: Rendering) -> Bodies | None:
    begins = rf"\[\s*{_NAME}\("
    return _bodies(rendering, begins, _read_python, begins)


def _read_python(text: str, position: int) -> tuple[list[ToolCall], int]:
    if not text.startswith("[", position):
        raise Malformed("expected [NAME(ARGUMENT=VALUE, ...), ...]")
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
    raise Malformed("expected [NAME(ARGUMENT=VALUE, ...), ...]")


class _Constants(ast.NodeTransformer):
    """JSON's names of constants, which templates write within lists and tables."""

    NAMES: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.NAMES[node.id]) if node.id in self.NAMES else node


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed("expected NAME(ARGUMENT=VALUE, ...)")
    try:
        values = {str(one.arg): ast.literal_eval(_Constants().visit(one.value)) for one in node.keywords}
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed(f"an argument is not a literal value ({error})") from None
    return ToolCall(ast.unparse(node.func), values)
