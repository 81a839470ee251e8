"""Worker processes that call functions and can be killed while they do.

A function that hangs, exhausts the memory or exits the interpreter takes down its worker and nothing else. A worker is
a fresh interpreter (``python -m cohort.workers``): it does not import the user's script, does not import torch by
itself, and calls each function in its main thread. Output of functions goes to the output of the parent. Processes that
a function starts end with its worker, also those in sessions of their own (on Linux).

Importable functions are sent by reference, others (lambdas, functions of a script or a notebook) by value. Functions
from files named in the settings are loaded from the source that the parent read.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import io
import multiprocessing
import os
import pickle
import queue
import reprlib
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cohort import orphans, watchdog
from cohort.plugins import file_modules, know_file_modules

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Set to 1 in a worker, so that several workers do not compete for the cores."""
LOAD_SECONDS = 600
"""Time limit for importing the module of a function."""
EXIT_SECONDS = 2.0
"""Time for a worker to exit after it has closed its connection."""
ALIVE_SECONDS = 1.0
"""How often a wait for an answer looks whether the worker lives: what it has forked may hold its connection."""
MARK = "COHORT_MARK"
"""Environment variable by which the processes of a worker are found."""
MESSAGE_LENGTH, DETAILS_LENGTH = 1000, 10_000
"""Maximum number of characters of an exception's message, and of its traceback."""

LOCKS = {type(make()): lambda _, make=make: (make, ()) for make in (threading.Lock, threading.RLock)}
"""How locks are pickled."""

EncodedFunction = tuple[int, bytes]
"""The number of a function and its pickled form, which is sent to each worker once."""


