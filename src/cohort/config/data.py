"""Settings of the data: where rows come from, which ones are used, how they become prompts, and in which order."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from cohort.config.section import PositiveFloat, PositiveInt, Section, explain_errors, read_text
from cohort.errors import ConfigError

Format = Literal["auto", "text", "chat"]
MEASURES = ("reward", "rewards", "length", "cut_share", "unscored", "errors")
"""Reserved metric names; invalid as names of evaluation sets."""


def check_set_name(name: Any) -> None:
    """Check that an evaluation set's name can be part of metrics and of file names.

    Raises:
        ValueError: the name contains other characters than letters, digits, '-' and '_', or is reserved.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in MEASURES:
        raise ValueError(
            "an evaluation set's name becomes part of metrics and of file names: expected letters, digits, '-' and "
            f"'_', and none of {', '.join(MEASURES)}; got {name!r}"
        )


def _plain(value: Any) -> Any:
    """A value that TOML can represent, so that a run's settings can be written and read back."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"expected a table whose keys are strings, got {value!r:.80}")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if not isinstance(value, str | bool | int | float):
        raise ValueError(f"expected strings, numbers, true or false, lists and tables, got {value!r:.80}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected finite numbers, got {value!r}")
    return value


def _read_filter(value: Any) -> Any:
    """One condition per column: a value, a list of values, or a range."""
    if not isinstance(value, Mapping):
        return value
    table = _plain(value)
    for column, condition in table.items():
        if condition == []:
            raise ValueError(f"column {column!r}: an empty list matches no row")
        if isinstance(condition, dict):
            numbers = [isinstance(bound, int | float) and not isinstance(bound, bool) for bound in condition.values()]
            if not condition or not {"min", "max"}.issuperset(condition) or not all(numbers):
                raise ValueError(
                    f"column {column!r}: expected a value, a list of values, or a range "
                    f"{{ min = NUMBER, max = NUMBER }}, got {condition!r}"
                )
    return table


def parse_slice(text: str) -> slice:
    """A slice in Python's notation.

    Raises:
        ValueError: ``text`` is not a slice, or its step is not positive.

    >>> parse_slice("100:200"), parse_slice("::10")
    (slice(100, 200, None), slice(None, None, 10))
    """
    try:
        start, stop, *steps = [int(part) if part.strip() else None for part in text.split(":")]
        (step,) = steps or (None,)
    except ValueError:
        raise ValueError(f"expected a slice like '100:200' or '::10', got {text!r}") from None
    if step is not None and step < 1:
        raise ValueError(f"a slice's step must be 1 or more, got {text!r}")
    return slice(start, stop, step)


def _read_time(value: Any) -> Any:
    """A date and time as text, as ISO 8601 writes it, to the second."""
    try:
        return datetime.fromisoformat(str(value)).isoformat(timespec="seconds")
    except ValueError:
        raise ValueError(f"expected a date and time, as in '2026-11-27T09:30:00', got {value!r:.80}") from None


Time = Annotated[str, BeforeValidator(_read_time)]
Table = Annotated[dict[str, Any], BeforeValidator(_plain)]
Columns = dict[str, Annotated[str, Field(min_length=1)]]
Filter = Annotated[str | dict[str, Any], BeforeValidator(_read_filter)]
Slice = Annotated[str, AfterValidator(lambda text: parse_slice(text) and text)]


class Source(Section):
    """One of several sources of rows: an item of `data.train` or `data.eval`, or of `train_dataset` in Python, where
    `path` may be the rows themselves. Unset settings are those of `[data]`."""

    path: Any
    """A file, a folder or the name of a data set. In Python also rows."""
    name: str | None = None
    """Name in messages and in the rollout files. Unset: the path."""
    split: str | None = None
    """Split, for a folder or a data set's name."""
    weight: PositiveFloat | None = None
    """The source's share of the prompts is its weight over the sum of all weights. Unset for all: every row is used
    once per epoch."""
    rows: PositiveInt | None = None
    """Use only this many rows, from the first."""
    columns: Columns | None = None
    filter: Filter | None = None
    select: Slice | None = None
    prompt_column: str | None = None
    prompt_template: str | None = None
    system_prompt: str | None = None
    format: Format | None = None
    chat_template_kwargs: Table | None = None

    def __init__(self, **settings: Any) -> None:
        """Raises ``ConfigError``: a setting is unknown, of the wrong type or out of range."""
        with explain_errors(Source):
            super().__init__(**settings)

    @field_validator("path", mode="before")
    @classmethod
    def _read_path(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value


def _read_source(number: int, item: Any) -> Source:
    """A source from a path, a table or a ``Source``; its path must be text."""
    with explain_errors(Source, source=f"source {number}"):
        if not isinstance(item, str | os.PathLike | Mapping | Source):
            raise ConfigError(f"expected a path or a table with a path, got {item!r:.80}")
        settings = item if isinstance(item, Mapping) else {"path": item}
        source = item if isinstance(item, Source) else Source(**settings)
        if not isinstance(source.path, str) or not source.path:
            raise ConfigError(f"expected a path, got {source.path!r:.80}; rows are passed as train_dataset")
    return source


def _read_sources(value: Any) -> Any:
    """A path, or a list of paths and tables as ``Source`` objects."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, Source | Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a path or a list of sources, got {value!r:.80}")
    if not value:
        raise ValueError("expected a path or a list of sources, got an empty list")
    return tuple(_read_source(number, item) for number, item in enumerate(value))


def _read_sets(value: Any) -> Any:
    """The evaluation data: one set of sources, or a table of named sets."""
    if not isinstance(value, Mapping) or "path" in value:
        return _read_sources(value)
    if not value:
        raise ValueError("expected a table of named sources, got an empty one: omit it for no evaluation")
    sets = {}
    for name, sources in value.items():
        check_set_name(name)
        with explain_errors(Source, source=name):
            if sources == "":
                raise ConfigError("expected a path or a list of sources, got an empty string")
            sets[name] = _read_sources(sources)
    return sets


Sources = Annotated[str | tuple[Source, ...], BeforeValidator(_read_sources)]
Sets = Annotated[str | tuple[Source, ...] | dict[str, str | tuple[Source, ...]], BeforeValidator(_read_sets)]


class DataConfig(Section):
    """Prompts, and the columns that the rewards need."""

    train: Sources = ""
    """A file (.jsonl, .json, .csv, .parquet; also .gz and .zst), a folder of such files or one that `datasets` wrote,
    the name of a data set for `datasets.load_dataset`, "reasoning_gym:NAME?size=1000" (extra "reasoning-gym"), or
    "cohort:addition", the package's own. Or a list of paths and of tables with a path and other settings, as in
    { path = "a.jsonl", weight = 2.0 }; see 'cohort docs data'."""
    eval: Sets = ""
    """The evaluation data, in the same forms, or a table of named sets, as in { gsm8k = "test.jsonl", aime =
    "aime.jsonl" }, whose metrics are eval/gsm8k/... and eval/aime/.... Empty: no evaluation."""
    train_split: str = "train"
    """Split, if `train` is the name of a data set or a folder with splits."""
    eval_split: str = "test"
    """Split of `eval`, likewise."""
    columns: Columns = Field({})
    """Renames columns: { new = "old" }. Applied first; all other settings and the rewards use the new names."""
    filter: Filter | None = None
    """Which training rows to use: a function of a row, "file.py:keep", or conditions on columns, all of which must
    hold, as in { level = ["hard", "medium"], source = "amc", pass_rate = { min = 0.1, max = 0.9 } }."""
    select: Slice | None = None
    """Which of the filtered training rows to use: a slice in Python's notation, "100:200", "::10"."""
    train_rows: PositiveInt | None = None
    """Use only this many of the selected rows, from the first. Unset: all."""
    eval_rows: PositiveInt | None = None
    """Use only this many evaluation rows, from the first. Unset: all."""
    streaming: bool = False
    """Read `train` during the run instead of loading it. Needs `run.max_steps`."""
    shuffle_buffer: PositiveInt = 1000
    """When streaming, the next prompt is drawn from a buffer of this many rows."""
    order: Literal["shuffled", "sequential", "curriculum"] = "shuffled"
    """"shuffled": a new order in each epoch, drawn from `run.seed`; "sequential": the order of the file; "curriculum":
    the order that `data.curriculum` defines."""
    curriculum: str | None = None
    """A column of numbers, in ascending order, or in descending order with a "-" before its name. Or "measured": the
    first epoch is shuffled, each later one goes from the highest measured mean reward to the lowest."""
    prompt_column: str = "prompt"
    """The column that holds the prompt: a string, or a list of chat messages."""
    prompt_template: str | None = None
    """Builds the prompt from columns, as in "Question: {question}". Replaces `prompt_column`."""
    system_prompt: str | None = None
    """A system message before the prompt. Needs chat format."""
    format: Format = "auto"
    """"chat" applies the tokenizer's chat template (a string becomes the user's message); "text" uses a string as it
    is; "auto" is chat for lists of messages and text for strings."""
    chat_template: str | None = None
    """A chat template that replaces the tokenizer's: Jinja text, or the name of a file (ends with .jinja, or contains
    no brace), which is read at once. It is saved with the tokenizer of the checkpoints."""
    chat_template_kwargs: Table = Field({})
    """Variables of the chat template, as in { enable_thinking = false }. The column `chat_template_kwargs` of a row
    overrides them."""
    escape_control_tokens: bool = False
    """Read control tokens of the chat template that messages of rows spell, such as "<|im_end|>", as plain text, as
    answers of tools always are. The run tells at its start how many rows spell some: each ends its own turn."""
    template_time: Time | None = None
    """The time that chat templates print, as in "2026-11-27T09:30:00". Unset: of a template that prints it, the time of
    the run's start, which the run folder keeps: every prompt of the run, of its evaluations and of `cohort generate
    RUN` has this time."""
    max_prompt_length: PositiveInt | None = None
    """Maximum number of tokens of a prompt. Unset: what the model's context leaves beside
    `rollout.max_completion_length`."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What to do with longer prompts: "error" refuses the data, "drop" omits those rows, "truncate_left" keeps the last
    tokens. The run prints their number at its start."""

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, value: str | None) -> str | None:
        """Return the template's text, so that the run's settings do not depend on the file."""
        return value if value is None or ("{" in value and not value.endswith(".jinja")) else read_text(value)

    @model_validator(mode="after")
    def _check_together(self) -> DataConfig:
        if (self.order == "curriculum") != (self.curriculum is not None):
            raise ValueError(
                "order 'curriculum' and the setting curriculum need each other: set data.order = 'curriculum' and "
                "data.curriculum to a column or to 'measured'"
            )
        if self.streaming and self.order == "curriculum":
            raise ValueError("streamed data cannot be ordered by a curriculum: unset data.streaming")
        return self
