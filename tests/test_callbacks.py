"""Callbacks: what each is told and when, what is refused, and that a run with them is the run without."""

import gc
import json
import random
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback

from cohort import GRPOConfig, GRPOTrainer
from cohort.callbacks import EVENTS, Callbacks, check_callback
from cohort.errors import CallbackError, ConfigError, Stopped
from cohort.parallel import World
from cohort.runs.checkpoints import random_state
from cohort.runs.durable import as_json
from cohort.train.observers import CompleteStep
from tests.conftest import each
from tests.parallel.launching import on_ranks
from tests.report.trackers.made import line, made_run
from tests.train.harness import ROWS, digits_reward, make_trainer, same_parameters, untimed_metrics_of

SMALL = {"prompts_per_step": 2, "num_generations": 2, "max_completion_length": 4}


class Recorder:
    """Keeps every event, and draws random numbers."""

    def __init__(self):
        self.told = []

    def _keep(self, name, trainer, event):
        self.told.append((name, event))
        random.random(), np.random.rand(), torch.rand(1)
        self.trainer = trainer


for _name in EVENTS:
    setattr(Recorder, _name, lambda self, trainer, event, name=_name: self._keep(name, trainer, event))


def make(tokenizer, folder, *callbacks, **settings):
    return make_trainer(tokenizer, folder, callbacks=callbacks, **SMALL | {"max_steps": 2} | settings)


EVALUATED = {"eval_rows": ROWS[:2], "eval_steps": 1, "save_steps": 1}


@pytest.fixture(scope="module")
def straight(demo_tokenizer, tmp_path_factory):
    """A run of two steps without callbacks, its folder, and the random generators after it."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    trainer = make(demo_tokenizer, folder, **EVALUATED, metric_for_best_model="eval/reward/mean")
    trainer.train()
    return trainer, folder, random_state()


def raising(name, error=KeyError):
    """A callback whose method raises."""

    def method(trainer, event):
        raise error("why")

    return type("Broken", (), {name: staticmethod(method)})()


def test_what_each_event_tells(demo_tokenizer, tmp_path, straight):
    """Two steps, evaluated and saved after each; the run is bit-equal to the one without callbacks."""
    recorder, (plain, plain_folder, state) = Recorder(), straight
    told = make(demo_tokenizer, tmp_path / "told", recorder, **EVALUATED, metric_for_best_model="eval/reward/mean")
    told.train()
    assert random_state() == state
    assert same_parameters(plain, told)
    assert untimed_metrics_of(plain_folder) == untimed_metrics_of(tmp_path / "told")

    assert recorder.trainer is told
    names = [name for name, event in recorder.told if name != "on_save"]
    step = ["on_rollout", "on_evaluate", "on_step"]
    assert names == ["on_start", "on_evaluate", *step, *step, "on_end"]
    events = {name: [event for other, event in recorder.told if other == name] for name in EVENTS}
    (start,) = events["on_start"]
    assert (start.output_dir, start.complete_steps, start.steps) == (tmp_path / "told", 0, 2)
    assert start.settings is told.args
    assert start.facts == told._facts
    lines = [json.loads(line) for line in (tmp_path / "told" / "metrics.jsonl").read_text().splitlines()]
    assert [json.loads(as_json(event.metrics)) for event in events["on_step"]] == lines[1:]  # null for NaN
    evaluated = {event.step: json.loads(as_json(event.metrics)) for event in events["on_evaluate"]}
    assert evaluated == {n: {key: v for key, v in lines[n].items() if key.startswith("eval/")} for n in (0, 1, 2)}
    assert events["on_evaluate"][0].evaluations[""].table.num_rows == 2
    for event in events["on_rollout"]:
        assert [len(group.completions) for group in event.groups] == [2, 2]
        assert float(event.scores.rewards_S.mean()) == lines[event.step]["reward/mean"]
        tokens = [c.num_tokens for group in event.groups for c in group.completions]
        assert [len(advantages) for advantages in event.advantages] == tokens
    saved = [(event.step, event.path, event.is_best) for event in events["on_save"]]
    folder = tmp_path / "told"
    assert [one for one in saved if not one[2]] == [(n, folder / "checkpoints" / f"step-{n}", False) for n in (1, 2)]
    assert saved[0] == (0, folder / "best", True)
    assert all(path.is_dir() for _, path, _ in saved)
    (end,) = events["on_end"]
    assert (end.outcome, end.error) == ("complete", None)
    assert json.loads(as_json(end.summary)) == json.loads((folder / "summary.json").read_text())


class Stopper(Recorder):
    """Stops the run in one method, once."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def _keep(self, name, trainer, event):
        super()._keep(name, trainer, event)
        if name == self.name:
            trainer.stop()


