"""Confidence intervals by hand, and evaluation on fixed draws."""

import math

import pytest
import torch

from cohort.errors import DataError
from cohort.train import confidence_interval
from tests.train.harness import ROWS, make_trainer


def test_wilson_by_hand():
    # 8 of 10: centre (0.8 + 3.8415/20) / (1 + 3.8415/10) = 0.7167; half-width 0.2265
    estimate = confidence_interval(torch.tensor([1.0] * 8 + [0.0] * 2))
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_wilson_at_the_ends_stays_inside_and_is_not_empty(value):
    estimate = confidence_interval(torch.full((50,), value))
    assert estimate.mean == value
    assert 0 <= estimate.low < estimate.high <= 1
    assert estimate.high - estimate.low == pytest.approx(3.8415 / (50 + 3.8415), rel=1e-3)


def test_normal_interval_by_hand():
    # mean 2, std 1, three prompts
    estimate = confidence_interval(torch.tensor([1.0, 2.0, 3.0]))
    half = 1.959964 / math.sqrt(3)
    assert (estimate.low, estimate.high) == pytest.approx((2 - half, 2 + half))


def test_intervals_of_little():
    assert math.isnan(confidence_interval(torch.tensor([math.nan])).mean)
    assert confidence_interval(torch.tensor([0.5])).high == math.inf
    assert confidence_interval(torch.tensor([1.0, math.nan])).mean == 1.0


def test_evaluation_draws_are_fixed_and_leave_the_policy_alone(demo_tokenizer, tmp_path):
    trainer = make_trainer(demo_tokenizer, tmp_path / "run", eval_rows=ROWS[:6], num_generations_eval=3)
    before = [p.clone() for p in trainer.policy.model.parameters()]
    first, second = trainer.evaluation(), trainer.evaluation()
    assert [g.completions for g in first.groups] == [g.completions for g in second.groups]
    assert len(first.groups) == 6
    assert all(len(g.completions) == 3 for g in first.groups)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.policy.model.parameters(), strict=True))
    metrics = trainer.evaluate(ROWS[:2])
    assert set(metrics) == {
        f"eval/{n}/{s}" for n in ("reward", "rewards/digits_reward") for s in ("mean", "low", "high")
    }


def test_evaluating_without_data(demo_tokenizer, tmp_path):
    with pytest.raises(DataError, match="pass eval_dataset"):
        make_trainer(demo_tokenizer, tmp_path / "run").evaluate()
