"""What the program waits for is said when it takes far longer than before."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cohort import watchdog
from cohort.config import RewardConfig
from cohort.rewards import RewardRunner
from cohort.rewards.contract import TrainerState
from cohort.watchdog import RANKS, waiting
from tests.rewards.conftest import rollout


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """Apart from other tests, and without the thread: ``_look`` is called with the time that it is to be."""
    monkeypatch.setattr(watchdog, "_longest", {})
    monkeypatch.setattr(watchdog, "_threads", {})
    monkeypatch.setattr(watchdog, "_ranks", [])
    monkeypatch.setattr(watchdog, "_watch", lambda _: None)


def reports(caplog):
    found = [record.getMessage() for record in caplog.records if record.name == "cohort.watchdog"]
    caplog.clear()
    return [text.partition(". kill -QUIT")[0] for text in found]


def test_what_takes_far_longer_than_before_is_reported_each_time_that_it_has_doubled(caplog):
    watchdog._longest.update({"scoring": 30.0, "reward judge": 3.14159})
    with waiting("scoring"), waiting("reward judge", lambda: "sample 41"):
        start = watchdog._threads[threading.get_ident()][0].start
        watchdog._look(start + 59)
        assert reports(caplog) == []
        watchdog._look(start + 61)
        assert reports(caplog) == ["reward judge: 61 s so far, at most 3.1 s before, sample 41"]
        watchdog._look(start + 121)
        assert reports(caplog) == []
        watchdog._look(start + 151)
        assert reports(caplog) == ["scoring: 151 s so far, at most 30.0 s before; reward judge: 151 s, sample 41"]
        watchdog._look(start + 301)
        assert reports(caplog) == []
        watchdog._look(start + 303)
        assert len(reports(caplog)) == 1
    assert reports(caplog) == ["reward judge: ended after 0 s", "scoring: ended after 0 s"]
    watchdog._look(start + 10_000)
    assert reports(caplog) == []


def test_what_has_never_ended_gets_more_time(caplog):
    def broken():
        raise ValueError

    with waiting("sampling", broken):
        start = watchdog._threads[threading.get_ident()][0].start
        watchdog._look(start + 299)
        assert reports(caplog) == []
        watchdog._look(start + 300)
        assert reports(caplog) == ["sampling: 300 s so far"]
    with pytest.raises(KeyError), waiting("sampling"):
        raise KeyError
    assert watchdog._threads == {}


def test_a_first_rollout_that_progresses_is_reported_once(caplog):
    ended = 0
    with waiting("sampling", lambda: f"{ended} of 64 completions have ended"):
        start = watchdog._threads[threading.get_ident()][0].start
        for second in range(300, 1800, 10):
            watchdog._look(start + second)
            ended += second % 300 == 0
        assert reports(caplog) == ["sampling: 300 s so far, 0 of 64 completions have ended"]
        watchdog._look(start + 1800)
        assert reports(caplog) == []
        watchdog._look(start + 2100)  # none has ended for 300 s
        assert reports(caplog) == ["sampling: 2100 s so far, 5 of 64 completions have ended"]


def test_the_rewards_of_an_evaluation_are_not_compared_with_those_of_training():
    runner = RewardRunner([lambda completion: 1.0])
    for evaluating in (False, True):
        runner.score(rollout(["a"]), TrainerState(evaluating=evaluating))
    assert [name.partition("<")[0].partition("lambda")[0] for name in watchdog._longest] == [
        "reward ",
        "evaluation reward ",
    ]


def test_the_other_ranks_say_what_they_wait_for(caplog, monkeypatch):
    class Store(dict):
        set = dict.__setitem__

        def check(self, keys):
            return all(key in self for key in keys)

        def get(self, key):
            return self[key].encode()

    store, entered, leave = Store(), threading.Event(), threading.Event()

    def stuck():  # as rank 1, in another thread
        with waiting("scoring"), waiting("reward judge", lambda: "sample 41"):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=stuck)
    thread.start()
    assert entered.wait(10)
    watchdog.share(store, 1, 2)
    watchdog._look(time.monotonic() + 9)
    assert store == {}
    watchdog._look(time.monotonic() + 20)
    assert store == {"waits/1": "scoring: 20 s so far; reward judge: 20 s, sample 41"}
    leave.set()
    thread.join()
    watchdog.share(store, 0, 2)
    watchdog._longest[RANKS] = 1.0
    with waiting(RANKS, watchdog.other_ranks):
        watchdog._look(time.monotonic() + 299)
        assert reports(caplog) == []
        watchdog._look(time.monotonic() + 301)
    text = "the other ranks: 301 s so far, at most 1.0 s before, rank 1 in scoring: 20 s so far; reward judge: 20 s, sample 41"
    assert reports(caplog)[0] == text
    assert list(store) == ["waits/1"]  # a rank that waits for others is not waited for
    assert watchdog.other_ranks()
    watchdog.share(store, 1, 2)
    watchdog._ranks[0].shared = "scoring"
    watchdog._look(time.monotonic())
    watchdog.share(store, 0, 2)
    assert watchdog.other_ranks() == ""


QUIT = """
import os, signal, sys, time
from cohort.watchdog import dumps_on_quit, waiting
from cohort.workers import Workers
def stuck(path): open(path, "w"); time.sleep(60)
with Workers(1) as workers:
    with dumps_on_quit():
        workers.submit(stuck, {"path": sys.argv[1]})
        while not os.path.exists(sys.argv[1]): time.sleep(0.01)
        with waiting("reward judge", lambda: "sample 41"):
            signal.raise_signal(signal.SIGQUIT)
        time.sleep(1.0)
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
"""


@pytest.mark.skipif(not hasattr(signal, "SIGQUIT"), reason="the system has no SIGQUIT")
def test_sigquit_prints_stacks_and_what_is_waited_for_and_the_program_goes_on(tmp_path):
    command = [sys.executable, "-c", QUIT, str(tmp_path / "begun")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "reward judge: 0 s so far, sample 41" in done.stderr
    assert done.stderr.count("most recent call first") >= 3  # threads of this process, and of the worker
    assert "in stuck" in done.stderr
    assert 'File "<string>", line 11 in <module>' in done.stderr


HELD = """
import ctypes, faulthandler, os, subprocess, sys, threading
from cohort import watchdog
watchdog.TICK = watchdog.ARM_SECONDS = 0.05
watchdog.HELD_SECONDS = float(sys.argv[1])
armed, arm = threading.Event(), faulthandler.dump_traceback_later
faulthandler.dump_traceback_later = lambda *given, **named: (arm(*given, **named), armed.set())
reads, writes = os.pipe()
os.dup2(writes, 2)  # what is printed comes back to this process
text, length, libc = ctypes.create_string_buffer(1 << 16), 0, ctypes.PyDLL(None)
with watchdog.dumps_on_quit(), watchdog.waiting("scoring"):
    assert armed.wait(60)
    if sys.argv[2] == "quit":
        again = f"while kill -QUIT {os.getpid()}; do sleep 0.05; done"
        subprocess.Popen(["sh", "-c", again], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while b'File "<string>", line 17 in <module>' not in text.raw:
        length += max(0, libc.read(reads, ctypes.byref(text, length), len(text) - length))  # holds the lock
    sys.stdout.buffer.write(text.raw[:length])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGQUIT"), reason="the system has no SIGQUIT")
@pytest.mark.parametrize(
    ("seconds", "how", "said"), [("1000", "quit", ""), ("0.2", "wait", "Timeout (0:00:00.200000)!")]
)
def test_stacks_are_printed_while_the_interpreter_lock_is_held_on_sigquit_and_after_a_while(seconds, how, said):
    """The process holds the lock until it has read its own stack: without one, it does not end."""
    command = [sys.executable, "-c", HELD, seconds, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout
    assert ("Timeout" in done.stdout) == bool(said)


def test_a_handler_of_the_user_is_kept():
    def handler(*_):
        pass

    before = signal.signal(signal.SIGQUIT, handler)
    try:
        with watchdog.dumps_on_quit():
            assert signal.getsignal(signal.SIGQUIT) is handler
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_a_reward_that_hangs_is_named(caplog):
    caplog.set_level(logging.WARNING)
    asked = threading.Event()

    def judge(completion, **_):
        if completion == "b" and not asked.is_set():
            asked.set()
            watchdog._look(time.monotonic() + 400)
        return 1.0

    RewardRunner([judge]).score(rollout(["a", "b"], ["c"]))
    assert reports(caplog)[0] == "reward judge: 400 s so far, at most 0.1 s before, sample 1"

    def slow(completion, **_):
        time.sleep(0.5 * (completion != "a"))
        return os.getpid()

    def look():
        end = time.monotonic() + 20
        while not caplog.records and time.monotonic() < end:
            watchdog._look(time.monotonic() + 10_000)
            time.sleep(0.01)

    runner = RewardRunner([slow], settings=RewardConfig(workers=1))
    runner.score(rollout(["a"]))
    thread = threading.Thread(target=look)
    thread.start()
    runner.score(rollout(["b"]))
    thread.join()
    runner.close()
    assert reports(caplog)[0].endswith("s before, sample 0")


def test_what_a_thread_waits_for():
    me = threading.get_ident()
    assert watchdog.waits_of(me) == []
    with waiting("scoring"), waiting("reward judge", lambda: "sample 41"):
        found = watchdog.waits_of(me)
        assert [(what, detail) for what, _, detail in found] == [("scoring", ""), ("reward judge", "sample 41")]
        assert [what for what, *_ in watchdog.waits_of(-1)] == ["scoring", "reward judge"]  # of another thread
