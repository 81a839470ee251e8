"""Conversations rendered by the chat template of the tokenizer, and the part of the assistant turn that it writes."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

from cohort.errors import DataError
from cohort.types import Message

SENTINEL = "SENTINEL-OF-COHORT"
"""A message content that no template changes or contains."""
USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": SENTINEL}
PART = {"type": "text", "text": SENTINEL}
WRITTEN_PARTS = (repr(PART), json.dumps(PART))
"""How a part looks where a template that knows none writes it out."""
MAX_SHAPES = 1000
"""Maximum number of cached shapes of conversations."""
MAX_HEADERS = 100
"""Maximum number of cached headers: every row may have its own template variables."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a chat template renders."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    """JSON schemas of functions; in a row, names of the run's tools may stand for them."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Template variables."""

    @property
    def continued(self) -> bool:
        """Whether the last message is one of the assistant, for the model to continue."""
        return bool(self.messages[-1]["role"] == "assistant")


class ChatTemplate:
    """Renders conversations as ``apply_chat_template`` does.

    If the last message is the assistant's, it is continued; otherwise the generation prompt follows.

    Args:
        tokenizer: the tokenizer.
        template: a template that replaces the tokenizer's.

    Raises:
        DataError: there is no template.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        if template is None and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the data is in chat format, but the tokenizer has no chat template: set data.format to 'text' for "
                "string prompts, set data.chat_template, or use a model with a chat template"
            )
        self._tokenizer, self._template = tokenizer, template
        self._headers: dict[str, str | None] = {}
        self._shown: dict[str, bool] = {}
        self._checked = False
        self._known_variables = {with_tools: self._find_variables(with_tools) for with_tools in (False, True)}

    @property
    def variables(self) -> set[str] | None:
        """The variables that the template reads, with tools or without; None if that is not known."""
        without, with_tools = self._known_variables.values()
        return None if without is None or with_tools is None else without | with_tools

    def render(self, conversation: Conversation, where: str) -> tuple[Conversation, str]:
        """The conversation as the template takes it, and the text of the prompt.

        Some templates take contents as strings only, others as lists of parts only, and may show nothing of the other
        form. The messages are rendered as they are if that shows their texts, otherwise in the other form.

        Args:
            conversation: the conversation.
            where: what errors call the row.

        Raises:
            DataError: the template refuses the conversation, does not use a variable or the tools, does not show the
                messages, or writes no generation prompt although it marks the assistant's turns.
        """
        if taken := _OWN_VARIABLES & conversation.variables.keys():
            raise DataError(
                f"{where}: chat_template_kwargs sets {min(taken)!r}, which rendering sets itself: remove it; "
                "tools are given in the column 'tools', a template in data.chat_template"
            )
        known = self._known_variables[bool(conversation.tools)]
        given = [*conversation.variables, *(["tools"] if conversation.tools else [])]
        if known is not None and (unknown := [name for name in given if name not in known]):
            raise DataError(
                f"{where}: the chat template reads no variable {unknown[0]!r}; it reads: {', '.join(sorted(known))}. "
                "It would have no effect: remove it, or rename the column of the rows with data.columns"
            )
        found = self._in_a_form_that_it_shows(conversation, where)
        if not self._checked:  # once for all rows
            self._check(conversation.variables)
            self._checked = True
        return found

    def _in_a_form_that_it_shows(self, conversation: Conversation, where: str) -> tuple[Conversation, str]:
        in_parts = any(isinstance(message.get("content"), list) for message in conversation.messages)
        strings, parts = (
            replace(conversation, messages=[*map(form, conversation.messages)]) for form in (_with_strings, _with_parts)
        )
        forms = (conversation, strings, parts) if in_parts else (conversation, parts)
        shown = next((one for one in forms if self._shows(one)), strings)
        try:
            text = self._rendered(shown)
        except Exception as error:  # templates raise Jinja errors of many kinds
            raise DataError(f"{where}: the chat template refused the messages: {error}") from error
        if in_parts and (lost := _lost(shown.messages, text)):
            raise DataError(
                f"{where}: the chat template does not show the text {lost!r:.80}, neither as a part nor as a string: "
                "set data.chat_template to one that does, or leave the row out with data.filter"
            )
        return shown, text

    def _shows(self, conversation: Conversation) -> bool:
        """Whether the template shows the contents of messages in this form: tried once for each shape."""
        marked = [{**message, **_marked(message)} for message in conversation.messages]
        key = json.dumps([marked, bool(conversation.tools), conversation.variables], default=repr)
        if key not in self._shown:
            if len(self._shown) == MAX_SHAPES:
                self._shown.clear()
            count = sum(str(message.get("content")).count(SENTINEL) for message in marked)
            try:
                text = self._rendered(replace(conversation, messages=marked))
            except Exception:
                text = ""
            self._shown[key] = text.count(SENTINEL) >= count and not any(part in text for part in WRITTEN_PARTS)
        return self._shown[key]

    def _rendered(self, conversation: Conversation) -> str:
        ending = "continue_final_message" if conversation.continued else "add_generation_prompt"
        return self._apply(conversation.messages, conversation.variables, conversation.tools, **{ending: True})

    def again(self, conversation: Conversation, messages: Sequence[Message]) -> str:
        """The text of a conversation that ``render`` returned, with other messages in place of its own."""
        return self._rendered(replace(conversation, messages=messages))

    def prefill(self, conversation: Conversation, text: str) -> str:
        """The part of the assistant turn that is already in the prompt ``text``.

        Some templates begin the turn with "<think>" or an empty block of thoughts. The prefill is what ``text`` adds to
        the messages before the turn, without the header of an assistant turn. If the template does not render these
        probes, the prefill is the text of the message that is continued, if any.
        """
        message = text_of(conversation.messages[-1]) if conversation.continued else ""
        header = self._header(conversation.variables)
        before = conversation.messages[:-1] if conversation.continued else conversation.messages
        try:
            start = self._apply(before, conversation.variables, conversation.tools) if before else ""
        except Exception:  # the template may require a user message first
            return message
        if header is None or not text.startswith(start):
            return message
        turn = text[len(start) :]
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(turn, header, strict=False))
        return turn[sum(1 for _ in common) :]

    def _header(self, variables: Mapping[str, Any]) -> str | None:
        """What the template writes between a user message and an answer that is not the last message: to such an answer
        the template adds nothing. None if the template refuses the probe.
        """
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._headers:
            if len(self._headers) == MAX_HEADERS:
                self._headers.clear()
            try:
                start = self._apply([USER], variables)
                text = self._apply([USER, ANSWER, USER], variables)
            except Exception:  # the template may require other conversations
                start, text = "", ""
            self._headers[key] = _between(start, text)
        return self._headers[key]

    def _check(self, variables: Mapping[str, Any]) -> None:
        """Check that the template shows messages and, if it marks the assistant's turns, writes a generation prompt. A
        template that refuses these probes is not checked.
        """
        contents = (SENTINEL, [{"type": "text", "text": SENTINEL}])  # some templates take content in parts only
        try:
            shows = any(
                SENTINEL in self._apply([{**USER, "content": content}], variables, add_generation_prompt=True)
                for content in contents
            )
            user = self._apply([USER], variables)
            opened = self._apply([USER], variables, add_generation_prompt=True)
            answered = self._apply([USER, ANSWER], variables)
        except Exception:
            return
        if not shows:
            raise DataError(
                "the chat template does not show the messages: its output is the same for any messages. Set "
                "data.chat_template to a template, as Jinja text or as the name of a file"
            )
        if opened == user and (_between(user, answered) or "").strip():
            raise DataError(
                "the chat template writes no generation prompt: it marks where the assistant's turns begin, but "
                "ignores add_generation_prompt. Set data.chat_template to a template that writes "
                "one, or use the model's own"
            )

    def _find_variables(self, with_tools: bool) -> set[str] | None:
        """The variables that the template reads; None if Jinja's parser does not accept it."""
        import jinja2
        import jinja2.meta

        try:
            text = self._tokenizer.get_chat_template(self._template, [{}] if with_tools else None)
            syntax = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
        except Exception:  # a tag of transformers' own, or several named templates without a default
            return None
        return jinja2.meta.find_undeclared_variables(syntax)

    def _apply(self, messages: Sequence[Any], variables: Mapping[str, Any], tools: Any = None, **options: bool) -> str:
        arguments = {"tools": tools, "chat_template": self._template, **options, **variables}
        return render(self._tokenizer, messages, **arguments)


