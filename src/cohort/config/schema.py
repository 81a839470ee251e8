"""The settings: what each one means, what other rooms ask about it, and what is said of a wrong one.

Each setting has a docstring with its meaning, its unit and the value that turns it off; ``cohort config`` prints them
all as a TOML file.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    field_validator,
    model_validator,
)

from cohort.errors import ConfigError, did_you_mean
from cohort.presets import Objective, choices, preset, setting_names
from cohort.presets.base import Part

MAX_TEXT = 2**24
"""Maximum size in bytes of a file of settings, a chat template or a JSON schema."""
PositiveInt = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Strings = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)]
PositiveInts = Annotated[tuple[PositiveInt, ...], Strict(False)]
Numbers = Annotated[tuple[float, ...], Strict(False)]
OneAsList = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
"""One text stands for a list of it."""
AsText = BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)
"""A path object stands for its text."""
PathName = Annotated[str, AsText]


@dataclass(frozen=True, slots=True)
class Mark:
    """What other rooms ask about a setting, beside its type. It stands in the setting's annotation, or in its section
    for all settings without one of their own. The default of each question is the safe answer."""

    resume: Literal["fixed", "free", "drifts", "facts", "never"] = "fixed"
    """Whether a resumed run may have another value. "free": yes. "drifts": yes, though later weights differ, if only by
    rounding. "facts": the value is a name or a time, and the facts of the run say whether what it stands for is the
    same. "never": the state in a checkpoint does not fit another one."""
    file: bool = False
    """Whether its texts may name a file or a folder."""
    runs: Literal["", "code", "command", "permit"] = ""
    """What it lets run: the function that a text with a colon names; a program, its arguments or addresses; or, if
    true, what a protection would refuse."""
    table: type[Section] | None = None
    """The section whose marks hold in a table of this setting that has a ``path``."""
    in_tables: bool = True
    """Whether texts in other tables count as well."""
    experiment: bool = True
    """Whether runs that differ here are different experiments, and not of one group."""
    measures: Literal["training", "prompts", "sampling", ""] = "training"
    """What a difference here makes incomparable: rewards in training; these and evaluations, because of other prompts
    or other sampling; or neither. Asked of data, rollout and environment only."""
    flag: str = ""
    """The option of ``cohort eval`` and ``cohort generate`` that sets it."""


FREE, DRIFTS, FILE, CODE = Mark("free"), Mark("drifts"), Mark(file=True), Mark(runs="code")
PLACE = Mark("free", experiment=False)
"""Of settings that say where, how long and how fast a run goes, and what it prints."""


class Section(BaseModel):
    """A frozen table of settings. Types are strict: a string is never read as a number."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
    marked: ClassVar[Mark] = Mark()
    """The mark of settings without one of their own."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(f"settings do not change: make new ones with {name}={value!r}, as in GRPOConfig({name}=...)")


def subsection(annotation: Any) -> type[Section] | None:
    """The type of a section or of a table within one; None for a setting."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


@cache
def marks_of(schema: type[Section]) -> Mapping[str, Mark]:
    """The mark of every setting by its dotted path."""
    found: dict[str, Mark] = {}
    for name, field in schema.model_fields.items():
        if section := subsection(field.annotation):
            found |= {f"{name}.{path}": mark for path, mark in marks_of(section).items()}
        else:
            found[name] = next((one for one in field.metadata if isinstance(one, Mark)), schema.marked)
    return found


def value_at(settings: Any, path: str) -> Any:
    """The section or setting at a dotted path."""
    return functools.reduce(getattr, path.split("."), settings)


def setting_paths(schema: type[Section]) -> dict[str, str]:
    """The settings' names with their dotted paths: ``{"learning_rate": "optim.learning_rate", ...}``. A table within a
    section is a setting of it."""
    paths = [path.split(".")[:2] for path in marks_of(schema)]
    return {keys[-1]: ".".join(keys) for keys in paths}


