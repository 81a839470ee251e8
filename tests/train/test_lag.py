"""``rollout.lag``: rollouts that are sampled and scored beside the training of earlier steps."""

import asyncio
import copy
import logging
import signal
import threading
import time
from collections import Counter

import pytest

from cohort import GRPOConfig
from cohort.errors import ConfigError, RewardError
from cohort.policy import Policy
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.setup import with_engine
from cohort.runs.journal import load_rollout
from cohort.train.source import PendingRollout
from tests.conftest import telling, tiny_llama
from tests.environments import test_training as episodes
from tests.train.harness import (
    ROWS,
    break_after,
    digits_reward,
    make_trainer,
    metrics_of,
    rows_of,
    same_parameters,
    straight_and_resumed,
    untimed_metrics_of,
    untimed_rows_of,
)


async def slow_digits(completion, **_):
    await asyncio.sleep(0.01 * (len(completion) % 3))  # calls end in another order than they begin
    return sum(ch.isdigit() for ch in completion) / (len(completion) + 1)


def rollout_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("rollout-")]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert rollout_threads() == []


# What is sampled ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", telling([1, 2], 2))
def test_a_step_trains_on_what_the_weights_of_so_many_steps_ago_draw(demo_tokenizer, tmp_path, lag):
    """The weights after each step are kept; an engine over them draws what the run has written, bit for bit."""
    settings = {"lag": lag, "max_steps": 4, "num_iterations": 2, "minibatches": 2}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rewards=[slow_digits, digits_reward], **settings)
    weights, lags = [copy.deepcopy(trainer.policy.model.state_dict())], []
    requested, submit = [], trainer.engine.submit
    trainer.engine.submit = lambda requests: requested.extend(requests) or submit(requests)
    for metrics in trainer.steps():
        weights.append(copy.deepcopy(trainer.policy.model.state_dict()))
        lags.append(metrics["rollout/lag"])
        assert metrics["sampler/version_lag_mean"] == 4 * metrics["rollout/lag"]  # updates per step
    assert lags == [0, 1, lag, lag]
    assert len(requested) == 4 * 16  # nothing for steps after the last
    for step in range(4):
        model = tiny_llama(vocab_size=len(demo_tokenizer))
        model.load_state_dict(weights[max(0, step - lag)])
        engine = LocalEngine(Policy(model, trainer.policy.precision), demo_tokenizer, trainer.engine.end_token_ids)
        rows = rows_of(tmp_path / "run", step + 1)
        prompts = [trainer.prompts.prompts.prompt(rows[g]["row"], uid=rows[g]["group"]) for g in range(0, 16, 4)]
        groups = engine.generate(prompts, 4, Sampling(10), RNGKey(0, step))
        drawn = [completion for group in groups for completion in group.completions]
        assert [c.token_ids.tolist() for c in drawn] == [row["token_ids"] for row in rows]
        assert [c.sampler_logps.tolist() for c in drawn] == [row["sampler_logps"] for row in rows]


def test_without_lag_nothing_is_copied_and_no_thread_starts(demo_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(PendingRollout, "begin", lambda *_: pytest.fail("a thread started"))
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1)
    trainer.train()
    assert trainer.engine.policy is trainer.policy
    assert "rollout/lag" not in metrics_of(tmp_path / "run")[0]
    assert "seconds/rollout_wait" not in metrics_of(tmp_path / "run")[0]


def test_staleness_reaches_the_mismatch_rules(demo_tokenizer, tmp_path):
    """With one update per rollout the old policy is the current one; its ratio to the sampler is not 1."""
    rule = {"rule": "weight", "mode": "truncate", "low": 0.999, "high": 1.001}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=2, objective={"mismatch": [rule]})
    fresh, stale = trainer.steps()
    assert fresh["sampler/gap"] < 1e-5 < 1e-3 < stale["sampler/gap"]
    name = next(key for key in stale if key.startswith("mismatch/") and key.endswith("tokens_share"))
    assert fresh[name] == 0 < stale[name]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it
def test_only_adapters_are_copied(demo_tokenizer, tmp_path):
    pytest.importorskip("peft")
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=3, lora={"rank": 2})
    mine = dict(trainer.engine.policy.model.named_parameters())
    for name, weight in trainer.policy.model.named_parameters():
        assert (mine[name] is weight) == ("lora_" not in name)
    trainer.train()
    assert [line["rollout/lag"] for line in metrics_of(tmp_path / "run")] == [0, 1, 1]
    assert "from a copy of the weights (0.0 MiB)" in trainer.describe()


