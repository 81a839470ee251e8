"""Rows made by a program: the data sets of the package reasoning-gym, by name.

    reasoning_gym:NAME?size=1000&offset=0&seed=0&SETTING=VALUE

The package makes the item with index i of most data sets from ``Random(seed + i)``. Seeds 0 and 1 therefore give the
same items except one. Held-out items are those of other indices, not of another seed.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cohort.data.rows import Row
from cohort.errors import DataError

PREFIX = "reasoning_gym:"
SETTINGS, INDEX = "reasoning_gym", "reasoning_gym_index"
"""Columns from which the reward of the same name makes the item again: the arguments of ``create_dataset`` as a Python
literal, because JSON would turn tuples into lists, and the index."""
ORDER_OF_SETS = ("polynomial_multiplication", "isomorphic_strings", "ransom_note", "word_ladder")
"""Data sets whose items depend on the order of Python's sets, which differs between processes."""


def procedural_rows(source: str) -> Callable[[], Iterator[Row]]:
    """Passes over the rows that ``source`` describes: columns ``prompt``, ``answer``, and the two for the reward.

    Raises:
        DataError: the package is not installed; there is no such data set or setting, or a value is invalid; or the
            data set would have other items in another process.
    """
    name, _, query = source.removeprefix(PREFIX).partition("?")
    given = dict(_setting(part, source) for part in query.split("&") if part)
    settings = {"size": 500, "offset": 0, "seed": 0} | given
    size, offset = (settings.pop(key) for key in ("size", "offset"))
    for key, value, least in (("size", size, 1), ("offset", offset, 0), ("seed", settings["seed"], 0)):
        if type(value) is not int or value < least:
            raise DataError(f"{source}: {key} must be a whole number of at least {least}, got {value!r}")
    settings = {"name": name, **settings, "size": offset + size}
    dataset = _dataset(source, settings)

    def rows() -> Iterator[Row]:
        for index in range(offset, offset + size):
            try:
                item = dataset[index]
            except Exception as error:
                raise DataError(f"{source}: making item {index} raised {type(error).__name__}: {error}") from error
            yield {"prompt": item["question"], "answer": item["answer"], SETTINGS: repr(settings), INDEX: index}

    return rows


def _setting(text: str, source: str) -> tuple[str, Any]:
    """A setting and its value: a Python literal, true or false, or else text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise DataError(f"{source}: expected SETTING=VALUE, got {text!r}")
    if value in ("true", "false"):
        return key, value == "true"
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _dataset(source: str, settings: Mapping[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError(f"{source} needs reasoning-gym: pip install 'cohort-rl[reasoning-gym]'") from None
    name = settings["name"]
    if name not in DATASETS or name == "composite":
        raise DataError(f"{source}: reasoning-gym has no data set {name!r}; it has: {', '.join(sorted(DATASETS))}")
    if name == "knight_swap" or (name in ORDER_OF_SETS and os.environ.get("PYTHONHASHSEED", "random") == "random"):
        instead = "" if name == "knight_swap" else ": set the environment variable PYTHONHASHSEED, for example to 0"
        raise DataError(f"{source}: the items of {name} are not the same in every process{instead}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    if unknown := [key for key in settings if key not in ("name", "size", "seed", *known)]:
        others = ", ".join(key for key in known if key not in ("size", "seed"))
        raise DataError(f"{source}: {name} has no setting {unknown[0]!r}; it has: size, offset, seed, {others}")
    try:
        return reasoning_gym.create_dataset(**settings)
    except Exception as error:  # an AssertionError of the data set's own check, most often
        raise DataError(f"{source}: {type(error).__name__}: {error}") from error
