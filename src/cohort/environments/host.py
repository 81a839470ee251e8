"""Where tools and environments run: in this process, on the event loop, or in worker processes that can be killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cohort.calls import Calls, Settled, as_failure, check_loop, failure_of, is_async
from cohort.config import EnvironmentConfig
from cohort.environments.calls import ParsedTurn
from cohort.environments.contract import Answer, Ended, EpisodeFailed, ToolCall
from cohort.environments.shapes import Shape, call_tool, choose, error_text, perform, run_plain
from cohort.environments.tools import Tool, Toolbox
from cohort.errors import ConfigError, EpisodeError
from cohort.types import Prompt
from cohort.workers import CallFailed, Workers, close_at_exit

log = logging.getLogger("cohort.environments")
CLOSE_SECONDS = 10.0
"""Time for the environments that are open at the end of a run to close."""

_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class _Live:
    """An episode under way."""

    tools: Toolbox
    shape: Shape | None
    number: int
    home: Workers | None = None
    """The one worker process in which the environment lives. None: it lives on the event loop or in this thread."""
    last: Future[Any] = field(default_factory=lambda: Settled(None))
    """The last operation on the environment. The next one begins when it has ended."""
    running: set[Future[Any]] = field(default_factory=set)
    """Calls on the event loop and in workers."""
    failed: bool = False
    abandoned: bool = False
    """Whether it ended before the answer to its last turn was there, so that what was asked is no longer wanted."""


class Host:
    """Runs the tools and environments of a run.

    All methods are called from one thread. The future of what runs in this thread is done when a method returns; other
    futures are set by other threads. Their exception is ``EpisodeFailed`` when the episode is unusable; also then,
    ``end`` closes the environment.

    Args:
        toolbox: the tools of the settings.
        shapes: from ``find_environments``.
        settings: ``[environment]`` of the settings.

    Raises:
        ConfigError: a tool and a method of an environment have the same name, or one cannot be sent to another process.
    """

    def __init__(self, toolbox: Toolbox, shapes: Mapping[str, Shape], settings: EnvironmentConfig) -> None:
        self._toolbox, self._shapes, self._settings = toolbox, shapes, settings
        self._isolated = bool(settings.tool_workers or settings.call_timeout)  # only a process can be stopped
        self._calls = Calls(settings.tool_workers, settings.max_environments)
        self._homes = [Workers(1) for _ in range(self._calls.workers.count)]
        self._callers = {name: _runner(tool.is_async, call_tool, tool.function) for name, tool in toolbox.items()}
        self._performers: dict[Shape, partial[Any]] = {}
        self._slots: dict[Shape, _Slots] = {}
        self._boxes: dict[Shape | None, Toolbox] = {None: toolbox}
        for shape in shapes.values():
            self._performers[shape] = _runner(shape.is_async, perform, shape.factory, shape.steps)
            self._slots[shape] = _Slots(settings.max_environments)
            self._boxes[shape] = Toolbox([*toolbox.values(), *shape.tools.values()])
        performers = ((shape.name, function) for shape, function in self._performers.items())
        for name, function in (*self._callers.items(), *performers):
            if self._isolated and not is_async(function):
                try:
                    self._calls.workers.prepare(function)
                except CallFailed as error:
                    raise ConfigError(
                        f"{name} cannot run in a worker process: {error}. Define it in a module, or set "
                        "environment.tool_workers to 0 and leave environment.call_timeout unset"
                    ) from error
        self._live: dict[Hashable, _Live] = {}
        self._closing: set[Future[Ended]] = set()
        self._open = False
        close_at_exit(self)  # after the steps of a run, which begin later

    def tools(self, row: Mapping[str, Any]) -> Toolbox:
        """The tools that the policy can call in an episode of a row: those of the settings that the row allows, and the
        methods of its environment.

        Raises:
            DataError: the row names a tool or an environment that does not exist.
        """
        shape, names = choose(self._shapes, row), row.get("tools")
        if names is None:
            return self._boxes[shape]
        allowed = self._toolbox.subset(json.loads(names) if isinstance(names, str) else names)
        return Toolbox([*allowed.values(), *shape.tools.values()]) if shape else allowed

    def begin(self, episode: Hashable, prompt: Prompt, seed: int) -> Future[Answer]:
        """Make the environment of an episode and reset it, as soon as fewer than ``max_environments`` exist.

        Args:
            episode: identifies the episode from here to ``end``.
            prompt: the row.
            seed: for ``reset``, if it has a parameter of that name.

        Returns:
            The first observation; without an environment, an empty answer.

        Raises:
            DataError: the row names a tool or an environment that does not exist, or lacks a column.
        """
        assert episode not in self._live, f"episode {episode} has begun already"
        self._open = True
        row, shape = prompt.columns, choose(self._shapes, prompt.columns)
        live = _Live(self.tools(row), shape, next(_numbers))
        if shape is None:
            self._live[episode] = live
            return Settled(Answer())
        if "" not in self._shapes:
            row = {name: value for name, value in row.items() if name != "environment"}
        arguments = shape.arguments(row, seed)
        live.home, live.last = self._home(shape), self._slots[shape].acquire()
        self._live[episode] = live
        return self._ask(live, "reset", arguments, seed)

    def answer(self, episode: Hashable, turn: ParsedTurn) -> Future[Answer]:
        """Make the calls of a turn, or give its text to the environment.

        Returns:
            The results in the order of the calls, or the next observation. An empty answer if the turn has no calls,
            and the environment has no ``step``.
        """
        live = self._live[episode]
        if live.shape and live.shape.steps and not (turn.calls and live.tools):
            return self._ask(live, "step", {"text": turn.content})
        return _gather([self._call(live, call) for call in turn.calls], partial(_as_answer, turn))

    def end(self, episode: Hashable) -> Future[Ended]:
        """Ask the environment for its reward and state, and close it. Calls that still run are cancelled; the episode
        then has neither reward nor state, nor has one that failed or never began."""
        live = self._live.pop(episode, None)
        if live is None:
            return Settled(Ended())
        live.abandoned |= bool(live.running) or not live.last.done()
        for call in list(live.running):
            call.cancel()
        if live.shape is None:
            return Settled(Ended())
        finished = Settled(Ended()) if live.failed or live.abandoned else self._ask(live, "get_reward")
        closed = self._ask(live, "close")
        slots = self._slots[live.shape]
        closed.add_done_callback(lambda _: slots.release())
        ended = _gather([finished, closed], lambda done: done[0])
        self._closing.add(ended)
        ended.add_done_callback(self._closing.discard)
        return ended

    def close(self) -> None:
        """End all episodes, and stop the worker processes, which the next episode starts again. Environments have
        ``CLOSE_SECONDS`` to close."""
        try:
            for live in self._live.values():
                live.abandoned = True
            for episode in list(self._live):
                self.end(episode)
            wait(list(self._closing), CLOSE_SECONDS)
        finally:
            self._open = False  # before what fails now is repeated
            self._calls.close()
            for home in self._homes:
                home.close()

    def check(self) -> None:
        """Check that the event loop reacts within ``call_timeout``; for when nothing has been answered for that long.

        Raises:
            EpisodeError: it does not, because an async tool or a method of an async environment blocks it.
        """
        everything: list[Shape | Tool] = [*self._toolbox.values(), *self._shapes.values()]
        names = [one.name for one in everything if one.is_async]
        if names and self._settings.call_timeout:
            try:
                check_loop(self._settings.call_timeout)
            except CallFailed as failure:
                raise EpisodeError(f"the async tools and environments ({', '.join(names)}) {failure}") from None

    def describe(self) -> str:
        """Where tools and environments run, and their time limits: one line for each."""
        lines = [
            f"environment {shape.name}{f' ({name})' if name else ''}: {self._where(shape)}"
            for name, shape in self._shapes.items()
        ]
        return "\n".join([*lines, *(f"tool {tool.name}: {self._where(tool)}" for tool in self._toolbox.values())])

    def _home(self, shape: Shape) -> Workers | None:
        """Where a new environment is to live: of several workers, in the one with the fewest."""
        if shape.is_async or not self._isolated:
            return None
        inhabited = Counter(id(live.home) for live in self._live.values())
        return min(self._homes, key=lambda home: inhabited[id(home)])

    def _where(self, one: Shape | Tool) -> str:
        limit = f", at most {self._settings.call_timeout:g} s a call" if self._settings.call_timeout else ""
        if one.is_async:
            return f"async, at most {self._settings.max_environments} at a time{limit}"
        count = len(self._homes)
        return f"in {count} worker process{'es' if count > 1 else ''}{limit}" if self._isolated else "in this process"

    def _call(self, live: _Live, call: ToolCall) -> Future[tuple[str, bool]]:
        """Make a call. The result is what the policy reads, and whether it is an error."""
        if problem := live.tools.problem(call):
            return Settled((error_text(problem), True))
        if live.shape and call.name in live.shape.tools:
            return self._ask(live, call.name, call.arguments)
        outcome: Future[tuple[str, bool]] = _promise()
        left = iter(range(self._settings.call_retries))

        def attempt() -> None:
            with _errors_to(outcome):
                self._run(live, None, self._callers[call.name], {"arguments": call.arguments}).add_done_callback(finish)

        def finish(done: Future[Any]) -> None:
            failure = _failure(done)
            if failure is None and isinstance(done.result(), EpisodeFailed):
                live.failed = True
                outcome.set_exception(done.result())
            elif failure is None:
                outcome.set_result(done.result())
            elif live.abandoned or next(left, None) is None:
                outcome.set_result((error_text(str(failure)), True))
            else:
                attempt()

        attempt()
        return outcome

    def _ask(
        self, live: _Live, method: str, given: Mapping[str, Any] | None = None, seed: int | None = None
    ) -> Future[Any]:
        """Call a method of an environment, as ``perform`` does, when all earlier calls have ended."""
        assert live.shape is not None
        performer, previous = self._performers[live.shape], live.last
        arguments = {"number": live.number, "method": method, "given": given or {}, "seed": seed}

        def begin() -> Future[Any]:
            if live.abandoned and method != "close":
                raise EpisodeFailed("the episode was given up")
            return self._run(live, live.home, performer, arguments)

        if previous.done() and self._is_here(performer):
            live.last = Settled.of(lambda: self._outcome(live, method, begin()))
            return live.last
        live.last = outcome = _promise()

        def start(_: Future[Any]) -> None:
            with _errors_to(outcome):
                begin().add_done_callback(finish)

        def finish(done: Future[Any]) -> None:
            with _errors_to(outcome):
                outcome.set_result(self._outcome(live, method, done))

        previous.add_done_callback(start)
        return outcome

    def _outcome(self, live: _Live, method: str, done: Future[Any]) -> Any:
        """What a method of an environment gave. Raises ``EpisodeFailed`` if the environment cannot go on."""
        assert live.shape is not None
        failure = _failure(done)
        value = done.result() if failure is None else EpisodeFailed(f"{live.shape.name}.{method} {failure}")
        if method == "close":
            if value:  # never a reason to lose an episode
                log.warning("%s", value)
            return None
        if not isinstance(value, EpisodeFailed):
            return value
        if failure and method in live.shape.tools and live.home is None:  # cancelled; the environment lives on
            return error_text(str(value)), True
        live.failed = True
        raise value

    def _is_here(self, function: partial[Any]) -> bool:
        """Whether a function runs in this thread."""
        return not self._isolated and function.func is run_plain

    def _run(
        self, live: _Live, home: Workers | None, function: partial[Any], arguments: Mapping[str, Any]
    ) -> Future[Any]:
        if not self._open:
            raise EpisodeFailed("the workers were stopped")
        limit = self._settings.call_timeout
        if home is None:
            call = self._calls.submit(function, arguments, limit, here=self._is_here(function))
        else:
            call = home.submit(function, arguments, limit)
        if not call.done():
            live.running.add(call)
            call.add_done_callback(live.running.discard)
        return call


class _Slots:
    """A number of environments that may exist at a time."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def acquire(self) -> Future[None]:
        """A future that is done when there is a free slot, in the order of calls."""
        with self._lock:
            if self._free:
                self._free -= 1
                return Settled(None)
            self._waiting.append(_promise())
            return self._waiting[-1]

    def release(self) -> None:
        """Free a slot, for the one who waits longest."""
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            granted = self._waiting.popleft()
        granted.set_result(None)


