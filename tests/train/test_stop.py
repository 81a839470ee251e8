"""Stopping a run at any moment: the resumed run is bit for bit the run that was not stopped, and samples no rollout again
that was complete."""

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
    assert one._training.state.adaptive == other._training.state.adaptive
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


def journal_of(folder):
    return sorted(path.name for path in (folder / "journal").glob("*.safetensors"))


def requests_of(trainer):
    """The requests that a trainer's engine is given from now on."""
    drawn, real = [], trainer.engine.submit
    trainer.engine.submit = lambda requests: drawn.extend(requests) or real(requests)
    return drawn


def goes_on(make, folder, sampled=None, before=lambda: None):
    """Resume the run in a folder: it equals one in one go, and its engine is asked for so many completions."""
    resumed = make(folder / "run")
    drawn = requests_of(resumed)
    before()
    resumed.train(resume=True)
    assert sampled in (None, len(drawn))
    straight = make(folder / "straight")
    straight.train()
    assert_same(straight, resumed)


class StopsAt:
    """Stops a run once its rollout of a step is scored."""

    def __init__(self, step):
        self.step = step

    def on_rollout(self, trainer, event):
        if event.step == self.step:
            trainer.stop()


# Every moment ---------------------------------------------------------------------------------------------------------


def test_a_run_that_is_stopped_again_and_again(demo_tokenizer, tmp_path):
    """Sampling, scoring, between updates, in evaluations, between steps."""

    def make(folder):
        settings = UPDATES | {"max_steps": 1, "eval_rows": ROWS[:2], "metric_for_best_model": "eval/reward/mean"}
        return make_trainer(demo_tokenizer, folder, exact_model(demo_tokenizer), **settings)

    assert assert_many_stops_change_nothing(make, tmp_path) >= 2


def stops_at_update(trainer, number, ask="stop"):
    """Ask a trainer for something when it makes its optimizer step of this number, counted from 1."""
    real, made = trainer.optimizer.step, []

    def step(*arguments):
        made.append(len(made))
        if len(made) == number:
            getattr(trainer, ask)()
        return real(*arguments)

    trainer.optimizer.step = step


def test_a_stop_between_two_updates_waits_for_the_end_of_the_step(demo_tokenizer, tmp_path):
    def make(folder):
        return make_trainer(demo_tokenizer, folder, **UPDATES)

    stopped = make(tmp_path / "run")
    stops_at_update(stopped, 2)
    with pytest.raises(Stopped, match="stopped by .* after step 1; .*step-1 holds this moment") as caught:
        stopped.train()
    assert caught.value.code == 75
    assert str(caught.value).endswith("; continue with the same script and train(resume='auto')")  # the model is new
    assert stopped.policy.version == 4
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1]
    goes_on(make, tmp_path)


def test_a_stop_before_the_first_update_keeps_the_rollout(demo_tokenizer, tmp_path):
    """Its table is in the journal, and the checkpoint is of the moment before the step."""

    def make(folder, callbacks=()):
        return make_trainer(demo_tokenizer, folder, exact_model(demo_tokenizer), callbacks=callbacks, **UPDATES)

    with pytest.raises(Stopped, match="after step 0; .*step-0 holds"):
        make(tmp_path / "run", [StopsAt(1)]).train()
    assert journal_of(tmp_path / "run") == ["step-1.safetensors"]
    goes_on(make, tmp_path, sampled=16)  # the second of two steps
    assert not (tmp_path / "run" / "journal").exists()


def test_a_killed_run_samples_nothing_again_that_the_journal_has(demo_tokenizer, tmp_path):
    """Its newest checkpoint is two steps old: two rollouts are read, and one is sampled."""

    def make(folder):
        return make_trainer(demo_tokenizer, folder, **UPDATES | {"max_steps": 4, "save_steps": 1, "top_p": 0.9})

    break_after(make(tmp_path / "run"), 1)
    killed = make(tmp_path / "run")
    real_update, updates = killed.optimizer.step, []

    def step(*arguments):
        updates.append(1)
        if len(updates) == 4 + 2:  # in step 3, between two updates
            raise KeyboardInterrupt
        return real_update(*arguments)

    killed.optimizer.step = step
    steps = killed.steps(resume=True)
    killed.folder.save_checkpoint = lambda *_, **__: True  # nothing of it reaches the disk
    with pytest.raises(KeyboardInterrupt):
        list(steps)
    assert journal_of(tmp_path / "run") == [f"step-{step}.safetensors" for step in (2, 3)]
    goes_on(make, tmp_path, sampled=16)


@pytest.mark.parametrize("damage", ["a bit", "gone"])
def test_a_damaged_journal_is_sampled_again(demo_tokenizer, tmp_path, damage, caplog):
    def make(folder, callbacks=()):
        return make_trainer(demo_tokenizer, folder, callbacks=callbacks, max_steps=3)

    with pytest.raises(Stopped):
        make(tmp_path / "run", [StopsAt(2)]).train()
    path = tmp_path / "run" / "journal" / "step-2.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink() if damage == "gone" else path.write_bytes(content)
    goes_on(make, tmp_path, sampled=32)
    assert ("step 2 is sampled again" in caplog.text) == (damage != "gone")


