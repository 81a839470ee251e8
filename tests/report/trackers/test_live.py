"""Trackers of a run in progress: whatever one does, the run does not wait for it."""

import threading
import time
from types import SimpleNamespace

import pytest

from cohort import GRPOConfig, GRPOTrainer
from cohort.errors import ConfigError
from cohort.report import trackers
from cohort.report.trackers import State, Trackers, left_to_send, send_run
from tests.conftest import DEMO_MODEL
from tests.report.trackers.made import Stub, add_lines, made_run
from tests.train.harness import ROWS, make_trainer, same_parameters, untimed_metrics_of

STEP, COMPLETE = SimpleNamespace(step=2), SimpleNamespace(outcome="complete")


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts trackers in the place of TensorBoard for a run of two steps; returns its folder and the callback."""

    def started(kind):
        monkeypatch.setitem(trackers.KINDS, "tensorboard", kind)
        run, made = made_run(tmp_path / "run", steps=2), Trackers(["tensorboard"])
        made.on_start(None, SimpleNamespace(output_dir=run))
        return run, made

    return started


def wait_until(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_tracker_follows_the_run(start, caplog):
    """Lines are sent at each step; what fails is said once, with the command that sends it, and tried again."""
    failures = [ConnectionError("https://me:word@host is gone"), ConnectionError("still"), SystemExit(3)]

    class Mine(Stub):
        sent, opened = [], []

        def numbers(self, values, step):
            if step == 3 and failures:
                raise failures.pop(0)
            super().numbers(values, step)

    run, made = start(Mine)
    wait_until(lambda: State.read(run, "tensorboard").step == 2)
    add_lines(run, 3, 4)
    for left in (2, 1, 0):
        made.on_step(None, STEP)
        wait_until(lambda left=left: len(failures) == left and made._all[0].since is None)
    made.on_step(None, STEP)
    wait_until(lambda: State.read(run, "tensorboard").step == 4)
    add_lines(run, 5)
    made.on_end(None, COMPLETE)
    assert [one[0] for one in Mine.sent if isinstance(one[0], int)] == list(range(6))
    assert [state.step for state in Mine.opened] == [-1, 2, 2, 2]  # opened again after each failure
    assert [one[0] for one in Mine.sent].count("settings") == 1
    assert ("findings/all_wrong", 5) in [one[:2] for one in Mine.sent]
    assert Mine.sent[-1] == "closed"
    assert caplog.messages == [
        "TensorBoard: ConnectionError: https://***@host is gone; steps up to 2 are sent. Training goes on, and each "
        f"step tries again; what is missing at the end is sent with: cohort track {run} --to tensorboard"
    ]


def test_a_run_that_was_replaced_is_sent_with_its_new_findings(tmp_path, monkeypatch):
    """A finding of steps that were not sent, and that a resumed run has made otherwise, is not sent."""
    mine = type("Mine", (Stub,), {"sent": [], "opened": []})
    monkeypatch.setitem(trackers.KINDS, "tensorboard", mine)
    run = made_run(tmp_path / "run", steps=12)
    with trackers.Sender.of(run, "tensorboard") as sender:
        monkeypatch.setattr(mine, "numbers", lambda self, values, step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(sender.send())
        monkeypatch.undo()
        monkeypatch.setitem(trackers.KINDS, "tensorboard", mine)
        (run / "metrics.jsonl").unlink()
        add_lines(run, *range(1, 13), **{"groups/dead_share": 0.0, "reward/mean": 0.5})
        assert list(sender.send()) == list(range(1, 13))
    assert [one[0] for one in mine.sent if one[0] == "findings/all_wrong"] == []


def test_a_tracker_that_fails_at_the_end(start, caplog):
    class Fails(Stub):
        def __init__(self, run, state, settings):
            raise ConnectionError("no route to host")

    run, made = start(Fails)
    made.on_end(None, COMPLETE)
    assert caplog.messages[-1] == (
        "TensorBoard: steps 0 to 2 were not sent: ConnectionError: no route to host. Send them with: cohort track "
        f"{run} --to tensorboard"
    )
    assert left_to_send(run, "tensorboard") == [0, 1, 2]


def test_what_a_tracker_does_not_take_when_it_is_closed(start, caplog):
    class Fails(Stub):
        sent, opened = [], []

        def close(self):
            raise OSError("full")

    run, made = start(Fails)
    made.on_end(None, COMPLETE)
    assert caplog.messages == [
        "TensorBoard: the last steps may not have arrived: OSError: full. Send them with: cohort track "
        f"{run} --to tensorboard"
    ]


def test_a_tracker_that_hangs(start, monkeypatch, caplog):
    """Steps go on, the end waits for its limit only, and the process can end."""
    free = threading.Event()

    class Hangs(Stub):
        def __init__(self, run, state, settings):
            free.wait(60)
            raise ConnectionError("gone")

    monkeypatch.setattr(trackers, "END_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "SILENT_SECONDS", 0.1)
    _, made = start(Hangs)
    wait_until(lambda: made._all[0].since is not None)
    made.on_step(None, STEP)
    monkeypatch.setattr(trackers, "WARN_SECONDS", 0.0)
    began = time.monotonic()
    for _ in range(3):
        made.on_step(None, STEP)
    made.on_end(None, COMPLETE)
    assert time.monotonic() - began < 10  # the limit, and a busy machine
    first, waits, end = caplog.messages
    assert first.startswith("TensorBoard: no answer; nothing is sent yet. Training goes on, and each step tries again")
    assert waits == "the run has ended and waits for TensorBoard: at most 0 seconds"
    assert end.startswith("TensorBoard: steps 0 to 2 were not sent: no answer in time. Send them with: cohort track ")
    assert all(one.daemon for one in made._all)
    free.set()
    made._all[0].join()


# A run ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # imports TensorBoard
def test_a_run_that_is_resumed_goes_on_in_the_same_events(demo_tokenizer, tmp_path, monkeypatch, caplog):
    """And is bit-equal to a run without trackers. Every key is there, of every step, and the completions."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(trackers, "END_SECONDS", 300.0)  # a busy machine
    monkeypatch.setattr(trackers, "STOP_SECONDS", 300.0)
    settings = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4, "trackers": ["tensorboard"]}

    def make(folder, **more):
        more = settings | {"eval_rows": ROWS[:2], "max_steps": 6, "save_steps": 2} | more
        return make_trainer(demo_tokenizer, tmp_path / folder, **more)

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
    lines = untimed_metrics_of(tmp_path / "plain")
    assert lines == untimed_metrics_of(tmp_path / "run")
    assert not [one for one in caplog.records if one.name == "cohort.trackers"]
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    keys = {key for line in lines for key, value in line.items() if value is not None} - {"step"}
    assert keys <= set(found.Tags()["scalars"])
    assert [event.step for event in found.Scalars("reward/mean")] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in found.Scalars("eval/reward/mean")] == [0, 6]
    assert {"completions/text_summary", "evaluations/text_summary"} <= set(found.Tags()["tensors"])
    assert send_run(tmp_path / "run", "tensorboard").steps == 0


def test_a_tracker_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb' needs wandb, .* pip install 'cohort-rl\[wandb\]'"):
        GRPOTrainer(model=str(DEMO_MODEL), args=GRPOConfig(trackers=["wandb"]))


def test_an_unknown_tracker():
    with pytest.raises(ConfigError, match="report.trackers"):
        GRPOConfig(trackers=["wand"])
