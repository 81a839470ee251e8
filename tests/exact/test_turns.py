"""Credit per turn, in an environment of up to three turns that a stop action ends, with a reward for every turn.

Every token is an action; token 0 stops. In the case of longer turns, the first turn is two tokens.
"""

import pytest
import torch

from cohort.objective import Objective, group_statistics, segment_sum
from cohort.objective.segments import suffix_sums
from cohort.types import Turns

from .tabular import assert_apart, assert_same, gradient, groups, tree

# vocabulary, longest length, group size, turn of each token of a trajectory
CASES = [(3, 3, 2, (0, 1, 2)), (3, 3, 3, (0, 1, 2)), (2, 4, 3, (0, 0, 1, 2))]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
PLAIN = Objective(baseline="leave_one_out", scale=None, aggregation="seq_sum")
BY_TURNS = PLAIN.replace(credit="turns")


class Environment:
    """The rewards of a tree's trajectories: one for each turn, about 2 and by all actions so far, and one at the end.

    ``turn_L`` is the turn of each token within its trajectory.
    """

    def __init__(self, case, seed):
        self.tree, self.batch = tree(*case[:2]), groups(*case[:3])
        self.logits = self.tree.logits(seed)
        generator = torch.Generator().manual_seed(seed)
        turns = [case[3][: len(sequence)] for sequence in self.tree.sequences]
        self.turn_L = torch.tensor([turn for some in turns for turn in some])
        given: dict[tuple[int, ...], float] = {}  # by the actions up to the end of a turn
        at_ends = []
        for sequence, some in zip(self.tree.sequences, turns, strict=True):
            for t, turn in enumerate(some):
                at_end = t + 1 == len(some) or some[t + 1] > turn
                reward = 2 + torch.randn((), generator=generator).item() / 2
                number = given.setdefault(sequence[: t + 1], reward)
                at_ends.append(number if at_end else torch.nan)
        self.rewards_L = torch.tensor(at_ends, dtype=torch.float64)
        """A turn's reward at its last token, NaN elsewhere."""
        self.final_Q = self.tree.rewards(seed) / 2
        self.returns_Q = self.tree.per_sequence(self.rewards_L.nan_to_num(nan=0.0)) + self.final_Q
        self.true = gradient(self.tree.mean(self.logits, self.returns_Q), self.logits)
        assert self.true.abs().max() > 0.1

    def turns(self):
        """The turns of all groups."""
        place_N, sequence_N = self.batch.place_N, self.batch.sequence_N
        ends_N = ~self.rewards_L[place_N].isnan()
        turn_N = ends_N.long().cumsum(0) - ends_N.long()
        return Turns(sequence_N[ends_N], turn_N, self.rewards_L[place_N][ends_N])

    def ascent(self, objective, **others):
        return self.batch.expected_ascent(objective, self.logits, self.returns_Q, **others)

    def ascent_of(self, advantages_N):
        """The expected direction of advantages that a test works out."""
        return self.batch.ascent(self.batch.probabilities(self.logits), advantages_N / self.batch.size, self.logits)


@pytest.fixture(params=CASES, ids=str)
def environment(request, seed):
    return Environment(request.param, seed)


def test_turns_are_those_of_the_trajectories(environment):
    turns = environment.turns()
    assert turns.sequence_Y[turns.turn_N].equal(environment.batch.sequence_N)
    per_sequence = segment_sum(turns.rewards_Y, turns.sequence_Y, environment.batch.count * environment.batch.size)
    final_S = (environment.returns_Q - environment.final_Q)[environment.batch.members_RG].flatten()
    assert_same(per_sequence, final_S)


def test_credit_per_turn_is_unbiased(environment):
    assert_same(environment.ascent(BY_TURNS, turns=environment.turns()), environment.true)


def test_one_advantage_per_trajectory_is_unbiased(environment):
    assert_same(environment.ascent(PLAIN), environment.true)
    assert_same(environment.ascent(BY_TURNS), environment.true)  # every trajectory is one turn


