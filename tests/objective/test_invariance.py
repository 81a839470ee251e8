"""What must not matter: order, rows, microbatches, group interleaving; and what any finite numbers give."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.objective import PRESETS, Outcomes, token_advantages, token_weights
from tests.conftest import each
from tests.objective.batches import Batch, coefficients_of, random_batch

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
TOKENS = ("logps", "old", "sampler", "ref", "sequence_N")


def with_beta(name):
    return PRESETS[name].replace(beta=0.3)


def reordered(batch: Batch, order_N: torch.Tensor) -> Batch:
    """The same tokens at other places."""
    return dataclasses.replace(batch, **{name: getattr(batch, name)[order_N] for name in TOKENS})


def terms(got):
    return torch.stack([got.policy_N, got.kl_N, got.value_N])


@each("name", PRESETS)
def test_a_sequence_may_lie_in_several_rows(name):
    # Its tokens anywhere on the axis, in their order: a sequence is an id.
    batch, objective = random_batch(1), with_beta(name)
    whole = terms(coefficients_of(objective, batch))
    halves = (
        [tokens[: len(tokens) // 2] for tokens in batch.tokens],
        [tokens[len(tokens) // 2 :] for tokens in batch.tokens],
    )
    order_N = torch.tensor([n for half in halves for tokens in reversed(half) for n in tokens])
    assert (torch.diff(batch.sequence_N[order_N][batch.sequence_N[order_N] == 5].cumsum(0)) > 0).all()
    torch.testing.assert_close(terms(coefficients_of(objective, reordered(batch, order_N))), whole[:, order_N], **CLOSE)


# Advantages ---------------------------------------------------------------------------------------------------------

LENGTHS = (2, 1, 3, 1, 2, 3)
GROUPS = (0, 0, 0, 1, 1, 1)


def rollout(rewards=(1.0, 0.0, 0.5, 3.0, 2.0, 2.5), order=range(6), ids=(0, 1), scale=1.0, shift=0.0):
    """A rollout of two groups of three, its completions in some order, with everything any preset needs."""
    order = list(order)
    generator = torch.Generator().manual_seed(1)
    kls = [torch.rand(n, generator=generator, dtype=torch.float64) for n in LENGTHS]
    rewards_S = torch.tensor([scale * rewards[i] + shift for i in order], dtype=torch.float64)
    return Outcomes(
        rewards_S=rewards_S,
        group_S=torch.tensor([ids[GROUPS[i]] for i in order]),
        sequence_N=torch.arange(6).repeat_interleave(torch.tensor([LENGTHS[i] for i in order])),
        max_length=4,
        by_function_SK=torch.stack([rewards_S, -(rewards_S**2)], dim=1),
        weights_K=torch.tensor([1.0, 0.3]),
        kl_N=torch.cat([kls[i] for i in order]),
    )


def by_completion(advantages_N, order):
    """Each completion's token advantages, by its own number."""
    lengths = [LENGTHS[i] for i in order]
    return dict(zip(order, [part.tolist() for part in advantages_N.split(lengths)], strict=True))


@each("name", PRESETS)
def test_how_groups_are_interleaved_and_numbered_changes_no_advantage(name):
    objective = PRESETS[name].replace(group_filter={"k": 2}) if name == "gfpo" else PRESETS[name]
    plain = by_completion(token_advantages(objective, rollout()), list(range(6)))
    for order, ids in (([0, 3, 1, 4, 2, 5], (0, 1)), ([5, 4, 3, 2, 1, 0], (7, 2))):
        got = by_completion(token_advantages(objective, rollout(order=order, ids=ids)), order)
        for i in range(6):
            assert got[i] == pytest.approx(plain[i], rel=1e-12, abs=1e-14)


SHIFT = {name for name, row in PRESETS.items() if row.baseline != 0.5} - {"maxrl", "gdpo", "mo_grpo"}
"""A constant added to every reward changes nothing. (The made-up second reward of GDPO and MO-GRPO is a square.)"""
FACTOR = {name for name, row in PRESETS.items() if row.scale is not None}
"""A positive factor changes nothing, but for epsilon."""


@each("name", PRESETS)
def test_a_constant_added_to_all_rewards(name):
    plain, got = (token_advantages(PRESETS[name], rollout(shift=shift)) for shift in (0.0, 5.0))
    if name in SHIFT:
        torch.testing.assert_close(got, plain, rtol=1e-11, atol=1e-12)
    else:
        assert (got - plain).abs().max() > 0.01


