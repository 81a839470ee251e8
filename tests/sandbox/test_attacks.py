"""Attempts to get out of the sandbox or past its limits. Each test checks that nothing happened outside, and the result.

Every attempt is bounded, so that it would do no harm if the sandbox failed.
"""

import errno
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from cohort.sandbox import Limits, Outcome, Program, Sandbox
from cohort.sandbox.process import DENIED
from tests.sandbox.needs import needs_bwrap

pytestmark = needs_bwrap
ROOT = Path(__file__).parents[2]
USERS = sorted({os.geteuid(), 1000})
"""As root, two users are mapped and the program is the second; as another user, one."""
REFUSED = ("OSError", "PermissionError")
ABSENT = ("FileNotFoundError", "PermissionError")
EPERM = f"PermissionError [Errno {errno.EPERM}] {os.strerror(errno.EPERM)}"
LIMITS = {"seconds": 10.0, "memory": 256, "disk": 16}


def run(source: str, stdin: str = "", **limits):
    return Sandbox().run_sync(Program(source, stdin), Limits(**LIMITS | limits))


def attempts(expressions, **limits) -> dict[str, str]:
    """Evaluate expressions in one program: for each its value, or the error."""
    result = run(
        f"""
import ctypes, errno, os, signal, socket, subprocess, sys, threading, time
for expression in {list(expressions)!r}:
    try:
        print(repr(eval(expression)))
    except BaseException as error:
        print(type(error).__name__, error)
""",
        **limits,
    )
    assert result.outcome is Outcome.FINISHED, result
    return dict(zip(expressions, result.stdout.splitlines(), strict=True))


def refused(expressions, errors=REFUSED, **limits):
    """Check that every expression fails with one of these errors."""
    for expression, value in attempts(expressions, **limits).items():
        assert value.startswith(errors), (expression, value)


# -- network -----------------------------------------------------------------------------------------------------------


