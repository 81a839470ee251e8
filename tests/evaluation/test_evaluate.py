"""Evaluation in a run: fixed random numbers, separate sampling settings, several sets, no effect on training."""

import dataclasses
import json
import math
import random

import numpy as np
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset

from cohort.errors import ConfigError, DataError
from cohort.evaluation.evaluate import WINDOW, Success, totals
from cohort.report.progress import evaluation_line
from cohort.rewards.runner import Scores
from cohort.types import FinishReason
from tests.conftest import each
from tests.train.harness import (
    ROWS,
    digits_reward,
    make_trainer,
    metrics_of,
    parameters,
    same_parameters,
    untimed_metrics_of,
)

MEASURES = ("reward", "rewards/digits_reward", "length", "cut_share", "pass@1")
COUNTS = ("unscored", "errors")


def untimed(table):
    return table.select([name for name in table.column_names if not name.startswith("seconds/")])


def of_training(lines):
    return [{key: value for key, value in line.items() if not key.startswith("eval/")} for line in lines]


def logs_answers(completion, answer, log_extra, log_metric):
    """Correct if the first digit is that of the answer. The logged answer is the first digit."""
    found = next((character for character in completion if character.isdigit()), None)
    log_extra("answer", found)
    log_metric("has_answer", float(found is not None))
    return float(found is not None and answer.startswith(found))


def test_the_metrics_are_those_of_the_completions(demo_tokenizer, tmp_path):
    settings = {"eval_rows": ROWS[:6], "num_generations_eval": 3, "success_threshold": 0.1}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    before = parameters(trainer)
    found = trainer.evaluations()[""]
    assert untimed(found.table).equals(untimed(trainer.evaluations()[""].table))
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
    assert found.table.column("row").to_pylist() == [row for row in range(6) for _ in range(3)]
    rewards = np.array(digits_reward(found.table.column("completion").to_pylist())).reshape(6, 3)
    assert found.table.column("reward").to_pylist() == pytest.approx(rewards.ravel().tolist())
    assert found.values["reward"] == pytest.approx(rewards.mean(axis=1))
    assert found.reward.mean == pytest.approx(rewards.mean())
    assert found.reward.low < found.reward.mean < found.reward.high
    lengths = np.array([len(ids) for ids in found.table.column("token_ids").to_pylist()]).reshape(6, 3)
    assert found.values["length"] == pytest.approx(lengths.mean(axis=1))
    cut = np.array([reason == "length" for reason in found.table.column("finish_reason").to_pylist()])
    assert found.values["cut_share"] == pytest.approx(cut.reshape(6, 3).mean(axis=1))
    assert 0 < (rewards >= 0.1).mean() < 1
    assert found.estimates["pass@1"].mean == pytest.approx((rewards >= 0.1).mean())
    metrics = found.metrics()
    assert metrics["eval/reward/mean"] == found.reward.mean
    expected = {f"eval/{n}/{s}" for n in MEASURES for s in ("mean", "low", "high")} | {f"eval/{n}" for n in COUNTS}
    assert set(metrics) == set(trainer.evaluate(ROWS[:2])) == expected | {f"eval/{name}" for name in found.totals}
    assert found.totals["reward/std"] == pytest.approx(rewards.std())
    assert found.totals["reward/dead_share"] == (np.ptp(rewards, axis=1) == 0).mean()


def test_numbers_of_all_completions_together():
    rewards = torch.tensor([1.0, 3.0, math.nan, 2.0, 2.0, 2.0, math.nan, 5.0, math.nan], dtype=torch.float64)
    other = torch.full((9, 1), math.nan, dtype=torch.float64)
    scores = Scores(rewards, torch.cat([rewards[:, None], other], dim=1), ("one", "never"))
    reasons = [FinishReason.EOS, FinishReason.LENGTH, FinishReason.ERROR, *(FinishReason.STOP,) * 4, FinishReason.EOS]
    completions = [*zip([4, 8, 0, 2, 3, 5, 6, 1], reasons, strict=True), (8, FinishReason.LENGTH)]
    found = totals(scores, completions, 3)
    assert found["reward/std"] == found["rewards/one/std"] == pytest.approx(np.std([1, 3, 2, 2, 2, 5]))
    assert (found["reward/scored"], found["rewards/never/scored"], found["rewards/never/std"]) == (6, 0, None)
    assert found["reward/dead_share"] == pytest.approx(2 / 3)  # equal rewards, and a single one
    assert (found["length/min"], found["length/max"]) == (1, 8)
    assert [found[f"length/ended_{part}"] for part in ("share", "mean", "min", "max")] == [0.25, 2.5, 1, 4]
    none_ended = totals(scores, [(8, FinishReason.LENGTH)] * 9, 3)
    assert [none_ended[f"length/ended_{part}"] for part in ("share", "mean", "min", "max")] == [0, None, None, None]


