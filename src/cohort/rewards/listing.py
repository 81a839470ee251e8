"""The built-in rewards in words, for ``cohort rewards``. Imports no torch and no package of an extra."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.builtin import BUILTIN_REWARDS, BuiltinReward, columns_of, nearest, settings_of

_WIDTH = 100


def list_rewards() -> str:
    """Every built-in reward: its settings with their defaults, what it says, and what it needs."""
    lines = []
    for row in BUILTIN_REWARDS.values():
        function = row.load()
        needs = _needs(row, function)
        lines += _wrapped(_signature(row.name, function), "", " " * (len(row.name) + 1))
        lines += _wrapped(_plain(inspect.getdoc(function) or "").partition("\n")[0], "    ")
        lines += _wrapped(needs, "    needs ") if needs else []
    lines += ["", "cohort rewards NAME explains one. In the settings, with values for its settings in brackets:"]
    lines += ['reward.functions = ["math", "soft_overlong(max_length=1024, buffer=256)", "mine.py:my_reward"]']
    return "\n".join(lines)


def explain_reward(name: str) -> str:
    """One built-in reward: its settings, and all that its docstring says.

    Raises:
        RewardError: there is none of that name.
    """
    if name not in BUILTIN_REWARDS:
        raise RewardError(f"unknown reward {name!r}{nearest(name)}: built in are {', '.join(BUILTIN_REWARDS)}")
    row = BUILTIN_REWARDS[name]
    function = row.load()
    needs = _needs(row, function)
    head = _wrapped(_signature(name, function), "", " " * (len(name) + 1)) + _wrapped(needs, "needs ")
    return "\n".join([*head, "", *_explained(_plain(inspect.getdoc(function) or ""))])


def _explained(text: str) -> list[str]:
    """A docstring's paragraphs, settings and examples, in lines that fit."""
    lines: list[str] = []
    for block in text.split("\n\n"):
        if block.startswith("Args:"):
            entries = re.sub(r"\n {8}", " ", block).splitlines()[1:]
            lines += [line for entry in entries for line in _wrapped(entry.strip(), "    ", " " * 8)]
        elif block.startswith(">>>"):
            lines += block.splitlines()
        else:
            lines += _wrapped(" ".join(block.split()), "")
        lines.append("")
    return lines[:-1]


def _signature(name: str, function: Callable[..., Any]) -> str:
    """The settings as they are written in brackets; of those without a default only the name."""
    settings = settings_of(function).values()
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in settings]
    return f"{name}({', '.join(written)})"


def _needs(row: BuiltinReward, function: Callable[..., Any]) -> str:
    columns = columns_of(function)
    needs = [f"the column {column}" for column in columns]
    if row.package is not None:
        needs.append(f"{row.package}: pip install 'cohort-rl[rewards]'")
    if row.program is not None:
        needs.append(f"the program {row.program}")
    return "; ".join(needs)


def _plain(text: str) -> str:
    """A docstring as it is read on a terminal."""
    return re.sub(r"``(.+?)``", r"\1", text, flags=re.DOTALL)


def _wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    rest = " " * len(first) if rest is None else rest
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
