"""Trackers of a run in progress: whatever one does, the run does not wait for it."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from cohort import GRPOConfig, GRPOTrainer
from cohort.errors import ConfigError
from cohort.report.trackers import Trackers, __main__, live, send, send_run
from cohort.report.trackers.send import State
from tests.conftest import DEMO_MODEL
from tests.report.trackers.made import Stub, add_lines, made_run
from tests.train.harness import ROWS, make_trainer, same_parameters, untimed_metrics_of

FAKES = {
    "accelerate/__init__.py": "PartialState = dict",
    "accelerate/tracking.py": """
import os, time
class Tracker:
    def __init__(self, *arguments, **settings): pass
    def start(self): pass
    def store_init_configuration(self, values): pass
    def finish(self): pass
class WandBTracker(Tracker):  # hangs
    def start(self): time.sleep(1000)
class TrackioTracker(Tracker):  # fails
    def start(self): raise ConnectionError("no route to host")
class CometMLTracker(Tracker):  # ends the process
    def start(self): os._exit(3)
class SwanLabTracker(Tracker):  # is slow
    class run: id = "slow"
    def log(self, values, step): time.sleep(0.1)
""",
    "wandb.py": "Settings = dict",
    "trackio.py": "",
    "comet_ml.py": "ExperimentConfig = dict",
    "swanlab.py": "Text = str",
}


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Trackers that misbehave, first on the path of the processes that are started."""
    for name, text in FAKES.items():
        file = tmp_path / "fakes" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "fakes"), *sys.path])


