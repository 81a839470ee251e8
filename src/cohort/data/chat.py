"""Conversations rendered by the chat template of the tokenizer, and the part of the assistant turn that it writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cohort.errors import DataError
from cohort.types import Message

SENTINEL = "SENTINEL-OF-COHORT"
"""A message content that no template changes or contains."""
USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": SENTINEL}
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
        self._checked = False
        self._known_variables = {with_tools: self._find_variables(with_tools) for with_tools in (False, True)}

    def render(self, conversation: Conversation, where: str) -> str:
        """The text of the prompt.

        Args:
            conversation: the conversation.
            where: what errors call the row.

        Raises:
            DataError: the template refuses the conversation, does not use a variable or the tools, does not show the
                messages, or writes no generation prompt although it marks the assistant's turns.
        """
        known = self._known_variables[bool(conversation.tools)]
        given = [*conversation.variables, *(["tools"] if conversation.tools else [])]
        if known is not None and (unknown := [name for name in given if name not in known]):
            raise DataError(
                f"{where}: the chat template reads no variable {unknown[0]!r}; it reads: {', '.join(sorted(known))}. "
                "It would have no effect: remove it, or rename the column of the rows with data.columns"
            )
        try:
            ending = "continue_final_message" if conversation.continued else "add_generation_prompt"
            text = self._apply(conversation.messages, conversation.variables, conversation.tools, **{ending: True})
        except Exception as error:  # templates raise Jinja errors of many kinds
            raise DataError(f"{where}: the chat template refused the messages: {error}") from error
        if not self._checked:  # once for all rows
            self._check(conversation.variables)
            self._checked = True
        return text

    def prefill(self, conversation: Conversation, text: str) -> str:
        """The part of the assistant turn that is already in the prompt ``text``.

        Some templates begin the turn with "<think>" or an empty block of thoughts. The prefill is what ``text`` adds to
        the messages before the turn, without the header of an assistant turn. If the template does not render these
        probes, the prefill is the text of the message that is continued, if any.
        """
        message = str(conversation.messages[-1]["content"]) if conversation.continued else ""
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


def render(tokenizer: Any, messages: Sequence[Any], **arguments: Any) -> str:
    """What the chat template of a tokenizer writes; raises what it raises, such as Jinja's errors.

    Args:
        tokenizer: the tokenizer.
        messages: the conversation.
        arguments: of ``apply_chat_template``, variables of the template included.
    """
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments)
    return text


def _between(start: str, text: str) -> str | None:
    """The text after ``start`` and before the sentinel; None if either is missing."""
    return text[len(start) : text.index(SENTINEL)] if SENTINEL in text and text.startswith(start) else None