@each("name", PRESETS)
def test_a_factor_of_all_rewards(name):
    if PRESETS[name].reward_aggregation != "sum_then_normalize":
        return  # see test_advantages: an affine map of each reward
    objective = PRESETS[name].replace(soft_overlong="none")
    if name == "reinforce_pp":
        objective = objective.replace(beta=0.0)  # else the KL in the reward keeps its own size
    plain, got = (token_advantages(objective, rollout(scale=scale)) for scale in (1.0, 4.0))
    if name in FACTOR:
        # epsilon 1e-6 beside a standard deviation of 0.5 or more
        torch.testing.assert_close(got, plain, rtol=3e-6, atol=0)
    else:
        assert (got - plain).abs().max() > 0.1


@each("name", [name for name, row in PRESETS.items() if row.group_relative])
def test_a_group_of_one_has_advantage_zero(name):
    seven, zeros = torch.tensor([7.0]), torch.zeros(2, dtype=torch.long)
    alone = Outcomes(seven, zeros[:1], zeros, 10, by_function_SK=seven[:, None], kl_N=torch.zeros(2))
    assert token_advantages(PRESETS[name], alone).tolist() == [0.0, 0.0]


# Any finite numbers -------------------------------------------------------------------------------------------------

gaps = st.one_of(st.floats(-2, 2), st.floats(-1e4, 1e4))
tokens = st.tuples(st.integers(0, 3), st.floats(-1e4, 0), gaps, gaps, gaps)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(tokens, min_size=1, max_size=10),
    st.lists(st.floats(-100, 100), min_size=4, max_size=4),
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_finite_log_probs_give_finite_coefficients(tokens, advantages, name, dtype):
    sequence, logps, to_old, to_sampler, to_ref = zip(*tokens, strict=True)
    logps = torch.tensor(logps, dtype=dtype)
    batch = Batch(
        logps=logps,
        old=logps - torch.tensor(to_old, dtype=dtype),
        sampler=logps - torch.tensor(to_sampler, dtype=dtype),
        ref=logps - torch.tensor(to_ref, dtype=dtype),
        advantages_S=torch.tensor(advantages, dtype=dtype),
        sequence_N=torch.tensor(sequence),
        group_S=torch.tensor([0, 1, 0, 1]),
    )
    got = coefficients_of(with_beta(name), batch)
    for values in (got.policy_N, got.kl_N, got.value_N):
        assert torch.isfinite(values).all()
        assert values.dtype == dtype
    assert (got.policy_N[batch.advantages_N == 0] == 0).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(-3, 3, width=32)), min_size=2, max_size=9),
    st.sampled_from(sorted(set(PRESETS) - {"maxrl"})),
)
def test_any_finite_rewards_give_finite_advantages(members, name):
    group_S = torch.tensor([g for g, _ in members])
    rewards_S = torch.tensor([r for _, r in members], dtype=torch.float64)
    outcomes = Outcomes(
        rewards_S=rewards_S,
        group_S=group_S,
        sequence_N=torch.arange(len(members)),
        max_length=4,
        by_function_SK=torch.stack([rewards_S, rewards_S.abs()], dim=1),
        weights_K=torch.tensor([1.0, 1.0]),
        kl_N=torch.full((len(members),), 0.1, dtype=torch.float64),
    )
    got = token_advantages(PRESETS[name], outcomes)
    assert torch.isfinite(got).all()
    if PRESETS[name].group_relative and PRESETS[name].beta == 0:
        for gid in set(group_S.tolist()):
            chosen = group_S == gid
            if len(set(rewards_S[chosen].tolist())) == 1 and PRESETS[name].reward_aggregation == "sum_then_normalize":
                assert (got[chosen] == 0).all()


@settings(deadline=None)
@given(st.permutations(range(7)))
def test_weights_go_with_their_tokens(order):
    sequence_N, group_S, order = torch.tensor([0, 0, 0, 1, 2, 2, 2]), torch.tensor([1, 0, 1, 0]), list(order)
    for aggregation, count_empty in itertools.product(("seq_mean_token_mean", "prompt_mean"), (True, False)):
        settings = {"aggregation": aggregation, "group_S": group_S, "count_empty": count_empty}
        moved, plain = (token_weights(ids_N, 4, **settings) for ids_N in (sequence_N[order], sequence_N))
        assert torch.equal(moved, plain[order])
