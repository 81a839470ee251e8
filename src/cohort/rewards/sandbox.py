"""Run Python programs that nobody has read: each in a sandbox of its own, made for it and gone after it.

The sandbox is bubblewrap's (``bwrap``): new namespaces for users, processes, mounts, network, IPC, host name and
cgroups; no capabilities; an empty read-only root with the interpreter and the system's libraries in it; ``/tmp`` in
memory, of limited size, or none; a filter of system calls (``rewards.syscalls``) and limits of the kernel. What that
stops and what it does not is said in ``docs/sandbox.md``.

Memory needs no cgroup: a program cannot start processes, so the limit of its address space, plus what ``/tmp`` may
hold, is the limit of all it uses but for the kernel's own records.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import sys
import threading
import warnings
import weakref
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from cohort.errors import CohortError, RewardError
from cohort.rewards.launch import START_SECONDS, Result, started

T = TypeVar("T")

_HELP = (
    "Install bubblewrap (the package bubblewrap of most distributions). It needs user namespaces: Ubuntu 24.04 and "
    "later give them to programs with an AppArmor profile only (add one for bwrap, or set the sysctl "
    "kernel.apparmor_restrict_unprivileged_userns=0); user.max_user_namespaces must not be 0; Docker needs "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined. "
    "allow_unsandboxed=True runs programs all the same: with your rights, your files and your network"
)


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What programs may use. One object serves any number of programs, each in a sandbox of its own.

    Raises:
        RewardError: a limit is out of range.

    >>> Sandbox(seconds=0)
    Traceback (most recent call last):
    cohort.errors.RewardError: the sandbox's seconds must be above 0, got 0
    """

    seconds: float = 10.0
    """Wall-clock time of a program. Processor time is limited to a second more."""
    memory: int = 1024
    """MB of address space of a program, the interpreter's own 15 included; more is a MemoryError there."""
    files: int = 64
    """MB that /tmp, its working folder, can hold; they are memory too. 0: nothing can be written. Above 0 the number of
    empty files is not limited, and each takes a kilobyte of the kernel's memory."""
    output: int = 1 << 20
    """Bytes of standard output, and of standard error."""
    threads: int = 32
    """Its threads. Kernels before 5.14 count all tasks of the user instead."""
    packages: bool = False
    """Whether programs can import the installed packages, not only the standard library."""
    python: str | None = None
    """The interpreter. None: the one that runs this."""
    allow_unsandboxed: bool = False
    """Without bubblewrap, run programs with limits of the kernel alone, as ordinary processes, in place of an error."""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "output", "threads"):
            if not getattr(self, name) > 0:
                raise RewardError(f"the sandbox's {name} must be above 0, got {getattr(self, name)!r}")
        if self.files < 0:
            raise RewardError(f"the sandbox's files must be 0 or above, got {self.files!r}")

    async def run(self, source: str, stdin: str = "") -> Result:
        """Run a program to its end.

        As many run at a time as there are processors; the others wait, and their time does not count.

        Args:
            source: the program's text.
            stdin: what it reads from its standard input.

        Raises:
            RewardError: there is no sandbox (``check``).
            SandboxError: this one could not be made, or was killed. Never because of what the program did.
        """
        bwrap = bubblewrap(self)
        async with slot(), started(self, bwrap, "run", source, stdin=stdin) as program:
            return await program.end(self.seconds)

    def run_sync(self, source: str, stdin: str = "") -> Result:
        """``run``, for callers that do not await."""
        return in_thread(self.run(source, stdin))

    def check(self) -> None:
        """See that programs can be run, so that it is known before anything expensive starts.

        Raises:
            RewardError: there is no working bubblewrap here, and ``allow_unsandboxed`` is not set.
        """
        bubblewrap(self)


async def run_program(source: str, stdin: str = "", **settings: Any) -> Result:
    """Run one program: ``Sandbox(**settings).run(source, stdin)``."""
    return await Sandbox(**settings).run(source, stdin)


def in_thread(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, whether or not an event loop is running: it gets a thread and a loop of its own."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="sandbox")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def slot() -> asyncio.Semaphore:
    """The running loop's semaphore, of as many places as there are processors."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(processors))


# -- whether there is a sandbox ----------------------------------------------------------------------------------------


def bubblewrap(sandbox: Sandbox) -> str | None:
    """Where bubblewrap is; None where programs run without it, as ``allow_unsandboxed`` permits.

    Raises:
        RewardError: there is none that works, and it is not permitted to go without.
    """
    bwrap = shutil.which("bwrap")
    problem = _problem(sandbox.python or sys.executable, sandbox.packages, bwrap)
    if problem is None:
        return bwrap
    if not sandbox.allow_unsandboxed:
        raise RewardError(f"there is no sandbox to run programs in: {problem}. {_HELP}.")
    _warn_once(problem)
    return None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        f"PROGRAMS WRITTEN BY THE MODEL RUN WITHOUT A SANDBOX ({problem}): they can read and change what you can, and "
        "use the network. Only time, memory and output are limited.",
        RuntimeWarning,
        stacklevel=3,
    )


@functools.cache
def _problem(python: str, packages: bool, bwrap: str | None) -> str | None:
    """What keeps bubblewrap from working; None: nothing. Tried once in a process."""
    if not sys.platform.startswith("linux"):
        return f"bubblewrap needs Linux, this is {sys.platform}"
    if bwrap is None:
        return "bwrap is not installed"

    async def attempt() -> Result:
        trial = Sandbox(python=python, packages=packages)
        async with started(trial, bwrap, "run", "print(6 * 7)") as program:
            return await program.end(START_SECONDS)

    try:
        result = in_thread(attempt())
    except CohortError as error:
        return str(error)
    return None if result.stdout == "42\n" else f"a trial program ended with {result}"
