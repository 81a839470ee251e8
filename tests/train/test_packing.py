"""How a batch is cut: every completion once, within the budget, prompts once; and that no way of cutting it changes the
gradient or the statistics."""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cohort.config import OptimConfig
from cohort.objective import PRESETS, TokenStatistics, token_statistics
from cohort.policy import Policy, Precision, enable_checkpointing, head
from cohort.policy.choose import find_head
from cohort.policy.passes import PlainPasses
from cohort.train import Optimizer, packs, policy_logps, select, update
from cohort.train.batch import token_indices
from cohort.train.packing import microbatches, working_sequences
from cohort.train.update import backward_passes, in_minibatch_order, minibatch_weights
from tests.conftest import tiny_llama
from tests.invariance.test_update import PRESETS_WITH_KL, batch_for, shifted_policy
from tests.train.test_batch import make_batch

DOUBLE = Precision(torch.float64, torch.float64)

# The cuts -----------------------------------------------------------------------------------------------------------

groups = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 9), min_size=2, max_size=4)), min_size=1, max_size=8
)


def batch_of(drawn):
    """Groups of (prompt length, completion lengths); prompts of one length are equal prompts."""
    lengths = [of for _, of in drawn]
    rewards = [float(i % 2) for i in range(sum(map(len, lengths)))]
    return make_batch(lengths, rewards, prompt_lengths=[length for length, _ in drawn])


def sizes(batch, sequences):
    return [len(batch.completion_ids[s]) for s in sequences]


@given(groups, st.integers(1, 60))
@settings(deadline=None)
def test_shared_packs(drawn, budget):
    batch = batch_of(drawn)
    found = packs(batch, budget)
    cuts = [cut for pack in found for cut in pack.microbatches]
    assert sorted(itertools.chain(*cuts)) == list(range(batch.num_sequences))
    every_prompt = [prompt for pack in found for prompt in pack.prompt_ids]
    assert every_prompt == list(dict.fromkeys(batch.prompt_ids))  # each once, equal ones together
    for pack in found:
        assert len(pack.prompt_ids) == 1 or sum(map(len, pack.prompt_ids)) <= budget
        prompts = [batch.prompt_ids[s] for cut in pack.microbatches for s in cut]
        assert set(prompts) == set(pack.prompt_ids)
        assert [prompt for prompt, _ in itertools.groupby(prompts)] == list(pack.prompt_ids)  # neighbours
        for cut in pack.microbatches:
            assert len(cut) == 1 or sum(sizes(batch, cut)) <= budget


@given(groups, st.integers(1, 60))
@settings(deadline=None)
def test_packs_of_whole_rows(drawn, budget):
    batch = batch_of(drawn)
    (pack,) = packs(batch, budget, shared=False)
    assert sorted(itertools.chain(*pack.microbatches)) == list(range(batch.num_sequences))
    assert pack.prompt_ids == tuple(dict.fromkeys(batch.prompt_ids))
    for cut in pack.microbatches:
        longest = max(len(batch.prompt_ids[s]) + len(batch.completion_ids[s]) for s in cut)
        assert len(cut) == 1 or len(cut) * longest <= budget


@given(groups, st.integers(1, 60))
@settings(deadline=None)
def test_microbatches_are_as_few_as_can_be_and_the_largest_as_small(drawn, budget):
    """Beside every way of cutting the same completions in the same order, tried out from the back."""
    batch = batch_of(drawn)
    for pack in packs(batch, budget):
        lengths = sizes(batch, itertools.chain(*pack.microbatches))

        @functools.cache
        def best(first, lengths=tuple(lengths)):
            """(parts, tokens of the largest) of what is left from one completion on."""
            if first == len(lengths):
                return 0, 0
            found = []
            for stop in range(first + 1, len(lengths) + 1):
                size = sum(lengths[first:stop])
                if stop == first + 1 or size <= budget:
                    parts, largest = best(stop)
                    found.append((parts + 1, max(largest, size)))
            return min(found)

        assert len(pack.microbatches) == best(0)[0]
        if max(lengths) <= budget:
            assert max(sum(sizes(batch, cut)) for cut in pack.microbatches) == best(0)[1]


def test_packs_by_hand():
    batch = make_batch([[3, 2], [1, 2], [4, 4]], [1.0, 0.0] * 3, prompt_lengths=[5, 2, 4])
    first, second = packs(batch, 8)
    assert first.prompt_ids == ((1,) * 5, (1,) * 2)
    assert first.microbatches == ((0, 1, 2, 3),)
    assert second.prompt_ids == ((1,) * 4,)
    assert second.microbatches == ((4, 5),)
    # Rows of 8, 7, 3, 4, 8 and 8 tokens, longest first: two of 8 are 16 tokens with padding, 8 and 7 are too.
    (pack,) = packs(batch, 16, shared=False)
    assert pack.microbatches == ((0, 4), (5, 1), (3, 2))


def test_microbatches_are_about_equal():
    batch = make_batch([[10] * 10], [1.0, 0.0] * 5)
    (pack,) = packs(batch, 60)
    assert [sum(sizes(batch, cut)) for cut in pack.microbatches] == [50, 50]  # and not 60 and 40
    (pack,) = packs(batch, 40)
    assert len(pack.microbatches) == 3


