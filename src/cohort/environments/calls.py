"""Calls of tools in the policy's text: the format is found in the chat template and proved on calls that are known."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cohort.data.chat import SENTINEL
from cohort.data.encoding import special_tokens
from cohort.environments.bodies import Rendering
from cohort.environments.contract import ToolCall
from cohort.environments.formats import Format, formats_of, read_channels
from cohort.environments.renderings import CallForm, CallRenderings, thoughts_end
from cohort.environments.schemas import value_of
from cohort.environments.tools import SURROGATES
from cohort.errors import ConfigError
from cohort.types import Message

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
        raise _not_found(reason, renderings)

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


def _not_found(reason: str, renderings: CallRenderings) -> ConfigError:
    if not renderings.learned:
        return ConfigError(
            "the chat template does not show calls of tools: it refuses messages with 'tool_calls', or leaves the "
            "calls out. Set data.chat_template to a template that shows them, or environment.parser to a function that "
            "finds the calls in a turn's text"
        )
    return ConfigError(
        f"no parser for the calls of tools of this chat template: {reason}. It renders calls as\n\n"
        f"{renderings.learned[0][1].text}\n\nSet environment.parser to a function, as in 'file.py:function', that "
        "takes such a text and returns its calls: [{'name': ..., 'arguments': {...}}]"
    )


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
    """The readers to try."""
    # `prefix` came with transformers 5.13, which also reads `response_template`; `tools` with 5.15.
    accepted = inspect.signature(getattr(tokenizer, "parse_response", _readers)).parameters
    if getattr(tokenizer, "response_template", None) is not None and "prefix" in accepted:
        yield "response_template", _by_response_template(tokenizer, schemas if "tools" in accepted else None, strip)
    if "<|channel|>" in rendering.text:
        yield _LEARNED, _by_channels(strip)
    for form in formats_of(rendering):
        yield _LEARNED, _by_format(form, schemas, strip)


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
        found = form.find(text)
        position = 0
        for one in found:
            if not any(call.error for call in one.calls):
                content = (content + text[position : one.start]).rstrip()
                position = one.end
        content += text[position:]
        content = content.strip() if position else content
        textual = form.bodies.textual
        calls = [typed(call) if textual and not call.error else call for one in found for call in one.calls]
        return strip(content), calls, {}

    return reader


def _by_channels(strip: Callable[[str], str]) -> Reader:
    def reader(text: str, _prefix: str) -> Parts:
        content, thoughts, calls = read_channels(text)
        return strip(content), calls, {"thinking": strip(thoughts)} if thoughts else {}

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
