"""What a reward function sees in one call: a sample, a group or the whole batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from cohort.errors import RewardError

Per = Literal["sample", "group", "batch"]
F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__cohort_reward__"


@dataclass(frozen=True, slots=True)
class _Mark:
    per: Per | None
    isolated: bool | None
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Kind:
    """How a reward function wants to be called."""

    per: Per
    """What one call sees."""
    is_async: bool
    isolated: bool | None
    """Whether it is called in a worker process; None: as the settings say."""
    timeout: float | None
    """Its own limit in seconds per call; None: that of the settings."""


@overload
def reward(function: F) -> F: ...
@overload
def reward(
    function: None = None, *, per: Per | None = None, isolated: bool | None = None, timeout: float | None = None
) -> Callable[[F], F]: ...
def reward(
    function: F | None = None, *, per: Per | None = None, isolated: bool | None = None, timeout: float | None = None
) -> F | Callable[[F], F]:
    """Say of a reward function, or of a class whose instances are ones, how it is to be called.

    Args:
        function: when the decorator stands without brackets.
        per: what one call sees: one "sample", all completions of one prompt ("group"), or all of a rollout ("batch").
            None: as its parameters say (``kind_of``).
        isolated: True: always call it in a worker process, which is killed when it takes too long; False: never. None:
            as the settings say.
        timeout: seconds a call may take. None: ``reward.timeout`` of the settings.

    Raises:
        RewardError: ``per`` is something else, the timeout is not above 0 or of a function that could not be stopped,
            or an async function is to run in a worker process.

    >>> @reward(per="group")
    ... def longest(completions, **_):
    ...     return [float(len(text) == max(map(len, completions))) for text in completions]
    >>> kind_of(longest).per
    'group'
    """
    if per not in (None, "sample", "group", "batch"):
        raise RewardError(f"per must be 'sample', 'group' or 'batch', got {per!r}")
    if timeout is not None and not timeout > 0:
        raise RewardError(f"timeout must be above 0 seconds, got {timeout!r}")

    def mark(target: F) -> F:
        is_async = _is_async(target)
        if is_async and isolated:
            raise RewardError("isolated=True is for plain functions: async ones run together on an event loop")
        if timeout is not None and isolated is False and not is_async:
            raise RewardError("a plain function with isolated=False cannot be stopped: give it no timeout")
        try:
            setattr(target, _MARK, _Mark(per, isolated, timeout))
        except AttributeError:
            raise RewardError(f"cannot mark {target!r:.60}: mark the function itself, or wrap it in another") from None
        return target

    return mark if function is None else mark(function)


def kind_of(function: Callable[..., Any]) -> Kind:
    """How a function is called: as its decorator says; without one, a parameter named ``completion`` (and none named
    ``completions``) makes it one for samples, and anything else one for batches.

    >>> kind_of(lambda completion, **_: 1.0).per, kind_of(lambda completions, **_: [1.0]).per
    ('sample', 'batch')
    """
    mark = _Mark(None, None, None)
    for layer in _layers(function):
        if (found := getattr(layer, _MARK, None)) is not None:
            mark = found
            break
    per = mark.per
    if per is None:
        try:
            names = set(inspect.signature(function).parameters)
        except (TypeError, ValueError):  # built into C: cannot be asked
            names = set()
        per = "sample" if "completion" in names and "completions" not in names else "batch"
    return Kind(per, _is_async(function), mark.isolated, mark.timeout)


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or an object's or class's ``__call__``, is written ``async def``."""
    inner = unwrapped(function)
    call = inner if inspect.isroutine(inner) else getattr(inner, "__call__", inner)  # noqa: B004
    return inspect.iscoroutinefunction(call)


def _layers(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A function, and what is inside of it where it is a ``functools.partial``."""
    yield function
    while isinstance(function, functools.partial):
        function = function.func
        yield function


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a ``functools.partial``.

    >>> unwrapped(functools.partial(max, 1)) is max
    True
    """
    return list(_layers(function))[-1]


def function_name(function: Callable[..., Any]) -> str:
    """A function's own name; of an object its class's, of a partial that of what is inside.

    >>> function_name(functools.partial(max, 1)), function_name(functools.lru_cache()(min))
    ('max', 'min')
    """
    inner = unwrapped(function)
    name = getattr(inner, "__name__", None)
    return name if isinstance(name, str) else type(inner).__name__
