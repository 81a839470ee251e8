"""Where the prompts come from: arguments, standard input or a file; and whether the model can take them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cohort.config import DataConfig
from cohort.data import PromptSet, Row, load_rows, readable
from cohort.errors import ConfigError, DataError
from cohort.generate.request import Request, is_text
from cohort.policy import context_length, end_token_ids
from cohort.rollout import Sampling
from cohort.types import Prompt

OWN_COLUMNS = ("prompt", "prompt_index", "sample_index", "text", "token_ids", "logps", "full_logps", "finish_reason")
"""What a line of the output says of its completion."""


def read_rows(request: Request) -> list[Row]:
    """The rows that the prompts come from: the prompt in column ``prompt``, the others under names of their own.

    Raises:
        DataError: a file or a line of it cannot be read, a row has no prompt, or there is none.
    """
    if request.prompts is None:
        return [{"prompt": text} for text in _arguments(request.prompt)]
    path = Path(request.prompts).expanduser()
    if path.suffix == ".txt":
        return [{"prompt": line} for line in _lines(path)]
    if not readable(path):
        raise DataError(f"cannot read {request.prompts}: expected a .txt, .jsonl, .json, .csv or .parquet file")
    given = load_rows(request.prompts)
    rows: list[Row] = []
    for index, row in enumerate(given):
        if request.prompt_column not in row:
            raise DataError(
                f"{request.prompts}, row {index}: no column {request.prompt_column!r}; the row has: {', '.join(row)}. "
                "Set --prompt-column"
            )
        others = {_free_name(key, row): value for key, value in row.items() if key != request.prompt_column}
        rows.append({"prompt": row[request.prompt_column], **others})
    return rows


def _arguments(given: Sequence[str]) -> list[str]:
    """The prompts of the command line; "-", or nothing where standard input is no terminal, is standard input."""
    texts = list(given)
    if not texts and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("no prompt: give one or more as arguments, a file of them with --prompts, or one by a pipe")
    if texts.count("-") > 1:
        raise ConfigError("'-' stands for standard input, which can be one prompt only")
    for index, text in enumerate(texts or ["-"]):
        if text == "-":
            texts[index : index + 1] = [_standard_input()]
        elif not text.strip():
            raise DataError(f"prompt {index} of the command line is empty")
    return texts


def _standard_input() -> str:
    """All of it as one prompt, without its last line break, which files and ``echo`` end with."""
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError(f"standard input is not {error.encoding} text: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise DataError("the prompt from standard input is empty")
    return text.removesuffix("\n").removesuffix("\r")


def _lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"no file of prompts {path}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}, line {line}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not (lines := [line.removesuffix("\r") for line in text.split("\n") if line.strip()]):
        raise DataError(f"{path} has no prompts")
    return lines


def _free_name(column: str, row: Row) -> str:
    """A row's column in the output: ``row.text`` where ``text`` is one of ours."""
    name = column
    while name in OWN_COLUMNS or (name != column and name in row):
        name = f"row.{name}"
    return name


def render(request: Request, rows: Sequence[Row], tokenizer: Any) -> list[Prompt]:
    """The rows as prompts, each with its place as uid.

    Raises:
        DataError: a prompt is empty, no text or no list of messages, or has a system message where ``--system`` gives
            one.
        ConfigError: the tokenizer has no chat template, and one is needed.
    """
    name = request.prompts or "the command line"
    if bad := [index for index, row in enumerate(rows) if not is_text(row["prompt"])]:
        raise DataError(f"{name}, row {bad[0]}: the prompt is not UTF-8 text")
    if not getattr(tokenizer, "chat_template", None):
        if request.as_chat:
            raise ConfigError("--chat and --system need a tokenizer with a chat template, and the model's has none")
        if messages := [index for index, row in enumerate(rows) if isinstance(row["prompt"], list)]:
            raise DataError(
                f"{name}, row {messages[0]}: the prompt is a list of messages, and the model's tokenizer has no chat "
                "template: give strings, or a model that has one"
            )
    config = DataConfig(format="chat" if request.as_chat else "auto", system_prompt=request.system)
    return PromptSet([{"prompt": row["prompt"]} for row in rows], tokenizer, config, name=name, mixed=True).all()


def within_context(request: Request, prompts: Sequence[Prompt], sampling: Sampling, config: Any) -> list[Sampling]:
    """The settings for each prompt: without ``--max-tokens`` a completion may be as long as the context allows.

    Raises:
        DataError: a prompt leaves no room for its completion.
    """
    if (context := context_length(config)) is None:
        return [sampling] * len(prompts)
    needed = request.max_tokens or max(1, request.min_tokens, len(sampling.forced_ids))
    samplings = []
    for prompt in prompts:
        length = len(prompt.token_ids)
        if length + needed > context:
            shown = prompt.text if len(prompt.text) <= 60 else prompt.text[:57] + "..."
            why = f"--max-tokens is {needed}" if request.max_tokens else f"its completion has {needed} or more"
            raise DataError(
                f"{request.prompts or 'the command line'}, prompt {prompt.uid} ({shown!r}) has {length} tokens and "
                f"{why}: together more than the model's context of {context}"
            )
        limit = min(sampling.max_completion_length, context - length)
        samplings.append(replace(sampling, max_completion_length=limit))
    return samplings


def with_prefix(request: Request, sampling: Sampling, tokenizer: Any, config: Any) -> Sampling:
    """The settings with the prefix's tokens; a grammar is compiled, and tried on them.

    Raises:
        ConfigError: a grammar cannot be compiled, or does not allow the prefix; the prefix is too long.
    """
    forced = tokenizer(request.prefix, add_special_tokens=False)["input_ids"] if request.prefix else []
    limit = request.max_tokens or max(sampling.max_completion_length, len(forced))
    sampling = replace(sampling, forced_ids=tuple(forced), max_completion_length=limit)
    ends = end_token_ids(SimpleNamespace(config=config), tokenizer)
    vocabulary = getattr(config, "vocab_size", None)
    if sampling.constrained and ends and vocabulary:  # the engine's own check comes when the model has been loaded
        from cohort.rollout.grammar import Grammar

        matcher = Grammar.of(tokenizer, sampling, ends, vocabulary).matcher()
        for token in forced:
            matcher.consume(token)
    return sampling
