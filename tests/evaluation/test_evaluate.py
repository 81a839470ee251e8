"""Evaluation in a run: fixed draws, a sampling of its own, several sets, and a training that does not notice it."""

import dataclasses
import json
import random

import numpy as np
import pyarrow.parquet
import pytest
import torch
from datasets import Dataset

from cohort import GRPOConfig
from cohort.errors import ConfigError, DataError, RunFolderError
from cohort.evaluation.evaluate import WINDOW, correct
from cohort.report.console import evaluation_line, split_metric
from tests.train.harness import ROWS, digits_reward, make_trainer, parameters

MEASURES = ("reward", "rewards/digits_reward", "length", "cut_share", "pass@1")
COUNTS = ("unscored", "errors")


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of_training(metrics):
    timed = ("seconds", "time", "tokens_per_second", "eval/")
    return {key: value for key, value in metrics.items() if not key.startswith(timed)}


def logs_answers(completion, answer, log_extra, log_metric):
    """Right when the first digit is the answer's; the first digit is what is voted for."""
    found = next((character for character in completion if character.isdigit()), None)
    log_extra("answer", found)
    log_metric("has_answer", float(found is not None))
    return float(found is not None and answer.startswith(found))


def test_draws_are_fixed_and_leave_the_policy_alone(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:6], num_generations_eval=3)
    before = parameters(trainer)
    first, second = trainer.evaluations()[""], trainer.evaluations()[""]
    assert first.table.equals(second.table)
    assert first.table.column("row").to_pylist() == [row for row in range(6) for _ in range(3)]
    assert all(torch.equal(value, before[name]) for name, value in parameters(trainer).items())
    metrics = trainer.evaluate(ROWS[:2])
    assert set(metrics) == {f"eval/{n}/{s}" for n in MEASURES for s in ("mean", "low", "high")} | {
        f"eval/{n}" for n in COUNTS
    }


def test_the_numbers_are_those_of_the_completions(demo_tokenizer, tmp_path):
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:6], num_generations_eval=3, pass_at_k=[1, 2]
    )
    found = trainer.evaluations()[""]
    rewards = np.array(digits_reward(found.table.column("completion").to_pylist())).reshape(6, 3)
    assert found.table.column("reward").to_pylist() == pytest.approx(rewards.ravel().tolist())
    assert found.values["reward"] == pytest.approx(rewards.mean(axis=1))
    assert found.reward.mean == pytest.approx(rewards.mean())
    assert found.reward.low < found.reward.mean < found.reward.high
    lengths = np.array([len(ids) for ids in found.table.column("token_ids").to_pylist()]).reshape(6, 3)
    assert found.values["length"] == pytest.approx(lengths.mean(axis=1))
    cut = np.array([reason == "length" for reason in found.table.column("finish_reason").to_pylist()])
    assert found.values["cut_share"] == pytest.approx(cut.reshape(6, 3).mean(axis=1))
    assert found.metrics()["eval/reward/mean"] == found.reward.mean


def test_batches_of_prompts_change_nothing(demo_tokenizer, tmp_path, monkeypatch):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS, num_generations_eval=2)
    whole = trainer.evaluations()[""]
    calls = []
    real = trainer.engine.generate
    monkeypatch.setattr(
        trainer.engine, "generate", lambda prompts, *a, **k: calls.append(len(prompts)) or real(prompts, *a, **k)
    )
    trainer.evaluator = dataclasses.replace(trainer.evaluator, batch_size=3)
    parts = trainer.evaluations()[""]
    assert calls == [WINDOW * 3 // 2] * 3 + [2]
    for column in ("group", "row", "prompt", "token_ids", "completion", "reward"):
        assert parts.table.column(column).to_pylist() == whole.table.column(column).to_pylist()
    assert parts.reward == whole.reward


def test_a_sampling_of_its_own(demo_tokenizer, tmp_path):
    settings = {"top_k": 7, "temperature_eval": 0, "max_completion_length_eval": 4, "num_generations_eval": 2}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:5], **settings)
    sampling = trainer.evaluator.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_completion_length) == (0, 7, 4)
    table = trainer.evaluations()[""].table
    ids = table.column("token_ids").to_pylist()
    assert ids[::2] == ids[1::2]  # greedy: twice the same
    assert max(map(len, ids)) <= 4
    own = {"top_k_eval": 0, "top_p_eval": 0.5, "min_p_eval": 0.1}
    sampling = make_trainer(demo_tokenizer, tmp_path / "b", eval_rows=ROWS[:5], top_k=7, **own).evaluator.sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature) == (0, 0.5, 0.1, 1.0)


