"""Rewards in a run: where functions run, functions that fail, and values that they log."""

import logging
import shutil

import pytest

from cohort.errors import RewardError
from tests.train.digits import digits, digits_async, digits_of_group
from tests.train.harness import digits_reward, make_trainer, metrics_of, rows_of, same_parameters


def test_a_run_does_not_depend_on_where_its_rewards_run(demo_tokenizer, tmp_path):
    runs = []
    for name, function, settings, where in (
        ("here", digits_reward, {}, "rewards: digits_reward x 1 (per batch"),
        ("async", digits_async, {"cache": True}, "rewards: digits_async x 1 (per sample, async"),
        ("worker", digits_of_group, {"workers": 1}, "rewards: digits_of_group x 1 (per group, in 1 worker process)"),
    ):
        trainer = make_trainer(demo_tokenizer, tmp_path / name, rewards=function, max_steps=1, **settings)
        assert where in trainer.describe()
        trainer.train()
        trainer.rewards.close()
        runs.append((trainer, [(row["reward"], row["token_ids"]) for row in rows_of(tmp_path / name)]))
    for trainer, rows in runs[1:]:
        assert rows == runs[0][1]
        assert same_parameters(trainer, runs[0][0])


def test_scoring_begins_while_other_completions_are_sampled(demo_tokenizer, tmp_path, monkeypatch):
    trainer = make_trainer(
        demo_tokenizer,
        tmp_path / "run",
        rewards=[digits_async, digits_reward],
        reward={"weights": [1.0, 0.5]},
        max_steps=1,
    )
    assert "rewards: digits_async x 1 (per sample, async); digits_reward x 0.5 (per batch" in trainer.describe()
    begun = []
    real = trainer.engine.generate

    def generate(*arguments):
        groups = real(*arguments)
        scoring = arguments[4].on_completion.__self__
        begun.extend(unit for unit in scoring._tasks.values() if unit.future is not None)
        return groups

    monkeypatch.setattr(trainer.engine, "generate", generate)
    trainer.train()
    assert len(begun) == 16  # all completions, before sampling ends
    assert {unit.function.name for unit in begun} == {"digits_async"}


def test_a_completion_that_a_function_failed_on_is_left_out_of_the_update(demo_tokenizer, tmp_path, caplog):
    def picky(completion, completion_ids, log_extra, log_metric):
        log_extra("letters", len(completion))
        log_metric("letters", len(completion))
        if completion_ids[0] % 3 == 1:
            raise ValueError("cannot read this one")
        return digits(completion)

    with caplog.at_level(logging.WARNING, "cohort.rewards"):
        make_trainer(demo_tokenizer, tmp_path / "run", rewards=picky, max_steps=1).train()
    rows, (metrics,) = rows_of(tmp_path / "run"), metrics_of(tmp_path / "run")
    failed = [row for row in rows if row["token_ids"][0] % 3 == 1]
    assert 0 < len(failed) < len(rows)
    assert all(row["reward"] is None and not row["advantage"] for row in failed)
    assert all("ValueError: cannot read this one" in row["reward_error"] for row in failed)
    assert all(row["reward_error"] is None for row in rows if row not in failed)
    for group in {row["group"] for row in rows}:  # advantages compare the scored completions only
        scored = [row for row in rows if row["group"] == group and row not in failed]
        mean = sum(row["reward"] for row in scored) / len(scored) if scored else 0
        assert all(row["advantage"] * (row["reward"] - mean) >= 0 for row in scored)
        assert sum(row["advantage"] for row in scored) == pytest.approx(0, abs=1e-5)  # float32
    assert metrics["rewards/picky/failed"] == metrics["reward/unscored"] == len(failed)
    letters = [row["extra/letters"] for row in rows if row not in failed]
    assert metrics["custom/letters"] == pytest.approx(sum(letters) / len(letters))
    assert "picky failed on" in caplog.text


@pytest.mark.slow
def test_a_run_with_a_hostile_function_is_one_without_the_scores_that_it_does_not_give(demo_tokenizer, tmp_path):
    def kind_of(ids):
        return (sum(ids) + 7) % 12

    def score(text):  # of this test: a worker need not import the module
        return sum(character.isdigit() for character in text) / (len(text) + 1)

    def hostile(completion, completion_ids):
        import os
        import signal
        import sys
        import time

        match kind_of(completion_ids):
            case 0:
                os._exit(3)
            case 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case 2:
                raise type("Stop", (BaseException,), {})
            case 3:
                return float("nan")
            case 4:
                sys.exit()
            case 5:
                time.sleep(60)
            case 6:
                os.fork()
        print("x" * 10_000)
        return score(completion)

    def gentle(completion, completion_ids):
        return score(completion) if kind_of(completion_ids) > 5 else ValueError("unscored")

    runs = []
    for name, function, settings in (("a", hostile, {"workers": 2, "timeout": 1.0}), ("b", gentle, {})):
        trainer = make_trainer(demo_tokenizer, tmp_path / name, rewards=function, max_steps=1, **settings)
        trainer.train()
        runs.append(
            (trainer, [(row["reward"], row["advantage"], row["token_ids"]) for row in rows_of(tmp_path / name)])
        )
    assert runs[0][1] == runs[1][1]
    assert same_parameters(runs[0][0], runs[1][0])
    found = {kind_of(ids) for _, _, ids in runs[0][1]}
    assert len(found & set(range(6))) >= 3
    assert found & set(range(6, 12))


def test_functions_receive_the_progress_of_the_run(demo_tokenizer, tmp_path):
    seen = []

    def of_the_run(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch))
        return [digits(text) for text in completions]

    make_trainer(demo_tokenizer, tmp_path / "run", rewards=of_the_run, max_steps=2).train()
    assert seen[-2:] == [(0, 2, 0.0), (1, 2, 0.2)]


def test_a_broken_function_is_found_before_the_model_is_loaded(demo_tokenizer, demo_model_path, tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(f"{demo_model_path}/config.json", tmp_path / "model")  # without weights

    async def needs_gold(completion, gold):
        return 1.0

    with pytest.raises(RewardError, match="needs_gold needs the argument 'gold'; it can have: prompt, answer"):
        make_trainer(demo_tokenizer, tmp_path / "run", model=str(tmp_path / "model"), rewards=needs_gold)


def test_dynamic_sampling_keeps_the_logged_values_of_every_round(demo_tokenizer, tmp_path):
    def constant_at_first(completions, prompts, log_extra, log_metric, **_):
        log_extra("index", list(range(len(completions))))
        log_metric("calls", 1)
        return [float(i % 2) if prompts[i][0] in "12" else 0.0 for i in range(len(completions))]

    trainer = make_trainer(
        demo_tokenizer,
        tmp_path / "run",
        rewards=constant_at_first,
        max_steps=1,
        objective={"group_filter": {"rule": "dynamic_sampling", "max_rounds": 3}},
    )
    (metrics,) = trainer.steps()
    rows = rows_of(tmp_path / "run")
    assert metrics["groups/rounds"] > 1
    assert len(rows) == metrics["groups/sampled"] * 4
    assert metrics["custom/calls"] == 1
    assert [row["extra/index"] for row in rows[:16]] == list(range(16))
    assert rows[16]["extra/index"] == 0