@pytest.mark.parametrize("method", ["on_rollout", pytest.param("on_step", marks=pytest.mark.slow)])
def test_stopped_by_a_callback_and_resumed(demo_tokenizer, tmp_path, straight, method):
    stopper, recorder = Stopper(method), Recorder()
    with pytest.raises(Stopped, match=r"stopped by stop\(\)"):
        make(demo_tokenizer, tmp_path / "run", stopper).train()
    end = stopper.told[-1][1]
    assert (stopper.told[-1][0], end.outcome, type(end.error)) == ("on_end", "stopped", Stopped)
    assert stopper.told[-2][0] == "on_save"
    complete = {"on_rollout": 0, "on_step": 1}[method]
    assert end.summary["steps"] == complete
    resumed = make(demo_tokenizer, tmp_path / "run", recorder)
    resumed.train(resume=True)
    assert recorder.told[0][1].complete_steps == complete
    assert [event.step for name, event in recorder.told if name == "on_rollout"] == [1, 2][complete:]
    assert same_parameters(straight[0], resumed)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow) for name in ("on_rollout", "on_evaluate")] + ["on_save"]
)
def test_an_exception_ends_the_run_with_a_checkpoint(demo_tokenizer, tmp_path, straight, method):
    settings = EVALUATED | {"eval_on_start": False}
    recorder = Recorder()
    trainer = make(demo_tokenizer, tmp_path / "run", raising(method), recorder, **settings)
    where = "0" if method == "on_rollout" else "[12]" if method == "on_save" else "1"
    with pytest.raises(
        CallbackError, match=f"^callback Broken.{method} of step .* raised KeyError: 'why'.*of step {where}"
    ):
        trainer.train()
    assert recorder.told[-1][1].outcome == "error"
    assert isinstance(recorder.told[-1][1].error.__cause__, KeyError)
    resumed = make(demo_tokenizer, tmp_path / "run", **settings)
    resumed.train(resume=True)
    assert same_parameters(straight[0], resumed)
    assert untimed_metrics_of(tmp_path / "run") == untimed_metrics_of(straight[1])[1:]  # without the one before


def test_an_exception_at_the_end(demo_tokenizer, tmp_path, caplog):
    """Every callback is told; of a run that has failed, its own error is raised."""
    recorder = Recorder()
    with pytest.raises(CallbackError, match=r"Broken.on_end raised KeyError"):
        make(demo_tokenizer, tmp_path / "complete", raising("on_end"), recorder, max_steps=1).train()
    assert recorder.told[-1][1].outcome == "complete"
    assert (tmp_path / "complete" / "summary.json").exists()
    with pytest.raises(CallbackError, match=r"Broken.on_start raised OSError"):
        make(demo_tokenizer, tmp_path / "failed", raising("on_end"), raising("on_start", OSError), max_steps=1).train()
    assert "Broken.on_end raised KeyError" in caplog.text


def test_a_loop_that_is_left(demo_tokenizer, tmp_path):
    """Only the iterator holds the trainer, and nothing holds the iterator."""
    outcomes = []
    callback = with_method(
        "on_end", lambda self, trainer, end: outcomes.append((end.outcome, trainer.summary["steps"]))
    )
    for _ in make(demo_tokenizer, tmp_path / "run", callback).steps():
        break
    assert outcomes == [("stopped", 1)]


def test_a_loop_that_the_garbage_collector_ends(demo_tokenizer, tmp_path):
    """It clears weak references to what it frees, before it ends the steps."""
    outcomes = []
    callback = with_method(
        "on_end", lambda self, trainer, end: outcomes.append((end.outcome, trainer.summary["steps"]))
    )
    cycle = [make(demo_tokenizer, tmp_path / "run", callback).steps()]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert outcomes == [("stopped", 1)]


# What is refused ------------------------------------------------------------------------------------------------------


def with_method(name, method):
    return type("Mine", (), {name: method})()


async def waits(self, trainer, event):
    pass


@each(
    ("callback", "message"),
    [
        (with_method("on_stepp", print), "Mine has an unknown method on_stepp; did you mean on_step?"),
        (with_method("on_train_begin", print), "unknown method on_train_begin; the methods are on_start, on_rollout,"),
        (with_method("on_step", lambda self, metrics: 0), r"on_step\(metrics\) does not take two arguments; expected"),
        (with_method("on_end", lambda self: 0), r"expected on_end\(trainer, event\), where event is a cohort.*\.End$"),
        (with_method("on_step", waits), "on_step would not run when it is called; expected .* without async or yield"),
        (with_method("on_save", None), "Mine.on_save is not a method, but None"),
        (object(), "object has none of the methods on_start"),
        (print, "has none of the methods"),
        (Recorder, r"expected objects, got the class Recorder: pass Recorder\(...\)"),
        (
            EarlyStoppingCallback(),
            "EarlyStoppingCallback is a callback of transformers.* as the methods on_start, on_r",
        ),
    ],
)
def test_objects_that_are_no_callbacks(callback, message):
    with pytest.raises(ConfigError, match=f"^callbacks: .*{message}"):
        check_callback(callback)


