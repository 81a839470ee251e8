"""The settings of the data: where rows come from, which of them are used, how they become prompts, in which order."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cohort.config.evaluation import check_set_name
from cohort.config.section import PositiveInt, Section

Format = Literal["auto", "text", "chat"]


def _plain(value: Any) -> Any:
    """A table as TOML can hold it, so that a run's settings can be written down and read back."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"expected a table whose keys are strings, got {value!r:.80}")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or not isinstance(value, str | bool | int | float):
        raise ValueError(f"expected strings, numbers, true or false, lists and tables, got {value!r:.80}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"expected finite numbers, got {value!r}")
    return value


def _read_filter(value: Any) -> Any:
    """A condition per column: a value, a list of them, or a range."""
    if not isinstance(value, Mapping):
        return value
    table = _plain(value)
    for column, condition in table.items():
        if isinstance(condition, dict):
            numbers = [isinstance(bound, int | float) and not isinstance(bound, bool) for bound in condition.values()]
            if not condition or not {"min", "max"}.issuperset(condition) or not all(numbers):
                raise ValueError(
                    f"column {column!r}: expected a value, a list of values, or a range "
                    f"{{ min = NUMBER, max = NUMBER }}, got {condition!r}"
                )
        elif isinstance(condition, list) and not condition:
            raise ValueError(f"column {column!r}: no value is in an empty list, so no row would be left")
    return table


def _read_slice(value: Any) -> Any:
    """Only the form is looked at."""
    if isinstance(value, str):
        parse_slice(value)
    return value


def parse_slice(text: str) -> slice:
    """A slice as Python writes it.

    Raises:
        ValueError: it is none, or its step is not positive.

    >>> parse_slice("100:200"), parse_slice("::10")
    (slice(100, 200, None), slice(None, None, 10))
    """
    parts = text.strip().split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3):
        raise ValueError(f"expected a slice like '100:200' or '::10', got {text!r}")
    chosen = slice(*numbers)
    if chosen.step is not None and chosen.step < 1:
        raise ValueError(f"a slice's step must be 1 or more, got {text!r}")
    return chosen


Table = Annotated[dict[str, Any], BeforeValidator(_plain)]
Columns = dict[str, Annotated[str, Field(min_length=1)]]
Filter = Annotated[str | dict[str, Any], BeforeValidator(_read_filter)]
Slice = Annotated[str, BeforeValidator(_read_slice)]


class Source(Section):
    """One of several sources of rows: an item of `data.train` or `data.eval`, or of `train_dataset` in Python, where
    `path` may be the rows themselves. What is unset is as `[data]` says."""

    path: Any
    """A file, a folder or the name of a data set. In Python also rows."""
    name: str | None = None
    """What messages and the rollout files call it. Unset: the path."""
    split: str | None = None
    """Split, for a folder or a name."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Its share of the prompts is its weight over the sum of all weights. Unset, for all: every row once per epoch."""
    rows: PositiveInt | None = None
    """Use the first so many rows only."""
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
        from cohort.config.load import explain_errors

        with explain_errors():
            super().__init__(**settings)

    @field_validator("path", mode="before")
    @classmethod
    def _read_path(cls, value: Any) -> Any:
        return os.fspath(value) if isinstance(value, os.PathLike) else value