def test_functions_are_called_in_the_order_of_the_rollouts(demo_tokenizer, tmp_path):
    """One rollout at a time, though the next one is drawn before the functions of this one return."""
    calls = []

    def slow(completions, trainer_state, **_):
        if trainer_state.max_steps:  # not in the trial before the run
            calls.append(("begins", trainer_state.global_step))
            time.sleep(0.1)
            calls.append(("ends", trainer_state.global_step))
        return digits_reward(completions)

    make_trainer(demo_tokenizer, tmp_path / "run", lag=2, max_steps=3, rewards=slow).train()
    assert calls == [(what, step) for step in range(3) for what in ("begins", "ends")]


# Prompts --------------------------------------------------------------------------------------------------------------

DYNAMIC = {"group_filter": {"rule": "dynamic_sampling", "max_rounds": 3}}


def by_row(completions, answer, **_):
    """Rewards that do not depend on the policy; some groups are dead."""
    return [0.1 * g * (int(answer[g]) % 3) + int(answer[g]) for g in range(len(completions))]


@pytest.mark.parametrize(
    "settings",
    [DYNAMIC, {"order": "curriculum", "curriculum": "measured", "num_epochs": 2}],
    ids=["dynamic", "measured"],
)
def test_prompts_are_those_of_a_run_without_lag(demo_tokenizer, tmp_path, settings):
    """Also where the rewards decide which prompts come next."""
    seen = {}
    settings = {"num_generations": 3, "max_completion_length": 3} | settings
    for lag in (0, 2):
        folder = tmp_path / str(lag)
        more = settings | {"lag": lag, "max_steps": 6, "rewards": by_row, "save_steps": 3}
        break_after(make_trainer(demo_tokenizer, folder, **more), 5)
        make_trainer(demo_tokenizer, folder, **more).train(resume=True)
        seen[lag] = [[(row["group"], row["row"]) for row in rows_of(folder, step)] for step in range(1, 7)]
    assert seen[0] == seen[2]


# Resuming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lag", "stops"), [(2, (3,)), *(pytest.param(lag, (1, 2, 3), marks=pytest.mark.slow) for lag in (1, 2))]
)
def test_a_run_resumed_after_any_step_equals_an_uninterrupted_one(demo_tokenizer, tmp_path, lag, stops):
    def make(folder):
        settings = {"lag": lag, "max_steps": 4, "save_steps": 1, "num_iterations": 2, "minibatches": 2, "top_p": 0.9}
        settings |= {"lr_scheduler_type": "cosine", "eval_rows": ROWS[:3], "eval_steps": 2, "beta": 0.05}
        return make_trainer(demo_tokenizer, folder, rewards=[slow_digits, digits_reward], **settings)

    straight = make(tmp_path / "straight")
    straight.train()
    for stop in stops:
        break_after(make(tmp_path / f"at-{stop}"), stop)
        resumed = make(tmp_path / f"at-{stop}")
        resumed.train(resume=True)
        assert same_parameters(straight, resumed)
        assert untimed_metrics_of(tmp_path / f"at-{stop}") == untimed_metrics_of(tmp_path / "straight")
        assert untimed_rows_of(tmp_path / f"at-{stop}", 4) == untimed_rows_of(tmp_path / "straight", 4)


@pytest.mark.slow
def test_a_run_with_tools_resumes_exactly(tmp_path):
    def make(folder):
        settings = {"regex": episodes.CALL, "max_turns": 3, "max_steps": 3, "save_steps": 1, "lag": 1}
        return episodes.trainer(folder, episodes.few_calls, [episodes.add], **settings)

    straight_and_resumed(make, tmp_path, stop=2)


@pytest.mark.slow
def test_the_lag_may_change_when_a_run_resumes(demo_tokenizer, tmp_path):
    def make(lag):
        return make_trainer(demo_tokenizer, tmp_path / "run", lag=lag, max_steps=6, save_steps=1)

    break_after(make(2), 2)
    break_after_resuming(make(0), 4)
    make(1).train(resume=True, allow_changed=["rollout.lag"])
    # After step 2, two rollouts are pending. They are used first.
    assert [line["rollout/lag"] for line in metrics_of(tmp_path / "run")] == [0, 1, 2, 2, 0, 1]


