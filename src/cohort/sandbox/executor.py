"""The interface for running programs: a program, its limits, its result, and the executor that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Protocol

from cohort.errors import ConfigError


class Outcome(StrEnum):
    """How a program ended. A failure of the executor itself is not an outcome but a ``SandboxError``."""

    FINISHED = "finished"
    """The program ended with exit code 0."""
    FAILED = "failed"
    """The program ended with another exit code, or was ended by a signal."""
    TIMEOUT = "timeout"
    """The program was killed because its wall-clock time or its processor time was used up."""
    MEMORY = "memory"
    """The program did not catch a MemoryError, or the kernel killed it, usually because memory ran out."""
    OUTPUT = "output"
    """The program was killed because it wrote more than the limit."""


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program and its input.

    Raises:
        ConfigError: a name in ``files`` is not a relative path inside the working folder.

    >>> Program("print(1)", files={"../x": b""})
    Traceback (most recent call last):
    cohort.errors.ConfigError: the files of a program need relative paths without '..', got '../x'
    """

    source: str
    """The text of the program."""
    stdin: str = ""
    """The standard input."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files in the working folder, by relative path. The program can read them."""
    harness: Path | None = None
    """A module that runs the source instead of the interpreter: a file in a package that imports only the standard
    library and itself. Its ``main(source: bytes)`` is called; in ``Executor.run_pair``, ``main(source, reads, writes)``
    with two file descriptors. The package's folder is shown in the sandbox."""

    def __post_init__(self) -> None:
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ConfigError(f"the files of a program need relative paths without '..', got {name!r}")


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources that a program may use.

    Raises:
        ConfigError: a limit is out of range.

    >>> Limits(seconds=0)
    Traceback (most recent call last):
    cohort.errors.ConfigError: the limit seconds must be above 0, got 0
    """

    seconds: float = 10.0
    """Wall-clock time. Processor time is limited to one second more."""
    memory: int = 1024
    """Address space in MB, including about 15 MB for the interpreter. A program that needs more gets a MemoryError."""
    disk: int = 64
    """Size in MB of the working folder, ``/tmp``, which is in memory as well. With 0, the program cannot write files.
    Above 0, the number of empty files is not limited; each of them takes about a kilobyte of kernel memory."""
    output: int = 1 << 20
    """Bytes of standard output, and of standard error."""
    threads: int = 32
    """Number of threads. Kernels before 5.14 count all tasks of the user."""

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "output", "threads"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"the limit {name} must be above 0, got {getattr(self, name)!r}")
        if self.disk < 0:
            raise ConfigError(f"the limit disk must be 0 or above, got {self.disk!r}")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a program."""

    outcome: Outcome
    exit_code: int | None
    """The exit code as a shell reports it: 128 + n for signal n. None: the executor killed the program."""
    stdout: str
    stderr: str
    """Output is cut at the limit; bytes that are not UTF-8 are replaced."""
    seconds: float
    """Wall-clock time from the start of the program to its end, without the time that making the sandbox takes."""


class Executor(Protocol):
    """Runs programs. One executor runs any number of programs, each in a sandbox of its own."""

    def check(self) -> None:
        """Check that programs can be run, before anything expensive starts.

        Raises:
            SandboxError: they cannot; the message says what to install or to set.
        """

    async def run(self, program: Program, limits: Limits) -> Result:
        """Run a program to its end. If the call is cancelled, the program is killed.

        As many programs run at a time as there are processors. Time in the queue does not count.

        Raises:
            SandboxError: the sandbox could not be made, or was killed. Never because of what the program did.
        """
        ...

    async def run_pair(
        self, client: Program, server: Program, limits: Limits, server_limits: Limits
    ) -> tuple[Result, Result]:
        """Run two programs in two sandboxes that are connected by a pipe in each direction.

        The server is started first, and killed after the client has ended. Both count as one program in the queue.

        Returns:
            The results of the client and of the server.

        Raises:
            SandboxError: as for ``run``.
        """
        ...
