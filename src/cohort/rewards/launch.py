"""Start a program in its sandbox, watch it, and end it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import FileIO
from typing import TYPE_CHECKING, Any, Literal

from cohort.errors import SandboxError
from cohort.rewards import watchdog
from cohort.rewards.bubblewrap import HERE, INSIDE, NOBODY, arguments, environment, interpreter, map_users
from cohort.rewards.syscalls import system_call_filter

if TYPE_CHECKING:
    from cohort.rewards.sandbox import Sandbox

Status = Literal["ok", "failed", "timeout", "memory", "output"]
START_SECONDS = 60.0
"""To make a sandbox takes 20 ms. A machine that takes this long is stuck."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended. That its sandbox failed is no result but an error."""

    status: Status
    """"ok": by itself, exit code 0. "failed": another exit code, or a signal. "timeout": killed when its time was over,
    or its processor time. "memory": an uncaught MemoryError, or killed by the kernel, which does so for want of memory.
    "output": killed because it wrote too much."""
    exit_code: int | None
    """As a shell has it: 128 + n for signal n. None: killed from here."""
    stdout: str
    stderr: str
    """Both are cut at the limit; bytes that are no UTF-8 are replaced."""
    seconds: float
    """From when the sandbox stood until the program was gone."""


class Program:
    """A program that runs, or is about to."""

    def __init__(self, process: asyncio.subprocess.Process, limit: int, mark: str) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._limit = limit
        self._mark = mark
        self._cut: Literal["timeout", "output"] | None = None
        self._stdout, self._stderr = bytearray(), bytearray()
        self._ending = [
            asyncio.create_task(process.wait()),
            asyncio.create_task(self._read(process.stdout, self._stdout)),
            asyncio.create_task(self._read(process.stderr, self._stderr)),
        ]
        self.since = time.monotonic()
        """When its time began."""
        self.stands = not mark
        """Whether it ends with bubblewrap's own process."""

    async def end(self, seconds: float) -> Result:
        """How it ends, by itself or after so many seconds.

        Raises:
            SandboxError: something else has killed the sandbox.
        """
        await asyncio.wait(self._ending, timeout=max(0.0, seconds - (time.monotonic() - self.since)))
        if self._process.returncode is None:
            self._kill("timeout")
        await self.close()
        took, code = time.monotonic() - self.since, self._process.returncode
        if code is None or (self._cut is None and code == -signal.SIGKILL):
            raise SandboxError("the sandbox was killed, and not from here: is the machine out of memory?")
        code = 128 - code if code < 0 else code
        stdout, stderr = (bytes(written).decode(errors="replace") for written in (self._stdout, self._stderr))
        return Result(self._cut or _status(code, stderr), None if self._cut else code, stdout, stderr, took)

    async def close(self) -> None:
        """Kill what is left, and wait until it is gone."""
        self._kill(None)
        if not self.stands:
            watchdog.end(self._mark)
        # without a sandbox, a process that left the group may keep the output open: it is not waited for
        _, pending = await asyncio.wait(self._ending, timeout=5)
        for task in pending:
            task.cancel()

    async def failure(self) -> str:
        """What it wrote to the standard error before it ended, if it has ended or is about to."""
        await asyncio.wait(self._ending, timeout=1)
        await self.close()
        return bytes(self._stderr).decode(errors="replace").strip() or f"exit code {self._process.returncode}"

    def _kill(self, why: Literal["timeout", "output"] | None) -> None:
        """Bubblewrap's own process goes, and the sandbox with it; its group, for programs without a sandbox."""
        self._cut = self._cut or why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self, stream: asyncio.StreamReader, written: bytearray) -> None:
        while chunk := await stream.read(1 << 16):
            room = self._limit - len(written)
            written += chunk[:room]
            if len(chunk) > room:
                self._kill("output")


def _status(code: int, stderr: str) -> Status:
    if code == 0:
        return "ok"
    if code == 128 + signal.SIGXCPU:
        return "timeout"
    last = stderr.rstrip().rpartition("\n")[2]
    return "memory" if code == 128 + signal.SIGKILL or last.startswith("MemoryError") else "failed"


