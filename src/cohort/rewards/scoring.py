"""The scoring of one rollout: start each call as early as possible, wait for all of them, and combine the rewards."""

from __future__ import annotations

import logging
import math
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from cohort.errors import RewardError
from cohort.rewards.calls import Call, Caller, cache_key, call_plain, loop_responds
from cohort.rewards.contract import Per, TrainerState, call_arguments
from cohort.rewards.functions import Function, Value
from cohort.types import Completion, Group, Prompt, Scores
from cohort.workers import CallFailed, describe_error

Position = tuple[int, int]
"""A completion of the rollout: the index of its prompt, and its index within the group."""
log = logging.getLogger("cohort.rewards")
MAX_FAILED_ROLLOUTS = 3
"""With single-prompt rollouts, stop after this many consecutive rollouts in which every call of a function failed."""


@dataclass(slots=True)
class Task:
    """One call to make: a function with the completions that the call sees."""

    function: Function
    positions: tuple[Position, ...]
    groups: list[Group]
    """The completions at the positions."""
    cache_key: Any = None
    future: Future[Call] | None = None
    """Set for a call that runs in the background."""
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


class Scoring:
    """The scoring of one rollout. Pass completions to ``on_completion`` as they end, then call ``finish``.

    Functions that run in the background are called for a sample as soon as it has ended and for a group as soon as it
    is complete, while other completions are still being sampled. All other calls are made by ``finish``. As a context
    manager, it cancels unfinished calls if the block raises.

    Args:
        functions: the reward functions.
        caller: makes the calls.
        prompts: the prompts of the rollout.
        num_generations: completions per prompt. 0: ``on_completion`` is not used.
        state: the progress of the run.
        on_error: as ``reward.on_error`` of the settings.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        caller: Caller,
        prompts: Sequence[Prompt],
        num_generations: int,
        state: TrainerState,
        on_error: str,
    ) -> None:
        self._functions, self._caller, self._prompts = functions, caller, prompts
        self._num_generations, self._state, self._on_error = num_generations, state, on_error
        self._completions: dict[Position, Completion] = {}
        self._tasks: dict[tuple[str, tuple[Position, ...]], Task] = {}

    def on_completion(self, prompt_index: int, sample: int, completion: Completion) -> None:
        """Start the background calls that a completion makes possible. For ``rollout.Watch.on_completion``."""
        self._completions[prompt_index, sample] = completion
        group = [(prompt_index, g) for g in range(self._num_generations)]
        for function in (function for function in self._functions if function.in_background):
            if function.per == "sample":
                self._begin(function, [(prompt_index, sample)])
            elif function.per == "group" and all(position in self._completions for position in group):
                self._begin(function, group)

    def finish(self, groups: Sequence[Group]) -> Scores:
        """Make the remaining calls, wait for all calls, and combine the rewards.

        Args:
            groups: the whole rollout, including completions that are not usable (``FinishReason``).

        Raises:
            RewardError: a function broke its contract; all calls of a function failed; or one failed and the settings
                stop on errors.
        """
        self._completions = {(p, g): c for p, group in enumerate(groups) for g, c in enumerate(group.completions)}
        for function in self._functions:
            for positions in _split(function.per, list(self._completions)):
                self._begin(function, positions)
        for attempt in range(self._caller.settings.retries + 1):
            self._make_calls([task for task in self._tasks.values() if not task.done], again=attempt > 0)
        for function in self._functions:
            self._report_failures(function, [task for task in self._tasks.values() if task.function is function])
        return combine(self._functions, list(self._completions.items()), list(self._tasks.values()))

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            return
        futures = [task.future for task in self._tasks.values() if task.future is not None]
        for future in futures:
            future.cancel()
        if not all(future.done() for future in futures):  # a call in a worker ends only with the worker
            self._caller.close()

    def _begin(self, function: Function, positions: Sequence[Position]) -> None:
        """Add the task of one call if it is new, and start it if it runs in the background or is cached."""
        usable = tuple(position for position in positions if self._completions[position].finish_reason.usable)
        if not usable or (function.name, usable) in self._tasks:
            return
        groups = [
            Group(self._prompts[p], tuple(self._completions[position] for position in group))
            for p, group in groupby(usable, key=lambda position: position[0])
        ]
        task = self._tasks[function.name, usable] = Task(function, usable, groups)
        task.cache_key = cache_key(function, groups[0].prompt, groups[0].completions[0])
        if (cached := self._caller.cached(task.cache_key)) is not None:
            self._accept(task, cached)
        elif function.in_background:
            task.future = self._caller.submit(function, self._arguments(task))

    def _arguments(self, task: Task) -> dict[str, Any]:
        return task.function.accepted(call_arguments(task.function.per, task.groups, self._state))

    def _make_calls(self, tasks: Sequence[Task], *, again: bool) -> None:
        """Make the calls that run in this thread, and wait for the others.

        Args:
            tasks: without a result, or with a failed one.
            again: whether this is a retry, so that background calls are submitted again.
        """
        for task in tasks:
            if again and task.function.in_background:
                task.future = self._caller.submit(task.function, self._arguments(task))
        background = [task for task in tasks if task.future is not None]
        for task in tasks:
            if task.future is None:
                self._resolve(task)
        self._wait(background)
        for task in background:
            self._resolve(task)

    def _resolve(self, task: Task) -> None:
        """Wait for the result of a call, or make it in this thread, and store the values or the failure."""
        task.call, function = Call(), task.function
        try:
            if task.future is None:
                call = call_plain(function.call, self._arguments(task), function.logs)
            else:
                call = task.future.result()
        except RewardError:
            raise
        except CallFailed as error:
            task.values = [error] * len(task.positions)
        except (Exception, SystemExit) as error:
            details = "".join(traceback.format_exception(error)).rstrip()
            failure = CallFailed(describe_error(error), details, timed_out=isinstance(error, TimeoutError))
            task.values = [failure] * len(task.positions)
        else:
            self._accept(task, call)

    def _accept(self, task: Task, call: Call) -> None:
        task.call = call
        task.values = task.function.values(call.returned, [c for group in task.groups for c in group.completions])
        if task.done:
            self._caller.store(task.cache_key, call)

    def _wait(self, tasks: Sequence[Task]) -> None:
        """Wait until all calls have ended. With a timeout, detect a function that blocks the event loop."""
        functions = {task.function for task in tasks if task.function.is_async and task.function.timeout}
        limit = max((function.timeout or 0 for function in functions), default=None)
        waiting = {task.future for task in tasks if task.future is not None}
        while waiting:
            _, waiting = wait(waiting, timeout=limit)
            if waiting and limit and not loop_responds(within=limit):
                names = ", ".join(function.name for function in self._functions if function in functions)
                raise RewardError(
                    f"the async reward functions ({names}) did nothing for {limit:g} s: one of them "
                    "blocks, as time.sleep or a plain HTTP call does. Use await, or make it a plain function"
                )

    def _report_failures(self, function: Function, tasks: Sequence[Task]) -> None:
        """Log the failures of a function. Raise if the settings stop on errors, or if every call failed: for several
        prompts, or in ``MAX_FAILED_ROLLOUTS`` consecutive rollouts of a single prompt."""
        count = sum(len(task.values) for task in tasks)
        failures = [failure for task in tasks for failure in task.failures]
        function.failed_rollouts = function.failed_rollouts + 1 if 0 < len(failures) == count else 0
        if not failures:
            return
        summary = f"{function} failed on {len(failures)} of {count} completions"
        prompts = {group.prompt.uid for task in tasks for group in task.groups}
        if self._on_error == "stop" or function.failed_rollouts >= (1 if len(prompts) > 1 else MAX_FAILED_ROLLOUTS):
            raise RewardError(f"{summary}; the first: {failures[0]}") from _Details(failures[0].details)
        log.warning("%s, which are unscored. The first failure:\n%s", summary, failures[0].details)


class _Details(Exception):  # noqa: N818 - cause of a RewardError: the traceback from where the function ran
    pass


def _split(per: Per, positions: list[Position]) -> Iterator[list[Position]]:
    """The completions of a rollout, split into what each call sees."""
    if per == "sample":
        yield from ([position] for position in positions)
    elif per == "group":
        yield from (list(group) for _, group in groupby(positions, key=lambda position: position[0]))
    else:
        yield positions


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
    for task in tasks:
        name, sequences = task.function.name, [index[position] for position in task.positions]
        for s, value in zip(sequences, task.values, strict=True):
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
    )


def _extras(task: Task) -> Iterator[tuple[str, Sequence[Any]]]:
    """The columns logged by a call, with one value per completion.

    Raises:
        RewardError: another number of values was logged.
    """
    for column, logged in task.call.extras:
        values = [logged] if task.function.per == "sample" else logged
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != len(task.positions):
            expected = f"{task.function} must log one value per completion as {column!r}: {len(task.positions)}"
            raise RewardError(f"{expected}, got {logged!r:.60}")
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
