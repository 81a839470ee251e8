"""The best model of a run, and early stopping."""

import contextlib
import itertools
import json
import math
import shutil
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cohort.config import EvalConfig
from cohort.errors import ConfigError, DiskError, NonFiniteError, RankError, RewardError, Stopped
from cohort.evaluation import Best, Evaluator
from cohort.evaluation.evaluate import check_settings
from tests.conftest import each
from tests.train.harness import (
    ROWS,
    break_after,
    checkpoints_of,
    digits_reward,
    make_trainer,
    metrics_of,
    same_parameters,
    straight_and_resumed,
    untimed_metrics_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft asks for it

METRIC = "eval/reward/mean"


def stored_best(folder):
    record = json.loads((folder / "best" / "best.json").read_text())
    return {key: record[key] for key in ("step", "metric", "value")}


@each(
    ("values", "settings", "new_best", "best", "since"),
    [
        ([0.2, 0.1, 0.4, 0.4, math.nan, 0.3], {}, [0, 2], (2, 0.4), 3),  # a tie does not win
        ([0.2, 0.1, 0.4], {"greater_is_better": False}, [0, 1], (1, 0.1), 1),
        ([math.nan, math.inf, None], {}, [], (None, None), 3),
        ([0.4], {"metric_for_best_model": None}, [], (None, None), 0),
    ],
)
def test_the_best_by_hand(values, settings, new_best, best, since):
    found = Best(EvalConfig(**{"metric_for_best_model": METRIC} | settings))
    logged = [{} if value is None else {METRIC: value} for value in values]
    saved = []
    for step, metrics in enumerate(logged):
        found, wins = found.after(step, metrics)
        saved += [step] if wins else []
    assert saved == new_best
    assert (found.step, found.value, found.evaluations_since) == (*best, since)
    expected = {"step": best[0], "metric": METRIC, "value": best[1]} if new_best else {}
    assert found.note() == expected


def test_patience_and_a_metric_that_is_not_logged(caplog):
    best = Best(EvalConfig(metric_for_best_model=METRIC, early_stopping_patience=2))
    exhausted = []
    for step in (1, 2):
        best, _ = best.after(step, {"eval/pass@1/mean": 0.5, "eval/pass@1/low": 0})
        exhausted.append(best.exhausted)
    assert exhausted == [False, True]
    (message,) = caplog.messages  # once
    assert message.endswith("which the evaluation did not log: eval/pass@1/mean")


def test_an_evaluation_that_fails_does_not_lose_the_step(demo_tokenizer, tmp_path):
    broken, evaluated = [True], []

    def fails_late(completions, trainer_state, **_):
        if trainer_state.evaluating:
            evaluated.append(trainer_state.global_step)
            if broken[0] and trainer_state.global_step == 1:
                raise ValueError("no more")
        return digits_reward(completions)

    settings = {"rewards": fails_late, "eval_rows": ROWS[:2], "max_steps": 2, "eval_steps": 1, "save_steps": 0}
    with pytest.raises(RewardError, match="no more .*; in step 1; a checkpoint of step 1 is kept"):
        make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0]
    broken[0] = False
    evaluated.clear()
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", **settings)
    assert resumed.train(resume=True)["steps"] == 2
    assert sorted(set(evaluated)) == [0, 1, 2]  # 0: the trial
    straight = make_trainer(demo_tokenizer, tmp_path / "straight", **settings)
    straight.train()
    assert same_parameters(resumed, straight)
    assert untimed_metrics_of(tmp_path / "run") == untimed_metrics_of(tmp_path / "straight")


@pytest.mark.parametrize("error", [NonFiniteError, DiskError, RankError])
def test_an_evaluation_that_a_machine_fails_writes_no_checkpoint(demo_tokenizer, tmp_path, monkeypatch, error):
    settings = {"eval_rows": ROWS[:2], "max_steps": 1, "eval_on_start": False, "save_steps": 0}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", **settings)

    def fails(*_, **__):
        raise error("no")

    monkeypatch.setattr(Evaluator, "evaluate", fails)
    with pytest.raises(error):
        trainer.train()
    assert not list((tmp_path / "run" / "checkpoints").glob("*"))


def test_an_evaluation_that_is_repeated_leaves_one_line_of_metrics(demo_tokenizer, tmp_path):
    """Stopped in the evaluation, resumed, killed after it, and resumed from the same checkpoint."""

    def stops(completions, trainer_state, **_):
        if trainer_state.evaluating and trainer_state.global_step == 1:
            trainers[0].stop()
        return digits_reward(completions)

    def make():
        settings = {"rewards": [stops, digits_reward], "eval_rows": ROWS[:2], "max_steps": 2, "eval_steps": 1}
        settings["save_steps"] = 0
        return make_trainer(demo_tokenizer, tmp_path / "run", **settings)

    trainers = [make()]
    with pytest.raises(Stopped, match="in the evaluation after step 1"):
        trainers[0].train()
    next(make().steps(resume=True))
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0, 1]
    make().train(resume=True)
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [0, 1, 2]