def read_text(path: str | Path) -> str:
    """A UTF-8 file's text, of at most ``MAX_TEXT`` bytes.

    Raises:
        ValueError: the file cannot be read, or is larger.
    """
    try:
        with Path(path).expanduser().open("rb") as file:  # which may be a pipe, or a device without an end
            content = file.read(MAX_TEXT + 1)
        if len(content) > MAX_TEXT:
            raise ValueError(f"more than {MAX_TEXT:,} bytes")
        return content.decode("utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


@cache
def foreign_names() -> dict[str, str]:
    """Names that other trainers give to settings, with what to set here."""
    return tomllib.loads((Path(__file__).parent / "foreign_names.toml").read_text(encoding="utf-8"))


@contextmanager
def explain_errors(schema: type[Section], source: str = "") -> Iterator[None]:
    """Raise pydantic's errors as one ``ConfigError``.

    Args:
        schema: its settings are suggested in place of unknown ones.
        source: put before each line.
    """
    prefix = f"{source}: " if source else ""
    try:
        yield
    except (ValidationError, ConfigError) as error:
        lines = explanations(error, schema) if isinstance(error, ValidationError) else str(error).splitlines()
        raise ConfigError("\n".join(prefix + line for line in lines)) from None
    except UnicodeEncodeError as error:  # a lone surrogate, as of an undecodable byte on the command line
        raise ConfigError(f"{prefix}not UTF-8 text: {error.object!r:.80}") from None


def explanations(error: ValidationError, schema: type[Section], path: str = "") -> list[str]:
    """One line per mistake. ``path`` is the path of the setting that was validated; empty for the whole schema."""
    return [_explanation(item, schema, path) for item in error.errors()]


def _explanation(item: Any, schema: type[Section], path: str) -> str:
    path = ".".join(str(part) for part in (*([path] if path else []), *item["loc"]))
    match item["type"]:
        case "extra_forbidden":
            return f"unknown setting {path}{suggestion(path, schema)}"
        case "value_error":
            return f"{path}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
        case "model_type" | "dict_type":
            setting = setting_paths(schema).get(path)
            hint = f"; did you mean {setting}?" if setting else ""
            return f"{path} is a section: expected a table of settings, got {item['input']!r}{hint}"
        case _:
            message = item["msg"].replace("a valid tuple", "a list")
            return f"{path}: {message[0].lower()}{message[1:]}, got {item['input']!r}"


def suggestion(name: str, schema: type[Section], prefix: str = "", *, python: bool = False) -> str:
    """What follows "unknown setting NAME" in an error. ``python``: NAME is an argument of ``GRPOConfig``, so a
    setting of a table within a section is also shown as one: ``lora={'rank': ...}``."""
    hint = _suggestion(name, schema, prefix)
    nested = (path for path in re.findall(r"\w+(?:\.\w+){2}", hint) if path in marks_of(schema))
    if python and (found := next(nested, None)):
        _, table, key = found.split(".")
        hint += f" (in Python: {table}={{{key!r}: ...}})"
    return hint


def _suggestion(name: str, schema: type[Section], prefix: str) -> str:
    nested = {path.split(".")[2]: path for path in marks_of(schema) if path.count(".") == 2}
    key, paths = name.rpartition(".")[2], nested | setting_paths(schema)
    if found := foreign_names().get(name) or foreign_names().get(key):
        return f": {found}"
    if key in paths:  # the right name in the wrong section, or in none
        return f"; did you mean {prefix}{paths[key]}?"
    if hint := did_you_mean(name, paths.values(), form=f"{prefix}{{}}", cutoff=0.75):
        return hint
    if close := difflib.get_close_matches(key, paths, n=1):
        return f"; did you mean {prefix}{paths[close[0]]}?"
    return "; 'cohort config' lists all settings"


# ----------------------------------------
# The model.


MAX_GENERATIONS = 65_536
"""Maximum number of completions of a prompt. A run with more would fill the memory before its first step."""
Workers = Annotated[int, Field(ge=0, le=1024)]
Retries = Annotated[int, Field(ge=0, le=1000)]
SAMPLING, UNSEEN = Mark(measures="sampling"), Mark(measures="")
COMMAND = Mark("free", runs="command", experiment=False)


class LoraConfig(Section):
    """Low-rank adapters instead of all weights; needs the extra "lora"."""

    rank: Count = 0
    """Rank of the adapters. 0: no adapters; all weights are trained."""
    alpha: PositiveFloat | None = None
    """The adapter's output is multiplied by alpha / rank ("rslora": alpha / sqrt(rank)). Unset: twice the rank."""
    variant: Literal["lora", "rslora", "dora"] = "lora"
    """"rslora" scales for high ranks (arXiv 2312.03732); "dora" also trains each matrix's column norms (arXiv
    2402.09353)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout before the adapters. Needs `model.dropout`."""
    target_modules: Strings = ("all-linear",)
    """Modules that get an adapter, by the ends of their names. "all-linear": all linear layers except the head."""
    modules_to_save: Strings = ()
    """Modules that are trained in full and saved with the adapter, as in ["lm_head"]."""
    adapter: Annotated[PathName, FILE] = ""
    """The folder of an existing adapter to continue training. Its own settings replace `rank` and those below it. The
    reference is the adapter as it is loaded."""
    save_merged: Annotated[bool, FREE] = False
    """At the end, also write the model with the adapter merged into it, to merged/ in the run folder."""

    @property
    def wanted(self) -> bool:
        """Whether adapters are used."""
        return bool(self.rank or self.adapter)


class ModelConfig(Section):
    """The policy."""

    path: Annotated[PathName, Mark("facts", file=True)] = ""
    """A Hugging Face causal language model: a folder, a hub id, a GGUF file (extra "gguf"), or a model of the package,
    "cohort:demo" or "cohort:demo-tool". In Python, pass the `model` argument instead."""
    revision: str = ""
    """Branch, tag or commit of a hub id. Empty: the newest of the main branch."""
    precision: Annotated[Literal["auto", "float32", "bfloat16", "float64"], Mark(flag="precision")] = "auto"
    """Compute precision. The trained weights are float32 (float64 for "float64"); "bfloat16" computes in bfloat16 over
    them. "auto" is bfloat16 where the hardware is faster with it (CUDA, CPUs with AMX, AMD's with AVX512-BF16 from a
    hidden size of 256), and float32 elsewhere."""
    float32_head: bool = False
    """Compute the head in float32 when `precision` is "bfloat16", as ScaleRL does (arXiv 2510.13786): logits are not
    rounded to bfloat16. Slower. vLLM and servers compute theirs in their own dtype."""
    device: Annotated[str, Mark("free", flag="device")] = "auto"
    """"auto", "cpu", "cuda", "cuda:1". "auto" is CUDA if available, else the CPU."""
    dropout: bool = False
    """Keep the model's own dropout in updates. Off by default: dropout makes the updated policy differ from the policy
    that sampled."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters; see below."""
    quantization: Literal["none", "8bit", "4bit"] = "none"
    """Quantize the frozen weights under adapters ("4bit": NF4), as in QLoRA (arXiv 2305.14314). Needs `model.lora` and
    the extra "quantized"."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models (arXiv 2101.03961), over the completions' tokens.
    Costs a pass without gradient. 0: off."""
    gradient_checkpointing: Annotated[bool, FREE] = False
    """Recompute activations in the backward pass: less memory, more time, the same gradient."""
    native_kernels: Annotated[bool, DRIFTS] = True
    """On a CPU, compute everything between the matrix products in C, compiled at first use by the machine's compiler;
    without a compiler, torch computes it. Affects speed and memory only: random draws are the same, samples and
    gradients are equal up to rounding."""
    torch_compile: Annotated[bool, DRIFTS] = True
    """On CUDA, let torch compile norms, rotations and gates of an update's layers, where their results agree and
    compiling works: fewer kernels. Gradients are equal up to rounding."""
    trust_remote_code: Annotated[bool, Mark("free", runs="permit", flag="trust_remote_code")] = False
    """Run model code from the model's folder."""
    allow_pickled_weights: Annotated[bool, Mark("free", runs="permit", flag="allow_pickled_weights")] = False
    """Load pickled weights (pytorch_model.bin, adapter_model.bin) where there are no safetensors. Pickles can contain
    programs; torch's restricted unpickler reads them."""


# ----------------------------------------
# ``[data]``: where rows come from, which ones are used, how they become prompts, and in which order.


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
FILTER, PROMPTS = Mark(runs="code", in_tables=False), Mark(measures="prompts")


class Source(Section):
    """One of several sources of rows: an item of `data.train` or `data.eval`, or of `train_dataset` in Python, where
    `path` may be the rows themselves. Unset settings are those of `[data]`."""

    path: Annotated[Any, AsText, FILE]
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
    filter: Annotated[Filter | None, FILTER] = None
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

    train: Annotated[Sources, Mark("facts", file=True, table=Source)] = ""
    """A file (.jsonl, .json, .csv, .parquet; also .gz and .zst), a folder of such files or one that `datasets` wrote,
    the name of a data set for `datasets.load_dataset`, "reasoning_gym:NAME?size=1000" (extra "reasoning-gym"), or
    "cohort:addition", the package's own. Or a list of paths and of tables with a path and other settings, as in
    { path = "a.jsonl", weight = 2.0 }; see 'cohort docs data'."""
    eval: Annotated[Sets, Mark("free", file=True, table=Source, measures="", flag="data")] = ""
    """The evaluation data, in the same forms, or a table of named sets, as in { gsm8k = "test.jsonl", aime =
    "aime.jsonl" }, whose metrics are eval/gsm8k/... and eval/aime/.... Empty: no evaluation."""
    train_split: str = "train"
    """Split, if `train` is the name of a data set or a folder with splits."""
    eval_split: Annotated[str, Mark("free", measures="prompts")] = "test"
    """Split of `eval`, likewise."""
    columns: Annotated[Columns, PROMPTS] = Field({})
    """Renames columns: { new = "old" }. Applied first; all other settings and the rewards use the new names."""
    filter: Annotated[Filter | None, FILTER] = None
    """Which training rows to use: a function of a row, "file.py:keep", or conditions on columns, all of which must
    hold, as in { level = ["hard", "medium"], source = "amc", pass_rate = { min = 0.1, max = 0.9 } }."""
    select: Slice | None = None
    """Which of the filtered training rows to use: a slice in Python's notation, "100:200", "::10"."""
    train_rows: PositiveInt | None = None
    """Use only this many of the selected rows, from the first. Unset: all."""
    eval_rows: Annotated[PositiveInt | None, Mark("free", measures="prompts", flag="rows")] = None
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
    prompt_column: Annotated[str, PROMPTS] = "prompt"
    """The column that holds the prompt: a string, or a list of chat messages."""
    prompt_template: Annotated[str | None, PROMPTS] = None
    """Builds the prompt from columns, as in "Question: {question}". Replaces `prompt_column`."""
    system_prompt: Annotated[str | None, Mark(measures="prompts", flag="system")] = None
    """A system message before the prompt. Needs chat format."""
    format: Annotated[Format, PROMPTS] = "auto"
    """"chat" applies the tokenizer's chat template (a string becomes the user's message); "text" uses a string as it
    is; "auto" is chat for lists of messages and text for strings."""
    chat_template: Annotated[str | None, Mark(file=True, measures="prompts")] = None
    """A chat template that replaces the tokenizer's: Jinja text, or the name of a file (ends with .jinja, or contains
    no brace), which is read at once. It is saved with the tokenizer of the checkpoints."""
    chat_template_kwargs: Annotated[Table, PROMPTS] = Field({})
    """Variables of the chat template, as in { enable_thinking = false }. The column `chat_template_kwargs` of a row
    overrides them."""
    escape_control_tokens: Annotated[bool, PROMPTS] = False
    """Read control tokens of the chat template that messages of rows spell, such as "<|im_end|>", as plain text, as
    answers of tools always are. The run tells at its start how many rows spell some: each ends its own turn."""
    template_time: Annotated[Time | None, Mark("facts", measures="")] = None
    """The time that chat templates print, as in "2026-11-27T09:30:00". Unset: of a template that prints it, the time of
    the run's start, which the run folder keeps: every prompt of the run, of its evaluations and of `cohort generate
    RUN` has this time."""
    max_prompt_length: Annotated[PositiveInt | None, PROMPTS] = None
    """Maximum number of tokens of a prompt. Unset: what the model's context leaves beside
    `rollout.max_completion_length`."""
    overlong_prompts: Annotated[Literal["error", "drop", "truncate_left"], PROMPTS] = "error"
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


# ----------------------------------------
# Sampling, episodes and rewards.


class RolloutConfig(Section):
    """Sampling."""

    engine: Annotated[Literal["auto", "local", "vllm", "server"], Mark(measures="", flag="engine")] = "auto"
    """"local" samples with the trainer's own weights and modules; "vllm" with vLLM in the trainer's process (`[vllm]`,
    extra "vllm"); "server" on the servers of `[server]`. "auto": vllm on CUDA, where it is installed and can do what
    the run asks, and local elsewhere; the start says which and why."""
    sleep: Annotated[bool | None, Mark("free", measures="")] = None
    """Free the memory of vLLM in the process, or of servers on the trainer's own GPU, during the updates. Unset: that
    of vLLM in the process, on a GPU without `rollout.lag`. A vLLM server needs --enable-sleep-mode."""
    probe_threshold: PositiveFloat | None = None
    """With vllm or servers: mean difference, in nats, between their log-probs of a fixed text and the trainer's, above
    which a run stops. Compared at the start and after every update. Unset: 0.001 in float32, 0.03 in float16, 0.1 in
    bfloat16."""
    prompts_per_step: Annotated[PositiveInt, UNSEEN] = 8
    """Prompts in a rollout (P)."""
    num_generations: Annotated[int, Field(ge=1, le=MAX_GENERATIONS), UNSEEN] = 8
    """Completions per prompt (G). At least 2 if the objective compares the completions of a group."""
    max_completion_length: Annotated[PositiveInt, SAMPLING] = 256
    """Maximum number of tokens of a completion (finish reason "length")."""
    temperature: Annotated[PositiveFloat, SAMPLING] = 1.0
    """Divides the logits, in sampling and in every log-probability of the trainer."""
    top_k: Annotated[Count, SAMPLING] = 0
    """Sample from the k most likely tokens only. 0: all."""
    top_p: Annotated[PositiveShare, SAMPLING] = 1.0
    """Sample from the smallest set of most likely tokens whose probabilities add up to p. 1: all."""
    min_p: Annotated[Share, SAMPLING] = 0.0
    """Sample from tokens at least this fraction as likely as the most likely one. 0: all."""
    repetition_penalty: Annotated[PositiveFloat, Mark(measures="sampling", flag="repetition_penalty")] = 1.0
    """The logits of tokens that occur in the prompt or the completion are divided by this if positive and multiplied by
    it if negative. 1: off."""
    min_completion_length: Annotated[Count, Mark(measures="sampling", flag="min_tokens")] = 0
    """Before this many tokens, no end token is sampled and stop strings are ignored. 0: off."""
    regex: Annotated[str | None, Mark(measures="sampling", flag="regex")] = None
    """Sample only completions that match this regular expression as a whole. Unset: anything."""
    json_schema: Annotated[str | None, Mark(file=True, measures="sampling", flag="json_schema")] = None
    """Sample only JSON that this schema accepts, with the spaces of `json.dumps`: JSON text, or the name of a .json
    file, which is read at once. Unset: anything."""
    replay_sampling: Annotated[bool, UNSEEN] = True
    """Compute the update's log-probabilities over the tokens that sampling could choose from, instead of over the whole
    vocabulary. Off: ratios treat the truncated distribution as the policy's. Makes a difference only with the settings
    from `top_k` on."""
    replay_routing: Annotated[bool, UNSEEN] = False
    """In a mixture of experts, let the update send each token to the experts that the sampler sent it to ('cohort docs
    scale'). Needs an engine that records them."""
    stop: Annotated[Strings, Mark(measures="sampling", flag="stop")] = ()
    """Strings that end a completion. Their tokens remain part of it."""
    max_batch_size: Annotated[PositiveInt, Mark("free", measures="", flag="batch_size")] = 256
    """Maximum number of completions decoded at the same time, on each server if there are servers. Affects memory only:
    random draws are the same, samples are equal up to rounding."""
    lag: Annotated[Count, UNSEEN] = 0
    """How many steps sampling and scoring run ahead of training, in the background (see 'cohort docs scale'): step t
    samples with the weights after step t - 1 - lag, exactly. 0: each step samples with the present weights and then
    trains. 1 hides sampling behind training; 2 also hides rewards that take longer than a step."""
    cache_tokens: Annotated[PositiveInt | None, Mark("free", measures="", flag="cache_tokens")] = None
    """Maximum number of tokens in the local engine's key-value cache, including prompts; completions that do not fit
    wait. Affects memory only, as above. Unset: as many as fit half of the free memory."""

    @field_validator("json_schema")
    @classmethod
    def _read_schema(cls, value: str | None) -> str | None:
        """Return the schema's text, so that the run's settings do not depend on the file."""
        if value is None:
            return None
        text = read_text(value) if value.endswith(".json") else value
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"expected a JSON schema, as JSON text or as the name of a .json file, got {value!r:.60} ({error})"
            ) from None
        return text.strip()


