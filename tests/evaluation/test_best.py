"""The best model of a run, and runs that end early."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cohort.config import EvalConfig
from cohort.errors import ConfigError, RewardError
from cohort.evaluation import Best
from cohort.evaluation.evaluate import check_settings
from tests.train.harness import ROWS, digits_reward, make_trainer, parameters

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it

METRIC = "eval/reward/mean"


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def note(folder):
    record = json.loads((folder / "best" / "best.json").read_text())
    return {key: record[key] for key in ("step", "metric", "value")}


def best_of(values, **settings):
    """What becomes of a series of evaluations: which are taken, and at which the run ends."""
    best = Best(EvalConfig(metric_for_best_model=METRIC, **settings))
    taken = [step for step, value in enumerate(values) if best.update(step, {METRIC: value})]
    return best, taken


def test_the_best_by_hand():
    best, taken = best_of([0.2, 0.1, 0.4, 0.4, math.nan, 0.3])
    assert taken == [0, 2]  # equal is not better
    assert (best.step, best.value, best.evaluations_since) == (2, 0.4, 3)
    assert best.note() == {"step": 2, "metric": METRIC, "value": 0.4}
    best, taken = best_of([0.2, 0.1, 0.4], greater_is_better=False)
    assert taken == [0, 1]
    assert Best(EvalConfig()).note() == {}
    assert not Best(EvalConfig()).update(1, {METRIC: 1.0})


def test_nothing_is_better_than_no_number():
    best, taken = best_of([math.nan, math.nan], early_stopping_patience=2)
    assert (taken, best.step, best.exhausted) == ([], None, True)


@pytest.mark.parametrize(("patience", "ends"), [(0, False), (1, True), (2, True), (3, False)])
def test_patience(patience, ends):
    best, _ = best_of([0.5, 0.4, 0.3], early_stopping_patience=patience)
    assert best.exhausted is ends


def test_a_metric_that_is_not_logged_is_no_number(caplog):
    best = Best(EvalConfig(metric_for_best_model=METRIC))
    assert not best.update(1, {"eval/pass@1/mean": 0.5, "eval/pass@1/low": 0.1})
    assert (best.step, best.evaluations_since) == (None, 1)
    assert "which the evaluation did not log: eval/pass@1/mean" in caplog.text
    assert not best.update(2, {})
    assert len(caplog.messages) == 1
    assert not best.update(3, {METRIC: math.inf})


def test_a_metric_that_is_never_logged_does_not_lose_the_training(demo_tokenizer, tmp_path):
    settings = {"eval_rows": ROWS[:2], "max_steps": 1, "metric_for_best_model": "eval/custom/typo"}
    summary = make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    assert "best" not in summary
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-1"]


def test_an_evaluation_that_fails_does_not_lose_the_step(demo_tokenizer, tmp_path):
    def fails_late(completions, trainer_state, **_):
        if trainer_state.evaluating and trainer_state.global_step == 2:
            raise ValueError("no more")
        return digits_reward(completions)

    settings = {"rewards": fails_late, "eval_rows": ROWS[:2], "max_steps": 3, "eval_steps": 2, "save_steps": 0}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    with pytest.raises(RewardError, match="no more .*; in step 2; a checkpoint of step 2 is kept"):
        trainer.train()
    assert [line["step"] for line in lines(tmp_path / "run")] == [0, 1, 2]
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", eval_rows=ROWS[:2], max_steps=3)
    straight.train()
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    assert resumed.train(resume=True)["steps"] == 3
    assert all(torch.equal(parameters(resumed)[name], value) for name, value in parameters(straight).items())


@pytest.mark.parametrize(
    "metric", ["reward", "eval/reward", "eval/rewards/other/mean", "eval/pass@2/mean", "eval/maj@1/mean"]
)
def test_a_metric_that_no_evaluation_will_log_is_known_before_the_model_is(demo_tokenizer, tmp_path, metric):
    class Unread:
        def __getattr__(self, name):
            raise AssertionError("the model was looked at")

    with pytest.raises(ConfigError, match="no evaluation logs; there are\n  eval/reward/mean"):
        make_trainer(demo_tokenizer, tmp_path / "run", model=Unread(), eval_rows=ROWS[:2], metric_for_best_model=metric)


def test_metrics_that_there_will_be():
    for metric in (
        "eval/a/reward/low",
        "eval/b/rewards/math/mean",
        "eval/a/maj@4/mean",
        "eval/a/errors",
        "eval/a/custom/x",
    ):
        settings = EvalConfig(metric_for_best_model=metric, maj_at_k=[4], num_generations_eval=4)
        check_settings(settings, ("a", "b"), ("math",))
    with pytest.raises(ConfigError, match="eval/a/reward/mean\n"):
        check_settings(EvalConfig(metric_for_best_model=METRIC), ("a", "b"), ("math",))
    with pytest.raises(ConfigError, match="there is no evaluation: set data.eval"):
        check_settings(EvalConfig(metric_for_best_model=METRIC), (), ("math",))


def test_the_best_model_is_kept_and_loads(demo_tokenizer, tmp_path, capsys):
    settings = {"eval_rows": ROWS[:8], "eval_steps": 1, "max_steps": 6, "save_steps": 1, "num_generations_eval": 2}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", metric_for_best_model=METRIC, progress=True, **settings)
    summary = trainer.train()
    values = [line[METRIC] for line in lines(tmp_path / "run")]
    step = values.index(max(values))
    assert step > 0  # the run learns something
    assert note(tmp_path / "run") == summary["best"] == {"step": step, "metric": METRIC, "value": max(values)}
    assert (
        f"best: {METRIC} {max(values):.3f} after step {step}, kept in {tmp_path / 'run'}/best"
        in capsys.readouterr().out
    )
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best")
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / f"step-{step}")
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), checkpoint.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "best").get_vocab() == demo_tokenizer.get_vocab()
    assert not (tmp_path / "run" / "best.part").exists()
    assert "stopped_early" not in summary


def test_the_model_of_the_start_can_be_the_best(demo_tokenizer, tmp_path):
    settings = {
        "metric_for_best_model": "eval/length/mean",
        "eval_rows": ROWS[:8],
        "max_steps": 1,
        "learning_rate": 0.0,
    }
    summary = make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    assert summary["best"]["step"] == note(tmp_path / "run")["step"] == 0


def test_an_early_end_is_a_clean_one(demo_tokenizer, tmp_path, capsys):
    settings = {"eval_rows": ROWS[:4], "eval_steps": 1, "max_steps": 50, "save_steps": 0, "learning_rate": 0.0}
    settings |= {"metric_for_best_model": METRIC, "early_stopping_patience": 3, "progress": True}
    summary = make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    assert (summary["steps"], summary["stopped_early"], summary["best"]["step"]) == (3, True, 0)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-3"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_early"] is True
    assert "stopped early after step 3: no better evaluation within" in capsys.readouterr().out
    written = (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(ConfigError, match="stopped early, at step 3: eval/reward/mean was best after step 0"):
        make_trainer(demo_tokenizer, tmp_path / "run", **settings | {"bootstrap_samples": 500}).train(resume=True)
    assert (tmp_path / "run" / "config.toml").read_text() == written
    more = make_trainer(demo_tokenizer, tmp_path / "run", **settings | {"early_stopping_patience": 5}).train(
        resume=True
    )
    assert more["steps"] == 5
    again = make_trainer(demo_tokenizer, tmp_path / "run", **settings | {"early_stopping_patience": 0, "max_steps": 6})
    assert again.train(resume=True)["steps"] == 6


@pytest.mark.parametrize("cut_after", [2, 3])
def test_a_resumed_run_keeps_the_same_best(demo_tokenizer, tmp_path, cut_after):
    settings = {"eval_rows": ROWS[:8], "eval_steps": 1, "save_steps": 2, "metric_for_best_model": METRIC}
    settings |= {"early_stopping_patience": 3, "max_steps": 6}
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", **settings)
    summary = straight.train()
    broken = make_trainer(demo_tokenizer, tmp_path / "broken", **settings)
    for metrics in broken.steps():
        if metrics["step"] == cut_after:
            break
    resumed = make_trainer(demo_tokenizer, tmp_path / "broken", **settings)
    assert resumed.train(resume=True)["best"] == summary["best"]
    assert note(tmp_path / "broken") == note(tmp_path / "straight")
    assert all(torch.equal(parameters(resumed)[name], value) for name, value in parameters(straight).items())
    weights = [(tmp_path / name / "best" / "model.safetensors").read_bytes() for name in ("straight", "broken")]
    assert weights[0] == weights[1]


def test_a_best_under_other_settings_is_no_best(demo_tokenizer, tmp_path, caplog):
    settings = {"eval_rows": ROWS[:8], "max_steps": 1, "metric_for_best_model": "eval/reward/high"}
    make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    settings |= {"max_steps": 2, "num_generations_eval": 4}
    summary = make_trainer(demo_tokenizer, tmp_path / "run", **settings).train(resume=True)
    assert summary["best"]["step"] == 2
    assert "was measured differently (num_generations_eval): starting anew" in caplog.text


@pytest.mark.parametrize(
    ("metric", "changed", "kept"),
    [
        (METRIC, {"eval_steps": 9, "pass_at_k": [], "pass_threshold": 0.5, "confidence": 0.9}, True),
        (METRIC, {"temperature_eval": 0.5}, False),
        ("eval/reward/high", {"confidence": 0.9}, False),
        ("eval/reward/high", {"bootstrap_samples": 300}, False),
        ("eval/pass@1/mean", {"pass_threshold": 0.5}, False),
        ("eval/pass@1/mean", {"pass_at_k": [1, 2], "num_generations_eval": 2, "maj_at_k": [2]}, True),
    ],
)
def test_what_a_value_depends_on(metric, changed, kept, caplog):
    settings = {"metric_for_best_model": metric, "early_stopping_patience": 3, "num_generations_eval": 2}
    before = Best(EvalConfig(**settings), "the prompts", 4, 0.5, 2)
    now = Best(EvalConfig(**settings | changed), "the prompts")
    now.load_state_dict(before.state_dict(), before.record())
    assert (now.step, now.value, now.evaluations_since) == ((4, 0.5, 2) if kept else (None, None, 0))
    assert bool(caplog.messages) is not kept
    other = Best(EvalConfig(**settings), "other prompts")
    other.load_state_dict(before.state_dict(), before.record())
    assert other.step is None


def by_step(values):
    """A reward of evaluations: so much after each step."""

    def reward(completions, trainer_state, **_):
        if trainer_state.evaluating:
            return [values[trainer_state.global_step]] * len(completions)
        return digits_reward(completions)

    return reward


def test_what_lies_in_best_is_the_best(demo_tokenizer, tmp_path, caplog):
    """Killed after a new best and before the next checkpoint, then resumed without the evaluation that found it."""
    settings = {"rewards": by_step([0.1, 0.2, 0.3, 0.9, 0.2]), "eval_rows": ROWS[:4], "metric_for_best_model": METRIC}
    settings |= {"eval_steps": 1, "save_steps": 2}
    broken = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=6, **settings)
    for metrics in broken.steps():
        if metrics["step"] == 3:
            break
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, **settings | {"eval_steps": 0})
    assert resumed.train(resume=True)["best"] == note(tmp_path / "run") == {"step": 3, "metric": METRIC, "value": 0.9}
    assert "best/ holds the model after step 3, which the checkpoint does not know" in caplog.text


def test_a_best_that_was_being_replaced_is_brought_back(demo_tokenizer, tmp_path, caplog):
    settings = {"rewards": by_step([0.9, 0.2, 0.3, 0.1]), "eval_rows": ROWS[:4], "metric_for_best_model": METRIC}
    settings |= {"eval_steps": 1, "save_steps": 1}
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, **settings).train()
    (tmp_path / "run" / "best").rename(tmp_path / "run" / "best.old")
    more = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=2, **settings)
    assert more.train(resume=True)["best"] == note(tmp_path / "run") == {"step": 0, "metric": METRIC, "value": 0.9}
    assert not caplog.messages
    shutil.rmtree(tmp_path / "run" / "best")
    more = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3, **settings)
    assert more.train(resume=True)["best"] == note(tmp_path / "run") == {"step": 3, "metric": METRIC, "value": 0.1}
    assert "best/ no longer holds the model after step 0" in caplog.text


def test_adapters_are_kept_as_adapters(demo_tokenizer, tmp_path):
    pytest.importorskip("peft")
    settings = {"eval_rows": ROWS[:4], "max_steps": 1, "metric_for_best_model": METRIC}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lora={"rank": 2}, **settings)
    trainer.train()
    assert (tmp_path / "run" / "best" / "adapter_model.safetensors").exists()
