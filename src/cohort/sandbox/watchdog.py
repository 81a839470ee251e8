"""End sandboxes that are being made when this process dies or cancels them.

A finished sandbox dies with the process that made it (``bwrap --die-with-parent``), however that process ends. During
the 10 ms before, the sandbox's first process would go on, or wait forever for a process that is gone. Therefore each
sandbox carries a mark by which it is found, and a process that makes sandboxes has a small second process beside it,
which waits until the first is gone.
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
    """A mark for the command line of a sandbox, which then ends with this process. Linux only."""
    return f"mark={_watched_prefix(os.getpid())}-{next(_count)}-"


@functools.cache
def _watched_prefix(process: int) -> str:
    """The prefix of a process's marks, watched from now on. A fork of the process has a prefix of its own."""
    prefix = f"cohort-{process}-{os.urandom(8).hex()}"
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


def kill_marked(prefix: str) -> None:
    """Kill the processes whose mark has a prefix, for at most 1 s, until none is left: one may be making another."""
    start, quiet, until = f"mark={prefix.removeprefix('mark=')}".encode(), 0, time.monotonic() + 1
    while quiet < 2 and time.monotonic() < until:
        quiet += 1
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended meanwhile
                if any(part.startswith(start) for part in (folder / "cmdline").read_bytes().split(b"\0")):
                    os.kill(int(folder.name), signal.SIGKILL)
                    quiet = 0


if __name__ == "__main__":
    os.chdir("/")
    os.read(0, 1)
    kill_marked(sys.argv[1])
