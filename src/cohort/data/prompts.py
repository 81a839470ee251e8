"""Rows rendered to prompts: text or conversation, through the tokenizer, all checked before the first sample."""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Iterator, Sequence
from typing import Any

from cohort.config import DataConfig
from cohort.data.source import Row
from cohort.errors import DataError
from cohort.types import Message, Prompt

RESERVED_COLUMNS = frozenset({"prompts", "completions", "completion_ids"})
"""Names that reward functions receive from Cohort itself."""


class PromptSet:
    """All rows of a data set as prompts, tokenized once.

    Args:
        rows: the data.
        tokenizer: the policy's.
        config: which column or template makes the prompt, and its format.
        name: what errors call the data.

    Raises:
        DataError: a column is missing, a prompt is empty, or the format does not fit; the row is named.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        tokenizer: Any,
        config: DataConfig,
        *,
        name: str = "the training data",
    ) -> None:
        self.name = name
        self._rows = rows
        self._tokenizer = tokenizer
        self._columns = tuple(dict.fromkeys(column for index in range(len(rows)) for column in rows[index]))
        if clash := sorted(RESERVED_COLUMNS & set(self._columns)):
            raise DataError(f"{name} has a column {clash[0]!r}, which is an argument of reward functions: rename it")
        self._prompts = list(_build_prompts(rows, config, name))
        self._token_ids = [_tokenize(prompt, tokenizer, f"{name}, row {i}") for i, prompt in enumerate(self._prompts)]
        for index, token_ids in enumerate(self._token_ids):
            if not token_ids:
                raise DataError(f"{name}, row {index}: the prompt has no tokens")

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self._token_ids))

    def check_context(
        self, context: int | None, max_completion_length: int, setting: str = "rollout.max_completion_length"
    ) -> None:
        """Every prompt must leave room in the model's context for a whole completion.

        Args:
            context: the model's; None: it is not known, and nothing is checked.
            max_completion_length: of a completion.
            setting: which setting says so.

        Raises:
            DataError: the longest prompt does not; its row is named.
        """
        if context is None:
            return
        row = max(range(len(self)), key=lambda index: len(self._token_ids[index]))
        length = len(self._token_ids[row])
        if length + max_completion_length > context:
            raise DataError(
                f"{self.name}, row {row}: the prompt has {length} tokens and {setting} is "
                f"{max_completion_length}, together more than the model's context of {context}"
            )

    def prompt(self, row_index: int, uid: int) -> Prompt:
        """One row as a prompt."""
        token_ids = tuple(self._token_ids[row_index])
        text = self._tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        row = self._rows[row_index]
        columns = {column: row.get(column) for column in self._columns}  # a column that only other rows have is None
        return Prompt(uid, row_index, token_ids, text, self._prompts[row_index], columns)

    @property
    def fingerprint(self) -> str:
        """A hash of all prompts' tokens: equal for two runs on the same prompts."""
        return hashlib.sha256(repr(self._token_ids).encode()).hexdigest()

    def all(self) -> list[Prompt]:
        """Every row once, in order; its uid is its row."""
        return [self.prompt(index, uid=index) for index in range(len(self))]


def _build_prompts(rows: Sequence[Row], config: DataConfig, name: str) -> Iterator[str | list[Message]]:
    for index in range(len(rows)):
        row, where = rows[index], f"{name}, row {index}"
        content = _content(row, config, where)
        if isinstance(content, str):
            if not content.strip():
                raise DataError(f"{where}: the prompt is empty")
        elif not content or not all(isinstance(m, dict) and "role" in m and "content" in m for m in content):
            raise DataError(f"{where}: expected a list of messages with 'role' and 'content', got {content!r:.100}")
        elif config.format == "text":
            raise DataError(f"{where}: the prompt is a list of messages; set data.format to 'chat' or 'auto'")
        is_chat = config.format == "chat" or not isinstance(content, str)
        if config.system_prompt is not None and not is_chat:
            raise DataError("data.system_prompt needs chat format: set data.format to 'chat'")
        if not is_chat:
            yield content
            continue
        messages: list[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if config.system_prompt is not None:
            if messages[0]["role"] == "system":
                raise DataError(f"{where}: has a system message of its own; unset data.system_prompt")
            messages = [{"role": "system", "content": config.system_prompt}, *messages]
        yield messages


def _content(row: Row, config: DataConfig, where: str) -> Any:
    if config.prompt_template is not None:
        return _fill_template(config.prompt_template, row, where)
    if config.prompt_column not in row:
        raise DataError(
            f"{where}: no column {config.prompt_column!r}; the row has: {', '.join(row)}. "
            "Set data.prompt_column or data.prompt_template"
        )
    content = row[config.prompt_column]
    if not isinstance(content, str | list):
        raise DataError(f"{where}: the prompt must be a string or a list of messages, got {type(content).__name__}")
    return content


def _fill_template(template: str, row: Row, where: str) -> str:
    try:
        columns = [
            re.split(r"[.\[]", name)[0] for _, name, _, _ in string.Formatter().parse(template) if name is not None
        ]
        for column in columns:
            if column not in row:
                known = ", ".join(row)
                raise DataError(f"{where}: data.prompt_template names column {column!r}; the row has: {known}")
            if row[column] is None:
                raise DataError(f"{where}: column {column!r}, which data.prompt_template names, is empty")
        return template.format_map(row)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data.prompt_template {template!r} is not valid: {error}") from None


def _tokenize(prompt: str | list[Message], tokenizer: Any, where: str) -> list[int]:
    if isinstance(prompt, str):
        try:
            ids: list[int] = tokenizer(prompt)["input_ids"]
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
            raise DataError(f"{where}: the tokenizer refused the prompt {prompt[:60]!r}: {error}") from error
        return ids
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            "the data is in chat format, but the tokenizer has no chat template: set data.format to 'text' for string "
            "prompts, or use a model that has one"
        )
    continues = prompt[-1]["role"] == "assistant"
    try:
        encoded = tokenizer.apply_chat_template(
            prompt,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
    except Exception as error:  # templates raise jinja errors of many kinds
        raise DataError(f"{where}: the chat template refused the messages: {error}") from error
    chat_ids: list[int] = encoded["input_ids"]
    return chat_ids
