"""Start a program in its sandbox, read what it writes, and kill it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from multiprocessing.connection import wait
from pathlib import Path

from cohort import orphans
from cohort.errors import SandboxError
from cohort.sandbox.executor import Limits, Outcome, Program, Result

# ----------------------------------------
# The system calls that a sandboxed program may make, as a seccomp filter for the kernel.
#
# The filter denies the calls of a list, and all calls newer than the list. A denied call fails with EPERM, which
# Python raises as PermissionError; the program is not killed. The arguments of three calls are checked: ``clone`` may
# create threads but no processes, ``socketpair`` may create unix sockets, which asyncio needs, but no others, and
# ``prctl`` may not change that a process dies with its parent, because sandboxes are ended that way.


ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""The column in the table below, and the kernel's number of the architecture."""

NEWEST = 456
"""Calls above this number fail with ENOSYS, as on a kernel that does not have them. This includes the x32 calls of x86,
whose numbers start at 2**30."""

_TABLE = (
    # New processes. A program is one process, so that its memory limit covers everything it uses.
    "fork 57 -, vfork 58 -, "
    # Namespaces and mounts.
    "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, "
    "open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick 433 433, "
    "mount_setattr 442 442, "
    # Memory and files of other processes.
    "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, kcmp 312 272, "
    "pidfd_getfd 438 438, "
    # Memory that no limit of a process covers.
    "memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, shmdt 67 197, "
    "semget 64 190, semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, "
    "msgrcv 70 188, msgctl 71 187, mq_open 240 180, "
    # Sockets: connections that nobody has accepted and data that waits in messages are kernel memory.
    "socket 41 198, bind 49 200, listen 50 201, connect 42 203, accept 43 202, accept4 288 242, sendmsg 46 211, "
    "sendmmsg 307 269, "
    # Events that nobody reads are kernel memory as well.
    "inotify_init 253 -, inotify_init1 294 26, "
    # Parts of the kernel with a history of vulnerabilities.
    "add_key 248 217, request_key 249 218, keyctl 250 219, bpf 321 280, perf_event_open 298 241, "
    "userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, "
    "splice 275 76, tee 276 77, vmsplice 278 75, migrate_pages 256 238, move_pages 279 239, mbind 237 235, "
    "set_mempolicy 238 237, modify_ldt 154 -, "
    # Calls for administrators.
    "init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, "
    "kexec_file_load 320 294, reboot 169 142, swapon 167 224, swapoff 168 225, quotactl 179 60, "
    "quotactl_fd 443 443, acct 163 89, settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, "
    "clock_adjtime 305 266, sethostname 170 161, setdomainname 171 162, syslog 103 116, iopl 172 -, "
    "ioperm 173 -, personality 135 92, lookup_dcookie 212 18, name_to_handle_at 303 264, "
    "open_by_handle_at 304 265, fanotify_init 300 262, nfsservctl 180 42, uselib 134 -, sysfs 139 -, "
    "vhangup 153 58"
)
DENIED = {
    name: tuple(None if number == "-" else int(number) for number in numbers)
    for name, *numbers in (row.split() for row in _TABLE.split(","))
}
"""Name of each denied call to its numbers on x86_64 and on aarch64; None: the architecture does not have the call."""

