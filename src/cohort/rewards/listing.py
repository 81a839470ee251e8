"""The output of ``cohort rewards``. Imports neither torch nor a package of an extra."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from cohort.rewards.builtin import BUILTIN_REWARDS, columns_of, settings_of, unknown_reward

_FOOTER = """
cohort rewards NAME explains one. In the settings, values for its settings follow in parentheses:
reward.functions = ["math", "soft_overlong(max_length=1024, buffer=256)", "mine.py:my_reward"]"""


def list_rewards() -> str:
    """Every built-in reward: its settings with their defaults, a summary, and its requirements."""
    lines = []
    for name in BUILTIN_REWARDS:
        signature, needs, text = _described(name)
        lines += [*signature, *_wrapped(text.partition("\n")[0], "    "), *_wrapped(needs, "    needs ")]
    return "\n".join([*lines, _FOOTER])


def explain_reward(name: str) -> str:
    """One built-in reward: its settings, its requirements and its docstring.

    Raises:
        RewardError: there is no built-in reward of that name.
    """
    if name not in BUILTIN_REWARDS:
        raise unknown_reward(name)
    signature, needs, text = _described(name)
    lines = [*signature, *_wrapped(needs, "needs ")]
    for block in text.split("\n\n"):
        lines.append("")
        if block.startswith("Args:"):
            for entry in re.sub(r"\n {8}", " ", block).splitlines()[1:]:
                lines += _wrapped(entry.strip(), "    ", " " * 8)
        else:
            lines += block.splitlines() if block.startswith(">>>") else _wrapped(" ".join(block.split()))
    return "\n".join(lines)


def _described(name: str) -> tuple[list[str], str, str]:
    """The signature in lines, the requirements, and the docstring without its markup."""
    row = BUILTIN_REWARDS[name]
    function: Callable[..., Any] = row.load()
    settings = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in settings_of(function).values()]
    needs = [f"the column {column}" for column in columns_of(function)]
    needs += [f"{row.package}: pip install 'cohort-rl[rewards]'"] if row.package else []
    needs += [f"the program {row.program}"] if row.program else []
    text = re.sub(r"``(.+?)``", r"\1", inspect.getdoc(function) or "", flags=re.DOTALL)
    return _wrapped(f"{name}({', '.join(settings)})", "", " " * (len(name) + 1)), "; ".join(needs), text


def _wrapped(text: str, first: str = "", rest: str | None = None) -> list[str]:
    rest = " " * len(first) if rest is None else rest
    return textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