def test_what_is_longer_than_the_budget_stands_alone():
    batch = make_batch([[9, 1, 1], [2, 2, 12]], [1.0, 0.0] * 3, prompt_lengths=[30, 3])
    first, second = packs(batch, 5)
    assert (first.microbatches, second.microbatches) == (((0,), (1, 2)), ((3, 4), (5,)))
    (pack,) = packs(batch, 5, shared=False)
    assert sorted(pack.microbatches) == [(s,) for s in range(6)]


def test_a_batch_of_nothing_has_no_packs():
    batch = make_batch([[3, 2]], [1.0, 0.0])
    assert packs(select(batch, []), 10) == packs(select(batch, []), 10, shared=False) == []


def test_microbatches_know_their_tokens_places():
    batch = make_batch([[3, 2], [1, 2]], [1.0, 0.0, 1.0, 0.0], prompt_lengths=[2, 2])
    (pack,) = packs(batch, 4)
    places = []
    for places_N, micro in microbatches(batch, pack):
        assert torch.equal(batch.sampler_logps_N[places_N], micro.sampler_logps_N)
        places += places_N.tolist()
    assert sorted(places) == list(range(8))


# What a cut may not change ----------------------------------------------------------------------------------------------

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
    """The same weights each time."""
    policy = Policy(tiny_llama().double(), DOUBLE)
    if not shared:
        policy.__dict__["passes"] = PlainPasses(policy, find_head(policy))
    assert policy.passes.shared == shared
    if checkpointing:
        enable_checkpointing(policy.model)
    return policy


@functools.cache
def case(index, penalty):
    """A batch, and what else its update takes. Where an objective wants no other, the entropy bonus is off, so that
    completions without an advantage are left out."""
    objective = OBJECTIVES[index]
    batch = batch_for(policy_of(True, False), objective)
    batch = dataclasses.replace(batch, repetition_penalty=penalty)
    # Two groups of equal prompts, and a prompt of one token.
    assert min(map(len, batch.prompt_ids)) == 1
    prompts = tuple(batch.prompt_ids[0] if s in range(6, 9) else prompt for s, prompt in enumerate(batch.prompt_ids))
    batch = dataclasses.replace(batch, prompt_ids=prompts)
    reference = shifted_policy() if objective.beta and objective.kl.estimator == "full" else None
    return objective, batch, reference, 0.01 if index % 2 else 0.0


@functools.cache
def whole(index, penalty):
    """The gradient and the statistics of the real update, all at once. A learning rate of 0 leaves the weights."""
    objective, batch, reference, bonus = case(index, penalty)
    policy = policy_of(True, False)
    optimizer = Optimizer(policy.model, OptimConfig(learning_rate=0.0, max_grad_norm=1e9), 1)
    result = update(policy, optimizer, batch, objective, 0.9, 100_000, reference, bonus)
    return [p.grad.clone() for p in policy.model.parameters()], result


def in_shards(policy, batch, shards, budget, index, penalty):
    """The gradients of shards added up in the parameters, as several machines would, and the statistics of all."""
    objective, _, reference, bonus = case(index, penalty)
    weights = minibatch_weights(policy, batch, objective, 0.9, budget)
    working = working_sequences(batch, objective, bonus)
    idle = batch.num_tokens - len(token_indices(batch, working))
    batch, weights = select(batch, working), weights.at(token_indices(batch, working))
    policy.model.zero_grad()
    places, forwards = [], []
    for i in range(shards):
        sequences = range(batch.num_sequences)[i * len(working) // shards : (i + 1) * len(working) // shards]
        if not sequences:
            continue
        tokens_N = token_indices(batch, sequences)
        part = select(batch, sequences)
        its_places, its_forwards = backward_passes(
            policy, part, weights.at(tokens_N), objective, 0.9, budget, reference, bonus
        )
        places += [tokens_N[place_N] for place_N in its_places]
        forwards += its_forwards
    tokens = in_minibatch_order(batch, weights, places, forwards)
    statistics = token_statistics(objective, tokens) + TokenStatistics.of_idle(idle)
    return [p.grad.clone() for p in policy.model.parameters()], statistics


def check(index, order, budget, shared, checkpointing, chunk, shards, penalty):
    _, batch, *_ = case(index, penalty)
    expected, result = whole(index, penalty)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_TOKENS", chunk)
        got, statistics = in_shards(
            policy_of(shared, checkpointing), select(batch, order), shards, budget, index, penalty
        )
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
@settings(max_examples=25, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("budget", [1, 10, 1000])
def test_log_probs_without_gradient(monkeypatch, budget, shared):
    """Of a shuffled batch with equal prompts apart; NaN where none were asked for."""
    _, batch, *_ = case(0, 1.3)
    batch = select(batch, [7, 2, 11, 0, 5, 9, 1, 3, 10, 4, 8, 6])
    policy = policy_of(shared, False)
    with torch.no_grad():
        expected_N = policy.logps(batch.prompt_ids, batch.completion_ids, 0.9, repetition_penalty=1.3).logps_N
    got_N = policy_logps(policy, batch, 0.9, budget)
    assert not got_N.requires_grad
    torch.testing.assert_close(got_N, expected_N, rtol=0, atol=1e-12)
    some_N = policy_logps(policy, batch, 0.9, budget, sequences=[3, 8])
    asked_N = torch.isin(batch.sequence_N, torch.tensor([3, 8]))
    torch.testing.assert_close(some_N[asked_N], expected_N[asked_N], rtol=0, atol=1e-12)
    assert some_N[~asked_N].isnan().all()
