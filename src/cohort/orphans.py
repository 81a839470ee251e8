"""Find and end the processes that a process has started, wherever they went, also after its death.

A child in a session of its own, or one whose parent has ended, is in no group and in no tree under its first parent.
Therefore what is to be found carries a mark, in its command line or its environment, which its children inherit. And a
process that marks others has a small second process beside it, which waits until the first is gone.

Linux only: elsewhere nothing is found. Runs under ``python -I -S`` as the second process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of linux/prctl.h."""
_count = itertools.count()
_watched: dict[int, str] = {}
"""The prefix of the marks of a process, by process, as a fork of this one is another."""


def mark() -> str:
    """A mark for other processes, as ``NAME={mark}`` in their environment or command line. They end with this one."""
    process = os.getpid()
    if process not in _watched:
        _watched[process] = f"cohort-{process}-{os.urandom(8).hex()}"
        if sys.platform == "linux":
            _watch(_watched[process])
    return f"{_watched[process]}-{next(_count)}-"


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however it ends, even while a function keeps the
    interpreter lock; end it now if the parent has ended already."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _watch(prefix: str) -> None:
    """Start the second process. It waits on a pipe, whose other end is open as long as this process lives."""
    waiting_end, _ = os.pipe()
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, prefix],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, waiting_end, 0), *null],
        setsid=True,  # a signal to the process group, such as Ctrl-C, must not end it first
    )
    os.close(waiting_end)


def kill_marked(prefix: str, passes: int = 1) -> None:
    """Kill the processes whose mark has a prefix, for at most 1 s.

    Args:
        prefix: a mark, or what several marks begin with.
        passes: stop when none was found so many times: 2 if a process may be about to start another.
    """
    start, quiet, until = f"={prefix}".encode(), 0, time.monotonic() + 1
    while quiet < passes and time.monotonic() < until:
        quiet += 1
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile, or is another user's
                found = (folder / "cmdline").read_bytes() + b"\0" + (folder / "environ").read_bytes()
                if start in found:
                    os.kill(int(folder.name), signal.SIGKILL)
                    quiet = 0


if __name__ == "__main__":
    os.chdir("/")
    os.read(0, 1)
    kill_marked(sys.argv[1], passes=2)
