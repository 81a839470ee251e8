"""Importance ratios: the levels by hand, the hold on huge log-ratios."""

import math

import pytest
import torch

from cohort.objective import importance_ratio
from cohort.objective.ratio import exp_clamped, leveled_log_ratio
from tests.conftest import each

GAPS = torch.tensor([0.2, 1.0, 0.4, -0.3, 0.6], dtype=torch.float64)
SEQUENCE = torch.tensor([0, 1, 0, 1, 0])
LEVELS = {
    "token": [0.2, 1.0, 0.4, -0.3, 0.6],
    "sequence_mean": [0.4, 0.35, 0.4, 0.35, 0.4],
    "sequence_mean_token": [0.4, 0.35, 0.4, 0.35, 0.4],
    "sequence_product": [1.2, 0.7, 1.2, 0.7, 1.2],
    "prefix_product": [0.2, 1.0, 0.6, 0.7, 1.2],
}


@each("level", LEVELS)
def test_levels_by_hand(level):
    got = leveled_log_ratio(GAPS, level, SEQUENCE)
    torch.testing.assert_close(got, torch.tensor(LEVELS[level], dtype=torch.float64), rtol=1e-14, atol=1e-15)


def test_a_level_that_is_unknown_or_lacks_its_sequences():
    with pytest.raises(ValueError, match="unknown ratio level"):
        leveled_log_ratio(GAPS, "sentence", SEQUENCE)
    for level in set(LEVELS) - {"token"}:
        with pytest.raises(ValueError, match="sequence_N"):
            leveled_log_ratio(GAPS, level)


def test_a_huge_log_ratio_is_held_and_stays_finite():
    ratio = importance_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)
    infinite = exp_clamped(torch.tensor([math.inf, -math.inf], dtype=torch.float64))
    assert infinite.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-12)
