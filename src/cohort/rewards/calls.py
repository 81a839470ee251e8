"""Calls of reward functions: in this process, on an event loop, or in worker processes; and the cache of results."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
import pickle
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from cohort.errors import RewardError
from cohort.rewards.functions import Function
from cohort.types import Completion, Prompt
from cohort.workers import CallFailed, Workers, describe_error

if TYPE_CHECKING:  # worker processes import this module; the settings would slow down their start
    from cohort.config import RewardConfig

CACHE_ENTRIES = 100_000
"""Maximum number of cached results; the oldest are dropped."""


@dataclass(slots=True)
class Call:
    """The outcome of one call: what the function returned and what it logged."""

    returned: Any = None
    extras: list[tuple[str, Any]] = field(default_factory=list)
    """Arguments of each call to ``log_extra``."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Arguments of each call to ``log_metric``."""
    seconds: float = 0.0

    def logs(self, accepted: frozenset[str]) -> dict[str, Callable[[str, Any], None]]:
        """``log_extra`` and ``log_metric``, if the function accepts them."""
        functions: dict[str, Callable[[str, Any], None]] = {
            "log_extra": lambda column, values: self.extras.append((column, values)),
            "log_metric": lambda name, value: self.metrics.append((name, float(value))),
        }
        return {name: log for name, log in functions.items() if name in accepted}


def call_plain(function: Callable[..., Any], arguments: Mapping[str, Any], logs: frozenset[str]) -> Call:
    """Call a plain function. If it returns an awaitable, wait for that on the event loop."""
    call, start = Call(), time.perf_counter()
    call.returned = function(**arguments, **call.logs(logs))
    if inspect.isawaitable(call.returned):
        call.returned = _run_on_loop(_without_exit(call.returned)).result()
    call.seconds = time.perf_counter() - start
    return call


class Caller:
    """Starts calls in the background, and caches results.

    Args:
        settings: ``[reward]`` of the settings.
    """

    def __init__(self, settings: RewardConfig) -> None:
        self.settings = settings
        self._workers = Workers(settings.workers or max(1, (os.cpu_count() or 2) // 2))
        self._slots = asyncio.Semaphore(settings.max_concurrent)
        self._isolated: dict[str, Callable[..., Call]] = {}  # workers recognise a function by its identity
        self._cache: OrderedDict[Any, Call] = OrderedDict()

    def describe(self, function: Function) -> str:
        """Where a function runs, and its time limit."""
        if not function.in_background:
            return "here, after sampling"
        count = self._workers.count
        where = "async" if function.is_async else f"in {count} worker process{'' if count == 1 else 'es'}"
        return where + (f", at most {function.timeout:g} s" if function.timeout else "")

    def submit(self, function: Function, arguments: dict[str, Any]) -> Future[Call]:
        """Start a call in the background.

        Raises:
            RewardError: the function cannot be sent to a worker process.
        """
        if function.is_async:
            return _run_on_loop(self._await(function, arguments))
        if function.name not in self._isolated:
            self._isolated[function.name] = partial(call_plain, function.call, logs=function.logs)
        try:
            return self._workers.submit(self._isolated[function.name], {"arguments": arguments}, function.timeout)
        except CallFailed as error:
            raise RewardError(
                f"{function} cannot run in a worker process: {error}. Define it in a module, or set reward.workers to "
                "0 and leave reward.timeout unset"
            ) from error

    async def _await(self, function: Function, arguments: dict[str, Any]) -> Call:
        """Call an async function as soon as a slot is free. The timeout starts then.

        Raises:
            CallFailed: the call took too long. It is cancelled but not awaited, as it may ignore the cancellation.
        """
        async with self._slots:
            call, start = Call(), time.perf_counter()
            task = asyncio.ensure_future(_without_exit(function.call(**arguments, **call.logs(function.logs))))
            try:
                await asyncio.wait({task}, timeout=function.timeout)
            finally:
                if not task.done():
                    task.add_done_callback(lambda late: late.cancelled() or late.exception())  # mark as retrieved
                    task.cancel()
            if not task.done():
                raise CallFailed(f"took more than {function.timeout:g} s", timed_out=True)
            call.returned = task.result()
            call.seconds = time.perf_counter() - start
        return call

    def cached(self, key: Any) -> Call | None:
        """The cached result of a call, if there is one."""
        if key not in self._cache:
            return None
        self._cache.move_to_end(key)
        return replace(self._cache[key], seconds=0.0)

    def store(self, key: Any, call: Call) -> None:
        """Cache the result of a call, unless its key is None."""
        if key is not None:
            self._cache[key] = call
            if len(self._cache) > CACHE_ENTRIES:
                self._cache.popitem(last=False)

    def close(self) -> None:
        """Stop the worker processes. The next call starts new ones."""
        self._workers.close()


def cache_key(function: Function, prompt: Prompt, completion: Completion) -> Any:
    """Identifies a call by function, row and completion; None if its result cannot be cached."""
    if not function.cacheable:
        return None
    try:
        columns = hashlib.sha256(pickle.dumps(prompt.columns)).digest()
    except Exception:  # columns may hold objects that cannot be pickled
        return None
    reason = completion.finish_reason
    return function.name, prompt.token_ids, columns, completion.token_ids.tobytes(), completion.text, reason


def loop_responds(within: float) -> bool:
    """Whether the event loop reacts within some seconds. It does not while a function blocks it, as ``time.sleep``
    does."""
    answered = threading.Event()
    _event_loop().call_soon_threadsafe(answered.set)
    return answered.wait(within)


def _run_on_loop(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run a coroutine on the event loop of the rewards. The loop has its own thread and lives as long as the process:
    clients and connections remain usable across rollouts, and the loop of a notebook is not touched."""
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop())


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="cohort-rewards", daemon=True).start()
    return loop


async def _without_exit(result: Awaitable[Any]) -> Any:
    """Wait for a call. ``SystemExit`` and ``KeyboardInterrupt`` would end the loop and every other call on it."""
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:
        raise CallFailed(describe_error(error), traceback.format_exc().rstrip()) from None