_CLONE, _CLONE3, _SOCKETPAIR, _PRCTL = (56, 220), (435, 435), (53, 199), (157, 167)
_CLONE_THREAD, _AF_UNIX, _SET_PARENT_DEATH_SIGNAL = 0x00010000, 1, 1
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16
"""Offsets in ``struct seccomp_data``. Only the lower half of an argument is loaded: the kernel ignores the upper half
in these three calls, and both architectures are little-endian."""
_LOAD, _EQUAL, _ABOVE, _HAS_BITS, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def system_call_filter(machine: str | None = None) -> bytes:
    """The filter as a BPF program, for ``bwrap --seccomp``.

    Args:
        machine: "x86_64" or "aarch64". None: the machine of this process.

    Raises:
        SandboxError: there is no filter for the machine.

    >>> len(system_call_filter("x86_64")) % 8, len(system_call_filter("aarch64")) // 8 < 256
    (0, True)
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        raise SandboxError(f"the sandbox has no filter for {machine}: it runs on {' and '.join(ARCHITECTURES)}")
    column, architecture = ARCHITECTURES[machine]
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, architecture, if_so=1),
        _step(_RETURN, _KILL),  # the numbers of another architecture stand for other calls
        _step(_LOAD, _NUMBER),
    ]
    program += _fail(_ABOVE, NEWEST, errno.ENOSYS)
    program += _fail(_EQUAL, _CLONE3[column], errno.ENOSYS)  # its flags are in memory; libraries fall back to clone
    for numbers in DENIED.values():
        if (number := numbers[column]) is not None:
            program += _fail(_EQUAL, number, errno.EPERM)
    program += _check(_CLONE[column], _HAS_BITS, _CLONE_THREAD, _ALLOW, _ERRNO | errno.EPERM)
    program += _check(_SOCKETPAIR[column], _EQUAL, _AF_UNIX, _ALLOW, _ERRNO | errno.EAFNOSUPPORT)
    program += _check(_PRCTL[column], _EQUAL, _SET_PARENT_DEATH_SIGNAL, _ERRNO | errno.EPERM, _ALLOW)
    return b"".join([*program, _step(_RETURN, _ALLOW)])


def _fail(test: int, number: int, error: int) -> list[bytes]:
    return [_step(test, number, if_not=1), _step(_RETURN, _ERRNO | error)]


def _check(number: int, test: int, operand: int, if_so: int, if_not: int) -> list[bytes]:
    """Return one of two verdicts for a call, by a test of its first argument."""
    return [
        _step(_EQUAL, number, if_not=4),
        _step(_LOAD, _ARGUMENT_0),
        _step(test, operand, if_not=1),
        _step(_RETURN, if_so),
        _step(_RETURN, if_not),
    ]


def _step(code: int, value: int, *, if_so: int = 0, if_not: int = 0) -> bytes:
    """One instruction. ``if_so`` and ``if_not`` are the numbers of instructions to skip after a test."""
    return struct.pack("HBBI", code, if_so, if_not, value)


# ----------------------------------------
# The bubblewrap command line: what a sandbox contains, and which user the program is.


INSIDE = Path(__file__).with_name("inside.py")
HOME = "/cohort"
"""The folder of ``INSIDE`` and of a harness in the sandbox."""
NOBODY = 65534
"""The user id of programs: inside the sandbox, and outside as well if the parent is root."""
PYTHON = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
"""The interpreter that runs this process. For a virtual environment, the Python that it was made from."""
LIBRARIES = tuple(f"{prefix}/{name}" for prefix in {sys.base_prefix, sys.base_exec_prefix} for name in ("lib", "lib64"))
SYSTEM = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")


def installed_packages() -> list[str]:
    """The folders of installed packages, including those of a virtual environment."""
    paths = sysconfig.get_paths()
    return list(dict.fromkeys((paths["purelib"], paths["platlib"])))


def environment(home: str) -> dict[str, str]:
    """The environment of a program. Bubblewrap itself gets no other, because programs can read it."""
    # a single malloc arena: an arena per thread would take 64 MB of the address space each
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "MALLOC_ARENA_MAX")
    variables = {"PATH": "/usr/bin:/bin", "HOME": home, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return variables | dict.fromkeys(threads, "1")


def arguments(
    packages: Sequence[str],
    harness: Path | None,
    disk: int,
    files: Mapping[str, FileIO],
    filter_file: FileIO,
    mapping: Sequence[FileIO],
) -> list[str]:
    """The arguments of ``bwrap`` up to the command.

    Args:
        packages: folders that are shown besides those of Python.
        harness: the file whose folder is shown.
        disk: size of /tmp in MB; 0: it is read-only.
        files: files in /tmp by relative path.
        filter_file: the seccomp filter.
        mapping: pipes to map two users from outside (``UserMapping``). Empty: bubblewrap maps its only user itself.
    """
    result = ["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    result += ["--cap-drop", "ALL", "--seccomp", str(filter_file.fileno())]
    if mapping:
        info, block = (str(end.fileno()) for end in mapping)
        result += ["--info-fd", info, "--userns-block-fd", block, "--uid", "0", "--gid", "0"]
        result += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # lost when ``inside.py`` changes the user
    else:
        result += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    # /tmp comes first: a Python environment may lie below it, and later mounts cover earlier ones
    result += ["--perms", "1777", "--size", str(disk << 20), "--tmpfs", "/tmp"] if disk else ["--dir", "/tmp"]
    result += _bind([*SYSTEM, *LIBRARIES, PYTHON, *packages])
    result += ["--ro-bind", str(INSIDE), f"{HOME}/{INSIDE.name}"]
    result += ["--ro-bind", str(harness.parent), f"{HOME}/{harness.parent.name}"] if harness else []
    for name, file in files.items():
        result += ["--perms", "0444", "--file", str(file.fileno()), f"/tmp/{name}"]
    result += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--proc", "/proc", "--dev", "/dev"]
    # the root is in memory as well, and its size is not limited
    return [*result, "--remount-ro", "/dev", "--chdir", "/tmp", "--remount-ro", "/"]


def _bind(paths: Iterable[str]) -> list[str]:
    """Show those of the paths that exist, each once."""
    result: list[str] = []
    bound: list[Path] = []
    for path in sorted({Path(path) for path in paths if os.path.exists(path)}):  # noqa: PTH110
        if any(path.is_relative_to(other) for other in bound):
            continue
        if path.parent == Path("/") and path.is_symlink():  # /lib is usr/lib
            result += ["--symlink", str(path.readlink()), str(path)]
            continue
        if path.parent != Path("/"):
            result += ["--dir", str(path.parent)]  # otherwise it would have the permissions of the folder outside
        result += ["--ro-bind", str(path), str(path)]
        bound.append(path)
    return result


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
        for name, data in program.files.items():
            (path := Path(folder, name)).parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
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
