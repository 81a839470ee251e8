"""Programs, their results, cancellation, pairs of programs, and machines without bubblewrap."""

import asyncio
import dataclasses
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from cohort.errors import ConfigError, SandboxError
from cohort.sandbox import Limits, Outcome, Program, Sandbox, sandbox
from cohort.workers import usable_cores
from tests.sandbox.conftest import sandboxes
from tests.sandbox.needs import needs_bwrap
from tests.sandbox.test_attacks import FILES, run

PYTHON_PATH = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2] / "src"), *sys.path])}
LIMITS = Limits(seconds=60.0)
SLEEP = Program("import time; time.sleep(60)")


# -- results -----------------------------------------------------------------------------------------------------------


@needs_bwrap
def test_a_program_runs_as_it_would_outside():
    source = """
import sys, dataclasses
@dataclasses.dataclass
class P:
    x: int
if __name__ == "__main__":
    print([P(int(line)) for line in sys.stdin], sys.argv, __file__, open("/dev/null").read() == "")
    print("ü", callable(help), P.__annotations__["x"] is int, "run_script" in globals(), file=sys.stderr)
    quit(3)
"""
    result = run(source, "1\n22\n")
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 3)
    assert result.stdout == "[P(x=1), P(x=22)] ['program.py'] program.py True\n"
    assert result.stderr == "ü True True False\n"
    assert 0 < result.seconds < 5


@needs_bwrap
@pytest.mark.parametrize(
    ("source", "outcome", "exit_code"),
    [
        ("raise SystemExit", "finished", 0),
        ("1/0", "failed", 1),
        ("def f(:", "failed", 1),
        ("import os; os._exit(7)", "failed", 7),
        ("import os; os.abort()", "failed", 134),
        ("import os; os.close(1); os.close(2); os.close(0)", "finished", 0),
        ("import asyncio\nasync def f(): await asyncio.sleep(0)\nasyncio.run(f())", "finished", 0),
        ("x = bytearray(10**9)", "memory", 1),
        ("import os; os.kill(os.getpid(), 9)", "memory", 137),
        ("import mmap; mmap.mmap(-1, 10**9)", "failed", 1),
    ],
)
def test_outcomes(source, outcome, exit_code):
    result = run(source)
    assert (result.outcome, result.exit_code) == (outcome, exit_code), result


@needs_bwrap
def test_large_inputs_and_output_that_is_not_utf8():
    assert run("print(1)", "x" * 3_000_000).stdout == "1\n"
    result = run("import os\nos.write(1, b'a\\xffb')\nos.write(2, str(len(input())).encode())", "x" * 3_000_000)
    assert (result.stdout, result.stderr) == ("a\ufffdb", "3000000")


@needs_bwrap
def test_programs_wait_for_a_processor():
    async def run_all():
        start = time.monotonic()
        programs = [Program(f"import time; time.sleep(0.3); print({i})") for i in range(count)]
        results = await asyncio.gather(*(Sandbox().run(program, LIMITS) for program in programs))
        return [int(result.stdout) for result in results], time.monotonic() - start

    count = len(os.sched_getaffinity(0)) + 1
    numbers, seconds = asyncio.run(run_all())
    assert numbers == list(range(count))
    assert seconds >= 0.6  # one of them had to wait


@needs_bwrap
def test_packages(monkeypatch, tmp_path):
    source = "import numpy, sys\nprint(numpy.arange(3).sum(), sys.flags.isolated, sys.flags.no_site)"
    assert "ModuleNotFoundError" in run(source).stderr
    assert Sandbox(packages=True).run_sync(Program(source), LIMITS).stdout == "3 1 1\n"
    # an environment below /tmp is visible, although the sandbox has a /tmp of its own
    (tmp_path / "user_package.py").write_text("value = 7")
    tmp_path.chmod(0o755)  # the program is another user
    monkeypatch.setattr(sandbox, "installed_packages", lambda: [str(tmp_path)])
    source = f"import user_package\nprint(user_package.value)\nopen({str(tmp_path / 'new')!r}, 'w')"
    result = Sandbox(packages=True).run_sync(Program(source), LIMITS)
    assert result.stdout == "7\n"
    assert "Read-only file system" in result.stderr


# -- pairs -------------------------------------------------------------------------------------------------------------