class VLLMConfig(Section):
    """vLLM in the trainer's process, used with `rollout.engine = "vllm"`. Each rank has one on its device."""

    marked = PLACE
    tensor_parallel_size: PositiveInt = 1
    """Ranks that hold one copy of vLLM's weights together."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the GPU's memory for vLLM's weights and its cache of keys and values. Unset: 0.9 of what is free when
    everything else of the trainer is there, 0.45 without `rollout.sleep`."""
    max_model_len: PositiveInt | None = None
    """Maximum number of tokens of a prompt with its completion. Unset: what the run's data and settings need, and 4096
    if the model has so many."""
    arguments: Annotated[dict[str, Any], COMMAND] = {}
    """Further arguments of `vllm.LLM`, as in { enforce_eager = true }."""

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        own = ("model", "tokenizer", "dtype", "load_format", "logprobs_mode", "seed", *cls.model_fields)
        if taken := sorted(set(value).intersection(own)):
            raise ValueError(f"{', '.join(taken)} of vllm.LLM is set by the trainer: leave it out")
        return value


class ServerConfig(Section):
    """Servers that sample, used with `rollout.engine = "server"`. They receive the weights after every update."""

    marked = PLACE
    kind: Literal["vllm", "sglang"] = "vllm"
    """What the servers run."""
    url: Annotated[Strings, OneAsList, COMMAND] = ()
    """Address of a server, or a list of addresses, as in "http://127.0.0.1:8000": loopback or a private network."""
    request_timeout: PositiveFloat = 600.0
    """Time limit of a completion in seconds. A server that exceeds it is left out; the completion is repeated on
    another."""
    startup_timeout: PositiveFloat = 600.0
    """How long to wait for servers to answer when a run starts, or when all have failed, in seconds."""
    transport: Literal["folder", "group"] = "folder"
    """How weights get to servers. "folder": as safetensors in shared memory, or in `server.folder`. "group": by
    broadcasts in a torch process group for each server, through NCCL between GPUs and gloo elsewhere."""
    folder: Annotated[PathName, COMMAND] = ""
    """With `server.transport` "folder": a folder that the trainer and all servers see under this name. Unset: shared
    memory, which needs the servers on this machine."""
    update_timeout: PositiveFloat = 600.0
    """Time limit of an update of a server's weights in seconds."""


