"""Functions in processes that can be killed."""

import os
import signal
import sys
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from cohort.plugins import load_function
from cohort.workers import CallFailed, Workers


def double(x):
    return 2 * x


def endless():
    while True:
        pass


def failing(key):
    return {}[key]


def alive(pid):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.fixture
def workers():
    with Workers(2) as made:
        yield made


def test_functions_of_a_module_closures_and_built_in_ones(workers):
    captured = 40
    assert workers.submit(double, {"x": "ab"}).result() == "abab"
    assert workers.submit(lambda x: x + captured, {"x": 2}).result() == 42
    assert workers.submit(pow, {"base": 2, "exp": 10}).result() == 1024


def test_functions_of_a_file_are_loaded_from_it(workers, tmp_path):
    (tmp_path / "neighbour.py").write_text("ten = 10\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour import ten\nclass C:\n    def __call__(self, x): return ten * x\nc = C()\n"
    )
    function = load_function(f"{tmp_path}/mine.py:c", what="reward")
    assert workers.submit(function, {"x": 3}).result() == 30


def test_two_files_of_one_name_are_two_modules(workers, tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "same.py").write_text(f"def f(): return {number}\n")
    functions = [load_function(f"{tmp_path}/{number}/same.py:f", what="reward") for number in (1, 2)]
    assert [workers.submit(function, {}).result() for function in functions] == [1, 2]


def test_functions_of_a_script_do_not_run_it_again(tmp_path):
    import subprocess

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


def test_a_worker_is_another_process_with_one_thread_and_no_torch(workers):
    pid, threads, torch = workers.submit(
        lambda: (
            __import__("os").getpid(),
            __import__("os").environ["OMP_NUM_THREADS"],
            "torch" in __import__("sys").modules,
        ),
        {},
    ).result()
    assert pid != os.getpid()
    assert (threads, torch) == ("1", False)


def test_functions_run_in_the_main_thread(workers):
    assert workers.submit(lambda: __import__("threading").current_thread().name, {}).result() == "MainThread"


def test_what_takes_too_long_is_killed_and_the_next_call_has_a_new_process(workers):
    before = workers.submit(os.getpid, {}).result()
    with pytest.raises(CallFailed, match=r"took more than 0.3 s") as raised:
        workers.submit(endless, {}, timeout=0.3).result()
    assert raised.value.timed_out
    pids = {future.result() for future in [workers.submit(os.getpid, {}) for _ in range(8)]}
    assert len(pids) <= 2
    assert all(alive(pid) for pid in pids)
    assert before in pids or not alive(before)
    assert workers.submit(double, {"x": 1}).result() == 2


def test_what_a_killed_call_has_started_dies_with_it(workers, tmp_path):
    def parent(path):
        import pathlib
        import subprocess
        import time

        child = subprocess.Popen(["sleep", "60"])
        pathlib.Path(path).write_text(str(child.pid))
        time.sleep(60)

    with pytest.raises(CallFailed, match="took more than"):
        workers.submit(parent, {"path": str(tmp_path / "pid")}, timeout=1.5).result()
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not alive(pid):
            return
        time.sleep(0.05)
    raise AssertionError("the child lives")


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (failing, {"key": "gold"}, r"raised KeyError: 'gold' \(test_workers.py, line \d+\)"),
        (os._exit, {"status": 3}, r"died \(exit code 3\)"),
        (sys.exit, {}, r"died \(exit code 0\)"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), {}, "killed by SIGKILL: out of memory"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), {}, "killed by SIGSEGV"),
        (double, {"x": (n for n in "ab")}, "arguments cannot be sent"),
        (lambda: (n for n in "ab"), {}, "annot pickle"),
        (double, {"y": 1}, "unexpected keyword"),
    ],
)
def test_calls_that_fail_say_why(workers, function, arguments, message):
    with pytest.raises(CallFailed, match=message) as raised:
        workers.submit(function, arguments).result()
    assert not raised.value.timed_out
    assert workers.submit(double, {"x": 4}).result() == 8


def test_the_traceback_comes_along(workers):
    with pytest.raises(CallFailed) as raised:
        workers.submit(failing, {"key": 1}).result()
    assert "in failing" in raised.value.details
    assert "return {}[key]" in raised.value.details


def test_a_function_that_cannot_be_sent_is_refused_at_once(workers):
    generator = (n for n in "ab")
    with pytest.raises(CallFailed, match="function cannot be sent"):
        workers.submit(lambda: generator, {})


def test_closing_kills_and_ends_what_waits():
    workers = Workers(1)
    futures = [workers.submit(endless, {}), workers.submit(endless, {})]
    while not futures[0].running():
        time.sleep(0.01)
    workers.close()
    wait(futures, timeout=10)
    assert all(future.done() for future in futures)
    with pytest.raises(CallFailed):
        futures[0].result()


def test_after_closing_workers_start_afresh():
    workers = Workers(1)
    workers.close()
    before = workers.submit(os.getpid, {}).result()
    workers.close()
    assert not alive(before)
    assert workers.submit(double, {"x": 2}).result() == 4
    workers.close()


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
        assert workers.submit(double, {"x": 1}).result() == 2


def test_modules_in_the_working_folder_shadow_nothing(tmp_path, monkeypatch):
    for name in ("queue", "random", "types"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(name)\n")
    monkeypatch.chdir(tmp_path)
    with Workers(1) as workers:
        assert workers.submit(double, {"x": 1}).result() == 2


def test_a_worker_that_died_idle_is_replaced(workers):
    for pid in {workers.submit(os.getpid, {}).result() for _ in range(8)}:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert [workers.submit(double, {"x": 1}).result() for _ in range(4)] == [2] * 4


def test_what_a_crashed_call_has_started_dies_too(workers, tmp_path):
    def crash(path):
        import os
        import pathlib
        import subprocess

        pathlib.Path(path).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        os._exit(4)

    with pytest.raises(CallFailed, match=r"died \(exit code 4\)"):
        workers.submit(crash, {"path": str(tmp_path / "pid")}).result()
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("endless", ["    while True: pass\n", "    import re; re.match('(a+)+b', 'a' * 60)\n"])
def test_workers_die_with_their_parent(tmp_path, endless):
    import subprocess

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
    for _ in range(200):
        if not alive(pid):
            return
        time.sleep(0.05)
    raise AssertionError("the worker lives")