HARNESS = """
import os
def main(source, reads, writes):
    exec(source, {"send": lambda text: os.write(writes, text.encode()), "receive": lambda: os.read(reads, 99).decode()})
"""


def run_pair(tmp_path, client, server, **server_limits):
    harness = tmp_path / "talk" / "harness.py"
    harness.parent.mkdir(exist_ok=True)
    harness.write_text(HARNESS)
    programs = (Program(source, harness=harness) for source in (client, server))
    return asyncio.run(Sandbox().run_pair(*programs, Limits(seconds=5.0), Limits(**server_limits)))


@needs_bwrap
def test_a_pair_talks_and_the_server_ends_with_the_client(tmp_path):
    start = time.monotonic()
    client, server = "send('2')\nprint(receive())", "send(str(int(receive()) + 1))\nprint('sum', flush=True)"
    results = run_pair(tmp_path, client, f"{server}\nimport time; time.sleep(60)")
    assert [result.stdout for result in results] == ["3\n", "sum\n"]
    assert [result.outcome for result in results] == [Outcome.FINISHED, Outcome.TIMEOUT]
    assert time.monotonic() - start < 4
    flood = "import os\nwhile True: os.write(1, b'x' * 65536)"  # the client learns that the server is gone
    client, server = run_pair(tmp_path, "print(repr(receive()))", flood, output=100_000)
    assert (client.outcome, client.stdout) == (Outcome.FINISHED, "''\n")
    assert (server.outcome, len(server.stdout)) == (Outcome.OUTPUT, 100_000)


# -- the end -----------------------------------------------------------------------------------------------------------


@needs_bwrap
def test_a_program_ends_with_its_parent():
    script = "from cohort.sandbox import *; Sandbox().run_sync(Program('import time; time.sleep(60)'), Limits(60))"
    before = sandboxes()
    parent = subprocess.Popen([sys.executable, "-c", script], env=PYTHON_PATH)
    while len(sandboxes() - before) < 3 and parent.poll() is None:  # bubblewrap's two processes, and the program
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    # the fixture checks that the processes are gone


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root maps users from outside")
def test_a_program_ends_with_its_parent_while_the_sandbox_is_made():
    """The parent dies after bubblewrap has made its first process, which waits for the parent."""
    script = """
import os, signal
from cohort.sandbox import Limits, Program, Sandbox, process
def die(pid):
    os.kill(int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1]), signal.SIGKILL)  # bubblewrap itself
    print("made", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
process.map_users = die
Sandbox().run_sync(Program("import time; time.sleep(60)"), Limits(60))
"""
    parent = subprocess.run(
        [sys.executable, "-c", script], env=PYTHON_PATH, capture_output=True, text=True, check=False
    )
    assert (parent.stdout, parent.returncode) == ("made\n", -signal.SIGKILL), parent.stderr


@needs_bwrap
def test_a_cancelled_run_is_killed_at_any_time():
    async def cancel(seconds):
        task = asyncio.create_task(Sandbox().run(SLEEP, LIMITS))
        await asyncio.sleep(seconds)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=3)
        assert done, f"cancelled after {seconds} s, it never ended"
        assert task.cancelled()

    async def cancel_all():
        for seconds in [*(number * 0.004 for number in range(8)), 0.3]:
            await cancel(seconds)
            assert not sandboxes()
        await asyncio.gather(*(cancel(0.3) for _ in range(len(os.sched_getaffinity(0)) + 1)))  # one is in the queue
        return await Sandbox().run(Program("print(1)"), LIMITS)

    assert asyncio.run(cancel_all()).stdout == "1\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, bubblewrap is not tried")
@pytest.mark.parametrize("times", [1, 2])
def test_a_cancelled_run_prints_nothing(times):
    """Its end is an error that nobody waits for. Cancelled twice, the wait for this end ends as well."""
    printed, begun, ended = [], threading.Event(), threading.Event()

    def running(cancelled):
        begun.set()
        cancelled.wait(60)
        ended.wait(60)
        raise SandboxError("the run was cancelled")

    async def cancel():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context))
        task = asyncio.ensure_future(sandbox._in_queue(running))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        ended.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        meeting = threading.Barrier(threads := usable_cores())  # each thread forgets its last call with the next one
        await asyncio.gather(*(sandbox._in_queue(lambda _: meeting.wait(60)) for _ in range(threads)))
        gc.collect()

    asyncio.run(cancel())
    assert printed == []


