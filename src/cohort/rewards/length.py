"""Rewards for the length of a completion, in tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from cohort.config import RewardConfig
from cohort.errors import RewardError
from cohort.rewards.contract import reward
from cohort.rewards.functions import Function
from cohort.rewards.names import resolve_reward


def soft_overlong(
    completion: Any,  # noqa: ARG001 - makes this a function per sample
    completion_ids: Sequence[int],
    *,
    max_length: Annotated[int, Field(gt=0)],
    buffer: Annotated[int, Field(ge=0)],
) -> float:
    """A penalty for the last tokens before the length limit, from 0 down to -1.

    0 up to max_length - buffer tokens, then linear down to -1 at max_length, and -1 above: equation 13 of DAPO, arXiv
    2503.14476. With buffer=0 it is 0 up to max_length. The end token counts.

    Args:
        max_length: number of tokens at which the penalty is -1.
        buffer: number of tokens over which the penalty falls; at most max_length.

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
def _judge(spec: str) -> Function:
    """A reward function by name.

    Raises:
        RewardError: the function is not per sample, or is async.
    """
    function = Function(resolve_reward(spec), spec, 1.0, RewardConfig())
    if function.per != "sample" or function.is_async:
        raise RewardError(f"must name a reward that sees one sample and is not async, got {spec!r}")
    return function


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
    exceeded: float | None = -1.0,
    correct: Annotated[str, AfterValidator(lambda spec: _judge(spec) and spec)] = "math",
    **columns: Any,
) -> float | None:
    """A reward for correct and a penalty for wrong completions, both shrinking with length along a cosine.

    r_L + (r_0 - r_L) (1 + cos(pi t / max_length)) / 2 for a completion of t tokens: r_0 at 0 tokens, r_L at max_length.
    From max_length tokens on it is ``exceeded``, correct or not. The cosine reward of arXiv 2502.03373; the default
    numbers are our own. It needs the columns that ``correct`` needs.

    Args:
        max_length: number of tokens, the end token included.
        r0c, rLc: rewards of correct completions at 0 tokens and at max_length.
        r0w, rLw: rewards of wrong completions.
        exceeded: reward of completions with max_length tokens or more. None: rLc and rLw.
        correct: the reward that decides what is correct, named as in reward.functions: correct if it returns 1 or
            more. It must see one sample and must not be async. If it returns None, the completion is unscored.

    >>> [cosine_length("So 4.", [0] * tokens, max_length=100, answer=4) for tokens in (0, 50, 100)]
    [1.0, 0.75, -1.0]
    """
    judge = _judge(correct)
    judged = judge.call(**judge.accepted({"completion": completion, "completion_ids": completion_ids, **columns}))
    if judged is None:
        return None
    tokens = min(len(completion_ids), max_length)
    if tokens == max_length and exceeded is not None:
        return exceeded
    start, end = (r0c, rLc) if judged >= 1 else (r0w, rLw)
    return end + (start - end) * (1 + math.cos(math.pi * tokens / max_length)) / 2
