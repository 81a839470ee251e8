"""Stopping a run at any instant: the resumed run is bit for bit the run that was not stopped."""

import asyncio
import os
import random
import signal
import threading
import time

import pyarrow.parquet
import pytest
import torch

from cohort.errors import RewardError, Stopped
from cohort.runs.rollouts import load_rollout
from cohort.train.signals import Requests
from tests.conftest import tiny_llama
from tests.train.harness import (
    ROWS,
    break_after,
    digits_reward,
    make_trainer,
    metrics_of,
    rows_of,
    same_parameters,
    untimed_metrics_of,
)

UPDATES = {"num_iterations": 2, "minibatches": 2, "max_steps": 2, "beta": 0.05}


class LooksUntilStop(Requests):
    """A request to stop that is there from a look on: the run looks at each instant where it can stop."""

    def __init__(self, number):
        super().__init__()
        self.left, self.looks = number, 0

    @property
    def stop(self):
        self.looks += 1
        return self.looks > self.left

    @stop.setter
    def stop(self, _):
        pass


def stopped_at(trainer, look, *, resume=False):
    """Train until the run has looked so often whether it is to stop. Returns whether it was stopped, and the looks."""
    trainer._requests = looks = LooksUntilStop(look)
    try:
        trainer.train(resume=resume)
    except Stopped:
        return True, looks.looks
    return False, looks.looks


def stored_of(folder, kind):
    """All completions in a run's store, without times, and the facts of the steps."""
    found = {}
    for path in sorted((folder / kind).glob("*.parquet")):
        table = pyarrow.parquet.read_table(path)
        table = table.select([name for name in table.column_names if not name.startswith("seconds")])
        found[path.name] = table.schema, table.schema.metadata, table.to_pylist()
    return found


def optimizer_of(trainer):
    return trainer.optimizer.state_dict()


