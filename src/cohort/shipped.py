"""What the package brings along by name: rewards, two small models and a data set, the recipes, the documentation."""

from __future__ import annotations

import importlib
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohort.errors import CohortError, ConfigError, did_you_mean

PREFIX = "cohort:"
PACKAGE = Path(__file__).parent
MODELS = {"cohort:demo": PACKAGE / "demo" / "model", "cohort:demo-tool": PACKAGE / "demo" / "tool_model"}
"""Name to folder, wherever a model is named."""
DATA = {"cohort:addition": PACKAGE / "demo" / "addition"}
"""Name to folder, wherever data is named: its files are the splits."""


def folder(name: str) -> Path:
    """The folder "examples" or "docs": the one in the package or, of an editable install, the one in the clone.

    Raises:
        ConfigError: the installation has neither.
    """
    places = [PACKAGE / name, PACKAGE.parents[1] / name]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(
        f"this installation of Cohort has no {name}: looked for {' and '.join(map(str, places))}. Install it again: "
        "pip install --force-reinstall --no-deps cohort-rl"
    )


def shipped(name: str, kind: str, error: type[CohortError]) -> str:
    """The folder of a shipped model or data set; another name unchanged.

    Args:
        name: "cohort:demo", a folder, a hub id.
        kind: "model" or "data set".
        error: the class of error to raise.

    Raises:
        CohortError: of the given class: the name begins with "cohort:", and nothing is shipped under it.

    >>> shipped("Qwen/Qwen2.5-0.5B", "model", ConfigError)
    'Qwen/Qwen2.5-0.5B'
    """
    known = MODELS if kind == "model" else DATA
    if not name.startswith(PREFIX):
        return name
    if name not in known:
        raise error(f"no {kind} {name!r} is shipped: there is {', '.join(known)}{did_you_mean(name, known)}")
    return str(known[name])


@dataclass(frozen=True, slots=True)
class BuiltinReward:
    """A reward function of the package. It is imported on demand."""

    name: str
    module: str
    """Module within ``cohort.rewards`` that holds the function of the same name."""
    package: str | None = None
    """Required package."""
    extra: str = "rewards"
    """The extra that has the package."""
    program: str | None = None
    """Required program. The function checks for it."""

    def load(self) -> Any:
        """Import the function."""
        return getattr(importlib.import_module(f"cohort.rewards.{self.module}"), self.name)


BUILTIN_REWARDS: dict[str, BuiltinReward] = {
    row.name: row
    for row in (
        BuiltinReward("math", "mathematics", "math_verify"),
        BuiltinReward("reasoning_answer", "mathematics", "math_verify"),
        BuiltinReward("gsm8k", "mathematics"),
        BuiltinReward("code", "code", program="bwrap"),
        BuiltinReward("exact_match", "text"),
        BuiltinReward("fuzzy_match", "text", "rapidfuzz"),
        BuiltinReward("regex", "text"),
        BuiltinReward("json_schema", "text", "jsonschema"),
        BuiltinReward("think_format", "text"),
        BuiltinReward("soft_overlong", "text"),
        BuiltinReward("cosine_length", "text"),
        BuiltinReward("repetition_penalty", "text"),
        BuiltinReward("language", "text", "py3langid"),
        BuiltinReward("environment_reward", "environment"),
        BuiltinReward("reasoning_gym", "text", "reasoning_gym", extra="reasoning-gym"),
    )
}
"""Name to row."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe: the folder ``examples/NAME`` with a ``config.toml``, which begins like this:

    # What it does, in one line
    # hardware: what it needs
    # time: how long it takes
    #
    #     COMMAND               what to run, if that is more than ``cohort train config.toml``
    """

    name: str
    folder: Path
    title: str
    hardware: str
    time: str
    commands: tuple[str, ...]


_HEAD = re.compile(r"# (?P<title>.+)\n# hardware: (?P<hardware>.+)\n# time: (?P<time>.+)\n")


def recipes() -> dict[str, Recipe]:
    """The recipes by name.

    Raises:
        ConfigError: the installation has no recipes, or the head of one has another form.
    """
    found = {}
    for file in sorted(folder("examples").glob("*/config.toml")):
        name, text = file.parent.name, file.read_text(encoding="utf-8")
        if (head := _HEAD.match(text)) is None:
            raise ConfigError(f"{file} does not begin with '# TITLE', '# hardware: ...' and '# time: ...'")
        opening = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
        commands = tuple(line[6:] for line in opening if line.startswith("#     "))
        found[name] = Recipe(name, file.parent, **head.groupdict(), commands=commands)
    return found
