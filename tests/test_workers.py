"""Worker processes that can be killed."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from cohort import orphans
from cohort.plugins import load_function
from cohort.workers import CallFailed, Workers, _Process


def double(x):
    return 2 * x


def endless():
    while True:
        pass


def failing(key):
    return {}[key]


def alive(pid):
    """Whether a process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for_end(pid):
    end = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < end, "the process is still alive"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def workers():
    with Workers(2) as made:
        yield made


def test_functions_of_a_module_closures_and_builtins(workers):
    captured = 40
    assert workers.submit(double, {"x": "ab"}).result() == "abab"
    assert workers.submit(lambda x: x + captured, {"x": 2}).result() == 42
    assert workers.submit(pow, {"base": 2, "exp": 10}).result() == 1024


def test_what_a_function_prints_is_no_reason_to_fail(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:strict")
    with Workers(1) as made:
        assert made.submit(lambda: print("例 \ud83d"), {}).result() is None


def test_functions_of_files(workers, tmp_path):
    (tmp_path / "neighbour.py").write_text("ten = 10\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour import ten\nclass C:\n    def __call__(self, x): return ten * x\nc = C()\n"
    )
    function = load_function(f"{tmp_path}/mine.py:c", what="reward")
    assert workers.submit(function, {"x": 3}).result() == 30
    for number in (1, 2):  # files of the same name are different modules
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "same.py").write_text(f"def f(): return {number}\n")
    functions = [load_function(f"{tmp_path}/{number}/same.py:f", what="reward") for number in (1, 2)]
    assert [workers.submit(function, {}).result() for function in functions] == [1, 2]
    for change in (lambda file: file.write_text("def f(): return 100\n"), Path.unlink):  # the text loaded here counts
        change(tmp_path / "1" / "same.py")
        with Workers(1) as fresh:
            assert fresh.submit(functions[0], {}).result() == 1


def test_what_is_imported_to_load_a_function_and_its_arguments_takes_no_time_of_the_call(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.6)\nclass C: pass\ndef f(x): return 1\n")
    function = load_function(f"{tmp_path}/slow.py:f", what="reward")
    argument = load_function(f"{tmp_path}/slow.py:C", what="tool")()
    with Workers(1) as workers:
        assert workers.submit(function, {"x": argument}, timeout=0.5).result() == 1


def test_functions_of_a_script_do_not_run_it_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import enum, threading\nfrom dataclasses import dataclass\nfrom cohort.workers import Workers\n"
        "print('once')\n"
        "factor, lock = 3, threading.Lock()\n"
        "class Colour(enum.Enum): RED = 1\n"
        "@dataclass\n"
        "class Box: colour: Colour\n"
        "def f(x):\n    with lock: return factor * x\n"
        "def g(box): return box if isinstance(box, Box) and box.colour is Colour.RED else None\n"
        "with Workers(1) as workers:\n"
        "    print(workers.submit(f, {'x': 5}).result())\n"
        "    print(workers.submit(g, {'box': Box(Colour.RED)}).result() == Box(Colour.RED))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "once\n15\nTrue\n"


def test_a_worker_is_another_process_with_one_thread_and_no_torch(tmp_path, monkeypatch):
    for name in ("queue", "random", "types"):  # modules in the working folder do not replace those of Python
        (tmp_path / f"{name}.py").write_text("raise SystemExit(name)\n")
    monkeypatch.chdir(tmp_path)

    def facts():
        import os
        import sys
        import threading

        name = threading.current_thread().name
        return os.getpid(), os.environ["OMP_NUM_THREADS"], "torch" in sys.modules, name

    with Workers(1) as workers:
        pid, *rest = workers.submit(facts, {}).result()
    assert pid != os.getpid()
    assert rest == ["1", False, "MainThread"]


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (failing, {"key": "gold"}, r"raised KeyError: 'gold' \(test_workers.py, line \d+\)"),
        (os._exit, {"status": 3}, r"process \(exit code 3\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), {}, "killed by SIGKILL: out of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), {}, "killed by SIGSEGV"),
        (double, {"x": (n for n in "ab")}, "arguments cannot be sent"),
        (lambda: (n for n in "ab"), {}, "annot pickle"),
        (double, {"y": 1}, "unexpected keyword"),
        (lambda g=(n for n in "ab"): g, {}, "the function cannot be sent"),
    ],
)
def test_the_reason_of_a_failed_call(workers, function, arguments, message):
    with pytest.raises(CallFailed, match=message) as raised:
        workers.submit(function, arguments).result()
    assert not raised.value.timed_out
    if function is failing:
        assert "in failing" in raised.value.details
        assert "return {}[key]" in raised.value.details
    assert workers.submit(double, {"x": 4}).result() == 8


@pytest.mark.parametrize("ends", ["time.sleep(60)", "os._exit(4)"])
def test_a_call_that_takes_too_long_or_crashes_is_killed_with_its_child_processes(tmp_path, ends):
    def parent(path, ends):
        import os  # noqa: F401 - for ``ends``
        import pathlib
        import subprocess
        import time  # noqa: F401

        pathlib.Path(path).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        exec(ends)

    with Workers(1) as workers:
        before = workers.submit(os.getpid, {}).result()
        with pytest.raises(CallFailed, match=r"took more than 2 s|process \(exit code 4\)") as raised:
            workers.submit(parent, {"path": str(tmp_path / "pid"), "ends": ends}, timeout=2.0).result()
        assert raised.value.timed_out is ("sleep" in ends)
        assert not alive(before)
        wait_for_end(int((tmp_path / "pid").read_text()))
        assert workers.submit(os.getpid, {}).result() != before


