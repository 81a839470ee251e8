"""What ``cohort generate`` is asked for, as far as it can be checked without reading anything."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.config import RolloutConfig
from cohort.config.errors import explain_errors
from cohort.errors import CohortError, ConfigError
from cohort.rollout import Sampling

DEFAULT_TOKENS = 256
"""Tokens of a completion, at most, where ``--max-tokens`` is not given; fewer where the model's context ends before."""
FLAGS = {
    "rollout.max_completion_length": "--max-tokens",
    "max_completion_length": "--max-tokens",
    "min_completion_length": "--min-tokens",
    "rollout.cache_tokens": "--cache-tokens",
    "forced_ids": "--prefix",
    "model.path": "MODEL",
    "model.device": "--device",
    "data.system_prompt": "--system",
}
"""What the command line calls settings that errors of other rooms name."""


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``cohort generate`` under their names; see its ``--help``.

    The random numbers of a completion follow from the seed, its prompt's place among the prompts (from 0) and its place
    among the prompt's completions (from 0), and from nothing else. An evaluation with the same seed has the same.

    Raises:
        ConfigError: a number is out of its range, or two arguments exclude each other.
    """

    model: str
    prompt: Sequence[str] = ()
    prompts: str | None = None
    prompt_column: str = "prompt"
    chat: bool = False
    system: str | None = None
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: Sequence[str] = ()
    prefix: str = ""
    regex: str | None = None
    json_schema: str | None = None
    seed: int = 0
    precision: str = "auto"
    device: str = "auto"
    batch_size: int = 256
    cache_tokens: int | None = None
    trust_remote_code: bool = False
    output: str | None = None
    overwrite: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in ("n", "max_tokens", "batch_size", "cache_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed must be between 0 and 4294967295, got {self.seed}")
        for name in ("system", "prefix", "regex", "json_schema", "stop"):
            if not is_text(getattr(self, name)):
                raise ConfigError(f"--{name.replace('_', '-')} is not UTF-8 text")
        if "" in self.stop:
            raise ConfigError("--stop must not be empty: every text contains the empty string")
        if self.prompts is not None and self.prompt:
            raise ConfigError("give prompts as arguments or in a file (--prompts), not both")

    @property
    def as_chat(self) -> bool:
        """Whether strings go through the chat template, as lists of messages do."""
        return self.chat or self.system is not None

    @property
    def output_path(self) -> Path | None:
        """The file to write; None for the terminal or standard output."""
        return None if self.output is None or self.output == "-" else Path(self.output).expanduser()

    def sampling(self) -> Sampling:
        """What completions are drawn with, but for the prefix, whose tokens are not known yet.

        Raises:
            ConfigError: a number is out of its range, a stop string is empty, or a schema cannot be read.
        """
        with explain_errors(RolloutConfig):
            schema = RolloutConfig(json_schema=self.json_schema).json_schema
        return Sampling(
            max_completion_length=self.max_tokens or max(DEFAULT_TOKENS, self.min_tokens),
            temperature=self.temperature,
            stop=tuple(self.stop),
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            min_completion_length=self.min_tokens,
            regex=self.regex,
            json_schema=schema,
            record_support=False,
        )

    def check_output(self) -> None:
        """Look at the file to write; it is made when the model has been loaded.

        Raises:
            ConfigError: it exists, is the file of prompts, or cannot be made.
        """
        if (path := self.output_path) is None:
            return
        if self.prompts is not None and path.resolve() == Path(self.prompts).expanduser().resolve():
            raise ConfigError(f"--output {path} is the file of prompts: give another one")
        if path.is_dir():
            raise ConfigError(f"--output {path} is a folder: give a file")
        if path.is_file() and not self.overwrite:
            raise ConfigError(f"--output {path} exists: give another file, or --overwrite")
        if not path.parent.is_dir():
            raise ConfigError(f"there is no folder {path.parent} for --output {path.name}: make it first")


def is_text(value: Any) -> bool:
    """Whether strings, or what holds them, can be written as UTF-8: not with bytes that the shell gave and that are
    none, nor with half a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True


@contextlib.contextmanager
def flags_in_errors() -> Iterator[None]:
    """Let errors name flags of the command line where they name settings of a file or of Python."""
    try:
        yield
    except CohortError as error:
        names = "|".join(re.escape(name) for name in FLAGS)
        raise type(error)(re.sub(names, lambda found: FLAGS[found[0]], str(error))) from error.__cause__