def test_a_metric_that_no_evaluation_logs_is_an_error_before_the_model_is_loaded(demo_tokenizer):
    class Unread:
        def __getattr__(self, name):
            raise AssertionError("the model was looked at")

    with pytest.raises(ConfigError, match="no evaluation logs; there are\n  eval/reward/mean"):
        make_trainer(demo_tokenizer, None, model=Unread(), eval_rows=ROWS[:2], metric_for_best_model="reward")


@each(
    ("metric", "sets", "message"),
    [
        *((f"eval/{name}", "ab", "") for name in ("a/reward/low", "b/rewards/math/mean", "a/errors", "a/custom/x")),
        ("eval/a/maj@4/mean", "ab", ""),
        *((f"eval/{name}/mean", ("",), "which no evaluation logs") for name in ("rewards/other", "pass@2", "maj@1")),
        (METRIC, "ab", "eval/a/reward/mean\n"),
        (METRIC, "", "there is no evaluation: set data.eval"),
    ],
)
def test_metrics_that_evaluations_log(metric, sets, message):
    settings = EvalConfig(metric_for_best_model=metric, maj_at_k=[4], num_generations_eval=4)
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        check_settings(settings, tuple(sets), ("math",))


def test_the_best_model_is_kept_and_resumes(demo_tokenizer, tmp_path, capsys):
    settings = {"eval_rows": ROWS[:8], "eval_steps": 1, "save_steps": 1, "max_steps": 4, "progress": True}
    settings |= {"metric_for_best_model": METRIC, "early_stopping_patience": 3, "num_generations_eval": 2}
    make = partial(make_trainer, demo_tokenizer, **settings)
    straight, resumed = straight_and_resumed(make, tmp_path, stop=3)
    values = [line[METRIC] for line in metrics_of(tmp_path / "straight")]
    step = values.index(max(values))
    assert step > 0  # the run learns something
    expected = {"step": step, "metric": METRIC, "value": max(values)}
    assert straight.summary["best"] == resumed.summary["best"] == expected
    assert "stopped_early" not in straight.summary
    for name in ("straight", "broken"):
        assert stored_best(tmp_path / name) == expected
    line = f"best: {METRIC} {max(values):.3f} after step {step}, kept in {tmp_path / 'straight'}/best"
    assert line in capsys.readouterr().out
    weights = [(tmp_path / name / "best" / "model.safetensors").read_bytes() for name in ("straight", "broken")]
    assert weights[0] == weights[1]
    paths = ("best", f"checkpoints/step-{step}")
    best, at_step = (AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / path) for path in paths)
    assert all(torch.equal(a, b) for a, b in zip(best.parameters(), at_step.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "straight" / "best").get_vocab() == demo_tokenizer.get_vocab()


def test_early_stopping(demo_tokenizer, tmp_path, capsys):
    settings = {"eval_rows": ROWS[:4], "eval_steps": 1, "max_steps": 50, "save_steps": 0, "learning_rate": 0.0}
    settings |= {"metric_for_best_model": METRIC, "early_stopping_patience": 2, "progress": True}
    summary = make_trainer(demo_tokenizer, tmp_path / "run", **settings).train()
    assert (summary["steps"], summary["stopped_early"], summary["best"]["step"]) == (2, True, 0)
    assert stored_best(tmp_path / "run")["step"] == 0
    assert checkpoints_of(tmp_path / "run") == ["step-2"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_early"] is True
    assert "stopped early after step 2: no better evaluation within" in capsys.readouterr().out
    written = (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(ConfigError, match="stopped early, at step 2: eval/reward/mean was best after step 0"):
        make_trainer(demo_tokenizer, tmp_path / "run", **settings | {"bootstrap_samples": 500}).train(resume=True)
    assert (tmp_path / "run" / "config.toml").read_text() == written
    for steps, changes in ((3, {"early_stopping_patience": 3}), (4, {"early_stopping_patience": 0, "max_steps": 4})):
        more = make_trainer(demo_tokenizer, tmp_path / "run", **settings | changes)
        assert more.train(resume=True)["steps"] == steps


@pytest.mark.parametrize(
    ("metric", "changed", "kept"),
    [
        (METRIC, {"eval_steps": 9, "pass_at_k": [], "success_threshold": 0.5, "confidence": 0.9}, True),
        (METRIC, {"temperature_eval": 0.5}, False),
        ("eval/reward/high", {"confidence": 0.9}, False),
        ("eval/reward/high", {"bootstrap_samples": 300}, False),
        ("eval/pass@1/mean", {"success_threshold": 0.5}, False),
        ("eval/pass@1/mean", {"pass_at_k": [1, 2], "num_generations_eval": 2, "maj_at_k": [2]}, True),
    ],
)
def test_which_settings_reset_the_best(metric, changed, kept, caplog):
    settings = {"metric_for_best_model": metric, "early_stopping_patience": 3, "num_generations_eval": 2}
    before = Best(EvalConfig(**settings), "the prompts", 4, 0.5, 2)
    now = Best(EvalConfig(**settings | changed), "the prompts")
    now = now.restored(before.state_dict(), before.record())
    assert (now.step, now.value, now.evaluations_since) == ((4, 0.5, 2) if kept else (None, None, 0))
    assert caplog.messages == [] if kept else f"measured differently ({next(iter(changed))}): starting" in caplog.text
    other = Best(EvalConfig(**settings), "other prompts")
    other = other.restored(before.state_dict(), before.record())
    assert other.step is None


def judged(values, state=None, record=None):
    """Evaluations after steps 1, 2, ... or, of a resumed run, after those of its state; the state and the contents of
    best.json after each, until the patience ends."""
    best = Best(EvalConfig(metric_for_best_model=METRIC, early_stopping_patience=2))
    first = 1
    if state is not None:
        best = best.restored(state["best"], record)
        first = state["step"] + 1
    history = []
    for step, value in enumerate(values[first - 1 :], first):
        best, wins = best.after(step, {METRIC: value})
        if wins:
            record = best.record()
        history.append(({"step": step, "best": best.state_dict()}, record))
        if best.exhausted:
            break
    return history


def test_a_kill_changes_neither_the_best_nor_the_end():
    """Killed after any evaluation, the run resumes from any checkpoint before it. ``best.json`` is then of a later step
    than the checkpoint, which once made the resumed run stop early."""
    for values in itertools.product((0.1, 0.2, 0.3), repeat=5):
        straight = judged(values)
        for killed, (_, record) in enumerate(straight):
            for saved, _ in straight[:killed]:
                assert judged(values, saved, record)[-1] == straight[-1]


def test_a_best_model_that_was_never_written_can_be_replaced(caplog):
    history = judged([0.1, 0.3])
    (_, older), (saved, _) = history
    (_, record), *_ = judged([0.1, 0.3, 0.2], saved, older)
    assert "best/ holds the model after step 1: that after step 2 was lost" in caplog.text
    assert (record["step"], record["value"]) == (3, 0.2)


def by_step(values):
    """A reward whose value in an evaluation depends on the step only."""

    def reward(completions, trainer_state, **_):
        if trainer_state.evaluating:
            return [values[trainer_state.global_step]] * len(completions)
        return digits_reward(completions)

    return reward


def test_the_model_in_best_takes_precedence(demo_tokenizer, tmp_path, caplog):
    """The run is killed after a new best and before the next checkpoint, then resumed without evaluations."""
    settings = {"rewards": by_step([0.1, 0.2, 0.3, 0.9, 0.2]), "eval_rows": ROWS[:4], "metric_for_best_model": METRIC}
    settings |= {"eval_steps": 1, "save_steps": 2}
    broken = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=6, **settings)
    break_after(broken, 3)
    resumed = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, **settings | {"eval_steps": 0})
    expected = {"step": 3, "metric": METRIC, "value": 0.9}
    assert resumed.train(resume=True)["best"] == stored_best(tmp_path / "run") == expected
    assert "best/ holds the model after step 3, which the checkpoint does not know" in caplog.text


def test_an_interrupted_replacement_of_the_best_is_undone(demo_tokenizer, tmp_path, caplog):
    settings = {"rewards": by_step([0.9, 0.2, 0.3, 0.1]), "eval_rows": ROWS[:4], "metric_for_best_model": METRIC}
    settings |= {"eval_steps": 1, "save_steps": 1}
    make_trainer(demo_tokenizer, tmp_path / "run", max_steps=1, **settings).train()
    best = tmp_path / "run" / "best"
    best.rename(tmp_path / "run" / "best.old")
    for max_steps, step, value in ((2, 0, 0.9), (3, 3, 0.1)):
        more = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=max_steps, **settings)
        expected = {"step": step, "metric": METRIC, "value": value}
        assert more.train(resume=True)["best"] == stored_best(tmp_path / "run") == expected
        assert ("best/ no longer holds the model after step 0" in caplog.text) is (max_steps == 3)
        shutil.rmtree(best)


def test_the_best_adapters_are_saved_as_adapters(demo_tokenizer, tmp_path):
    pytest.importorskip("peft")
    settings = {"eval_rows": ROWS[:4], "max_steps": 1, "metric_for_best_model": METRIC}
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", lora={"rank": 2}, **settings)
    trainer.train()
    assert (tmp_path / "run" / "best" / "adapter_model.safetensors").exists()