class CallFailed(Exception):  # noqa: N818 - the call failed, which is not an error of the pool
    """A call gave no result.

    Args:
        message: the reason, in one line.
        details: the traceback from where the function ran, if there is one.
        timed_out: whether the call took too long.
    """

    def __init__(self, message: str, details: str = "", *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.details = details or message
        self.timed_out = timed_out


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(contextlib.AbstractContextManager["Workers"]):
    """A pool of worker processes. They start with the first call and are replaced when they die.

    Calls start in the order of submission. One thread of this process waits for each worker.

    Args:
        count: number of processes.

    >>> with Workers(1) as workers:
    ...     print(workers.submit(pow, {"base": 2, "exp": 5, "mod": None}).result())
    32
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._encoded: dict[int, tuple[Any, EncodedFunction]] = {}
        self._lock = threading.Lock()
        self._pool: _Pool | None = None  # a closed pool is not used again

    def submit(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None = None
    ) -> Future[Any]:
        """Call ``function(**arguments)`` in a worker.

        Args:
            function, arguments: must be picklable by cloudpickle.
            timeout: seconds for the call, from when a worker starts it. None: no limit.

        Returns:
            A future of the result. Its exception is ``CallFailed`` if the call gave no result.

        Raises:
            CallFailed: the function cannot be sent to another process.
        """
        with self._lock:
            encoded = self._encode(function)
            if self._pool is None:
                self._pool = _Pool(self.count)
                self._stop = weakref.finalize(self, self._pool.stop)
            future: Future[Any] = Future()
            self._pool.calls.put((future, encoded, arguments, timeout))
        return future

    def prepare(self, function: Callable[..., Any]) -> None:
        """Check that a function can be sent to another process.

        Raises:
            CallFailed: it cannot.
        """
        with self._lock:
            self._encode(function)

    def _encode(self, function: Callable[..., Any]) -> EncodedFunction:
        if (stored := self._encoded.get(id(function))) is None:
            # The function is stored too: while it is alive, no other function gets its id.
            encoded = pickle.dumps((file_modules(), _dumps(function, "the function")))
            stored = self._encoded[id(function)] = (function, (len(self._encoded), encoded))
        return stored[1]

    def close(self) -> None:
        """Kill all workers. Unfinished calls fail. The next call starts new workers."""
        with self._lock:
            if self._pool is not None:
                self._stop()
                self._pool = None

    def __exit__(self, *_: object) -> None:
        self.close()


class _Pool:
    """Worker processes, and the threads that wait for them."""

    def __init__(self, count: int) -> None:
        self.calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._mark = orphans.mark()
        self._processes = [_Process(f"{self._mark}{number}-") for number in range(count)]
        for process in self._processes:
            threading.Thread(target=make_calls, args=(self.calls, process.call), daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                future, *_ = self.calls.get_nowait()
                if future.set_running_or_notify_cancel():
                    future.set_exception(CallFailed("was given up: the workers were stopped"))
        for process in self._processes:
            self.calls.put(None)
            process.kill()
        for process in self._processes:
            process.end()
        orphans.kill_marked(self._mark)


def close_at_exit(one: Any) -> None:
    """Close an object that is alive when the interpreter exits: before workers stop, and what is registered later is
    closed first."""
    weakref.finalize(one, bool)  # all finalizers are one exit function, registered with the first: now at the latest
    found = weakref.ref(one)
    atexit.register(lambda: (alive := found()) is not None and alive.close())


def make_calls(calls: queue.SimpleQueue[Any], call: Callable[..., Any]) -> None:
    """The work of a thread: ``call(*arguments)`` for each ``(future, *arguments)`` in a queue, until it holds None."""
    while (item := calls.get()) is not None:
        future, *arguments = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)


class _Process:
    """One worker process, as seen by its parent.

    Args:
        mark: of the process and all that it starts.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._loaded: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()

    def call(self, function: EncodedFunction, arguments: Mapping[str, Any], timeout: float | None) -> Any:
        sent = _dumps(dict(arguments), "its arguments")
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # the process died after its last call, so this call is not to blame
        number, encoded = function
        if number not in self._loaded:  # what is imported to load them does not count towards the timeout of the call
            self._request((number, encoded, sent), LOAD_SECONDS)
            self._loaded.add(number)
            with self._lock:
                if self._process is not None:
                    watchdog.dumping.add(self._process.pid)
        return pickle.loads(self._request((number, None, sent), timeout))

    def _request(self, message: tuple[int, bytes | None, bytes], timeout: float | None) -> bytes:
        """Send a message to the worker and wait for its answer."""
        connection = self._connect()
        try:
            connection.send_bytes(pickle.dumps(message))
            if not self._answers(connection, timeout):
                self.stop()
                raise CallFailed(f"took more than {timeout:g} s", timed_out=True)
            succeeded, *answer = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            code = self.stop(EXIT_SECONDS)
            raise CallFailed(f"lost its worker process ({_exit_reason(code)})") from None
        if not succeeded:
            raise CallFailed(*answer)
        result: bytes = answer[0]
        return result

    def _answers(self, connection: Connection, timeout: float | None) -> bool:
        """Wait until there is an answer, for at most the timeout. Raises EOFError if the worker ends without one."""
        process, start = self._process, time.monotonic()
        left = ALIVE_SECONDS if timeout is None else timeout
        while not connection.poll(min(left, ALIVE_SECONDS)):
            if process is None or (process.poll() is not None and not connection.poll(0)):
                raise EOFError
            if timeout is not None and (left := start + timeout - time.monotonic()) <= 0:
                return False
        return True

    def _connect(self) -> Connection:
        """The connection to the process, which is started if it does not run."""
        with self._lock:
            if self._closed:
                raise CallFailed("was given up: the workers were stopped")
            if self._connection is None:
                path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # noqa: PTH100
                self._connection, theirs = multiprocessing.Pipe()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "cohort.workers", str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | dict.fromkeys(THREAD_VARIABLES, "1") | {"PYTHONPATH": path, MARK: self._mark},
                    start_new_session=True,  # Ctrl-C reaches the parent only; child processes are killed as a group
                )
                theirs.close()
            return self._connection

    def kill(self) -> None:
        """Kill the process and its group without a wait, and never start one again. Call ``end`` afterwards."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill_group(self._process)

    def stop(self, wait: float = 0.0) -> int | None:
        """Kill the process and all processes that it has started, and return its exit code. ``wait``: seconds for the
        process to exit by itself."""
        code = self.end(wait)
        if code is not None and not self._closed:  # else the pool does it for all
            orphans.kill_marked(self._mark)
        return code

    def end(self, wait: float = 0.0) -> int | None:
        """Kill the process and its group. Returns its exit code; None: there is no process."""
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
            self._loaded = set()
            if process is None:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
            _kill_group(process)
            code = process.wait()
            watchdog.dumping.discard(process.pid)
            if connection is not None:
                connection.close()
            return code


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    return f"exit code {code}"


def _dumps(value: Any, what: str) -> bytes:
    try:
        return _pickled(value)
    except Exception as error:
        raise CallFailed(f"{what} cannot be sent to another process: {error}") from error


def _pickled(value: Any) -> bytes:
    """A value as cloudpickle writes it: what a script or a notebook defines by value, a class always as the same one. A
    lock is another lock in the other process."""
    _pickler()(file := io.BytesIO()).dump(value)
    return file.getvalue()


@functools.cache
def _pickler() -> Any:
    import cloudpickle

    table = ChainMap(LOCKS, cloudpickle.Pickler.dispatch_table)
    return type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": table})


def describe_error(error: BaseException) -> str:
    """An exception in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except BaseException:  # __str__ of a user's class
        text = "(no message)"
    return f"raised {type(error).__name__}: {shortened(text, MESSAGE_LENGTH)}{location}"


