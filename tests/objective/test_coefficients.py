"""The coefficient form against autograd of the paper's loss, written out independently here."""

import pytest
import torch

from cohort.objective import PRESETS, coefficients, group_advantages, token_sums, token_weights

LENGTHS = [3, 1, 5, 2]
SEQUENCE = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
PAPER = PRESETS["grpo"]


def random_logps(seed):
    generator = torch.Generator().manual_seed(seed)
    logps = -torch.rand(sum(LENGTHS), dtype=torch.float64, generator=generator) * 3
    old = logps + 0.3 * torch.randn(logps.shape, dtype=torch.float64, generator=generator)
    ref = logps + 0.5 * torch.randn(logps.shape, dtype=torch.float64, generator=generator)
    advantages = torch.randn(4, dtype=torch.float64, generator=generator)
    return logps, old, ref, advantages


def paper_objective(logps, old, ref, advantages, *, epsilon, beta):
    """Equation 3 of DeepSeekMath with equation 4's KL, by loops over completions and tokens."""
    total, start = 0.0, 0
    for i, length in enumerate(LENGTHS):
        inner = 0.0
        for t in range(start, start + length):
            ratio = torch.exp(logps[t] - old[t])
            clipped = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
            gap = ref[t] - logps[t]
            kl = torch.exp(gap) - gap - 1
            inner = inner + torch.minimum(ratio * advantages[i], clipped * advantages[i]) - beta * kl
        total = total + inner / length
        start += length
    return total / len(LENGTHS)


@pytest.mark.parametrize("seed", range(8))
def test_coefficients_are_the_gradient_of_the_papers_objective(seed):
    logps, old, ref, advantages = random_logps(seed)
    leaf = logps.clone().requires_grad_()
    paper_objective(leaf, old, ref, advantages, epsilon=0.2, beta=0.04).backward()
    weights = token_weights(SEQUENCE, 4)
    got = coefficients(PAPER, logps, advantages[SEQUENCE], weights, old_logps_N=old, ref_logps_N=ref)
    torch.testing.assert_close(got.total_N, leaf.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", range(4))
def test_logged_values_are_the_papers_objective(seed):
    logps, old, ref, advantages = random_logps(seed)
    exact = paper_objective(logps, old, ref, advantages, epsilon=0.2, beta=0.04)
    sums = token_sums(
        PAPER,
        logps,
        advantages[SEQUENCE],
        token_weights(SEQUENCE, 4),
        torch.zeros_like(logps),
        logps,
        old_logps_N=old,
        ref_logps_N=ref,
    )
    assert sums["policy_value"] - 0.04 * sums["kl_value"] == pytest.approx(exact.item(), rel=1e-12)


def test_without_an_old_policy_the_ratio_is_one():
    logps, _, _, advantages = random_logps(0)
    weights = token_weights(SEQUENCE, 4)
    plain = PAPER.replace(beta=0.0)
    by_identity = coefficients(plain, logps, advantages[SEQUENCE], weights)
    spelled_out = coefficients(plain, logps, advantages[SEQUENCE], weights, old_logps_N=logps)
    assert by_identity.total_N.tolist() == spelled_out.total_N.tolist()
    # c = A / (B |o|)
    torch.testing.assert_close(by_identity.total_N, advantages[SEQUENCE] * weights, rtol=0, atol=0)


def test_first_update_value_is_zero_and_gradient_is_not():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    advantages = group_advantages(rewards, torch.zeros(4, dtype=torch.long))
    logps, _, _, _ = random_logps(0)
    weights = token_weights(SEQUENCE, 4)
    plain = PAPER.replace(beta=0.0)
    c = coefficients(plain, logps, advantages[SEQUENCE], weights).total_N
    sums = token_sums(plain, logps, advantages[SEQUENCE], weights, torch.zeros_like(logps), logps)
    assert sums["policy_value"] == pytest.approx(0.0, abs=1e-15)
    assert c.abs().min() > 0.04  # (1/2) / sqrt(1/3) / (4 * 5) for the longest completion


def test_zero_advantage_means_zero_policy_coefficient():
    logps, old, ref, _ = random_logps(1)
    got = coefficients(
        PAPER, logps, torch.zeros_like(logps), token_weights(SEQUENCE, 4), old_logps_N=old, ref_logps_N=ref
    )
    assert got.policy_N.abs().max() == 0
    assert got.kl_N.abs().max() > 0


def test_coefficients_are_float32_or_better():
    logps, old, ref, advantages = random_logps(2)
    half = coefficients(
        PAPER, logps.bfloat16(), advantages[SEQUENCE], token_weights(SEQUENCE, 4), old_logps_N=old, ref_logps_N=ref
    )
    assert half.total_N.dtype == torch.float32
    assert not half.total_N.requires_grad


def test_reference_log_probs_must_match_beta():
    logps, _, ref, advantages = random_logps(3)
    weights = token_weights(SEQUENCE, 4)
    with pytest.raises(ValueError, match="beta"):
        coefficients(PAPER, logps, advantages[SEQUENCE], weights)
    with pytest.raises(ValueError, match="beta"):
        coefficients(PAPER.replace(beta=0.0), logps, advantages[SEQUENCE], weights, ref_logps_N=ref)


def test_token_weights_sum_to_one_and_an_empty_completion_counts():
    assert token_weights(SEQUENCE, 4).sum().item() == pytest.approx(1.0, rel=1e-15)
    assert token_weights(SEQUENCE, 5).sum().item() == pytest.approx(0.8, rel=1e-15)
    with pytest.raises(ValueError, match="aggregation"):
        token_weights(SEQUENCE, 4, aggregation="token_mean")


def test_clip_shares_are_counted_by_side():
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    old = torch.zeros(4, dtype=torch.float64)
    logps = torch.log(torch.tensor([1.5, 0.5, 1.1, 1.5], dtype=torch.float64))
    weights = torch.full((4,), 0.25)
    sums = token_sums(PAPER.replace(beta=0.0), logps, advantages, weights, old, old, old_logps_N=old)
    assert (sums["clip_high"], sums["clip_low"], sums["tokens"]) == (1, 1, 4)


def test_description_states_the_numbers():
    text = PAPER.describe()
    assert "clip(r, 0.8, 1.2)" in text
    assert "beta = 0.04" in text
    assert "no reference" in PAPER.replace(beta=0.0).describe()
