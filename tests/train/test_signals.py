"""Signals to a process that trains, and ``cohort save``."""

import json
import re
import signal
import sys
import time
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from cohort import GRPOTrainer, terminal
from cohort.calls import interruptible
from cohort.cli.main import main
from cohort.launch import rank
from cohort.train import signals
from cohort.train.signals import Requests, obeying_signals
from tests import warm
from tests.conftest import DEMO_MODEL
from tests.launch.test_processes import wait_for
from tests.train.harness import metrics_of, untimed_metrics_of

SLOW_REWARD = """
import os, time
def digits(completions, **_):
    time.sleep(float(os.environ.get("REWARD_SECONDS", "0.3")))
    return [float(sum(c.isdigit() for c in text)) for text in completions]
"""
STUBBORN_REWARD = """
import pathlib, time
def digits(completions, **_):
    while len(completions) > 4:  # not in the trial before the run
        pathlib.Path("scoring").touch()
        try:
            time.sleep(60)
        except BaseException:
            pass
    return [0.0] * len(completions)
"""


def write_run(folder, reward=SLOW_REWARD, **settings):
    """A config file in a folder, with a data set and a reward file."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1"}) + "\n" for n in range(8)))
    (folder / "reward.py").write_text(reward)
    settings = {"max_steps": 4, "save_steps": 0} | settings
    (folder / "c.toml").write_text(
        f"[model]\npath='{DEMO_MODEL}'\ndevice='cpu'\nprecision='float32'\n[data]\ntrain='rows.jsonl'\n"
        "[reward]\nfunctions=['reward.py:digits']\n[objective]\nnum_iterations=2\nminibatches=2\n"
        "[rollout]\nprompts_per_step=4\nnum_generations=2\nmax_completion_length=4\n"
        "[optim]\nmicrobatch_tokens=64\n[run]\noutput_dir='out'\n"
        + "".join(f"{name}={value}\n" for name, value in settings.items())
    )


started = []


@pytest.fixture(autouse=True)
def _no_process_is_left():
    yield
    for process in started:
        process.kill()
        process.communicate()
    started.clear()


def begin(folder, *arguments, **variables):
    started.append(warm.begin(*arguments, folder=folder, **variables))
    return started[-1]


def steps_of(folder):
    """Steps whose metrics are written."""
    return len(metrics_of(folder)) if (folder / "metrics.jsonl").exists() else 0


def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path):
    write_run(tmp_path, max_steps=3)
    process = begin(tmp_path, "train", "c.toml")
    straight = begin(tmp_path, "train", "c.toml", "--run.output_dir", "straight", REWARD_SECONDS="0")
    wait_for(lambda: steps_of(tmp_path / "out") == 1, 60)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "cohort: SIGTERM: stopping with a checkpoint" in errors
    assert re.search("cohort: stopped by SIGTERM (in step 2, |after step 1;)", errors.splitlines()[-1])
    assert "continue with cohort resume out" in errors.splitlines()[-1]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-1"]
    resumed = begin(tmp_path, "train", "c.toml", "--resume", "auto", REWARD_SECONDS="0")
    assert resumed.communicate(timeout=60)[1] == ""
    straight.communicate(timeout=60)
    assert untimed_metrics_of(tmp_path / "out") == untimed_metrics_of(tmp_path / "straight")


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one"}])
def test_a_rank_gets_the_first_signal_twice(monkeypatch, variables):
    """From the scheduler and from its launcher."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(signals, "_end", lambda *_: None)
    requests = Requests()
    with obeying_signals(requests, 0.4):
        signal.raise_signal(signal.SIGTERM)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            assert callable(signal.getsignal(number))
            signal.raise_signal(number)
        assert (requests.stop, requests.reason) == (True, "SIGTERM")
        with pytest.raises(CancelledError), interruptible():  # after half of the time
            time.sleep(5)
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_terminal_is_set_back_before_a_second_signal_can_end_the_process(monkeypatch):
    handlers = []
    monkeypatch.setattr(terminal, "changed", [lambda: handlers.append(signal.getsignal(signal.SIGINT))])
    with obeying_signals(Requests(), 0):
        ours = signal.getsignal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert handlers == [ours]


