"""From a row to a prompt: text or conversation, checked and tokenized."""

from __future__ import annotations

import itertools
import json
import re
import string
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cohort.config import DataConfig
from cohort.data.encoding import Encoder, Given, any_of, is_control, special_tokens_of
from cohort.data.source import Row, check_column, plain
from cohort.errors import DataError
from cohort.types import RESERVED_COLUMNS, Message

# ----------------------------------------
# Conversations rendered by the chat template of the tokenizer, and the part of the assistant turn that it writes.


SENTINEL = "SENTINEL-OF-COHORT"
"""A message content that no template changes or contains."""
USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": SENTINEL}
PART = {"type": "text", "text": SENTINEL}
WRITTEN_PARTS = (repr(PART), json.dumps(PART))
"""How a part looks where a template that knows none writes it out."""
MAX_PROBES = 1000
"""Maximum number of results of probes that are kept: every row may have its own template variables."""


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
        self._probed: dict[str, Any] = {}
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
        marked = replace(conversation, messages=[{**message, **_marked(message)} for message in conversation.messages])
        key = [marked.messages, bool(conversation.tools), conversation.variables]
        return bool(self._once(key, partial(self._shows_marks, marked)))

    def _shows_marks(self, marked: Conversation) -> bool:
        count = sum(str(message.get("content")).count(SENTINEL) for message in marked.messages)
        try:
            text = self._rendered(marked)
        except Exception:
            text = ""
        return text.count(SENTINEL) >= count and not any(part in text for part in WRITTEN_PARTS)

    def _once(self, key: Any, probe: Callable[[], Any]) -> Any:
        """The result of a probe, which is made once for each key."""
        text = json.dumps(key, default=repr)
        if text not in self._probed:
            if len(self._probed) == MAX_PROBES:
                self._probed.clear()
            self._probed[text] = probe()
        return self._probed[text]

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
        header = self._once(conversation.variables, partial(self._header, conversation.variables))
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
        try:
            return _between(self._apply([USER], variables), self._apply([USER, ANSWER, USER], variables))
        except Exception:  # the template may require other conversations
            return None

    def _check(self, variables: Mapping[str, Any]) -> None:
        """Check that the template shows messages and, if it marks the assistant's turns, writes a generation prompt. A
        template that refuses these probes is not checked.
        """
        try:
            user = self._apply([USER], variables)
            opened = self._apply([USER], variables, add_generation_prompt=True)
            answered = self._apply([USER, ANSWER], variables)
        except Exception:
            return
        contents = (SENTINEL, [PART])  # some templates take content in parts only
        if not any(self._shows(Conversation([{**USER, "content": one}], variables=variables)) for one in contents):
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
    return "".join(_texts(message))


