"""Start a program in its sandbox, read what it writes, and kill it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path

from cohort import orphans
from cohort.errors import SandboxError
from cohort.sandbox.bubblewrap import HOME, INSIDE, NOBODY, PYTHON, arguments, environment
from cohort.sandbox.executor import Limits, Outcome, Program, Result
from cohort.sandbox.syscalls import system_call_filter

START_SECONDS = 60.0
"""Time limit for making a sandbox, which takes 20 ms unless the machine is stuck."""
TICK = 0.05
"""Seconds between checks for cancellation."""


class Process:
    """A running sandbox, and what its program has written."""

    def __init__(self, popen: subprocess.Popen[bytes], pipes: Sequence[FileIO], output: int, mark: str) -> None:
        self._popen, self._output, self._mark = popen, output, mark
        self._killed: Outcome | None = None
        self._is_closed = False
        self._written = [bytearray() for _ in pipes]
        self.streams = {pipe.fileno(): data for pipe, data in zip(pipes, self._written, strict=True)}
        """The pipes that have not ended, and what was read from them."""
        self.started = time.monotonic()
        self.is_ready = not mark
        """Whether the sandbox dies when bubblewrap's own process is killed."""

    def finish(self, until: float, cancelled: threading.Event, others: Sequence[Process] = ()) -> Result:
        """Wait for the program to end, and kill it when its time is over.

        Args:
            until: value of ``time.monotonic`` at which the program is killed.
            cancelled: raise as soon as this is set.
            others: processes whose output is read meanwhile.

        Raises:
            SandboxError: something else killed the sandbox, or the run was cancelled.
        """
        while self._is_running() and (left := until - time.monotonic()) > 0:
            check(cancelled)
            read_output([self, *others], min(left, TICK))
        if self._is_running():
            self._kill(Outcome.TIMEOUT)
        self.close()
        seconds, code = time.monotonic() - self.started, self._popen.returncode
        if code is None or (self._killed is None and code == -signal.SIGKILL):
            raise SandboxError("something else killed the sandbox: is the machine out of memory?")
        code = 128 - code if code < 0 else code
        stdout, stderr = (bytes(data).decode(errors="replace") for data in self._written)
        outcome = self._killed or _outcome(code, stderr)
        return Result(outcome, None if self._killed else code, stdout, stderr, seconds)

    def close(self) -> None:
        """Kill what is left of the sandbox, and wait until it is gone. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._kill()
        if not self.is_ready:
            orphans.kill_marked(self._mark, passes=2)
        # without a sandbox, a process that left the group may keep the output open for longer
        until = time.monotonic() + 5
        while self.streams and (left := until - time.monotonic()) > 0:
            read_output([self], left)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, until - time.monotonic()))

    def _is_running(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(0 if self.streams else TICK)  # a program whose output is closed has probably ended
        return self._popen.returncode is None

    def _kill(self, outcome: Outcome | None = None) -> None:
        """Kill bubblewrap's own process, and the sandbox with it. Without a sandbox, kill the process group."""
        self._killed = self._killed or outcome
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def read(self, fd: int) -> None:
        """Read from a stream that has data or has ended."""
        chunk, data = os.read(fd, 1 << 16), self.streams[fd]
        room = self._output - len(data)
        data += chunk[:room]
        if not chunk:
            del self.streams[fd]
        elif len(chunk) > room:
            self._kill(Outcome.OUTPUT)


def read_output(processes: Sequence[Process], seconds: float) -> None:
    """Read what processes write, and wait for it for at most this time."""
    owners = {fd: process for process in processes for fd in process.streams}
    for fd in wait(owners, seconds) if owners else ():
        assert isinstance(fd, int)
        owners[fd].read(fd)


def _outcome(code: int, stderr: str) -> Outcome:
    if code == 0:
        return Outcome.FINISHED
    if code == 128 + signal.SIGXCPU:
        return Outcome.TIMEOUT
    last_line = stderr.rstrip().rpartition("\n")[2]
    is_memory = code == 128 + signal.SIGKILL or last_line.startswith("MemoryError")
    return Outcome.MEMORY if is_memory else Outcome.FAILED


