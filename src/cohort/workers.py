"""Processes that call functions and can be killed while they do.

A function that hangs, eats the memory or ends the interpreter takes its process with it and nothing else. A worker is a
fresh interpreter (``python -m cohort.workers``): it does not run the user's script again, imports no torch of its own
accord, and calls each function in its main thread. What functions print goes where the parent's output goes.

Functions travel by reference where they can be imported, by value where they cannot (lambdas, functions of a script or
a notebook); those of files named in the settings are loaded from the same file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cohort.plugins import file_modules, know_file_modules

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Set to 1 in a worker: several processes with several threads each would wait for one another."""


LOAD_SECONDS = 600
"""What importing a function's module may take."""
EXIT_SECONDS = 2.0
"""What a worker that hung up may take to end."""


class CallFailed(Exception):  # noqa: N818 - said of the call, not of the pool
    """A call in a worker did not give a result.

    Args:
        message: what happened, in one line.
        details: the traceback in the worker, if there is one.
        timed_out: the worker was killed because the call took too long.
    """

    def __init__(self, message: str, details: str = "", *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.details = details or message
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class _Call:
    function: tuple[int, bytes]
    """Its number, and what it is sent as: once to each process."""
    arguments: Mapping[str, Any]
    timeout: float | None
    future: Future[Any]


class Workers:
    """So many processes, started when they are first needed and again when one was killed.

    Calls are taken in the order they were submitted. Threads of this process wait for the workers, one for each.

    Args:
        count: processes at a time.

    >>> with Workers(1) as workers:
    ...     print(workers.submit(pow, {"base": 2, "exp": 5, "mod": None}).result())
    32
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._encoded: dict[int, tuple[Any, tuple[int, bytes]]] = {}
        self._lock = threading.Lock()
        self._pools: list[_Pool] = []  # one, or none while nothing is needed
        weakref.finalize(self, _stop_all, self._pools)

    def submit(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], timeout: float | None = None
    ) -> Future[Any]:
        """Call ``function(**arguments)`` in a worker.

        Args:
            function, arguments: must be picklable, by value if need be.
            timeout: seconds the call may take, counted from when a worker takes it; None: any.

        Returns:
            A future of the result, whose exception is a ``CallFailed`` where there is none.

        Raises:
            CallFailed: the function cannot be sent to another process.
        """
        with self._lock:
            kept = self._encoded.get(id(function))
            if kept is None:  # the function is kept beside its code, so that no other one can get its id
                kept = self._encoded[id(function)] = (function, (len(self._encoded), _encode(function)))
            if not self._pools:
                self._pools.append(_Pool(self.count))
            call = _Call(kept[1], arguments, timeout, Future())
            self._pools[0].calls.put(call)
        return call.future

    def close(self) -> None:
        """Kill all workers. Calls that have not ended fail; the next one starts workers afresh."""
        with self._lock:
            _stop_all(self._pools)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stop_all(pools: list[_Pool]) -> None:
    while pools:
        pools.pop().stop()


class _Pool:
    """Processes, and the threads that wait for them."""

    def __init__(self, count: int) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._processes = [_Process() for _ in range(count)]
        for process in self._processes:
            threading.Thread(target=_serve, args=(self.calls, process), daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self.calls.get_nowait()) is not None and call.future.set_running_or_notify_cancel():
                    call.future.set_exception(CallFailed("the workers were stopped"))
        for process in self._processes:
            self.calls.put(None)
            process.stop(for_good=True)


def _serve(calls: queue.SimpleQueue[_Call | None], process: _Process) -> None:
    """What a thread does: hand its process one call after another."""
    while (call := calls.get()) is not None:
        if not call.future.set_running_or_notify_cancel():
            continue
        try:
            call.future.set_result(process.call(call.function, call.arguments, call.timeout))
        except BaseException as error:
            call.future.set_exception(error)


class _Process:
    """One worker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._known: set[int] = set()
        self._closed = False
        self._lock = threading.Lock()

    def call(self, function: tuple[int, bytes], arguments: Mapping[str, Any], timeout: float | None) -> Any:
        import dill

        try:
            sent = dill.dumps(dict(arguments), recurse=True)
        except Exception as error:
            raise CallFailed(f"its arguments cannot be sent to another process: {error}") from error
        if self._process is not None and self._process.poll() is not None:
            self.stop()  # it died since its last call, which is not this one's fault
        number, encoded = function
        if number not in self._known:  # what its module imports is not the call's time
            self._ask((number, encoded, None), LOAD_SECONDS)
            self._known.add(number)
        return dill.loads(self._ask((number, None, sent), timeout))

    def _ask(self, message: tuple[int, bytes | None, bytes | None], timeout: float | None) -> bytes:
        """The worker's answer to a message."""
        connection = self._running()
        try:
            connection.send_bytes(pickle.dumps(message))
            if not connection.poll(timeout):
                self.stop()
                raise CallFailed(f"took more than {timeout:g} s", timed_out=True)
            succeeded, *rest = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            code = self.stop(wait=EXIT_SECONDS)
            raise CallFailed(f"its worker process died ({_how(code)})") from None
        if not succeeded:
            raise CallFailed(*rest)
        answer: bytes = rest[0]
        return answer

    def _running(self) -> Connection:
        with self._lock:
            if self._closed:
                raise CallFailed("the workers were stopped")
            if self._connection is None:
                ours, theirs = _pipe()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "cohort.workers", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | dict.fromkeys(THREAD_VARIABLES, "1") | _python_path(),
                    start_new_session=True,  # Ctrl-C is the parent's; and what a function has started dies with it
                )
                theirs.close()
                self._connection = ours
            return self._connection

    def stop(self, *, for_good: bool = False, wait: float = 0.0) -> int | None:
        """Kill the process and all that it has started; its exit code.

        Args:
            for_good: start none any more.
            wait: seconds that it gets to end by itself.
        """
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
            self._known = set()
            self._closed = self._closed or for_good
            if process is None:
                return None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if connection is not None:
                connection.close()
            return code


