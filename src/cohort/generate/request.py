"""The request of ``cohort generate``: its arguments, its prompts, and their sampling settings."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cohort.config import DataConfig, GRPOConfig, load_config, with_values
from cohort.config.schema import marks_of
from cohort.data import PromptSet, Row, columns_of, file_format, filled, load_rows, read_lines
from cohort.environments import Acting
from cohort.errors import CohortError, ConfigError, DataError
from cohort.evaluation.evaluate import eval_sampling
from cohort.flags import GenerateFlags
from cohort.policy import context_length, end_token_ids
from cohort.rollout import Sampling
from cohort.runs.chosen import check_nothing_missing, run_of
from cohort.runs.trust import settings_of_run
from cohort.types import Prompt

OUTPUT_COLUMNS = ("prompt", "prompt_index", "sample_index", "text", "token_ids", "logps", "full_logps", "finish_reason")
"""The columns of the output that describe a completion."""
_DEFAULTS = {field.name: field.default for field in fields(GenerateFlags) if field.name != "n"}
SETTINGS = {name: mark.flag for name, mark in marks_of(GRPOConfig).items() if mark.flag in _DEFAULTS}
"""Settings and the flags that are short for them."""
FLAGS = {name: f"--{flag.replace('_', '-')}" for name, flag in SETTINGS.items()} | {
    "rollout.max_completion_length": "--max-tokens",
    "max_completion_length": "--max-tokens",
    "min_completion_length": "--min-tokens",
    "forced_ids": "--prefix",
    "model.path": "MODEL",
}
"""The flags for settings that errors of other rooms name."""
UNUSED = ("data.train", "data.eval", "data.filter", "model.path", "model.lora", "server", "reward", "objective")


@contextlib.contextmanager
def flags_in_errors() -> Iterator[None]:
    """Make errors name flags of the command line instead of settings."""
    try:
        yield
    except CohortError as error:
        names = "|".join(re.escape(name) for name in FLAGS)
        text = re.sub(f"(?:--)?({names})", lambda found: FLAGS[found[1]], str(error))
        raise type(error)(text) from error.__cause__


@dataclass(frozen=True)
class Request(GenerateFlags):
    """The arguments of ``cohort generate``; see its ``--help``.

    The random numbers of a completion are determined by the seed, the position of its prompt among the prompts (from 0)
    and its position among the prompt's completions (from 0). An evaluation with the same seed uses the same ones.
    """

    model: str
    prompt: Sequence[str] = ()

    @property
    def count(self) -> int:
        """Completions per prompt."""
        return 1 if self.n is None else self.n

    @cached_property
    def run(self) -> Path | None:
        """The folder of the run that the model is of; None if it is of none."""
        return run_of(Path(self.model).expanduser())

    @cached_property
    def settings(self) -> GRPOConfig:
        """The settings of the run that the model is of, or the defaults, with the flags over them.

        Raises:
            ConfigError: a flag is out of its range.
            RunFolderError: they name code that this account has not run before, or a file that is not there.
        """
        own = load_config(self.run / "config.toml", of_run=True) if self.run else GRPOConfig()
        flags = {name: getattr(self, flag) for name, flag in SETTINGS.items()}
        given = {name: value for name, value in flags.items() if value != _DEFAULTS[SETTINGS[name]]}
        if not given.keys().isdisjoint(grammar := ("rollout.regex", "rollout.json_schema")):
            given = dict.fromkeys(grammar) | given
        if self.min_tokens is not None:  # which may be above the run's longest, or the default
            given["rollout.max_completion_length"] = max(self.min_tokens, own.rollout.max_completion_length)
            longest = max(self.min_tokens, eval_sampling(own).max_completion_length)
            given.setdefault("eval.max_completion_length_eval", longest)
        given["rollout.engine"] = self.engine or "local"  # starting vLLM takes longer than a prompt
        settings = with_values(own, given)
        return settings_of_run(self.run, settings, self.trust, given=given, unused=UNUSED) if self.run else settings

    @property
    def origin(self) -> str:
        """What errors call the source of the prompts."""
        return self.prompts or "the command line"

    @property
    def output_path(self) -> Path | None:
        """The file to write; None for the terminal or standard output."""
        return None if self.output is None or self.output == "-" else Path(self.output).expanduser()

    def check(self) -> None:
        """Check the arguments and the output file, which is created when the model has been loaded.

        Raises:
            ConfigError: arguments exclude each other, a text is not UTF-8, or the output file exists, is the file of
                prompts, or cannot be created.
        """
        for name in ("system", "prefix", "regex", "json_schema", "stop"):
            if not _is_text(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} is not UTF-8 text")
        if "" in self.stop:
            raise ConfigError("--stop must not be empty: every text contains the empty string")
        if self.prompts is not None and self.prompt:
            raise ConfigError("give prompts as arguments or in a file (--prompts), not both")
        if (path := self.output_path) is None:
            return
        if self.prompts is not None and path.resolve() == Path(self.prompts).expanduser().resolve():
            raise ConfigError(f"--output {path} is the file of prompts: give another one")
        self.check_output("--output", path)

    def acting(self) -> Acting | None:
        """The tools and the environment; None if there are none.

        Raises:
            ConfigError: one cannot be used; or the run's were passed in Python, without a name.
        """
        settings = self.settings.environment
        if settings.wanted and self.prefix:
            raise ConfigError("--prefix is for completions of one turn: leave out --tools and --environment")
        if not settings.wanted:
            check_nothing_missing(self.model, "copy the model out of the run to sample without them")
        return Acting.of(settings, group_size=self.count)


def _is_text(value: Any) -> bool:
    """Whether a string, or all strings in a JSON value, can be encoded as UTF-8.

    Undecodable bytes from the shell and unpaired surrogates cannot.
    """
    try:
        return bool(json.dumps(value, ensure_ascii=False, default=str).encode())
    except UnicodeEncodeError:
        return False


def read_rows(request: Request) -> list[Row]:
    """The prompts as rows: the prompt in column ``prompt``, and the other columns of a file.

    Raises:
        DataError: a file or a line cannot be read, a row has no prompt, or there are no prompts.
    """
    template = request.settings.data.prompt_template if request.prompt_column is None else None
    if request.prompts is None:
        return [{"prompt": _in_template(text, template)} for text in _arguments(request.prompt)]
    path = Path(request.prompts).expanduser()
    if path.suffix == ".txt":
        return [{"prompt": _in_template(line, template)} for line in _lines(path)]
    if file_format(path) is None:
        raise DataError(f"cannot read {request.prompts}: expected a .txt, .jsonl, .json, .csv or .parquet file")
    column, rows = request.prompt_column or request.settings.data.prompt_column, list[Row]()
    for index, row in enumerate(load_rows(request.prompts)):
        where = f"{request.prompts}, row {index}"
        if template is None and column not in row:
            raise DataError(f"{where}: no column {column!r}; the row has: {', '.join(row)}. Set --prompt-column")
        prompt = row[column] if template is None else filled(template, row, where)
        others = {_free_name(key, row): one for key, one in row.items() if template is not None or key != column}
        rows.append({"prompt": prompt, **others})
    return rows


def _in_template(text: str, template: str | None) -> str:
    """A text prompt in the run's template. If the template has no column or several, the text is the whole prompt."""
    columns = columns_of(template or "")
    return filled(template, {columns[0]: text}, "the command line") if template and len(columns) == 1 else text


