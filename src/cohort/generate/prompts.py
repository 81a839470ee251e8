"""The prompts of ``cohort generate``: from arguments, standard input or a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cohort.config import DataConfig
from cohort.data import PromptSet, Row, file_format, load_rows
from cohort.data.files import read_lines
from cohort.errors import ConfigError, DataError
from cohort.generate.request import Request, is_text
from cohort.types import Prompt

OUTPUT_COLUMNS = ("prompt", "prompt_index", "sample_index", "text", "token_ids", "logps", "full_logps", "finish_reason")
"""The columns of the output that describe a completion."""


def read_rows(request: Request) -> list[Row]:
    """The prompts as rows: the prompt in column ``prompt``, and the other columns of a file.

    Raises:
        DataError: a file or a line cannot be read, a row has no prompt, or there are no prompts.
    """
    if request.prompts is None:
        return [{"prompt": text} for text in _arguments(request.prompt)]
    path = Path(request.prompts).expanduser()
    if path.suffix == ".txt":
        return [{"prompt": line} for line in _lines(path)]
    if file_format(path) is None:
        raise DataError(f"cannot read {request.prompts}: expected a .txt, .jsonl, .json, .csv or .parquet file")
    column, rows = request.prompt_column, list[Row]()
    for index, row in enumerate(load_rows(request.prompts)):
        if column not in row:
            listed = ", ".join(row)
            raise DataError(
                f"{request.prompts}, row {index}: no column {column!r}; the row has: {listed}. Set --prompt-column"
            )
        others = {_free_name(key, row): value for key, value in row.items() if key != column}
        rows.append({"prompt": row[column], **others})
    return rows


def _arguments(prompts: Sequence[str]) -> list[str]:
    """The prompts of the command line. "-" is standard input; so is no prompt, unless it is a terminal."""
    texts = list(prompts)
    if not texts and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("no prompt: give one or more as arguments, a file with --prompts, or one through a pipe")
    texts = texts or ["-"]
    if texts.count("-") > 1:
        raise ConfigError("'-' is standard input, which can be one prompt only")
    for index, text in enumerate(texts):
        if not text.strip():
            raise DataError(f"prompt {index} of the command line is empty")
    return [_standard_input() if text == "-" else text for text in texts]


def _standard_input() -> str:
    """All of standard input as one prompt, without the last line break."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not {error.encoding} text: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise DataError("the prompt from standard input is empty")
    return text.removesuffix("\n").removesuffix("\r")


def _lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    if not path.exists():
        raise DataError(f"there is no prompts file {path}")
    if not (lines := [line.rstrip("\r\n") for _, line in read_lines(path) if line.strip()]):
        raise DataError(f"{path} has no prompts")
    return lines


def _free_name(column: str, row: Row) -> str:
    """A row's column in the output: ``row.text`` for a column named ``text``."""
    name = column
    while name in OUTPUT_COLUMNS or (name != column and name in row):
        name = f"row.{name}"
    return name


def render(request: Request, rows: Sequence[Row], tokenizer: Any) -> list[Prompt]:
    """The rows as prompts; the uid of each is its position.

    Raises:
        DataError: a prompt is empty, or neither text nor a list of messages, or has a system message beside
            ``--system``.
        ConfigError: a chat template is needed and the tokenizer has none.
    """
    name = request.prompts or "the command line"
    for index, row in enumerate(rows):
        if not is_text(row["prompt"]):
            raise DataError(f"{name}, row {index}: the prompt is not UTF-8 text")
        if isinstance(row["prompt"], list) and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"{name}, row {index}: the prompt is a list of messages, and the model's tokenizer has no chat "
                "template: give strings, or a model that has one"
            )
    if request.as_chat and not getattr(tokenizer, "chat_template", None):
        raise ConfigError("--chat and --system need a tokenizer with a chat template, and the model's has none")
    config = DataConfig(format="chat" if request.as_chat else "auto", system_prompt=request.system)
    return PromptSet([{"prompt": row["prompt"]} for row in rows], tokenizer, config, name=name, mixed=True)[:]