def test_more_epochs_than_a_pending_rollout_was_drawn_for(demo_tokenizer, tmp_path):
    """The last step of one epoch has two prompts, and is a whole step of a longer run: no prompt is left out."""

    def make(epochs):
        return make_trainer(demo_tokenizer, tmp_path / "run", rows=ROWS[:10], lag=1, num_epochs=epochs, save_steps=1)

    break_after(make(1), 2)
    trainer = make(2)
    trainer.train(resume=True)
    prompts = [row["prompt"] for step in range(1, 6) for row in rows_of(tmp_path / "run", step)]
    assert sorted(Counter(prompts).values()) == [2 * 4] * 10
    assert trainer.summary["completions"] == 2 * 10 * 4


def break_after_resuming(trainer, step):
    for metrics in trainer.steps(resume=True, allow_changed=["rollout.lag"]):
        if metrics["step"] == step:
            return


# Errors ---------------------------------------------------------------------------------------------------------------


def failing_at(step, error):
    def fails(completions, trainer_state, **_):
        if trainer_state.global_step == step and not trainer_state.evaluating:
            raise error
        return digits_reward(completions)

    return fails


def test_a_reward_that_raises_stops_the_run_at_its_step(demo_tokenizer, tmp_path):
    settings = {"lag": 2, "max_steps": 5, "on_error": "stop"}
    broken = make_trainer(demo_tokenizer, tmp_path / "run", rewards=failing_at(3, ValueError("no")), **settings)
    with pytest.raises(RewardError, match=r"no.*; in step 4; a checkpoint of step 3 is kept: fix it and resume"):
        broken.train()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3]
    fixed = failing_at(9, ValueError("no"))
    make_trainer(demo_tokenizer, tmp_path / "run", rewards=fixed, **settings).train(resume=True)
    make_trainer(demo_tokenizer, tmp_path / "straight", rewards=fixed, **settings).train()
    # What was pending is scored by the repaired function.
    assert [line["rollout/lag"] for line in metrics_of(tmp_path / "run")] == [0, 1, 2, 2, 2]
    assert untimed_metrics_of(tmp_path / "run") == untimed_metrics_of(tmp_path / "straight")


def test_the_journal_holds_what_was_sampled_before_the_failure(demo_tokenizer, tmp_path):
    """One that a step has used; one that is sampled and not scored; and the one after it."""
    settings = {"lag": 2, "max_steps": 5, "on_error": "stop", "save_steps": 2}
    broken = make_trainer(demo_tokenizer, tmp_path / "run", rewards=failing_at(3, ValueError("no")), **settings)
    with pytest.raises(RewardError, match="a checkpoint of step 3 is kept"):
        broken.train()
    paths = sorted((tmp_path / "run" / "journal").glob("*"))
    assert [path.stem for path in paths] == ["step-3", "step-4", "step-5"]
    used, drawn, _ = map(load_rollout, paths)  # the checkpoint before the last needs the first
    assert used.scores is not None
    assert (drawn.scores, len(drawn.groups)) == (None, 4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_other_errors_surface_as_they_are(demo_tokenizer, tmp_path, error):
    def fails(completions, trainer_state, **_):
        if trainer_state.global_step == 2:
            raise error
        return digits_reward(completions)

    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=4, rewards=fails, on_error="stop")
    expected = KeyboardInterrupt if error is KeyboardInterrupt else RewardError
    with pytest.raises(expected):
        trainer.train()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"layout": "full"}, "rollout.lag.*parallel.layout"), ({"engine": "vllm", "sleep": True}, "rollout.sleep frees")],
)
def test_what_excludes_a_lag(settings, message):
    with pytest.raises(ConfigError, match=message):
        with_engine(GRPOConfig(lag=1, **settings))


def test_an_engine_without_weights_of_its_own_is_refused(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=2)
    trainer.engine = LocalEngine(trainer.policy, demo_tokenizer, trainer.engine.end_token_ids)
    with pytest.raises(ConfigError, match="rollout.lag"):
        next(trainer.steps())


# Abandoning -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["sampling", "reward"])
def test_closing_the_iterator_ends_what_is_pending(demo_tokenizer, tmp_path, monkeypatch, where):
    reached = threading.Event()

    async def waits(completion, trainer_state, **_):
        if where == "reward" and trainer_state.global_step == 1:
            reached.set()
            await asyncio.sleep(60)
        return float(len(completion))

    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=4, rewards=waits)
    if where == "sampling":
        real = trainer.engine.backend.step

        def slow(slots, tokens):
            if threading.current_thread().name == "rollout-2":
                reached.set()
                time.sleep(0.05)
            return real(slots, tokens)

        monkeypatch.setattr(trainer.engine.backend, "step", slow)
    steps = trainer.steps()
    next(steps)
    assert reached.wait(10)
    start = time.perf_counter()
    steps.close()
    assert time.perf_counter() - start < 5
    assert rollout_threads() == []
    assert trainer.engine.unfinished == 0


