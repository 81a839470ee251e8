"""Find and end the processes that a process has started, wherever they went, also after its death.

A child in a session of its own, or one whose parent has ended, is in no group and in no tree under its first parent.
Therefore what is to be found carries a mark, in its command line or its environment, which its children inherit. And a
process that marks others has a small second process beside it, which waits until the first is gone.

Linux only: elsewhere nothing is found. Runs under ``python -I -S`` as the second process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
import time
from pathlib import Path

_count = itertools.count()


def mark() -> str:
    """A mark for other processes, as ``NAME={mark}`` in their environment or command line. They end with this one."""
    return f"{_watched_prefix(os.getpid())}-{next(_count)}-"


@functools.cache
def _watched_prefix(process: int) -> str:
    """The prefix of a process's marks, watched from now on. A fork of the process has a prefix of its own."""
    prefix = f"cohort-{process}-{os.urandom(8).hex()}"
    if sys.platform != "linux":
        return prefix
    waiting_end, _open_end = os.pipe()  # the open end is closed when this process is gone
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, prefix],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, waiting_end, 0), *null],
        setsid=True,  # a signal to the process group, such as Ctrl-C, must not end the watchdog first
    )
    os.close(waiting_end)
    return prefix


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
                if start in (folder / "cmdline").read_bytes() or start in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
                    quiet = 0


if __name__ == "__main__":
    os.chdir("/")
    os.read(0, 1)
    kill_marked(sys.argv[1], passes=2)