def assert_same(one, other):
    """Two finished runs are bit-equal: weights, reference, optimizer, weights of the objective, metrics, completions."""
    assert same_parameters(one, other)
    if one.reference is not None and one.reference.model is not one.policy.model:
        pairs = zip(one.reference.model.parameters(), other.reference.model.parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    mine, theirs = optimizer_of(one), optimizer_of(other)
    assert mine["numbers"] == theirs["numbers"]
    assert mine["tensors"].keys() == theirs["tensors"].keys()
    assert all(torch.equal(value, theirs["tensors"][name]) for name, value in mine["tensors"].items())
    assert one._parts.adaptive == other._parts.adaptive
    folders = one.folder.path, other.folder.path
    assert untimed_metrics_of(folders[0]) == untimed_metrics_of(folders[1])
    for kind in ("rollouts", "evaluations"):
        assert repr(stored_of(folders[0], kind)) == repr(stored_of(folders[1], kind))  # NaN is NaN
    mine, theirs = [best.exists() and best.read_text() for best in (f / "best" / "best.json" for f in folders)]
    assert mine == theirs


def assert_stops_change_nothing(make, folder, looks):
    """Compare a run in one go with runs that are stopped after each number of looks, and resumed once."""
    straight = make(folder / "straight")
    _, total = stopped_at(straight, 10**9)
    for look in looks(total):
        stopped = make(folder / f"stopped-{look}")
        assert stopped_at(stopped, look)[0]
        assert not any(thread.name.startswith("rollout-") for thread in threading.enumerate())
        resumed = make(folder / f"stopped-{look}")
        resumed.train(resume=True)
        assert_same(straight, resumed)


def assert_many_stops_change_nothing(make, folder, between=14):
    """Compare a run in one go with one that is stopped, and resumed, again and again."""
    straight = make(folder / "straight")
    stopped_at(straight, 10**9)
    stops = 0
    while stopped_at(resumed := make(folder / "stopped"), between + stops % 5, resume=stops > 0)[0]:
        stops += 1
        assert stops < 50, "it does not get ahead"
    assert stops
    assert_same(straight, resumed)
    return stops


# Every instant --------------------------------------------------------------------------------------------------------


def test_a_run_that_is_stopped_again_and_again(demo_tokenizer, tmp_path):
    """Sampling, scoring, between updates, in evaluations, between steps."""

    def make(folder):
        settings = UPDATES | {"max_steps": 1, "eval_rows": ROWS[:2], "metric_for_best_model": "eval/reward/mean"}
        return make_trainer(demo_tokenizer, folder, exact_model(demo_tokenizer), **settings)

    assert assert_many_stops_change_nothing(make, tmp_path) >= 2


def test_between_two_updates(demo_tokenizer, tmp_path):
    """The weights of the stopped run are those after two of four updates, and the rest is made on the same rollout."""

    def make(folder):
        return make_trainer(demo_tokenizer, folder, **UPDATES)

    straight, stopped = make(tmp_path / "straight"), make(tmp_path / "stopped")
    straight.train()
    real, versions = stopped.optimizer.step, []

    def step(*arguments):
        versions.append(stopped.policy.version)
        if len(versions) == 2:
            stopped.stop()
        return real(*arguments)

    stopped.optimizer.step = step
    with pytest.raises(Stopped, match="in step 1, after 2 of its updates") as caught:
        stopped.train()
    assert caught.value.code == 75
    assert str(caught.value).endswith("; continue with the same script and train(resume='auto')")  # the model is new
    assert stopped.policy.version == 2
    state = tmp_path / "stopped" / "checkpoints" / "step-0" / "state"
    assert {path.name for path in state.glob("*.json")} == {"loop.json", "rollout-0.json", "updates.json"}
    resumed = make(tmp_path / "stopped")
    resumed.engine.generate = None  # nothing is drawn for this step
    steps = resumed.steps(resume=True)
    with pytest.raises(TypeError):
        list(steps)
    assert [line["step"] for line in metrics_of(tmp_path / "stopped")] == [1]
    resumed = make(tmp_path / "stopped")
    resumed.train(resume=True)
    assert_same(straight, resumed)


def test_the_kl_may_be_turned_off_between_two_updates(demo_tokenizer, tmp_path):
    def make(beta):
        return make_trainer(demo_tokenizer, tmp_path / "run", **UPDATES | {"beta": beta, "max_steps": 1})

    stopped = make(0.05)
    real, updates = stopped.optimizer.step, []

    def step(*arguments):
        updates.append(len(updates))
        if len(updates) == 2:
            stopped.stop()
        return real(*arguments)

    stopped.optimizer.step = step
    with pytest.raises(Stopped, match="after 2 of its updates"):
        stopped.train()
    resumed = make(0.0)
    resumed.train(resume=True, allow_changed=["objective.beta"])
    assert resumed.summary["updates"] == 4
    assert ["kl/k3" in update for update in resumed.last_updates] == [True, True, False, False]


def exact_model(tokenizer):
    """A model whose completions have the same bits whatever is decoded beside them: heads of 16."""
    return tiny_llama(vocab_size=len(tokenizer), hidden_size=64)


def test_completions_that_have_ended_are_not_drawn_again(demo_tokenizer, tmp_path):
    def make(folder):
        return make_trainer(demo_tokenizer, folder, exact_model(demo_tokenizer), max_steps=1)

    straight, stopped = make(tmp_path / "straight"), make(tmp_path / "stopped")
    straight.train()
    assert stopped_at(stopped, 8)[0]
    state = tmp_path / "stopped" / "checkpoints" / "step-0" / "state"
    kept = load_rollout(state / "rollout-0")
    ended = sum(len(group.completions) for group in kept.groups)
    assert 0 < ended < 16
    assert ended == sum(map(len, kept.facts["samples"]))
    resumed, drawn = make(tmp_path / "stopped"), []
    real = resumed.engine.submit
    resumed.engine.submit = lambda requests: drawn.extend(requests) or real(requests)
    resumed.train(resume=True)
    assert len(drawn) == 16 - ended
    assert_same(straight, resumed)


def test_a_second_stop_in_the_same_rollout_keeps_what_has_ended_since(demo_tokenizer, tmp_path):
    def make():
        return make_trainer(demo_tokenizer, tmp_path / "run", exact_model(demo_tokenizer), max_steps=1)

    ended = []
    for look in (8, 11, 0):  # the last one stops before anything is drawn
        assert stopped_at(make(), look, resume=bool(ended))[0]
        kept = load_rollout(tmp_path / "run" / "checkpoints" / "step-0" / "state" / "rollout-0")
        ended.append(sum(map(len, kept.facts["samples"])))
    assert 0 < ended[0] < ended[1] == ended[2]


def test_calls_that_have_ended_are_not_made_again(demo_tokenizer, tmp_path):
    """A reward that is awaited for ever in one completion, a stop meanwhile, and the reward repaired."""
    called, broken, dry = [], [True], 4  # calls of the trial before the run

    async def judge(completion, log_extra, log_metric, **_):
        called.append(completion)
        if broken[0] and len(called) == dry + 3:
            while len(called) < dry + 16:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # the others have ended
            stopped.stop()
            await asyncio.sleep(3600)
        log_extra("length", len(completion))
        log_metric("length", len(completion) / 3)
        return len(completion) / 10

    def make(folder):
        return make_trainer(demo_tokenizer, folder, rewards=[judge, digits_reward], max_steps=1)

    stopped = make(tmp_path / "stopped")
    with pytest.raises(Stopped, match="in step 1, while it was sampled or scored"):
        stopped.train()
    assert len(called) == dry + 16
    broken[0], called[:] = False, []
    resumed = make(tmp_path / "stopped")
    resumed.train(resume=True)
    assert len(called) == dry + 1
    straight = make(tmp_path / "straight")
    straight.train()
    assert_same(straight, resumed)


def test_what_was_scored_before_a_stop_is_kept_beside_the_checkpoint_of_the_step_before(demo_tokenizer, tmp_path):
    stops, calls = [], []

    def reward(completions, trainer_state, **_):
        if trainer_state.global_step == 1:
            calls.append(len(completions))
            if stops:
                stops.pop().stop()
        return digits_reward(completions)

    def make():
        return make_trainer(demo_tokenizer, tmp_path / "run", rewards=reward, max_steps=2, save_steps=1)

    stops.append(make())
    with pytest.raises(Stopped, match="in step 2, before its updates"):
        stops[0].train()
    resumed, drawn = make(), []
    resumed.engine.submit = drawn.extend
    resumed.train(resume=True)
    assert drawn == []
    assert calls == [16]


def test_a_reward_that_hangs_in_this_process_is_interrupted(demo_tokenizer, tmp_path, monkeypatch):
    """After half of the time to stop. What was sampled is kept, and so are the calls of other functions."""
    monkeypatch.setattr("cohort.train.signals._end", lambda *_: None)  # a slow machine does not end the tests
    hangs, calls = [True], []

    def other(completions, **_):
        calls.append(len(completions))
        return digits_reward(completions)

    def hanging(completions, trainer_state, **_):
        if hangs[0] and trainer_state.max_steps:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return digits_reward(completions)

    def make(folder):
        return make_trainer(demo_tokenizer, folder, rewards=[other, hanging], max_steps=1, stop_seconds=0.6)

    stopped, started = make(tmp_path / "stopped"), time.monotonic()
    with pytest.raises(Stopped, match="stopped by SIGTERM in step 1, while it was sampled or scored"):
        stopped.train()
    assert time.monotonic() - started < 10
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    hangs[0] = False
    resumed, drawn = make(tmp_path / "stopped"), []
    resumed.engine.submit = drawn.extend
    calls.clear()
    resumed.train(resume=True)
    assert calls == drawn == []
    straight = make(tmp_path / "straight")
    straight.train()
    assert_same(straight, resumed)


# Rollouts beside the training -----------------------------------------------------------------------------------------


def lagging(demo_tokenizer, folder, rewards=digits_reward, **settings):
    """A run of three steps of four updates; heads of 16, so that completions have the same bits alone."""
    return make_trainer(demo_tokenizer, folder, exact_model(demo_tokenizer), rewards, **LAG | settings)


LAG = {"num_iterations": 2, "minibatches": 2, "max_steps": 3, "lag": 1, "save_steps": 0}


def newest_state(folder):
    """The training may have ended its step before it stopped."""
    return max((folder / "checkpoints").glob("step-?"), key=lambda path: path.name) / "state"


def stops_in_sampling(trainer, rollout, decodes, updates):
    """Let a trainer stop when it has decoded the given number of times in a rollout's thread, and
    the given number of updates are made."""
    real, calls, trained = trainer.engine.backend.step, [], threading.Event()
    real_update = trainer.optimizer.step

    def step(tokens):
        if threading.current_thread().name == f"rollout-{rollout}":
            calls.append(len(tokens))
            if len(calls) == decodes:
                assert trained.wait(30)
                trainer.stop()
        return real(tokens)

    def update(*arguments):
        done = real_update(*arguments)
        if trainer.policy.version + 1 >= updates:
            trained.set()
        return done

    if not updates:
        trained.set()
    trainer.engine.backend.step, trainer.optimizer.step = step, update


@pytest.fixture(scope="module")
def lagging_straight(demo_tokenizer, tmp_path_factory):
    """Runs in one go, by their lag."""
    found = {}
    for lag in (1, 2):
        found[lag] = lagging(demo_tokenizer, tmp_path_factory.mktemp("straight") / "run", lag=lag)
        found[lag].train()
    return found


@pytest.mark.parametrize(
    ("lag", "rollout", "updates"),
    [
        (1, 1, 2),
        (2, 1, 0),
        pytest.param(1, 0, 0, marks=pytest.mark.slow),
        pytest.param(2, 2, 3, marks=pytest.mark.slow),
    ],
    ids=["after two updates", "before another one begins", "the first", "one complete beside it"],
)
def test_a_stop_cancels_what_is_sampled_beside_the_training(
    demo_tokenizer, tmp_path, lagging_straight, lag, rollout, updates
):
    """The rest is drawn with the weights that drew the beginning, which the policy no longer has."""
    stopped = lagging(demo_tokenizer, tmp_path / "run", lag=lag)
    stops_in_sampling(stopped, rollout, 7, updates)
    with pytest.raises(Stopped):
        stopped.train()
    state = newest_state(tmp_path / "run")
    kept = load_rollout(state / f"rollout-{rollout}")
    assert 0 < sum(map(len, kept.facts["samples"])) < 16
    assert (state / "sampler.safetensors").exists() == (updates > 0)
    resumed = lagging(demo_tokenizer, tmp_path / "run", lag=lag)
    drawn, real = [], resumed.engine.submit
    resumed.engine.submit = lambda requests: drawn.extend(requests) or real(requests)
    resumed.train(resume=True)
    assert len(drawn) == 16 * (3 - rollout) - sum(map(len, kept.facts["samples"]))
    assert_same(lagging_straight[lag], resumed)


def test_a_stop_before_an_evaluation_keeps_the_weights_that_draw_beside_it(demo_tokenizer, tmp_path):
    """The evaluation gives the engine the weights of now, though it is cancelled too. Of the rollout, hardly anything
    is drawn."""

    def make(folder):
        return lagging(demo_tokenizer, folder, eval_rows=ROWS[:2], eval_steps=1)

    straight, stopped = make(tmp_path / "straight"), make(tmp_path / "run")
    straight.train()
    stops_in_sampling(stopped, 2, 1, 8)
    with pytest.raises(Stopped, match="in the evaluation after step 2"):
        stopped.train()
    resumed = make(tmp_path / "run")
    resumed.train(resume=True)
    assert_same(straight, resumed)


def test_a_stop_in_scoring_beside_the_training_keeps_the_calls(demo_tokenizer, tmp_path):
    """One call of sixteen does not end; the others and what was drawn are kept, without the weights that drew it."""
    hangs, called = [True], []

    async def judge(completion, trainer_state, **_):
        if trainer_state.global_step == 1:
            called.append(completion)
            if hangs[0] and len(called) == 16:
                await asyncio.sleep(0.1)  # the others have ended
                stopped.stop()
                await asyncio.sleep(3600)
        return len(completion) / 10

    stopped = lagging(demo_tokenizer, tmp_path / "run", judge)
    with pytest.raises(Stopped):
        stopped.train()
    state = newest_state(tmp_path / "run")
    assert load_rollout(state / "rollout-1").facts["drawn"]
    assert not (state / "sampler.safetensors").exists()
    hangs[0] = False
    resumed = lagging(demo_tokenizer, tmp_path / "run", judge)
    resumed.train(resume=True)
    assert len(called) == 17
    straight = lagging(demo_tokenizer, tmp_path / "straight", judge)
    straight.train()
    assert_same(straight, resumed)


def test_a_round_after_a_stop_has_the_weights_of_the_one_before_it(demo_tokenizer, tmp_path):
    """The round was drawn, and its scores were awaited. They ask for another round, which the stopped run has not begun."""
    stops, called, trained = [], [], threading.Event()

    async def judge(completion, trainer_state, **_):
        if trainer_state.global_step == 2:
            called.append(completion)
            if stops and len(called) == 1:
                while len(called) < 16 or not trained.is_set():
                    await asyncio.sleep(0.01)
                stops.pop().stop()
                await asyncio.sleep(3600)
        return float(len(completion) % 5 == 0)

    def make(folder):
        rule = {"rule": "dynamic_sampling", "max_rounds": 3}
        return lagging(demo_tokenizer, folder, judge, group_filter=rule)

    straight, stopped = make(tmp_path / "straight"), make(tmp_path / "run")
    straight.train()
    assert metrics_of(tmp_path / "straight")[2]["groups/rounds"] > 1
    called.clear()
    real = stopped.optimizer.step

    def step(*arguments):
        if stopped.policy.version >= 4:
            trained.set()
        return real(*arguments)

    stopped.optimizer.step = step
    stops.append(stopped)
    with pytest.raises(Stopped):
        stopped.train()
    resumed = make(tmp_path / "run")
    resumed.train(resume=True)
    assert_same(straight, resumed)


def test_a_function_that_hangs_beside_the_training_does_not_hold_up_a_stop(demo_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("cohort.train.signals._end", lambda *_: None)  # a slow machine does not end the tests
    hangs, release = [True], threading.Event()

    def hanging(completions, trainer_state, **_):
        if hangs[0] and trainer_state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            release.wait(60)
        return digits_reward(completions)

    stopped = lagging(demo_tokenizer, tmp_path / "run", hanging, stop_seconds=1, max_steps=2)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        stopped.train()
    release.set()
    for thread in [one for one in threading.enumerate() if one.name.startswith("rollout-")]:
        thread.join(10)
    hangs[0] = False
    resumed = lagging(demo_tokenizer, tmp_path / "run", hanging, max_steps=2)
    drawn = []
    resumed.engine.submit = drawn.extend
    resumed.train(resume=True)
    assert drawn == []
    straight = lagging(demo_tokenizer, tmp_path / "straight", hanging, max_steps=2)
    straight.train()
    assert_same(straight, resumed)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lag 1", "lag 2", "rounds", "evaluation", "small heads", "LoRA", "async"])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_stops_at_random_moments_beside_the_training(demo_tokenizer, tmp_path, variant):
    """Stopped and resumed again and again, at moments that depend on the clock."""
    settings = LAG | {"max_steps": 4, "lag": 1 if variant == "lag 1" else 2, "save_steps": 2}
    settings |= {"preset": "dapo"} if variant == "rounds" else {}
    settings |= {"eval_rows": ROWS[:2], "eval_steps": 1} if variant == "evaluation" else {}
    settings |= {"lora": {"rank": 2}} if variant == "LoRA" else {}

    async def slow(completion, **_):
        await asyncio.sleep(0.02 * (len(completion) % 3))
        return digits_reward([completion])[0]

    def make(folder):
        rewards = {"rounds": rarely, "async": slow}.get(variant, digits_reward)
        model = tiny_llama(vocab_size=len(demo_tokenizer)) if variant == "small heads" else exact_model(demo_tokenizer)
        return make_trainer(demo_tokenizer, folder, model, rewards, **settings)

    straight = make(tmp_path / "straight")
    straight.train()
    seconds, stops, rng = straight.summary["seconds"], 0, random.Random(0)
    while True:
        run = make(tmp_path / "stopped")
        timer = threading.Timer(rng.uniform(0, seconds / 3), run.stop)
        timer.start()
        try:
            run.train(resume="auto")
        except Stopped:
            stops += 1
            assert stops < 60, "it does not get ahead"
            continue
        finally:
            timer.cancel()
        break
    assert stops
    assert_same(straight, run)


def test_a_checkpoint_without_stopping(demo_tokenizer, tmp_path):
    """It changes nothing, and a run that is killed later goes on from it."""

    def make(folder):
        return make_trainer(demo_tokenizer, folder, **UPDATES, save_steps=0)

    straight, saved = make(tmp_path / "straight"), make(tmp_path / "saved")
    straight.train()
    real = saved.optimizer.step

    def step(*arguments):
        if saved.policy.version == 4 + 1:
            saved.save_now()
        return real(*arguments)

    saved.optimizer.step = step
    saved.train()
    assert_same(straight, saved)
    folder = tmp_path / "saved"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-1", "step-2"]
    (folder / "summary.json").unlink()
    (folder / "checkpoints" / "step-2").rename(tmp_path / "gone")
    resumed = make(folder)
    resumed.train(resume=True)
    assert resumed.summary["updates"] == 8
    assert_same(straight, resumed)


def test_a_kill_after_an_evaluation_that_goes_on_writes_no_line_twice(demo_tokenizer, tmp_path):
    """Stopped in the evaluation after a step, resumed, and killed after the line of the step is written."""
    stops = []

    async def judge(completion, prompt, trainer_state, **_):
        if stops and trainer_state.global_step == 1 and prompt == ROWS[0]["prompt"]:
            stops.pop().stop()
            await asyncio.sleep(3600)
        return len(completion) / 10

    def make(folder):
        settings = {"rows": ROWS[2:], "eval_rows": ROWS[:2], "eval_steps": 1, "save_steps": 0, "max_steps": 2}
        return make_trainer(demo_tokenizer, folder, rewards=judge, **settings)

    straight, stopped = make(tmp_path / "straight"), make(tmp_path / "run")
    straight.train()
    stops.append(stopped)
    with pytest.raises(Stopped, match="in the evaluation after step 1"):
        stopped.train()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0]
    break_after(make(tmp_path / "run"), 1, resume=True)
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0, 1]
    resumed = make(tmp_path / "run")
    resumed.train(resume=True)
    assert_same(straight, resumed)