def test_a_request_to_save_before_the_run_does_not_end_it(monkeypatch, tmp_path):
    """While the command line parses, checks and loads: the signal's default is to end the process."""
    found = []

    def begins(*_, **__):
        found.append(signal.getsignal(signal.SIGUSR2))
        assert found[-1] is not signal.SIG_DFL
        signal.raise_signal(signal.SIGUSR2)
        requests = Requests()
        with obeying_signals(requests, 0):
            signal.raise_signal(signal.SIGUSR2)
        assert requests.save
        sys.exit(7)

    monkeypatch.setattr("cohort.cli.training.run_training", begins)
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="7"):
        main(["train", "c.toml"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["rank", str(tmp_path), "1", str(tmp_path), "cohort"])
    monkeypatch.setattr(rank, "end_with", begins)
    with pytest.raises(SystemExit, match="7"):
        rank.main()
    assert len(found) == 2
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.parametrize("name", ["stop", "save_now"])
def test_a_signal_in_the_middle_of_a_request_does_not_wait_for_it(name):
    """A handler runs inside the code that it interrupts: it must not take a lock that this code may hold."""
    requests, tracing = Requests(), sys.gettrace()
    number = {"stop": signal.SIGTERM, "save_now": signal.SIGUSR2}[name]
    handlers = []

    def trace(*_):
        signal.signal(number, handlers[0])
        signal.raise_signal(number)
        return trace

    def hangs(*_):
        raise AssertionError("the handler waits")

    before = signal.signal(signal.SIGALRM, hangs)
    try:
        with obeying_signals(requests, 0):
            handlers.append(signal.getsignal(number))
            signal.setitimer(signal.ITIMER_REAL, 1)
            sys.settrace(trace)
            getattr(GRPOTrainer, name)(SimpleNamespace(_requests=requests))
            sys.settrace(tracing)
    finally:
        sys.settrace(tracing)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert requests.stop is (name == "stop")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_whose_reward_swallows_interrupts(tmp_path, number):
    write_run(tmp_path, STUBBORN_REWARD)
    process = begin(tmp_path, "train", "c.toml")
    wait_for(lambda: (tmp_path / "scoring").exists(), 60)
    process.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=5)
    assert process.returncode == -number


@pytest.mark.slow
def test_a_run_that_cannot_stop_ends_after_its_time(tmp_path):
    write_run(tmp_path, STUBBORN_REWARD, stop_seconds=1.5)
    process = begin(tmp_path, "train", "c.toml")
    wait_for(lambda: (tmp_path / "scoring").exists(), 60)
    process.send_signal(signal.SIGUSR1)
    started = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert process.returncode == 128 + signal.SIGUSR1
    assert "has not stopped within 1.5 s (run.stop_seconds)" in errors


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "command"])
def test_a_checkpoint_without_stopping(tmp_path, how):
    write_run(tmp_path, max_steps=1000)
    process, out = begin(tmp_path, "train", "c.toml"), tmp_path / "out"
    wait_for(lambda: steps_of(out) >= 1, 60)
    if how == "signal":
        process.send_signal(signal.SIGUSR2)
        wait_for(lambda: list((out / "checkpoints").glob("step-*[0-9]")), 20)
    else:
        output, errors = begin(tmp_path, "save", "out").communicate(timeout=120)
        assert "checkpoints/step-" in output, errors
    assert process.poll() is None
    process.kill()
    process.wait()
    steps = 1 + max(int(path.name.removeprefix("step-")) for path in (out / "checkpoints").glob("step-*[0-9]"))
    done = begin(tmp_path, "train", "c.toml", "--resume", "--run.max_steps", str(steps))
    assert "resuming out after step" in done.communicate(timeout=60)[0]
    assert [line["step"] for line in metrics_of(out)] == list(range(1, steps + 1))