def test_the_batch_size_does_not_change_the_completions(demo_tokenizer, tmp_path, monkeypatch):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS, num_generations_eval=2)
    at_once = trainer.evaluations()[""]
    calls, real = [], trainer.engine.generate
    monkeypatch.setattr(trainer.engine, "generate", lambda prompts, *a: calls.append(len(prompts)) or real(prompts, *a))
    trainer.evaluator = dataclasses.replace(trainer.evaluator, batch_size=3)
    parts = trainer.evaluations()[""]
    assert calls == [WINDOW * 3 // 2] * 3 + [2]
    for column in ("group", "row", "prompt", "token_ids", "completion", "reward"):
        assert parts.table.column(column).to_pylist() == at_once.table.column(column).to_pylist()
    assert parts.reward == at_once.reward


def test_separate_sampling_settings(demo_tokenizer, tmp_path):
    settings = {"top_k": 7, "temperature_eval": 0, "max_completion_length_eval": 4, "num_generations_eval": 2}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:5], **settings)
    sampling = trainer.evaluator.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_completion_length) == (0, 7, 4)
    table = trainer.evaluations()[""].table
    ids = table.column("token_ids").to_pylist()
    assert ids[::2] == ids[1::2]  # greedy
    assert max(map(len, ids)) <= 4
    changes = {"top_k_eval": 0, "top_p_eval": 0.5, "min_p_eval": 0.1}
    sampling = make_trainer(demo_tokenizer, tmp_path / "b", eval_rows=ROWS[:5], top_k=7, **changes).evaluator.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature) == (0, 0.5, 0.1, 1.0)


def test_several_sets_by_name(demo_tokenizer, tmp_path, capsys):
    sets = {"easy": ROWS[:3], "hard": Dataset.from_list(ROWS[3:7])}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=sets, max_steps=1, progress=True)
    trainer.train()
    steps = metrics_of(tmp_path / "run")
    assert [line["step"] for line in steps] == [0, 1]
    for line in steps:
        assert {f"eval/{name}/{measure}/mean" for name in sets for measure in MEASURES} <= set(line)
        assert "eval/reward/mean" not in line
    printed = capsys.readouterr().out
    assert "evaluation before training: easy: reward 0." in printed
    assert "; hard: reward 0." in printed
    assert "evaluation after step 1: easy: reward" in printed
    files = {path.name for path in (tmp_path / "run" / "evaluations").iterdir()}
    assert files == {f"step-{step}-{name}.parquet" for step in range(2) for name in sets}
    assert "eval/hard/reward/mean" in json.loads((tmp_path / "run" / "summary.json").read_text())["eval_after"]


def test_completions_are_stored_with_the_columns_of_rollouts(demo_tokenizer, tmp_path):
    settings = {"rewards": logs_answers, "eval_rows": ROWS[:4], "max_steps": 1}
    make_trainer(demo_tokenizer, tmp_path / "run", num_generations_eval=2, **settings).train()
    kept = pyarrow.parquet.read_table(tmp_path / "run" / "evaluations" / "step-1.parquet")
    rollout = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step-1.parquet")
    assert "minibatch" in rollout.column_names
    of_updates = set(rollout.column_names[rollout.column_names.index("minibatch") :])
    times = {name for name in rollout.column_names if name.startswith("seconds/")}
    assert set(kept.column_names) == set(rollout.column_names) - of_updates - times
    assert {"rewards/logs_answers", "extra/answer"} <= set(kept.column_names)
    assert all(kept.schema.field(name).type == rollout.schema.field(name).type for name in kept.column_names)
    assert kept.column("weights_version").to_pylist() == [1] * 8
    make_trainer(demo_tokenizer, tmp_path / "silent", log_completions=False, **settings).train()
    assert not (tmp_path / "silent" / "evaluations").exists()


def test_majority_votes_and_what_functions_log(demo_tokenizer, tmp_path):
    settings = {"num_generations_eval": 4, "maj_at_k": [1, 3], "pass_at_k": [1, 4]}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rewards=logs_answers, eval_rows=ROWS[:8], **settings)
    found = trainer.evaluations()[""]
    assert found.values["maj@1"] == pytest.approx(found.values["pass@1"], abs=1e-12)
    assert found.values["pass@1"] == pytest.approx(found.values["reward"], abs=1e-12)
    answers = np.array(found.table.column("extra/answer").to_pylist()).reshape(8, 4)
    right = np.array(found.table.column("reward").to_pylist()).reshape(8, 4)
    assert found.values["pass@4"].tolist() == right.max(axis=1).tolist()
    for prompt in range(8):  # if all four answers are equal, the vote is known
        if len(set(answers[prompt])) == 1:
            assert found.values["maj@3"][prompt] == right[prompt, 0]
    assert found.counts["custom/has_answer"] == np.mean(answers.ravel() != None)  # noqa: E711


