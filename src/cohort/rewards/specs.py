"""Reward functions by name, as in ``reward.functions`` of the settings."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from cohort.errors import RewardError
from cohort.plugins import load_function
from cohort.rewards.builtin import BUILTIN_REWARDS, settings_of, unknown_reward
from cohort.rewards.contract import RewardFunction, parameters_of
from cohort.rewards.model import RewardModel, is_reward_model


def as_reward_function(given: Any) -> RewardFunction:
    """A reward function from a callable, a name (``resolve_reward``) or a loaded reward model.

    Raises:
        RewardError: the name cannot be resolved.
    """
    if isinstance(given, str):
        return resolve_reward(given)
    return RewardModel(given) if is_reward_model(given) else given


def resolve_reward(spec: str) -> RewardFunction:
    """A reward function by its name.

    Args:
        spec: the name of a built-in reward, "module:function", "file.py:function", or the folder or hub id of a reward
            model. Parameters follow in parentheses, in Python syntax: "soft_overlong(max_length=1024, buffer=256)".

    Returns:
        The function with the given values bound. All settings of a built-in reward are bound, including defaults, so
        that none is ever read from a column of the data.

    Raises:
        RewardError: the module, file or function does not exist or is not callable; a setting is unknown, missing or
            has a wrong value; or the package of a built-in reward is not installed.

    >>> resolve_reward("soft_overlong(max_length=1024, buffer=256)").keywords
    {'max_length': 1024, 'buffer': 256}
    """
    name, values = split_spec(spec)
    if name in BUILTIN_REWARDS:
        return _builtin(name, values)
    is_model = is_reward_model(name) or ("/" in name and ":" not in name)
    if not is_model and ":" not in name:
        raise unknown_reward(name)
    function = RewardModel if is_model else load_function(name, what="reward", error=RewardError)
    parameters = {p.name: p for p in parameters_of(function)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        _check_names(name, values, parameters)
    _check_types(function, name, values)
    if is_model:
        return RewardModel(name, **values)
    return partial(function, **values) if values else function


def _builtin(name: str, values: Mapping[str, Any]) -> RewardFunction:
    BUILTIN_REWARDS[name].check_installed()
    function = BUILTIN_REWARDS[name].load()
    settings = settings_of(function)
    _check_names(name, values, settings)
    if missing := [key for key, p in settings.items() if p.default is p.empty and key not in values]:
        arguments = [f"{key}={value!r}" for key, value in values.items()] + [f"{key}=..." for key in missing]
        raise RewardError(f"reward {name} needs {', '.join(missing)}: write {name}({', '.join(arguments)})")
    values = {key: p.default for key, p in settings.items() if p.default is not p.empty} | {**values}
    _check_types(function, name, values)
    return partial(function, **values) if values else function


def split_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Split a spec into the name and the values in parentheses.

    Raises:
        RewardError: the parentheses do not hold literal values by keyword.

    >>> split_spec("mine.py:score(strict=True, words=['a', 'b'])"), split_spec("math")
    (('mine.py:score', {'strict': True, 'words': ['a', 'b']}), ('math', {}))
    """
    spec = spec.strip()
    if not spec.endswith(")"):
        if "(" in spec and ":" not in spec:
            raise RewardError(
                f"reward {spec!r}: the bracket is not closed; on the command line, where a comma separates names, "
                """several values are written --reward.functions '["NAME(a=1, b=2)"]'"""
            )
        return spec, {}
    # A path may contain parentheses too: the values are the longest end of the spec that parses as a call.
    for start in (index for index, character in enumerate(spec) if character == "("):
        try:
            call = ast.parse("f" + spec[start:], mode="eval").body
        except SyntaxError:
            continue
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            return spec[:start].rstrip(), _values(call, spec)
    raise RewardError(f"reward {spec!r}: expected NAME(key=value, ...) with values in Python syntax")


def _values(call: ast.Call, spec: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise RewardError(f"reward {spec!r}: values are given by name, as in NAME(key=value)")
    for keyword in call.keywords:
        if keyword.arg in values:
            raise RewardError(f"reward {spec!r}: {keyword.arg} is given twice")
        try:
            values[str(keyword.arg)] = ast.literal_eval(keyword.value)
        except ValueError:
            raise RewardError(
                f"reward {spec!r}: {keyword.arg} must be a literal value (a number, a string, True, None, a list ...), "
                f"got {ast.unparse(keyword.value)}"
            ) from None
    return values


def _check_names(name: str, values: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for key in values:
        if key not in settings:
            raise RewardError(f"reward {name} has no setting {key!r}; it has: {', '.join(settings) or 'none'}")


def _check_types(function: RewardFunction, name: str, values: Mapping[str, Any]) -> None:
    """Check values against the annotations of a function, as pydantic reads them, without conversion: "8" is no int.

    Raises:
        RewardError: a value does not match.
    """
    try:
        hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True) if values else {}
    except Exception:  # annotations that cannot be evaluated are not checked
        return
    for key in hints.keys() & values.keys():
        try:
            TypeAdapter(hints[key], config=ConfigDict(strict=True)).validate_python(values[key])
        except PydanticUserError:  # a type that pydantic does not support is not checked
            continue
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise RewardError(f"reward {name}: {key}={values[key]!r:.60}: {reason[0].lower()}{reason[1:]}") from None