def traceback_of(error: BaseException) -> str:
    """The traceback of an exception, as Python prints it."""
    return shortened("".join(traceback.format_exception(error)).rstrip(), DETAILS_LENGTH)


def shown(value: Any, length: int = 60) -> str:
    """The representation of a user's value for a message. Never fails, and is fast for large containers."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = length
    try:
        return brief.repr(value)[:length]
    except BaseException:  # __repr__ of a user's class
        return f"<{type(value).__name__}>"


def shortened(text: str, length: int) -> str:
    """A text without its middle if it is longer than this.

    >>> shortened("abcdefghij", 7)
    'ab [6 characters left out] ij'
    """
    if len(text) <= length:
        return text
    kept = length // 3
    return f"{text[:kept]} [{len(text) - 2 * kept} characters left out] {text[-kept:]}"


def _work(connection: Connection, parent: int) -> None:
    """The main loop of a worker: load or call a function for each message, and send an answer.

    A message that loads a function also has arguments of it, so that their modules are imported.
    """
    orphans.end_with(parent)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):  # which schedulers send to all
        signal.signal(number, watchdog.ignored)
    faulthandler.register(signal.SIGQUIT)  # the parent sends it on (``watchdog``)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    own = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a function prints is no reason to fail
            stream.reconfigure(errors="backslashreplace")

    def listen() -> None:  # in a thread, so that a busy worker notices the end of its parent
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages.put(connection.recv_bytes())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    functions: dict[int, Callable[..., Any]] = {}
    while True:
        number, encoded, arguments = pickle.loads(messages.get())
        try:
            if encoded is not None:
                files, body = pickle.loads(encoded)
                know_file_modules(files)
                functions[number] = pickle.loads(body)
            given, answer = pickle.loads(arguments), b""
            if encoded is None:
                answer = _pickled(functions[number](**given))
            answer = pickle.dumps((True, answer))
        except BaseException as error:
            answer = pickle.dumps((False, describe_error(error), traceback_of(error)))
        if os.getpid() != own:  # a process that the function has forked, and that has come back from it as well
            os._exit(0)
        connection.send_bytes(answer)


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])), parent=int(sys.argv[2]))