class EnvironmentConfig(Section):
    """Tools and environments: completions of several turns."""

    tools: Annotated[Strings, Mark("facts", runs="code", flag="tools")] = ()
    """Tools: built-in names ("python", "calculator"), "module:function", "file.py:function", or "mcp:" with a command
    or a URL. A function needs type hints and a docstring, from which its JSON schema is made. Rows whose column `tools`
    lists names can use those only."""
    factory: Annotated[str | dict[str, str], Mark("facts", runs="code", flag="environment")] = ""
    """An environment for each completion: "module:Class" or "file.py:Class". A table names several, and the column
    `environment` of a row chooses one."""
    starts: Literal["same", "any", "own"] = "same"
    """How the episodes of a prompt's completions begin. "same": with one seed, and alike, or the run ends. "any": with
    one seed; what environments draw elsewhere, as on a server, may differ. "own": each with its own seed, as in TRL; in
    an evaluation, with one. Where they differ, the mean of a group's rewards is over different tasks."""
    max_turns: Annotated[PositiveInt, Mark(flag="max_turns")] = 16
    """Maximum number of turns of an episode (finish reason "turns")."""
    max_turn_length: PositiveInt | None = None
    """Maximum number of tokens drawn in a turn (finish reason "length"). Unset: as many as
    `rollout.max_completion_length` leaves, which counts the tokens of all turns and answers."""
    max_observation_tokens: PositiveInt | None = None
    """Maximum number of tokens of an answer; of a longer one, the middle is replaced by a note that says how much is
    missing. Unset: no limit. An answer that leaves no room within `rollout.max_completion_length` ends the episode
    (finish reason "length")."""
    call_timeout: Annotated[PositiveFloat | None, FREE] = None
    """Time limit of a call of a tool or environment in seconds. Plain functions then run in worker processes, which can
    be killed. Unset: no limit."""
    episode_timeout: PositiveFloat | None = None
    """Time limit of an episode in seconds, sampling included (finish reason "timeout"). Unset: no limit."""
    call_retries: Annotated[Retries, FREE] = 0
    """How often a tool call is repeated when its worker dies or it exceeds `call_timeout`. Environments are not
    repeated."""
    tool_workers: Annotated[Workers, FREE] = 0
    """Worker processes for plain tools, and as many for plain environments, each of which lives in one of them. 0: they
    run in this process, unless `call_timeout` is set: then one for two cores."""
    max_environments: Annotated[PositiveInt, FREE] = 256
    """Maximum number of environments of a factory that exist, and of async calls, at the same time; episodes beyond
    wait."""
    history: Annotated[str, CODE] = "append"
    """What the policy reads after a turn. "append": all tokens so far, then the answer. "template": the conversation as
    the chat template renders it, which may leave out earlier thoughts. "module:function" or "file.py:function": the
    messages that a function returns for those so far. Whatever is rewritten begins a new segment."""
    parser: Annotated[str | None, CODE] = None
    """A function that finds the calls in a turn's text: "module:function" or "file.py:function". Unset: the format is
    found in the chat template."""

    @field_validator("history")
    @classmethod
    def _known_history(cls, value: str) -> str:
        if value not in ("append", "template") and ":" not in value:
            raise ValueError(f"expected 'append', 'template', 'module:function' or 'file.py:function', got {value!r}")
        return value

    @property
    def wanted(self) -> bool:
        """Whether the settings name tools or an environment."""
        return bool(self.tools or self.factory)


