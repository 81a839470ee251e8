"""Sandboxes that are being made when this process dies, or gives them up.

A sandbox that stands dies with the process that made it (``bwrap --die-with-parent``), however that ends. In the 10 ms
before, its own first process would go on, or wait for ever for one that is gone. So each bears a mark by which it is
found, and a process that makes sandboxes has a second, tiny one beside it, which waits until it is gone.
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
    """An argument for the command line of a sandbox, which ends with this process. Linux only."""
    return f"mark={_watched(os.getpid())}-{next(_count)}-"


@functools.cache
def _watched(process: int) -> str:
    """What begins the marks of a process; a fork of it is another."""
    name = f"cohort-{process}-{os.urandom(8).hex()}"
    waits, _held = os.pipe()  # the other end is closed when this process is gone
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (1, 2)]
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, name],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, waits, 0), *null],
        setsid=True,  # a signal to the group, as Ctrl-C sends it, must not end it first
    )
    os.close(waits)
    return name


def end(name: str) -> None:
    """Kill the processes whose mark begins so, until there are none, as one may be making another; for a second."""
    begins, quiet, until = f"mark={name.removeprefix('mark=')}".encode(), 0, time.monotonic() + 1
    while quiet < 2 and time.monotonic() < until:
        quiet += 1
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone meanwhile
                if any(part.startswith(begins) for part in (folder / "cmdline").read_bytes().split(b"\0")):
                    os.kill(int(folder.name), signal.SIGKILL)
                    quiet = 0


if __name__ == "__main__":
    os.chdir("/")
    os.read(0, 1)
    end(sys.argv[1])