def test_what_was_stopped_in_its_last_evaluation_is_evaluated_once_and_made_longer(demo_tokenizer, tmp_path):
    stops, evaluated = [], []

    async def judge(completion, prompt, trainer_state, **_):
        if trainer_state.max_steps and prompt == ROWS[0]["prompt"]:
            if stops and trainer_state.global_step == 1:
                stops.pop().stop()
                await asyncio.sleep(3600)
            evaluated.append(trainer_state.global_step)
        return len(completion) / 10

    def make(steps):
        settings = {"rows": ROWS[2:], "eval_rows": ROWS[:1], "eval_steps": 1, "save_steps": 0, "max_steps": steps}
        return make_trainer(demo_tokenizer, tmp_path / "run", rewards=judge, **settings)

    stops.append(make(1))
    with pytest.raises(Stopped, match="in the evaluation after step 1"):
        stops[0].train()
    make(1).train(resume=True)
    make(2).train(resume=True)
    assert evaluated == [0, 1, 2]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0, 1, 2]


def the_function_before(stops):
    async def judge(completion, trainer_state, **_):
        if stops and trainer_state.max_steps:  # not in the trial before the run
            stopped = stops.pop()
            await asyncio.sleep(0.1)  # the other calls have ended
            stopped.stop()
            await asyncio.sleep(3600)
        return len(completion)

    return judge


