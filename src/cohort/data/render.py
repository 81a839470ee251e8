"""One row to one prompt: text or conversation, checked, and through the tokenizer."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cohort.config import DataConfig
from cohort.data.chat import ChatTemplate, read_tools, read_variables, without_nulls
from cohort.data.files import Row
from cohort.data.rows import plain
from cohort.errors import DataError
from cohort.types import RESERVED_COLUMNS, Message, Prompt

IMAGE_COLUMNS = ("image", "images")

Content = str | list[Message]
"""A prompt before it is rendered: a string, or a conversation."""


def check_columns(columns: Sequence[str], where: str) -> None:
    """Columns by their names alone.

    Raises:
        DataError: one has the name of something else, or holds images.
    """
    if clash := [column for column in columns if column in RESERVED_COLUMNS]:
        raise DataError(
            f"{where} has a column {clash[0]!r}, which is an argument of reward functions: rename it, as in "
            f'data.columns = {{ my_{clash[0]} = "{clash[0]}" }}'
        )
    if images := [column for column in columns if column in IMAGE_COLUMNS]:
        raise DataError(
            f"{where} has a column {images[0]!r}: Cohort trains language models, which see no images. If it holds "
            "something else, rename it with data.columns"
        )


class PromptMaker:
    """What the settings make of a row; needs no tokenizer.

    Args:
        config: which column or template makes the prompt, its format, and the system's message.

    Raises:
        DataError: ``data.prompt_template`` is no template.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._template = config.prompt_template
        self._fields: tuple[str, ...] = ()
        if self._template is not None:
            try:
                names = [name for _, name, _, _ in string.Formatter().parse(self._template) if name is not None]
            except ValueError as error:
                raise self._bad_template(error) from None
            self._fields = tuple(dict.fromkeys(re.split(r"[.\[]", name)[0] for name in names))

    def make(self, row: Row, where: str) -> Content:
        """The row's prompt: a string, or messages where it is chat.

        Raises:
            DataError: a column is missing, the prompt is empty, or the format does not fit.
        """
        config = self._config
        content = self._content(row, where)
        if isinstance(content, str):
            if not content.strip():
                raise DataError(f"{where}: the prompt is empty")
            if config.format != "chat":
                if config.system_prompt is not None:
                    raise DataError("data.system_prompt needs chat format: set data.format to 'chat'")
                self._check_text(row, where)
                return content
            messages: list[Message] = [{"role": "user", "content": content}]
        else:
            if config.format == "text":
                raise DataError(f"{where}: the prompt is a list of messages; set data.format to 'chat' or 'auto'")
            messages = [_without_nulls(message) for message in _checked(content, where)]
        if config.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{where}: has a system message of its own; unset data.system_prompt")
            messages = [{"role": "system", "content": config.system_prompt}, *messages]
        return messages

    def _check_text(self, row: Row, where: str) -> None:
        """Whether nothing is given that only a chat template could use."""
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
                    "to 'chat', or rename it with data.columns if it is something else"
                )

    def _content(self, row: Row, where: str) -> str | list[Any]:
        if self._template is not None:
            return self._fill(row, where)
        column = self._config.prompt_column
        if column not in row:
            raise DataError(
                f"{where}: no column {column!r}; the row has: {', '.join(row)}. "
                "Set data.prompt_column, data.prompt_template or data.columns"
            )
        content = row[column]
        if isinstance(content, np.ndarray):
            content = plain(content)
        if not isinstance(content, str | list):
            raise DataError(f"{where}: the prompt must be a string or a list of messages, got {type(content).__name__}")
        return content

    def _fill(self, row: Row, where: str) -> str:
        assert self._template is not None
        for column in self._fields:
            if column not in row:
                known = ", ".join(row)
                raise DataError(f"{where}: data.prompt_template names column {column!r}; the row has: {known}")
            if row[column] is None:
                raise DataError(f"{where}: column {column!r}, which data.prompt_template names, is empty")
        try:
            return self._template.format_map(row)
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise self._bad_template(error) from None

    def _bad_template(self, error: Exception) -> DataError:
        return DataError(f"data.prompt_template {self._template!r} is not valid: {error}")


