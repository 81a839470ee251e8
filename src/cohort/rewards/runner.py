"""The reward functions of a run: where each is called, and what is made of what they give."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import pickle
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from cohort.config import RewardConfig
from cohort.errors import RewardError
from cohort.rewards.calls import Recorded, await_recorded, run_on_loop
from cohort.rewards.contract import Failed, Function, RewardFunction, TrainerState, Value, named
from cohort.rewards.scoring import Scoring, log
from cohort.types import Completion, FinishReason, Group, Prompt, Scores
from cohort.workers import CallFailed, Workers

SILENCE = 5.0
"""Seconds after which a dry run that has not ended says what it is doing."""
CACHE_ENTRIES = 100_000
"""Results that are kept, the newest."""


class RewardRunner:
    """Reward functions with their weights.

    Args:
        functions: see ``rewards.contract``.
        weights: one per function; None: 1 each.
        settings: how they are called; None: the defaults.
        per_token: the functions reward tokens, not completions.
        not_negative: the part of the objective that takes no negative reward: a function that returns one is refused.

    Raises:
        RewardError: no functions, something that is not callable, or another number of weights.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        settings: RewardConfig | None = None,
        *,
        per_token: bool = False,
        not_negative: str | None = None,
    ) -> None:
        if not functions:
            raise RewardError("no reward function given: set reward.functions, or pass reward_funcs")
        for function in functions:
            if not callable(function):
                raise RewardError(f"a reward function must be callable, got {function!r:.80}")
        self.functions = named(functions)
        self.names = tuple(function.name for function in self.functions)
        self.weights = tuple(weights) if weights is not None else (1.0,) * len(functions)
        self.settings = settings or RewardConfig()
        self.per_token = per_token
        self.not_negative = not_negative
        if len(self.weights) != len(functions):
            raise RewardError(f"reward.weights has {len(self.weights)} numbers for {len(functions)} functions")
        self._workers = Workers(self.settings.workers or max(1, (os.cpu_count() or 2) // 2))
        self._places = asyncio.Semaphore(self.settings.max_concurrent)
        self._cache: OrderedDict[Any, Recorded] = OrderedDict()
        self._barren: Counter[str] = Counter()

    def begin(self, prompts: Sequence[Prompt], num_generations: int, state: TrainerState | None = None) -> Scoring:
        """The scoring of a rollout that is about to be sampled."""
        return Scoring(self, prompts, num_generations, state or TrainerState())

    def score(self, groups: Sequence[Group], state: TrainerState | None = None) -> Scores:
        """Rewards of all completions, group after group: the weighted sum of what the functions gave.

        A function's ``None`` leaves its term out of a completion's sum. A completion that no function scored, or that a
        function failed on, has no reward (NaN) and no part in its group's statistics. Where functions reward tokens, a
        completion's reward is the sum over its tokens. Completions that are not usable (``FinishReason``) are shown to
        no function and have no score.

        Raises:
            RewardError: see ``Scoring.finish``.
        """
        with self.begin([group.prompt for group in groups], 0, state) as scoring:
            return scoring.finish(groups)

    def dry_run(self, prompts: Sequence[Prompt], num_generations: int = 2, state: TrainerState | None = None) -> None:
        """Call every function on a made completion of real rows, so that a broken one is found before sampling.

        Raises:
            RewardError: a function broke its contract, or failed on a row.
        """
        made = Completion((0,), (0.0,), FinishReason.LENGTH, "A made completion, to try the reward functions.", 0)
        groups = [Group(prompt, (made,) * num_generations) for prompt in prompts]
        names = ", ".join(self.names)
        waiting = threading.Timer(SILENCE, log.warning, ["trying the rewards (%s) on %d rows", names, len(groups)])
        waiting.daemon = True
        waiting.start()
        try:
            with Scoring(self, prompts, num_generations, state or TrainerState(), on_error="stop") as scoring:
                scoring.finish(groups)
        except RewardError as error:
            hint = "; completions of conversations are lists of messages: completions[0][-1]['content'] is a text"
            hint = hint if "'list' object" in str(error) and any(prompt.is_conversation for prompt in prompts) else ""
            raise RewardError(
                f"{error}{hint} (tried on {len(groups)} rows with a made completion)"
            ) from error.__cause__
        finally:
            waiting.cancel()

    def column(self, column: str, name: str) -> str:
        """What a column that function ``name`` logs is kept as: ``COLUMN`` where that function alone has a parameter
        ``log_extra``, or is the only one; else ``COLUMN/NAME``. It does not depend on what is logged when."""
        loggers = [function.name for function in self.functions if function.names_log_extra]
        return column if (loggers or list(self.names)) == [name] else f"{column}/{name}"

    def describe(self) -> str:
        """Each function with its weight, what it sees and where it is called."""
        return "rewards: " + "; ".join(
            f"{function.name} x {weight:g} (per {function.kind.per}, {self._where(function)})"
            for function, weight in zip(self.functions, self.weights, strict=True)
        )

    def _where(self, function: Function) -> str:
        where = "here, after sampling"
        if function.kind.is_async:
            where = "async"
        elif self.runs_elsewhere(function):
            where = f"in {self._workers.count} worker process{'' if self._workers.count == 1 else 'es'}"
        limit = self.limit(function) if self.runs_elsewhere(function) else None
        return where + (f", at most {limit:g} s" if limit else "")

    def close(self) -> None:
        """Stop the worker processes. They are started afresh when they are needed again."""
        self._workers.close()

    def limit(self, function: Function) -> float | None:
        """Seconds that a call of a function may take."""
        return function.kind.timeout or self.settings.timeout

    def runs_elsewhere(self, function: Function) -> bool:
        """Whether a function is called on the event loop or in a worker: plain ones are where workers are asked for, or
        where a limit of time asks for something that can be killed."""
        kind = function.kind
        if kind.is_async:
            return True
        wanted = bool(self.settings.workers or self.limit(function))
        return wanted if kind.isolated is None else kind.isolated

    def submit(self, function: Function, arguments: dict[str, Any]) -> Future[Recorded] | None:
        """Make a call elsewhere; None for a function that is called here."""
        if not self.runs_elsewhere(function):
            return None
        limit = self.limit(function)
        if function.kind.is_async:
            return run_on_loop(await_recorded(function.call, arguments, function.logs, limit, self._places))
        try:
            return self._workers.submit(function.recorded, {"arguments": arguments}, limit)
        except CallFailed as error:
            raise RewardError(
                f"reward function {function.name} cannot run in a worker process: {error}. Make it a function of a "
                "module, or set reward.workers to 0 and no reward.timeout"
            ) from error

    def caches(self, function: Function) -> bool:
        """Whether results of a function are kept: where it sees one completion, and not how far the run is."""
        return self.settings.cache and function.kind.per == "sample" and not function.watches_run

    def cached(self, function: Function, groups: Sequence[Group]) -> Recorded | None:
        """What a function gave for the same row and tokens before, if that is kept."""
        key = self._cache_key(function, groups)
        if key is None or key not in self._cache:
            return None
        self._cache.move_to_end(key)
        return replace(self._cache[key], seconds=0.0)

    def keep(self, function: Function, groups: Sequence[Group], recorded: Recorded) -> None:
        """Remember what a function gave."""
        if (key := self._cache_key(function, groups)) is None:
            return
        self._cache[key] = recorded
        if len(self._cache) > CACHE_ENTRIES:
            self._cache.popitem(last=False)

    def _cache_key(self, function: Function, groups: Sequence[Group]) -> Any:
        if not self.caches(function):
            return None
        prompt, (completion,) = groups[0].prompt, groups[0].completions
        try:
            columns = hashlib.sha256(pickle.dumps(prompt.columns)).digest()
        except Exception:  # columns may hold anything
            return None
        reason = completion.finish_reason
        return function.name, prompt.token_ids, columns, completion.token_ids, completion.text, reason

    def count_barren(self, function: Function, *, barren: bool) -> int:
        """How many rollouts in a row, this one included, a function failed on altogether."""
        self._barren[function.name] = self._barren[function.name] + 1 if barren else 0
        return self._barren[function.name]

    def check_sign(self, function: Function, values: Sequence[Value]) -> None:
        """Refuse a negative reward where the objective takes none.

        Raises:
            RewardError: there is one.
        """
        if not self.not_negative:
            return
        numbers = (number for value in values if not isinstance(value, Failed) for number in value)
        if any(number < 0 for number in numbers if not math.isnan(number)):
            raise RewardError(
                f"reward function {function.name} returned a negative reward, which does not go with objective."
                f"{self.not_negative}: shift the reward, or change that part"
            )
