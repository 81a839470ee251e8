"""Attempts to get out of the sandbox: that nothing happened outside, and that the result says so.

Every attempt is bounded, so that it would do no harm where the sandbox failed.
"""

import asyncio
import ctypes
import dataclasses
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from cohort.errors import RewardError
from cohort.rewards import sandbox as sandbox_module
from cohort.rewards.bubblewrap import interpreter
from cohort.rewards.launch import Result
from cohort.rewards.sandbox import Sandbox, run_program
from cohort.rewards.syscalls import DENIED, system_call_filter

try:
    Sandbox().check()
    NONE = ""
except RewardError as error:
    NONE = str(error)[:200]
needs_bwrap = pytest.mark.skipif(bool(NONE), reason=NONE)
BOX = Sandbox(seconds=5.0, memory=256, files=16)
ROOT = Path(__file__).parents[2]
USERS = sorted({os.geteuid(), 1000})
"""As root, two users are mapped and the program is the other; else one."""
PYTHON_PATH = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}


def run(source: str, stdin: str = "", **changes) -> Result:
    from dataclasses import replace

    return replace(BOX, **changes).run_sync(source, stdin)


def attempt(body: str, **changes) -> str:
    """What a program prints that tries something: a result, or the name of the error it got."""
    tried = f"try:\n    print(repr(({body})))\nexcept BaseException as error:\n    print(type(error).__name__, error)\n"
    result = run("import ctypes, errno, os, socket, subprocess, sys, threading, time\n" + tried, **changes)
    assert result.status == "ok", result
    return result.stdout


def sandboxes() -> set[int]:
    """The processes that belong to a sandbox, or are one, and descend from this one: others have theirs."""
    parents, found = {}, set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"inside/start.py" in (folder / "cmdline").read_bytes():
                found.add(int(folder.name))
        except OSError:  # gone meanwhile
            continue

    def is_ours(pid: int | None) -> bool:
        return pid is not None and (pid == os.getpid() or is_ours(parents.get(pid)))

    return {pid for pid in found if is_ours(pid)}


