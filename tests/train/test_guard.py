"""NaN and infinity: the error names the value, the update is skipped, the batch is saved, several in a row end the run."""

import dataclasses
import importlib
import math

import pyarrow.parquet
import pytest
import torch

from cohort.errors import NonFiniteError, Stopped
from cohort.objective import PRESETS
from cohort.report.rollouts import StoredStep
from cohort.train import NonFinite, NonFiniteLog, check_finite, part_of, update
from cohort.train.sweep import sampler_gap
from tests.conftest import tiny_llama
from tests.train.harness import checkpoints_of, make_trainer, metrics_of
from tests.train.updates import all_sequences, batch_for, context_for, segments_of

PAPER = PRESETS["grpo"]
update_module = importlib.import_module("cohort.train.update")


def test_the_first_value_is_named_with_its_completion(float64_policy):
    batch = batch_for(float64_policy, PAPER)
    values_N = torch.zeros(batch.num_tokens)
    check_finite(batch, all_sequences(batch), {"log-probability": values_N, "nothing": None})
    lengths = batch.lengths_S.tolist()
    s = next(s for s in range(4, 12) if lengths[s] > 1)
    values_N[sum(lengths[:s]) + 1] = math.inf
    expected = rf"log-probability is inf at token 2 of {lengths[s]} of a completion \(token ids {int(batch.ids_T[sum(lengths[:s])])}"
    with pytest.raises(NonFiniteError, match=expected):
        check_finite(batch, all_sequences(batch), {"log-probability": values_N})
    part = part_of(batch, [s, 0])
    with pytest.raises(NonFiniteError, match=expected):
        check_finite(batch, part, {"log-probability": values_N[part.tokens_N]})


@pytest.mark.parametrize("what", ["advantages_N", "old_logps_N", "ref_logps_N", "weights"])
def test_an_update_with_a_nan_is_skipped(float64_policy, what):
    objective = PAPER.replace(beta=0.1)
    batch = batch_for(float64_policy, objective)
    if what == "weights":
        with torch.no_grad():
            float64_policy.model.lm_head.weight[5] = math.nan
    else:
        values_N = getattr(batch, what).clone()
        values_N[3] = math.nan
        batch = dataclasses.replace(batch, **{what: values_N})
    before = [p.clone() for p in float64_policy.model.parameters()]
    outcome = update(context_for(float64_policy, objective, 20, learning_rate=0.1), batch, all_sequences(batch))
    names = {"advantages_N": "advantage", "old_logps_N": "old log-probability", "weights": "log-probability"}
    assert isinstance(outcome, NonFinite)
    assert outcome.message.startswith(f"{names.get(what, 'reference log-probability')} is nan at token ")
    assert float64_policy.version == 0
    for old, parameter in zip(before, float64_policy.model.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(), parameter.nan_to_num())


def test_the_batch_is_saved_and_several_in_a_row_end_the_run(tmp_path, float64_policy):
    batch = batch_for(float64_policy, PAPER)
    log = NonFiniteLog(tmp_path / "nonfinite", limit=2)
    log.skipped("a value", batch, all_sequences(batch), 1, 1)
    log.skipped("a value", batch, part_of(batch, [4, 2]), 3, 1)
    with pytest.raises(NonFiniteError, match=r"step 4: a value.*2 in a row.*step-4-1\.parquet"):
        log.skipped("a value", batch, all_sequences(batch), 4, 2)
    table = pyarrow.parquet.read_table(tmp_path / "nonfinite/step-1-1.parquet")
    assert table.schema.metadata[b"problem"] == b"a value"
    rows = table.to_pylist()
    assert [(tuple(row["prompt_ids"]), tuple(row["token_ids"])) for row in rows] == segments_of(batch)
    assert [value for row in rows for value in row["advantages"]] == batch.advantages_N.tolist()
    two = pyarrow.parquet.read_table(tmp_path / "nonfinite/step-3-1.parquet").to_pylist()
    assert two == [rows[4], rows[2]]
    (tmp_path / "file").touch()
    failing = NonFiniteLog(tmp_path / "file" / "nonfinite", limit=2)  # as when the disk is full
    failing.skipped("a value", batch, all_sequences(batch), 1, 1)
    with pytest.raises(NonFiniteError, match=r"the batch could not be written \(Not a directory\)"):
        failing.skipped("a value", batch, all_sequences(batch), 2, 2)


def spoil(monkeypatch, steps):
    """Make the coefficients of some updates NaN."""
    real, calls = update_module.coefficients, []

    def coefficients(*arguments, **named):
        found = real(*arguments, **named)
        calls.append(1)
        return found._replace(policy_N=found.policy_N * math.nan) if len(calls) in steps else found

    monkeypatch.setattr(update_module, "coefficients", coefficients)


