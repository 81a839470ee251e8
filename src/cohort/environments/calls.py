"""Calls of tools in the policy's text: the format is found in the chat template and proved on calls that are known."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from cohort.data.encoding import special_tokens
from cohort.data.render import ANSWER, SENTINEL, USER
from cohort.environments.bridge import attempt
from cohort.environments.contract import ToolCall
from cohort.environments.schemas import no_constant, value_of
from cohort.environments.tools import SURROGATES
from cohort.errors import ConfigError
from cohort.types import Message

# ----------------------------------------
# Formats of tool calls, learned from the text that a chat template writes for known calls.
#
# The places of names and arguments tell what surrounds them. For Qwen's template and two calls:
#
#     opening    <tool_call>
#     body       {"name": "first", "arguments": {...}}
#     closing    </tool_call>
#
# gpt-oss's channels have a reader of their own.


Found = tuple[int, int, list[ToolCall]]
"""Where calls in a text start and end, the literals around them included, and the calls."""


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

    def find(self, text: str) -> Iterator[Found]:
        """The calls in a text, malformed ones included. Never raises."""
        position = 0 if self._word in text else len(text)
        while (opened := self._opens.search(text, position)) is not None:
            position = max(opened.end(), opened.start() + 1)
            if (found := self._read(text, opened)) is not None:
                yield found
                position = max(found[1], position)

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
        return opened.start(), ends.end() if ends else len(text), calls


# -- gpt-oss -----------------------------------------------------------------------------------------------------------

_MESSAGE = re.compile(r"<\|message\|>(.*?)(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]{1,64})")


def _by_channels(strip: Callable[[str], str]) -> Reader:
    def reader(text: str, _prefix: str) -> Parts:
        said, thoughts, calls, position = list[str](), list[str](), list[ToolCall](), 0
        for match in _MESSAGE.finditer(text):
            header, position = text[position : match.start()], match.end()
            recipient = _RECIPIENT.search(header)
            if recipient:
                calls.append(_call_of_channel(recipient[1], match[1].strip()))
            if not recipient or calls[-1].error:
                (thoughts if "<|channel|>analysis" in header else said).append(match[1])
        rest = text[position:].strip() if position else text
        content, thought = "\n".join(said) if said or thoughts else rest, "\n".join(thoughts)
        return strip(content), calls, {"thinking": strip(thought)} if thought else {}

    return reader


def _call_of_channel(name: str, body: str) -> ToolCall:
    try:
        value, end = decoded(body, 0)
        if end < len(body):
            raise Malformed("more text after the JSON object")
        return ToolCall(name, arguments_of(value))
    except Malformed as error:
        return ToolCall(name, error=f"invalid tool call: {error}")


# ----------------------------------------
# Bodies of tool calls: where they are in a chat template's rendering of known calls, and what reads others like them.
#
# A body is a JSON object with a name and arguments, or a list of those; a name, then the arguments as a JSON object;
# a name, then keys and values between tags; or a list of calls in Python's syntax.


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
    return [_tool_call(one) for one in values], end


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


def _tool_call(value: Any) -> ToolCall:
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


# ----------------------------------------
# What a chat template renders for turns of the assistant with calls that are known.


THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""What surrounds thoughts."""
_KNOWN_CALLS = (
    ToolCall("sentinel_add", {"alpha_key": "first-alpha-value", "beta_key": "first-beta-value"}),
    ToolCall("sentinel_find", {"alpha_key": "second-alpha-value", "beta_key": "second-beta-value"}),
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template takes the calls of a message."""

    as_text: bool = False
    """Whether arguments must be JSON text; otherwise they are objects."""
    with_ids: bool = False
    """Whether calls need an id."""

    def tables(self, calls: Sequence[ToolCall]) -> list[Mapping[str, Any]]:
        """The value of ``tool_calls``."""
        tables: list[Mapping[str, Any]] = []
        for index, call in enumerate(calls):
            arguments = json.dumps(call.arguments, ensure_ascii=False) if self.as_text else dict(call.arguments)
            call_id = {"id": f"call{index:05d}"} if self.with_ids else {}  # Mistral's wants 9 letters and digits
            tables.append({"type": "function", "function": {"name": call.name, "arguments": arguments}, **call_id})
        return tables


class CallRenderings:
    """Renders turns of the assistant.

    Args:
        tokenizer: the tokenizer, with the chat template in use.
        schemas: the JSON schemas of the tools, which the template may show.
    """

    def __init__(self, tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._schemas = tokenizer, list(schemas)
        self._prompt = attempt(tokenizer, [USER], tools=self._schemas, add_generation_prompt=True)
        self._end = attempt(tokenizer, [USER, ANSWER], tools=self._schemas).rpartition(SENTINEL)[2]
        forms = [CallForm(*flags) for flags in itertools.product((False, True), repeat=2)]
        self.learned = [(form, rendering) for form in forms if (rendering := self._learned(form)) is not None]
        """The forms in which the template takes calls, and turns to learn the format from. Empty: it shows no calls."""

    def turn(self, form: CallForm, calls: Sequence[ToolCall], content: str = "") -> tuple[str, str] | None:
        """What the template renders before a turn with calls, and the turn without its end. None: the template refuses
        the turn, or does not show the calls or the content.
        """
        message = {"role": "assistant", "content": content, "tool_calls": form.tables(calls)}
        text = attempt(self._tokenizer, [USER, message], tools=self._schemas)
        before = common_start(self._prompt, text)
        turn, position = text.removeprefix(before).removesuffix(self._end), 0
        for part in (content, *(call.name for call in calls)):
            position = turn.find(part, position) + len(part)
            if position < len(part):
                return None
        return before, turn

    def _learned(self, form: CallForm) -> Rendering | None:
        for calls in (_KNOWN_CALLS, _KNOWN_CALLS[:1]):  # some templates take one call per turn
            if rendered := self.turn(form, calls):
                before, turn = rendered
                text = turn[thoughts_end(turn, before) :]
                if all(value in text for call in calls for value in call.arguments.values()):
                    return Rendering(text, calls)
        return None


def thoughts_end(text: str, prefix: str) -> int:
    """Where the thoughts at the start of a turn end. Its whole length if they do not end, 0 if there are none.

    Args:
        text: the turn.
        prefix: what is before the turn; it may have opened the thoughts.
    """
    for opening, closing in THOUGHTS:
        if text.lstrip().startswith(opening) or prefix.rstrip().endswith(opening):
            end = text.find(closing)
            return len(text) if end < 0 else end + len(closing)
    return 0


_USER_FUNCTION, _LEARNED = "environment.parser", "the chat template's format"
_TYPES = {
    "text": "string",
    "count": "integer",
    "ratio": "number",
    "flag": "boolean",
    "items": "array",
    "table": "object",
}
_PARAMETERS = {
    "type": "object",
    "properties": {key: {"type": kind, "description": "x"} for key, kind in _TYPES.items()},
}
_PROOF_SCHEMAS: list[Mapping[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": _PARAMETERS}}
    for name in ("sentinel_add", "sentinel_find")
]
_PROOF = (
    ToolCall("sentinel_add", {"text": "plain", "count": -3, "ratio": 0.25, "flag": True}),
    ToolCall("sentinel_find", {"text": 'naïve "π" 🙂 \\n {x} [1] it\'s\n\n  two\tlines: a < b, c > d', "flag": False}),
    ToolCall(
        "sentinel_add",
        {"text": "12", "ratio": 1e-07, "items": [1, "2", None, [True]], "table": {"ü": {"\n": [0.5, ""]}}},
    ),
    ToolCall("sentinel_find"),
)
"""The calls that a parser must find in what the template renders."""

Parts = tuple[str, Sequence[ToolCall], Mapping[str, Any]]
"""A turn's content, its calls, and further keys of its message."""
Reader = Callable[[str, str], Parts]
"""From a turn's text, and what is before it, to its parts. May raise."""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What the policy wrote in a turn."""

    content: str
    """The text without well-formed calls and without special tokens. Thoughts are part of it, except gpt-oss's."""
    calls: tuple[ToolCall, ...]
    """The calls in the order of the text, malformed ones included."""
    message: Message
    """The assistant's message as chat templates take it. It has the well-formed calls."""

    def answers(self, texts: Sequence[str]) -> tuple[Message, ...]:
        """The messages of tools that answer the calls.

        Args:
            texts: one for each call.
        """
        ids = iter([table.get("id") for table in self.message.get("tool_calls", ())])
        answers = []
        for call, text in zip(self.calls, texts, strict=True):
            call_id = None if call.error else next(ids)
            answer = {"role": "tool", "name": call.name, "content": text}
            answers.append({**answer, "tool_call_id": call_id} if call_id else answer)
        return tuple(answers)


@dataclass(frozen=True, slots=True)
class CallParser:
    """Finds calls of tools in a turn's text. ``CallParser.of`` makes it."""

    name: str
    """Where the format comes from."""
    reader: Reader
    form: CallForm
    """How the template takes calls."""

    @classmethod
    def of(
        cls, tokenizer: Any, tools: Sequence[Mapping[str, Any]], user_function: Callable[..., Any] | None = None
    ) -> CallParser:
        """The parser for a chat template, proved on calls that the template renders.

        It uses the user's function, if there is one; else the tokenizer's ``response_template``, if that finds the
        calls; else a format learned from the rendering.

        Args:
            tokenizer: the tokenizer, with the chat template in use.
            tools: the JSON schemas of the tools, as ``Toolbox.schemas``.
            user_function: takes a turn's text and returns its calls: a list of ``ToolCall`` or of ``{"name": ...,
                "arguments": {...}}``, empty if there are none. What it raises makes a malformed call. It is not proved
                if the template shows no calls.

        Raises:
            ConfigError: no parser finds the calls in what the template renders.
        """
        renderings = CallRenderings(tokenizer, tools)
        strip = partial(special_tokens(tokenizer).sub, "")
        user = _by_user(user_function, strip) if user_function else None
        if user and not renderings.learned:
            return cls(_USER_FUNCTION, user, CallForm())
        reason = "its format is not known"
        for form, rendering in renderings.learned:
            readers = _readers(tokenizer, rendering, [*tools, *_PROOF_SCHEMAS], strip)
            for name, reader in [(_USER_FUNCTION, user)] if user else readers:
                parser = cls(name, reader, form)
                failure = parser._failure(renderings)
                if not failure:
                    return parser
                reason = f"{name} {failure}"
        if not renderings.learned:
            raise ConfigError(
                "the chat template does not show calls of tools: it refuses messages with 'tool_calls', or leaves the "
                "calls out. Set data.chat_template to a template that shows them, or environment.parser to a function "
                "that finds the calls in a turn's text"
            )
        raise ConfigError(
            f"no parser for the calls of tools of this chat template: {reason}. It renders calls as\n\n"
            f"{renderings.learned[0][1].text}\n\nSet environment.parser to a function, as in 'file.py:function', that "
            "takes such a text and returns its calls: [{'name': ..., 'arguments': {...}}]"
        )

    def parse(self, text: str, prefix: str) -> ParsedTurn:
        """The calls in a turn's text. Never raises: a malformed call has an ``error``.

        Args:
            text: the drawn tokens of the turn, decoded with special tokens, without the end token.
            prefix: the text before the turn, which may have opened the thoughts: at least its end.
        """
        try:
            content, calls, more = self.reader(text, prefix)
        except Exception as error:  # of the user's function, or of a response template
            content, calls, more = text, [ToolCall("", error=f"invalid tool call: {str(error)[:200]}")], {}
        calls = [_as_json(call) for call in calls]
        message: dict[str, Any] = {"role": "assistant", "content": content, **more}
        if valid := [call for call in calls if not call.error]:
            message["tool_calls"] = self.form.tables(valid)
        return ParsedTurn(content, tuple(calls), message)

    def _failure(self, renderings: CallRenderings) -> str:
        """What goes wrong with calls that the template renders. Empty: nothing."""
        turns = [*(((call,), "") for call in _PROOF), (_PROOF[:1], SENTINEL), (_PROOF[:3], ""), (_PROOF[:2], SENTINEL)]
        for number, (calls, content) in enumerate(turns):
            rendered = renderings.turn(self.form, calls, content)
            if rendered is None and number < len(_PROOF):
                return f"cannot be tried, because the template refuses {calls[0]}"
            if rendered is None:  # the template shows one call per turn, or no content beside calls
                continue
            found = self.parse(rendered[1], rendered[0])
            if found.calls != tuple(calls):
                return f"finds {_shown(found.calls)} instead of {_shown(calls)} in {rendered[1]!r}"
            if not any(content in str(value) for value in found.message.values()):
                return f"does not find the text {content!r} in {rendered[1]!r}"
        return ""


def _shown(calls: Sequence[ToolCall]) -> str:
    return ", ".join(call.error or f"{call.name}({dict(call.arguments)})" for call in calls) or "nothing"


def _as_json(call: ToolCall) -> ToolCall:
    """The call with arguments that are JSON values and that a tokenizer takes: without halves of surrogate pairs."""
    try:
        text = json.dumps([call.name, dict(call.arguments)], ensure_ascii=False)
        name, arguments = json.loads(SURROGATES.sub("\ufffd", text))
    except (TypeError, ValueError, RecursionError) as error:
        return ToolCall("", error=f"invalid tool call: the arguments are not JSON values ({error})")
    return replace(call, name=name, arguments=arguments)


# -- readers -----------------------------------------------------------------------------------------------------------


def _readers(
    tokenizer: Any, rendering: Rendering, schemas: Sequence[Mapping[str, Any]], strip: Callable[[str], str]
) -> Iterator[tuple[str, Reader]]:
    """The readers to try. Whether one finds other calls than the rendered ones is for the caller to check."""
    # `prefix` came with transformers 5.13, which also reads `response_template`; `tools` with 5.15.
    accepted = inspect.signature(getattr(tokenizer, "parse_response", _readers)).parameters
    if getattr(tokenizer, "response_template", None) is not None and "prefix" in accepted:
        yield "response_template", _by_response_template(tokenizer, schemas if "tools" in accepted else None, strip)
    if "<|channel|>" in rendering.text:
        yield _LEARNED, _by_channels(strip)
    for find in (_json_bodies, _named_bodies, _tagged_bodies, _python_bodies):
        if (bodies := find(rendering)) is not None:
            yield _LEARNED, _by_format(Format(rendering.text, bodies), schemas, strip)


def _by_format(form: Format, schemas: Sequence[Mapping[str, Any]], strip: Callable[[str], str]) -> Reader:
    properties = {
        schema["function"]["name"]: (schema["function"].get("parameters") or {}).get("properties") or {}
        for schema in schemas
    }

    def typed(call: ToolCall) -> ToolCall:
        known = properties.get(call.name, {})
        return replace(call, arguments={key: value_of(value, known.get(key)) for key, value in call.arguments.items()})

    def reader(text: str, prefix: str) -> Parts:
        start = thoughts_end(text, prefix)
        content, text = text[:start], text[start:]
        calls, position, textual = list[ToolCall](), 0, form.bodies.textual
        for found_at, end, found in form.find(text):
            if not any(call.error for call in found):
                content = (content + text[position:found_at]).rstrip()
                position = end
            calls += [typed(call) if textual and not call.error else call for call in found]
        content += text[position:]
        return strip(content.strip() if position else content), calls, {}

    return reader


def _by_response_template(
    tokenizer: Any, schemas: Sequence[Mapping[str, Any]] | None, strip: Callable[[str], str]
) -> Reader:
    options = {} if schemas is None else {"tools": list(schemas)}

    def reader(text: str, prefix: str) -> Parts:
        parsed = dict(tokenizer.parse_response(text, prefix=prefix, **options))
        calls = [_as_call(one) for one in parsed.pop("tool_calls", None) or ()]
        content = parsed.pop("content", None) or ""
        parsed.pop("role", None)
        return strip(content), calls, parsed

    return reader


def _by_user(function: Callable[..., Any], strip: Callable[[str], str]) -> Reader:
    def reader(text: str, _prefix: str) -> Parts:
        found = function(text)
        if not isinstance(found, list | tuple):
            raise TypeError(f"environment.parser must return a list of calls, got {type(found).__name__}")
        return strip(text), [_as_call(one) for one in found], {}

    return reader


def _as_call(given: Any) -> ToolCall:
    """A call from a ``ToolCall``, or from a table with or without the key "function".

    Raises:
        ValueError: there is no name, or the arguments are no table.
    """
    if isinstance(given, ToolCall):
        return given
    table = given.get("function", given) if isinstance(given, Mapping) else None
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ValueError(f"expected a name and arguments, got {given!r:.80}")
    arguments = table.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments must be an object, got {arguments!r:.80}")
    return ToolCall(table["name"], dict(arguments))
