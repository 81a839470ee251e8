"""From a row to a prompt: text or conversation, checked and tokenized."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from cohort.config import DataConfig
from cohort.data.chat import ChatTemplate, Conversation, text_of
from cohort.data.guard import TurnTokens
from cohort.data.rows import Row, check_column, plain
from cohort.errors import DataError
from cohort.types import RESERVED_COLUMNS, Message

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
            if isinstance(content, Conversation) and content.tools and isinstance(content.tools[0], str):
                raise DataError(
                    f"{where}: column 'tools' names {content.tools[0]!r}, and the run has no tools: set "
                    "environment.tools, or rename the column with data.columns if it is something else"
                )
            if isinstance(content, Conversation) and not content.tools:
                return replace(content, tools=None)  # templates may tell an empty list from None
            return content
        if not isinstance(content, Conversation):
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
