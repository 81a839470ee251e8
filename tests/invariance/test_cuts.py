"""Gradient and statistics do not depend on how a minibatch is cut into passes."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cohort.objective import PRESETS, TokenStatistics, token_statistics
from cohort.policy import Policy, enable_checkpointing, head
from cohort.policy.choose import find_head
from cohort.policy.passes import PlainPasses
from cohort.train import active_part, part_of
from cohort.train.sweep import Shared
from cohort.train.update import backward_passes, minibatch_weights, update_tokens
from tests.conftest import tiny_llama
from tests.invariance.test_update import PRESETS_WITH_KL
from tests.train.updates import DOUBLE, batch_for, context_for, gradient, logps_of, segments_of, shifted_policy

OBJECTIVES = [
    PRESETS["grpo"],
    PRESETS["grpo"].replace(beta=0.0),
    PRESETS["dapo"],
    PRESETS["default"].replace(beta=0.1, kl={"estimator": "full"}),
    PRESETS["grpo"].replace(top_entropy=0.4, denominator="after_masks", aggregation="token_mean"),
    PRESETS["gspo"],
    PRESETS["grpo"].replace(truncated="mask", count_empty=False),
    *(row for row in PRESETS_WITH_KL if row.name in {"cispo", "dr_grpo"}),
]


@functools.cache
def policy_of(shared, checkpointing):
    """A policy with the same weights in each combination."""
    policy = Policy(tiny_llama().double(), DOUBLE)
    if not shared:
        policy.__dict__["passes"] = PlainPasses(policy, find_head(policy))
    assert policy.passes.shared == shared
    if checkpointing:
        enable_checkpointing(policy.model)
    return policy


@functools.cache
def case(index):
    """An objective, a batch with two groups of equal prompts and a prompt of one token, a reference if it is needed, and
    the weight of the entropy bonus. Where it is 0, sequences without an advantage are left out."""
    objective = OBJECTIVES[index]
    batch = batch_for(policy_of(True, False), objective)
    assert min(map(len, batch.prompt_ids)) == 1
    batch = dataclasses.replace(batch, prompt_ids=(*batch.prompt_ids[:2], batch.prompt_ids[0], batch.prompt_ids[3]))
    reference = shifted_policy() if objective.beta and objective.kl.estimator == "full" else None
    return objective, batch, reference, 0.01 if index % 2 else 0.0


@functools.cache
def uncut(index, penalty):
    """Gradient and statistics of an update in one pass."""
    objective, batch, reference, bonus = case(index)
    more = {"temperature": 0.9, "penalty": penalty, "reference": reference, "entropy_coefficient": bonus}
    return gradient(policy_of(True, False), batch, objective, 100_000, **more)


def in_shards(policy, order, shards, budget, index, penalty):
    """The sum of the gradients of several shards, as with several machines, and the statistics of all of them."""
    objective, batch, reference, bonus = case(index)
    context = context_for(policy, objective, budget, temperature=0.9, penalty=penalty, reference=reference)
    minibatch = part_of(batch, order)
    weights = minibatch_weights(context, batch, minibatch, bonus)
    active = active_part(batch, minibatch, objective, bonus)
    weights = weights.at(active.positions_N)
    idle_tokens = minibatch.num_tokens - active.num_tokens
    statistics = TokenStatistics.of_idle(idle_tokens, 0, minibatch.num_sequences - active.num_sequences)
    policy.model.zero_grad()
    forwards = []
    for i in range(shards):
        bounds = (i * active.num_sequences // shards, (i + 1) * active.num_sequences // shards)
        shard = active.select(torch.arange(*bounds))
        for forward in backward_passes(context, batch, Shared((shard,), shard, 1.0), weights.at(shard.positions_N)):
            forwards.append(dataclasses.replace(forward, positions_N=shard.positions_N[forward.positions_N]))
    statistics = token_statistics(objective, update_tokens(batch, active, weights, forwards)) + statistics
    return [p.grad.clone() for p in policy.model.parameters()], statistics


def check(index, order, budget, shared, checkpointing, chunk, shards, penalty):
    expected, result = uncut(index, penalty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_TOKENS", chunk)
        got, statistics = in_shards(policy_of(shared, checkpointing), order, shards, budget, index, penalty)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)  # float64, sums in another order
    assert max(float(grad.abs().max()) for grad in got) > 1e-3
    assert statistics.sums == pytest.approx(result.statistics.sums, rel=1e-9, abs=1e-11)
    assert statistics.maxima == pytest.approx(result.statistics.maxima, rel=1e-9, abs=1e-12)
    assert statistics.values.keys() == result.statistics.values.keys()
    for name, values in statistics.values.items():
        expected_values = result.statistics.values[name].sort().values
        torch.testing.assert_close(values.sort().values, expected_values, rtol=1e-9, atol=1e-11, msg=name)


CUTS = {
    "index": st.integers(0, len(OBJECTIVES) - 1),
    "order": st.permutations(range(12)),
    "budget": st.sampled_from([1, 3, 8, 13, 21, 40, 100, 1000]),
    "shared": st.booleans(),
    "checkpointing": st.booleans(),
    "chunk": st.sampled_from([1, 2, 5, 512]),
    "shards": st.sampled_from([1, 2, 3, 5]),
    "penalty": st.sampled_from([1.0, 1.3]),
}
IN_ORDER = list(range(12))


@given(**CUTS)
@settings(max_examples=2, deadline=None, derandomize=True)
@example(0, IN_ORDER, 1, True, True, 1, 1, 1.0)
@example(3, IN_ORDER, 8, False, False, 5, 2, 1.3)
@example(4, IN_ORDER[::-1], 13, True, False, 2, 3, 1.0)
def test_no_cut_changes_the_gradient_or_the_statistics(
    index, order, budget, shared, checkpointing, chunk, shards, penalty
):
    check(index, order, budget, shared, checkpointing, chunk, shards, penalty)


@pytest.mark.slow
@given(**CUTS)
@settings(max_examples=600, deadline=None)
def test_no_cut_changes_the_gradient_or_the_statistics_at_length(
    index, order, budget, shared, checkpointing, chunk, shards, penalty
):
    check(index, order, budget, shared, checkpointing, chunk, shards, penalty)


@pytest.mark.parametrize(("budget", "shared"), [(1, True), (13, False), (1000, True)])
def test_log_probs_of_a_part_are_in_the_order_of_the_batch(budget, shared):
    _, batch, *_ = case(0)
    policy, more = policy_of(shared, False), {"temperature": 0.9, "penalty": 1.3}
    prompts, ids = zip(*segments_of(batch), strict=True)
    with torch.no_grad():
        expected_N = policy.logps(prompts, ids, 0.9, repetition_penalty=1.3).logps_N
    got_N = logps_of(policy, batch, part_of(batch, [7, 2, 11, 0, 5, 9, 1, 3, 10, 4, 8, 6]), budget, **more)
    assert not got_N.requires_grad
    torch.testing.assert_close(got_N, expected_N, rtol=0, atol=1e-12)
    some_N = logps_of(policy, batch, part_of(batch, [8, 3]), budget, **more)
    asked_N = torch.isin(batch.sequence_N, torch.tensor([3, 8]))
    torch.testing.assert_close(some_N[asked_N], expected_N[asked_N], rtol=0, atol=1e-12)
    assert some_N[~asked_N].isnan().all()