def test_majority_votes_use_the_answers_of_the_function_that_decides(demo_tokenizer, caplog):
    def other(prompt, completion, log_extra):
        if prompt == ROWS[2]["prompt"]:  # an answer for one prompt only
            log_extra("answer", "A")
        return 1.0

    def judge(completion, log_extra):
        log_extra("answer", "B")
        return 1.0

    settings = {"eval_rows": ROWS[:6], "num_generations_eval": 2, "maj_at_k": [2], "max_batch_size": 1}
    trainer = make_trainer(demo_tokenizer, None, rewards=[other, judge], success="judge", **settings)
    assert trainer.evaluations()[""].values["maj@2"].tolist() == [1.0] * 6
    assert not caplog.records


def test_votes_without_answers(demo_tokenizer, caplog):
    def mute(completion):
        return 1.0

    def silent(completion, log_extra):
        return 1.0

    settings = {"eval_rows": ROWS[:3], "num_generations_eval": 2, "maj_at_k": [2]}
    with pytest.raises(ConfigError, match="reward function mute logs, but it takes no log_extra"):
        make_trainer(demo_tokenizer, None, rewards=[mute, logs_answers], success="mute", **settings)
    trainer = make_trainer(demo_tokenizer, None, rewards=[silent, logs_answers], success="silent", **settings)
    assert np.isnan(trainer.evaluate()["eval/maj@2/mean"])  # answers of another function do not count
    assert caplog.messages == ["reward function silent logged no column 'answer': maj@k has no value"]


def test_what_is_correct(demo_tokenizer):
    (judged,) = Success("math", 1.0).of_rewards(np.array([[1.0, 0.5, np.nan, 2.0]]))
    assert judged.tolist() == pytest.approx([1, 0, np.nan, 1], nan_ok=True)
    settings = {"eval_rows": ROWS[:6], "success": "logs_answers", "num_generations_eval": 2}
    trainer = make_trainer(demo_tokenizer, None, rewards=[digits_reward, logs_answers], **settings)
    found = trainer.evaluations()[""]
    assert found.values["pass@1"] == pytest.approx(found.values["rewards/logs_answers"])
    assert str(found.success) == "logs_answers >= 1"
    assert "\n  correct: logs_answers >= 1" in trainer.describe()


def test_what_is_correct_is_not_guessed_between_several_functions(demo_tokenizer):
    rewards = [digits_reward, logs_answers]
    trainer = make_trainer(demo_tokenizer, None, rewards=rewards, eval_rows=ROWS[:3])
    assert "no pass@k: set eval.success" in trainer.describe()
    found = trainer.evaluations()[""]
    assert found.success is None
    assert set(found.values) == {"reward", "rewards/digits_reward", "rewards/logs_answers", "length", "cut_share"}
    for settings in ({"pass_at_k": [1]}, {"maj_at_k": [1]}):
        (name,) = settings
        with pytest.raises(ConfigError, match=rf"eval\.{name} is set, but not which of .*digits_reward, logs_answers"):
            make_trainer(demo_tokenizer, None, rewards=rewards, eval_rows=ROWS[:3], **settings)
    best = {"metric_for_best_model": "eval/pass@1/mean"}
    with pytest.raises(ConfigError, match="which no evaluation logs"):
        make_trainer(demo_tokenizer, None, rewards=rewards, eval_rows=ROWS[:3], **best)


def test_evaluations_do_not_change_the_training(demo_tokenizer, tmp_path):
    """The reward draws from the global generators, which evaluations between the steps must restore."""

    def noisy(completions, **_):
        noise = random.random() + np.random.random() + float(torch.rand(()))
        return [value + noise * (index % 3) for index, value in enumerate(digits_reward(completions))]

    settings = {"rewards": noisy, "max_steps": 3, "beta": 0.1, "save_steps": 0}
    plain = make_trainer(demo_tokenizer, tmp_path / "plain", **settings)
    plain.train()
    settings |= {"eval_rows": ROWS[:5], "eval_steps": 1, "num_generations_eval": 3, "temperature_eval": 0.7}
    settings |= {"metric_for_best_model": "eval/reward/mean"}
    evaluated = make_trainer(demo_tokenizer, tmp_path / "evaluated", **settings)
    evaluated.train()
    before, *lines = untimed_metrics_of(tmp_path / "evaluated")
    assert of_training(lines) == untimed_metrics_of(tmp_path / "plain")
    assert all("eval/reward/mean" in line for line in (before, *lines))
    assert same_parameters(plain, evaluated)