def the_function_of_now():
    async def judge(completion, **_):
        return -len(completion)

    return judge


def test_scores_of_a_function_that_has_changed_are_not_kept(demo_tokenizer, tmp_path):
    """The completions are kept, and the function of now scores all of them."""

    def make(reward):
        return make_trainer(demo_tokenizer, tmp_path / "run", rewards=reward, max_steps=1)

    stops = []
    stops.append(make(the_function_before(stops)))
    with pytest.raises(Stopped, match="while it was sampled or scored"):
        stops[0].train()
    kept = load_rollout(tmp_path / "run" / "checkpoints" / "step-0" / "state" / "rollout-0")
    assert len(kept.facts["calls"]) == 15
    resumed, drawn = make(the_function_of_now()), []
    resumed.engine.submit = drawn.extend
    resumed.train(resume=True, allow_changed=["code"])
    assert drawn == []
    assert all(row["reward"] == -len(row["completion"]) for row in rows_of(tmp_path / "run"))


def test_a_failing_reward_loses_no_completion(demo_tokenizer, tmp_path):
    """What was sampled is kept, and scored by the repaired function."""
    broken = [True]

    def fails(completions, trainer_state, **_):
        if broken[0] and trainer_state.global_step == 1:
            raise ValueError("no")
        return digits_reward(completions)

    def make(folder):
        return make_trainer(demo_tokenizer, folder, rewards=fails, on_error="stop", max_steps=2)

    with pytest.raises(RewardError, match="no.*; in step 2; a checkpoint of step 1 is kept: fix it and resume"):
        make(tmp_path / "failed").train()
    broken[0] = False
    resumed, drawn = make(tmp_path / "failed"), []
    resumed.engine.submit = drawn.extend
    resumed.train(resume=True)
    assert drawn == []
    straight = make(tmp_path / "straight")
    straight.train()
    assert_same(straight, resumed)


