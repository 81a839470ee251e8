"""Rollouts as flat tensors: assembling, selecting, minibatches. How they are packed: test_packing.py."""

import pytest
import torch

from cohort.objective import PRESETS
from cohort.train import assemble, assign_advantages, select, split_minibatches
from cohort.types import Completion, FinishReason, Group, Prompt, Scores


def make_groups(lengths_PG, prompt_lengths=None):
    """Groups whose tokens are numbered 2, 3, 4, ... over the whole rollout, and their sampler log-probs 0, -1, -2,
    ..."""
    token, groups = 2, []
    for p, lengths in enumerate(lengths_PG):
        completions = []
        for length in lengths:
            ids = tuple(range(token, token + length))
            token += length
            completions.append(Completion(ids, tuple(2.0 - t for t in ids), FinishReason.EOS, "", 0))
        size = prompt_lengths[p] if prompt_lengths else p + 1
        groups.append(Group(Prompt(p, p, (1,) * size, "", "", {}), tuple(completions)))
    return groups


def make_batch(lengths_PG, rewards, **kwargs):
    rewards_S = torch.tensor(rewards, dtype=torch.float64)
    scores = Scores(rewards_S, rewards_S[:, None], ("r",))
    batch = assemble(make_groups(lengths_PG, **kwargs), torch.device("cpu"))
    return assign_advantages(batch, scores, PRESETS["default"], max_completion_length=8)


def test_assembled_tensors():
    batch = make_batch([[3, 2], [1, 2]], [1.0, 0.0, 5.0, 5.0])
    assert batch.group_S.tolist() == [0, 0, 1, 1]
    assert batch.sequence_N.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert batch.sampler_logps_N.tolist() == [0, -1, -2, -3, -4, -5, -6, -7]
    expected = [*[0.70711] * 3, *[-0.70711] * 2, 0, 0, 0]
    assert batch.advantages_N.tolist() == pytest.approx(expected, abs=1e-5)
    assert batch.prompt_ids == ((1,), (1,), (1, 1), (1, 1))
    assert (batch.num_sequences, batch.num_tokens) == (4, 8)


def test_selecting_keeps_tokens_with_their_completions():
    batch = make_batch([[3, 2], [1, 2]], [1.0, 0.0, 1.0, 0.0])
    part = select(batch, [3, 0])
    assert part.completion_ids == (batch.completion_ids[3], batch.completion_ids[0])
    assert part.sequence_N.tolist() == [0, 0, 1, 1, 1]
    assert part.sampler_logps_N.tolist() == [-6, -7, 0, -1, -2]
    assert part.advantages_N.tolist() == [*batch.advantages_N[6:8].tolist(), *batch.advantages_N[0:3].tolist()]
    assert part.old_logps_N is None


def test_minibatches_are_equal_shares_of_whole_groups():
    batch = make_batch([[3, 2], [1, 2], [4, 1], [1, 1]], [1.0, 0.0] * 4)
    parts = split_minibatches(batch, 2)
    assert [part.group_S.tolist() for part in parts] == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    assert split_minibatches(batch, 1) == [batch]


def test_the_worked_example_of_the_glossary():
    batch = make_batch([[3, 2], [1, 2]], [1.0, 0.0, 5.0, 5.0])
    assert batch.sequence_N.tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert (batch.num_sequences, batch.num_tokens) == (4, 8)