def test_rewards_that_draw_random_numbers_are_the_same_whichever_other_sets_there_are(demo_tokenizer):
    def drawn(completions, **_):
        return [random.random() for _ in completions]

    trainer = make_trainer(demo_tokenizer, None, rewards=drawn)
    state = random.getstate()
    both, alone = trainer.evaluations({"a": ROWS[4:8], "b": ROWS[:4]}), trainer.evaluations({"b": ROWS[:4]})
    assert untimed(both["b"].table).equals(untimed(alone["b"].table))
    assert both["b"].estimates == alone["b"].estimates
    assert random.getstate() == state


def test_eval_on_start_and_evaluating(demo_tokenizer, tmp_path):
    seen = []

    def watching(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.evaluating))
        return digits_reward(completions)

    settings = {"rewards": watching, "eval_rows": ROWS[:3], "max_steps": 2, "eval_steps": 1, "eval_on_start": False}
    summary = make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    dry_run, *evaluated = [state for state in seen if state[2]]
    assert dry_run[0] == 0
    assert evaluated == [(1, 2, True), (2, 2, True)]
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2]
    assert "eval_before" not in summary
    assert "eval_after" in summary


def test_text_that_is_not_utf8_is_escaped(demo_tokenizer):
    def odd(completions, log_extra, **_):
        log_extra("answer", ["\ud800x"] * len(completions))
        return [1.0] * len(completions)

    table = make_trainer(demo_tokenizer, None, rewards=odd, eval_rows=ROWS[:2]).evaluations()[""].table
    assert table.column("extra/answer").to_pylist() == ["\\ud800x"] * 2


@each(
    ("sets", "settings", "error", "message"),
    [
        ({"a/b": ROWS[:2]}, {}, DataError, "expected letters, digits, '-' and '_'"),
        ({}, {}, DataError, "has no sets"),
        ({"a": []}, {}, DataError, "the evaluation data 'a' has no rows"),
        (
            ROWS[:3],
            {"max_completion_length_eval": 500},
            DataError,
            r"eval \(500\) leaves no room .* set eval.max_completion_length_eval to at most 125",
        ),
        (ROWS[:3], {"success": "math"}, ConfigError, "'math', but the reward functions are digits_reward"),
    ],
)
def test_invalid_sets_and_settings(demo_tokenizer, sets, settings, error, message):
    with pytest.raises(error, match=message):
        make_trainer(demo_tokenizer, None, eval_rows=sets, **settings)


def test_evaluating_without_data(demo_tokenizer):
    with pytest.raises(DataError, match="pass eval_dataset"):
        make_trainer(demo_tokenizer, None).evaluate()


def test_the_line_of_an_evaluation():
    metrics = {}
    for name, mean in (("reward", 0.5), ("rewards/math", 0.25), ("pass@1", 0.5), ("length", 9.0), ("cut_share", 0.1)):
        metrics |= {f"eval/{name}/mean": mean, f"eval/{name}/low": mean - 0.1, f"eval/{name}/high": 0.9}
    metrics["eval/rewards/math/low"] = None  # no interval of equal values
    line = "reward 0.500 (0.400 to 0.900), math 0.250, pass@1 0.500 (0.400 to 0.900)"
    assert evaluation_line(metrics | {"eval/errors": 0}, "after step 3") == f"evaluation after step 3: {line}"
    assert "pass@1 by math >= 1 0.500" in evaluation_line(metrics, "after step 3", "math >= 1")


def test_the_description_includes_the_evaluation(demo_tokenizer, tmp_path):
    settings = {"temperature_eval": 0.5, "num_generations_eval": 2, "max_completion_length_eval": 7}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows={"a": ROWS[:3], "b": ROWS[:5]}, **settings)
    assert "\nevaluation: a 3, b 5 prompts x 2; temperature 0.5, top-k off" in trainer.describe()
    assert "0 to 7 tokens" in trainer.describe()
    assert "at temperature 0" not in trainer.describe()
    greedy = make_trainer(demo_tokenizer, None, eval_rows=ROWS[:3], **settings | {"temperature_eval": 0})
    assert "; at temperature 0 a prompt's 2 completions are the same one\n" in greedy.describe()
    assert "evaluation" not in make_trainer(demo_tokenizer, tmp_path / "plain").describe()