def test_the_credit_of_turns_is_another_estimator(environment):
    turns = environment.turns()
    one = environment.batch.coefficients(PLAIN, environment.logits, environment.returns_Q)
    by_turns = environment.batch.coefficients(BY_TURNS, environment.logits, environment.returns_Q, turns=turns)
    assert_apart(by_turns, one)


def test_what_is_earned_may_stay_at_the_end(environment):
    # Of a reward that is not split into turns, or not wholly, the rest counts in the last turn.
    turns = environment.turns()
    for share in (0.0, 0.5):
        partly = Turns(turns.sequence_Y, turns.turn_N, share * turns.rewards_Y)
        assert_same(environment.ascent(BY_TURNS, turns=partly), environment.true)


# Estimators that are not offered, or refused with environments ----------------------------------------------------------


def rewards_of_turns(environment):
    """The environment's reward of every turn, that of the last with the final one; their turn within the trajectory."""
    turns, batch = environment.turns(), environment.batch
    last_Y = torch.ones_like(turns.sequence_Y, dtype=torch.bool)
    last_Y[:-1] = turns.sequence_Y[1:] != turns.sequence_Y[:-1]
    final_S = environment.final_Q[batch.members_RG].flatten()
    ends_N = ~environment.rewards_L[batch.place_N].isnan()
    return turns, turns.rewards_Y + last_Y * final_S[turns.sequence_Y], environment.turn_L[batch.place_N][ends_N]


def centred(environment, values_Y, index_Y, *, leave_one_out):
    """Values less the mean of those that the group's trajectories have at the same turn."""
    turns, batch = environment.turns(), environment.batch
    statistics = group_statistics(values_Y, batch.group_S[turns.sequence_Y] * 10 + index_Y)
    count_Y, mean_Y = statistics.count_P[statistics.index_S], statistics.mean_P[statistics.index_S]
    if not leave_one_out:
        return values_Y - mean_Y
    return torch.where(count_Y > 1, (values_Y - mean_Y) * count_Y / (count_Y - 1), values_Y)


def assert_biased(ascent, true):
    """Another direction, not the same with another length, and off by more than a fifth of the gradient."""
    assert_apart(ascent / ascent.norm(), true / true.norm())
    assert (ascent - true).norm() > 0.2 * true.norm()


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_rewards_centred_turn_by_turn_are_biased(environment, leave_one_out):
    turns, rewards_Y, index_Y = rewards_of_turns(environment)
    centred_Y = centred(environment, rewards_Y, index_Y, leave_one_out=leave_one_out)
    ascent = environment.ascent_of(suffix_sums(centred_Y, turns.sequence_Y)[turns.turn_N])
    assert_biased(ascent, environment.true)


def test_a_mean_of_returns_that_counts_the_trajectory_itself_is_biased(environment):
    # How many reached a turn depends on the trajectory's own actions, so the bias is no common factor.
    turns, rewards_Y, index_Y = rewards_of_turns(environment)
    returns_Y = suffix_sums(rewards_Y, turns.sequence_Y)
    ascent = environment.ascent_of(centred(environment, returns_Y, index_Y, leave_one_out=False)[turns.turn_N])
    assert_biased(ascent, environment.true)
    same = environment.ascent_of(centred(environment, returns_Y, index_Y, leave_one_out=True)[turns.turn_N])
    assert_same(same, environment.true)  # the test's own formula of what is offered


def test_process_credit_is_biased(environment):
    _, rewards_Y, _ = rewards_of_turns(environment)
    process = PLAIN.replace(baseline="group_mean", credit="process")
    # Per token of the tree: the last turn's reward has the final one in it.
    rewards_L = environment.rewards_L.clone()
    lengths_Q = environment.tree.lengths_Q
    rewards_L[lengths_Q.cumsum(0) - 1] += environment.final_Q
    assert_same(rewards_L[environment.batch.place_N].nan_to_num(nan=0.0).sum(), rewards_Y.sum())
    ascent = environment.ascent(process, token_rewards_L=rewards_L)
    assert_biased(ascent, environment.true)
