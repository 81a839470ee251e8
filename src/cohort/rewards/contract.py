"""What a reward function is: how it is named, found, called and checked.

A reward function takes keyword arguments and returns one number per completion:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

- ``prompts``, ``completions``: strings; or, when prompts are conversations, lists of messages (a completion is then
  ``[{"role": "assistant", "content": ...}]``).
- ``completion_ids``: token ids, the end token included.
- every column of the data, as a list: one value per completion.

All completions of a rollout come in one call, group after group. It may leave out arguments it does not use. ``None``
means that a completion cannot be scored. With several functions, a ``None`` leaves that function's term out of the
completion's sum (so return it for whole groups, as for rows of another task); a completion that no function scores has
no part in its group's statistics.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.builtin import BUILTIN_REWARDS
from cohort.types import Group

RewardFunction = Callable[..., Sequence[float | None]]


def resolve_reward(spec: str) -> RewardFunction:
    """A reward function by built-in name, "module:function" or "file.py:function".

    Raises:
        RewardError: there is no such module, file or function, or it is not callable.
    """
    spec = spec.strip()
    if ":" not in spec:
        if spec in BUILTIN_REWARDS:
            return BUILTIN_REWARDS[spec]
        raise RewardError(
            f"unknown reward {spec!r}: built in are {', '.join(BUILTIN_REWARDS)}; "
            "your own is named module:function or file.py:function"
        )
    place, _, name = spec.rpartition(":")
    module = _load_file(place) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        available = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise RewardError(f"{place} has no function {name!r}; it has: {', '.join(available) or 'none'}")
    found: RewardFunction = function
    return found


def unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    """A name for each function: its own, numbered where two share one.

    >>> unique_names([max, min, max])
    ('max', 'min', 'max_2')
    """
    names: list[str] = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__)
        taken, number = name, 2
        while taken in names:
            taken, number = f"{name}_{number}", number + 1
        names.append(taken)
    return tuple(names)


def call_reward(function: RewardFunction, name: str, groups: Sequence[Group]) -> list[float]:
    """Call a reward function on the completions of groups.

    Returns:
        One float per completion, NaN where the function returned ``None``.

    Raises:
        RewardError: it needs an argument there is none for, raised, or did not return one finite number or ``None`` per
            completion.
    """
    arguments = reward_arguments(groups)
    count = len(arguments["completions"])
    accepted = _accepted_arguments(function, name, arguments)
    try:
        results = function(**accepted)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        raise RewardError(f"reward function {name} raised {type(error).__name__}: {error} ({place})") from error
    if inspect.isawaitable(results):
        getattr(results, "close", lambda: None)()
        raise RewardError(f"reward function {name} is async; expected a plain function")
    if isinstance(results, str | Mapping) or not hasattr(results, "__len__"):
        raise RewardError(f"reward function {name} must return a list of numbers, got {type(results).__name__}")
    if len(results) != count:
        raise RewardError(f"reward function {name} must return one reward per completion: {count}, got {len(results)}")
    return [_as_float(value, name, index) for index, value in enumerate(results)]


def reward_arguments(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The keyword arguments of a reward function, one list entry per completion, group after group."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    arguments: dict[str, list[Any]] = {
        column: [prompt.columns.get(column) for prompt, _ in pairs]
        for column in dict.fromkeys(name for group in groups for name in group.prompt.columns)
    }
    arguments["prompts"] = [prompt.prompt for prompt, _ in pairs]
    arguments["completions"] = [
        [{"role": "assistant", "content": completion.text}] if prompt.is_conversation else completion.text
        for prompt, completion in pairs
    ]
    arguments["completion_ids"] = [list(completion.token_ids) for _, completion in pairs]
    return arguments


def _accepted_arguments(function: RewardFunction, name: str, arguments: dict[str, list[Any]]) -> dict[str, list[Any]]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built into C: cannot be asked
        return arguments
    kinds = {parameter.kind for parameter in parameters.values()}
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(f"reward function {name} takes {parameter.name!r} by position: it is called by keyword")
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if required and parameter.name not in arguments:
            raise RewardError(
                f"reward function {name} needs the argument {parameter.name!r}; it can have: {', '.join(arguments)}"
            )
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return arguments
    return {key: value for key, value in arguments.items() if key in parameters}


def _as_float(value: Any, name: str, index: int) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise RewardError(
            f"reward function {name} must return numbers or None; result {index} is {value!r:.60}"
        ) from None
    if isinstance(value, str) or not math.isfinite(number):
        raise RewardError(
            f"reward function {name} returned {value!r:.60} as result {index}: expected a finite number, or None for a "
            "completion that cannot be scored"
        )
    return number


def _load_file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise RewardError(f"no reward file {place} (looked for {path})")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that the file can import its neighbours
    spec = importlib.util.spec_from_file_location(f"cohort_reward_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"reward file {place} failed to load: {type(error).__name__}: {error}") from error
    return module


def _load_module(place: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # a command, unlike ``python -m``, does not look in the working folder
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise RewardError(f"cannot import reward module {place!r}: {error}") from error
    except Exception as error:
        raise RewardError(f"reward module {place!r} failed to load: {type(error).__name__}: {error}") from error
