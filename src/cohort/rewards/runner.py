"""The reward functions of a run, and the scoring of a rollout: start each call as early as possible, wait for all."""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from cohort.calls import Call, Calls, as_failure, copied, failure_of, interruptible, wait_all
from cohort.config import RewardConfig
from cohort.errors import RewardError
from cohort.parallel import World, agreed, prompt_shares
from cohort.rewards.contract import Per, RewardFunction, TrainerState, call_arguments
from cohort.rewards.functions import Function, Value, unique_names
from cohort.types import Completion, Episode, FinishReason, Group, Prompt, Turn
from cohort.watchdog import samples, waiting
from cohort.workers import CallFailed, shown

if TYPE_CHECKING:
    from torch import Tensor


# ----------------------------------------
# The outcomes of all calls of a rollout, combined into its scores.


log = logging.getLogger("cohort.rewards")
MAX_FAILED_ROLLOUTS = 3
"""With single-prompt rollouts, stop after this many consecutive rollouts in which every call of a function failed."""
Position = tuple[int, int]
"""A completion of the rollout: the index of its prompt, and its index within the group."""


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

        def joined(own: Mapping[str, Any], others: Mapping[str, Any], lengths: tuple[int, int]) -> dict[str, list[Any]]:
            missing = [[None] * length for length in lengths]
            return {n: [*own.get(n, missing[0]), *others.get(n, missing[1])] for n in {**own, **others}}

        tokens = [tokens_N for tokens_N in (self.token_rewards_N, other.token_rewards_N) if tokens_N is not None]
        assert len(tokens) != 1, "both rounds reward tokens, or neither does"
        return Scores(
            torch.cat([self.rewards_S, other.rewards_S]),
            torch.cat([self.by_function_SK, other.by_function_SK]),
            self.names,
            self.weights,
            torch.cat(tokens) if tokens else None,
            extras=joined(self.extras, other.extras, (first, second)),
            errors={**self.errors, **{first + index: text for index, text in other.errors.items()}},
            counts={
                name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in {**self.counts, **other.counts}
            },
            logged=joined(self.logged, other.logged, (0, 0)),
            seconds=joined(self.seconds, other.seconds, (first, second)),
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


CACHE_ENTRIES = 100_000
"""Maximum number of cached results; the oldest are dropped."""
DRY_RUN_MESSAGE_SECONDS = 5.0
"""A dry run that takes longer than this is reported in the log."""


class RewardRunner:
    """Reward functions with their weights.

    Args:
        functions: see ``rewards.contract``.
        weights: one per function; None: 1 each.
        settings: ``[reward]`` of the settings; None: the defaults.
        per_token: whether the functions reward tokens, not completions.
        not_negative: the part of the objective that does not accept negative rewards; None: any sign.
        world: the ranks that share the calls. A rank scores the prompts that it samples; functions that see a whole
            rollout run on rank 0.

    Raises:
        RewardError: there are no functions, one is not callable, or the number of weights differs.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        settings: RewardConfig | None = None,
        *,
        per_token: bool = False,
        not_negative: str | None = None,
        world: World | None = None,
    ) -> None:
        if not functions:
            raise RewardError("no reward function given: set reward.functions, or pass reward_funcs")
        for function in functions:
            if not callable(function):
                raise RewardError(f"a reward function must be callable, got {shown(function)}")
        self.names = tuple(unique_names(functions))
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(functions)
        if len(self.weights) != len(functions):
            raise RewardError(f"reward.weights has {len(self.weights)} numbers for {len(functions)} functions")
        self.settings = settings or RewardConfig()
        self.functions = tuple(
            Function(*given, self.settings, per_token=per_token, not_negative=not_negative)
            for given in zip(functions, self.names, self.weights, strict=True)
        )
        self.calls = Calls(self.settings.workers, self.settings.max_concurrent)
        self.cache: dict[Any, Call] = {}
        self.world = world or World()
        self._cache_lock = threading.Lock()  # two rollouts may be scored at a time

    def begin(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        state: TrainerState | None = None,
        world: World | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Scoring:
        """The scoring of a rollout that is about to be sampled, with ``num_generations`` completions per prompt.
        ``cancelled`` is asked now and then whether its scores are not wanted any more; ``world`` replaces the ranks."""
        ranks = world or self.world
        return Scoring(
            self, prompts, num_generations, state or TrainerState(), self.settings.on_error, ranks, cancelled
        )

    def score(self, groups: Sequence[Group], state: TrainerState | None = None) -> Scores:
        """The rewards of all completions, group after group: the weighted sum over functions.

        A function that returned ``None`` for a completion is left out of its sum. The reward of a completion is NaN if
        no function scored it or any function failed on it. With rewards per token, the reward of a completion is the
        sum over its tokens. Completions that are not usable (``FinishReason``) are passed to no function, and their
        reward is NaN.

        Raises:
            RewardError: see ``Scoring.finish``.
        """
        with self.begin([group.prompt for group in groups], 0, state) as scoring:
            return scoring.finish(groups)

    def dry_run(self, prompts: Sequence[Prompt], state: TrainerState | None = None, *, episodes: bool = False) -> None:
        """Call every function with two equal placeholder completions of real rows, to find broken functions before
        sampling.

        With ``episodes``, the completion is an episode of one turn. Functions that name ``environments`` or
        ``environment_state`` are not called, because there is no environment whose attributes they could read.

        Raises:
            RewardError: a function broke its contract, or failed on a row.
        """
        text = "A made completion, to try the reward functions."
        made = Completion.of_tokens((0,), (0.0,), FinishReason.LENGTH, text)
        tried = copy(self)
        if episodes:
            turn = Turn(1, FinishReason.LENGTH, ({"role": "assistant", "content": text},), reward=0.0)
            made = replace(made, episode=Episode((turn,), reward=0.0))
            tried.functions = tuple(function for function in self.functions if not function.reads_environment)
        if not tried.functions:
            return
        groups = [Group(prompt, (made, made)) for prompt in prompts]
        message = "trying the reward functions (%s) on %d rows"
        timer = threading.Timer(DRY_RUN_MESSAGE_SECONDS, log.warning, [message, ", ".join(self.names), len(groups)])
        timer.daemon = True
        timer.start()
        try:
            with Scoring(tried, prompts, 0, state or TrainerState(), "stop", World()) as scoring:
                scores = scoring.finish(groups)
        except RewardError as error:
            hint = "; completions of conversations are lists of messages: completions[0][-1]['content'] is the text"
            hint = hint if "'list' object" in str(error) and any(prompt.is_conversation for prompt in prompts) else ""
            raise RewardError(
                f"{error}{hint} (tried on {len(groups)} rows with a made completion)"
            ) from error.__cause__
        finally:
            timer.cancel()
        for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
            if self.world.is_main and column_S.isnan().all():
                message = (
                    "reward function %s returned None for each of the %d rows that were tried with a made completion"
                )
                advice = ": check the columns that it reads (None is right for rows of another task)"
                log.warning(message + advice, name, len(groups))

    def keep(self, key: Any, call: Call) -> None:
        """Cache a result."""
        with self._cache_lock:
            self.cache.pop(key, None)  # the newest are last
            self.cache[key] = call
            if len(self.cache) > CACHE_ENTRIES:
                del self.cache[next(iter(self.cache))]

    def column(self, column: str, name: str) -> str:
        """The column of ``Scores.extras`` with the values that function ``name`` logs as ``column``."""
        return extra_column(self.functions, column, name)

    def describe(self) -> str:
        """Each function with its weight, what one call sees, and where it runs."""
        return "rewards: " + "; ".join(
            f"{function.name} x {function.weight:g} (per {function.per}, {self._where(function)})"
            for function in self.functions
        )

    def _where(self, function: Function) -> str:
        if not function.in_background:
            return "here, after sampling"
        count = self.calls.workers.count
        where = "async" if function.is_async else f"in {count} worker process{'' if count == 1 else 'es'}"
        return where + (f", at most {function.timeout:g} s" if function.timeout else "")

    def close(self) -> None:
        """Stop the worker processes. The next call starts new ones."""
        self.calls.close()


class Scoring:
    """The scoring of one rollout. Pass completions to ``on_completion`` as they end, then call ``finish``.

    Functions that run in the background are called for a sample as soon as it has ended and for a group as soon as it
    is complete, while other completions are still being sampled. All other calls are made by ``finish``. As a context
    manager, it cancels unfinished calls if the block raises.

    Args:
        runner: the reward functions.
        prompts: the prompts of the rollout.
        num_generations: completions per prompt. 0: ``on_completion`` is not used.
        state: the progress of the run.
        on_error: as ``reward.on_error`` of the settings.
        world: the ranks that share the calls.
        cancelled: whether the scores are no longer wanted. None: they always are.
    """

    def __init__(
        self,
        runner: RewardRunner,
        prompts: Sequence[Prompt],
        num_generations: int,
        state: TrainerState,
        on_error: str,
        world: World,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        self._runner, self._prompts, self._cancelled = runner, list(prompts), cancelled
        self._num_generations, self._state, self._on_error = num_generations, state, on_error
        self._world = world
        self._own = frozenset(prompt_shares(self._prompts, self._world.size)[self._world.rank])
        self._completions: dict[Position, Completion] = {}
        self._tasks: dict[tuple[str, tuple[Position, ...]], Task] = {}

    def on_prompt(self, prompt_index: int, prompt: Prompt) -> None:
        """Replace a prompt, to which an environment has added something. For ``rollout.Watch.on_prompt``."""
        self._prompts[prompt_index] = prompt

    def on_completion(self, prompt_index: int, sample: int, completion: Completion) -> None:
        """Start the background calls that a completion makes possible. For ``rollout.Watch.on_completion``."""
        self._completions[prompt_index, sample] = completion
        group = [(prompt_index, g) for g in range(self._num_generations)]
        for function in (function for function in self._runner.functions if function.in_background):
            if function.per == "sample":
                self._begin(function, [(prompt_index, sample)])
            elif function.per == "group" and all(position in self._completions for position in group):
                self._begin(function, group)

    def finish(self, groups: Sequence[Group]) -> Scores:
        """Make the remaining calls, wait for all calls, and combine the rewards. With several ranks, each makes its
        calls, and all get all rewards.

        Args:
            groups: the whole rollout, including completions that are not usable (``FinishReason``).

        Raises:
            RewardError: a function broke its contract; all calls of a function failed; or one failed and the settings
                stop on errors.
            CancelledError: the scores are not wanted any more.
        """
        self._prompts = [group.prompt for group in groups]
        self._completions = {(p, g): c for p, group in enumerate(groups) for g, c in enumerate(group.completions)}
        for outcomes in agreed(self._world, self._outcomes):
            for key, (call, values) in outcomes.items():
                self._tasks[key].call, self._tasks[key].values = call, values
        for function in self._runner.functions:
            tasks = [task for task in self._tasks.values() if task.function is function]
            report_failures(function, tasks, stop=self._on_error == "stop")
        return combine(self._runner.functions, list(self._completions.items()), list(self._tasks.values()))

    def _outcomes(self) -> dict[tuple[str, tuple[Position, ...]], tuple[Call, list[Value]]]:
        """Make this rank's calls; what each logged, and its values."""
        for function in self._runner.functions:
            for positions in split(function.per, list(self._completions)):
                self._begin(function, positions)
        # Completions ended in another order on each rank, and in a run that was stopped meanwhile.
        names = self._runner.names
        self._tasks = dict(sorted(self._tasks.items(), key=lambda item: (names.index(item[0][0]), item[0][1])))
        own = {key: task for key, task in self._tasks.items() if self._is_own(task)}
        for attempt in range(self._runner.settings.retries + 1):
            self._make_calls([task for task in own.values() if not task.done], again=attempt > 0)
        return {key: (replace(task.call, returned=None), task.values) for key, task in own.items()}

    def _is_own(self, task: Task) -> bool:
        """Whether this rank makes the call."""
        return self._world.is_main if task.function.per == "batch" else task.positions[0][0] in self._own

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            return
        futures = [task.future for task in self._tasks.values() if task.future is not None]
        for future in futures:
            future.cancel()
        if not all(future.done() for future in futures):  # a call in a worker ends only with the worker
            self._runner.close()

    def _begin(self, function: Function, positions: Sequence[Position]) -> None:
        """Add the task of one call if it is new, and start it if it runs in the background and is not cached."""
        usable = tuple(position for position in positions if self._completions[position].finish_reason.usable)
        if not usable or (function.name, usable) in self._tasks:
            return
        groups = [
            Group(self._prompts[p], tuple(self._completions[position] for position in group))
            for p, group in groupby(usable, key=lambda position: position[0])
        ]
        task = self._tasks[function.name, usable] = Task(function, usable, groups)
        if not self._is_own(task):
            return
        task.cache_key = function.cache_key(groups[0].prompt, groups[0].completions[0])
        if (cached := self._runner.cache.get(task.cache_key)) is not None:
            self._accept(task, replace(cached, seconds=0.0))
        elif function.in_background:
            self._submit(task)

    def _submit(self, task: Task) -> None:
        function = task.function
        arguments = function.accepted(call_arguments(function.per, task.groups, self._state))
        # A function may change what it is given. Token ids are copies already.
        arguments = {name: v if name == "completion_ids" else copied(v) for name, v in arguments.items()}
        here = not function.in_background
        try:
            with self._waiting(function.name, [task]) if here else nullcontext():
                task.future = self._runner.calls.submit(function.recorded, arguments, function.timeout, here=here)
        except CallFailed as error:
            raise RewardError(
                f"{function} cannot run in a worker process: {error}. Define it in a module, or set reward.workers to "
                "0 and leave reward.timeout unset"
            ) from error

    def _make_calls(self, tasks: Sequence[Task], *, again: bool) -> None:
        """Make the calls of tasks, and wait for all of them.

        Args:
            tasks: without a result, or with a failed one.
            again: whether this is a retry, so that background calls are submitted again.
        """
        for task in sorted(tasks, key=lambda task: not task.function.in_background):  # those in this thread come last
            if self._cancelled and self._cancelled():
                raise CancelledError
            if again or task.future is None:
                with interruptible():
                    self._submit(task)
        self._wait(tasks)
        for task in tasks:
            assert task.future is not None
            error = failure_of(task.future)
            task.call = Call()
            if isinstance(error, RewardError):
                raise error
            if error is None:
                self._accept(task, task.future.result())
            else:
                task.values = [as_failure(error)] * len(task.positions)

    def _accept(self, task: Task, call: Call) -> None:
        task.call = call
        task.values = task.function.values(call.returned, [c for group in task.groups for c in group.completions])
        if task.done and task.cache_key is not None:
            self._runner.keep(task.cache_key, call)

    def _wait(self, tasks: Sequence[Task]) -> None:
        """Wait until all calls have ended. With a timeout, detect a function that blocks the event loop."""
        functions = [task.function for task in tasks if task.function.is_async and task.function.timeout]
        limit = max((function.timeout or 0 for function in functions), default=None)
        futures = [task.future for task in tasks if task.future is not None]
        names = ", ".join(dict.fromkeys(task.function.name for task in tasks))
        try:
            with self._waiting(names, tasks):
                wait_all(futures, limit, self._cancelled)
        except CallFailed as failure:
            names = ", ".join(function.name for function in self._runner.functions if function in functions)
            raise RewardError(f"the async reward functions ({names}) {failure}") from None

    def _waiting(self, names: str, tasks: Sequence[Task]) -> AbstractContextManager[None]:
        """Watch a wait for functions. An evaluation is compared with those before it: it may be the larger."""
        where = "evaluation reward" if self._state.evaluating else "reward"
        return waiting(f"{where} {names}", partial(self._samples, tasks))

    def _samples(self, tasks: Sequence[Task]) -> str:
        """The completions that are being scored, by their numbers in the rollout; if none is, those that wait."""
        left = [task for task in tasks if task.future is None or not task.future.done()]
        left = [task for task in left if task.future is None or task.future.running()] or left
        numbers = {position: s for s, position in enumerate(list(self._completions))}
        return samples(numbers[position] for task in left for position in task.positions)

    def progress(self) -> str:
        """How many completions have ended so far."""
        return f"{len(self._completions)} of {len(self._prompts) * self._num_generations} completions have ended"