def test_no_network():
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        ways = [
            f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 1)",
            f"socket.socket(2, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))",
            "socket.socket(socket.AF_NETLINK)",
            "socket.socket(17, socket.SOCK_RAW)",
            "socket.socket(socket.AF_UNIX)",
        ]
        pair = ["bind('\\0x')", "connect('\\0x')", "listen()", "sendmsg([b'x'], [(1, 1, b'0000')])"]
        assert set(attempts(ways + [f"socket.socketpair()[0].{way}" for way in pair]).values()) == {EPERM}
        refused(
            [f"socket.socketpair({family})" for family in (16, 17, 30, 40)], f"OSError [Errno {errno.EAFNOSUPPORT}]"
        )
        for server, receive in ((tcp, tcp.accept), (udp, lambda: udp.recv(1))):
            server.settimeout(0.05)
            with pytest.raises(TimeoutError):
                receive()


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_of_the_parent_cannot_be_read(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    monkeypatch.chdir(tmp_path)
    paths = [str(secret), "secret", f"/proc/{os.getpid()}/root{secret}", f"/proc/{os.getpid()}/cwd/secret"]
    paths += [f"/proc/self/root{secret}", f"/proc/1/root{secret}", f"/proc/self/cwd/../..{secret}", f"/oldroot{secret}"]
    paths += [str(ROOT / "pyproject.toml"), str(Path.home() / ".bashrc"), "/etc/passwd", "/etc/shadow"]
    ways = [f"open({path!r}).read()" for path in paths]
    refused([*ways, f"os.symlink('/', '/tmp/link') or open('/tmp/link{secret}').read()"], ABSENT)
    folders = [Path.home(), ROOT, tmp_path.parent, "/var", "/home", "/sys", "/run"]
    parts_of_python = [f"['{part}']" for part in Path(sys.base_prefix).parts]
    for way, value in attempts([f"os.listdir({str(folder)!r})" for folder in folders]).items():
        assert value.startswith("FileNotFoundError") or value in parts_of_python, (way, value)
    visible = {*("cohort", "dev", "etc", "lib", "lib64", "proc", "tmp", "usr"), Path(sys.base_prefix).parts[1]}
    root = "os.listdir('/')"
    assert set(eval(attempts([root])[root])) <= visible


@pytest.mark.parametrize("user", USERS)
def test_no_folder_but_tmp_can_be_written(tmp_path, monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    folders = [tmp_path, "/", "/cohort", "/dev", "/dev/shm", "/usr/lib", "/etc", "/proc", "/var/tmp"]
    refused([f"open('{folder}/cohort-was-here', 'w')" for folder in folders], (*REFUSED, "FileNotFoundError"))
    assert not any((Path(folder) / "cohort-was-here").exists() for folder in folders)


def test_nothing_outside_changes_and_nothing_stays():
    inside = ROOT / "src/cohort/sandbox/inside.py"
    before = inside.read_bytes()
    refused(["open('/cohort/inside.py', 'a').write('#')", "open('/proc/sys/kernel/core_pattern', 'w')"])
    refused(["open('/proc/sysrq-trigger', 'w')"], (*REFUSED, "FileNotFoundError"))
    assert inside.read_bytes() == before
    write = "open('/tmp/cohort-was-here', 'w').write('x'), os.listdir('.')"
    assert attempts([write]) == {write: "(1, ['cohort-was-here'])"}
    assert not Path("/tmp/cohort-was-here").exists()
    assert attempts(["os.listdir('/tmp')"]) == {"os.listdir('/tmp')": "[]"}


def test_the_size_of_files_is_limited():
    source = """
import os
def big():
    with open("big", "wb") as file:
        for _ in range(2048): file.write(bytes(1 << 20))
def many():
    for number in range(64):
        with open(str(number), "wb") as file: file.write(bytes(1 << 20))
def descriptors():
    return [os.open("/tmp/x", os.O_CREAT) for _ in range(1000)]
for attempt in (big, many, descriptors):
    try:
        print(attempt())
    except OSError as error:
        print(error.strerror)
    for name in os.listdir("."): os.remove(name)
"""
    assert run(source).stdout.splitlines() == ["File too large", "No space left on device", "Too many open files"]


def test_no_files_without_disk():
    refused([f"open({path!r}, 'w')" for path in ("x", "/tmp/x", "/dev/shm/x")], disk=0)
    listing = "os.getcwd(), os.listdir('.')"
    assert attempts([listing], disk=0) == {listing: "('/tmp', [])"}


def test_files_of_a_program_can_be_read_and_not_changed():
    program = Program("print(open('a').read(), open('b/c').read(), flush=True)\nopen('a', 'w')", files=FILES)
    for disk in (0, 16):
        result = Sandbox().run_sync(program, Limits(**LIMITS | {"disk": disk}))
        assert (result.outcome, result.stdout) == (Outcome.FAILED, "1 23\n")
        assert result.stderr.strip().rpartition("\n")[2].startswith(REFUSED)


FILES = {"a": b"1", "b/c": b"23"}


@pytest.mark.parametrize("user", USERS)
def test_descriptors_and_environment(monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("A_SECRET_TOKEN", "s3cret")
    descriptors, names = "sorted(os.listdir('/proc/self/fd'))", "sorted(os.environ)"
    environments = "[open(f'/proc/{p}/environ').read() for p in os.listdir('/proc') if p.isdigit()]"
    values = attempts([descriptors, names, "open('/proc/1/environ').read()", environments])
    assert values.pop(descriptors) == "['0', '1', '2', '3']"  # 3 is the listed folder itself
    threads = ["MALLOC_ARENA_MAX", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    assert eval(values.pop(names)) == ["HOME", "LANG", *threads, "PATH", "PWD", "PYTHONHASHSEED"]
    assert "s3cret" not in str(values)


def test_the_standard_input_is_a_file_that_cannot_be_written():
    source = "import os, sys\nprint(os.fstat(0).st_size, os.read(0, 2), open('/dev/stdin').read(), sys.stdin.read())"
    assert run(source, "abc").stdout == "3 b'ab' abc c\n"
    write = "os.write(os.open('/dev/stdin', os.O_RDWR), b'x')"
    refused(["os.write(0, b'x')", write, "os.truncate('/proc/self/fd/0', 1 << 20)"])


# -- processes, threads, memory, time ----------------------------------------------------------------------------------


def test_no_other_processes():
    source = """
import ctypes, os, subprocess, sys
def fork():
    if (child := os.fork()) == 0: os._exit(0)
    return child
ways = [
    fork,
    lambda: os.posix_spawn(sys.executable, ["python", "-c", "0"], {}),
    lambda: subprocess.run([sys.executable, "-c", "0"]),
    lambda: os.system("true") == 0,
    lambda: ctypes.CDLL(None).vfork() > 0,
    lambda: __import__("multiprocessing").get_context("fork").Process(target=print).start() or 1,
]
for way in ways:
    for _ in range(3):
        try:
            started = bool(way())
        except PermissionError:
            started = False
        print(started, [name for name in os.listdir("/proc") if name.isdigit()])
"""
    result = run(source)
    assert (result.outcome, result.stdout) == (Outcome.FINISHED, "False ['1', '2']\n" * 18), result


def test_threads_are_limited():
    source = """
import threading
started, wait = 0, threading.Event()
try:
    for _ in range(200):
        threading.Thread(target=wait.wait).start()
        started += 1
except RuntimeError as error:
    print(started, error)
wait.set()
"""
    result = run(source, threads=20)
    started, message = result.stdout.split(" ", 1)
    assert (result.outcome, message) == (Outcome.FINISHED, "can't start new thread\n")
    assert int(started) in (18, 19)  # the main thread counts, and bubblewrap's first process if it is of the same user


def test_memory_that_belongs_to_no_process():
    refused(["os.memfd_create('x')", "os.open('/dev/shm/x', os.O_CREAT | os.O_RDWR)"])
    shared = "ctypes.CDLL(None, use_errno=True).shmget(0, 4096, 0o1600), ctypes.get_errno()"
    timers = "sum(ctypes.CDLL(None).timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0 for _ in range(9999))"
    values = attempts([shared, timers])
    assert values[shared] == f"(-1, {errno.EPERM})"
    assert 0 < int(values[timers]) <= 256


@pytest.mark.parametrize(
    "source",
    [
        "import signal, time\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\n"
        "while True:\n  try: time.sleep(60)\n  except BaseException: pass",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        "sum(range(10**12))",
    ],
)
def test_time_is_limited(source):
    start = time.monotonic()
    result = run(source, seconds=0.3)
    assert (result.outcome, result.exit_code) == (Outcome.TIMEOUT, None)
    assert 0.3 <= result.seconds < 3
    assert time.monotonic() - start < 4


def test_processor_time_is_limited_by_the_kernel():
    result = run(
        "import resource as r\nprint(r.getrlimit(r.RLIMIT_CPU), flush=True)\nr.setrlimit(r.RLIMIT_CPU, (1, 22))\n"
        "while True: pass",
        seconds=19.5,
    )
    assert (result.outcome, result.exit_code, result.stdout) == (Outcome.TIMEOUT, 128 + signal.SIGXCPU, "(21, 22)\n")


@pytest.mark.parametrize("stream", [1, 2])
def test_output_is_cut_and_the_program_killed(stream):
    result = run(f"import os\nwhile True: os.write({stream}, b'x' * 65536)", output=100_000, seconds=30)
    assert (result.outcome, result.exit_code) == (Outcome.OUTPUT, None)
    assert len((result.stdout, result.stderr)[stream - 1]) == 100_000
    assert result.seconds < 10
    assert run("print('x' * 99_999)", output=100_000).outcome is Outcome.FINISHED


def test_signals_reach_no_other_process():
    ways = ["os.kill(-1, 9)", f"os.kill({os.getpid()}, 9)", f"os.killpg({os.getpgid(0)}, 9)"]
    refused(ways, "ProcessLookupError")
    result = run("import os\nfor s in (9, 15, 2): os.kill(1, s)\nos.kill(os.getppid(), 9)\nprint('alive')")
    assert result.stdout in ("alive\n", "")  # PermissionError where the first process is another user's
    assert result.outcome in (Outcome.FINISHED, Outcome.FAILED)


# -- system calls and permissions --------------------------------------------------------------------------------------

DENIED_CALLS = ["ptrace", "mount", "unshare", "setns", "chroot", "bpf", "keyctl", "io_uring_setup", "userfaultfd"]
DENIED_CALLS += ["perf_event_open", "process_vm_writev", "open_by_handle_at", "init_module", "reboot", "personality"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_denied_system_calls():
    calls = [(DENIED[name][0], 0, 0, 0, 0, 0, 0) for name in DENIED_CALLS]
    calls += [(272, 0x10000000), (56, 0x10000000 | 17, 0), (157, 1, 0)]  # unshare and clone: a new user namespace
    calls += [(500,), (0x40000000 + 39,)]
    source = f"""
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
for arguments in {calls}:
    ctypes.set_errno(0)
    print(call(*arguments), ctypes.get_errno())
"""
    assert run(source).stdout == f"-1 {errno.EPERM}\n" * (len(DENIED_CALLS) + 3) + f"-1 {errno.ENOSYS}\n" * 2


def test_no_terminal_and_no_permissions():
    status = "open('/proc/self/status').read()"
    terminal, control = "open('/dev/tty')", "__import__('fcntl').ioctl(0, __import__('termios').TIOCSTI, b'x')"
    root, limit = "os.setuid(0)", "__import__('resource').setrlimit(9, (-1, -1))"
    values = attempts([status, terminal, control, root, limit])
    fields = dict(line.split(":\t", 1) for line in eval(values[status]).splitlines())
    assert fields["CapEff"] == fields["CapPrm"] == fields["CapAmb"] == "0" * 16
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert fields["Uid"].split() == ["65534"] * 4
    assert values[terminal].startswith(f"OSError [Errno {errno.ENXIO}]")
    assert values[control].startswith(f"OSError [Errno {errno.ENOTTY}]")
    assert values[root].startswith(REFUSED)
    assert values[limit].startswith(("ValueError", "PermissionError"))


def test_the_first_process_has_the_same_limits(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # a single user is mapped: the first process is the program's
    texts = "[open(f'/proc/{p}/limits').read() for p in ('1', 'self')]"
    status, outlive = "'Seccomp:\\t2' in open('/proc/1/status').read()", "ctypes.CDLL(None).prctl(1, 0)"
    values = attempts([texts, status, outlive])
    for limit in ("Max address space", "Max file size", "Max open files", "Max processes", "Max cpu time"):
        first, own = (
            next(line for line in text.splitlines() if line.startswith(limit)) for text in eval(values[texts])
        )
        assert first == own
        assert "unlimited" not in own
    assert (values[status], values[outlive]) == ("True", "-1")