@pytest.mark.parametrize(
    ("changed", "sampled"),
    [({"learning_rate": 2e-2}, 16), ({"lag": 1}, 16), ({"max_steps": 4}, 32), ({"temperature": 0.9}, 32)],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_a_changed_run_takes_from_the_journal(demo_tokenizer, tmp_path, changed, sampled):
    """Stopped in step 2 of 3. What a change of the updates cannot reach is read; a longer run has one step more."""

    def make(callbacks=(), **settings):
        settings = {"max_steps": 3, "lr_scheduler_type": "constant"} | settings
        return make_trainer(demo_tokenizer, tmp_path / "run", callbacks=callbacks, **settings)

    with pytest.raises(Stopped):
        make([StopsAt(2)]).train()
    resumed = make(**changed)
    drawn = requests_of(resumed)
    resumed.train(resume=True, allow_changed=["optim.learning_rate", "rollout.lag", "rollout.temperature"])
    assert len(drawn) == sampled


def exact_model(tokenizer):
    """A model whose completions have the same bits whatever is decoded beside them: heads of 16."""
    return tiny_llama(vocab_size=len(tokenizer), hidden_size=64)


def test_a_reward_that_hangs_in_this_process_is_interrupted(demo_tokenizer, tmp_path, monkeypatch):
    """After half of the time to stop. What was sampled is kept."""
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

    stopped, started = make(tmp_path / "run"), time.monotonic()
    with pytest.raises(Stopped, match="stopped by SIGTERM after step 0"):
        stopped.train()
    assert time.monotonic() - started < 10
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    hangs[0] = False
    goes_on(make, tmp_path, sampled=0, before=calls.clear)
    assert calls.count(16) == 2  # resumed, and in one go


# Rollouts beside the training -----------------------------------------------------------------------------------------


def lagging(demo_tokenizer, folder, rewards=digits_reward, **settings):
    """A run of three steps of four updates; heads of 16, so that completions have the same bits alone."""
    return make_trainer(demo_tokenizer, folder, exact_model(demo_tokenizer), rewards, **LAG | settings)


LAG = {"num_iterations": 2, "minibatches": 2, "max_steps": 3, "lag": 1, "save_steps": 0}


def stops_in_sampling(trainer, rollout, decodes, updates):
    """Let a trainer stop when it has decoded the given number of times in a rollout's thread, and
    the given number of updates are made."""
    real, calls, trained = trainer.engine.backend.step, [], threading.Event()
    real_update = trainer.optimizer.step

    def step(slots, tokens):
        if threading.current_thread().name == f"rollout-{rollout + 1}":
            calls.append(len(tokens))
            if len(calls) == decodes:
                assert trained.wait(30)
                trainer.stop()
        return real(slots, tokens)

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
def test_a_stop_waits_for_what_is_sampled_beside_the_training(
    demo_tokenizer, tmp_path, lagging_straight, lag, rollout, updates
):
    """No later process has the weights that draw it."""
    stopped = lagging(demo_tokenizer, tmp_path / "run", lag=lag)
    stops_in_sampling(stopped, rollout, 7, updates)
    with pytest.raises(Stopped):
        stopped.train()
    kept = len(journal_of(tmp_path / "run"))
    assert kept >= 1
    done = stopped._training.state.complete_steps
    resumed = lagging(demo_tokenizer, tmp_path / "run", lag=lag)
    drawn = requests_of(resumed)
    resumed.train(resume=True)
    assert len(drawn) == 16 * (3 - done - kept)
    assert_same(lagging_straight[lag], resumed)


def test_a_stop_before_an_evaluation_waits_for_what_is_drawn_beside_it(demo_tokenizer, tmp_path):
    """The evaluation would give the engine the weights of now."""

    def make(folder):
        return lagging(demo_tokenizer, folder, eval_rows=ROWS[:2], eval_steps=1)

    stopped = make(tmp_path / "run")
    stops_in_sampling(stopped, 2, 1, 8)
    with pytest.raises(Stopped, match="in the evaluation after step 2"):
        stopped.train()
    goes_on(make, tmp_path)


def test_a_stop_in_scoring_beside_the_training_keeps_what_is_drawn(demo_tokenizer, tmp_path):
    """One call of sixteen does not end. All are made again."""
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
    hangs[0] = False
    goes_on(lambda folder: lagging(demo_tokenizer, folder, judge), tmp_path, sampled=16)
    assert len(called) == 3 * 16  # stopped, resumed, and in one go


def test_a_function_that_hangs_beside_the_training_does_not_hold_up_a_stop(demo_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("cohort.train.signals._end", lambda *_: None)  # a slow machine does not end the tests
    hangs, release = [True], threading.Event()

    def hanging(completions, trainer_state, **_):
        if hangs[0] and trainer_state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            release.wait(60)
        return digits_reward(completions)

    stopped = lagging(demo_tokenizer, tmp_path / "run", hanging, stop_seconds=0.4, max_steps=2)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        stopped.train()
    release.set()
    for thread in [one for one in threading.enumerate() if one.name.startswith("rollout-")]:
        thread.join(10)
    hangs[0] = False
    goes_on(lambda folder: lagging(demo_tokenizer, folder, hanging, max_steps=2), tmp_path, sampled=0)


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
    seconds = sum(line["seconds/step"] for line in metrics_of(tmp_path / "straight") if line["step"])
    stops, rng = 0, random.Random(0)
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
    """It is of the next moment between two steps, and changes nothing; a run that is killed later goes on from it."""

    def make(folder):
        return make_trainer(demo_tokenizer, folder, **UPDATES, save_steps=0)

    straight, saved = make(tmp_path / "straight"), make(tmp_path / "saved")
    straight.train()
    stops_at_update(saved, 2, ask="save_now")
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

    stops.append(make(tmp_path / "run"))
    with pytest.raises(Stopped, match="in the evaluation after step 1"):
        stops[0].train()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0]
    break_after(make(tmp_path / "run"), 1, resume=True)
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0, 1]
    goes_on(make, tmp_path)


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
    with pytest.raises(Stopped, match="after step 0"):
        stops[0].train()
    resumed, drawn = make(the_function_of_now()), []
    resumed.engine.submit = drawn.extend
    resumed.train(resume=True, allow_changed=["code"])
    assert drawn == []
    assert all(row["reward"] == -len(row["completion"]) for row in rows_of(tmp_path / "run"))