class RewardConfig(Section):
    """Reward functions."""

    marked = FREE
    functions: Annotated[Strings, Mark("facts", file=True, runs="code", flag="reward")] = ()
    """Reward functions: built-in names (`cohort rewards` lists them), "module:function", or "file.py:function".
    Arguments follow in parentheses: "soft_overlong(max_length=1024, buffer=256)"."""
    weights: Annotated[Numbers | None, Mark()] = None
    """One weight per function. Unset: 1 each."""
    workers: Annotated[Workers, PLACE] = 0
    """Worker processes that call plain functions while sampling continues. 0: functions are called in this process
    after sampling, unless `timeout` is set, which needs a process that can be stopped."""
    timeout: PositiveFloat | None = None
    """Time limit of a call in seconds; a call scores one completion, a group or the rollout, depending on the function.
    The worker of a call that exceeds it is killed. Unset: no limit."""
    retries: Annotated[Retries, PLACE] = 0
    """How often a failed call is repeated, after the other calls have ended."""
    on_error: Literal["unscored", "stop"] = "unscored"
    """What to do when a function raises, exceeds the timeout or returns a number that is not finite. "unscored"
    excludes the completion from the update and from its group's statistics, and writes the traceback to the log and to
    rollouts/; "stop" ends the run. A function that fails on all completions of a rollout always ends the run."""
    cache: Annotated[bool, PLACE] = False
    """Reuse the score of a row and completion that were scored before. For deterministic functions that score one
    completion at a time."""
    max_concurrent: Annotated[PositiveInt, PLACE] = 256
    """Maximum number of concurrent async calls."""


# ----------------------------------------
# The objective: a preset, changes to its parts, and the schedule of updates. The optimizer.


def _as_table(value: object) -> object:
    """A part given as an object, as the table that a file would contain."""
    if isinstance(value, Part):
        value = {"rule": value.rule, **value.numbers()}
    if isinstance(value, Mapping):  # an absent number is a word: a file has no None
        return {key: "none" if item is None else item for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_table(item) for item in value]
    return value


Setting = Annotated[object, BeforeValidator(_as_table)]
"""A word, a number, or a table of a part's numbers, as the user wrote it; ``Objective.replace`` gives it its type."""


