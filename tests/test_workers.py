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
    end = time.monotonic() + 10
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


def test_a_file_that_has_changed_or_gone_is_what_it_was(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(): return 1\n")
    function = load_function(f"{file}:f", what="reward")
    file.write_text("def f(): return 100\n")
    with Workers(1) as workers:
        assert workers.submit(function, {}).result() == 1
        file.unlink()
        workers.close()
        assert workers.submit(function, {}).result() == 1


def test_functions_of_a_script_do_not_run_it_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from cohort.workers import Workers\n"
        "print('once')\n"
        "factor = 3\n"
        "def f(x): return factor * x\n"
        "with Workers(1) as workers: print(workers.submit(f, {'x': 5}).result())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "once\n15\n"


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
        (os._exit, {"status": 3}, r"died \(exit code 3\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), {}, "killed by SIGKILL: out of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), {}, "killed by SIGSEGV"),
        (double, {"x": (n for n in "ab")}, "arguments cannot be sent"),
        (lambda: (n for n in "ab"), {}, "annot pickle"),
        (double, {"y": 1}, "unexpected keyword"),
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


def test_a_function_that_cannot_be_sent_is_refused_at_once(workers):
    generator = (n for n in "ab")
    with pytest.raises(CallFailed, match="function cannot be sent"):
        workers.submit(lambda: generator, {})


def test_a_call_that_takes_too_long_is_killed_with_its_child_processes(tmp_path):
    def parent(path):
        import pathlib
        import subprocess
        import time

        pathlib.Path(path).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        time.sleep(60)

    with Workers(1) as workers:
        before = workers.submit(os.getpid, {}).result()
        with pytest.raises(CallFailed, match=r"took more than 2 s") as raised:
            workers.submit(parent, {"path": str(tmp_path / "pid")}, timeout=2.0).result()
        assert raised.value.timed_out
        assert not alive(before)
        wait_for_end(int((tmp_path / "pid").read_text()))
        assert workers.submit(os.getpid, {}).result() != before


def test_child_processes_of_a_call_that_crashed_are_killed(tmp_path, workers):
    def crash(path):
        import os
        import pathlib
        import subprocess

        pathlib.Path(path).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        os._exit(4)

    with pytest.raises(CallFailed, match=r"died \(exit code 4\)"):
        workers.submit(crash, {"path": str(tmp_path / "pid")}).result()
    wait_for_end(int((tmp_path / "pid").read_text()))


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


def test_a_closed_pool_starts_no_process_for_a_call_that_was_about_to_begin():
    process = _Process()
    process.stop(for_good=True)
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


@pytest.mark.parametrize("endless", ["    while True: pass\n", "    import re; re.match('(a+)+b', 'a' * 60)\n"])
def test_workers_die_with_their_parent(tmp_path, endless):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nfrom cohort.workers import Workers\n"
        "w = Workers(1)\nprint(w.submit(os.getpid, {}).result(), flush=True)\n"
        f"def endless():\n{endless}"
        "w.submit(endless, {})\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_for_end(pid)