def _pipe() -> tuple[Connection, Connection]:
    from multiprocessing import Pipe

    ours, theirs = Pipe()
    return ours, theirs


def _python_path() -> dict[str, str]:
    """The parent's search path, so that a worker finds the same modules."""
    return {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}  # noqa: PTH100


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    return f"exit code {code}"


def _encode(function: Callable[..., Any]) -> bytes:
    import dill

    try:
        body = dill.dumps(function, recurse=True)
    except Exception as error:
        raise CallFailed(f"the function cannot be sent to another process: {error}") from error
    return pickle.dumps((file_modules(), body))


def _decode(encoded: bytes) -> Callable[..., Any]:
    import dill

    files, body = pickle.loads(encoded)
    know_file_modules(files)
    function: Callable[..., Any] = dill.loads(body)
    return function


def said_of(error: BaseException) -> str:
    """An exception in one line, with the place it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        text = str(error)
    except Exception:  # a user's class may fail at that too
        text = "(it has no text)"
    return f"raised {type(error).__name__}: {text}{place}"


def _die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends: a function that never lets go of the
    interpreter would outlive it otherwise. On Linux; elsewhere such a function does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _work(connection: Connection) -> None:
    """The worker's whole life: a message, a function loaded or called, an answer."""
    import dill

    _die_with_parent()
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:  # apart, so that a worker ends with its parent while it is busy
        with contextlib.suppress(EOFError, OSError):
            while True:
                messages.put(connection.recv_bytes())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    functions: dict[int, Callable[..., Any]] = {}
    while True:
        number, encoded, arguments = pickle.loads(messages.get())
        try:
            if arguments is None:
                functions[number], answer = _decode(encoded), b""
            else:
                answer = dill.dumps(functions[number](**dill.loads(arguments)), recurse=True)
            answer = pickle.dumps((True, answer))
        except Exception as error:
            answer = pickle.dumps((False, said_of(error), traceback.format_exc().rstrip()))
        connection.send_bytes(answer)


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
