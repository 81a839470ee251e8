"""Numbers that are not finite: named, the update not made, the batch kept, the run stopped after several in a row."""

import dataclasses
import importlib
import math

import pyarrow.parquet
import pytest
import torch

from cohort import GRPOConfig, GRPOTrainer
from cohort.config import OptimConfig
from cohort.errors import NonFiniteError
from cohort.train import Guard, Optimizer, check_finite, update
from tests.conftest import tiny_llama
from tests.invariance.test_update import PAPER, batch_for

update_module = importlib.import_module("cohort.train.update")


def test_the_first_number_is_named_with_its_completion(float64_policy):
    batch = batch_for(float64_policy, PAPER)
    values_N = torch.zeros(batch.num_tokens)
    check_finite(batch, {"log-probability": values_N, "nothing": None})
    lengths = [len(ids) for ids in batch.completion_ids]
    s = next(s for s in range(4, 12) if lengths[s] > 1)
    values_N[sum(lengths[:s]) + 1] = math.inf
    with pytest.raises(NonFiniteError, match=rf"log-probability is inf at token 2 of the {lengths[s]} of a completion"):
        check_finite(batch, {"log-probability": values_N})


@pytest.mark.parametrize("what", ["advantages_N", "old_logps_N", "ref_logps_N"])
def test_an_update_with_such_a_number_is_not_made(float64_policy, what):
    objective = PAPER.replace(beta=0.1)
    batch = batch_for(float64_policy, objective)
    values_N = getattr(batch, what).clone()
    values_N[3] = math.nan
    before = [p.clone() for p in float64_policy.model.parameters()]
    optimizer = Optimizer(float64_policy.model, OptimConfig(learning_rate=0.1), 1)
    names = {"advantages_N": "advantage", "old_logps_N": "old log-prob", "ref_logps_N": "reference log-prob"}
    with pytest.raises(NonFiniteError, match=names[what]):
        update(float64_policy, optimizer, dataclasses.replace(batch, **{what: values_N}), objective, 1.0, 20)
    assert float64_policy.version == 0
    for old, parameter in zip(before, float64_policy.model.parameters(), strict=True):
        assert torch.equal(old, parameter)


def test_weights_that_are_not_numbers_are_noticed(float64_policy):
    batch = batch_for(float64_policy, PAPER)
    with torch.no_grad():
        float64_policy.model.lm_head.weight[5] = math.nan
    optimizer = Optimizer(float64_policy.model, OptimConfig(), 1)
    with pytest.raises(NonFiniteError, match="log-probability is nan"):
        update(float64_policy, optimizer, batch, PAPER, 1.0, 100)


def test_the_batch_is_kept_and_so_many_in_a_row_stop(tmp_path, float64_policy):
    batch = batch_for(float64_policy, PAPER)
    guard = Guard(tmp_path, limit=2)

    def once(step, *, fails):
        with guard(batch, step):
            if fails:
                raise NonFiniteError("a number")

    once(1, fails=True)
    once(2, fails=False)  # in between: the count begins again
    once(3, fails=True)
    assert guard.take_count() == 2
    assert guard.take_count() == 0
    with pytest.raises(NonFiniteError, match=r"step 4: a number.*2 in a row.*step-4-1\.parquet"):
        once(4, fails=True)
    table = pyarrow.parquet.read_table(tmp_path / "nonfinite/step-3-1.parquet")
    assert table.schema.metadata[b"problem"] == b"a number"
    rows = table.to_pylist()
    assert [tuple(row["token_ids"]) for row in rows] == list(batch.completion_ids)
    assert [tuple(row["prompt_ids"]) for row in rows] == list(batch.prompt_ids)
    flat = [value for row in rows for value in row["advantages"]]
    assert flat == batch.advantages_N.tolist()
    with pytest.raises(ValueError, match="other"), guard(batch, 5):
        raise ValueError("other errors pass through")


def reward(completions, **_):
    return [sum(character.isdigit() for character in text) / (len(text) + 1) for text in completions]


def trainer(folder, tokenizer, **optim):
    config = GRPOConfig(
        rollout={"prompts_per_step": 2, "num_generations": 4, "max_completion_length": 6},
        optim={"learning_rate": 0.01} | optim,
        run={"output_dir": str(folder), "max_steps": 4},
        report={"progress": False},
    )
    rows = [{"prompt": f"{number}+1"} for number in range(8)]
    model = tiny_llama(vocab_size=len(tokenizer))
    return GRPOTrainer(model, reward, config, rows, processing_class=tokenizer)


def spoilt(monkeypatch, steps):
    """Advantages that are not numbers, in some updates."""
    real, calls = update_module.coefficients, []

    def coefficients(*arguments, **named):
        found = real(*arguments, **named)
        calls.append(1)
        return dataclasses.replace(found, policy_N=found.policy_N * math.nan) if len(calls) in steps else found

    monkeypatch.setattr(update_module, "coefficients", coefficients)


def test_a_run_goes_on_after_one(tmp_path, demo_tokenizer, monkeypatch):
    spoilt(monkeypatch, {2})
    run = trainer(tmp_path / "run", demo_tokenizer)
    metrics = list(run.steps())
    assert [step["updates_nonfinite"] for step in metrics] == [0, 1, 0, 0]
    assert [step["updates"] for step in metrics] == [1, 0, 1, 1]
    assert run.policy.version == 3
    assert "entropy" not in metrics[1]  # nothing stands in for what is not known
    assert [path.name for path in (tmp_path / "run/nonfinite").iterdir()] == ["step-2-1.parquet"]


def test_a_run_stops_after_several(tmp_path, demo_tokenizer, monkeypatch):
    spoilt(monkeypatch, {2, 3})
    run = trainer(tmp_path / "run", demo_tokenizer, max_nonfinite_updates=2)
    with pytest.raises(NonFiniteError, match=r"policy coefficient is nan.*max_nonfinite_updates"):
        list(run.steps())
    assert run.policy.version == 1
