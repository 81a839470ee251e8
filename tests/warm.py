"""Processes that start at once: forked from one that has imported torch, transformers and Cohort.

``python -m cohort`` takes seconds of imports. ``begin`` has the same from a server, which the first test that needs it
starts, and all workers of the session share: arguments, working directory and environment are given, and standard
output and error are pipes. The process ends as any interpreter does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOADED = (
    *("torch", "transformers", "transformers.models.llama.modeling_llama", "cohort.trainer", "cohort.cli.main"),
    *("cohort.generate.run", "cohort.evaluation", "cohort.train.signals", "pyarrow.parquet", "torch.distributed.fsdp"),
    *("bitsandbytes", "pandas", "peft"),  # a run imports them where they are installed, for two seconds
)

SINGLE_THREADED = {
    **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    **{"TOKENIZERS_PARALLELISM": "false"},
}
"""A process with threads cannot be forked safely."""
LIKE_A_COMMAND = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
"""``cohort launch`` sets it before it imports torch, which reads it once."""


def address() -> Path:
    """The server's socket; its output is beside it, in ``warm.log``."""
    return Path(os.environ["COHORT_STATE"]) / "warm.socket"


class Process:
    """What tests use of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket, stdout: Any, stderr: Any) -> None:
        self._connection, self.stdout, self.stderr = connection, stdout, stderr
        self._lines = connection.makefile()
        self.pid: int = json.loads(self._lines.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
            self.returncode = json.loads(self._lines.readline())
            self._lines.close()
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """As of ``Popen``."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As of ``Popen``."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output and errors; each has to fit into a pipe."""
        self.wait(timeout)
        texts = [stream.read() if not stream.closed else "" for stream in (self.stdout, self.stderr)]
        self.stdout.close()
        self.stderr.close()
        return texts[0], texts[1]


def begin(*arguments: str, folder: Path = ROOT, module: str = "cohort.cli", **variables: str | None) -> Process:
    """Start ``module.main`` with arguments, as ``python -m cohort`` starts ``cohort.cli.main``.

    Args:
        arguments: its arguments, in ``sys.argv``.
        folder: the working directory.
        module: the module that has a ``main``, which returns the exit code.
        variables: changes of the environment; None removes one.
    """
    start_server()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address()))
    ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
    request = {"arguments": arguments, "folder": str(folder), "module": module, "variables": variables}
    socket.send_fds(connection, [json.dumps(request).encode() + b"\n"], list(theirs))
    for descriptor in theirs:
        os.close(descriptor)
    return Process(connection, *(os.fdopen(descriptor) for descriptor in ours))


def start_server() -> None:
    """Start the server of this session, unless it runs."""
    with (address().parent / "warm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address().exists():
            environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
            path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
            log = address().with_suffix(".log")
            with log.open("w") as output:
                server = subprocess.Popen(
                    [sys.executable, "-m", "tests.warm"],
                    cwd=ROOT,
                    env=environment | {"PYTHONPATH": path} | SINGLE_THREADED | LIKE_A_COMMAND,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            while not address().exists():
                assert server.poll() is None, log.read_text()
                time.sleep(0.02)
            server.returncode = 0  # it is left to itself: it ends with the session's folder


def _serve() -> Callable[[], int]:
    """Fork a process for each connection, until the session's folder or its process has gone. Returns in the forked
    process, with what it is to run."""
    session = int(address().parent.name.split("-")[2])
    for name in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    os.fsync = os.fstat  # type: ignore[assignment]  # as in conftest.py
    gc.collect()
    gc.freeze()  # forked processes share the memory
    listening = socket.socket(socket.AF_UNIX)
    part = address().with_suffix(".part")
    listening.bind(str(part))
    listening.listen()
    part.rename(address())
    children: dict[int, socket.socket] = {}
    while address().exists() and _is_running(session):
        if select.select([listening], [], [], 0.02 if children else 0.5)[0]:
            connection, _ = listening.accept()
            if (child := os.fork()) == 0:
                listening.close()
                return _become(connection)
            connection.sendall(b"%d\n" % child)
            children[child] = connection
        while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            connection = children.pop(ended[0])
            with contextlib.suppress(OSError):
                connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
            connection.close()
    os._exit(0)


def _is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def _become(connection: socket.socket) -> Callable[[], int]:
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    connection.close()
    request = json.loads(data)
    for descriptor, number in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(request["folder"])
    for name, value in request["variables"].items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    sys.argv = [request["module"], *request["arguments"]]
    main: Callable[[], int] = importlib.import_module(request["module"]).main
    return main


def _end(code: int) -> None:
    """End the process as the interpreter does, but do not take down all that was imported, which takes a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        traceback.print_exc()
        code = 120
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main, code = _serve(), 1
    try:
        code = main()
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except BaseException:
        traceback.print_exc()
    _end(code)
