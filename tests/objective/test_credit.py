"""From scores to one advantage per token: shaping, credit, signs, truncation and the KL outside of the loss."""

import math

import pytest
import torch

from cohort.objective import PRESETS, Outcomes, live_groups, soft_overlong_punishment, token_advantages
from cohort.objective.credit import process_advantages, top_k_of_group, unlikeliness
from cohort.presets import Objective, parts
from cohort.presets.parts import BatchStd, GroupStd, TopK, Unlikeliness
from cohort.types import Turns
from tests.conftest import each
from tests.objective.batches import doubles, longs

NAN = math.nan
DEFAULT = PRESETS["default"]
EXACT = DEFAULT.replace(scale={"epsilon": 0.0})
CENTRED = DEFAULT.replace(scale="none")


SEQUENCE = longs(0, 1, 0, 2, 1, 3, 0)
"""Completions of 3, 2, 1 and 1 tokens, interleaved."""
GROUP = longs(5, 5, 8, 8)
REWARDS = doubles(3.0, 1.0, 0.0, 4.0)
KL = doubles(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Sums: 1.1, 0.7, 0.4, 0.6."""


def outcomes(**changes):
    return Outcomes(**{"rewards_S": REWARDS, "group_S": GROUP, "sequence_N": SEQUENCE, "max_length": 10, **changes})


def check(got, *expected):
    torch.testing.assert_close(got, doubles(*expected), rtol=1e-12, atol=1e-14)


def spread(per_completion):
    """A value per completion as one per token."""
    return [per_completion[s] for s in SEQUENCE.tolist()]


# Outcome credit -----------------------------------------------------------------------------------------------------


def test_every_token_has_its_completions_advantage():
    check(token_advantages(CENTRED, outcomes()), *spread([1.0, -1.0, -2.0, 2.0]))
    root = 0.5**0.5
    check(token_advantages(EXACT, outcomes()), *spread([root, -root, -root, root]))


def test_lengths_are_those_of_the_loss():
    assert outcomes().lengths_S.tolist() == [3, 2, 1, 1]
    assert outcomes(rewards_S=doubles(1, 2, 3, 4, 5)).lengths_S.tolist() == [3, 2, 1, 1, 0]
    by_length = CENTRED.replace(baseline="length_weighted")
    # (3 * 3 + 2 * 1) / 5 = 2.2 and (0 + 4) / 2 = 2
    check(token_advantages(by_length, outcomes()), *spread([0.8, -1.2, -2.0, 2.0]))


@each("name", [n for n in PRESETS if PRESETS[n].reward_aggregation == "sum_then_normalize"])
def test_every_preset_is_silent_on_an_unscored_completion(name):
    rewards, group = doubles(3.0, 1.0, 2.0, 4.0, 0.5, NAN), longs(5, 5, 8, 8, 5, 8)
    sequence = torch.cat([SEQUENCE, longs(4, 5, 5)])
    extra = {"kl_N": torch.rand(10, generator=torch.Generator().manual_seed(0))}
    with_it = Outcomes(rewards, group, sequence, 10, **extra)
    got = token_advantages(PRESETS[name], with_it)
    assert got[-2:].tolist() == [0.0, 0.0]
    without = Outcomes(rewards[:5], group[:5], sequence[:8], 10, kl_N=extra["kl_N"][:8])
    torch.testing.assert_close(got[:8], token_advantages(PRESETS[name], without), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [{"kl": {"beta": 0.1, "place": "advantage", "correction": "none"}}, {"truncated": "penalize"}],
    ids=["KL in the advantage", "penalty"],
)
def test_an_unscored_completion_has_advantage_zero_whatever_is_taken_off(settings):
    scored = outcomes(
        rewards_S=doubles(3.0, NAN, 0.0, 4.0), kl_N=KL, truncated_S=torch.tensor([False, True, False, False])
    )
    got = token_advantages(DEFAULT.replace(**settings), scored)
    assert got[SEQUENCE == 1].tolist() == [0.0, 0.0]


# Shaping ------------------------------------------------------------------------------------------------------------


def test_soft_overlong_by_hand():
    got = soft_overlong_punishment(longs(0, 80, 81, 90, 100, 101, 500), max_length=100, cache_length=20)
    check(got, 0.0, 0.0, -0.05, -0.5, -1.0, -1.0, -1.0)
    for cache_length in (0, 101):
        with pytest.raises(ValueError, match="cache_length"):
            soft_overlong_punishment(longs(1), max_length=100, cache_length=cache_length)


def test_soft_overlong_in_an_objective():
    plain = CENTRED.replace(baseline="none")
    # L = 4, cache 2: lengths 3, 2, 1, 1 have -0.5, 0, 0, 0.
    shaped = plain.replace(soft_overlong={"cache_share": 0.5})
    check(token_advantages(shaped, outcomes(max_length=4)), *spread([2.5, 1.0, 0.0, 4.0]))
    # The rule's own length goes before the rollout's: L = 2, cache 1.
    own = plain.replace(soft_overlong={"cache_share": 0.5, "max_length": 2})
    check(token_advantages(own, outcomes(max_length=4)), *spread([2.0, 0.0, 0.0, 4.0]))


def test_unlikeliness_by_hand():
    rewards, logps = doubles(1.0, 1.0, 1.0, 1.0), doubles(-0.1, -3.0, -1.0, -2.0)
    got = unlikeliness(Unlikeliness(strength=0.4), rewards, logps, longs(0, 0, 0, 0))
    check(got, 1 - 0.4 * 3 / 4, 1.0, 1 - 0.4 * 2 / 4, 1 - 0.4 * 1 / 4)
    within_groups = unlikeliness(Unlikeliness(strength=0.5), rewards, logps, longs(7, 2, 7, 2))
    check(within_groups, 0.75, 1.0, 1.0, 0.75)


def test_unlikeliness_of_strength_zero_changes_nothing_and_wrong_answers_are_never_touched():
    rewards, logps, group = doubles(1.0, 0.0, NAN, 0.5), doubles(-0.1, -0.05, -3.0, -2.0), longs(0, 0, 0, 0)
    got = unlikeliness(Unlikeliness(strength=0.0), rewards, logps, group)
    torch.testing.assert_close(got, rewards, rtol=0, atol=0, equal_nan=True)
    strong = unlikeliness(Unlikeliness(strength=1.0), rewards, logps, group)
    torch.testing.assert_close(strong, doubles(0.5, 0.0, NAN, 0.5 * 0.75), equal_nan=True)


def test_equally_likely_completions_share_the_lower_rank():
    logps = doubles(-1.0, -2.0, -1.0, -0.5, -2.0)
    got = unlikeliness(Unlikeliness(strength=1.0), torch.ones(5), logps, torch.zeros(5, dtype=torch.long))
    check(got, 1 - 2 / 5, 1.0, 1 - 2 / 5, 1 - 4 / 5, 1.0)
    # Equal log-probs in two groups are no tie.
    apart = unlikeliness(Unlikeliness(strength=1.0), torch.ones(4), doubles(-1, -1, -2, -3), longs(0, 1, 0, 1))
    check(apart, 0.5, 0.5, 1.0, 1.0)


def test_unlikeliness_in_an_objective_is_of_the_mean_log_prob():
    objective = CENTRED.replace(baseline="none", unlikeliness={"strength": 0.5})
    # Sums -3 and -2.2, but means -1 and -1.1: the first is the likelier. Group 8: means -2 and -1.
    logps = doubles(-1.0, -1.2, -1.0, -2.0, -1.0, -1.0, -1.0)
    check(token_advantages(objective, outcomes(sampler_logps_N=logps)), *spread([2.25, 1.0, 0.0, 3.0]))
    unknown = doubles(-1.0, -1.2, -1.0, -2.0, NAN, -1.0, -1.0)  # the mean is over the known tokens
    check(token_advantages(objective, outcomes(sampler_logps_N=unknown)), *spread([2.25, 1.0, 0.0, 3.0]))
    with pytest.raises(ValueError, match="sampler_logps_N is needed for unlikeliness"):
        token_advantages(objective, outcomes())


# The choice of completions ------------------------------------------------------------------------------------------


@each(
    ("metric", "k", "expected"),
    [
        ("shortest", 2, [False, True, True, False, True]),
        ("reward_per_token", 2, [True, False, True, False, True]),
        ("shortest", 3, [True, True, True, False, True]),
        ("shortest", 9, [True, True, True, False, True]),
    ],
)
def test_top_k_by_hand(metric, k, expected):
    rewards, lengths = doubles(9.0, 0.0, 4.0, NAN, 1.0), longs(9, 3, 4, 1, 6)
    group = longs(2, 2, 2, 2, 0)
    got = top_k_of_group(TopK(k=k, metric=metric), rewards, lengths, group)
    assert got.tolist() == expected


def test_of_equals_the_earlier_and_of_empty_ones_the_reward_per_one_token():
    got = top_k_of_group(TopK(k=2), torch.ones(5), longs(4, 4, 4, 4, 3), longs(0, 0, 0, 0, 0))
    assert got.tolist() == [True, False, False, False, True]
    got = top_k_of_group(TopK(k=2, metric="reward_per_token"), doubles(5, 1, 1), longs(0, 1, 2), longs(0, 0, 0))
    assert got.tolist() == [True, True, False]


def test_the_statistics_of_the_chosen_are_their_own():
    objective = PRESETS["gfpo"].replace(group_filter={"k": 2}, scale={"epsilon": 0.0})
    rewards, sequence = doubles(1.0, 7.0, 3.0), longs(0, 1, 1, 1, 2, 2)
    got = token_advantages(objective, Outcomes(rewards, longs(0, 0, 0), sequence, 10))
    root = 0.5**0.5
    check(got, -root, 0.0, 0.0, 0.0, root, root)


@pytest.mark.parametrize("changes", [{"beta": 0.0}, {"beta": 0.01}, {"beta": 0.01, "scale": "none"}])
def test_those_not_chosen_have_advantage_zero_with_returns_to_go_too(changes):
    objective = PRESETS["reinforce_pp"].replace(group_filter={"rule": "top_k", "k": 2}, **changes)
    chosen = Outcomes(doubles(1, 0, 2), longs(0, 0, 0), longs(0, 0, 1, 2, 2, 2), 10, kl_N=torch.ones(6))
    assert token_advantages(objective, chosen)[3:].tolist() == [0.0] * 3


@pytest.mark.parametrize("aggregation", ["normalize_then_sum", "normalize_sum_normalize"])
def test_those_not_chosen_have_advantage_zero_with_several_rewards_too(aggregation):
    objective = DEFAULT.replace(group_filter={"rule": "top_k", "k": 2}, reward_aggregation=aggregation)
    by_function = torch.stack([doubles(1, 5, 2), doubles(0, 9, 1)], dim=1)
    chosen = Outcomes(by_function.sum(1), longs(0, 0, 0), longs(0, 1, 1, 1, 2, 2), 10, by_function, doubles(1.0, 1.0))
    got = token_advantages(objective, chosen)
    assert got[1:4].tolist() == [0.0] * 3
    assert got[0] < 0 < got[4]


def test_live_groups_differ_in_any_reward():
    rewards = torch.stack([doubles(1, 1, 2, 2, 3, NAN), doubles(0, 0, 1, 2, 5, 6)], dim=1)
    assert live_groups(rewards, longs(4, 4, 2, 2, 9, 9)).tolist() == [True, False, True]  # ids 2, 4, 9
    assert live_groups(rewards[:, :1], longs(4, 4, 2, 2, 9, 9)).tolist() == [False, False, False]
    assert live_groups(torch.full((8, 1), 0.1), torch.zeros(8, dtype=torch.long)).tolist() == [False]


# Several rewards ----------------------------------------------------------------------------------------------------


def test_several_rewards_in_an_objective():
    by_function = torch.stack([REWARDS, doubles(5.0, 6.0, 0.0, 0.0)], dim=1)
    scored = outcomes(by_function_SK=by_function, weights_K=doubles(1.0, 3.0))
    objective = PRESETS["mo_grpo"].replace(scale={"epsilon": 0.0})
    root = 0.5**0.5
    check(token_advantages(objective, scored), *spread([root - 3 * root, -root + 3 * root, -root, root]))
    unweighted = outcomes(by_function_SK=by_function)
    check(token_advantages(objective, unweighted), *spread([0.0, 0.0, -root, root]))
    with pytest.raises(ValueError, match="by_function_SK"):
        token_advantages(objective, outcomes())


# Process rewards and given advantages -------------------------------------------------------------------------------


def test_process_supervision_by_hand():
    # Group 0: completion 0 has steps 2 (ending at its token 1) and 0 (token 3), completion 1 has one step 4 (token 0).
    # Mean 2, std 2: r~ = 0, -1, 1. Completion 0 sums from behind; its token 4 comes after its last step.
    steps = doubles(NAN, 2.0, NAN, 0.0, NAN, 4.0, NAN)
    sequence = longs(0, 0, 0, 0, 0, 1, 1)
    got = process_advantages(steps, longs(0, 0), sequence, GroupStd(epsilon=0.0))
    check(got, -1.0, -1.0, -1.0, -1.0, 0.0, 1.0, 0.0)
    check(process_advantages(steps, longs(0, 0), sequence, None), -2.0, -2.0, -2.0, -2.0, 0.0, 2.0, 0.0)


def test_one_step_at_the_last_token_is_the_outcome():
    steps = torch.full((7,), NAN, dtype=torch.float64)
    steps[[6, 4, 3, 5]] = REWARDS  # the last tokens of completions 0 to 3
    process = EXACT.replace(credit="process")
    check(token_advantages(process, outcomes(token_rewards_N=steps)), *token_advantages(EXACT, outcomes()).tolist())
    with pytest.raises(ValueError, match="token_rewards_N"):
        token_advantages(process, outcomes())


def test_equal_step_rewards_teach_exactly_nothing():
    steps = torch.full((7,), 0.1)
    assert process_advantages(steps, GROUP, SEQUENCE, GroupStd(epsilon=0.0)).tolist() == [0.0] * 7


def test_given_advantages_are_taken_as_they_come():
    given = doubles(1, -2, 3, NAN, 5, 0, -7)
    objective = DEFAULT.replace(credit="given", baseline="none", scale="none")
    check(token_advantages(objective, outcomes(token_rewards_N=given)), 1, -2, 3, 0, 5, 0, -7)
    with pytest.raises(ValueError, match="token_rewards_N"):
        token_advantages(objective, outcomes())


# Turns ----------------------------------------------------------------------------------------------------------------

BY_TURNS = CENTRED.replace(credit="turns", baseline="leave_one_out")


def turns(*rewards):
    """Sequences with these rewards per turn; every turn is one token."""
    counts = longs(*map(len, rewards))
    sequence = torch.arange(len(rewards)).repeat_interleave(counts)
    return Turns(sequence, torch.arange(len(sequence)), doubles(*(reward for some in rewards for reward in some)))


def by_turns(returns, group, turns, objective=BY_TURNS):
    return token_advantages(objective, Outcomes(doubles(*returns), longs(*group), turns.sequence_Y, 10, turns=turns))


def test_a_turn_is_compared_with_the_others_that_reached_it():
    # Returns to go: 6, 5, 3; 5, 3; 1. Turn 0: others' means 3, 3.5, 5.5. Turn 1: 3 and 5. Turn 2: none.
    rewards = turns((1.0, 2.0, 0.0), (2.0, 0.0), (0.0,))
    check(by_turns((6, 5, 1), (0, 0, 0), rewards), 3.0, 2.0, 3.0, 1.5, -2.0, -4.5)


def test_groups_are_compared_each_with_itself_whatever_the_order():
    rewards = turns((1.0, 0.0), (4.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    # Group 7: returns to go 3, 2 and 1, 1. Group 2: 9, 5 and 5, 5.
    check(by_turns((3, 9, 1, 5), (7, 2, 7, 2), rewards), 2.0, 1.0, 4.0, 0.0, -2.0, -1.0, -4.0, 0.0)


def test_unscored_trajectories_are_compared_with_nothing():
    rewards = turns((1.0, 0.0), (3.0, 0.0), (1.0, 0.0, 0.0), (0.0,))
    # Turn 0: 5 against 2. Turn 1: 4, with no other that has a score.
    check(by_turns((5, NAN, NAN, 2), (0, 0, 0, 0), rewards), 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, -3.0)


def test_a_group_of_one_has_its_returns():
    check(by_turns((4,), (0,), turns((1.0, -2.0, 0.0))), 4.0, 3.0, 5.0)
    check(by_turns((NAN,), (0,), turns((1.0, 0.0))), 0.0, 0.0)


def test_equal_returns_teach_exactly_nothing():
    rewards = turns(*[(0.1, 0.2, 0.3)] * 7)
    assert by_turns([0.7] * 7, [0] * 7, rewards).tolist() == [0.0] * 21


def test_tokens_have_the_advantage_of_their_turn_and_a_turn_may_have_none():
    # Sequence 0: turns of 2, 0 and 1 tokens; sequence 1: one turn of 1 token; sequence 2: one turn without tokens.
    split = Turns(longs(0, 0, 0, 1, 2), longs(0, 0, 2, 3), doubles(1.0, 2.0, 0.0, 0.0, 0.0))
    got = token_advantages(BY_TURNS, Outcomes(doubles(3, 1, 0), longs(0, 0, 0), longs(0, 0, 0, 1), 10, turns=split))
    check(got, 2.5, 2.5, 0.0, -0.5)


def test_without_turns_it_is_leave_one_out():
    one = CENTRED.replace(baseline="leave_one_out")
    assert token_advantages(BY_TURNS, outcomes()).equal(token_advantages(one, outcomes()))


def test_a_shaped_reward_counts_in_the_last_turn():
    shaped = BY_TURNS.replace(soft_overlong={"cache_share": 0.5})
    # L = 4, cache 2: three tokens cost 0.5, one costs none. Returns to go 2.5, 1.5, 1.5 and 0.
    got = token_advantages(
        shaped, Outcomes(doubles(3, 0), longs(0, 0), longs(0, 0, 0, 1), 4, turns=turns((1.0, 0.0, 0.0), (0.0,)))
    )
    check(got, 2.5, 1.5, 1.5, -2.5)


def test_top_k_compares_the_chosen_turn_by_turn():
    best = BY_TURNS.replace(group_filter={"rule": "top_k", "k": 2})  # the shortest
    rewards = turns((1.0, 0.0), (9.0, 9.0, 9.0), (0.0, 0.0))
    check(by_turns((3, 30, 1), (0, 0, 0), rewards, best), 2.0, 1.0, 0.0, 0.0, 0.0, -2.0, -1.0)


# Returns to go ------------------------------------------------------------------------------------------------------

RTG = CENTRED.replace(credit="return_to_go")


def test_returns_to_go_by_hand():
    got = token_advantages(RTG.replace(discount=0.5), outcomes())
    # Completion 0 has advantage 1 at its third token, completion 1 -1 at its second.
    check(got, 0.25, -0.5, 0.5, -2.0, -1.0, 2.0, 1.0)
    check(token_advantages(RTG, outcomes()), *spread([1.0, -1.0, -2.0, 2.0]))
    check(token_advantages(RTG.replace(discount=0.0), outcomes()), 0, 0, 0, -2.0, -1.0, 2.0, 1.0)


def test_returns_to_go_with_the_kl_in_the_reward():
    kl = {"beta": 0.1, "scope": "sequence", "place": "reward", "correction": "none"}
    got = token_advantages(RTG.replace(discount=0.5, kl=kl), outcomes(kl_N=KL))
    # Completion 0: rewards -0.01, -0.03, 1 - 0.07; completion 1: -0.02, -1 - 0.05.
    last_0, last_1 = 0.93, -1.05
    check(
        got,
        -0.01 + 0.5 * (-0.03 + 0.5 * last_0),
        -0.02 + 0.5 * last_1,
        -0.03 + 0.5 * last_0,
        -2.04,
        last_1,
        2 - 0.06,
        last_0,
    )
    with pytest.raises(ValueError, match="kl_N"):
        token_advantages(RTG.replace(kl=kl), outcomes())


def test_reinforce_pp_by_hand():
    objective = PRESETS["reinforce_pp"].replace(beta=0.1, scale={"epsilon": 0.0})
    got = token_advantages(objective, outcomes(kl_N=KL))
    # Returns: R less 0.1 times the KL still to come.
    returns = doubles(3 - 0.11, 1 - 0.07, 3 - 0.10, 0 - 0.04, 1 - 0.05, 4 - 0.06, 3 - 0.07)
    check(got, *((returns - returns.mean()) / returns.std()).tolist())


def test_an_empty_completion_has_no_place_for_its_reward():
    sequence = longs(0, 0, 2)
    got = token_advantages(RTG, Outcomes(doubles(1.0, 5.0, 0.0), longs(0, 0, 0), sequence, 10))
    check(got, -1.0, -1.0, -2.0)


# Signs and truncation -----------------------------------------------------------------------------------------------


def test_sign_weights():
    weighed = CENTRED.replace(sign_weights={"positive": 0.5, "negative": 3.0})
    check(token_advantages(weighed, outcomes()), *spread([0.5, -3.0, -6.0, 1.0]))


TRUNCATED = torch.tensor([False, True, False, True])


@each(
    ("treatment", "expected"),
    [
        ("keep", [1.0, -1.0, -2.0, 2.0]),
        ("mask", [1.0, -1.0, -2.0, 2.0]),  # the mask is in the weights, not here
        ("zero", [1.0, 0.0, -2.0, 0.0]),
        ("penalize", [1.0, -1.7, -2.0, 1.3]),
    ],
)
def test_truncated_completions_after_the_advantages_of_their_whole_group(treatment, expected):
    penalty = {"truncated_penalty": 0.7} if treatment == "penalize" else {}
    objective = CENTRED.replace(truncated=treatment, **penalty)
    check(token_advantages(objective, outcomes(truncated_S=TRUNCATED)), *spread(expected))


# The KL outside of the loss -----------------------------------------------------------------------------------------


def test_the_kl_in_the_reward_by_hand():
    kl = {"beta": 0.5, "scope": "sequence", "place": "reward", "correction": "none"}
    rewards = [3 - 0.55, 1 - 0.35, 0 - 0.2, 4 - 0.3]
    loo = [rewards[0] - rewards[1], rewards[1] - rewards[0], rewards[2] - rewards[3], rewards[3] - rewards[2]]
    got = token_advantages(PRESETS["rloo"].replace(kl=kl), outcomes(kl_N=KL))
    check(got, *spread(loo))
    with pytest.raises(ValueError, match="kl_N is needed"):
        token_advantages(PRESETS["rloo"], outcomes())


@pytest.mark.parametrize(("scope", "taken"), [("token", KL.tolist()), ("sequence", spread([1.1, 0.7, 0.4, 0.6]))])
def test_the_kl_in_the_advantage_comes_off_after_scaling(scope, taken):
    kl = {"beta": 0.5, "scope": scope, "place": "advantage", "correction": "none"}
    got = token_advantages(EXACT.replace(kl=kl), outcomes(kl_N=KL))
    root = 0.5**0.5
    before = spread([root, -root, -root, root])
    check(got, *(a - 0.5 * k for a, k in zip(before, taken, strict=True)))


def test_the_kl_in_the_advantage_with_returns_to_go_is_the_kl_to_come():
    kl = {"beta": 1.0, "scope": "sequence", "place": "advantage", "correction": "none"}
    got = token_advantages(RTG.replace(kl=kl, discount=0.5), outcomes(kl_N=KL))
    without = token_advantages(RTG.replace(discount=0.5), outcomes())
    # Completion 0: 0.1 + 0.5 (0.3 + 0.35), 0.3 + 0.35, 0.7; completion 1: 0.2 + 0.25, 0.5.
    check(without - got, 0.425, 0.45, 0.65, 0.4, 0.5, 0.6, 0.7)


def test_equal_rewards_leave_only_the_kl_of_whitened_returns_and_do_not_divide_it():
    """Divided by its own spread, a KL of rounding size would look like a signal of size 1."""
    objective = PRESETS["reinforce_pp"]
    kl = 1e-6 * torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    out = Outcomes(torch.tensor([0.7, 0.7]), torch.tensor([0, 1]), torch.tensor([0, 0, 1, 1]), max_length=4, kl_N=kl)
    returns = -objective.beta * torch.tensor([-1e-6, -2e-6, 3.5e-6, 0.5e-6], dtype=torch.float64)
    torch.testing.assert_close(token_advantages(objective, out), returns - returns.mean(), rtol=1e-12, atol=1e-20)
    without = objective.replace(beta=0.0)
    assert token_advantages(without, out).tolist() == [0.0] * 4


def test_returns_may_be_divided_by_the_spread_of_uncentred_ones():
    rewards, group, sequence = torch.tensor([1.0, 0.0, 3.0, 5.0]), torch.tensor([0, 0, 1, 1]), torch.arange(4)
    out = Outcomes(rewards, group, sequence, max_length=4)
    for of, values in (("raw", rewards), ("centred", torch.tensor([0.5, -0.5, -1.0, 1.0]))):
        scale = BatchStd(of=of, unit="token", epsilon=0.0)
        got = token_advantages(PRESETS["default"].replace(credit="return_to_go", scale=scale), out)
        expected = torch.tensor([0.5, -0.5, -1.0, 1.0], dtype=torch.float64) / values.double().std()
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_dead_groups_leave_only_the_kl_too():
    """Rewards differ between the groups, not inside one: less their group's mean they are all 0."""
    objective = Objective(
        scale=BatchStd(unit="token", of="centred", epsilon=0.0),
        credit="return_to_go",
        kl=parts.KL(beta=0.01, scope="sequence", place="reward"),
    )
    kl = torch.tensor([0.01, -0.01, 0.02, 0.0])
    out = Outcomes(
        torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1]), torch.arange(4), max_length=1, kl_N=kl
    )
    torch.testing.assert_close(token_advantages(objective, out), -0.01 * kl.double(), rtol=1e-12, atol=0)


def test_a_lone_completion_has_no_part_in_the_spread_of_returns_either():
    rewards, group = torch.tensor([1.0, 0.0, 0.3, math.nan]), torch.tensor([0, 0, 1, 1])
    sequence = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 1, 2, 1]))
    out = Outcomes(rewards, group, sequence, max_length=3)
    same = {"baseline": "leave_one_out", "scale": BatchStd(of="centred", unit="token", epsilon=0.0)}
    by_outcome = token_advantages(Objective(**same), out)
    by_returns = token_advantages(Objective(**same, credit="return_to_go"), out)
    torch.testing.assert_close(by_returns, by_outcome, rtol=1e-12, atol=0)
