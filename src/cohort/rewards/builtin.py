"""The table of built-in rewards.

The table names the module of each function and imports it on demand. Listing the rewards imports neither torch nor a
package of the extra ``rewards``.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.contract import parameters_of
from cohort.types import RESERVED_COLUMNS


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """A row of the table."""

    name: str
    module: str
    """Module within ``cohort.rewards`` that holds the function of the same name."""
    package: str | None = None
    """Required package of the extra ``rewards``."""
    program: str | None = None
    """Required program. The function checks for it."""

    def load(self) -> Callable[..., Any]:
        """Import the function."""
        function: Callable[..., Any] = getattr(importlib.import_module(f"cohort.rewards.{self.module}"), self.name)
        return function

    def check_installed(self) -> None:
        """Check that the required package is installed, without importing it.

        Raises:
            RewardError: the package is not installed.
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
        BuiltinReward("environment_reward", "environment"),
    )
}
"""Name to row."""


def unknown_reward(name: str) -> RewardError:
    """The error for a name that is not in the table."""
    close = difflib.get_close_matches(name, BUILTIN_REWARDS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return RewardError(
        f"unknown reward {name!r}{hint}: built in are {', '.join(BUILTIN_REWARDS)}; your own functions are named "
        "module:function or file.py:function, a reward model by its folder or hub id"
    )


def settings_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The settings of a built-in function: its keyword-only parameters."""
    return {p.name: p for p in parameters_of(function) if p.kind is p.KEYWORD_ONLY}


def columns_of(function: Callable[..., Any]) -> list[str]:
    """The columns of the data that a built-in function requires."""
    required = [p for p in parameters_of(function) if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return [p.name for p in required if p.name not in RESERVED_COLUMNS]


def import_extra(package: str, name: str) -> Any:
    """Import a package of the extra ``rewards`` for the reward ``name``.

    Raises:
        RewardError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise _not_installed(package, name) from None


def _not_installed(package: str, name: str) -> RewardError:
    return RewardError(f"the reward {name} needs {package}, which is not installed: pip install 'cohort-rl[rewards]'")