def start(
    stack: ExitStack,
    bwrap: str | None,
    packages: Sequence[str],
    program: Program,
    limits: Limits,
    cancelled: threading.Event,
    pipes: Sequence[FileIO] = (),
) -> Process:
    """Start a program in a sandbox.

    Args:
        stack: kills the program when it is closed.
        bwrap: path of bubblewrap; None: no sandbox, only the limits of the kernel.
        packages: folders of packages that the program can import.
        program, limits: see ``Executor.run``.
        cancelled: raise as soon as this is set.
        pipes: the file descriptors of a harness. Closed here.

    Raises:
        SandboxError: the sandbox could not be made, or the run was cancelled.
    """
    (ready, ready_end), (stdout, stdout_end), (stderr, stderr_end) = (pipe(stack) for _ in range(3))
    source, stdin = (sealed_file(stack, text) for text in (program.source, program.stdin))
    inherited = [ready_end, source, *pipes]
    settings: dict[str, object] = {
        "ready": ready_end.fileno(),
        "source": source.fileno(),
        "pipes": ",".join(str(file.fileno()) for file in pipes),
        "harness": program.harness or "",
        "packages": os.pathsep.join(packages),
        "memory": limits.memory,
        "disk": limits.disk,
        "cpu": math.ceil(limits.seconds) + 1,
    }
    mapping = UserMapping(stack) if bwrap and os.geteuid() == 0 else None
    if bwrap:
        rules = sealed_file(stack, system_call_filter())
        files = {name: sealed_file(stack, data) for name, data in program.files.items()}
        ends = mapping.ends if mapping else []
        inherited += [rules, *files.values(), *ends]
        command = [bwrap, *arguments(packages, program.harness, limits.disk, files, rules, ends)]
        folder, inside, mark = "/tmp", f"{HOME}/{INSIDE.name}", orphans.mark()
        settings |= {"threads": limits.threads} | ({"user": NOBODY} if mapping else {})
        if program.harness:
            settings["harness"] = f"{HOME}/{program.harness.parent.name}/{program.harness.name}"
    else:
        command, inside, mark = [], str(INSIDE), ""
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cohort-program-"))
        _write_files(Path(folder), program.files)
    command += [PYTHON, "-I", "-S", inside, *(f"{name}={value}" for name, value in settings.items())]
    popen = _spawn([*command, *([f"mark={mark}"] if mark else [])], folder, (stdin, stdout_end, stderr_end), inherited)
    process = Process(popen, (stdout, stderr), limits.output, mark)
    stack.callback(process.close)
    # the program is read only after all limits are set
    if (mapping and not mapping.complete(cancelled)) or not read_pipe(ready, cancelled):
        result = process.finish(time.monotonic() + 1, cancelled)
        raise SandboxError(f"a sandbox could not be made: {result.stderr.strip() or f'exit code {result.exit_code}'}")
    process.started, process.is_ready = time.monotonic(), True
    return process


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _spawn(
    command: list[str], folder: str, streams: tuple[FileIO, FileIO, FileIO], inherited: list[FileIO]
) -> subprocess.Popen[bytes]:
    """Start a process with these open files. They are closed here, so that a pipe ends when the process does."""
    (stdin, stdout, stderr), numbers = streams, [file.fileno() for file in inherited]
    try:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=environment(folder),
            pass_fds=numbers,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{command[0]} could not be started: {error}") from None
    finally:
        for file in (*streams, *inherited):
            file.close()


class UserMapping:
    """Gives a new user namespace two users: root, who makes the sandbox, and nobody, who runs the program.

    Only root can do this, from outside. A process inside the namespace may map a single user, and the kernel does not
    limit the number of root's tasks.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._info, info_end = pipe(stack)
        block_end, self._block = pipe(stack)
        self.ends = [info_end, block_end]
        """Bubblewrap writes the id of its child to the first, and waits for the second until the users are mapped."""

    def complete(self, cancelled: threading.Event) -> bool:
        """Map the users as soon as bubblewrap has a child. False: it ended before that.

        Raises:
            SandboxError: the users cannot be mapped, or the run was cancelled.
        """
        info = b""
        while (found := re.search(rb'"child-pid": (\d+)\D', info)) is None:
            if not (part := read_pipe(self._info, cancelled)):
                return False
            info += part
        try:
            map_users(int(found[1]))
        except OSError as error:
            raise SandboxError(f"the users of a sandbox cannot be mapped: {error}") from None
        self._block.write(b"1")
        self._block.close()
        return True


def map_users(process: int) -> None:
    """Map root and nobody in the user namespace of a process."""
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{process}/{name}").write_text(f"0 0 1\n{NOBODY} {NOBODY} 1\n")


# -- pipes and anonymous files, closed with an ExitStack at the latest -------------------------------------------------


def pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    """The two ends of a pipe."""
    reads, writes = os.pipe()
    return stack.enter_context(FileIO(reads, "r")), stack.enter_context(FileIO(writes, "w"))


def sealed_file(stack: ExitStack, content: str | bytes) -> FileIO:
    """An anonymous file that holds a text or bytes and cannot be written to.

    Unlike a pipe, it has a length and can be opened again, as in ``program < input``.
    """
    data = content.encode(errors="surrogatepass") if isinstance(content, str) else content
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