def test_scores_of_a_function_that_has_changed_where_they_decide_how_many_groups_there_are(demo_tokenizer, tmp_path):
    """A rollout of dynamic sampling is sampled again: the new scores may ask for another round."""

    def make(reward, callbacks=()):
        rule = {"rule": "dynamic_sampling", "max_rounds": 3}
        settings = {"max_steps": 1, "group_filter": rule}
        return make_trainer(demo_tokenizer, tmp_path / "run", rewards=reward, callbacks=callbacks, **settings)

    with pytest.raises(Stopped):
        make(the_function_of_now(), [StopsAt(1)]).train()
    assert journal_of(tmp_path / "run") == ["step-1.safetensors"]
    make(rarely).train(resume=True, allow_changed=["code", "rewards"])
    groups = [row["group"] for row in rows_of(tmp_path / "run")]
    assert len(groups) == 4 * len(set(groups)) > 16  # several rounds, and no group twice


@pytest.mark.parametrize("rounds", [False, True])
def test_an_unscored_rollout_has_the_random_numbers_of_before_its_scoring(demo_tokenizer, tmp_path, rounds):
    """The first of two functions has drawn from a global generator when the second one fails. With dynamic sampling,
    all is sampled again."""
    rule = {"group_filter": {"rule": "dynamic_sampling", "max_rounds": 3}} if rounds else {}
    broken = [True]

    def noisy(completions, **_):
        return [random.random() for _ in completions]

    def fails(completions, trainer_state, **_):
        if broken[0] and trainer_state.global_step == 1:
            raise ValueError("no")
        return digits_reward(completions)

    def make(folder):
        return make_trainer(demo_tokenizer, folder, rewards=[noisy, fails], on_error="stop", max_steps=3, **rule)

    with pytest.raises(RewardError):
        make(tmp_path / "run").train()
    broken[0] = False
    goes_on(make, tmp_path, sampled=32 if rounds else 16, before=lambda: random.seed(7))


def test_what_follows_a_rollout_that_is_sampled_again_is_not_read(demo_tokenizer, tmp_path):
    """Weights of later steps have drawn it, and these may differ now."""

    def make():
        return make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, save_steps=1, save_total_limit=4)

    killed = make()
    for metrics in (steps := killed.steps()):
        killed.folder.save_checkpoint = lambda *_, **__: True  # nothing of a later one reaches the disk
        if metrics["step"] == 3:
            steps.close()
    journal = tmp_path / "run" / "journal"
    assert journal_of(tmp_path / "run") == ["step-2.safetensors", "step-3.safetensors"]
    (journal / "step-2.safetensors").unlink()
    resumed = make()
    drawn = requests_of(resumed)
    resumed.train(resume=True)
    assert len(drawn) == 3 * 16


def test_an_evaluation_that_was_asked_for_is_repeated(demo_tokenizer, tmp_path):
    stops = []

    async def judge(completion, prompt, trainer_state, **_):
        if stops and trainer_state.evaluating and trainer_state.global_step == 1:
            stops.pop().stop()
            await asyncio.sleep(3600)
        return len(completion) / 10

    def make():
        settings = {"rows": ROWS[2:], "eval_rows": ROWS[:2], "eval_steps": 0, "eval_on_start": False, "max_steps": 2}
        return make_trainer(demo_tokenizer, tmp_path / "run", rewards=judge, **settings)

    stops.append(stopped := make())
    stopped.evaluate_now()
    with pytest.raises(Stopped, match="in the evaluation after step 1"):
        stopped.train()
    make().train(resume=True)
    evaluated = [line["step"] for line in metrics_of(tmp_path / "run") if "eval/reward/mean" in line]
    assert evaluated == [1, 2]


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