@pytest.fixture(autouse=True, scope="module")
def _orphans_stay_ours():
    """A process whose parent is gone becomes a child of this one, not of the machine's first."""
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0, 36
    assert prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    yield
    prctl(set_child_subreaper, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = sandboxes()
    yield
    end = time.monotonic() + 2
    while (left := sandboxes() - before) and time.monotonic() < end:
        time.sleep(0.01)
    assert not left


# -- what it is for ----------------------------------------------------------------------------------------------------


@needs_bwrap
def test_a_program_runs_as_it_would_outside():
    source = """
import sys, dataclasses
@dataclasses.dataclass
class P:
    x: int
if __name__ == "__main__":
    print([P(int(line)) for line in sys.stdin], sys.argv, open("/dev/null").read() == "")
    print("ü", file=sys.stderr)
    sys.exit(3)
"""
    result = run(source, "1\n22\n")
    assert (result.status, result.exit_code) == ("failed", 3)
    assert result.stdout == "[P(x=1), P(x=22)] ['program.py'] True\n"
    assert result.stderr == "ü\n"
    assert 0 < result.seconds < 5


@needs_bwrap
@pytest.mark.parametrize(
    ("source", "status", "exit_code"),
    [
        ("", "ok", 0),
        ("raise SystemExit", "ok", 0),
        ("1/0", "failed", 1),
        ("def f(:", "failed", 1),
        ("import os; os._exit(7)", "failed", 7),
        ("import os; os.abort()", "failed", 134),
        ("import os; os.close(1); os.close(2); os.close(0)", "ok", 0),
        ("import asyncio\nasync def f(): await asyncio.sleep(0)\nasyncio.run(f())", "ok", 0),
        ("x = bytearray(10**9)", "memory", 1),
        ("import mmap; mmap.mmap(-1, 10**9)", "failed", 1),
    ],
)
def test_how_programs_end(source, status, exit_code):
    result = run(source)
    assert (result.status, result.exit_code) == (status, exit_code), result


@needs_bwrap
def test_input_that_is_not_read_and_text_that_is_no_utf8():
    assert run("print(1)", "x" * 3_000_000).stdout == "1\n"
    assert run("print(len(input()))", "x" * 3_000_000).stdout == "3000000\n"
    assert run("import os; os.write(1, b'a\\xffb')").stdout == "a\ufffdb"


@needs_bwrap
def test_many_at_once_take_turns():
    async def all_of_them():
        start = time.monotonic()
        results = await asyncio.gather(
            *(run_program(f"import time; time.sleep(0.3); print({i})") for i in range(count))
        )
        return [int(result.stdout) for result in results], time.monotonic() - start

    count = len(os.sched_getaffinity(0)) + 1
    numbers, seconds = asyncio.run(all_of_them())
    assert numbers == list(range(count))
    assert seconds >= 0.6  # one of them had to wait


@needs_bwrap
def test_from_inside_an_event_loop():
    async def inside():
        return BOX.run_sync("print(1)").stdout

    assert asyncio.run(inside()) == "1\n"


@needs_bwrap
def test_packages_below_tmp_are_there(tmp_path, monkeypatch):
    """As those of an environment in /tmp are: the sandbox has a /tmp of its own."""
    (tmp_path / "own_package.py").write_text("value = 7")
    tmp_path.chmod(0o755)  # the program is another user
    found = dataclasses.replace(interpreter(sys.executable), packages=(str(tmp_path),))
    monkeypatch.setattr("cohort.rewards.launch.interpreter", lambda _: found)
    result = dataclasses.replace(BOX, packages=True).run_sync(
        f"import own_package\nprint(own_package.value)\nopen({str(tmp_path / 'new')!r}, 'w')"
    )
    assert result.stdout == "7\n"
    assert "Read-only file system" in result.stderr


@needs_bwrap
def test_packages_are_there_only_when_asked_for():
    assert attempt("__import__('numpy').arange(3).sum()").startswith("ModuleNotFoundError")
    assert attempt("int(__import__('numpy').arange(3).sum())", packages=True, memory=1024) == "3\n"
    assert attempt("sys.flags.isolated, sys.flags.no_site") == "(1, 1)\n"


# -- network -----------------------------------------------------------------------------------------------------------


@needs_bwrap
def test_no_network():
    tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    servers = [tcp, udp]
    try:
        for server in servers:
            server.settimeout(0.05)
        denied = f"PermissionError [Errno {errno.EPERM}] {os.strerror(errno.EPERM)}\n"
        assert attempt(f"socket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}), 1)") == denied
        sending = f"socket.socket(2, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {udp.getsockname()[1]}))"
        assert attempt(sending) == denied
        assert attempt("socket.socket(socket.AF_NETLINK)") == denied
        assert attempt("socket.socket(17, socket.SOCK_RAW)") == denied
        assert attempt("socket.socket(socket.AF_UNIX)") == denied
        for family in (16, 17, 30, 40):
            assert "Errno 97" in attempt(f"socket.socketpair({family})")  # EAFNOSUPPORT
        for way in ("bind('\\0x')", "connect('\\0x')", "listen()", "sendmsg([b'x'], [(1, 1, b'0000')])"):
            assert attempt(f"socket.socketpair()[0].{way}") == denied
        with pytest.raises(TimeoutError):
            tcp.accept()
        with pytest.raises(TimeoutError):
            udp.recv(1)
    finally:
        for server in servers:
            server.close()


# -- files -------------------------------------------------------------------------------------------------------------


@needs_bwrap
def test_no_files_of_ours(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    monkeypatch.chdir(tmp_path)
    ways = [str(secret), "secret", f"/proc/{os.getpid()}/root{secret}", f"/proc/{os.getpid()}/cwd/secret"]
    ways += [f"/proc/self/root{secret}", f"/proc/1/root{secret}", f"/proc/self/cwd/../..{secret}", f"/oldroot{secret}"]
    for path in [*ways, str(ROOT / "pyproject.toml"), str(Path.home() / ".bashrc"), "/etc/passwd", "/etc/shadow"]:
        said = attempt(f"open({path!r}).read()")
        assert said.startswith(("FileNotFoundError", "PermissionError")), (path, said)
    for folder in (Path.home(), ROOT, tmp_path.parent, "/var", "/home", "/sys", "/run"):
        said = attempt(f"os.listdir({str(folder)!r})")
        parts_of_python = [part for part in Path(sys.base_prefix).parts if f"['{part}']\n" == said]
        assert said.startswith("FileNotFoundError") or parts_of_python, (folder, said)
    assert set(eval(attempt("os.listdir('/')"))) <= {
        *("cohort", "dev", "etc", "lib", "lib64", "proc", "tmp", "usr"),
        Path(sys.base_prefix).parts[1],
    }
    link = f"os.symlink('/', '/tmp/link') or open('/tmp/link{secret}').read()"
    assert attempt(link).startswith("FileNotFoundError")


@needs_bwrap
def test_nothing_outside_can_be_written_and_nothing_stays(tmp_path):
    places = [tmp_path, "/", "/cohort", "/cohort/inside", "/dev", "/dev/shm", "/usr/lib", "/etc", "/proc", "/var/tmp"]
    for place in places:
        said = attempt(f"open('{place}/cohort-was-here', 'w')")
        assert said.startswith(("OSError", "PermissionError", "FileNotFoundError")), (place, said)
        assert not (Path(place) / "cohort-was-here").exists()
    start = ROOT / "src/cohort/rewards/inside/start.py"
    before = start.read_bytes()
    assert attempt("open('/cohort/inside/start.py', 'a').write('#')").startswith(("OSError", "PermissionError"))
    assert start.read_bytes() == before
    assert attempt("open('/tmp/cohort-was-here', 'w').write('x'), os.listdir('.')") == "(1, ['cohort-was-here'])\n"
    assert not Path("/tmp/cohort-was-here").exists()
    assert attempt("os.listdir('/tmp')") == "[]\n"
    assert attempt("open('/proc/sys/kernel/core_pattern', 'w')").startswith(("OSError", "PermissionError"))
    assert attempt("open('/proc/sysrq-trigger', 'w')").startswith(("OSError", "PermissionError", "FileNotFoundError"))


@needs_bwrap
def test_files_are_limited():
    big = "with open('big', 'wb') as f:\n    for _ in range(2048): f.write(bytes(1 << 20))"
    result = run(big)
    assert result.status == "failed"
    assert "File too large" in result.stderr
    many = "for i in range(64):\n    with open(str(i), 'wb') as f: f.write(bytes(1 << 20))"
    result = run(many)
    assert result.status == "failed"
    assert "No space left" in result.stderr
    said = attempt("[os.open('/tmp/x', os.O_CREAT) for _ in range(1000)]")
    assert said.startswith("OSError [Errno 24]")


@needs_bwrap
def test_no_files_at_all():
    for place in ("x", "/tmp/x", "/dev/shm/x"):
        assert attempt(f"open({place!r}, 'w')", files=0).startswith(("OSError", "PermissionError"))
    assert attempt("os.getcwd(), os.listdir('.')", files=0) == "('/tmp', [])\n"


@needs_bwrap
@pytest.mark.parametrize("user", USERS)
def test_no_descriptors_but_the_three(monkeypatch, user):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert attempt("sorted(os.listdir('/proc/self/fd'))") == "['0', '1', '2', '3']\n"  # 3 is that folder's own


# -- processes ---------------------------------------------------------------------------------------------------------


@needs_bwrap
@pytest.mark.parametrize(
    "way",
    [
        "os.fork()",
        "os.posix_spawn(sys.executable, ['python', '-c', '0'], {})",
        "subprocess.run([sys.executable, '-c', '0'])",
        "os.system('true')",
        "ctypes.CDLL(None).vfork()",
        "__import__('multiprocessing').get_context('fork').Process(target=print).start()",
    ],
)
def test_no_other_processes(way):
    counted = f"""
import ctypes, os, subprocess, sys
started = 0
for _ in range(3):
    try:
        result = {way}
        if result == 0 and {way.startswith("os.fork")}: os._exit(0)
        started += result not in (-1, 32512)
    except PermissionError:
        pass
print(started, [name for name in os.listdir("/proc") if name.isdigit()])
"""
    result = run(counted)
    assert (result.status, result.stdout) == ("ok", "0 ['1', '2']\n"), result


@needs_bwrap
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
    started, said = result.stdout.split(" ", 1)
    assert (result.status, said) == ("ok", "can't start new thread\n")
    assert int(started) in (18, 19)  # its own counts, and bubblewrap's first process where that is of the same user


@needs_bwrap
def test_timers_are_limited():
    made = "c = ctypes.CDLL(None); i = ctypes.c_void_p(); n = sum(c.timer_create(1, None, ctypes.byref(i)) == 0 for _ in range(9999))"
    result = run(f"import ctypes\n{made}\nprint(n)")
    assert 0 < int(result.stdout) <= 256


@needs_bwrap
def test_memory_that_no_process_is_charged_for():
    for way in ("os.memfd_create('x')", "os.open('/dev/shm/x', os.O_CREAT | os.O_RDWR)"):
        assert attempt(way).startswith(("PermissionError", "OSError")), way
    libc = "ctypes.CDLL(None, use_errno=True)"
    assert attempt(f"{libc}.shmget(0, 4096, 0o1600), ctypes.get_errno()") == f"(-1, {errno.EPERM})\n"
    source = """
import threading
kept = []
def eat():
    try:
        for _ in range(100): kept.append(bytearray(10**7))
    except MemoryError:
        pass
threads = [threading.Thread(target=eat) for _ in range(8)]
try:
    for thread in threads: thread.start()
except (MemoryError, RuntimeError):  # no room for another one's stack
    pass
for thread in threads:
    if thread.ident: thread.join()
total = len(kept) * 10**7
kept.clear()
print(total)
"""
    result = run(source)
    assert result.status == "ok", result
    assert 50e6 < int(result.stdout) < 256 << 20


@needs_bwrap
@pytest.mark.parametrize(
    "source",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os, time; os.close(0); os.close(1); os.close(2); time.sleep(60)",
        "import signal, time\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except Exception: pass\n"
        "while True:\n  try: time.sleep(60)\n  except BaseException: pass",
        "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
        "import os, time; os.setsid() if os.getpid() != os.getsid(0) else 0; time.sleep(60)",
        "sum(range(10**12))",
    ],
)
def test_time_is_limited(source):
    start = time.monotonic()
    result = run(source, seconds=0.4)
    assert (result.status, result.exit_code) == ("timeout", None)
    assert 0.4 <= result.seconds < 3
    assert time.monotonic() - start < 4


@needs_bwrap
def test_processor_time_is_limited_by_the_kernel_too():
    said = run("import resource; print(resource.getrlimit(resource.RLIMIT_CPU))", seconds=1.5).stdout
    assert said == "(3, 4)\n"
    result = run("import resource, os\nresource.setrlimit(resource.RLIMIT_CPU, (1, 4))\nwhile True: pass")
    assert (result.status, result.exit_code) == ("timeout", 128 + signal.SIGXCPU)


@needs_bwrap
@pytest.mark.parametrize("stream", [1, 2])
def test_output_is_cut_and_its_program_killed(stream):
    start = time.monotonic()
    result = run(f"import os\nwhile True: os.write({stream}, b'x' * 65536)", output=100_000, seconds=30)
    assert result.status == "output"
    assert len((result.stdout, result.stderr)[stream - 1]) == 100_000
    assert time.monotonic() - start < 10
    assert run("print('x' * 99_999)", output=100_000).status == "ok"


@needs_bwrap
def test_signals_reach_nobody():
    for body in ("os.kill(-1, 9)", f"os.kill({os.getpid()}, 9)", f"os.killpg({os.getpgid(0)}, 9)"):
        assert attempt(body).startswith("ProcessLookupError"), body
    result = run("import os, signal\nfor s in (9, 15, 2): os.kill(1, s)\nos.kill(os.getppid(), 9)\nprint('alive')")
    assert result.stdout in ("alive\n", "")  # with another user's, PermissionError
    assert result.status in ("ok", "failed")


@needs_bwrap
def test_the_environment_is_empty(monkeypatch):
    monkeypatch.setenv("A_SECRET_TOKEN", "s3cret")
    names = eval(attempt("sorted(os.environ)"))
    assert names == sorted(
        [
            "HOME",
            "LANG",
            "MALLOC_ARENA_MAX",
            "MKL_NUM_THREADS",
            "OMP_NUM_THREADS",
            "OPENBLAS_NUM_THREADS",
            "PATH",
            "PWD",
            "PYTHONHASHSEED",
        ]
    )
    for user in USERS:  # as root the program is another user; else it can read the first process's
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert "s3cret" not in attempt("open('/proc/1/environ').read()")
        assert "s3cret" not in attempt(
            "[open(f'/proc/{p}/environ').read() for p in os.listdir('/proc') if p.isdigit()]"
        )


CALLS = {
    "ptrace": (0, 0, 0, 0),
    "mount": (0, 0, 0, 0, 0),
    "unshare": (0x10000000,),  # a new user namespace
    "setns": (0, 0),
    "chroot": (0,),
    "bpf": (0, 0, 0),
    "keyctl": (0, 0),
    "io_uring_setup": (1, 0),
    "userfaultfd": (0,),
    "perf_event_open": (0, 0, 0, 0, 0),
    "process_vm_writev": (1, 0, 0, 0, 0, 0),
    "open_by_handle_at": (0, 0, 0),
    "init_module": (0, 0, 0),
    "reboot": (0, 0, 0, 0),
    "personality": (0x0040000,),
}


@needs_bwrap
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
def test_denied_system_calls():
    numbers = [(DENIED[name][0], *arguments) for name, arguments in CALLS.items()]
    numbers += [(56, 0x10000000 | 17, 0), (157, 1, 0), (500,), (0x40000000 + 39,)]
    body = f"""
import ctypes
call = ctypes.CDLL(None, use_errno=True).syscall
for arguments in {numbers}:
    ctypes.set_errno(0)
    print(call(*arguments), ctypes.get_errno())
"""
    result = run(body)
    assert result.stdout == f"-1 {errno.EPERM}\n" * (len(CALLS) + 2) + f"-1 {errno.ENOSYS}\n" * 2


@needs_bwrap
def test_no_terminal():
    assert attempt("open('/dev/tty')").startswith(f"OSError [Errno {errno.ENXIO}]")
    said = attempt("__import__('fcntl').ioctl(0, __import__('termios').TIOCSTI, b'x')")
    assert said.startswith(f"OSError [Errno {errno.ENOTTY}]")


@needs_bwrap
def test_no_rights():
    status = dict(line.split(":\t", 1) for line in eval(attempt("open('/proc/self/status').read()")).splitlines())
    assert status["CapEff"] == status["CapPrm"] == status["CapAmb"] == "0" * 16
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["Uid"].split() == ["65534"] * 4
    assert attempt("os.setuid(0)").startswith(("PermissionError", "OSError"))
    assert attempt("__import__('resource').setrlimit(9, (-1, -1))").startswith(("ValueError", "PermissionError"))


@needs_bwrap
def test_becoming_the_first_process_gives_nothing(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)  # as where one user only can be mapped
    limits = eval(attempt("open('/proc/1/limits').read(), open('/proc/self/limits').read()"))
    for limit in ("Max address space", "Max file size", "Max open files", "Max processes", "Max cpu time"):
        first, own = (next(line for line in text.splitlines() if line.startswith(limit)) for text in limits)
        assert first == own
        assert "unlimited" not in own
    assert "Seccomp:\\t2" in attempt("open('/proc/1/status').read()")
    assert attempt("ctypes.CDLL(None).prctl(1, 0)") == "-1\n"  # to outlive its parent


@needs_bwrap
def test_it_ends_with_its_parent():
    script = "from cohort.rewards.sandbox import Sandbox; Sandbox(seconds=60).run_sync('import time; time.sleep(60)')"
    before = sandboxes()
    parent = subprocess.Popen([sys.executable, "-c", script], env=PYTHON_PATH)
    while len(sandboxes() - before) < 3 and parent.poll() is None:  # bubblewrap's two processes, and the program
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    # the fixture sees that they are gone


@needs_bwrap
def test_a_cancelled_run_is_killed():
    async def cancelled():
        task = asyncio.create_task(run_program("import time; time.sleep(60)"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = sandboxes()
    asyncio.run(cancelled())
    assert not sandboxes() - before


@needs_bwrap
def test_runs_cancelled_while_their_sandbox_is_being_made():
    async def cancelled(after):
        task = asyncio.create_task(run_program("import time; time.sleep(60)"))
        await asyncio.sleep(after)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=3)
        assert done, f"cancelled after {after} s, it never ended"

    async def all_of_them():
        for number in range(30):
            await cancelled(number * 0.001)
        return await run_program("print(1)")  # no place is taken

    assert asyncio.run(all_of_them()).stdout == "1\n"
    assert not sandboxes()


@needs_bwrap
def test_it_ends_with_its_parent_while_it_is_being_made():
    """The moment is after bubblewrap has made its first process, which waits for it."""
    script = """
import os, signal, sys
from cohort.rewards import launch
def die(pid):
    os.kill(int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]), signal.SIGKILL)  # bubblewrap itself
    print("made", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
launch.map_users = die
from cohort.rewards.sandbox import Sandbox
Sandbox(seconds=60).run_sync("import time; time.sleep(60)")
"""
    if os.geteuid() != 0:
        pytest.skip("the moment can be met as root only")
    parent = subprocess.run(
        [sys.executable, "-c", script], env=PYTHON_PATH, capture_output=True, text=True, check=False
    )
    assert (parent.stdout, parent.returncode) == ("made\n", -signal.SIGKILL), parent.stderr
    # the fixture sees that nothing is left


@needs_bwrap
def test_the_input_is_a_file():
    said = run(
        "import os, sys\nprint(os.fstat(0).st_size, os.read(0, 2), open('/dev/stdin').read(), sys.stdin.read())", "abc"
    )
    assert said.stdout == "3 b'ab' abc c\n", said
    for way in (
        "os.write(0, b'x')",
        "os.write(os.open('/dev/stdin', os.O_RDWR), b'x')",
        "os.truncate('/proc/self/fd/0', 1 << 20)",
    ):
        assert attempt(way).startswith(("OSError", "PermissionError")), way


@needs_bwrap
def test_what_site_gives_is_there():
    assert run("print(callable(help)); exit()").stdout == "True\n"
    assert run("try:\n    quit(3)\nfinally:\n    print(__file__)").exit_code == 3
    assert run("def f(a: int): pass\nprint(f.__annotations__['a'] is int)").stdout == "True\n"


# -- without it --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_bwrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    sandbox_module._problem.cache_clear()
    sandbox_module._warn_once.cache_clear()
    yield tmp_path
    sandbox_module._problem.cache_clear()
    sandbox_module._warn_once.cache_clear()


def test_without_bubblewrap_it_refuses(no_bwrap):
    with pytest.raises(RewardError, match=r"bwrap is not installed. Install bubblewrap"):
        Sandbox().check()
    with pytest.raises(RewardError, match="no sandbox"):
        Sandbox().run_sync("print(1)")


def test_with_a_bubblewrap_that_does_not_work_it_refuses(no_bwrap):
    (no_bwrap / "bwrap").write_text("#!/bin/sh\necho bwrap: no permission to make a namespace >&2\nexit 1\n")
    (no_bwrap / "bwrap").chmod(0o755)
    with pytest.raises(RewardError, match=r"could not be made: bwrap: no permission.*AppArmor"):
        Sandbox().check()


def test_unsandboxed_by_choice(no_bwrap):
    box = Sandbox(seconds=1.0, memory=256, files=16, output=1000, allow_unsandboxed=True)
    with pytest.warns(RuntimeWarning, match="WITHOUT A SANDBOX"):
        result = box.run_sync("import os; open('file', 'w'); print(os.getcwd(), input(), sorted(os.environ))", "x")
    assert result.status == "ok"
    folder = Path(result.stdout.split()[0])
    assert folder.name.startswith("cohort-program-")
    assert not folder.exists()
    with warnings.catch_warnings():  # it is said once
        warnings.simplefilter("error")
        assert box.run_sync("import time; time.sleep(60)").status == "timeout"
    assert box.run_sync("x = bytearray(10**9)").status == "memory"
    assert box.run_sync("print('x' * 2000)").status == "output"
    assert "File too large" in box.run_sync("open('f', 'wb').write(bytes(2 << 24))").stderr
    child = "import os, time\nif os.fork() == 0: time.sleep(60)\nprint(1)"
    assert box.run_sync(child).stdout == "1\n"  # the child is killed with the group: the fixture looks


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_no_negative_files():
    with pytest.raises(RewardError, match="the sandbox's files must be 0 or above, got -1"):
        Sandbox(files=-1)


@pytest.mark.parametrize("name", ["seconds", "memory", "output", "threads"])
def test_limits_are_above_0(name):
    with pytest.raises(RewardError, match=f"the sandbox's {name} must be above 0, got -1"):
        Sandbox(**{name: -1})


@needs_bwrap
def test_an_interpreter_that_is_none():
    with pytest.raises(RewardError, match="no/such/python"):
        Sandbox(python="/no/such/python").check()


def test_no_torch_is_imported():
    script = "import sys, cohort.rewards.sandbox, cohort.rewards.code; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, env=PYTHON_PATH)


ALLOW, KILL = 0x7FFF0000, 0x80000000
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine: str, number: int, argument: int = 0, architecture: int | None = None) -> int:
    """Run the filter as the kernel does."""
    steps = list(struct.iter_unpack("HBBI", system_call_filter(machine)))
    data = struct.pack("<IIQ6Q", number, architecture or ARCHITECTURE[machine], 0, argument, 0, 0, 0, 0, 0)
    at, value = 0, 0
    while True:
        code, if_so, if_not, operand = steps[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}[code]
            at += if_so if holds else if_not


@pytest.mark.parametrize(
    ("machine", "read", "execve", "clone", "pair", "prctl"),
    [("x86_64", 0, 59, 56, 53, 157), ("aarch64", 63, 221, 220, 199, 167)],
)
def test_the_filter(machine, read, execve, clone, pair, prctl):
    def fails(error):
        return 0x50000 | error

    assert verdict(machine, read) == verdict(machine, execve) == ALLOW
    assert verdict(machine, read, architecture=0x40000003) == KILL  # 32-bit x86
    threads, process, namespace = 0x3D0F00, 0x1200011, 0x10000000
    assert verdict(machine, clone, threads) == ALLOW
    assert verdict(machine, clone, process) == verdict(machine, clone, namespace) == fails(errno.EPERM)
    assert verdict(machine, 435) == verdict(machine, 457) == verdict(machine, 0x40000000) == fails(errno.ENOSYS)
    assert verdict(machine, pair, 1) == ALLOW
    assert {verdict(machine, pair, domain) for domain in (2, 10, 16, 17, 40)} == {fails(errno.EAFNOSUPPORT)}
    assert verdict(machine, prctl, 1) == fails(errno.EPERM)
    assert verdict(machine, prctl, 15) == ALLOW
    for numbers in DENIED.values():
        number = numbers[0 if machine == "x86_64" else 1]
        if number is not None:
            assert verdict(machine, number) == fails(errno.EPERM)


def test_no_filter_for_other_machines():
    with pytest.raises(RewardError, match="no filter for riscv64: it runs on x86_64 and aarch64"):
        system_call_filter("riscv64")


def test_threads_of_this_process_do_not_matter():
    """Sandboxes are started from any thread, and live on while it does."""
    if NONE:
        pytest.skip(NONE)
    results = []
    threads = [threading.Thread(target=lambda: results.append(run("print(1)").stdout)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["1\n"] * 4