def test_a_run_is_cancelled_while_bubblewrap_hangs(monkeypatch, tmp_path):
    """Its first process is in a session of its own, and only its mark leads to it."""
    hang = "setsid /bin/sh -c 'sleep 5 > /dev/null 2>&1; true' \"$@\" &\nwait\n"
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{hang}")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "_problem", lambda *_: None)

    async def cancel():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Sandbox().run(SLEEP, LIMITS), timeout=0.5)

    start = time.monotonic()
    asyncio.run(cancel())
    assert time.monotonic() - start < 4
    assert not sandboxes()


@needs_bwrap
def test_a_sandbox_that_something_else_kills_is_an_error():
    async def kill():
        before = sandboxes()
        task = asyncio.create_task(Sandbox().run(SLEEP, LIMITS))
        while len(found := sandboxes() - before) < 3:
            await asyncio.sleep(0.02)
        os.kill(min(found), signal.SIGKILL)  # bubblewrap itself, which is the parent of the others
        await task

    with pytest.raises(SandboxError, match="something else killed the sandbox"):
        asyncio.run(kill())


# -- without bubblewrap ------------------------------------------------------------------------------------------------


@pytest.fixture
def no_bwrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("_problem", "_warn_once"):  # without what this process has cached
        monkeypatch.setattr(sandbox, name, functools.cache(getattr(sandbox, name).__wrapped__))
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, bubblewrap is not tried")
def test_without_a_bubblewrap_that_works_it_refuses(no_bwrap):
    with pytest.raises(SandboxError, match=r"no sandbox.*bwrap is not installed. Install bubblewrap"):
        Sandbox().check()
    with pytest.raises(SandboxError, match="no sandbox"):
        asyncio.run(Sandbox().run(SLEEP, LIMITS))
    (no_bwrap / "bwrap").write_text("#!/bin/sh\necho bwrap: no permission to make a namespace >&2\nexit 1\n")
    (no_bwrap / "bwrap").chmod(0o755)
    with pytest.raises(SandboxError, match=r"could not be made: bwrap: no permission.*AppArmor"):
        Sandbox().check()


def test_unsandboxed_by_choice(no_bwrap):
    limits = Limits(seconds=1.0, memory=256, disk=16, output=1000)

    def run(source, stdin="", **changes):
        program = Program(source, stdin, FILES)
        return Sandbox(allow_unsandboxed=True).run_sync(program, dataclasses.replace(limits, **changes))

    with pytest.warns(RuntimeWarning, match="WITHOUT A SANDBOX"):
        result = run("import os; open('file', 'w'); print(os.getcwd(), input(), open('b/c').read())", "x", seconds=9)
    assert result.outcome is Outcome.FINISHED
    folder, stdin, given = result.stdout.split()
    assert (Path(folder).name[:15], stdin, given) == ("cohort-program-", "x", "23")
    assert not Path(folder).exists()
    with warnings.catch_warnings():  # the warning is given once
        warnings.simplefilter("error")
        assert run(SLEEP.source, seconds=0.2).outcome is Outcome.TIMEOUT
    assert run("x = bytearray(10**9)").outcome is Outcome.MEMORY
    assert run("print('x' * 2000)").outcome is Outcome.OUTPUT
    assert "File too large" in run("open('f', 'wb').write(bytes(2 << 24))").stderr
    assert run("import os; os.close(1); os.close(2)").outcome is Outcome.FINISHED
    assert run("import os, time\nif os.fork() == 0: time.sleep(60)\nprint(1)", seconds=9).stdout == "1\n"
    # the child is killed with the process group: the fixture checks


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_limits_and_files_are_checked():
    for name in ("seconds", "memory", "output", "threads", "disk"):
        bound = "0 or above" if name == "disk" else "above 0"
        with pytest.raises(ConfigError, match=f"the limit {name} must be {bound}, got -1"):
            Limits(**{name: -1})
    for name in ("/etc/passwd", "a/../../b", ""):
        with pytest.raises(ConfigError, match="relative paths"):
            Program("", files={name: b""})
