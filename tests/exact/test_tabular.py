"""The harness itself: the tree is what it says, and one flat batch of all groups is the groups one at a time."""

import pytest
import torch

from cohort.objective import PRESETS, Outcomes, coefficients, token_advantages, token_weights
from tests.conftest import each

from .tabular import PER_GROUP, assert_same, gradient, groups, tree


def test_the_tree_of_three_tokens_has_15_sequences_and_21_parameters():
    small = tree(3, 3)
    assert (len(small.sequences), small.logits(0).numel()) == (15, 21)
    assert small.sequences[:3] == [(0,), (1, 0), (1, 1, 0)]
    assert sorted(set(small.lengths_Q.tolist())) == [1, 2, 3]


@pytest.mark.parametrize("shape", [(3, 3), (2, 2)])
def test_probabilities_add_up_to_one(shape):
    logits = tree(*shape).logits(0)
    assert_same(tree(*shape).logps(logits).exp().sum(), torch.tensor(1.0, dtype=torch.float64))
    for size in (1, 2, 3):
        assert_same(groups(*shape, size).probabilities(logits).sum(), torch.tensor(1.0, dtype=torch.float64))


def test_a_prefix_is_visited_as_often_as_its_tokens_are_drawn():
    small = tree(3, 3)
    logits = small.logits(0)
    visits, table = small.visits(logits), torch.softmax(logits, -1)
    assert visits[small.prefixes.index(())] == pytest.approx(1, abs=1e-10)
    below = visits[small.prefixes.index((2, 1))]
    root, two = small.prefixes.index(()), small.prefixes.index((2,))
    assert_same(below, (table[root, 2] * table[two, 1]).detach())


@each("aggregation", PER_GROUP)
def test_one_flat_batch_is_the_groups_one_at_a_time(aggregation):
    # What every other test of this folder rests on: groups share nothing but the denominator.
    batch, small = groups(2, 2, 2), tree(2, 2)
    logits, rewards = small.logits(0), small.rewards(0)
    length = 2 if aggregation == "constant" else None
    objective = PRESETS["default"].replace(aggregation=aggregation, aggregation_length=length)
    total = torch.zeros_like(logits)
    for members in batch.members_RG.tolist():
        places = [place for member in members for place in (small.sequence_L == member).nonzero().flatten().tolist()]
        sequence = torch.repeat_interleave(torch.arange(2), small.lengths_Q[members])
        one_group = torch.zeros(2, dtype=torch.long)
        logps = small.token_logps(logits)[places]
        weights = token_weights(sequence, 2, aggregation=aggregation, group_S=one_group, length=length)
        advantages = token_advantages(objective, Outcomes(rewards[members], one_group, sequence, max_length=2))
        c = coefficients(objective, logps.detach(), advantages, weights, sequence_N=sequence).total_N
        probability = small.logps(logits)[members].sum().exp().detach()
        total += probability * gradient((c * logps).sum(), logits)
    assert total.abs().max() > 1e-3
    assert_same(batch.expected_ascent(objective, logits, rewards), total)