def _runner(is_async: bool, coroutine: Callable[..., Any], *arguments: Any) -> partial[Any]:
    """A function that runs a coroutine function of ``shapes``, itself ``async`` or plain."""
    return partial(coroutine, *arguments) if is_async else partial(run_plain, coroutine, *arguments)


def _promise() -> Future[Any]:
    """A future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@contextlib.contextmanager
def _errors_to(outcome: Future[Any]) -> Iterator[None]:
    """Give an error to a future. Without that, one in a callback of another future would be lost."""
    try:
        yield
    except BaseException as error:
        outcome.set_exception(error)
        if not isinstance(error, Exception):
            raise


def _failure(done: Future[Any]) -> CallFailed | None:
    """Why a call gave no result. None: it gave one."""
    error = failure_of(done)
    return None if error is None else as_failure(error)


def _gather(futures: Sequence[Future[Any]], join: Callable[[list[Any]], Any]) -> Future[Any]:
    """A future of what ``join`` makes of the results, when all futures are done."""
    if all(future.done() for future in futures):
        return Settled.of(lambda: join([future.result() for future in futures]))
    gathered, lock, left = _promise(), threading.Lock(), [len(futures)]

    def count(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            if left[0] > 0:
                return
        with _errors_to(gathered):
            gathered.set_result(join([future.result() for future in futures]))

    for future in futures:
        future.add_done_callback(count)
    return gathered


def _as_answer(turn: ParsedTurn, results: Sequence[tuple[str, bool]]) -> Answer:
    messages = turn.answers([text for text, _ in results])
    return Answer(messages, calls=len(results), failed_calls=sum(failed for _, failed in results))