class ObjectiveConfig(Section):
    """The objective: a preset, and changes to it. `cohort objective` explains both. An unset setting is the preset's;
    the word "none" is the absence of a part."""

    marked = CODE
    preset: Annotated[str, BeforeValidator(lambda name: preset(name).identity if isinstance(name, str) else name)] = (
        "default@1"
    )
    """A row of `cohort objective`: its newest version, or name@version."""
    beta: float | None = None
    """Weight of the KL term (kl.beta). 0: no KL, and no reference model in memory. The paper's is 0.04."""
    epsilon: float | None = None
    """The PPO clip's lower bound is the ratio 1 - epsilon (trust_region.low), ..."""
    epsilon_high: float | None = None
    """... and its upper bound 1 + epsilon_high (trust_region.high). Unset: epsilon."""
    baseline: Setting = None
    """Subtracted from a reward; also a number, or a user's function "file.py:function"."""
    scale: Setting = None
    """The divisor of the rest; or a table, { rule = "group_std", ddof = 1, epsilon = 1e-6 }."""
    reward_aggregation: Setting = None
    """How several rewards become one."""
    soft_overlong: Setting = None
    """Penalty near the length limit: none, or { rule = "soft_overlong", cache_share = 0.2 }."""
    unlikeliness: Setting = None
    """A lower reward for a group's likelier completions: none, or { rule = "unlikeliness", strength = 0.25 }."""
    sign_weights: Setting = None
    """Factors of positive and negative advantages: none, or { rule = "sign_weights", positive = 1, negative = 1 }."""
    group_filter: Setting = None
    """The groups and completions that are used; or a table, { rule = "top_k", k = 8, metric = "shortest" }."""
    credit: Setting = None
    """Which tokens a reward belongs to. For "process" and "given" a reward function returns a list with a number per
    token."""
    discount: Setting = None
    """Of later rewards, per token, with credit "return_to_go"."""
    truncated: Setting = None
    """Completions cut by the length limit, after the advantages of their whole group."""
    truncated_penalty: Setting = None
    """Subtracted from their advantage by "penalize"."""
    ratio_anchor: Setting = None
    """The policy that the current policy is divided by."""
    ratio_level: Setting = None
    """The level of the ratio."""
    trust_region: Setting = None
    """The limit of an update; or a table, { rule = "ppo_clip", low = 0.8, high = 1.28 }; or a user's function of ratio
    and advantage, "module:function"."""
    mismatch: Setting = None
    """Corrections for a disagreement between sampler and trainer: none, or a list of tables,
    [{ rule = "weight", level = "token", mode = "truncate", high = 2.0 }]."""
    top_entropy: Setting = None
    """Share of the tokens, those of highest entropy, that the policy term uses. 1: all."""
    kl: Setting = None
    """The KL term: { direction = "reverse", scope = "token", place = "loss", correction = "token_ratio" }; or
    "k3_legacy", k3 as a loss as in DeepSeekMath."""
    entropy: Setting = None
    """Entropy bonus: none, or { rule = "entropy", coefficient = 0.001 }."""
    aggregation: Setting = None
    """The mean over tokens and completions."""
    aggregation_length: Setting = None
    """L of aggregation "constant". Unset: rollout.max_completion_length."""
    denominator: Setting = None
    """Whether tokens that top_entropy leaves out count in the mean: base (they do) or after_masks."""
    count_empty: Setting = None
    """Whether completions without a loss token count in the mean."""
    num_iterations: PositiveInt = 1
    """Passes over a rollout (the papers' mu)."""
    minibatches: PositiveInt | None = None
    """Optimizer steps per pass; each uses its share of the rollout's prompts. Unset: the preset's, which
    'cohort objective NAME' shows."""
    sync_ref_model: bool = False
    """Let the reference follow the policy (TR-DPO). Needs beta > 0."""
    ref_model_sync_steps: PositiveInt = 512
    """Optimizer updates between two moves of the reference."""
    ref_model_mixup_alpha: Annotated[float, Field(gt=0, le=1)] = 0.6
    """reference <- alpha * policy + (1 - alpha) * reference."""

    @property
    def updates_per_rollout(self) -> int:
        """How many optimizer steps use one rollout."""
        return self.num_iterations * self.resolved_minibatches

    @property
    def resolved_minibatches(self) -> int:
        """``minibatches``, or the preset's where it is unset."""
        return self.minibatches or preset(self.preset).minibatches

    def changes(self) -> Mapping[str, object]:
        """The changes to the preset."""
        given = {name: getattr(self, name) for name in setting_names()}
        return {name: value for name, value in given.items() if value is not None}

    def resolve(self) -> Objective:
        """The preset with its changes.

        Raises:
            ConfigError: a part is unknown, or cannot be combined with the others.
        """
        changed = preset(self.preset).replace(**self.changes())
        return changed.model_copy(update={"minibatches": self.resolved_minibatches})


for _name, _field in ObjectiveConfig.model_fields.items():
    if len(_words := choices(_name)) > 1:
        _text = f"{_field.description} Values: {', '.join(_words)}."
        _field.description = "\n".join(textwrap.wrap(_text, 116))


LRSchedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
"""transformers' schedules."""
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""The arguments that schedules take beside warm-up and length."""
NEEDED = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Of these, arguments of which one has to be set."""
WITHOUT_AN_END = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that do not depend on the number of updates of the whole run."""


class OptimConfig(Section):
    """The optimizer."""

    optimizer: Annotated[Literal["adamw", "adamw_8bit", "adafactor", "muon"], Mark("never")] = "adamw"
    """"adamw_8bit" keeps AdamW's state in 8 bits (bitsandbytes, in the extra "quantized"); "adafactor" keeps one row
    and one column per matrix, and uses none of `adam_*`; "muon" orthogonalises the updates of the layers' matrices,
    scaled to AdamW's size, and uses AdamW for embeddings, head and vectors."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the squared gradient's running mean."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of the squared gradient's mean."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it. 0: none are."""
    lr_scheduler_type: LRSchedule = "constant"
    """Schedule after the warm-up, by transformers' names. "constant" with `warmup_steps` is "constant_with_warmup"."""
    lr_scheduler_kwargs: Table = Field({})
    """Further arguments of the schedule, by transformers' names, as in { min_lr_rate = 0.1 } of
    "cosine_with_min_lr"."""
    warmup_steps: int | float = 0
    """Updates over which the learning rate rises: update k has k/warmup_steps of the peak. Below 1: this share of the
    run's updates, rounded up."""
    microbatch_tokens: Annotated[PositiveInt | None, DRIFTS] = None
    """Maximum number of tokens in one forward and backward pass. Affects memory only: the gradient is the same. Unset:
    what half of the free memory holds, at most 16,384 on CUDA; on a CPU at most 1,024, or up to 4,096 whose
    activations take at most 256 MiB. Halved when memory runs out."""
    max_nonfinite_updates: Annotated[PositiveInt, FREE] = 3
    """An update with non-finite log-probabilities, coefficients or gradient is skipped, and its batch is written to
    nonfinite/ in the run folder. This many in a row stop the run."""

    @field_validator("warmup_steps")
    @classmethod
    def _number_or_share(cls, value: int | float) -> int | float:
        if value < 0 or (value >= 1 and value != int(value)):
            raise ValueError(f"expected a number of updates, or a share of the run's updates below 1, got {value:g}")
        return int(value) if value >= 1 or value == 0 else value

    @model_validator(mode="after")
    def _known_arguments(self) -> OptimConfig:
        """Refuse arguments that the schedule does not take, which transformers would refuse with the model loaded."""
        kind, given = self.lr_scheduler_type, self.lr_scheduler_kwargs
        known = ARGUMENTS.get(kind, ())
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known) or (f"; it takes {', '.join(known)}" if known else "; it takes none")
                raise ValueError(f"lr_scheduler_kwargs: lr_scheduler_type {kind!r} has no argument {name!r}{hint}")
        if kind in NEEDED and not any(name in given for name in NEEDED[kind]):
            raise ValueError(f"lr_scheduler_type {kind!r} needs lr_scheduler_kwargs with {' or '.join(NEEDED[kind])}")
        return self

    def warmup_of(self, updates: int) -> int:
        """Updates of warm-up in a run of so many updates."""
        return math.ceil(updates * self.warmup_steps) if self.warmup_steps < 1 else int(self.warmup_steps)

    @property
    def depends_on_the_end(self) -> bool:
        """Whether a longer run has other learning rates."""
        return self.lr_scheduler_type not in WITHOUT_AN_END or 0 < self.warmup_steps < 1


