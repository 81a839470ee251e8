"""The outcomes of all calls of a rollout, combined into its scores."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from cohort.calls import Call
from cohort.errors import RewardError
from cohort.rewards.contract import Per
from cohort.rewards.functions import Function, Value
from cohort.types import Completion, Group
from cohort.workers import CallFailed, shown

if TYPE_CHECKING:  # worker processes import this package and need no torch
    from torch import Tensor

log = logging.getLogger("cohort.rewards")
MAX_FAILED_ROLLOUTS = 3
"""With single-prompt rollouts, stop after this many consecutive rollouts in which every call of a function failed."""
Position = tuple[int, int]
"""A completion of the rollout: the index of its prompt, and its index within the group."""
EndedCall = tuple[str, tuple[Position, ...], list[Any], list[Any], list[Any]]
"""A call that has ended, as files hold it: name of the function, completions that it saw, their values, and what it
logged with ``log_extra`` and ``log_metric``."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Rewards of a rollout. NaN: the function did not score the completion; see ``rewards.runner``."""

    rewards_S: Tensor
    """Weighted sum over functions, float64; NaN when the completion is unscored."""
    by_function_SK: Tensor
    """Each function's own rewards, unweighted, float64; NaN where it returned ``None``."""
    names: tuple[str, ...]
    """Unique names of the K functions."""
    weights: tuple[float, ...] | None = None
    """Weights of the K functions; None: 1 each."""
    token_rewards_N: Tensor | None = None
    """Weighted sum of rewards per token, NaN where there is none. Only from functions that reward tokens."""
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Columns that functions logged: S values each, None where nothing was logged."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Why scoring failed, by the completion's index among the S."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Counters by metric name: seconds in calls, completions that a function failed on, timeouts."""
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Numbers that functions logged, by name: one for each call."""
    seconds: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """By function, the duration of the call that scored each completion. None: no call."""

    def select(self, sequences: Sequence[int]) -> Scores:
        """The scores of some completions. ``token_rewards_N`` stays as it is; ``Rollout.used_scores`` selects it."""
        chosen = list(sequences)
        return replace(
            self,
            rewards_S=self.rewards_S[chosen],
            by_function_SK=self.by_function_SK[chosen],
            extras={name: [column[s] for s in chosen] for name, column in self.extras.items()},
            errors={index: self.errors[s] for index, s in enumerate(chosen) if s in self.errors},
            seconds={name: [column[s] for s in chosen] for name, column in self.seconds.items()},
        )

    def __add__(self, other: Scores) -> Scores:
        """Concatenate the scores of two rounds; counters add up."""
        import torch

        first, second = len(self.rewards_S), len(other.rewards_S)

        def joined(own: Mapping[str, Sequence[Any]], others: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
            names = {**own, **others}
            return {n: [*own.get(n, [None] * first), *others.get(n, [None] * second)] for n in names}

        tokens = [tokens_N for tokens_N in (self.token_rewards_N, other.token_rewards_N) if tokens_N is not None]
        assert len(tokens) != 1, "both rounds reward tokens, or neither does"
        return Scores(
            torch.cat([self.rewards_S, other.rewards_S]),
            torch.cat([self.by_function_SK, other.by_function_SK]),
            self.names,
            self.weights,
            torch.cat(tokens) if tokens else None,
            extras=joined(self.extras, other.extras),
            errors={**self.errors, **{first + index: text for index, text in other.errors.items()}},
            counts={
                name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in {**self.counts, **other.counts}
            },
            logged={
                name: [*self.logged.get(name, ()), *other.logged.get(name, ())]
                for name in {**self.logged, **other.logged}
            },
            seconds=joined(self.seconds, other.seconds),
        )


@dataclass(slots=True)
class Task:
    """One call to make: a function with the completions that the call sees."""

    function: Function
    positions: tuple[Position, ...]
    groups: list[Group]
    """The completions at the positions."""
    cache_key: Any = None
    future: Future[Call] | None = None
    """Set when the call is submitted."""
    call: Call = field(default_factory=Call)
    """The outcome; empty before the call and if the call raised."""
    values: list[Value] = field(default_factory=list)
    """One per completion; empty before the call."""

    @property
    def failures(self) -> list[CallFailed]:
        """The values that are failures."""
        return [value for value in self.values if isinstance(value, CallFailed)]

    @property
    def done(self) -> bool:
        """Whether the call was made and no part of it failed."""
        return bool(self.values) and not self.failures


def combine(
    functions: Sequence[Function], completions: Sequence[tuple[Position, Completion]], tasks: Sequence[Task]
) -> Scores:
    """The scores of a rollout from the values of all calls.

    A completion that any function failed on gets no reward: a sum without one of its terms cannot be compared with
    others.
    """
    import torch

    per_token = functions[0].per_token
    index = {position: s for s, (position, _) in enumerate(completions)}
    lengths = [completion.num_tokens if per_token else 1 for _, completion in completions]
    rewards = {function.name: [[math.nan] * length for length in lengths] for function in functions}
    errors: dict[int, str] = {}
    extras: dict[str, list[Any]] = {}
    logged: dict[str, list[float]] = {}
    counts: defaultdict[str, float] = defaultdict(int)
    seconds: dict[str, list[float | None]] = {function.name: [None] * len(completions) for function in functions}
    for task in tasks:
        name, sequences = task.function.name, [index[position] for position in task.positions]
        for s, value in zip(sequences, task.values, strict=True):
            seconds[name][s] = task.call.seconds
            if isinstance(value, CallFailed):
                errors.setdefault(s, f"{name}: {value.details}")
            else:
                rewards[name][s] = value
        counts[f"rewards/{name}/failed"] += len(task.failures)
        counts[f"rewards/{name}/timeouts"] += sum(failure.timed_out for failure in task.failures)
        counts[f"seconds/reward/{name}"] += task.call.seconds
        for metric, number in task.call.metrics:
            logged.setdefault(metric, []).append(number)
        for column, values in _extras(task):
            stored = extras.setdefault(extra_column(functions, column, name), [None] * len(completions))
            for s, extra in zip(sequences, values, strict=True):
                stored[s] = extra
    for s in errors:
        for rewards_S in rewards.values():
            rewards_S[s] = [math.nan] * lengths[s]
    by_function_KS = [[_total(numbers) for numbers in rewards_S] for rewards_S in rewards.values()]
    by_function_SK = torch.tensor(by_function_KS, dtype=torch.float64).T
    tokens_NK = torch.tensor([list(chain(*rewards_S)) for rewards_S in rewards.values()], dtype=torch.float64).T
    weights_K = torch.tensor([function.weight for function in functions], dtype=torch.float64)
    return Scores(
        rewards_S=weighted_sum(by_function_SK, weights_K),
        by_function_SK=by_function_SK,
        names=tuple(rewards),
        weights=tuple(function.weight for function in functions),
        token_rewards_N=weighted_sum(tokens_NK, weights_K) if per_token else None,
        extras=extras,
        errors=errors,
        counts=counts,
        logged=logged,
        seconds=seconds,
    )


def _extras(task: Task) -> Iterator[tuple[str, Sequence[Any]]]:
    """The columns logged by a call, with one value per completion.

    Raises:
        RewardError: another number of values was logged.
    """
    for column, logged in task.call.extras:
        values = [logged] if task.function.per == "sample" else logged
        try:
            is_right = not isinstance(values, str) and len(values) == len(task.positions)
        except Exception:  # no __len__, or one of a user's class that fails
            is_right = False
        if not is_right:
            expected = f"{task.function} must log one value per completion as {column!r}: {len(task.positions)}"
            raise RewardError(f"{expected}, got {shown(logged)}")
        yield column, values


def extra_column(functions: Sequence[Function], column: str, name: str) -> str:
    """The column of ``Scores.extras`` that holds what function ``name`` logs as ``column``.

    The name of the function is appended unless it is the only function, or the only one with a parameter
    ``log_extra``. So the name of a column does not depend on which functions have logged something.
    """
    loggers = [function.name for function in functions if function.names_log_extra]
    return column if (loggers or [function.name for function in functions]) == [name] else f"{column}/{name}"


def weighted_sum(values_MK: Any, weights_K: Any) -> Any:
    """Weighted sum over functions (K), ignoring NaN; NaN where all functions with a weight other than 0 are NaN."""
    import torch

    counted_K = weights_K != 0 if bool(weights_K.any()) else torch.ones_like(weights_K, dtype=torch.bool)
    unscored_M = values_MK[:, counted_K].isnan().all(dim=1)
    return torch.where(unscored_M, torch.nan, (values_MK * weights_K).nansum(dim=1))


def _total(numbers: Sequence[float]) -> float:
    """Sum of the numbers that are not NaN; NaN if there are none."""
    scored = [number for number in numbers if not math.isnan(number)]
    return math.fsum(scored) if scored else math.nan


def split(per: Per, positions: list[Position]) -> Iterator[list[Position]]:
    """The completions of a rollout, split into what each call sees."""
    if per == "sample":
        yield from ([position] for position in positions)
    elif per == "group":
        yield from (list(group) for _, group in groupby(positions, key=lambda position: position[0]))
    else:
        yield positions


def report_failures(function: Function, tasks: Sequence[Task], *, stop: bool) -> None:
    """Log the failures of a function. Raise to ``stop`` on errors, or if every call failed: for several
    prompts, or in ``MAX_FAILED_ROLLOUTS`` consecutive rollouts of a single prompt."""
    count = sum(len(task.values) for task in tasks)
    failures = [failure for task in tasks for failure in task.failures]
    function.failed_rollouts = function.failed_rollouts + 1 if 0 < len(failures) == count else 0
    if not failures:
        return
    summary = f"{function} failed on {len(failures)} of {count} completions"
    prompts = {group.prompt.uid for task in tasks for group in task.groups}
    if stop or function.failed_rollouts >= (1 if len(prompts) > 1 else MAX_FAILED_ROLLOUTS):
        raise RewardError(f"{summary}; the first: {failures[0]}") from _Details(failures[0].details)
    log.warning("%s, which are unscored. The first failure:\n%s", summary, failures[0].details)


class _Details(Exception):  # noqa: N818 - cause of a RewardError: the traceback from where the function ran
    pass
