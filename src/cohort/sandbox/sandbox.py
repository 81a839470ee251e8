"""Run each program in a bubblewrap sandbox of its own, which is made for it and removed after it.

The sandbox consists of new namespaces for users, processes, mounts, network, IPC, host name and cgroups; no
capabilities; an empty read-only root with the interpreter and the system's libraries; ``/tmp`` in memory, of limited
size; a seccomp filter (``process.py``); and limits of the kernel (``inside.py``).

Limiting memory needs no cgroup: a program cannot start processes, so it can use no more than the limit of its address
space plus the size of ``/tmp``, besides records that the kernel keeps.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import os
import queue
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cohort.calls import retrieved
from cohort.errors import SandboxError
from cohort.sandbox.executor import Limits, Program, Result
from cohort.sandbox.process import START_SECONDS, installed_packages, pipe, start
from cohort.workers import make_calls, usable_cores

T = TypeVar("T")

SERVER_SECONDS = 0.2
"""Time that the server of a pair gets to end by itself after its client."""
_HELP = (
    "Install bubblewrap (the package bubblewrap of most distributions). It needs user namespaces: Ubuntu 24.04 and "
    "later allow them only to programs with an AppArmor profile (add one for bwrap, or set the sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0); user.max_user_namespaces must not be 0; Docker needs "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined. "
    "With allow_unsandboxed=True, programs run without a sandbox: with your permissions, your files and your network"
)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """An ``Executor`` whose programs run in bubblewrap sandboxes. Linux only."""

    packages: bool = False
    """Whether programs can import the installed packages, or only the standard library."""
    allow_unsandboxed: bool = False
    """Where bubblewrap does not work, run programs as ordinary processes with limits of the kernel, after a warning,
    instead of raising."""

    def check(self) -> None:
        """See ``Executor.check``."""
        self._bwrap()

    async def run(self, program: Program, limits: Limits) -> Result:
        """See ``Executor.run``."""
        bwrap = self._bwrap()
        return await _in_queue(lambda cancelled: self._run(bwrap, program, limits, cancelled))

    def run_sync(self, program: Program, limits: Limits) -> Result:
        """``run`` for callers that do not use asyncio; it does not wait in the queue."""
        return self._run(self._bwrap(), program, limits, threading.Event())

    async def run_pair(
        self, client: Program, server: Program, limits: Limits, server_limits: Limits
    ) -> tuple[Result, Result]:
        """See ``Executor.run_pair``."""
        bwrap, packages = self._bwrap(), self._packages()

        def run(cancelled: threading.Event) -> tuple[Result, Result]:
            with ExitStack() as stack:
                requests, client_writes = pipe(stack)
                answers, server_writes = pipe(stack)
                serving = start(stack, bwrap, packages, server, server_limits, cancelled, (requests, server_writes))
                asking = start(stack, bwrap, packages, client, limits, cancelled, (answers, client_writes))
                result = asking.finish(asking.started + limits.seconds, cancelled, [serving])
                return result, serving.finish(time.monotonic() + SERVER_SECONDS, cancelled)

        return await _in_queue(run)

    def _run(self, bwrap: str | None, program: Program, limits: Limits, cancelled: threading.Event) -> Result:
        with ExitStack() as stack:
            process = start(stack, bwrap, self._packages(), program, limits, cancelled)
            return process.finish(process.started + limits.seconds, cancelled)

    def _packages(self) -> list[str]:
        return installed_packages() if self.packages else []

    def _bwrap(self) -> str | None:
        """The path of bubblewrap; None if programs run without it.

        Raises:
            SandboxError: bubblewrap does not work, and ``allow_unsandboxed`` is not set.
        """
        bwrap = shutil.which("bwrap")
        problem = _problem(replace(self, allow_unsandboxed=False), bwrap)
        if problem is None:
            return bwrap
        if not self.allow_unsandboxed:
            raise SandboxError(f"there is no sandbox to run programs in: {problem}. {_HELP}.")
        _warn_once(problem)
        return None


@functools.cache
def _problem(sandbox: Sandbox, bwrap: str | None) -> str | None:
    """Why bubblewrap does not work here; None if it does. Tried once per process."""
    if not sys.platform.startswith("linux"):
        return f"bubblewrap needs Linux, and this is {sys.platform}"
    if bwrap is None:
        return "bwrap is not installed"
    try:
        result = sandbox._run(bwrap, Program("print(6 * 7)"), Limits(START_SECONDS), threading.Event())
    except SandboxError as error:
        return str(error)
    return None if result.stdout == "42\n" else f"a trial program ended with {result}"


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        f"PROGRAMS WRITTEN BY THE MODEL RUN WITHOUT A SANDBOX ({problem}): they can read and change what you can, and "
        "use the network. Only time, memory and output are limited.",
        RuntimeWarning,
        stacklevel=4,
    )


# -- the queue ---------------------------------------------------------------------------------------------------------


async def _in_queue(run: Callable[[threading.Event], T]) -> T:
    """Call a function in one of the process's threads. It gets an event that is set when the call is cancelled."""
    cancelled, future = threading.Event(), Future[T]()
    _queue(os.getpid()).put((future, run, cancelled))
    ended = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        ended.add_done_callback(retrieved)  # it raises that it was cancelled
        cancelled.set()
        future.cancel()
        await asyncio.wait([ended])
        raise


@functools.cache
def _queue(process: int) -> queue.SimpleQueue[Any]:
    """The queue of a process, with as many threads as processors. A fork of the process has a queue of its own."""
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(usable_cores()):
        arguments = (calls, operator.call)
        threading.Thread(target=make_calls, args=arguments, name=f"cohort-sandbox-{process}", daemon=True).start()
    return calls