def note_on_template(request: Request) -> str:
    """A note that text prompts do not use the run's template, and why; empty if they do or there is no template."""
    template, are_texts = request.settings.data.prompt_template, Path(request.prompts or "-.txt").suffix == ".txt"
    columns = columns_of(template or "")
    if template is None or request.prompt_column is not None or len(columns) == 1 or not are_texts:
        return ""
    return (
        f"the text is the whole prompt: the run's data.prompt_template is made of the columns "
        f"{', '.join(columns) or '(none)'}, which rows given with --prompts FILE.jsonl fill"
    )


def _arguments(prompts: Sequence[str]) -> list[str]:
    """The prompts of the command line. "-" is standard input; so is no prompt, unless it is a terminal."""
    if not prompts and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("no prompt: give one or more as arguments, a file with --prompts, or one through a pipe")
    texts = list(prompts) or ["-"]
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
        raise DataError(
            "the prompt from standard input is empty: give a prompt as an argument, a file with --prompts, or a text "
            "through the pipe"
        )
    return text.removesuffix("\n").removesuffix("\r")


def _lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    if not path.is_file():
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


def render(request: Request, rows: Sequence[Row], tokenizer: Any, acting: Acting | None = None) -> list[Prompt]:
    """The rows as prompts; the uid of each is its position. Prompts show the tools, if there are any.

    Raises:
        DataError: a prompt is empty, or neither text nor a list of messages, or has a system message beside
            ``--system``.
        ConfigError: a chat template is needed and the tokenizer has none.
    """
    has_template, own = bool(getattr(tokenizer, "chat_template", None)), request.settings.data
    for index, row in enumerate(rows):
        if not _is_text(row["prompt"]):
            raise DataError(f"{request.origin}, row {index}: the prompt is not UTF-8 text")
        if isinstance(row["prompt"], list) and not has_template:
            raise DataError(
                f"{request.origin}, row {index}: the prompt is a list of messages, and the model's tokenizer has no "
                "chat template: give strings, or a model that has one"
            )
    as_chat = request.chat or own.system_prompt is not None or acting is not None or own.format == "chat"
    as_chat = as_chat or bool(own.chat_template_kwargs)
    if as_chat and not has_template:
        raise ConfigError(
            "--chat, --system, --tools and --environment need a chat template, and the model's tokenizer has none"
        )
    config = DataConfig(
        format="chat" if as_chat else "auto",
        system_prompt=own.system_prompt,
        chat_template=own.chat_template,
        chat_template_kwargs=own.chat_template_kwargs,
        escape_control_tokens=own.escape_control_tokens,
    )
    tools = acting.schemas_of if acting else None
    columns = rows if acting else [{"prompt": row["prompt"]} for row in rows]  # an environment's reset gets them
    return PromptSet(columns, tokenizer, config, name=request.origin, mixed=True, tools=tools)[:]