def wait_until(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


ALL = ("wandb", "trackio", "comet", "swanlab")


# Each process takes half a second of CPU.
@pytest.mark.parametrize("names", [("wandb", "comet"), pytest.param(ALL, marks=pytest.mark.slow)])
def test_trackers_that_hang_fail_or_die(fakes, tmp_path, monkeypatch, caplog, names):
    """Steps go on, the end waits for its limit only, and what is left is named with the command that sends it."""
    run = made_run(tmp_path / "run")
    monkeypatch.setattr(live, "END_SECONDS", 1.0)
    trackers = Trackers(names)
    trackers.on_start(None, SimpleNamespace(output_dir=run))
    processes = {one.kind: one.process for one in trackers._all}
    wait_until(lambda: processes["comet"].poll() == 3)
    wait_until(lambda: names != ALL or (State.read(run, "trackio").error and State.read(run, "swanlab").step == 12))
    monkeypatch.setattr(live, "WARN_SECONDS", 0.0)
    trackers.on_step(None, SimpleNamespace(step=12))
    expected = {
        "wandb": "W&B: no answer; nothing is sent yet. Training goes on, and it is tried again",
        "trackio": "trackio: ConnectionError: no route to host; nothing is sent yet. Training goes on, and it is tried "
        "again",
        "comet": f"Comet: its process ended with code 3 (see {run}/trackers/comet/log.txt); nothing is sent yet. "
        f"Training goes on; send the rest with: cohort track {run} --to comet",
    }
    assert caplog.messages == [expected[name] for name in names if name in expected]
    caplog.clear()
    began = time.monotonic()
    trackers.on_end(None, SimpleNamespace(outcome="complete"))
    assert time.monotonic() - began < 10  # the limit, and a busy machine
    assert all(process.returncode is not None for process in processes.values())
    assert [text.partition(":")[0] for text in caplog.messages] == [
        expected[one].partition(":")[0] for one in names[:3]
    ]
    steps = "steps 0 to 12 were not sent"
    assert caplog.messages[0] == f"W&B: {steps}: no answer in time. Send them with: cohort track {run} --to wandb"
    assert names != ALL or "ConnectionError" in (run / "trackers" / "trackio" / "log.txt").read_text()


def no_process(*_, **settings):
    raise OSError("no memory")


def test_warnings_come_once_a_minute(tmp_path, monkeypatch, caplog):
    run = made_run(tmp_path / "run")
    monkeypatch.setattr(live.subprocess, "Popen", no_process)
    trackers = Trackers(["tensorboard"])
    trackers.on_start(None, SimpleNamespace(output_dir=run))
    clock = [time.monotonic() + 10]
    monkeypatch.setattr(live.time, "monotonic", lambda: clock[0])
    for _ in range(30):
        clock[0] += 5
        trackers.on_step(None, SimpleNamespace(step=12))
    assert len(caplog.messages) == 3
    assert "TensorBoard: OSError: no memory; nothing is sent yet. Training goes on" in caplog.messages[0]


# The process ----------------------------------------------------------------------------------------------------------


def test_the_process_follows_the_run(tmp_path, monkeypatch):
    """Lines are sent as they are written; after a failure it goes on where it was; the last ones after the end."""
    run, ended, failures = made_run(tmp_path / "run", steps=2), threading.Event(), [ConnectionError("gone")]

    class Mine(Stub):
        sent, opened = [], []

        def log(self, values, step):
            if step == 3 and failures:
                raise failures.pop()
            super().log(values, step)

    monkeypatch.setitem(send.OUTLETS, "tensorboard", Mine)
    monkeypatch.setattr(__main__, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(__main__, "RETRY_SECONDS", 0.01)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(__main__.main(run, "tensorboard", None, ended)))
    thread.start()
    wait_until(lambda: State.read(run, "tensorboard").step == 2)
    add_lines(run, 3, 4)
    wait_until(lambda: State.read(run, "tensorboard").step == 4)
    assert not failures
    assert State.read(run, "tensorboard").error is None
    add_lines(run, 5)
    ended.set()
    thread.join()
    assert codes == [0]
    assert [one[0] for one in Mine.sent if isinstance(one[0], int)] == list(range(6))
    assert ("all_wrong", "alarm", True) in Mine.sent


class FullDisk:
    """As ``log.txt`` on a full disk."""

    def write(self, _):
        raise OSError(28, "No space left on device")

    flush = write


def test_a_full_disk_does_not_end_the_process(tmp_path, monkeypatch):
    """Neither its state nor its log can be written; then everything is sent."""
    run, failures = made_run(tmp_path / "run", steps=2), [OSError(28, "full")] * 2

    class Mine(Stub):
        sent, opened = [], []

        def log(self, values, step):
            if failures:
                raise failures.pop()
            super().log(values, step)

    monkeypatch.setitem(send.OUTLETS, "tensorboard", Mine)
    monkeypatch.setattr(__main__, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(__main__.sys, "stderr", FullDisk())
    monkeypatch.setattr(__main__, "LOOK_SECONDS", 0.01)
    ended = threading.Event()
    thread = threading.Thread(target=__main__.main, args=(run, "tensorboard", None, ended))
    thread.start()
    wait_until(lambda: State.read(run, "tensorboard").step == 2)
    ended.set()
    thread.join()
    assert not failures


class MlflowError(Exception):
    pass


def raising(error):
    def outlet(opening):
        raise error

    return outlet


def test_an_error_of_an_earlier_process_is_forgotten(tmp_path, monkeypatch):
    run, ended, seen = made_run(tmp_path / "run"), threading.Event(), []
    (run / "trackers" / "tensorboard").mkdir(parents=True)
    State(error="OSError: no route to host").write(run, "tensorboard")

    def outlet(opening):
        seen.append(State.read(run, "tensorboard").error)
        raise ConnectionError("gone")

    monkeypatch.setitem(send.OUTLETS, "tensorboard", outlet)
    ended.set()
    assert __main__.main(run, "tensorboard", None, ended) == 1
    assert seen == [None]
    assert State.read(run, "tensorboard").error == "ConnectionError: gone"


def test_the_process_that_cannot_send_ends_with_the_run(tmp_path, monkeypatch, capsys):
    run, ended = made_run(tmp_path / "run"), threading.Event()
    monkeypatch.setitem(send.OUTLETS, "tensorboard", lambda opening: 1 / 0)
    ended.set()
    assert __main__.main(run, "tensorboard", None, ended) == 1
    assert State.read(run, "tensorboard").error == "ZeroDivisionError: division by zero"
    error = MlflowError("GET https://me:word@host/api failed")
    monkeypatch.setitem(send.OUTLETS, "tensorboard", raising(error))
    assert __main__.main(run, "tensorboard", None, ended) == 1
    assert State.read(run, "tensorboard").error == "MlflowError: GET https://***@host/api failed"
    assert "me:word" not in (said := capsys.readouterr().err)  # which is log.txt
    assert "MlflowError: GET https://***@host/api failed" in said
    (run / "trackers" / "tensorboard" / "state.json").unlink()
    (run / "trackers" / "tensorboard" / "state.part").mkdir()  # as a full disk: nothing can be noted
    assert __main__.main(run, "tensorboard", None, ended) == 1


# A run ----------------------------------------------------------------------------------------------------------------


SETTINGS = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "trackers": ["tensorboard"]}


@pytest.mark.slow  # two processes; what is sent is read back in test_send.py
def test_a_run_with_tensorboard(demo_tokenizer, tmp_path, monkeypatch, caplog):
    """Every key is there, of every step, and the completions."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(live, "END_SECONDS", 300.0)  # a busy machine
    make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:2], max_steps=2, **SETTINGS).train()
    assert not [one for one in caplog.records if one.name == "cohort.trackers"]
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    keys = {key for line in lines for key, value in line.items() if value is not None} - {"step"}
    assert set(found.Tags()["scalars"]) == keys
    assert [event.step for event in found.Scalars("reward/mean")] == [1, 2]
    assert [event.step for event in found.Scalars("eval/reward/mean")] == [0, 2]
    assert {"completions/text_summary", "evaluations/text_summary"} <= set(found.Tags()["tensors"])
    assert send_run(tmp_path / "run", "tensorboard").steps == 0


@pytest.mark.slow  # three processes that import torch
def test_a_run_that_is_resumed_goes_on_in_the_same_events(demo_tokenizer, tmp_path, monkeypatch):
    """And is bit-equal to a run without trackers."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(live, "END_SECONDS", 300.0)  # a busy machine
    monkeypatch.setattr(live, "STOP_SECONDS", 300.0)

    def make(folder, **settings):
        return make_trainer(demo_tokenizer, tmp_path / folder, max_steps=6, save_steps=2, **SETTINGS | settings)

    for metrics in make("run").steps():
        if metrics["step"] == 3:  # later than its checkpoint
            break
    for metrics in make("run").steps(resume=True):
        if metrics["step"] == 5:
            break
    tracked, plain = make("run"), make("plain", trackers=[])
    tracked.train(resume=True)
    plain.train()
    assert same_parameters(plain, tracked)
    assert untimed_metrics_of(tmp_path / "plain") == untimed_metrics_of(tmp_path / "run")
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0}).Reload()
    assert [event.step for event in found.Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb' needs wandb, .* pip install 'cohort-rl\[wandb\]'"):
        GRPOTrainer(model=str(DEMO_MODEL), args=GRPOConfig(trackers=["wandb"]))


def test_an_unknown_tracker():
    with pytest.raises(ConfigError, match="report.trackers"):
        GRPOConfig(trackers=["wand"])
