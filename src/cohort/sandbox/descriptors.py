"""Pipes and anonymous files for programs, closed with an ``ExitStack`` at the latest."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from io import FileIO
from multiprocessing.connection import wait

from cohort.errors import SandboxError

START_SECONDS = 60.0
"""Time limit for making a sandbox, which takes 20 ms unless the machine is stuck."""
TICK = 0.05
"""Seconds between checks for cancellation."""


def pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    """The two ends of a pipe."""
    reads, writes = os.pipe()
    return stack.enter_context(FileIO(reads, "r")), stack.enter_context(FileIO(writes, "w"))


def sealed_file(stack: ExitStack, data: bytes) -> FileIO:
    """An anonymous file that holds data and cannot be written to.

    Unlike a pipe, it has a length and can be opened again, as in ``program < input``.
    """
    if sys.platform != "linux":
        file = stack.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
        file.write(data)
        file.seek(0)
        return file
    memory = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(memory, "wb") as writer:
        writer.write(data)
        writer.flush()
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return stack.enter_context(FileIO(os.open(f"/proc/self/fd/{memory}", os.O_RDONLY), "r"))


def read_pipe(file: FileIO, cancelled: threading.Event) -> bytes:
    """Bytes from a pipe as soon as there are some; empty at the end of the pipe.

    Raises:
        SandboxError: there are none after ``START_SECONDS``, or the run was cancelled.
    """
    until = time.monotonic() + START_SECONDS
    while not wait([file.fileno()], TICK):
        check(cancelled)
        if time.monotonic() > until:
            raise SandboxError(f"a sandbox was not ready after {START_SECONDS:g} s")
    return os.read(file.fileno(), 4096)


def check(cancelled: threading.Event) -> None:
    """Raise a SandboxError if the run was cancelled."""
    if cancelled.is_set():
        raise SandboxError("the run was cancelled")