def rarely(completions, **_):
    """The rewards of many groups are equal, so that dynamic sampling takes more rounds."""
    return [float(len(text) % 5 == 0) for text in completions]


VARIANTS = {
    "updates": UPDATES,
    "small heads": UPDATES,
    "no KL": UPDATES | {"beta": 0.0},
    "moving reference": UPDATES | {"sync_ref_model": True, "ref_model_sync_steps": 5, "ref_model_mixup_alpha": 0.5},
    "adaptive entropy": UPDATES | {"entropy": {"target": 100.0, "step": 0.004}},
    "adaptive KL": UPDATES | {"kl": {"target": 1e-9, "horizon": 16}},
    "dynamic sampling": UPDATES | {"preset": "dapo", "max_steps": 2},
    "LoRA": UPDATES | {"lora": {"rank": 2}},
    "workers": UPDATES | {"workers": 1, "max_steps": 1},
    "rewards each": UPDATES | {"term_norms_steps": 1},
    "lag": UPDATES | {"lag": 1, "max_steps": 3},
    "curriculum": UPDATES | {"order": "curriculum", "curriculum": "measured", "max_steps": 3},
    "best": UPDATES | {"metric_for_best_model": "eval/reward/mean", "eval_steps": 1},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_instant(demo_tokenizer, tmp_path, variant):
    """A stop at each third look of a run."""

    def make(folder):
        rows = {"eval_rows": ROWS[:2]} if variant == "best" else {}
        rows |= {"rewards": rarely} if variant == "dynamic sampling" else {}
        model = tiny_llama(vocab_size=len(demo_tokenizer)) if variant == "small heads" else exact_model(demo_tokenizer)
        return make_trainer(demo_tokenizer, folder, model, **rows, **VARIANTS[variant])

    assert_stops_change_nothing(make, tmp_path, lambda total: range(0, total - 1, 3))
