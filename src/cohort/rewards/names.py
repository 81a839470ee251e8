"""Reward functions by name, as in ``reward.functions`` of the settings; and the output of ``cohort rewards``.

The built-in ones are rows of a table (``shipped``). Listing them imports neither torch nor a package of the extra
``rewards``.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping
from functools import partial
from inspect import Parameter
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from cohort.errors import RewardError, did_you_mean
from cohort.plugins import load_function
from cohort.rewards.contract import RewardFunction, parameters_of
from cohort.rewards.model import RewardModel, is_reward_model
from cohort.shipped import BUILTIN_REWARDS
from cohort.types import RESERVED_COLUMNS

ALL_SETTINGS = "settings"
"""Name of the ``**`` parameter that takes any setting. Any other takes columns of the data only."""


def unknown_reward(name: str) -> RewardError:
    """The error for a name that is not in the table."""
    return RewardError(
        f"unknown reward {name!r}: built in are {', '.join(BUILTIN_REWARDS)}; your own functions are named "
        "module:function or file.py:function, a reward model by its folder or hub id"
        f"{did_you_mean(name, BUILTIN_REWARDS)}"
    )


def settings_of(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The settings of a built-in function: its keyword-only parameters."""
    return {p.name: p for p in parameters_of(function) if p.kind is p.KEYWORD_ONLY}


def columns_of(function: Callable[..., Any]) -> list[str]:
    """The columns of the data that a built-in function requires."""
    required = [p for p in parameters_of(function) if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return [p.name for p in required if p.name not in RESERVED_COLUMNS]


def import_extra(package: str, name: str, extra: str = "rewards") -> Any:
    """Import a package of an extra for the reward ``name``.

    Raises:
        RewardError: the package is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise _not_installed(package, name, extra) from None


def _not_installed(package: str, name: str, extra: str) -> RewardError:
    return RewardError(f"the reward {name} needs {package}, which is not installed: pip install 'cohort-rl[{extra}]'")


# -- specs -------------------------------------------------------------------------------------------------------------


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
        RewardError: the module, file or function does not exist or is not callable; a setting is unknown (a parameter
            ``**settings`` takes any), missing or has a wrong value; or the package of a built-in reward is not
            installed.

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
    parameters = {p.name: p.kind for p in parameters_of(function)}
    if parameters.get(ALL_SETTINGS) is not Parameter.VAR_KEYWORD:  # ``**_`` is for columns, not for settings
        named = [one for one, kind in parameters.items() if kind is not Parameter.VAR_KEYWORD]
        _check_names(name, values, named)
    _check_types(function, name, values)
    if is_model:
        return RewardModel(name, **values)
    return partial(function, **values) if values else function


def _builtin(name: str, values: Mapping[str, Any]) -> RewardFunction:
    row = BUILTIN_REWARDS[name]
    if row.package is not None and importlib.util.find_spec(row.package) is None:
        raise _not_installed(row.package, name, row.extra)
    function = row.load()
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
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # a NUL, or nested too deeply
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
        except (ValueError, TypeError, RecursionError, MemoryError):  # TypeError: {{}}
            raise RewardError(
                f"reward {spec!r}: {keyword.arg} must be a literal value (a number, a string, True, None, a list ...), "
                f"got {ast.unparse(keyword.value)}"
            ) from None
    return values


def _check_names(name: str, values: Collection[str], settings: Collection[str]) -> None:
    for key in values:
        if key not in settings:
            hint = did_you_mean(key, settings)
            raise RewardError(f"reward {name} has no setting {key!r}; it has: {', '.join(settings) or 'none'}{hint}")


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


# -- cohort rewards ----------------------------------------------------------------------------------------------------

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
    function = row.load()
    settings = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in settings_of(function).values()]
    needs = [f"the column {column}" for column in columns_of(function)]
    needs += [f"{row.package}: pip install 'cohort-rl[{row.extra}]'"] if row.package else []
    needs += [f"the program {row.program}"] if row.program else []
    text = re.sub(r"``(.+?)``", r"\1", inspect.getdoc(function) or "", flags=re.DOTALL)
    return _wrapped(f"{name}({', '.join(settings)})", "", " " * (len(name) + 1)), "; ".join(needs), text


def _wrapped(text: str, first: str = "", rest: str | None = None) -> list[str]:
    rest = " " * len(first) if rest is None else rest
    return textwrap.wrap(text, 100, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
