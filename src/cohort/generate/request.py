"""The arguments of ``cohort generate``, and the checks that need no model. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.errors import ConfigError
from cohort.flags import GenerateFlags


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

    @property
    def as_chat(self) -> bool:
        """Whether the chat template is applied to strings too."""
        return self.chat or self.system is not None

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
            if not is_text(getattr(self, name)):
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


def is_text(value: Any) -> bool:
    """Whether a string, or all strings in a JSON value, can be encoded as UTF-8.

    Undecodable bytes from the shell and unpaired surrogates cannot.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        return False
    return True
