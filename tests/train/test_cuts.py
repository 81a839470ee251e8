"""Copies of a sequence are computed once, with the gradient and the numbers of each by itself."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cohort.objective import PRESETS
from cohort.parallel import World
from cohort.policy import Policy
from cohort.rewards.runner import Scores
from cohort.train import assign_advantages, lay_out, packs, part_of, sweep
from cohort.train.layout import copies, microbatches
from cohort.types import Completion, FinishReason, Group, Prompt, Segment, Support
from tests.conftest import tiny_llama
from tests.train.updates import CPU, DOUBLE, all_sequences, gradient, shifted_policy

EOS = FinishReason.EOS
CALLED = [7, 8, 20, 21, 9]


def completion(ids, drawn=None, support=None):
    segments = (Segment(np.array(ids), None if drawn is None else np.array(drawn, bool)),)
    count = len(ids) if drawn is None else sum(drawn)
    return Completion(segments, np.full(count, -1.0), EOS, "", 0, support=support)


def rollout(supports=False):
    """Two groups of one prompt and one of another. Sequences 1, 4 and 6 are copies; 2, 3 and 7 are almost."""
    support = Support(np.array([7, 8, 9, 4, 5], np.int32), np.array([3, 2], np.int32), np.array([False, True]))
    called = completion(CALLED, [1, 1, 0, 0, 1])
    first = [called, called, completion(CALLED), completion([7, 8, 20, 22, 9], [1, 1, 0, 0, 1])]
    second = [called, completion([7, 3]), completion([7, 3]), completion([7, 3], support=support if supports else None)]
    third = [called, completion([7, 3]), completion([4]), completion([5, 6])]
    prompts = [(1, 2, 3), (1, 2, 3), (1, 4)]
    groups = [Group(Prompt(p, p, prompts[p], "", "", {}), tuple(some)) for p, some in enumerate((first, second, third))]
    rewards_S = torch.arange(12, dtype=torch.float64).sin()
    return groups, Scores(rewards_S, rewards_S[:, None], ("r",))


def test_copies_have_the_prompt_the_tokens_and_the_support_of_an_earlier_sequence():
    batch = lay_out(rollout()[0], CPU)
    assert copies(batch, all_sequences(batch)) == {1: 0, 4: 0, 6: 5, 7: 5}
    assert copies(batch, part_of(batch, [4, 8, 1])) == {2: 0}
    batch = lay_out(rollout(supports=True)[0], CPU)
    assert copies(batch, all_sequences(batch)) == {1: 0, 4: 0, 6: 5}


def test_a_pass_has_the_rows_of_copies_once():
    batch = lay_out(rollout()[0], CPU)
    part = all_sequences(batch)
    (pack,) = packs(batch, part, 15)
    assert pack.microbatches == ((0, 1, 4, 2, 3), (5, 6, 7, 8, 9, 10, 11))  # 15 and 12 tokens instead of 25 and 16
    micro, other = microbatches(batch, part, pack)
    assert micro.rows.lengths_B.tolist() == [5, 5, 5]
    assert micro.rows.targets_N.tolist() == [7, 8, 9, *CALLED, 7, 8, 9]
    assert micro.index_N.tolist() == [0, 1, 2] * 3 + list(range(3, 11))
    assert micro.at_tokens(torch.arange(11)).tolist() == micro.index_N.tolist()
    assert other.summed(torch.arange(14.0)).tolist() == [0 + 2 + 4, 1 + 3 + 5, *range(6, 14)]
    assert not any(pack.copies for pack in packs(batch, part, 15, distinct=False))


def test_ranks_divide_what_is_computed():
    """A prompt whose eight completions are copies costs less than one with two: the two are on different ranks."""
    numbers = np.random.default_rng(0).integers(1, 30, (5, 20)).tolist()
    groups = [
        Group(Prompt(p, p, (p, 2), "", "", {}), tuple(completion(numbers[n]) for n in some))
        for p, some in enumerate([[0] * 8, [1, 2], [3, 4]])
    ]
    batch, policy = lay_out(groups, CPU), Policy(tiny_llama().double(), DOUBLE)
    context = SimpleNamespace(policy=policy, world=World(0, 2))
    shared = sweep.share(context, batch, all_sequences(batch))
    assert sorted(part.num_sequences for part in shared.parts) == [2, 10]
    assert shared.load == pytest.approx(1.2, abs=0.03)  # 60 of 100 tokens and their prompts
    policy.dropout = True  # of each copy's own
    shared = sweep.share(context, batch, all_sequences(batch))
    assert sorted(part.num_sequences for part in shared.parts) == [4, 8]


@pytest.mark.parametrize("supports", [False, True])
def test_copies_change_no_number(monkeypatch, supports):
    """Float64: only the order of sums differs. With a KL over the vocabulary and an entropy bonus."""
    policy, reference = Policy(tiny_llama().double(), DOUBLE), shifted_policy()
    objective = PRESETS["default"].replace(beta=0.1, kl={"estimator": "full"})
    groups, scores = rollout(supports)
    batch = lay_out(groups, CPU)
    batch = assign_advantages(batch, scores, objective, max_completion_length=8)
    found = []
    for distinct in (True, False):
        cut = lambda *parts, wanted=distinct, **named: packs(*parts, **{**named, "distinct": wanted})
        monkeypatch.setattr(sweep, "packs", cut)
        grads, result = gradient(policy, batch, objective, 15, entropy_coefficient=0.01, reference=reference)
        found.append((torch.cat([grad.flatten() for grad in grads]), result))
    (grad, result), (expected, by_itself) = found
    assert len(result.logps_N) == 31
    assert bool(result.logps_N.isfinite().all())
    torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(result.logps_N, by_itself.logps_N, rtol=1e-11, atol=1e-13)
    for term in result.statistics.sums:
        assert result.statistics.sums[term] == pytest.approx(by_itself.statistics.sums[term], rel=1e-9, abs=1e-11)
