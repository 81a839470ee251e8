"""Calls of user functions: in this thread, on an event loop, or in worker processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from cohort.state import kept, kept_on_loop
from cohort.workers import CallFailed, Workers, describe_error, traceback_of

POLL_SECONDS = 0.1
"""How often a wait that can be cancelled looks whether it was."""
LOGS = frozenset({"log_extra", "log_metric"})
"""Arguments that are created where a function runs, possibly in another process."""


class Interrupted(KeyboardInterrupt):
    """A function in this thread is to end, because the run is to stop."""


_interruptible: list[None] = []
"""As many as blocks that the main thread is in."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A block whose functions ``interrupt`` ends: it raises ``CancelledError`` then. Outside of the main thread, where
    no handler of a signal runs, nothing ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _interruptible.append(None)
    try:
        yield
    except Interrupted:
        raise CancelledError from None
    finally:
        _interruptible.pop()


def interrupt() -> None:
    """In a handler of a signal: raise ``Interrupted`` in the main thread's function, if it may be interrupted."""
    if _interruptible:
        raise Interrupted


@dataclass(slots=True)
class Call:
    """The outcome of one call: what the function returned and what it logged."""

    returned: Any = None
    extras: list[tuple[str, Any]] = field(default_factory=list)
    """Arguments of each call to ``log_extra``."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Arguments of each call to ``log_metric``."""
    seconds: float = 0.0

    def arguments(self, given: Mapping[str, Any], logs: Collection[str]) -> dict[str, Any]:
        """The given arguments, and those of ``LOGS`` that are in ``logs``."""
        functions = {
            "log_extra": lambda column, values: self.extras.append((column, copied(values))),
            "log_metric": lambda name, value: self.metrics.append((name, float(value))),
        }
        return {**given, **{name: functions[name] for name in logs}}


def recorded(function: Callable[..., Any], logs: Collection[str] = ()) -> Callable[..., Any]:
    """A function that calls ``function`` with the same keyword arguments and returns a ``Call``.

    It is async if ``function`` is. An awaitable that a plain function returns is awaited on the event loop.

    Args:
        function: the user function.
        logs: which of ``LOGS`` it is called with as well.
    """
    return functools.partial(_call_async if is_async(function) else _call_plain, function, logs)


def _call_plain(function: Callable[..., Any], logs: Collection[str], /, **arguments: Any) -> Call:
    call, start = Call(), time.perf_counter()
    with kept(function):
        returned = function(**call.arguments(arguments, logs))
    if inspect.isawaitable(returned):
        returned = run_on_loop(_without_exit(lambda: returned)).result()
    call.returned = copied(returned)  # a function may use the list again that it returns
    call.seconds = time.perf_counter() - start
    return call


async def _call_async(function: Callable[..., Any], logs: Collection[str], /, **arguments: Any) -> Call:
    call, start, own = Call(), time.perf_counter(), os.getpid()
    try:
        with kept_on_loop(function):
            call.returned = copied(await function(**call.arguments(arguments, logs)))
    finally:
        end_fork(own)
    call.seconds = time.perf_counter() - start
    return call


_ATOMS = frozenset((str, int, float, bool, bytes, type(None)))
_COPIERS: dict[type, Callable[[Any], Any]] = {
    list: lambda value: [item if type(item) in _ATOMS else copied(item) for item in value],
    tuple: lambda value: tuple(map(copied, value)),
    dict: lambda value: {key: copied(item) for key, item in value.items()},
    set: set.copy,
    bytearray: bytearray.copy,
    SimpleNamespace: lambda value: SimpleNamespace(**copied(vars(value))),
}


