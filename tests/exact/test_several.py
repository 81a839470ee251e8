"""Several prompts, and several rewards: dynamic sampling, resampling, and rewards that are normalised one by one."""

import pytest
import torch

from cohort.objective import PRESETS, Objective, combined_advantages, live_groups
from cohort.presets.parts import GroupStd

from .tabular import assert_same, cosine, gradient, groups
from .test_estimators import std_weight

SHARES = (0.2, 0.5, 0.3)
"""How often each of three prompts is drawn; each has parameters and right answers of its own."""
OBJECTIVES = {
    "dapo": PRESETS["dapo"].replace(scale=GroupStd(epsilon=0.0), soft_overlong="none", aggregation="seq_sum"),
    "leave_one_out": Objective(baseline="leave_one_out", scale=None, aggregation="seq_sum"),
    "maxrl": PRESETS["maxrl"],
}
every_objective = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())


class Prompt:
    """One prompt's policy and what Cohort's functions say of all its groups."""

    def __init__(self, batch, objective, seed):
        self.logits = batch.tree.logits(seed, spread=1.5)
        self.right = batch.tree.right(seed)
        self.batch = batch
        self.p = batch.tree.mean(self.logits, self.right).item()
        rewards_S = self.right[batch.members_RG].flatten()
        self.live_R = live_groups(rewards_S[:, None], batch.group_S).double()
        self.probability_R = batch.probabilities(self.logits).detach()
        self.c_N = batch.coefficients(objective, self.logits, self.right)

    def ascent(self, probability_R):
        return self.batch.ascent(probability_R, self.c_N, self.logits)

    def alive(self):
        return 1 - self.p**self.batch.size - (1 - self.p) ** self.batch.size


def prompts(case, objective, seed):
    return [Prompt(groups(*case), objective, 10 * seed + number) for number in range(len(SHARES))]


@pytest.mark.parametrize("case", [(2, 2, 4), (3, 3, 2)], ids=str)
@every_objective
def test_new_prompts_for_dead_groups_keep_the_direction(case, seed, objective):
    # A pair (prompt, group) is drawn until its group lives; a dead one would have had no gradient anyway.
    several = prompts(case, objective, seed)
    plain = torch.stack([share * q.ascent(q.probability_R) for share, q in zip(SHARES, several, strict=True)])
    joint = [share * q.probability_R * q.live_R for share, q in zip(SHARES, several, strict=True)]
    accepted = sum(weights_R.sum() for weights_R in joint)
    refilled = torch.stack([q.ascent(weights_R / accepted) for weights_R, q in zip(joint, several, strict=True)])
    expected_alive = sum(share * q.alive() for share, q in zip(SHARES, several, strict=True))
    assert expected_alive < 0.95  # some groups are dead: the scale is not 1
    assert_same(refilled, plain / expected_alive)
    assert cosine(refilled, plain) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("case", [(2, 2, 4), (3, 3, 2)], ids=str)
@pytest.mark.parametrize("ddof", [0, 1])
def test_rewards_normalised_one_by_one_add_up_to_their_own_weighted_gradients(case, seed, ddof):
    batch = groups(*case)
    logits, weights = batch.tree.logits(seed), torch.tensor([1.0, 0.25], dtype=torch.float64)
    columns = [batch.tree.right(seed), batch.tree.right(seed + 7)]
    rewards_SK = torch.stack(columns, dim=1)[batch.members_RG.flatten()]
    advantages_S = combined_advantages(
        rewards_SK, weights, batch.group_S, over_batch=False, scale=GroupStd(ddof=ddof, epsilon=0.0)
    )
    c_N = advantages_S[batch.sequence_N] / batch.size
    ascent = batch.ascent(batch.probabilities(logits), c_N, logits)
    expected = torch.zeros_like(logits)
    for weight, column in zip(weights, columns, strict=True):
        rate = batch.tree.mean(logits, column)
        expected += weight * std_weight(rate.item(), batch.size, ddof) * gradient(rate, logits)
    assert_same(ascent, expected)