def test_closing_ends_all_calls_and_the_next_call_starts_afresh():
    workers = Workers(1)
    workers.close()
    before = workers.submit(os.getpid, {}).result()
    futures = [workers.submit(endless, {}), workers.submit(endless, {})]
    while not futures[0].running():
        time.sleep(0.01)
    workers.close()
    wait(futures, timeout=10)
    for future in futures:
        with pytest.raises(CallFailed):
            future.result(0)
    assert not alive(before)
    assert workers.submit(double, {"x": 2}).result() == 4
    workers.close()
    (process := _Process("")).kill()  # a call that was about to begin starts no process
    with pytest.raises(CallFailed, match="the workers were stopped"):
        process.call((0, b""), {}, None)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no signal for the end of the parent")
def test_a_worker_whose_parent_ended_before_it_started_exits():
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        command = [sys.executable, "-m", "cohort.workers", str(theirs.fileno()), str(os.getppid())]
        assert subprocess.run(command, pass_fds=[theirs.fileno()], timeout=60, check=False).returncode == 1


def test_an_idle_worker_that_died_is_replaced(workers):
    for pid in {workers.submit(os.getpid, {}).result() for _ in range(8)}:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert [workers.submit(double, {"x": 1}).result() for _ in range(4)] == [2] * 4


def test_workers_die_with_their_parent(tmp_path):
    """Also in a call that never releases the interpreter lock."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nfrom cohort.workers import Workers\n"
        "w = Workers(1)\nprint(w.submit(os.getpid, {}).result(), flush=True)\n"
        "def endless():\n    import re; re.match('(a+)+b', 'a' * 60)\n"
        "w.submit(endless, {})\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for_end(pid)


def _holding(path):
    """Start a process in a session of its own, and write its id."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    Path(path).write_text(str(child.pid))
    return child.pid


def _hold(path):
    _holding(path)
    time.sleep(60)


@pytest.mark.parametrize("ends", ["timeout", "crash", "parent"])
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_child_in_a_session_of_its_own_ends_with_its_worker(tmp_path, ends):
    path = str(tmp_path / "pid")
    if ends == "parent":
        script = (
            "import os\nfrom cohort.workers import Workers\nfrom tests.test_workers import _holding\n"
            f"w = Workers(1)\nw.submit(_holding, {{'path': {path!r}}}).result()\nos.kill(os.getpid(), 9)"
        )
        root = Path(__file__).parents[1]
        assert subprocess.run([sys.executable, "-c", script], cwd=root, timeout=60, check=False).returncode == -9
    else:

        def hold(path, ends):
            _holding(path)
            os._exit(4) if ends == "crash" else time.sleep(60)

        with Workers(1) as workers, pytest.raises(CallFailed, match="more than 1 s|exit code 4"):
            workers.submit(hold, {"path": path, "ends": ends}, timeout=1.0 if ends == "timeout" else 60.0).result()
    wait_for_end(int(Path(path).read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_closing_a_pool_looks_for_the_processes_of_all_workers_at_once(tmp_path, monkeypatch):
    scans, kill_marked = [], orphans.kill_marked
    monkeypatch.setattr(orphans, "kill_marked", lambda mark: (scans.append(mark), kill_marked(mark)))
    paths = [tmp_path / "a", tmp_path / "b"]
    with Workers(2) as workers:
        for path in paths:
            workers.submit(_hold, {"path": str(path)})
        while not all(path.exists() and path.read_text() for path in paths):
            time.sleep(0.01)
    for path in paths:
        wait_for_end(int(path.read_text()))
    assert len(scans) == 1


def test_a_forked_process_that_comes_back_answers_nothing(workers):
    def forks(x):
        if os.fork() == 0 and x > 1:
            raise SystemExit(0)
        return x

    assert [workers.submit(forks, {"x": x}).result() for x in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_a_dead_worker_is_noticed_while_its_child_holds_the_connection():
    def forks():
        if os.fork() == 0:
            time.sleep(60)
        os._exit(4)

    with Workers(1) as workers, pytest.raises(CallFailed, match=r"lost its worker process \(exit code 4\)"):
        workers.submit(forks, {}).result(30)


class Stop(BaseException):
    def __str__(self):
        raise Stop


def test_any_exception_is_a_failed_call_and_its_message_is_cut(workers):
    def raises(kind, text=""):
        raise kind(text)

    pid = {workers.submit(os.getpid, {}).result() for _ in range(8)}
    for kind, message in (
        (Stop, r"raised Stop: \(no message\)"),
        (SystemExit, "raised SystemExit: "),
        (KeyboardInterrupt, "raised Key"),
    ):
        with pytest.raises(CallFailed, match=message):
            workers.submit(raises, {"kind": kind}).result()
    with pytest.raises(CallFailed, match=r"xxx \[999334 characters left out\] xxx") as raised:
        workers.submit(raises, {"kind": ValueError, "text": "x" * 10**6}).result()
    assert len(raised.value.details) < 11_000
    assert workers.submit(os.getpid, {}).result() in pid  # the workers live on