def _with_strings(message: Message) -> Message:
    return {**message, "content": text_of(message)} if isinstance(message.get("content"), list) else message


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{**PART, "text": content}]} if isinstance(content, str) else message


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
        for text in _texts(message):
            shown = text.rpartition("</think>")[2] if message["role"] == "assistant" else text
            written = (shown, *(json.dumps(shown, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
            if not any("".join(one.split()) in squeezed for one in written):
                return text
    return ""


def _between(start: str, text: str) -> str | None:
    """The text after ``start`` and before the sentinel; None if either is missing."""
    return text[len(start) : text.index(SENTINEL)] if SENTINEL in text and text.startswith(start) else None


# ----------------------------------------
# Control tokens that the messages of rows spell.
#
# A chat template marks turns with control tokens. A row whose text spells one, such as ``<|im_end|>``, ends its own
# turn when it is tokenized, and may go on as another speaker: a forged system turn.


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


IDS_ONLY = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}


def check_columns(columns: Sequence[str], where: str) -> None:
    """Check column names.

    Raises:
        DataError: a name is reserved for an argument of reward functions, or stands for images.
    """
    for column in columns:
        what = f"{where} has a column {column!r}"
        if column in RESERVED_COLUMNS:
            remedy = f'rename it, as in data.columns = {{ my_{column} = "{column}" }}'
            raise DataError(f"{what}, which is an argument of reward functions: {remedy}")
        if column in ("image", "images"):
            remedy = "If the column holds something else, rename it with data.columns"
            raise DataError(f"{what}: Cohort trains language models, which see no images. {remedy}")


@lru_cache(16)
def columns_of(template: str) -> tuple[str, ...]:
    """The columns that ``data.prompt_template`` names.

    Raises:
        DataError: the template is not valid.
    """
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise _bad_template(template, error) from None
    return tuple(dict.fromkeys(re.split(r"[.\[]", name)[0] for _, name, _, _ in parsed if name is not None))


def filled(template: str, row: Row, where: str) -> str:
    """``data.prompt_template`` with the columns of a row.

    Raises:
        DataError: the template is not valid, or a column is missing or empty.
    """
    for column in columns_of(template):
        check_column(column, row, f"{where}: data.prompt_template", "the row has")
        if row[column] is None:
            raise DataError(f"{where}: column {column!r}, which data.prompt_template names, is empty")
    try:
        return template.format_map(row)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise _bad_template(template, error) from None


def _bad_template(template: str, error: Exception) -> DataError:
    return DataError(f"data.prompt_template {template!r} is not valid: {error}")


ToolsOf = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""The JSON schemas of the tools that the policy can call in the episode of a row."""


class Renderer:
    """Makes, renders and tokenizes the prompts of one source.

    Args:
        config: the settings of the source.
        tokenizer: the tokenizer of the policy. None: prompts can be made, but not rendered.
        tools: see ``PromptSet``.

    Raises:
        DataError: ``data.prompt_template`` is not valid.
    """

    def __init__(self, config: DataConfig, tokenizer: Any = None, tools: ToolsOf | None = None) -> None:
        self._config, self._tokenizer, self._tools_of = config, tokenizer, tools
        self.spelt: list[str] = []
        """For each row whose messages spell a control token of the template: the token, and the row's name."""
        columns_of(config.prompt_template or "")

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template. Text prompts need none, so it is not looked for before the first conversation."""
        return ChatTemplate(self._tokenizer, self._config.chat_template)

    @cached_property
    def _turns(self) -> TurnTokens:
        return TurnTokens(self._tokenizer)

    def make(self, row: Row, where: str) -> str | Conversation:
        """The prompt of a row.

        Raises:
            DataError: a column is missing, the prompt is empty, or the format does not fit.
        """
        config = self._config
        content = self._content(row, where)
        if isinstance(content, list):
            if config.format == "text":
                raise DataError(f"{where}: the prompt is a list of messages; set data.format to 'chat' or 'auto'")
            messages = [_without_nulls(message) for message in _checked_messages(content, where)]
        elif not content.strip():
            raise DataError(f"{where}: the prompt is empty")
        elif config.format == "chat":
            messages = [{"role": "user", "content": content}]
        else:
            self._check_text(row, where)
            return content
        if config.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{where}: has a system message of its own; unset data.system_prompt")
            messages = [{"role": "system", "content": config.system_prompt}, *messages]
        tools = _json_column(row, "tools", where, "a list of JSON schemas of functions, or of names", _is_tools)
        variables = _json_column(row, "chat_template_kwargs", where, "a table", lambda value: isinstance(value, dict))
        return Conversation(messages, tools, {**config.chat_template_kwargs, **(variables or {})})

    def _content(self, row: Row, where: str) -> str | list[Any]:
        if self._config.prompt_template is not None:
            return filled(self._config.prompt_template, row, where)
        column = self._config.prompt_column
        if column not in row:
            remedy = "Set data.prompt_column, data.prompt_template or data.columns"
            raise DataError(f"{where}: no column {column!r}; the row has: {', '.join(row)}. {remedy}")
        content = plain(row[column]) if isinstance(row[column], np.ndarray) else row[column]
        if not isinstance(content, str | list):
            raise DataError(f"{where}: the prompt must be a string or a list of messages, got {type(content).__name__}")
        return content

    def _check_text(self, row: Row, where: str) -> None:
        """Refuse what only a chat template could use."""
        if self._config.system_prompt is not None:
            raise DataError("data.system_prompt needs chat format: set data.format to 'chat'")
        if self._config.chat_template_kwargs:
            raise DataError(
                f"data.chat_template_kwargs is for conversations, and the prompt of {where} is text: set data.format "
                "to 'chat', or chat_template_kwargs = {} in the table of a source of text"
            )
        for column in ("tools", "chat_template_kwargs"):
            value = row.get(column)
            if value is not None and len(value if hasattr(value, "__len__") else "x"):
                raise DataError(
                    f"the prompt of {where} is text, and its column {column!r} is for conversations: set data.format "
                    "to 'chat', or rename the column with data.columns if it is something else"
                )

    def token_ids(self, rows: Sequence[Row], row_names: Sequence[str]) -> list[list[int]]:
        """The token ids of the prompts of rows. Text gets the special tokens of the tokenizer; a conversation has those
        of its template, as with ``apply_chat_template``.

        Raises:
            DataError: a row cannot be a prompt, or the tokenizer refuses it.
        """
        made = [(self._make_with_tools(row, where), where) for row, where in zip(rows, row_names, strict=True)]
        rendered = [(one, one) if isinstance(one, str) else self.chat.render(one, where) for one, where in made]
        texts = [text for _, text in rendered]
        kinds = {isinstance(content, str) for content, _ in made}
        if len(kinds) > 1:
            return self._one_by_one(rows, row_names)
        try:
            found: list[list[int]] = self._tokenizer(texts, add_special_tokens=kinds.pop(), **IDS_ONLY)["input_ids"]
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair: JSON can spell it, UTF-8 cannot
            if len(rows) > 1:
                return self._one_by_one(rows, row_names)
            raise DataError(f"{row_names[0]}: the tokenizer refused the prompt {texts[0][:60]!r}: {error}") from error
        for index, (content, _) in enumerate(rendered):
            if isinstance(content, Conversation) and (token := self._turns.spelt(content.messages)):
                self.spelt.append(f"{token!r} in {row_names[index]}")
                if self._config.escape_control_tokens:
                    found[index] = self._turns.token_ids(content.messages, partial(self.chat.again, content))
        if empty := [where for where, ids in zip(row_names, found, strict=True) if not ids]:
            raise DataError(f"{empty[0]}: the prompt has no tokens")
        return found

    def _one_by_one(self, rows: Sequence[Row], row_names: Sequence[str]) -> list[list[int]]:
        return [self.token_ids([row], [where])[0] for row, where in zip(rows, row_names, strict=True)]

    def decode(
        self, row: Row, where: str, token_ids: Sequence[int]
    ) -> tuple[str, str | list[Message], str, Mapping[str, Any]]:
        """The text of the token ids, the prompt of the row as reward functions receive it, the prefill, and the
        arguments of the chat template.
        """
        content = self._make_with_tools(row, where)
        text: str = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        if isinstance(content, str):
            return text, content, "", {}
        content, rendered = self.chat.render(content, where)
        prefill = self.chat.prefill(content, rendered)
        tools = {"tools": content.tools} if content.tools else {}
        return text, list(content.messages), prefill, {**content.variables, **tools}

    def _make_with_tools(self, row: Row, where: str) -> str | Conversation:
        """The prompt of a row, with the JSON schemas of its tools."""
        content = self.make(row, where)
        if self._tools_of is None:
            if isinstance(content, str):
                return content
            if content.tools and isinstance(content.tools[0], str):
                raise DataError(
                    f"{where}: column 'tools' names {content.tools[0]!r}, and the run has no tools: set "
                    "environment.tools, or rename the column with data.columns if it is something else"
                )
            return replace(content, tools=content.tools or None)  # templates may tell an empty list from None
        if isinstance(content, str):
            raise DataError(
                f"{where}: the prompt is text; tools and environments need conversations: set data.format to 'chat'"
            )
        try:
            row = {**row, "tools": content.tools} if "tools" in row else row  # an empty list allows no tool
            return replace(content, tools=self._tools_of(row) or None)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None


def _checked_messages(messages: list[Any], where: str) -> list[Message]:
    if not messages:
        raise DataError(f"{where}: expected a list of messages, got an empty one")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message or not {"content", "tool_calls"} & message.keys():
            raise DataError(f"{where}: expected a list of messages with 'role' and 'content', got {messages!r:.100}")
        content = message.get("content")
        parts = content if isinstance(content, list) else [] if isinstance(content, str | None) else [content]
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                expected = "the content of a message must be text, or a list of parts of type 'text'"
                raise DataError(f"{where}: {expected}; one is of type {kind!r}. Cohort trains on text alone")
            if not isinstance(part.get("text"), str):
                raise DataError(f"{where}: a part of type 'text' needs a string as 'text', got {part!r:.100}")
    last = messages[-1]
    if not text_of(last) and last["role"] in ("user", "assistant"):
        raise DataError(f"{where}: the prompt is empty: the last message, of role {last['role']!r}, has no content")
    return messages


def _without_nulls(message: Message) -> Message:
    """The message without the keys that Arrow adds; templates see the content of a message even if it is None."""
    return {
        key: without_null_keys(value) if key in ("tool_calls", "content") else value
        for key, value in message.items()
        if value is not None or key == "content"
    }


def without_null_keys(value: Any) -> Any:
    """The value without keys that are None: Arrow gives all tables of a column the same keys."""
    if isinstance(value, Mapping):
        return {key: without_null_keys(item) for key, item in value.items() if item is not None}
    return [without_null_keys(item) for item in value] if isinstance(value, list) else value


def _json_column(row: Row, column: str, where: str, expected: str, is_valid: Callable[[Any], bool]) -> Any:
    """A column that holds a value or the JSON text of one; None if it is missing."""
    value = row.get(column)
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):  # the check below refuses the text
            value = json.loads(value) if value.strip() else None
    if value is None:
        return None
    if not is_valid(value):
        raise DataError(
            f"{where}: column {column!r} must be {expected}, or JSON text of one, got {value!r:.80}; if it holds "
            "something else, rename it with data.columns"
        )
    return without_null_keys(value)


def _is_tools(value: Any) -> bool:
    kinds = {type(tool) if tool else None for tool in value} if isinstance(value, list) else {None}
    return kinds in (set(), {dict}, {str})