# ----------------------------------------
# Ranks, evaluation, duration and output.


class ParallelConfig(Section):
    """Several processes (ranks) that train together: `torchrun` or `cohort launch` starts them
    (see 'cohort docs scale')."""

    marked = PLACE
    layout: Annotated[Literal["replicate", "optimizer", "full"], Mark("drifts", experiment=False)] = "replicate"
    """How the ranks hold what is trained. "replicate": each holds everything. "optimizer": gradients and the
    optimizer's state are divided. "full": the weights too, which are gathered layer by layer in each pass."""
    offload: bool = False
    """With the layout "full" on GPUs: keep weights, gradients and the optimizer's state in main memory, where the
    optimizer steps. For models that do not fit otherwise; also with one rank."""
    rank_timeout: PositiveFloat = 3600.0
    """Seconds that a rank waits for the others before the run ends. A rank that dies is noticed at once."""


class EvalConfig(Section):
    """Evaluation on fresh samples of `data.eval`'s prompts, with the same random numbers every time
    (see 'cohort docs evaluation')."""

    marked = FREE
    eval_steps: Annotated[Count, PLACE] = 0
    """Evaluate every this many steps. 0: only before the first step and after the last one."""
    eval_on_start: Annotated[bool, PLACE] = True
    """Also evaluate before the first step, for comparison."""
    num_generations_eval: Annotated[int, Field(ge=1, le=MAX_GENERATIONS), Mark("free", flag="n")] = 1
    """Completions per prompt."""
    temperature_eval: Annotated[Annotated[float, Field(ge=0)] | None, Mark("free", flag="temperature")] = None
    """Divides the logits; 0 is greedy. Unset: as in training, also for the four settings below."""
    top_p_eval: Annotated[PositiveShare | None, Mark("free", flag="top_p")] = None
    """Sample from the smallest set of most likely tokens whose probabilities add up to p. 1: all."""
    top_k_eval: Annotated[Count | None, Mark("free", flag="top_k")] = None
    """Sample from the k most likely tokens only. 0: all."""
    min_p_eval: Annotated[Share | None, Mark("free", flag="min_p")] = None
    """Sample from tokens at least this fraction as likely as the most likely one. 0: all."""
    max_completion_length_eval: Annotated[PositiveInt | None, Mark("free", flag="max_tokens")] = None
    """Maximum number of tokens of a completion."""
    success: Annotated[str | None, Mark("free", flag="success")] = None
    """The reward function that decides whether a completion is correct, for pass@k and maj@k. Unset: the only one; with
    several, there is neither."""
    success_threshold: float = 1.0
    """A completion is correct if that function returns at least this."""
    pass_at_k: Annotated[PositiveInts | None, Mark("free", flag="k")] = None
    """Log the probability that at least one of k completions is correct, for each of these k. []: off. Unset: 1, if a
    function decides what is correct."""
    maj_at_k: Annotated[PositiveInts, Mark("free", flag="maj")] = ()
    """Log the probability that the most frequent answer of k completions is correct, for each of these k. Needs a
    reward function that logs the column "answer" (`log_extra`)."""
    bootstrap_samples: Annotated[int, Field(ge=100, le=1_000_000)] = 2_000
    """Resamples of each confidence interval."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence level of the intervals."""
    metric_for_best_model: str | None = None
    """Keep the model with the best value of this metric, as in "eval/reward/mean", in best/ in the run folder. Unset:
    off."""
    greater_is_better: bool = True
    """Whether a higher value of that metric is better."""
    early_stopping_patience: Count = 0
    """End the run after this many evaluations in a row without a new best. 0: off."""

    @model_validator(mode="after")
    def _check_together(self) -> EvalConfig:
        for name in ("pass_at_k", "maj_at_k"):
            if (k := max(getattr(self, name) or (), default=0)) > self.num_generations_eval:
                raise ValueError(
                    f"{name} needs {k} completions per prompt, and num_generations_eval is "
                    f"{self.num_generations_eval}: raise it, or lower k"
                )
        if self.early_stopping_patience and self.metric_for_best_model is None:
            raise ValueError("early_stopping_patience needs a metric: set eval.metric_for_best_model")
        if 1 / (1 + self.bootstrap_samples) > 1 - self.confidence:
            raise ValueError(
                f"bootstrap_samples ({self.bootstrap_samples}) is too small for confidence {self.confidence}: the "
                "smallest possible p-value is above 1 - confidence, so no difference would be significant. Raise it"
            )
        return self

    def what_is_measured(self) -> dict[str, Any]:
        """The settings that the value of ``metric_for_best_model`` depends on. Values are comparable only under the
        same settings."""
        metric = self.metric_for_best_model or ""
        sampling = {name for name in type(self).model_fields if name.endswith("_eval")}
        names = {"metric_for_best_model", "greater_is_better"} | sampling
        if "@" in metric:
            names |= {"success", "success_threshold"}
        if metric.endswith(("/low", "/high")):
            names |= {"bootstrap_samples", "confidence"}
        return self.model_dump(include=names, mode="json")