def test_several_sets_by_name(demo_tokenizer, tmp_path, capsys):
    sets = {"easy": ROWS[:3], "hard": Dataset.from_list(ROWS[3:7])}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=sets, max_steps=2, eval_steps=1, progress=True)
    trainer.train()
    steps = lines(tmp_path / "run")
    assert [line["step"] for line in steps] == [0, 1, 2]
    for line in steps:
        own = {key for key in line if key.startswith("eval/")}
        assert {f"eval/{name}/{measure}/mean" for name in sets for measure in MEASURES} <= own
        assert "eval/reward/mean" not in own
    said = capsys.readouterr().out
    assert "evaluation before training: easy: reward 0." in said
    assert "; hard: reward 0." in said
    assert "evaluation after step 1: easy: reward" in said
    files = {path.name for path in (tmp_path / "run" / "evaluations").iterdir()}
    assert files == {f"step-{step}-{name}.parquet" for step in range(3) for name in sets}
    assert "eval/hard/reward/mean" in json.loads((tmp_path / "run" / "summary.json").read_text())["eval_after"]


def test_a_set_is_the_same_whatever_else_is_evaluated(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows={"a": ROWS[:3], "b": ROWS[3:7]})
    both, alone = trainer.evaluations(), trainer.evaluations({"b": ROWS[3:7]})
    assert both["b"].table.equals(alone["b"].table)
    assert both["b"].estimates == alone["b"].estimates


def test_sets_from_the_settings(demo_tokenizer, tmp_path):
    for name in ("a", "b"):
        rows = ROWS[:4] if name == "a" else ROWS[4:10]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {name: tmp_path / f"{name}.jsonl" for name in ("a", "b")}
    config = GRPOConfig(data={"eval": sets, "eval_rows": 5})
    assert config.data.eval == {name: str(path) for name, path in sets.items()}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", data={"eval": sets, "eval_rows": 5})
    assert {name: len(prompts) for name, prompts in trainer.evaluator.sets.items()} == {"a": 4, "b": 5}


def test_completions_are_kept_in_the_columns_of_rollouts(demo_tokenizer, tmp_path):
    trainer = make_trainer(
        demo_tokenizer, tmp_path / "run", rewards=logs_answers, eval_rows=ROWS[:4], max_steps=1, num_generations_eval=2
    )
    trainer.train()
    kept = pyarrow.parquet.read_table(tmp_path / "run" / "evaluations" / "step-1.parquet")
    rollout = pyarrow.parquet.read_table(tmp_path / "run" / "rollouts" / "step-1.parquet")
    assert set(kept.column_names) == set(rollout.column_names) - {"advantage"}
    assert {"rewards/logs_answers", "extra/answer"} <= set(kept.column_names)
    assert all(kept.schema.field(name).type == rollout.schema.field(name).type for name in kept.column_names)
    assert kept.column("weights_version").to_pylist() == [1] * 8
    silent = make_trainer(demo_tokenizer, tmp_path / "silent", eval_rows=ROWS[:4], max_steps=1, log_completions=False)
    silent.train()
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
    for prompt in range(8):  # where all four give one answer, or none, the vote is known
        if len(set(answers[prompt])) == 1:
            assert found.values["maj@3"][prompt] == right[prompt, 0]
    assert found.counts["custom/has_answer"] == np.mean(answers.ravel() != None)  # noqa: E711


def test_majority_votes_are_of_the_answers_of_the_judge(demo_tokenizer, tmp_path, caplog):
    """The first function logs an answer for one prompt only: its windows are not those of the rest."""

    def other(prompt, completion, log_extra):
        if prompt == ROWS[2]["prompt"]:
            log_extra("answer", "A")
        return 1.0

    def judge(completion, log_extra):
        log_extra("answer", "B")
        return 1.0

    settings = {"eval_rows": ROWS[:6], "num_generations_eval": 2, "maj_at_k": [2], "max_batch_size": 1}
    trainer = make_trainer(demo_tokenizer, None, rewards=[other, judge], pass_function="judge", **settings)
    assert trainer.evaluations()[""].values["maj@2"].tolist() == [1.0] * 6
    assert not caplog.records


