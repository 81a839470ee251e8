"""What a reward function is: how it is named, found, called and checked.

A reward function takes keyword arguments and returns one number per completion:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

- ``prompts``, ``completions``: strings; or, when prompts are conversations, lists of messages (a completion is then
  ``[{"role": "assistant", "content": ...}]``).
- ``completion_ids``: token ids, the end token included.
- every column of the data, as a list: one value per completion.

All completions of a rollout come in one call, group after group. It may leave out arguments it does not use. ``None``
means that a completion cannot be scored. In place of a number it may give a list with a number or ``None`` for each of
the completion's tokens, for objectives whose credit is "process" (a number at the last token of each step) or "given"
(an advantage for each token). With several functions, a ``None`` leaves that function's term out of the
completion's sum (so return it for whole groups, as for rows of another task); a completion that no function scores has
no part in its group's statistics.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.errors import RewardError
from cohort.plugins import load_function
from cohort.rewards.builtin import BUILTIN_REWARDS
from cohort.types import Group

RewardFunction = Callable[..., Sequence[float | Sequence[float | None] | None]]


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
    return load_function(spec, what="reward", error=RewardError)


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


def call_reward(
    function: RewardFunction, name: str, groups: Sequence[Group], *, per_token: bool = False
) -> list[list[float]]:
    """Call a reward function on the completions of groups.

    Args:
        function, name: see the module's header.
        groups: whose completions.
        per_token: the objective takes rewards per token: the function must give them.

    Returns:
        For each completion a list of floats, NaN for ``None``: one, or, ``per_token``, one per token.

    Raises:
        RewardError: it needs an argument there is none for, raised, or did not return one finite number or ``None`` per
            completion (or per token).
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
    if not per_token:
        return [[_as_float(value, name, index)] for index, value in enumerate(results)]
    lengths = [len(ids) for ids in arguments["completion_ids"]]
    return [
        _per_token(value, name, index, length)
        for index, (value, length) in enumerate(zip(results, lengths, strict=True))
    ]


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


def _per_token(value: Any, name: str, index: int, length: int) -> list[float]:
    if value is None:  # not scored
        return [math.nan] * length
    if isinstance(value, str | Mapping) or not hasattr(value, "__len__"):
        raise RewardError(
            f"objective.credit takes rewards per token: reward function {name} must return a list of {length} numbers "
            f"or None as result {index} (one per token of completion_ids), got {value!r:.60}"
        )
    if len(value) != length:
        raise RewardError(
            f"reward function {name} must return one number or None per token as result {index}: {length}, "
            f"got {len(value)}"
        )
    return [_as_float(item, name, index) for item in value]


def _as_float(value: Any, name: str, index: int) -> float:
    if value is None:
        return math.nan
    if isinstance(value, list | tuple):
        raise RewardError(
            f"reward function {name} returned a list as result {index}: expected a number; rewards per token need "
            "objective.credit 'process' or 'given'"
        )
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