class RunConfig(Section):
    """Duration, output and checkpoints."""

    marked = PLACE
    output_dir: PathName | None = None
    """The run folder. Must not contain another run. Unset: the next free runs/NAME-001."""
    seed: Annotated[int, Field(ge=0, lt=2**32), Mark(experiment=False, flag="seed")] = 0
    """Seed of sampling, data order and all other random numbers."""
    deterministic: Annotated[bool, Mark(experiment=False)] = False
    """On CUDA, use algorithms that give the same bytes each time, which are slower; one that has no such variant is
    named in a warning. On a CPU, the same seed, settings and machine give the same bytes without it."""
    max_steps: Annotated[PositiveInt | None, DRIFTS] = None
    """Number of rollouts. Unset: determined by `num_epochs`."""
    num_epochs: Annotated[PositiveInt, DRIFTS] = 1
    """How often each prompt is used, unless `max_steps` is set. The last step uses the remaining prompts, so that all
    prompts are used equally often."""
    save_steps: Count = 50
    """Write a checkpoint every this many steps, and at the end. 0: at the end only."""
    save_minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Also write a checkpoint when the last one is this many minutes old. 0: never."""
    save_total_limit: PositiveInt | None = None
    """Number of checkpoints to keep; older ones are deleted. Unset: all."""
    keep_every: Count = 0
    """Never delete the checkpoints of steps that are multiples of this. 0: none is exempt from `save_total_limit`."""
    stop_when_unsaved_minutes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """While files cannot be written (disk full, read-only, gone), the writes are repeated, and training goes on until
    the next checkpoint is due. The run ends when that has lasted this many minutes. 0: it ends at the first failure."""
    stop_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 300.0
    """Time to stop after SIGTERM, SIGINT (Ctrl-C) or SIGUSR1: to cancel sampling or end the step's updates, and write a
    checkpoint. Then the process ends without one. 0: no limit."""


Factor = Annotated[float, Field(gt=1)]
Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "swanlab", "comet"]


class ThresholdsConfig(Section):
    """When the diagnosis of a run says something (see 'cohort docs diagnosis'). A share counts as above a threshold
    when its whole confidence interval is."""

    marked = PLACE
    dead_groups: Share = 0.8
    """Share of groups with equal rewards."""
    truncated: Share = 0.3
    """Share of completions cut at the length limit."""
    failed_rewards: Share = 0.01
    """Share of completions that a reward function failed on."""
    distinct: Share = 0.25
    """Different completions of a prompt over all of them; below it they are duplicates."""
    repetition: Share = 0.5
    """Share of spans of 4 tokens that occurred earlier in the completion."""
    length_change: Factor = 1.5
    """Factor by which lengths may grow or shrink without a gain in reward."""
    reward_fall: Share = 0.25
    """Fall of the mean reward from its best, over the height of the best above the lowest reward of the run."""
    drowned: Share = 0.1
    """Spread of a reward function within groups over that of the one that varies most."""
    entropy_fall: Factor = 3.0
    """Factor by which entropy may fall while prompts are left to learn."""
    entropy_rise: Factor = 2.0
    """Factor by which entropy may rise without a gain in reward."""
    update_kl_low: PositiveFloat = 1e-8
    """Size of a step, in nats per token, below which the learning rate is too low."""
    update_kl_high: PositiveFloat = 0.05
    """Size of a step, in nats per token, above which the learning rate is too high."""
    kl_per_step: PositiveFloat = 0.1
    """Growth of the KL to the reference in a step, in nats per token."""
    clipped: Share = 0.4
    """Share of tokens that the trust region silences, of those that could have a gradient."""
    gradient_tokens: PositiveFloat = 10.0
    """Effective number of tokens that the gradient comes from."""
    sampler_gap: PositiveFloat = 0.05
    """Mean difference between the log-probs of sampler and trainer, in nats per token."""


class ReportConfig(Section):
    """Output and diagnostics."""

    marked = PLACE
    progress: bool = True
    """Print a description of the run at its start, progress and evaluations. Off: print nothing."""
    log_completions: bool = True
    """Write the completions of each step to rollouts/step-N.parquet, with their rewards and what the updates saw of
    each token (see 'cohort docs store'), and those of evaluations to evaluations/."""
    store_steps: PositiveInt = 1
    """Write the completions of every this many steps."""
    store_groups: Count = 0
    """Number of groups of a step to write, chosen whatever their rewards are. 0: all."""
    trackers: Annotated[tuple[Tracker, ...], Strict(False), OneAsList] = ()
    """Experiment trackers that the run is sent to, as in ["tensorboard", "wandb"]: tensorboard, wandb, mlflow, trackio,
    swanlab, comet (see 'cohort docs trackers')."""
    tracker_project: str | None = None
    """The project or experiment of the trackers. Default: what the tracker's own variable says, such as WANDB_PROJECT,
    else "cohort"."""
    skip_checks: Strings = ()
    """Checks to leave out, by their names, as in ["text"]: in `cohort doctor` and before a run (see 'cohort docs
    doctor'), and in the diagnosis of a run (see 'cohort docs diagnosis')."""
    thresholds: ThresholdsConfig = ThresholdsConfig()
    """Thresholds of the diagnosis; see below."""
    check_saved: bool = True
    """Read back the weights of the last checkpoint and of best/ after writing, and compare them bit for bit with the
    trained ones."""
    term_norms_steps: Count = 0
    """Every this many steps, measure the gradient norm of each term (policy, KL, entropy) with a separate backward pass
    over the first minibatch. 0: never."""
    update_kl_completions: Count = 8
    """Number of completions per step on which to measure how far the step moved the policy (update_kl). 0: off."""