_OWN_VARIABLES = frozenset(
    {
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "strftime_now", "raise_exception"),
    }
)
"""Arguments of ``apply_chat_template``, and what it gives to every template."""
_RENDERING = threading.Lock()
"""Held while transformers reads another time."""


def use_template(tokenizer: Any, template: str | None, time: str | None, now: str | None = None) -> str | None:
    """Give a tokenizer the template of the settings, and freeze the time that its template prints.

    A template that asks for the time writes other prompts at each call, in each evaluation, and after a resume.

    Args:
        tokenizer: the tokenizer, which is changed.
        template: ``data.chat_template``; checkpoints are saved with it.
        time: ``data.template_time``. None: the time that the tokenizer was given before, or ``now``.
        now: None: the time of the call.

    Returns:
        The time; None if the template does not ask for it.
    """
    if template is not None:
        tokenizer.chat_template = template
    if "strftime_now" not in str(getattr(tokenizer, "chat_template", None)):
        return None
    tokenizer.template_time = time or getattr(tokenizer, "template_time", None) or now or time_now()
    return str(tokenizer.template_time)


def time_now() -> str:
    """The time, as ``data.template_time`` has it."""
    return datetime.now().isoformat(timespec="seconds")


def render(tokenizer: Any, messages: Sequence[Any], /, **arguments: Any) -> str:
    """What the chat template of a tokenizer writes, at the time of ``use_template``; raises what it raises, such as
    Jinja's errors.

    Args:
        tokenizer: the tokenizer.
        messages: the conversation.
        arguments: of ``apply_chat_template``, variables of the template included.
    """
    time = getattr(tokenizer, "template_time", None)
    if time is None:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))
    from transformers.utils import chat_template_utils

    clock = SimpleNamespace(now=lambda: datetime.fromisoformat(time))
    with _RENDERING, mock.patch.object(chat_template_utils, "datetime", clock):
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))


