"""Built-in rewards: the table of their names, and what they share.

The table holds where each function stands and imports it when it is asked for: listing them imports no torch, no sympy
and no other package of an extra.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cohort.errors import RewardError


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """A row of the table."""

    name: str
    module: str
    """Within ``cohort.rewards``. The function is called like the row."""
    package: str | None = None
    """The module that it needs beside Cohort's own; one of the extra ``rewards``."""
    program: str | None = None
    """The program that it needs; its own check says how to get it."""

    def load(self) -> Callable[..., Any]:
        """The function."""
        function: Callable[..., Any] = getattr(importlib.import_module(f"cohort.rewards.{self.module}"), self.name)
        return function

    def check_installed(self) -> None:
        """See that its package is there, without importing it.

        Raises:
            RewardError: it is not.
        """
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            raise _not_installed(self.package, self.name)


BUILTIN_REWARDS: dict[str, BuiltinReward] = {
    row.name: row
    for row in (
        BuiltinReward("math", "mathematics", "math_verify"),
        BuiltinReward("reasoning_answer", "mathematics", "math_verify"),
        BuiltinReward("gsm8k", "mathematics"),
        BuiltinReward("code", "code", program="bwrap"),
        BuiltinReward("exact_match", "text"),
        BuiltinReward("fuzzy_match", "text", "rapidfuzz"),
        BuiltinReward("regex", "format"),
        BuiltinReward("json_schema", "format", "jsonschema"),
        BuiltinReward("think_format", "format"),
        BuiltinReward("soft_overlong", "length"),
        BuiltinReward("cosine_length", "length"),
        BuiltinReward("repetition_penalty", "text"),
        BuiltinReward("language", "language", "py3langid"),
    )
}
"""Name to row."""


def nearest(name: str) -> str:
    """A question after the built-in reward that was meant, if there is one like it.

    >>> nearest("maths"), nearest("beauty")
    (" (did you mean 'math'?)", '')
    """
    close = difflib.get_close_matches(name, BUILTIN_REWARDS, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


ARGUMENTS = frozenset(
    ["prompt", "completion", "completion_ids", "finish_reason", "prefill", "trainer_state", "log_extra", "log_metric"]
)
"""What a function of one sample can have beside the data's columns."""


def settings_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a built-in function that are set by whoever names it: those by keyword only."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def columns_of(function: Callable[..., Any]) -> list[str]:
    """The data's columns that a built-in function needs."""
    named = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p.name for p in named if p.default is p.empty and p.name not in ARGUMENTS]


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion as reward functions receive it: a string, or what the assistant said last.

    Other parts of a message than text are left out; without an assistant's message it is "".

    >>> completion_text([{"role": "assistant", "content": "6*7"}, {"role": "assistant", "content": "42"}])
    '42'
    """
    return completion if isinstance(completion, str) else (_said(completion) or [""])[-1]


def whole_text(completion: str | list[dict[str, Any]]) -> str:
    """All that the assistant said in a completion, a line break between messages.

    >>> whole_text([{"role": "assistant", "content": "6*7"}, {"role": "tool", "content": "42"}, {"role": "assistant"}])
    '6*7'
    """
    return completion if isinstance(completion, str) else "\n".join(text for text in _said(completion) if text)


def turn_text(completion: str | list[dict[str, Any]], prefill: str) -> str:
    """What the assistant said last, with what the prompt holds of that turn before it.

    >>> turn_text([{"role": "assistant", "content": "5}"}], prefill="The answer is \\\\boxed{")
    'The answer is \\\\boxed{5}'
    """
    first = isinstance(completion, str) or len(_said(completion)) < 2
    return prefill + completion_text(completion) if first else completion_text(completion)


def _said(messages: list[dict[str, Any]]) -> list[str]:
    """The text of each of the assistant's messages."""
    contents = [message.get("content") for message in messages if message.get("role") == "assistant"]
    return [
        content
        if isinstance(content, str)
        else "".join(part.get("text", "") for part in content or () if part.get("type") == "text")
        for content in contents
    ]


def import_extra(package: str, name: str) -> Any:
    """A package of the extra ``rewards``.

    Raises:
        RewardError: it is not installed; says how to.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise _not_installed(package, name) from None


def _not_installed(package: str, name: str) -> RewardError:
    return RewardError(f"the reward {name} needs {package}, which is not installed: pip install 'cohort-rl[rewards]'")
