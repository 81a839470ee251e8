"""TRL's reward functions by name, made of the built-in rewards.

A run calls them for one completion at a time, as soon as it has ended; those that use computer algebra run in worker
processes with a time limit. Called with lists, as TRL calls them, they return a list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from cohort.errors import RewardError
from cohort.rewards import reward
from cohort.rewards.mathematics import VERIFY_SECONDS, Log, math, reasoning_answer
from cohort.rewards.messages import turn_text
from cohort.rewards.text import cosine_length, regex, repetition_penalty, soft_overlong

Score = Callable[..., Any]
_THINK = r"(?s)<think>(?!.*<think>).*?</think>.*"


def _takes_lists(*names: str, isolated: bool = False) -> Callable[[Score], Score]:
    """Decorator: a function that scores one completion also takes the lists that TRL's function takes.

    Args:
        names: the lists that TRL's function needs, in its order. An entry of ``completions`` is passed on as
            ``completion``, of other lists under the list's name. Keyword-only parameters are passed on as they are.
        isolated: a run calls the function in a worker process.
    """

    def decorate(score: Score) -> Score:
        @wraps(score)
        def one_or_all(*lists: Any, **named: Any) -> Any:
            if "completion" in named:
                return score(**named)
            return _score_all(score, names, **named, **dict(zip(names, lists, strict=False)))

        limit = VERIFY_SECONDS if isolated else None
        return reward(per="sample", isolated=isolated or None, timeout=limit)(one_or_all)

    return decorate


def _score_all(score: Score, names: Sequence[str], log_extra: Log | None = None, **named: Any) -> list[float | None]:
    """The scores of all completions of the named lists. What ``score`` logs is logged in lists as well."""
    if missing := [name for name in names if name not in named]:
        raise RewardError(f"{score.__name__} needs the argument {missing[0]!r}")
    settings = {p.name for p in inspect.signature(score).parameters.values() if p.kind is p.KEYWORD_ONLY}
    given = {name: value for name, value in named.items() if name in settings}
    logged: dict[str, list[Any]] = {}
    log = (lambda column, value: logged.setdefault(column, []).append(value)) if log_extra else None
    keys = ["completion" if name == "completions" else name for name in names]
    rows = zip(*(named[name] for name in names), strict=True)
    rewards = [score(**dict(zip(keys, row, strict=True)), **given, log_extra=log) for row in rows]
    if log_extra:
        for column, values in logged.items():
            log_extra(column, values)
    return rewards


@_takes_lists("completions", "solution", isolated=True)
def accuracy_reward(
    completion: Any, solution: Any, prefill: str = "", log_extra: Log | None = None, **_: Any
) -> float | None:
    r"""1 if the marked answer of the completion equals the row's ``solution``, 0 otherwise; None if the solution cannot
    be read.

    ``math`` with ``marked=True``: an answer is in ``\boxed{}``, after ``####`` or after "answer is".

    >>> accuracy_reward([[{"role": "assistant", "content": r"\boxed{\frac{1}{3}}"}], r"\boxed{3}"], ["1/3", "1/3"])
    [1.0, 0.0]
    """
    return math(completion, solution, prefill, log_extra, marked=True)


@_takes_lists("completions", "solution", isolated=True)
def reasoning_accuracy_reward(
    completion: Any,
    solution: Any,
    prefill: str = "",
    log_extra: Log | None = None,
    *,
    reasoning_delimiters: Sequence[str] | None = None,
    **_: Any,
) -> float | None:
    r"""``accuracy_reward`` for the text after the reasoning; 0 if the reasoning has no end.

    Args:
        reasoning_delimiters: ends of a reasoning. The first of them that occurs is used, at its last occurrence. None:
            ``["</think>"]``.

    >>> reasoning_accuracy_reward([r"It is 3.</think>\boxed{4}", r"\boxed{4}"], ["4", "4"])
    [1.0, 0.0]
    """
    text = turn_text(completion, prefill)
    end = next((end for end in reasoning_delimiters or ["</think>"] if end in text), None)
    return reasoning_answer(completion, solution, prefill, log_extra, end=end, marked=True) if end else 0.0


@_takes_lists("completions")
def think_format_reward(completion: Any, prefill: str = "", **_: Any) -> float:
    """1 if the assistant turn begins with ``<think>``, has no second one, and ends the reasoning by ``</think>``.

    The prefill from the prompt is part of the turn.

    >>> think_format_reward(["<think>6*7</think>42", "6*7</think>42"])
    [1.0, 0.0]
    """
    return regex(completion, prefill, pattern=_THINK, full=True)


@_takes_lists("completion_ids")
def soft_overlong_punishment_reward(
    completion_ids: Sequence[int], completion: Any = "", *, max_completion_len: int, soft_punish_cache: int, **_: Any
) -> float:
    """The function that ``get_soft_overlong_punishment`` returns."""
    return soft_overlong(completion, completion_ids, max_length=max_completion_len, buffer=soft_punish_cache)


@_takes_lists("completion_ids")
def repetition_penalty_reward(
    completion_ids: Sequence[int], completion: Any = "", *, ngram_size: int, max_penalty: float, **_: Any
) -> float:
    """The function that ``get_repetition_penalty_reward`` returns."""
    return repetition_penalty(completion, completion_ids, ngram=ngram_size, max_penalty=max_penalty, of="tokens")


@_takes_lists("completions", "solution", "completion_ids", isolated=True)
def cosine_scaled_reward(
    completion: Any,
    solution: Any,
    completion_ids: Sequence[int],
    prefill: str = "",
    *,
    max_len: int,
    min_value_wrong: float,
    max_value_wrong: float,
    min_value_correct: float,
    max_value_correct: float,
    **_: Any,
) -> float | None:
    """The function that ``get_cosine_scaled_reward`` returns."""
    return cosine_length(
        completion,
        completion_ids,
        max_length=max_len,
        r0c=max_value_correct,
        rLc=min_value_correct,
        r0w=min_value_wrong,
        rLw=max_value_wrong,
        exceeded=None,
        correct="math(marked=True)",
        answer=solution,
        prefill=prefill,
    )


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Score:
    """``soft_overlong`` with max_length and buffer: 0 up to the cache, then linear down to -1 at the maximum length.

    >>> get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)([[1] * 90, [1] * 101])
    [-0.5, -1.0]
    """
    return _with(soft_overlong_punishment_reward, **locals())


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Score:
    """``repetition_penalty`` of tokens: the share of repeated n-grams, times ``max_penalty``.

    Raises:
        RewardError: ``max_penalty`` is above 0.

    >>> get_repetition_penalty_reward(ngram_size=2)([[1, 2, 3, 4], [5, 5, 5, 5, 5]])
    [0.0, -0.75]
    """
    if max_penalty > 0:
        raise RewardError(f"get_repetition_penalty_reward: max_penalty must be at most 0, got {max_penalty}")
    return _with(repetition_penalty_reward, **locals())


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Score:
    r"""``cosine_length`` of ``accuracy_reward``: correct completions get from ``max_value_correct`` at 0 tokens to
    ``min_value_correct`` at ``max_len`` and above, wrong ones from ``min_value_wrong`` to ``max_value_wrong``.

    >>> get_cosine_scaled_reward(max_len=100)([r"\boxed{4}", r"\boxed{5}"], ["4", "4"], [[1] * 50, [1] * 50])
    [0.75, -0.75]
    """
    return _with(cosine_scaled_reward, **locals())


def _with(score: Score, **settings: Any) -> Score:
    """A partial with the name of its function, which scripts read."""
    function = partial(score, **settings)
    function.__name__ = score.__name__  # type: ignore[attr-defined]
    return function
