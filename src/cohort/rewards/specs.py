"""Reward functions by what the settings call them: a name, and settings of its own in brackets."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from cohort.errors import RewardError
from cohort.plugins import load_function
from cohort.rewards.builtin import BUILTIN_REWARDS, nearest, settings_of
from cohort.rewards.model import RewardModel, is_reward_model


def resolve_reward(spec: str) -> Callable[..., Any]:
    """A reward function by what the settings call it.

    Args:
        spec: a built-in name, "module:function", "file.py:function", or the folder or hub id of a reward model; after
            it, in brackets, values for parameters of the function, written as in Python:
            "soft_overlong(max_length=1024, buffer=256)".

    Returns:
        The function, with those values bound. A built-in's settings are all bound, the defaults too, so that none of
        them is ever taken from a column of the data.

    Raises:
        RewardError: there is no such module, file or function; it is not callable; it has no such parameter, or one has
            no value or a wrong one; or it is a built-in whose package is not installed.

    >>> resolve_reward("soft_overlong(max_length=1024, buffer=256)").keywords
    {'max_length': 1024, 'buffer': 256}
    """
    name, values = split_spec(spec)
    if name not in BUILTIN_REWARDS and (is_reward_model(name) or ("/" in name and ":" not in name)):
        bind(RewardModel, name, values)  # looks at the values
        return RewardModel(name, **values)
    if ":" in name:
        return bind(load_function(name, what="reward", error=RewardError), name, values)
    if name not in BUILTIN_REWARDS:
        raise RewardError(
            f"unknown reward {name!r}{nearest(name)}: built in are {', '.join(BUILTIN_REWARDS)}; "
            "your own is named module:function or file.py:function, a reward model by its folder or hub id"
        )
    row = BUILTIN_REWARDS[name]
    row.check_installed()
    function = row.load()
    settings = settings_of(function)
    if unknown := [key for key in values if key not in settings]:
        raise RewardError(f"reward {name} has no setting {unknown[0]!r}; it has: {', '.join(settings) or 'none'}")
    if missing := [key for key, p in settings.items() if p.default is p.empty and key not in values]:
        example = ", ".join(
            [*(f"{key}={value!r}" for key, value in values.items()), *(f"{key}=..." for key in missing)]
        )
        raise RewardError(f"reward {name} needs {', '.join(missing)}: write {name}({example})")
    defaults = {key: p.default for key, p in settings.items() if p.default is not p.empty}
    return bind(function, name, {**defaults, **values})


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """A name and the values in the brackets after it.

    Raises:
        RewardError: the brackets are not a call with plain values by keyword.

    >>> split_spec("mine.py:score(strict=True, words=['a', 'b'])"), split_spec("math")
    (('mine.py:score', {'strict': True, 'words': ['a', 'b']}), ('math', {}))
    """
    spec = spec.strip()
    if not spec.endswith(")"):
        if "(" in spec and ":" not in spec:
            raise RewardError(
                f"reward {spec!r}: the bracket is not closed; on the command line, where a comma parts names, several "
                """values are written --reward.functions '["NAME(a=1, b=2)"]'"""
            )
        return spec, {}
    # A path may hold brackets too: the call is the longest end of the spec that reads as one.
    openings = [place for place, character in enumerate(spec) if character == "("]
    for place in openings:
        try:
            call = ast.parse("f" + spec[place:], mode="eval").body
        except SyntaxError:
            continue
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            return spec[:place].rstrip(), _values(call, spec)
    raise RewardError(f"reward {spec!r}: expected NAME(key=value, ...) with values as Python writes them")


def _values(call: ast.Call, spec: str) -> dict[str, Any]:
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise RewardError(f"reward {spec!r}: values are given by name, as in NAME(key=value)")
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg in values:
            raise RewardError(f"reward {spec!r}: {keyword.arg} is given twice")
        try:
            values[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            raise RewardError(
                f"reward {spec!r}: {keyword.arg} must be a plain value (a number, a string, True, None, a list ...), "
                f"got {ast.unparse(keyword.value)}"
            ) from None
    return values


def bind(function: Callable[..., Any], name: str, values: Mapping[str, Any]) -> Callable[..., Any]:
    """A function with values for some of its parameters; the function itself where there are none.

    Values are checked against the annotations of the parameters as pydantic reads them, without conversion: "8" is no
    int.

    Raises:
        RewardError: it has no such parameter, or a value is not what its annotation says.
    """
    if not values:
        return function
    parameters = inspect.signature(function).parameters
    by_name = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    try:
        hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except Exception:  # annotations that cannot be read say nothing
        hints = {}
    for key, value in values.items():
        if key not in by_name and not takes_any:
            raise RewardError(f"reward {name} has no parameter {key!r}; it has: {', '.join(by_name) or 'none'}")
        if key in hints:
            _check(value, hints[key], f"reward {name}: {key}")
    return partial(function, **values)


def _check(value: Any, hint: Any, what: str) -> None:
    try:
        adapter = TypeAdapter(hint, config=ConfigDict(strict=True))
    except PydanticUserError:  # not a type that it knows: says nothing about values
        return
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise RewardError(f"{what}={value!r:.60}: {reason[0].lower()}{reason[1:]}") from None
