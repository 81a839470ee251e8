"""A reward function as part of a run: how it is called, which arguments it accepts, and what its results mean."""

from __future__ import annotations

import hashlib
import math
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import Any

from cohort.calls import LOGS, is_async, own_parameter, partial_layers, recorded
from cohort.config import RewardConfig
from cohort.errors import RewardError
from cohort.rewards.contract import RewardFunction, call_options, parameters_of
from cohort.types import Completion, Prompt
from cohort.workers import CallFailed, describe_error, shown

Value = list[float] | CallFailed
"""The reward of one completion by one function: one number, or one per token, with NaN for ``None``; or the reason why
scoring failed."""


class Function:
    """A reward function with its name, weight and settings.

    Args:
        call: the function.
        name: unique name within the run.
        weight: factor in the weighted sum.
        settings: ``[reward]`` of the settings.
        per_token: whether the function returns rewards per token.
        not_negative: the part of the objective that does not accept negative rewards; None: any sign.

    Raises:
        RewardError: the function has a positional-only parameter.
    """

    def __init__(
        self,
        call: RewardFunction,
        name: str,
        weight: float,
        settings: RewardConfig,
        *,
        per_token: bool = False,
        not_negative: str | None = None,
    ) -> None:
        self.call, self.name, self.weight = call, name, weight
        self.per_token, self._not_negative = per_token, not_negative
        parameters = parameters_of(call)
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise RewardError(f"{self} takes {parameter.name!r} by position: it must accept it by name")
        # Parameters bound by a partial or a method already have a value: a column of the same name does not replace it.
        self._bound = frozenset(call.keywords if isinstance(call, partial) else ()) | {own_parameter(call)}
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.name not in self._bound]
        self._names = frozenset(p.name for p in named)
        self._required = [p.name for p in named if p.default is p.empty and p.name not in LOGS]
        self._accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.reads_environment = not self._names.isdisjoint(("environments", "environment_state"))
        self.names_log_extra = "log_extra" in self._names
        self.logs = LOGS if self._accepts_all else self._names & LOGS
        """Which of ``log_extra`` and ``log_metric`` the function accepts."""
        self.recorded = recorded(call, self.logs)
        """The function, returning a ``Call``."""
        self.is_async = is_async(call)

        options = call_options(call)
        self.per, self.timeout = options.per, options.timeout or settings.timeout
        isolated = options.isolated
        if isolated is None:
            isolated = bool(settings.workers or self.timeout)  # only a process can be stopped
        self.in_background = self.is_async or isolated
        """Whether calls run on the event loop or in a worker process, rather than in this thread after sampling."""
        self._is_per_rollout_by_default = self.per == "batch" and self._names.isdisjoint(("completion", "completions"))
        self.cacheable = settings.cache and self.per == "sample" and "trainer_state" not in self._names
        self.failed_rollouts = 0
        """Number of consecutive rollouts in which every call failed."""

    def __str__(self) -> str:
        return f"reward function {self.name}"

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that the function accepts.

        Raises:
            RewardError: an argument that the function requires does not exist.
        """
        if missing := [name for name in self._required if name not in arguments]:
            available = ", ".join([*arguments, *sorted(LOGS)])
            raise RewardError(f"{self} needs the argument {missing[0]!r}; it can have: {available}")
        names = arguments.keys() - self._bound if self._accepts_all else self._names
        if self.cacheable:  # a cached result must not depend on the progress of the run
            names -= {"trainer_state"}
        return {name: value for name, value in arguments.items() if name in names}

    def cache_key(self, prompt: Prompt, completion: Completion) -> Any:
        """Identifies a call by function, row and completion; None if its result cannot be cached."""
        if not self.cacheable or completion.episode:  # a score may depend on the environment's state
            return None
        try:
            columns = hashlib.sha256(pickle.dumps(prompt.columns)).digest()
        except Exception:  # columns may hold objects that cannot be pickled
            return None
        reason = completion.finish_reason
        return self.name, prompt.token_ids, columns, completion.token_ids.tobytes(), completion.text, reason

    def values(self, returned: Any, completions: Sequence[Completion]) -> list[Value]:
        """Check what one call returned and convert it to a value per completion.

        Raises:
            RewardError: the function broke its contract.
        """
        results = [returned] if self.per == "sample" else self._items(returned, len(completions))
        if results is None:
            once = isinstance(returned, int | float) and self._is_per_rollout_by_default
            why = ". It has no parameter 'completion', so it is called once per rollout: add 'completion' to be called "
            why = f"{why}for each completion" if once else ""
            raise RewardError(f"{self} must return a list of numbers, got {type(returned).__name__}{why}")
        if len(completions) != len(results):
            raise RewardError(f"{self} must return one reward per completion: {len(completions)}, got {len(results)}")
        pairs = zip(results, completions, strict=True)
        return [
            self._value(result, i, completion.num_tokens if self.per_token else 1)
            for i, (result, completion) in enumerate(pairs)
        ]

    def _value(self, result: Any, index: int, tokens: int) -> Value:
        if isinstance(result, BaseException):
            return CallFailed(describe_error(result).replace("raised", "returned", 1))
        numbers: Sequence[Any] | None = [result]
        if self.per_token:
            numbers = [None] * tokens if result is None else self._items(result, tokens)
        if numbers is None or (self.per_token and len(numbers) != tokens):
            raise RewardError(
                f"objective.credit takes rewards per token: {self} must return a list of {tokens} numbers or None as "
                f"result {index} (one per token of completion_ids), got "
                f"{shown(result) if numbers is None else f'{len(numbers)} values'}"
            )
        try:
            return [self._number(number, index) for number in numbers]
        except CallFailed as failure:
            return failure

    def _items(self, value: Any, expected: int) -> Sequence[Any] | None:
        """The items of a list, tuple, array, tensor or range, or as many values as its length says, if that is another
        than expected; None for anything else, such as an array without dimensions."""
        try:
            if not hasattr(value, "__getitem__") or isinstance(value, str | bytes | bytearray | Mapping):
                return None
            if getattr(value, "ndim", None) == 0:
                return None
            return range(size) if (size := len(value)) != expected else list(islice(value, expected + 1))
        except (Exception, SystemExit) as error:  # of a user's class
            raise RewardError(
                f"{self} must return a list of numbers; reading the {type(value).__name__} {describe_error(error)}"
            ) from error

    def _number(self, value: Any, index: int) -> float:
        if value is None:
            return math.nan
        if isinstance(value, list | tuple):
            raise RewardError(
                f"{self} returned a list as result {index}: expected a number; rewards per token need "
                "objective.credit 'process' or 'given'"
            )
        try:
            number = None if isinstance(value, str | bytes | bytearray) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = None
        except (Exception, SystemExit) as error:  # of a user's class
            raise CallFailed(f"returned a {type(value).__name__} whose __float__ {describe_error(error)}") from error
        if number is None:
            raise RewardError(f"{self} must return numbers or None; result {index} is {shown(value)}")
        if not math.isfinite(number):
            raise CallFailed(
                f"returned {shown(value)}: expected a finite number, or None for a completion that cannot be scored"
            )
        if self._not_negative and number < 0:
            raise RewardError(
                f"{self} returned a negative reward, which does not go with objective.{self._not_negative}: "
                "shift the reward, or change that part"
            )
        return number


def unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """The names of functions, of the classes of objects, and of the functions inside partials, numbered where several
    share one.

    >>> unique_names([max, min, partial(max, 1)])
    ['max', 'min', 'max_2']
    """
    names: list[str] = []
    for function in functions:
        inner = partial_layers(function)[-1]
        name = getattr(inner, "__name__", None)
        name = name if isinstance(name, str) else type(inner).__name__
        numbered = (f"{name}_{number}" for number in count(2))
        names.append(next(unique for unique in chain([name], numbered) if unique not in names))
    return names