def text_of(message: Message) -> str:
    """The text of a message's content: a string, or parts of type "text"."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _with_strings(message: Message) -> Message:
    return {**message, "content": text_of(message)} if isinstance(message.get("content"), list) else message


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _marked(message: Message) -> dict[str, Any]:
    """The role, and the content with the sentinel in place of each text."""
    content = message.get("content")
    marked = [PART] * len(content) if isinstance(content, list) else SENTINEL if isinstance(content, str) else content
    return {"role": message["role"], "content": marked}


def _lost(messages: Sequence[Message], rendered: str) -> str:
    """A text of the messages that the rendered text does not show; empty if it shows all. Whitespace does not count,
    nor how JSON writes a text, nor do thoughts of earlier turns, which templates remove."""
    squeezed = "".join(rendered.split())
    for message in messages:
        content = message.get("content")
        for text in [part["text"] for part in content] if isinstance(content, list) else [content or ""]:
            shown = text.rpartition("</think>")[2] if message["role"] == "assistant" else text
            written = (shown, *(json.dumps(shown, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
            if not any("".join(one.split()) in squeezed for one in written):
                return str(text)
    return ""


def _between(start: str, text: str) -> str | None:
    """The text after ``start`` and before the sentinel; None if either is missing."""
    return text[len(start) : text.index(SENTINEL)] if SENTINEL in text and text.startswith(start) else None