@contextlib.asynccontextmanager
async def started(
    sandbox: Sandbox,
    bwrap: str | None,
    mode: Literal["run", "serve", "judge"],
    source: str,
    *,
    stdin: str = "",
    pipes: tuple[FileIO, FileIO] | None = None,
) -> AsyncIterator[Program]:
    """A program in its sandbox, killed at the end of the block.

    Args:
        sandbox: its limits.
        bwrap: where bubblewrap is; None: no sandbox, the limits of the kernel alone.
        mode: what ``inside/start.py`` is to do with the text.
        source, stdin: the text, and what it reads from its standard input.
        pipes: what it reads from and writes to besides. Closed here once it has them.

    Raises:
        SandboxError: the sandbox could not be made.
    """
    code = source.encode(errors="surrogatepass")
    with contextlib.ExitStack() as stack:
        ready, told = pipe(stack)
        program_text, given = _file(stack, code), _file(stack, stdin.encode(errors="surrogatepass"))
        theirs = [told, program_text, *(pipes or ())]
        folder = "/tmp" if bwrap else stack.enter_context(tempfile.TemporaryDirectory(prefix="cohort-program-"))
        python = interpreter(sandbox.python or sys.executable)
        settings: dict[str, Any] = {
            "mode": mode,
            "source": program_text.fileno(),
            "ready": told.fileno(),
            "memory": sandbox.memory,
            "files": sandbox.files,
            "cpu": math.ceil(sandbox.seconds) + 1,
            "packages": os.pathsep.join(python.packages) if sandbox.packages else "",
            "here": HERE if bwrap else INSIDE.parent,
        }
        if pipes:
            settings |= {"reads": pipes[0].fileno(), "writes": pipes[1].fileno()}
        users = _Users(stack) if bwrap and os.geteuid() == 0 else None
        command: list[str] = []
        if bwrap:
            settings |= {"threads": sandbox.threads} | ({"user": NOBODY} if users else {})
            rules = _file(stack, system_call_filter())
            theirs += [rules, *(users.theirs if users else ())]
            map_fds = users.fds if users else None
            shown = arguments(python, sandbox.packages, sandbox.files, rules.fileno(), map_fds)
            command = [bwrap, *shown]
        command += [python.executable, "-I", "-S", f"{settings['here']}/inside/start.py"]
        command += [f"{name}={value}" for name, value in settings.items()]
        mark = watchdog.mark() if bwrap else ""
        process = await _spawn([*command, *([mark] if mark else [])], mark, folder, given, theirs)
        program = Program(process, sandbox.output, mark)
        try:
            await _stand(program, ready, users)
            yield program
        finally:
            await program.close()


async def _spawn(
    command: list[str], mark: str, folder: str, stdin: FileIO, theirs: list[FileIO]
) -> asyncio.subprocess.Process:
    """Start a process that has these files. They are closed here, so that what is read ends when it ends."""
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment(folder),
            pass_fds=[file.fileno() for file in theirs],
            start_new_session=True,
        )
    )
    try:
        return await asyncio.shield(starting)  # asyncio leaves a process, and waits for it, where this is cancelled
    except asyncio.CancelledError:
        starting.add_done_callback(functools.partial(_kill_started, mark))
        await asyncio.wait([starting])
        raise
    except OSError as error:
        raise SandboxError(f"{command[0]} could not be started: {error}") from None
    finally:
        for file in (stdin, *theirs):
            file.close()


def _kill_started(mark: str, starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(starting.result().pid, signal.SIGKILL)
        if mark:
            watchdog.end(mark)


async def _stand(program: Program, ready: FileIO, users: _Users | None) -> None:
    """Wait until the sandbox stands and the limits are set: only then is the program read."""
    try:
        async with asyncio.timeout(START_SECONDS):
            stands = (users is None or await users.map()) and await _read(ready)
    except TimeoutError:
        raise SandboxError(f"a sandbox did not stand after {START_SECONDS:g} s") from None
    if not stands:
        raise SandboxError(f"a sandbox could not be made: {await program.failure()}")
    program.since, program.stands = time.monotonic(), True


class _Users:
    """The two pipes by which bubblewrap, started by root, has its users mapped from outside."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._told, info = pipe(stack)
        block, self._go = pipe(stack)
        self.theirs = [info, block]
        self.fds = info.fileno(), block.fileno()

    async def map(self) -> bool:
        """Once it has said which process it is. False: it never did."""
        said = b""
        while (found := re.search(rb'"child-pid": (\d+)\D', said)) is None:
            if not (part := await _read(self._told)):
                return False
            said += part
        try:
            map_users(int(found[1]))
        except OSError as error:
            raise SandboxError(f"a sandbox's users cannot be mapped: {error}") from None
        self._go.write(b"1")
        self._go.close()
        return True


def pipe(stack: contextlib.ExitStack | contextlib.AsyncExitStack) -> tuple[FileIO, FileIO]:
    """A pipe's two ends, closed with the stack if not before."""
    reads, writes = os.pipe()
    return stack.enter_context(FileIO(reads, "r")), stack.enter_context(FileIO(writes, "w"))


def _file(stack: contextlib.ExitStack, data: bytes) -> FileIO:
    """A file without a name that holds this: as ``program < input`` has it, it has a length and can be opened again.
    Nobody can write to it any more."""
    if sys.platform != "linux":
        descriptor, name = tempfile.mkstemp()
        os.unlink(name)  # noqa: PTH108
        file = stack.enter_context(FileIO(descriptor, "r+"))
        file.write(data)
        file.seek(0)
        return file
    memory = stack.enter_context(FileIO(os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w"))
    rest = memoryview(data)
    while rest:
        rest = rest[memory.write(rest) :]
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return stack.enter_context(FileIO(os.open(f"/proc/self/fd/{memory.fileno()}", os.O_RDONLY), "r"))


async def _read(file: FileIO) -> bytes:
    """What there is to read, as soon as there is some; nothing at the end."""
    ready, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(file, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(file)
    return os.read(file.fileno(), 4096)
