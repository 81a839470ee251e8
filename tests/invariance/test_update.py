"""One update: its gradient against objectives written out and differentiated by autograd, and what must not change it."""

import dataclasses
import math

import pytest
import torch

from cohort.objective import PRESETS
from cohort.rewards.runner import Scores
from cohort.train import NonFinite, UpdateResult, assign_advantages, lay_out, update
from cohort.train.metrics import term_norms
from tests.policy.plain import plain_rows
from tests.train.updates import (
    CPU,
    all_sequences,
    batch_for,
    context_for,
    gradient,
    logps_of,
    rollout,
    segments_of,
    shifted_policy,
)

PAPER = PRESETS["grpo"]


def test_old_log_probs_equal_to_the_current_ones_may_be_left_out(float64_policy):
    """As in a rollout that is used for one update. Otherwise they are those of another policy."""
    batch = batch_for(float64_policy, PAPER)
    current = dataclasses.replace(batch, old_logps_N=logps_of(float64_policy, batch))
    left_out = dataclasses.replace(batch, old_logps_N=None)
    (expected, _), (got, _) = (gradient(float64_policy, one, PAPER, 40) for one in (current, left_out))
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def with_kl(objective):
    """The preset with a KL term, in the place that the preset has for it."""
    length = {"aggregation_length": 8} if objective.aggregation == "constant" else {}
    return objective.replace(beta=objective.beta or 0.04, **length)


DISTINCT = ("default", "dr_grpo", "dapo", "gspo", "gmpo", "cispo", "dppo_kl", "rloo", "reinforce_pp")
"""Presets that differ in ratio, trust region, aggregation or KL. tests/objective/test_invariance.py has all of them."""

PRESETS_WITH_KL = [with_kl(PRESETS[name]) for name in DISTINCT] + [
    PAPER,
    PRESETS["gfpo"].replace(group_filter={"k": 2}),
    PAPER.replace(top_entropy=0.4),
    PAPER.replace(top_entropy=0.4, denominator="after_masks", aggregation="token_mean"),
    PAPER.replace(truncated="mask", count_empty=False),
    PAPER.replace(kl={"estimator": "full", "direction": "reverse"}),
    PAPER.replace(kl={"estimator": "full", "top_k": 3}),
    PAPER.replace(kl={"estimator": "full", "correction": "prefix_product"}),
    PAPER.replace(mismatch=[{"rule": "weight", "level": "sequence", "mode": "mask", "low": 0.9, "high": 1.1}]),
]