def test_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="did you mean on_start"):
        GRPOTrainer(model="no such model", callbacks=[with_method("on_strat", print)])
    with pytest.raises(ConfigError, match="expected a list of objects, got Recorder"):
        GRPOTrainer(callbacks=Recorder())


def test_methods_with_more_parameters_that_have_defaults():
    check_callback(with_method("on_step", lambda self, trainer, event, scale=1.0: 0))
    check_callback(with_method("on_step", lambda self, *arguments: 0))


def done(metrics):
    """A complete step with these metrics."""
    return CompleteStep(None, metrics, [])


def test_findings_of_a_resumed_run_know_the_steps_before(trainer):
    """The diagnosis is fed the lines in the folder first: no completion is right for five steps."""
    recorder = Recorder()
    callbacks = Callbacks(trainer, [recorder])
    callbacks.start(4, {})
    callbacks.stepped(done(json.loads(line(5))))
    (_, start), (_, step) = recorder.told
    assert start.complete_steps == 4
    assert [(finding.check, finding.step) for finding in step.findings] == [("all_wrong", 5)]


class Trainer(SimpleNamespace):
    """What callbacks see of a trainer."""

    def record(self, step):
        self.last_metrics = step.metrics


@pytest.fixture
def trainer(tmp_path):
    made_run(tmp_path / "run", steps=4)
    folder = SimpleNamespace(path=tmp_path / "run", saved=deque(), best=tmp_path / "run" / "best")
    return Trainer(world=World(), folder=folder, args=GRPOConfig(), schedule=SimpleNamespace(steps=9))


def test_what_is_drawn_in_the_background_is_not_drawn_again(trainer):
    """With ``rollout.lag``, a reward function draws while a callback runs."""
    ended = Future()
    ended.set_result(None)
    draws, pending = [], deque([SimpleNamespace(outcome=ended), SimpleNamespace(outcome=Future())])
    draw = with_method("on_step", lambda self, trainer, event: draws.append(random.random()))
    for waiting, differ in [((), False), (pending, True)]:
        callbacks = Callbacks(trainer, [draw])
        callbacks.start(4, {}, waiting)
        draws.clear()
        callbacks.stepped(done({"step": 5}))
        callbacks.stepped(done({"step": 6}))
        assert (draws[0] != draws[1]) == differ


def test_what_nobody_asks_for_is_not_made(trainer, monkeypatch):
    """No event, no advantages, no diagnosis, and no exchange of the ranks."""
    exchanges = []
    monkeypatch.setattr("cohort.callbacks.on_main", lambda world, function: exchanges.append(1) or function())
    monkeypatch.setattr("cohort.callbacks.Diagnosis.step", lambda self, metrics: 1 / 0)
    callbacks = Callbacks(trainer, [with_method("on_end", lambda self, trainer, event: 0)])
    callbacks.start(4, {})
    callbacks.rollout_scored(5, None, None)
    callbacks.evaluated(0, {}, {})
    callbacks.stepped(done(json.loads(line(5))))
    assert len(exchanges) == 1  # which methods there are


def test_an_error_in_the_diagnosis_does_not_end_the_run(trainer, monkeypatch, caplog):
    monkeypatch.setattr("cohort.report.diagnosis.CHECKS", [SimpleNamespace(name="broken")])
    recorder = Recorder()
    callbacks = Callbacks(trainer, [recorder])
    callbacks.start(4, {})
    callbacks.stepped(done(json.loads(line(5))))
    assert recorder.told[-1][1].findings == []
    assert caplog.messages == ["the diagnosis failed at step 1: findings are incomplete"]


# Ranks ----------------------------------------------------------------------------------------------------------------


def told_on_rank(folder, fails):
    """A run with callbacks on this rank: the events told, and how the run ended."""
    from tests.conftest import DEMO_MODEL

    recorder, stopper = Recorder(), Stopper("on_rollout")
    settings = {"path": str(DEMO_MODEL), "save_steps": 1, "output_dir": str(folder), "progress": False, "max_steps": 2}
    config = GRPOConfig(**SMALL, **settings)
    callbacks = [recorder, raising("on_step") if fails else stopper]
    trainer = GRPOTrainer(reward_funcs=digits_reward, args=config, train_dataset=ROWS, callbacks=callbacks)
    try:
        trainer.train()
    except (Stopped, CallbackError) as error:
        return [name for name, _ in recorder.told], f"{type(error).__name__}: {error}"
    finally:
        trainer.world.close()


@pytest.mark.ranks
@pytest.mark.parametrize("fails", [True, False])
def test_only_rank_0_is_told(tmp_path, fails):
    """What a callback asks for, or raises, ends the run on every rank."""
    (told, ended), (other, also) = on_ranks(2, told_on_rank, tmp_path / "run", fails)
    assert other == []
    assert told == ["on_start", "on_rollout", *["on_step"] * fails, "on_save", "on_end"]
    assert ended == also
    assert ended.startswith("CallbackError: rank 0 of 2: callback Broken.on_step of step 1" if fails else "Stopped: ")
