"""The layout of a rollout, its parts, and the packs and microbatches that they are cut into."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.objective import PRESETS
from cohort.rewards.runner import Scores
from cohort.train import active_part, assign_advantages, lay_out, packs, part_of, split_minibatches
from cohort.train.layout import microbatches
from cohort.types import Completion, Episode, FinishReason, Group, Prompt, Segment, Support, Turn
from tests.train.updates import CPU, all_sequences, segments_of

EOS = FinishReason.EOS


def make_groups(lengths_PG, prompt_lengths=None):
    """Groups whose tokens are numbered 2, 3, 4, ... through the rollout, with sampler log-probs 0, -1, -2, ..."""
    token, groups = 2, []
    for p, lengths in enumerate(lengths_PG):
        completions = []
        for length in lengths:
            ids = range(token, token + length)
            token += length
            completions.append(Completion.of_tokens(list(ids), [2.0 - t for t in ids], EOS))
        size = prompt_lengths[p] if prompt_lengths else p + 1
        groups.append(Group(Prompt(p, p, (1,) * size, "", "", {}), tuple(completions)))
    return groups


def make_batch(lengths_PG, rewards, **kwargs):
    rewards_S = torch.tensor(rewards, dtype=torch.float64)
    scores = Scores(rewards_S, rewards_S[:, None], ("r",))
    batch = lay_out(make_groups(lengths_PG, **kwargs), CPU)
    return assign_advantages(batch, scores, PRESETS["default"], max_completion_length=8)


# The layout -----------------------------------------------------------------------------------------------------------


def test_completions_of_one_turn():
    batch = make_batch([[3, 2], [1, 2]], [1.0, 0.0, 5.0, 5.0])
    assert batch.group_S.tolist() == [0, 0, 1, 1]
    assert batch.lengths_S.tolist() == batch.lengths_B.tolist() == [3, 2, 1, 2]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert batch.ids_T.tolist() == list(range(2, 10))
    assert batch.drawn_T is None
    assert batch.sampler_logps_N.tolist() == [0, -1, -2, -3, -4, -5, -6, -7]
    assert batch.advantages_N.tolist() == pytest.approx([*[0.70711] * 3, *[-0.70711] * 2, 0, 0, 0], abs=1e-5)
    assert batch.prompt_ids == ((1,), (1, 1))
    assert (batch.num_sequences, batch.num_tokens) == (4, 8)


def several_turns():
    """The worked example of ``cohort.types``."""
    tool = Completion.of_tokens([7, 8, 40, 41, 9], [-1.0, -2.0, -3.0], EOS, drawn=[1, 1, 0, 0, 1])
    rewritten = Completion(
        (Segment(np.array([5, 6])), Segment(np.array([50, 4]), np.array([False, True]))),
        np.array([-4.0, -5.0, -6.0]),
        EOS,
        "",
        0,
    )
    first = (Completion.of_tokens([3, 1, 2], [-0.1, -0.2, -0.3], EOS), tool)
    second = (Completion.of_tokens([2], [-0.5], EOS), rewritten)
    return [Group(Prompt(p, p, (1, 1 + p), "", "", {}), some) for p, some in enumerate((first, second))]


def test_the_worked_example():
    batch = lay_out(several_turns(), CPU)
    assert batch.group_S.tolist() == [0, 0, 1, 1]
    assert batch.lengths_S.tolist() == [3, 3, 1, 3]
    assert batch.sequence_B.tolist() == [0, 1, 2, 3, 3]
    assert batch.lengths_B.tolist() == [3, 5, 1, 2, 2]
    assert batch.ids_T.tolist() == [3, 1, 2, 7, 8, 40, 41, 9, 2, 5, 6, 50, 4]
    assert batch.drawn_T.int().tolist() == [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1, 1, 1, 2, 3, 3, 3]
    assert batch.sampler_logps_N.tolist() == [-0.1, -0.2, -0.3, -1, -2, -3, -0.5, -4, -5, -6]
    assert several_turns()[1].completions[1].token_ids.tolist() == [5, 6, 4]


def test_given_tokens_at_the_end_of_a_segment_are_left_out():
    late = Completion.of_tokens([7, 40, 8, 41, 42], [-1.0, -2.0], EOS, drawn=[1, 0, 1, 0, 0])
    nothing = Completion.of_tokens([40], [], EOS, drawn=[0])
    batch = lay_out([Group(Prompt(0, 0, (1,), "", "", {}), (late, nothing, late))], CPU)
    assert batch.ids_T.tolist() == [7, 40, 8] * 2
    assert batch.sequence_B.tolist() == [0, 2]
    assert batch.lengths_S.tolist() == [2, 0, 2]
    (pack,) = packs(batch, all_sequences(batch), 100)
    assert pack.microbatches == ((0, 2),)


def acted(rewards, drawn, reward=None):
    """A completion with turns of these many drawn tokens and these rewards."""
    turns = tuple(Turn(count, EOS, (), reward=reward) for count, reward in zip(drawn, rewards, strict=True))
    plain = Completion.of_tokens(range(sum(drawn)), [-1.0] * sum(drawn), EOS)
    return replace(plain, episode=Episode(turns, reward))


def test_turns_are_laid_end_to_end():
    first = (acted([1.0, None], [2, 1]), Completion.of_tokens([7, 8], [-1.0, -1.0], EOS))
    second = (acted([], []), acted([0.5, -1.0, None], [1, 0, 2]))
    groups = [Group(Prompt(p, p, (1,), "", "", {}), some) for p, some in enumerate((first, second))]
    turns = lay_out(groups, CPU).turns
    assert turns.sequence_Y.tolist() == [0, 0, 1, 3, 3, 3]
    assert turns.turn_N.tolist() == [0, 0, 1, 2, 2, 3, 5, 5]
    assert turns.rewards_Y.tolist() == [1.0, 0.0, 0.0, 0.5, -1.0, 0.0]
    assert lay_out(several_turns(), CPU).turns is None


def test_the_environments_rewards_count_from_their_turn_on_as_often_as_in_the_score():
    # Rewards 3 = 1 + 2 (of the end) and 4 = 0 + 4, and 10 and 20 of another function; the first ends after a turn more.
    completions = (acted([1.0, None], [2, 1], 3.0), acted([None], [2], 4.0))
    batch = lay_out([Group(Prompt(0, 0, (1,), "", "", {}), completions)], CPU)
    by_turns = PRESETS["default"].replace(credit="turns", baseline="leave_one_out", scale="none")

    def advantages(names, weights):
        by_function_SK = torch.tensor([[3.0, 10.0], [4.0, 20.0]], dtype=torch.float64)
        rewards_S = by_function_SK @ torch.tensor(weights or (1.0, 1.0), dtype=torch.float64)
        scores = Scores(rewards_S, by_function_SK, names, weights)
        return assign_advantages(batch, scores, by_turns, max_completion_length=8).advantages_N.tolist()

    # Totals 13 and 24. From turn 1 on: 12, without another to compare with.
    assert advantages(("environment_reward", "other"), None) == [-11, -11, 12, 11, 11]
    # Totals 16 and 28. From turn 1 on: 16 - 2 * 1.
    assert advantages(("environment_reward", "other"), (2.0, 1.0)) == [-12, -12, 14, 12, 12]
    # A function of another name: everything is earned at the end.
    assert advantages(("mine", "other"), None) == [-11, -11, 13, 11, 11]


def test_supports_are_laid_end_to_end():
    first = Support(np.array([1, 3, 0], np.int32), np.array([2, 1], np.int32), np.array([False, True]))
    joined = Support.join([first, None, first], [2, 1, 2])
    assert joined.token_ids_U.tolist() == [1, 3, 0, 1, 3, 0]
    assert joined.counts_N.tolist() == [2, 1, 0, 2, 1]
    assert joined.excluded_N.tolist() == [False, True, True, False, True]
    assert joined.select(np.array([3, 4])) == first
    assert joined.select(np.array([1, 2, 0])).token_ids_U.tolist() == [0, 1, 3]
    assert Support.join([None, None], [2, 1]) is None


def test_an_empty_rollout():
    batch = lay_out([], CPU)
    assert (batch.num_sequences, batch.num_tokens) == (0, 0)
    assert split_minibatches(batch, 2) == packs(batch, all_sequences(batch), 10) == []


# Parts ----------------------------------------------------------------------------------------------------------------


def test_parts_index_their_tokens():
    batch = make_batch([[3, 2], [1, 2]], [1.0, 0.0, 1.0, 0.0])
    part = part_of(batch, [3, 0])
    assert part.sequence_N.tolist() == [0, 0, 1, 1, 1]
    assert part.tokens_N.tolist() == [6, 7, 0, 1, 2]
    assert part.lengths_S.tolist() == [2, 3]
    smaller = part.select(torch.tensor([1]))
    assert (smaller.sequences_S.tolist(), smaller.tokens_N.tolist()) == ([0], [0, 1, 2])
    assert smaller.positions_N.tolist() == [2, 3, 4]


def test_minibatches_are_equal_shares_of_the_groups():
    batch = make_batch([[3, 2], [1, 2], [4, 1], [1, 1]], [1.0, 0.0] * 4)
    shares = split_minibatches(batch, 2)
    assert [batch.group_S[part.sequences_S].tolist() for part in shares] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert [part.tokens_N.tolist() for part in shares] == [list(range(8)), list(range(8, 15))]
    assert [part.num_sequences for part in split_minibatches(batch, 3)] == [4, 2, 2]
    assert [part.num_sequences for part in split_minibatches(batch, 9)] == [2] * 4
    (only,) = split_minibatches(batch, 1)
    assert only.tokens_N.tolist() == list(range(15))


def test_active_sequences_have_an_advantage_unless_another_term_needs_all():
    batch = make_batch([[3, 2], [1, 2]], [1.0, 0.0, 5.0, 5.0])
    part = part_of(batch, [3, 1, 0])
    active = active_part(batch, part, PRESETS["default"])
    assert active.sequences_S.tolist() == [1, 0]
    assert active.positions_N.tolist() == [2, 3, 4, 5, 6]
    for objective in (PRESETS["grpo"], PRESETS["default"].replace(top_entropy=0.5)):
        assert active_part(batch, part, objective).num_sequences == 3
    assert active_part(batch, part, PRESETS["default"], other_terms=0.1).num_sequences == 3


# Cuts -----------------------------------------------------------------------------------------------------------------

groups = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(1, 9), min_size=2, max_size=4)), min_size=1, max_size=8
)


def batch_of(drawn):
    """A batch with a group for each (prompt length, completion lengths). Prompts of one length are equal."""
    lengths = [of for _, of in drawn]
    rewards = [float(i % 2) for i in range(sum(map(len, lengths)))]
    return make_batch(lengths, rewards, prompt_lengths=[length for length, _ in drawn])


def prompts_of(batch):
    return [batch.prompt_ids[group] for group in batch.group_S.tolist()]


@given(groups, st.integers(1, 60))
@settings(deadline=None, max_examples=50)
def test_shared_packs(drawn, budget):
    """Every sequence and every prompt once, within the budget. The number of microbatches and the size of the largest are
    minimal, compared with an exhaustive search over all cuts."""
    batch = batch_of(drawn)
    lengths_S, prompt_S = batch.lengths_S.tolist(), prompts_of(batch)
    found = packs(batch, all_sequences(batch), budget)
    cuts = [cut for pack in found for cut in pack.microbatches]
    assert sorted(itertools.chain(*cuts)) == list(range(batch.num_sequences))
    assert [prompt for pack in found for prompt in pack.prompt_ids] == list(dict.fromkeys(prompt_S))
    for pack in found:
        assert len(pack.prompt_ids) == 1 or sum(map(len, pack.prompt_ids)) <= budget
        prompts = [prompt_S[s] for cut in pack.microbatches for s in cut]
        assert [prompt for prompt, _ in itertools.groupby(prompts)] == list(pack.prompt_ids)  # neighbours
        lengths = tuple(lengths_S[s] for s in itertools.chain(*pack.microbatches))

        @functools.cache
        def best(first, lengths=lengths):
            """(number of parts, tokens of the largest) of the sequences from ``first`` on."""
            if first == len(lengths):
                return 0, 0
            tried = []
            for stop in range(first + 1, len(lengths) + 1):
                size = sum(lengths[first:stop])
                if stop == first + 1 or size <= budget:
                    count, largest = best(stop)
                    tried.append((count + 1, max(largest, size)))
            return min(tried)

        assert len(pack.microbatches) == best(0)[0]
        largest = max(sum(lengths_S[s] for s in cut) for cut in pack.microbatches)
        assert largest == best(0)[1] or max(lengths) > budget


@given(groups, st.integers(1, 60))
@settings(deadline=None, max_examples=50)
def test_packs_of_padded_rows(drawn, budget):
    batch = batch_of(drawn)
    lengths_S, prompt_S = batch.lengths_S.tolist(), prompts_of(batch)
    (pack,) = packs(batch, all_sequences(batch), budget, shared=False)
    assert sorted(itertools.chain(*pack.microbatches)) == list(range(batch.num_sequences))
    assert pack.prompt_ids == tuple(dict.fromkeys(prompt_S))
    for cut in pack.microbatches:
        longest = max(len(prompt_S[s]) + lengths_S[s] for s in cut)
        assert len(cut) == 1 or len(cut) * longest <= budget


def test_packs_by_hand():
    batch = make_batch([[3, 2], [1, 2], [4, 4]], [1.0, 0.0] * 3, prompt_lengths=[5, 2, 4])
    first, second = packs(batch, all_sequences(batch), 8)
    assert (first.prompt_ids, first.microbatches) == (((1,) * 5, (1,) * 2), ((0, 1, 2, 3),))
    assert (second.prompt_ids, second.microbatches) == (((1,) * 4,), ((4, 5),))
    # Rows of 8, 7, 3, 4, 8 and 8 tokens, longest first: two of 8 are 16 tokens with padding, 8 and 7 are too.
    (pack,) = packs(batch, all_sequences(batch), 16, shared=False)
    assert pack.microbatches == ((0, 4), (5, 1), (3, 2))
    # A sequence longer than the budget has a microbatch to itself.
    batch = make_batch([[9, 1, 1], [2, 2, 12]], [1.0, 0.0] * 3, prompt_lengths=[30, 3])
    first, second = packs(batch, all_sequences(batch), 5)
    assert (first.microbatches, second.microbatches) == (((0,), (1, 2)), ((3, 4), (5,)))


def test_microbatches_contain_the_rows_of_their_sequences():
    """The part is in another order than the batch, and one sequence has two segments."""
    batch = lay_out(several_turns(), CPU)
    part, seen = part_of(batch, [3, 1, 2, 0]), []
    for pack in packs(batch, part, 5):
        for micro in microbatches(batch, part, pack):
            rows = micro.rows
            ids = [tuple(one.tolist()) for one in rows.ids_T.split(rows.lengths_B.tolist())]
            prompts = [pack.prompt_ids[p] for p in rows.prompt_B.tolist()]
            expected = [
                segment
                for s in micro.part.sequences_S.tolist()
                for segment, of in zip(segments_of(batch), batch.sequence_B.tolist(), strict=True)
                if of == s
            ]
            assert list(zip(prompts, ids, strict=True)) == expected
            drawn = rows.ids_T if rows.drawn_T is None else rows.ids_T[rows.drawn_T]
            assert len(drawn) == micro.part.num_tokens
            assert torch.equal(part.tokens_N[micro.part.positions_N], micro.part.tokens_N)
            seen += micro.part.positions_N.tolist()
    assert sorted(seen) == list(range(10))
