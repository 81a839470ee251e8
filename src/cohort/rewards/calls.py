"""One call of a reward function, wherever it is made: here, on the event loop, or in a worker process."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cohort.workers import CallFailed, said_of

LOGS = ("log_extra", "log_metric")
"""Arguments that are made where the function is called."""


@dataclass(slots=True)
class Recorded:
    """What a call returned, and what it said on the side."""

    result: Any = None
    extras: list[tuple[str, Any]] = field(default_factory=list)
    """Columns of ``log_extra``: a value for the sample, or a list of them."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Numbers of ``log_metric``."""
    seconds: float = 0.0

    def logs(self, wanted: frozenset[str]) -> dict[str, Callable[[str, Any], None]]:
        """Those of ``log_extra`` and ``log_metric`` that the function takes."""
        given: dict[str, Callable[[str, Any], None]] = {"log_extra": self._extra, "log_metric": self._metric}
        return {name: log for name, log in given.items() if name in wanted}

    def _extra(self, column: str, values: Any) -> None:
        self.extras.append((column, values))

    def _metric(self, name: str, value: float) -> None:
        self.metrics.append((name, float(value)))


def call_recorded(function: Callable[..., Any], arguments: Mapping[str, Any], logs: frozenset[str]) -> Recorded:
    """Call a function and wait for it; what it returns may be awaitable."""
    recorded, start = Recorded(), time.perf_counter()
    recorded.result = function(**arguments, **recorded.logs(logs))
    if inspect.isawaitable(recorded.result):
        recorded.result = run_on_loop(_guarded(recorded.result)).result()
    recorded.seconds = time.perf_counter() - start
    return recorded


async def await_recorded(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    logs: frozenset[str],
    timeout: float | None,
    places: asyncio.Semaphore,
) -> Recorded:
    """Call an async function when there is a place for it; its time counts from then.

    Raises:
        CallFailed: it took too long. It is cancelled, and not waited for: it may not take that for an answer.
    """
    async with places:
        recorded, start = Recorded(), time.perf_counter()
        task = asyncio.ensure_future(_guarded(function(**arguments, **recorded.logs(logs))))
        try:
            await asyncio.wait({task}, timeout=timeout)
        finally:
            if not task.done():
                task.add_done_callback(lambda late: late.cancelled() or late.exception())  # nobody else will ask
                task.cancel()
        if not task.done():
            raise CallFailed(f"took more than {timeout:g} s", timed_out=True)
        recorded.result = task.result()
        recorded.seconds = time.perf_counter() - start
    return recorded


def run_on_loop(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run a coroutine on the event loop of the rewards, which has a thread of its own: clients and connections that a
    function keeps stay good from one rollout to the next, and a notebook's own loop is left alone."""
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop())


def loop_answers(within: float) -> bool:
    """Whether the event loop does anything: a function that blocks it, as ``time.sleep`` does, stops all others."""
    answered = threading.Event()
    _event_loop().call_soon_threadsafe(answered.set)
    return answered.wait(within)


@lru_cache(maxsize=1)
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="cohort-rewards", daemon=True).start()
    return loop


async def _guarded(result: Awaitable[Any]) -> Any:
    """Wait for a call; one that would end the interpreter would end the loop, and all calls with it."""
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:
        raise CallFailed(said_of(error), traceback.format_exc().rstrip()) from None
