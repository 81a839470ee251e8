"""Start a program in its sandbox, read what it writes, and kill it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path

from cohort.errors import SandboxError
from cohort.sandbox import watchdog
from cohort.sandbox.bubblewrap import HOME, INSIDE, NOBODY, PYTHON, UserMapping, arguments, environment
from cohort.sandbox.descriptors import TICK, check, pipe, read_pipe, sealed_file
from cohort.sandbox.executor import Limits, Outcome, Program, Result
from cohort.sandbox.syscalls import system_call_filter


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
            watchdog.kill_marked(self._mark)
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
    texts = (program.source, program.stdin)
    source, stdin = (sealed_file(stack, text.encode(errors="surrogatepass")) for text in texts)
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
        inherited += [rules, *files.values(), *(mapping.ends if mapping else ())]
        command = [bwrap, *arguments(packages, program.harness, limits.disk, files, rules, mapping)]
        folder, inside, mark = "/tmp", f"{HOME}/{INSIDE.name}", watchdog.mark()
        settings |= {"threads": limits.threads} | ({"user": NOBODY} if mapping else {})
        if program.harness:
            settings["harness"] = f"{HOME}/{program.harness.parent.name}/{program.harness.name}"
    else:
        command, inside, mark = [], str(INSIDE), ""
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="cohort-program-"))
        for name, data in program.files.items():
            (path := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    command += [PYTHON, "-I", "-S", inside, *(f"{name}={value}" for name, value in settings.items())]
    popen = _spawn([*command, *([mark] if mark else [])], folder, (stdin, stdout_end, stderr_end), inherited)
    process = Process(popen, (stdout, stderr), limits.output, mark)
    stack.callback(process.close)
    # the program is read only after all limits are set
    if (mapping and not mapping.complete(cancelled)) or not read_pipe(ready, cancelled):
        result = process.finish(time.monotonic() + 1, cancelled)
        raise SandboxError(f"a sandbox could not be made: {result.stderr.strip() or f'exit code {result.exit_code}'}")
    process.started, process.is_ready = time.monotonic(), True
    return process


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