def _read_sources(value: Any) -> Any:
    """A path, or a list of paths and tables as ``Source`` objects."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Source | Mapping):
        value = [value]
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a path or a list of sources, got {value!r:.80}")
    from cohort.config.load import explain_errors

    sources = []
    for number, item in enumerate(value):
        with explain_errors(source=f"source {number}"):
            if isinstance(item, str | os.PathLike):
                sources.append(Source(path=item))
            elif isinstance(item, Source):
                sources.append(item)
            elif isinstance(item, Mapping):
                sources.append(Source(**item))
            else:
                raise ValueError(f"source {number}: expected a path or a table with a path, got {item!r:.80}")
    for number, source in enumerate(sources):
        if not isinstance(source.path, str) or not source.path:
            raise ValueError(f"source {number}: expected a path, got {source.path!r:.80}; rows go to train_dataset")
    if not sources:
        raise ValueError("expected a path or a list of sources, got an empty list")
    return tuple(sources)


def _read_sets(value: Any) -> Any:
    """What an evaluation is made on: one set of sources, or a table of such under names."""
    if not isinstance(value, Mapping) or "path" in value:
        return _read_sources(value)
    if not value:
        raise ValueError("expected a table of sources under names, and it is empty: leave it out for no evaluation")
    for name in value:
        check_set_name(name)
    sets = {}
    for name, sources in value.items():
        try:
            sets[name] = _read_sources(sources)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if not sets[name]:
            raise ValueError(f"{name}: expected a path or a list of sources, got an empty string")
    return sets


Sources = Annotated[str | tuple[Source, ...], BeforeValidator(_read_sources)]
Sets = Annotated[str | tuple[Source, ...] | dict[str, str | tuple[Source, ...]], BeforeValidator(_read_sets)]


class DataConfig(Section):
    """Prompts, and what the rewards need to know of them."""

    train: Sources = ""
    """A file (.jsonl, .json, .csv, .parquet; also .gz and .zst), a folder of such files or one that `datasets` wrote,
    or the name of a data set for `datasets.load_dataset`. Or a list of them: each a path, or a table with a path and
    settings of its own, as in { path = "a.jsonl", weight = 2.0 }; see docs/data.md."""
    eval: Sets = ""
    """The same for evaluation, or several of it under names, as in { gsm8k = "test.jsonl", aime = "aime.jsonl" }, whose
    metrics are then eval/gsm8k/... and eval/aime/...; empty: no evaluation."""
    train_split: str = "train"
    """Split, when `train` is a data set's name or a folder that has splits."""
    eval_split: str = "test"
    """The same for `eval`."""
    columns: Columns = Field({})
    """Renames columns: { new = "old" }. Done first; all other settings and the rewards use the new names."""
    filter: Filter | None = None
    """Which training rows to use: a function of a row, "file.py:keep", or a condition per column, all of which must
    hold, as in { level = ["hard", "medium"], source = "amc", pass_rate = { min = 0.1, max = 0.9 } }."""
    select: Slice | None = None
    """Which of the filtered training rows to use: a slice as in Python, "100:200", "::10"."""
    train_rows: PositiveInt | None = None
    """Use the first so many of the selected rows only. Unset: all."""
    eval_rows: PositiveInt | None = None
    """Use the first so many evaluation rows only. Unset: all."""
    streaming: bool = False
    """Read `train` while the run goes on and never as a whole. Needs `run.max_steps`."""
    shuffle_buffer: PositiveInt = 1000
    """When streaming, the next prompt is drawn from so many rows."""
    order: Literal["shuffled", "sequential", "curriculum"] = "shuffled"
    """"shuffled": a new order for each epoch, drawn from `run.seed`; "sequential": the file's order; "curriculum": the
    order of `data.curriculum`."""
    curriculum: str | None = None
    """A column of numbers, smallest first, or largest first with a "-" before its name. Or "measured": the first epoch
    shuffled, each later one from the highest mean reward that was measured to the lowest."""
    prompt_column: str = "prompt"
    """The column that holds the prompt: a string, or a list of chat messages."""
    prompt_template: str | None = None
    """Makes the prompt from columns, as in "Question: {question}"; then `prompt_column` is not read."""
    system_prompt: str | None = None
    """A system message before the prompt. Needs chat format."""
    format: Format = "auto"
    """"chat" puts the prompt through the tokenizer's chat template (a string becomes the user's message), "text" takes
    a string as it is, "auto" is chat for lists of messages and text for strings."""
    chat_template: str | None = None
    """A chat template in place of the tokenizer's: Jinja text, or the name of a file with it, which is read at once
    (what ends with .jinja, or has no brace in it). It is saved with the checkpoints' tokenizer."""
    chat_template_kwargs: Table = Field({})
    """Variables of the chat template, as in { enable_thinking = false }. A row's column `chat_template_kwargs` is laid
    over it."""
    max_prompt_length: PositiveInt | None = None
    """The most tokens of a prompt. Unset: what the model's context leaves beside `rollout.max_completion_length`."""
    overlong_prompts: Literal["error", "drop", "truncate_left"] = "error"
    """What becomes of longer ones: "error" refuses the data, "drop" leaves those rows out, "truncate_left" keeps a
    prompt's last tokens. The start of a run says how many they are."""

    @field_validator("chat_template")
    @classmethod
    def _read_template(cls, value: str | None) -> str | None:
        """The template's text, so that the settings of a run hold it whatever becomes of the file."""
        if value is None or ("{" in value and not value.endswith(".jinja")):
            return value
        try:
            return Path(value).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {value}: {getattr(error, 'strerror', None) or error}") from None

    @model_validator(mode="after")
    def _check_together(self) -> DataConfig:
        if (self.order == "curriculum") != (self.curriculum is not None):
            raise ValueError(
                "order 'curriculum' and the setting curriculum go together: set data.order = 'curriculum' and "
                "data.curriculum to a column or to 'measured'"
            )
        if self.streaming and self.order == "curriculum":
            raise ValueError("a stream cannot be ordered by a curriculum, as it is never read whole: unset streaming")
        return self