def test_an_interrupt_while_training_waits_ends_what_it_waits_for(demo_tokenizer, tmp_path):
    async def waits(completion, trainer_state, **_):
        if trainer_state.global_step == 1:
            await asyncio.sleep(60)
        return float(len(completion))

    steps = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=3, rewards=waits).steps()
    next(steps)
    start = time.perf_counter()
    ctrl_c = threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    ctrl_c.start()
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert time.perf_counter() - start < 10
    assert rollout_threads() == []


def test_a_function_that_does_not_return_is_left_behind(demo_tokenizer, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("cohort.train.source.ABANDON_SECONDS", 0.05)
    release, reached = threading.Event(), threading.Event()

    def hangs(completions, trainer_state, **_):
        if trainer_state.global_step == 1:
            reached.set()
            release.wait(30)
        return digits_reward(completions)

    steps = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=4, rewards=hangs).steps()
    next(steps)
    assert reached.wait(10)
    with caplog.at_level(logging.WARNING, "cohort.train"):
        steps.close()
    assert "the rollout of step 2 goes on: its sampling or a function in it does not end" in caplog.text
    release.set()
    for thread in rollout_threads():
        thread.join(10)


# Evaluation -----------------------------------------------------------------------------------------------------------


def test_evaluations_are_of_the_present_weights(demo_tokenizer, tmp_path):
    """Those of the run, and one that is asked for between two steps."""
    settings = {"eval_rows": ROWS[:4], "eval_steps": 2, "temperature_eval": 0.5}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lag=2, max_steps=4, **settings)
    for metrics in trainer.steps():
        asked = trainer.evaluate()
        model = tiny_llama(vocab_size=len(demo_tokenizer))
        model.load_state_dict(trainer.policy.model.state_dict())
        plain = make_trainer(demo_tokenizer, None, model=model, **settings).evaluate()
        assert asked == plain
        if metrics["step"] % 2 == 0:
            assert {key: metrics[key] for key in plain} == plain
    straight = make_trainer(demo_tokenizer, tmp_path / "plain", lag=2, max_steps=4, **settings)
    straight.train()
    assert same_parameters(trainer, straight)  # evaluations do not affect the training


def test_an_evaluation_changes_no_draw_of_what_is_pending(demo_tokenizer, tmp_path):
    """A rollout that begins to be drawn late has the weights of when it was begun."""

    def trained(**settings):
        trainer = make_trainer(demo_tokenizer, tmp_path / f"run-{len(settings)}", lag=1, max_steps=3, **settings)
        generate = trainer.engine.generate

        def late(*arguments):
            if threading.current_thread().name.startswith("rollout-"):
                time.sleep(0.1)
            return generate(*arguments)

        trainer.engine.generate = late
        trainer.train()
        return trainer

    assert same_parameters(trained(), trained(eval_rows=ROWS[:2], eval_steps=1))


def test_early_stopping_ends_what_is_pending(demo_tokenizer, tmp_path):
    settings = {"eval_rows": ROWS[:4], "eval_steps": 1, "metric_for_best_model": "eval/length/mean"}
    settings |= {"early_stopping_patience": 1, "greater_is_better": False, "learning_rate": 1e-9}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=9, **settings)
    trainer.train()
    assert trainer.summary["stopped_early"]
    assert trainer.summary["steps"] < 4


def test_seconds_of_what_was_hidden(demo_tokenizer, tmp_path):
    async def slow(completion, **_):
        await asyncio.sleep(0.3)
        return digits_reward([completion])[0]

    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lag=1, max_steps=2, rewards=slow, max_concurrent=64)
    for metrics in trainer.steps():
        sampled = metrics["seconds/generate"] + metrics["seconds/reward"]
        assert sampled > 0.3
        assert metrics["seconds/rollout_hidden"] == pytest.approx(
            max(0.0, sampled - metrics["seconds/rollout_wait"]), abs=1e-6
        )
        phases = ("rollout_wait", "logps", "update", "measure")
        assert metrics["seconds/step"] == pytest.approx(sum(metrics[f"seconds/{phase}"] for phase in phases))
        time.sleep(0.4)  # as a step that takes longer
    assert metrics["seconds/rollout_wait"] < 0.2 < metrics["seconds/rollout_hidden"]