@pytest.mark.parametrize("objective", PRESETS_WITH_KL, ids=lambda o: o.identity)
def test_microbatches_do_not_change_the_gradient(float64_policy, objective):
    batch = batch_for(float64_policy, objective)
    more = {"reference": shifted_policy(), "entropy_coefficient": 0.01}
    uncut, uncut_result = gradient(float64_policy, batch, objective, 100_000, **more)
    parts, parts_result = gradient(float64_policy, batch, objective, 17, **more)
    for one, other in zip(uncut, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert uncut_result.grad_norm > 1e-3
    assert parts_result.statistics.sums == pytest.approx(uncut_result.statistics.sums, rel=1e-9, abs=1e-12)


def test_a_kl_and_an_entropy_over_the_vocabulary_equal_autograd(float64_policy):
    """Both terms against a plain forward pass of each row, at a temperature other than 1."""
    temperature, beta, bonus = 0.7, 0.3, 0.05
    objective = PRESETS["default"].replace(
        beta=beta, trust_region="none", kl={"estimator": "full", "correction": "none"}, aggregation="token_mean"
    )
    batch, reference = batch_for(float64_policy, objective), shifted_policy()
    batch = dataclasses.replace(batch, advantages_N=torch.zeros_like(batch.advantages_N))
    more = {"temperature": temperature, "reference": reference, "entropy_coefficient": bonus}
    got, _ = gradient(float64_policy, batch, objective, 20, **more)
    float64_policy.model.zero_grad()
    terms = []
    for prompt, completion in segments_of(batch):
        rows = (plain_rows(policy, prompt, completion) for policy in (float64_policy, reference))
        p, q = (torch.log_softmax(logits / temperature, -1) for logits in rows)
        terms.append(beta * (p.exp() * (p - q)).sum(-1) + bonus * (p.exp() * p).sum(-1))
    torch.cat(terms).mean().backward()
    for one, parameter in zip(got, float64_policy.model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-10)


def test_the_gradient_is_that_of_the_paper(float64_policy):
    """Equation 3 with k3, by autograd through a plain forward pass of each row."""
    batch = batch_for(float64_policy, PAPER)
    got, result = gradient(float64_policy, batch, PAPER, 30)
    model, total, start = float64_policy.model, 0.0, 0
    model.zero_grad()
    for prompt, completion in segments_of(batch):
        log_probs = torch.log_softmax(plain_rows(float64_policy, prompt, completion), -1)
        inner = 0.0
        for t, token in enumerate(completion):
            logp = log_probs[t, token]
            ratio = torch.exp(logp - batch.old_logps_N[start + t])
            gap = batch.ref_logps_N[start + t] - logp
            a = batch.advantages_N[start + t]
            surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
            inner = inner + surrogate - 0.04 * (torch.exp(gap) - gap - 1)
        total = total + inner / len(completion)
        start += len(completion)
    objective = total / batch.num_sequences
    (-objective).backward()
    for one, parameter in zip(got, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=0, atol=1e-10)
    sums = result.statistics.sums
    assert sums["policy_value"] - 0.04 * sums["kl_value"] == pytest.approx(objective.item(), rel=1e-9)


def test_a_rollout_without_signal_makes_no_step(float64_policy):
    groups, _ = rollout()
    equal = torch.full((12,), 0.5, dtype=torch.float64)
    plain = PAPER.replace(beta=0.0)
    scores = Scores(equal, equal[:, None], ("r",))
    batch = assign_advantages(lay_out(groups, CPU), scores, plain, max_completion_length=8)
    before = [p.clone() for p in float64_policy.model.parameters()]
    result = update(context_for(float64_policy, plain, 50, learning_rate=0.1), batch, all_sequences(batch))
    assert isinstance(result, UpdateResult)
    assert result.grad_norm == 0.0
    assert float64_policy.version == 0  # no optimizer step was made
    for old, new in zip(before, float64_policy.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_tokens_and_sequences_without_a_pass_count(float64_policy):
    """With a KL every sequence has a pass, without one a truncated sequence has none: the shares are the same."""
    counted = ("cause_masked", "cause_no_advantage", "all_tokens", "all_sequences")
    shares = []
    for beta in (0.0, 0.1):
        objective = PRESETS["default"].replace(truncated="mask", beta=beta)
        batch = batch_for(float64_policy, objective, truncated=(1, 3))
        _, result = gradient(float64_policy, batch, objective, 100)
        shares.append([result.statistics.sums[name] for name in counted])
    assert shares[0] == shares[1]
    assert shares[0][0] == batch.lengths_S[[1, 3]].sum()


def test_a_gradient_that_is_not_finite_makes_no_step(float64_policy):
    batch = batch_for(float64_policy, PAPER)
    float64_policy.model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    before = [p.clone() for p in float64_policy.model.parameters()]
    outcome = update(context_for(float64_policy, PAPER, 50, learning_rate=0.1), batch, all_sequences(batch))
    assert isinstance(outcome, NonFinite)
    assert "norm is inf" in outcome.message
    for old, new in zip(before, float64_policy.model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_term_norms_are_those_of_updates_with_one_term(float64_policy):
    """The gradients of policy, KL and entropy bonus add up to that of the update."""
    objective = PAPER.replace(beta=0.3)
    batch, more = batch_for(float64_policy, objective), {"entropy_coefficient": 0.05}
    norms = term_norms(context_for(float64_policy, objective, 17), batch, all_sequences(batch), **more)
    together, result = gradient(float64_policy, batch, objective, 17, **more)
    only = {
        "policy": (objective.replace(beta=0.0), dataclasses.replace(batch, ref_logps_N=None), {}),
        "kl": (objective, dataclasses.replace(batch, advantages_N=torch.zeros_like(batch.advantages_N)), {}),
    }
    vectors = {}
    for name, (term, its_batch, its_more) in only.items():
        parts, result_of_term = gradient(float64_policy, its_batch, term, 17, **its_more)
        assert norms[f"gradient/{name}_norm"] == pytest.approx(result_of_term.grad_norm, rel=1e-9)
        vectors[name] = torch.cat([part.flatten() for part in parts])
    rest = torch.cat([part.flatten() for part in together]) - vectors["policy"] - vectors["kl"]
    assert norms["gradient/entropy_norm"] == pytest.approx(float(rest.norm()), rel=1e-6)
    cosine = torch.cosine_similarity(vectors["policy"], vectors["kl"], dim=0)
    assert norms["gradient/exact_cosine"] == pytest.approx(float(cosine), rel=1e-9)
    assert result.grad_norm > 0