def test_votes_without_answers(demo_tokenizer, caplog):
    def mute(completion):
        return 1.0

    def silent(completion, log_extra):
        return 1.0

    settings = {"eval_rows": ROWS[:3], "num_generations_eval": 2, "maj_at_k": [2]}
    with pytest.raises(ConfigError, match="reward function mute logs, but it takes no log_extra"):
        make_trainer(demo_tokenizer, None, rewards=[mute, logs_answers], **settings)
    trainer = make_trainer(demo_tokenizer, None, rewards=[silent, logs_answers], **settings)
    assert np.isnan(trainer.evaluate()["eval/maj@2/mean"])  # the answers of logs_answers are not silent's
    assert caplog.messages == ["reward function silent logged no column 'answer': maj@k has no value"]


def test_what_is_correct(demo_tokenizer, tmp_path):
    (judged,) = correct(np.array([[1.0, 0.5, np.nan, 2.0]]), 1.0)
    assert judged.tolist() == pytest.approx([1, 0, np.nan, 1], nan_ok=True)

    def other(completions, **_):
        return [float(len(text) % 2) for text in completions]

    settings = {"eval_rows": ROWS[:6], "pass_function": "other", "num_generations_eval": 2}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rewards=[digits_reward, other], **settings)
    found = trainer.evaluations()[""]
    assert found.values["pass@1"] == pytest.approx(found.values["rewards/other"])
    lower = make_trainer(demo_tokenizer, tmp_path / "low", eval_rows=ROWS[:6], pass_threshold=0.1).evaluations()[""]
    rewards = np.array(lower.table.column("reward").to_pylist())
    assert 0 < (rewards >= 0.1).mean() < 1
    assert lower.estimates["pass@1"].mean == pytest.approx((rewards >= 0.1).mean())


def test_training_does_not_notice_evaluations(demo_tokenizer, tmp_path):
    """The reward draws from the global generators, as does dropout; evaluations between the steps change no bit."""

    def noisy(completions, **_):
        noise = random.random() + np.random.random() + float(torch.rand(()))
        return [value + noise * (index % 3) for index, value in enumerate(digits_reward(completions))]

    settings = {"rewards": noisy, "max_steps": 4, "beta": 0.1, "save_steps": 0}
    plain = make_trainer(demo_tokenizer, tmp_path / "plain", **settings)
    plain.train()
    settings |= {"eval_rows": ROWS[:5], "eval_steps": 1, "num_generations_eval": 3, "temperature_eval": 0.7}
    settings |= {"metric_for_best_model": "eval/reward/mean"}
    watched = make_trainer(demo_tokenizer, tmp_path / "watched", **settings)
    watched.train()
    assert [of_training(line) for line in lines(tmp_path / "watched")[1:]] == [
        of_training(line) for line in lines(tmp_path / "plain")
    ]
    for name, value in parameters(plain).items():
        assert torch.equal(parameters(watched)[name], value), name
    own = [line["eval/reward/mean"] for line in lines(tmp_path / "watched")]
    assert len(own) == 5


def test_a_reward_that_draws_draws_the_same_in_every_evaluation(demo_tokenizer, tmp_path):
    def drawn(completions, **_):
        return [random.random() for _ in completions]

    trainer = make_trainer(demo_tokenizer, tmp_path / "run", rewards=drawn, eval_rows=ROWS[:4])
    state = random.getstate()
    assert trainer.evaluate() == trainer.evaluate()
    assert random.getstate() == state


def test_a_reward_that_draws_gives_a_set_the_same_whatever_else_there_is(demo_tokenizer):
    def drawn(completions, **_):
        return [random.random() for _ in completions]

    trainer = make_trainer(demo_tokenizer, None, rewards=drawn)
    state = random.getstate()
    both, alone = trainer.evaluate({"a": ROWS[4:8], "b": ROWS[:4]}), trainer.evaluate({"b": ROWS[:4]})
    assert both["eval/b/reward/mean"] == alone["eval/b/reward/mean"]
    assert random.getstate() == state  # the functions were tried too


def test_no_evaluation_at_the_start(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:3], max_steps=1, eval_on_start=False)
    summary = trainer.train()
    assert [line["step"] for line in lines(tmp_path / "run")] == [1]
    assert "eval_before" not in summary
    assert "eval_after" in summary