def copied(value: Any) -> Any:
    """A copy of a container, an array or a tensor, and of those in it. Other objects are the same.

    >>> copied([1, {"a": [2]}])
    [1, {'a': [2]}]
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if (copy := _COPIERS.get(kind)) is not None:
        return copy(value)
    if kind.__module__ in ("numpy", "torch") and (copy := getattr(value, "clone", getattr(value, "copy", None))):
        return copy()
    return value


class Settled(Future[Any]):
    """A future that is done from the start. All of them share one lock: making one costs a twentieth of another future.

    Args:
        value: its result.
        error: its exception, instead of a result.
    """

    _state, _condition, _waiters = "FINISHED", threading.Condition(), list[Any]()

    def __init__(self, value: Any = None, error: BaseException | None = None) -> None:
        self._result, self._exception = value, error

    @classmethod
    def of(cls, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Settled:
        """The outcome of a call that is made now."""
        own = os.getpid()
        try:
            with kept(partial_layers(function)[-1]):
                return cls(function(*arguments, **named))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return cls(error=error)
        finally:
            end_fork(own)


def end_fork(process: int) -> None:
    """End this process if it is not the given one: what a user function has forked must not go on with the run."""
    if os.getpid() != process:
        os._exit(0)


class Calls:
    """Starts calls: of async functions on an event loop, of others in worker processes or in this thread.

    Args:
        workers: number of worker processes, which start with the first call. 0: one for two cores.
        max_concurrent: maximum number of concurrent async calls.

    >>> calls = Calls(workers=1)
    >>> calls.submit(pow, {"base": 2, "exp": 5}, timeout=60).result()
    32
    >>> calls.close()
    """

    def __init__(self, workers: int = 0, max_concurrent: int = 256) -> None:
        self.workers = Workers(workers or max(1, (os.cpu_count() or 2) // 2))
        self._slots = asyncio.Semaphore(max_concurrent)

    def submit(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        timeout: float | None = None,
        *,
        here: bool = False,
    ) -> Future[Any]:
        """Call ``function(**arguments)`` as soon as a worker or, for an async function, a slot is free.

        Args:
            function, arguments: must be picklable by cloudpickle to be sent to a worker. Pass the same object for the
                same function: a worker receives it once.
            timeout: seconds for the call, from when it starts. None: no limit.
            here: call the function, a plain one, in this thread before returning. There is no time limit then.

        Returns:
            A future of the result. Its exception is what the function raised; from a worker, and for a call that took
            too long, ``CallFailed``. ``as_failure`` makes a ``CallFailed`` of any.

        Raises:
            CallFailed: the function cannot be sent to a worker process.
        """
        if here:
            return Settled.of(function, **arguments)
        if is_async(function):
            return run_on_loop(self._await(function, arguments, timeout))
        return self.workers.submit(function, arguments, timeout)

    async def _await(self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None) -> Any:
        """A call that takes too long is cancelled but not awaited: it may ignore the cancellation."""
        async with self._slots:
            task = asyncio.ensure_future(_without_exit(functools.partial(function, **arguments)))
            try:
                await asyncio.wait({task}, timeout=timeout)
            finally:
                if not task.done():
                    task.add_done_callback(retrieved)
                    task.cancel()
            if not task.done():
                raise CallFailed(f"took more than {timeout:g} s", timed_out=True)
            if task.cancelled():  # this call was not: the function has raised CancelledError
                raise CallFailed("raised CancelledError")
            return task.result()

    def close(self) -> None:
        """Stop the worker processes. The next call starts new ones."""
        self.workers.close()


def wait_all(
    futures: Iterable[Future[Any]], limit: float | None = None, cancelled: Callable[[], bool] | None = None
) -> None:
    """Wait until all calls have ended.

    Args:
        futures: from ``Calls.submit``.
        limit: seconds after which to check that the event loop reacts. None: not checked.
        cancelled: asked every ``POLL_SECONDS`` whether nobody wants the results any more.

    Raises:
        CallFailed: calls have not ended, and the event loop does not react.
        CancelledError: the results are not wanted.
    """
    waiting, since = set(futures), time.monotonic()
    while waiting:
        _, waiting = wait(waiting, timeout=POLL_SECONDS if cancelled else limit)
        if waiting and cancelled and cancelled():
            raise CancelledError
        if waiting and limit and time.monotonic() - since >= limit:
            check_loop(limit)
            since = time.monotonic()


def check_loop(limit: float) -> None:
    """Check that the event loop reacts. It does not while a function blocks it, as ``time.sleep`` does.

    Args:
        limit: seconds for a reaction.

    Raises:
        CallFailed: it did not react.
    """
    reacted = threading.Event()
    _event_loop().call_soon_threadsafe(reacted.set)
    if not reacted.wait(limit):
        raise CallFailed(
            f"did nothing for {limit:g} s: one of them blocks, as time.sleep or a plain HTTP call does. Use await, or "
            "make it a plain function"
        )


def retrieved(ended: asyncio.Future[Any]) -> None:
    """A callback of a future of asyncio that nobody waits for any more: without it, its exception would be printed when
    it is deleted."""
    if not ended.cancelled():
        ended.exception()


def failure_of(ended: Future[Any]) -> BaseException | None:
    """Why a call that has ended gave no result; None: it gave one. A function may cancel the calls of others."""
    return CallFailed("was cancelled") if ended.cancelled() else ended.exception()


def as_failure(error: BaseException) -> CallFailed:
    """The reason why a call gave no result, from what its future or a direct call raised."""
    if isinstance(error, CallFailed):
        return error
    return CallFailed(describe_error(error), traceback_of(error), timed_out=isinstance(error, TimeoutError))


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or the ``__call__`` of an object or class, is written ``async def``."""
    inner = partial_layers(function)[-1]
    call = inner if inspect.isroutine(inner) else getattr(inner, "__call__", inner)  # noqa: B004
    return inspect.iscoroutinefunction(call)


def partial_layers(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """A function, followed by the functions inside its ``functools.partial`` layers."""
    layers = [function]
    while isinstance(layers[-1], functools.partial):
        layers.append(layers[-1].func)
    return layers


def own_parameter(function: Callable[..., Any]) -> str | None:
    """The parameter that takes the object itself in a call by name, as ``self`` does: no other value can have its name.
    None for functions, classes, and methods that take the object by position only.

    >>> own_parameter(Calls().submit), own_parameter(pow)
    ('self', None)
    """
    inner = partial_layers(function)[-1]
    if inspect.isclass(inner) or (inspect.isroutine(inner) and not inspect.ismethod(inner)):
        return None
    method = inner.__func__ if inspect.ismethod(inner) else type(inner).__call__
    try:
        first = next(iter(inspect.signature(method).parameters.values()), None)
    except (TypeError, ValueError):  # written in C
        return None
    return first.name if first is not None and first.kind is first.POSITIONAL_OR_KEYWORD else None


def run_on_loop(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run a coroutine on the event loop of user functions. The loop has its own thread and lives as long as the
    process: clients and connections remain usable across rollouts, and the loop of a notebook is not touched."""
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop())


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_forever, args=[loop], name="cohort-calls", daemon=True).start()
    return loop


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop also after a function has stopped it, or a task of a function has raised what ends a loop."""
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


async def _without_exit(function: Callable[[], Awaitable[Any]]) -> Any:
    """Make a call. ``SystemExit`` and ``KeyboardInterrupt`` would end the loop and every other call on it."""
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt) as error:
        raise CallFailed(describe_error(error), traceback_of(error)) from None
