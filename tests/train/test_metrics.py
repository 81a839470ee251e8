"""``update_kl``: measured on few prompts, against a log-prob pass over all of them. Groups of equal rewards; the number
of tokens that carry the gradient."""

from collections import defaultdict

import pytest
import torch

from cohort.objective import PRESETS, TokenStatistics, k3
from cohort.policy import Policy
from cohort.rewards.runner import Scores
from cohort.train import UpdateResult
from cohort.train.layout import Rollout, lay_out
from cohort.train.metrics import policy_movement, reward_metrics, standard_error, step_metrics, value_metrics
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.conftest import each, tiny_llama
from tests.train.test_layout import make_batch
from tests.train.updates import DOUBLE, context_for, logps_of


def moved(groups, completions, unknown=()):
    """The metric, the prompts of the completions that were measured, and the k3 of every completion."""
    lengths = [[3] * size for size in groups]
    batch = make_batch(lengths, [float(i) for i in range(sum(groups))], prompt_lengths=range(1, len(groups) + 1))
    policy = Policy(tiny_llama(vocab_size=256).double(), DOUBLE)
    before_N = logps_of(policy, batch, budget=64)
    for s in unknown:
        before_N[batch.sequence_N == s] = torch.nan
    with torch.no_grad():
        policy.model.lm_head.weight += 0.1
        policy.model.lm_head.weight[4] += 0.5
    result = UpdateResult(TokenStatistics.of_idle(0), before_N, 1.0, 0.1, 0.0)
    seen = []
    hidden = policy.passes.hidden

    def look(prefixes, rows):
        seen.extend(prefixes.prompt_ids[p] for p in rows.prompt_B.tolist())
        return hidden(prefixes, rows)

    policy.passes.hidden = look
    found = policy_movement(context_for(policy, PRESETS["default"], 64), batch, [result], completions)
    gaps_N = k3(before_N, logps_of(policy, batch, budget=64))
    return found, seen[: completions or None], gaps_N.view(-1, 3).mean(1)


def test_four_completions_are_measured_of_each_of_several_prompts():
    found, seen, gaps_S = moved([8] * 8, 8)
    assert len(set(seen)) == 2
    chosen = [*range(4), *range(32, 36)]  # of the first and of the fifth prompt
    assert found["update_kl"] == pytest.approx(float(gaps_S[chosen].mean()), rel=1e-12)
    assert found["update_kl"] > 1e-4


def test_with_few_prompts_more_completions_of_each_are_measured():
    found, _, gaps_S = moved([8], 8)
    assert found["update_kl"] == pytest.approx(float(gaps_S.mean()), rel=1e-12)
    found, _, gaps_S = moved([2, 3], 100)
    assert found["update_kl"] == pytest.approx(float(gaps_S.mean()), rel=1e-12)


def test_completions_without_log_probs_before_the_update_are_left_out():
    found, _, gaps_S = moved([2, 2], 4, unknown=(0, 3))
    assert found["update_kl"] == pytest.approx(float(gaps_S[[1, 2]].mean()), rel=1e-12)


def test_nothing_is_measured_for_0_completions():
    assert moved([2, 2], 0)[0] == {}


@each(
    ("rewards", "high", "low"),
    [
        ([[1, 1], [0, 0], [0, 1], [0.4, 0.4], [0.6, 0.6]], 2 / 5, 2 / 5),
        ([[-1, -1], [0, -1]], 0.0, 1 / 2),
        ([[1, 1], [1, 1]], None, None),  # neither high nor low without another reward
        ([[1, 1], [torch.nan, torch.nan], [0, 1]], 1 / 3, 0.0),
        ([[torch.nan, torch.nan]], None, None),
    ],
)
def test_where_equal_rewards_lie(rewards, high, low):
    rewards_S = torch.tensor(rewards, dtype=torch.float64).flatten()
    scores = Scores(rewards_S, rewards_S[:, None], ("r",))
    found = reward_metrics(scores, torch.arange(len(rewards)).repeat_interleave(2))
    assert (found["groups/dead_high_share"], found["groups/dead_low_share"]) == (high, low)


def test_rewards_by_function_and_groups_that_are_hardly_scored():
    rewards = torch.tensor([1.0, 2.0, 4.0, torch.nan, 3.0, 3.0], dtype=torch.float64)
    other = torch.tensor([torch.nan] * 6, dtype=torch.float64)
    scores = Scores(rewards, torch.stack([rewards, other], dim=1), ("one", "never"))
    found = reward_metrics(scores, torch.arange(3).repeat_interleave(2))
    assert found["rewards/one/std"] == found["reward/std"] == pytest.approx(1.04**0.5)  # of 1, 2, 4, 3, 3
    assert found["rewards/never/std"] is None
    assert found["groups/unscored_share"] == pytest.approx(1 / 3)
    assert found["groups/dead_share"] == pytest.approx(2 / 3)


@each(("sizes", "expected"), [([2.0] * 5, 5), ([3.0, 0.0, 0.0], 1), ([1.0, 3.0], 16 / 10), ([0.0], 0)])
def test_the_effective_number_of_tokens(sizes, expected):
    whole = defaultdict(float, policy_sizes=sum(sizes), policy_energy=sum(size**2 for size in sizes))
    found = value_metrics(TokenStatistics(whole, {}, {}), 1, PRESETS["default"])
    assert found["gradient/effective_tokens"] == pytest.approx(expected, rel=1e-15)


def test_a_standard_error_is_of_a_sample():
    values = torch.tensor([1.0, 2.0, 4.0, 9.0])
    assert standard_error(16.0, 102.0, 4.0) == pytest.approx(float(values.std()) / 2)
    assert standard_error(3.0, 9.0, 1.0) is None


def test_what_needs_no_pass_is_of_all_drawn_tokens():
    """Of dead groups too, and of groups that are left out; not of completions that could not be drawn, and of no token
    whose log-prob is unknown."""
    drawn = {0: [-1.0, -2.0], 1: [-4.0], 2: [-0.5, torch.nan, -1.5], 3: [-3.0]}
    reasons = [FinishReason.EOS, FinishReason.LENGTH, FinishReason.EOS, FinishReason.EOS]
    completions = [
        Completion.of_tokens([7] * len(logps), logps, reason, "", 0)
        for logps, reason in zip(drawn.values(), reasons, strict=True)
    ]
    failed = Completion.of_tokens([7], [-100.0], FinishReason.ERROR, "", 0)
    prompt = Prompt(0, 0, (1,), "", "", {})
    groups = [Group(prompt, tuple(completions[:2])), Group(prompt, (*completions[2:], failed))]
    rewards_S = torch.tensor([0.0, 1.0, 1.0, 1.0, torch.nan], dtype=torch.float64)
    scores = Scores(rewards_S, rewards_S[:, None], ("r",))
    for name in ("default", "dapo"):  # dapo leaves the second group out
        objective = PRESETS[name]
        rollout = Rollout.of(groups, scores, objective)
        assert rollout.is_used_P == (True, name == "default")
        found = step_metrics(rollout, lay_out(rollout.used_groups, torch.device("cpu")), [], objective, 0)
        assert found["entropy/sampled"] == pytest.approx((1 + 2 + 4 + 0.5 + 1.5 + 3) / 6, rel=1e-15)
        assert found["length/mean"] == 7 / 4