def test_rewards_are_told_that_it_is_an_evaluation(demo_tokenizer, tmp_path):
    seen = []

    def watching(completions, trainer_state, **_):
        seen.append((trainer_state.global_step, trainer_state.max_steps, trainer_state.evaluating))
        return digits_reward(completions)

    make_trainer(
        demo_tokenizer, tmp_path / "run", rewards=watching, eval_rows=ROWS[:3], max_steps=2, eval_steps=1
    ).train()
    tried, *evaluated = [step for step in seen if step[2]]
    assert tried[0] == 0
    assert evaluated == [(0, 2, True), (1, 2, True), (2, 2, True)]


def test_what_utf8_cannot_hold_is_kept_escaped(demo_tokenizer):
    def odd(completions, log_extra, **_):
        log_extra("answer", ["\ud800x"] * len(completions))
        return [1.0] * len(completions)

    table = make_trainer(demo_tokenizer, None, rewards=odd, eval_rows=ROWS[:2]).evaluations()[""].table
    assert table.column("extra/answer").to_pylist() == ["\\ud800x"] * 2


# Mistakes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"a/b": ROWS[:2]}, "expected letters, digits, '-' and '_'"),
        ({"reward": ROWS[:2]}, "none of reward, rewards, length"),
        ({"": ROWS[:2]}, "got ''"),
        ({}, "has no sets"),
        ({"a": []}, "the evaluation data 'a' has no rows"),
        ({"a": [{"q": "1"}]}, "the evaluation data 'a', row 0: no column 'prompt'"),
    ],
)
def test_sets_that_cannot_be(demo_tokenizer, tmp_path, sets, message):
    with pytest.raises(DataError, match=message):
        make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=sets)


def test_evaluating_without_data(demo_tokenizer, tmp_path):
    with pytest.raises(DataError, match="pass eval_dataset"):
        make_trainer(demo_tokenizer, tmp_path / "run").evaluate()


def test_completions_of_an_evaluation_must_fit_the_context(demo_tokenizer, tmp_path):
    with pytest.raises(DataError, match="eval.max_completion_length_eval \\(500\\) leaves no room"):
        make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:3], max_completion_length_eval=500)


def test_an_unknown_judge(demo_tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="'math', but the reward functions are digits_reward"):
        make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:3], pass_function="math")


def test_a_resumed_run_may_be_evaluated_otherwise_but_not_on_other_data(demo_tokenizer, tmp_path):
    settings = {"eval_rows": ROWS[:4], "max_steps": 1}
    make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    more = settings | {"max_steps": 2, "num_generations_eval": 3, "eval_steps": 1, "pass_at_k": [3]}
    make_trainer(demo_tokenizer, tmp_path / "run", **more).train(resume=True)
    assert "eval/pass@3/mean" in lines(tmp_path / "run")[-1]
    with pytest.raises(RunFolderError, match="rollout.temperature"):
        make_trainer(demo_tokenizer, tmp_path / "run", **more | {"temperature": 0.5}).train(resume=True)


# The terminal ------------------------------------------------------------------------------------------------------------


def test_the_line_of_an_evaluation():
    metrics = {}
    for name, mean in (("reward", 0.5), ("rewards/math", 0.25), ("pass@1", 0.5), ("length", 9.0), ("cut_share", 0.1)):
        metrics |= {f"eval/{name}/mean": mean, f"eval/{name}/low": mean - 0.1, f"eval/{name}/high": None}
    assert evaluation_line(metrics | {"eval/errors": 0}, "after step 3") == (
        "evaluation after step 3: reward 0.500 (0.400 to none), math 0.250 (0.150 to none), pass@1 0.500 (0.400 to none)"
    )
    assert split_metric("eval/aime/pass@8/mean") == ("aime", "pass@8")
    assert split_metric("eval/rewards/math/mean") == ("", "rewards/math")


def test_the_start_says_what_is_evaluated(demo_tokenizer, tmp_path):
    settings = {"temperature_eval": 0.5, "num_generations_eval": 2, "max_completion_length_eval": 7}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows={"a": ROWS[:3], "b": ROWS[:5]}, **settings)
    assert "\nevaluation: a 3, b 5 prompts x 2; temperature 0.5, top-k off" in trainer.describe()
    assert "0 to 7 tokens" in trainer.describe()
    assert "at temperature 0" not in trainer.describe()
    greedy = make_trainer(demo_tokenizer, None, eval_rows=ROWS[:3], **settings | {"temperature_eval": 0})
    assert "; at temperature 0 a prompt's 2 completions are the same one\n" in greedy.describe()
    assert "evaluation" not in make_trainer(demo_tokenizer, tmp_path / "plain").describe()