def test_a_run_goes_on_after_one(tmp_path, demo_tokenizer, monkeypatch):
    spoil(monkeypatch, {2})
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=3)
    metrics = list(trainer.steps())
    assert [step["updates_nonfinite"] for step in metrics] == [0, 1, 0]
    assert [step["updates"] for step in metrics] == [1, 0, 1]
    assert trainer.policy.version == 2
    assert "entropy" not in metrics[1]
    assert [path.name for path in (tmp_path / "run/nonfinite").iterdir()] == ["step-2-1.parquet"]
    step = StoredStep.read(tmp_path / "run/rollouts/step-2.parquet")
    assert step.facts["updates"] == [{"minibatch": 0, "skipped": True}]
    assert (set(step.values("minibatch")), set(step.values("update"))) == ({0}, {None})
    assert step.values("logps") == step.values("no_gradient") == [None] * len(step)


def test_updates_in_a_row_are_counted_across_a_stop(tmp_path, demo_tokenizer, monkeypatch):
    def make():
        return make_trainer(demo_tokenizer, tmp_path / "run", max_steps=6, max_nonfinite_updates=3)

    spoil(monkeypatch, {1, 3, 4, 5})  # the second one is finite: the count begins again
    trainer = make()
    steps = trainer.steps()
    assert [next(steps)["updates"] for _ in range(4)] == [0, 1, 0, 0]
    trainer.stop()
    with pytest.raises(Stopped, match="after step 4"):
        next(steps)
    with pytest.raises(NonFiniteError, match=r"No update was made, 3 in a row .*; in step 5"):
        make().train(resume=True)


@pytest.mark.parametrize("where", ["step", "optimizer"])
def test_weights_that_a_steps_last_update_spoils_are_not_written(tmp_path, demo_tokenizer, where):
    """The gradient is finite, the step is not: nothing of the step is written, and the good checkpoint is kept."""
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, save_steps=1, save_total_limit=1)
    rule, calls = trainer.optimizer.rules[0], []
    weight = rule.param_groups[0]["params"][0]

    def before(*_):
        calls.append(1)
        if len(calls) == 2 and where == "optimizer":
            rule.state[weight]["exp_avg"][0, 0] = math.nan

    def after(*_):
        if len(calls) == 2 and where == "step":
            weight.data[0, 0] = math.inf

    rule.register_step_pre_hook(before)
    rule.register_step_post_hook(after)
    words = r"^model\.embed_tokens\.weight of the updated model has 1 NaN or infinite values of .*; in step 2$"
    with pytest.raises(NonFiniteError, match=words):
        trainer.train()
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1]
    assert checkpoints_of(tmp_path / "run") == ["step-1"]
    assert [path.name for path in (tmp_path / "run/rollouts").iterdir()] == ["step-1.parquet"]


def test_a_state_that_is_not_finite_is_not_written(tmp_path, demo_tokenizer):
    """An infinite second moment stops a weight from learning, and nothing else shows it."""
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", max_steps=4, save_steps=1, save_total_limit=1)
    steps = trainer.steps()
    next(steps), next(steps)
    names = {name: parameter for parameter, name in trainer.optimizer.names.items()}
    trainer.optimizer.rules[0].state[names["model.norm.weight"]]["exp_avg_sq"][3] = math.inf
    with pytest.raises(
        NonFiniteError, match=r"^model\.norm\.weight/exp_avg_sq of what was to be saved has 1 NaN or inf"
    ):
        list(steps)  # files are written in the background
    assert checkpoints_of(tmp_path / "run") == ["step-2"]


def test_a_model_of_nan_is_refused_before_anything_is_tried(tmp_path, demo_tokenizer):
    model = tiny_llama(vocab_size=len(demo_tokenizer))
    model.lm_head.weight.data[5] = math.nan
    with pytest.raises(NonFiniteError, match=r"lm_head\.weight of the given model has 24 NaN or infinite values of "):
        make_trainer(demo_tokenizer, tmp_path / "run", model)
    assert not (tmp_path / "run").exists()


def test_logits_that_overflow_are_not_called_a_gap(float64_policy):
    """The weights are finite; what is computed with them is not."""
    batch = batch_for(float64_policy, PAPER)
    with torch.no_grad():
        float64_policy.model.lm_head.weight.mul_(1e308)
    with pytest.raises(NonFiniteError, match="log-probability is nan at token 1 of "):
        sampler_gap(context_for(float64_policy, PAPER), batch)