def _checked(messages: Sequence[Any], where: str) -> list[Message]:
    if not messages:
        raise DataError(f"{where}: expected a list of messages, got an empty one")
    for message in messages:
        if (
            not isinstance(message, Mapping)
            or "role" not in message
            or not ({"content", "tool_calls"} & message.keys())
        ):
            raise DataError(f"{where}: expected a list of messages with 'role' and 'content', got {messages!r:.100}")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        parts = content if isinstance(content, list) else [content]
        kinds = [part.get("type") if isinstance(part, Mapping) else type(part).__name__ for part in parts]
        if other := [kind for kind in kinds if kind != "text"]:
            raise DataError(
                f"{where}: a message's content must be text, or a list of parts of type 'text'; here is one of type "
                f"{other[0]!r}"
            )
    last = messages[-1]
    if not last.get("content") and last["role"] in ("user", "assistant"):
        raise DataError(f"{where}: the prompt is empty: the last message, of role {last['role']!r}, has no content")
    return list(messages)


def _without_nulls(message: Message) -> Message:
    """Without the keys that Arrow makes up. A content that is None is said to be so."""
    held: Message = {key: value for key, value in message.items() if value is not None or key == "content"}
    return {**held, "tool_calls": without_nulls(held["tool_calls"])} if "tool_calls" in held else held


class Renderer:
    """Prompts of one source through the tokenizer.

    Args:
        config: the source's settings.
        tokenizer: the policy's.
    """

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self.maker = PromptMaker(config)
        self._config = config
        self._tokenizer = tokenizer
        self._chat: ChatTemplate | None = None

    def token_ids(self, rows: Sequence[Row], wheres: Sequence[str]) -> list[list[int]]:
        """The prompts' tokens, all rows tokenized in one call. Text gets the tokenizer's special tokens; a rendered
        conversation has its own, as with ``apply_chat_template``.

        Raises:
            DataError: a row cannot be a prompt, or the tokenizer refuses it.
        """
        contents = [self.maker.make(row, where) for row, where in zip(rows, wheres, strict=True)]
        token_ids: list[list[int]] = [[]] * len(rows)
        texts: dict[bool, list[tuple[int, str]]] = {False: [], True: []}
        for index, (content, row) in enumerate(zip(contents, rows, strict=True)):
            is_text = isinstance(content, str)
            text = content if isinstance(content, str) else self._rendered(content, row, wheres[index])
            texts[is_text].append((index, text))
        for is_text, listed in texts.items():
            if listed:
                found = self._tokenize([text for _, text in listed], is_text, [wheres[index] for index, _ in listed])
                for (index, _), ids in zip(listed, found, strict=True):
                    token_ids[index] = ids
        if empty := [where for where, ids in zip(wheres, token_ids, strict=True) if not ids]:
            raise DataError(f"{empty[0]}: the prompt has no tokens")
        return token_ids

    def prompt(
        self,
        row: Row,
        where: str,
        token_ids: Sequence[int],
        *,
        uid: int,
        number: int,
        source: str,
        columns: Sequence[str],
    ) -> Prompt:
        """A row and its tokens as a prompt. A column that only other rows have is None."""
        content = self.maker.make(row, where)
        prefill = ""
        if not isinstance(content, str):
            tools, variables = self._extras(row, where)
            text = self.chat.render(content, tools, variables, where)
            prefill = self.chat.prefill(content, tools, variables, text)
        ids = tuple(map(int, token_ids))
        shown = self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        held = {column: row.get(column) for column in columns} | dict(row)
        return Prompt(uid, number, ids, shown, content, held, prefill, source)

    @property
    def chat(self) -> ChatTemplate:
        """The chat template, looked for when the first conversation comes."""
        if self._chat is None:
            self._chat = ChatTemplate(self._tokenizer, self._config.chat_template)
        return self._chat

    def _rendered(self, messages: list[Message], row: Row, where: str) -> str:
        tools, variables = self._extras(row, where)
        return self.chat.render(messages, tools, variables, where)

    def _extras(self, row: Row, where: str) -> tuple[Any, Mapping[str, Any]]:
        """Tools and template variables: the settings', and the row's own laid over them."""
        variables: Mapping[str, Any] = self._config.chat_template_kwargs
        if "chat_template_kwargs" in row:
            variables = {**variables, **read_variables(row["chat_template_kwargs"], where)}
        return read_tools(row["tools"], where) if "tools" in row else None, variables

    def _tokenize(self, texts: list[str], is_text: bool, wheres: Sequence[str]) -> list[list[int]]:
        try:
            encoded = self._tokenizer(
                texts,
                add_special_tokens=is_text,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
            if len(texts) > 1:
                return [self._tokenize([text], is_text, [where])[0] for text, where in zip(texts, wheres, strict=True)]
            raise DataError(f"{wheres[0]}: the tokenizer refused the prompt {texts[0][:60]!r}: {error}") from error
        ids: list[list[int]] = encoded["input_ids"]
        return ids
