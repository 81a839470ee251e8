"""Rewards for a completion's length, in tokens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from cohort.errors import RewardError
from cohort.rewards.kinds import kind_of, reward
from cohort.rewards.specs import resolve_reward


def soft_overlong(
    completion: Any,  # noqa: ARG001 - it makes the function one for samples
    completion_ids: Sequence[int],
    *,
    max_length: Annotated[int, Field(gt=0)],
    buffer: Annotated[int, Field(ge=0)],
) -> float:
    """A penalty for the last tokens before a completion is cut, from 0 down to -1.

    0 up to max_length - buffer tokens, from there straight down to -1 at max_length, -1 above: DAPO, arXiv 2503.14476,
    equation 13. Without a buffer it is 0 up to max_length. The end token counts as one.

    Args:
        max_length: tokens from which it is -1.
        buffer: over how many tokens it falls; at most max_length.

    >>> [soft_overlong("", range(tokens), max_length=100, buffer=20) for tokens in (80, 85, 100, 101)]
    [0.0, -0.25, -1.0, -1.0]
    """
    if buffer > max_length:
        raise RewardError(f"soft_overlong: buffer must be at most max_length = {max_length}, got {buffer}")
    over = len(completion_ids) - (max_length - buffer)
    if over <= 0:
        return 0.0
    return -min(over / buffer, 1.0) if buffer else -1.0


@lru_cache(maxsize=64)
def _judge_function(spec: str) -> tuple[Callable[..., Any], frozenset[str] | None]:
    """A reward function by its spec, and the names of its arguments; None: it takes all.

    Raises:
        RewardError: it does not see one sample, or is async.
    """
    function = resolve_reward(spec)
    kind = kind_of(function)
    if kind.per != "sample" or kind.is_async:
        raise RewardError(f"must name a reward that sees one sample and is not async, got {spec!r}")
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function, None
    bound = getattr(function, "keywords", {})  # a setting is never taken from a column
    return function, frozenset(p.name for p in parameters if p.name not in bound)


def _known(spec: str) -> str:
    _judge_function(spec)  # raises what is wrong with it
    return spec


@reward(per="sample", isolated=True, timeout=20.0)
def cosine_length(
    completion: Any,
    completion_ids: Sequence[int],
    *,
    max_length: Annotated[int, Field(gt=0)],
    r0c: float = 1.0,
    rLc: float = 0.5,
    r0w: float = -1.0,
    rLw: float = -0.5,
    exceeded: float = -1.0,
    correct: Annotated[str, AfterValidator(_known)] = "math",
    **columns: Any,
) -> float | None:
    """Correct is better than wrong, and of both the more so the shorter the completion is.

    r_L + (r_0 - r_L) (1 + cos(pi t / max_length)) / 2 for a completion of t tokens: r_0 at no tokens, r_L at
    max_length; ``exceeded`` from max_length tokens on, correct or not. The cosine reward of arXiv 2502.03373, with
    numbers of our choice as defaults. It needs the columns that ``correct`` needs.

    Args:
        max_length: tokens, the end token included.
        r0c, rLc: of correct completions, at no tokens and at max_length.
        r0w, rLw: of wrong completions.
        exceeded: of completions that have max_length tokens or more.
        correct: the reward that says what is correct, as reward.functions takes it: correct where it gives 1 or more.
            One that sees a single sample and is not async. What it cannot score is not scored here: None.

    >>> [cosine_length("So 4.", [0] * tokens, max_length=100, answer=4) for tokens in (0, 50, 100)]
    [1.0, 0.75, -1.0]
    """
    judged = _judge(correct, completion=completion, completion_ids=completion_ids, **columns)
    if judged is None:
        return None
    tokens = len(completion_ids)
    if tokens >= max_length:
        return exceeded
    start, end = (r0c, rLc) if judged >= 1 else (r0w, rLw)
    return end + (start - end) * (1 + math.cos(math.pi * tokens / max_length)) / 2


def _judge(spec: str, **given: Any) -> float | None:
    """What another reward function gives."""
    function, names = _judge_function(spec)
    accepted = given if names is None else {name: value for name, value in given.items() if name in names}
    result: float | None = function(**accepted)
    return result