def with_prefix(request: Request, sampling: Sampling, tokenizer: Any, config: Any) -> Sampling:
    """The settings with the prefix's tokens. A grammar is compiled and checked against them.

    Raises:
        ConfigError: a grammar cannot be compiled or does not allow the prefix, or the prefix is too long.
    """
    forced = tokenizer(request.prefix, add_special_tokens=False)["input_ids"] if request.prefix else []
    limit = request.max_tokens or max(sampling.max_completion_length, len(forced))
    sampling = replace(sampling, forced_ids=tuple(forced), max_completion_length=limit)
    ends = end_token_ids(SimpleNamespace(config=config), tokenizer)
    vocabulary = getattr(config, "vocab_size", None)
    if sampling.constrained and ends and vocabulary:  # the engine checks the rest when the model has been loaded
        from cohort.rollout.grammar import Grammar

        matcher = Grammar.of(tokenizer, sampling, ends, vocabulary).matcher()
        for token in forced:
            matcher.consume(token)
    return sampling


def within_context(request: Request, prompts: Sequence[Prompt], sampling: Sampling, config: Any) -> list[Sampling]:
    """The settings of each prompt. Without ``--max-tokens`` a completion may fill the model's context.

    Raises:
        DataError: a prompt leaves no room for its completion.
    """
    if (context := context_length(config)) is None:
        return [sampling] * len(prompts)
    needed = request.max_tokens or max(1, sampling.min_completion_length, len(sampling.forced_ids))
    room = {prompt.uid: context - len(prompt.token_ids) for prompt in prompts}
    for prompt in prompts:
        if needed > room[prompt.uid]:
            reason = f"--max-tokens is {needed}" if request.max_tokens else f"its completion needs at least {needed}"
            raise DataError(
                f"{request.origin}, prompt {prompt.uid} ({shortened(prompt.text)!r}) has {len(prompt.token_ids)} "
                f"tokens and {reason}: together more than the model's context of {context}"
            )
    limit = sampling.max_completion_length
    return [replace(sampling, max_completion_length=min(limit, room[prompt.uid])) for prompt in prompts]


def shortened(text: str) -> str:
    """The beginning of a text, for messages.

    >>> shortened("x" * 61)[55:]
    'xx...'
    """
    return text if len(text) <= 60 else text[:57] + "..."
