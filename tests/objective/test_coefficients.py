"""The coefficients' own contract: types, what is refused, causes, and the objective's value on a first update."""

import pytest
import torch

from cohort.objective import (
    PRESETS,
    Cause,
    UpdateTokens,
    coefficients,
    outcome_advantages,
    token_statistics,
    token_weights,
)
from cohort.presets import describe
from cohort.presets.parts import GroupStd

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


def statistics_of(objective, logps, advantages, weights, **others):
    """The log's sums for a batch."""
    got = coefficients(objective, logps, advantages, weights, **others)
    tokens = UpdateTokens(
        logps_N=logps,
        entropy_N=torch.zeros_like(logps),
        collision_N=torch.zeros_like(logps),
        advantages_N=advantages,
        weights_N=weights,
        base_weights_N=weights,
        sequence_N=SEQUENCE[: len(logps)],
        coefficients=got,
        sampler_logps_N=logps,
        old_logps_N=others.get("old_logps_N"),
        ref_logps_N=others.get("ref_logps_N"),
    )
    return token_statistics(objective, tokens).sums


@pytest.mark.parametrize("seed", range(2))
def test_coefficients_are_the_gradient_of_the_papers_objective(seed):
    logps, old, ref, advantages = random_logps(seed)
    leaf = logps.clone().requires_grad_()
    paper_objective(leaf, old, ref, advantages, epsilon=0.2, beta=0.04).backward()
    weights = token_weights(SEQUENCE, 4)
    got = coefficients(PAPER, logps, advantages[SEQUENCE], weights, old_logps_N=old, ref_logps_N=ref)
    torch.testing.assert_close(got.total_N, leaf.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("seed", range(1))
def test_logged_values_are_the_papers_objective(seed):
    logps, old, ref, advantages = random_logps(seed)
    exact = paper_objective(logps, old, ref, advantages, epsilon=0.2, beta=0.04)
    weights = token_weights(SEQUENCE, 4)
    sums = statistics_of(PAPER, logps, advantages[SEQUENCE], weights, old_logps_N=old, ref_logps_N=ref)
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
    advantages = outcome_advantages(rewards, torch.zeros(4, dtype=torch.long), scale=GroupStd())
    logps, _, _, _ = random_logps(0)
    weights = token_weights(SEQUENCE, 4)
    plain = PAPER.replace(beta=0.0)
    c = coefficients(plain, logps, advantages[SEQUENCE], weights).total_N
    sums = statistics_of(plain, logps, advantages[SEQUENCE], weights)
    assert sums["policy_value"] == pytest.approx(0.0, abs=1e-15)
    assert c.abs().min() > 0.04  # (1/2) / sqrt(1/3) / (4 * 5) for the longest completion


def test_zero_advantage_means_zero_policy_coefficient():
    logps, old, ref, _ = random_logps(1)
    got = coefficients(
        PAPER, logps, torch.zeros_like(logps), token_weights(SEQUENCE, 4), old_logps_N=old, ref_logps_N=ref
    )
    assert got.policy_N.abs().max() == 0
    assert got.kl_N.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_coefficients_are_float32_or_better(dtype):
    logps, old, ref, advantages = random_logps(2)
    weights = token_weights(SEQUENCE, 4)
    got = coefficients(PAPER, logps.to(dtype), advantages[SEQUENCE], weights, old_logps_N=old, ref_logps_N=ref)
    assert got.total_N.dtype == got.value_N.dtype == got.log_ratio_N.dtype == torch.float32
    exact = coefficients(PAPER, logps, advantages[SEQUENCE], weights, old_logps_N=old, ref_logps_N=ref)
    assert exact.total_N.dtype == torch.float64


def test_coefficients_carry_no_graph():
    logps, old, ref, advantages = random_logps(2)
    leaf = logps.requires_grad_()
    got = coefficients(PAPER, leaf, advantages[SEQUENCE], token_weights(SEQUENCE, 4), old_logps_N=old, ref_logps_N=ref)
    assert not got.total_N.requires_grad
    assert not got.value_N.requires_grad


def test_reference_log_probs_must_match_beta():
    logps, _, ref, advantages = random_logps(3)
    weights = token_weights(SEQUENCE, 4)
    with pytest.raises(ValueError, match="beta"):
        coefficients(PAPER, logps, advantages[SEQUENCE], weights)
    with pytest.raises(ValueError, match="beta"):
        coefficients(PAPER.replace(beta=0.0), logps, advantages[SEQUENCE], weights, ref_logps_N=ref)


@pytest.mark.parametrize(
    "objective",
    [
        PRESETS["vespo"],
        PRESETS["grpo_v32"].replace(ratio_anchor="old", beta=0.0),
        PRESETS["default"].replace(mismatch={"rule": "weight"}),
        PRESETS["default"].replace(kl={"beta": 0.1, "anchor": "sampler"}),
    ],
    ids=["anchor", "off-policy mask", "mismatch", "kl"],
)
def test_a_comparison_with_the_sampler_needs_its_log_probs(objective):
    logps, old, ref, advantages = random_logps(3)
    with pytest.raises(ValueError, match="sampler_logps_N"):
        coefficients(
            objective,
            logps,
            advantages[SEQUENCE],
            token_weights(SEQUENCE, 4),
            sequence_N=SEQUENCE,
            old_logps_N=old,
            ref_logps_N=ref if objective.beta else None,
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio_level": "sequence_mean"},
        {"trust_region": "gmpo", "ratio_level": "sequence_mean"},
        {"trust_region": "fipo"},
        {"mismatch": {"rule": "veto"}},
    ],
    ids=["level", "gmpo", "fipo", "mismatch"],
)
def test_rules_that_know_sequences_need_the_sequences(settings):
    logps, old, _, advantages = random_logps(3)
    objective, weights = PRESETS["default"].replace(**settings), token_weights(SEQUENCE, 4)
    with pytest.raises(ValueError, match="sequence_N"):
        coefficients(objective, logps, advantages[SEQUENCE], weights, old_logps_N=old, sampler_logps_N=old)


def test_clipped_tokens_are_told_apart_by_side():
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    old = torch.zeros(4, dtype=torch.float64)
    logps = torch.log(torch.tensor([1.5, 0.5, 1.1, 1.5], dtype=torch.float64))
    got = coefficients(PAPER.replace(beta=0.0), logps, advantages, torch.full((4,), 0.25), old_logps_N=old)
    assert got.cause_N.tolist() == [Cause.CLIPPED_HIGH, Cause.CLIPPED_LOW, Cause.ACTIVE, Cause.ACTIVE]


def test_description_states_the_numbers():
    text = describe(PAPER)
    assert "clip(r, 0.8, 1.2)" in text
    assert "beta = 0.04" in text
    assert "no reference" in describe(PAPER.replace(beta=0.0))
