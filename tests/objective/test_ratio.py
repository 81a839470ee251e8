"""The clip: its region table, its equality cases, and autograd as the judge of the multiplier."""

import math

import pytest
import torch

from cohort.objective import importance_ratio, ppo_clip_multiplier, ppo_clip_sides, ppo_clip_value

LOW, HIGH = 0.8, 1.28


@pytest.mark.parametrize(
    ("advantage", "ratio", "phi"),
    [
        (1.0, 0.5, 0.5),
        (1.0, 1.0, 1.0),
        (1.0, 1.5, 0.0),
        (-1.0, 0.5, 0.0),
        (-1.0, 1.0, 1.0),
        (-1.0, 1.5, 1.5),
        (-1.0, 40.0, 40.0),
        (0.0, 0.5, 0.5),
        (0.0, 1.5, 1.5),
    ],
)
def test_region_table(advantage, ratio, phi):
    got = ppo_clip_multiplier(torch.tensor([ratio]), torch.tensor([advantage]), LOW, HIGH)
    assert got.item() == pytest.approx(phi)


def test_a_token_on_the_bound_keeps_its_full_gradient():
    ratio, advantages = torch.tensor([0.8, 1.28]), torch.tensor([-1.0, 1.0])
    assert ppo_clip_multiplier(ratio, advantages, LOW, HIGH).tolist() == ratio.tolist()
    low, high = ppo_clip_sides(ratio, advantages, LOW, HIGH)
    assert not low.any()
    assert not high.any()


def test_multiplier_is_the_gradient_of_the_value():
    # d/dlogp of min(r A, clip(r) A) with r = exp(logp - old) equals phi * A, away from the kinks.
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1000, dtype=torch.float64, generator=generator)
    logps = (old + 0.5 * torch.randn(1000, dtype=torch.float64, generator=generator)).requires_grad_()
    advantages = torch.randn(1000, dtype=torch.float64, generator=generator)
    ppo_clip_value(importance_ratio(logps, old), advantages, LOW, HIGH).sum().backward()
    phi = ppo_clip_multiplier(importance_ratio(logps.detach(), old), advantages, LOW, HIGH)
    torch.testing.assert_close(logps.grad, phi * advantages, rtol=1e-12, atol=1e-14)
    assert 0.1 < (phi == 0).double().mean() < 0.9  # both regions were met


def test_the_ratio_of_equal_policies_is_exactly_one():
    logps = torch.randn(100)
    assert importance_ratio(logps, logps).tolist() == [1.0] * 100


def test_a_huge_log_ratio_is_held_and_stays_finite():
    ratio = importance_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert ratio.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)
