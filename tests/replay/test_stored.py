"""What is read of a file is what was sampled: segments, turns, supports, scores."""

import numpy as np
import pytest
import torch

from cohort.errors import RunFolderError
from cohort.replay.stored import read_step
from cohort.rewards.runner import Scores
from cohort.runs.tables import completion_columns, score_columns, with_facts, write_table
from cohort.train import lay_out
from cohort.types import Completion, Episode, FinishReason, Group, Prompt, Segment, Support, Turn
from tests.replay.steps import CONFIG, FACTS
from tests.train.updates import CPU

EOS = FinishReason.EOS


def several_turns():
    """The worked example of ``cohort.types``: tools, two segments, turns; and one completion without a token."""
    turns = (Turn(2, EOS, (), reward=0.5), Turn(1, EOS, (), reward=None))
    tool = Segment(np.array([7, 8, 40, 41, 9]), np.array([1, 1, 0, 0, 1], np.bool_))
    two = (
        Segment(np.array([5, 6]), np.array([1, 1], np.bool_)),
        Segment(np.array([50, 4]), np.array([0, 1], np.bool_)),
    )
    kept = Support(np.array([1, 3, 0], np.int32), np.array([2, 1, 0], np.int32), np.array([0, 1, 1], np.bool_))
    first = Completion((tool,), np.array([-1.0, np.nan, -0.5]), EOS, "a", 3, episode=Episode(turns))
    second = Completion(two, np.array([-1.0, -2.0, -3.0]), EOS, "b", 3, support=kept, episode=Episode(turns))
    empty = Completion((), np.zeros(0), FinishReason.ENVIRONMENT, "", 3, episode=Episode(()))
    groups = [
        Group(Prompt(4, 0, (2, 3), "x", "x", {}), (first, second)),
        Group(Prompt(9, 1, (5,), "y", "y", {}), (empty,)),
    ]
    rewards_SK = torch.tensor([[1.0, 2.0], [0.0, torch.nan], [torch.nan, torch.nan]], dtype=torch.float64)
    scores = Scores(torch.tensor([5.0, 0.0, torch.nan], dtype=torch.float64), rewards_SK, ("a", "b"), (1.0, 2.0))
    return groups, scores


def test_episodes_and_supports_come_back(tmp_path):
    groups, scores = several_turns()
    columns = completion_columns(groups) | score_columns(scores) | {"advantage": [1.0, -1.0, None]}
    table = with_facts(columns, FACTS | {"groups": 2, "reward_weights": {"a": 1.0, "b": 2.0}})
    write_table(table, tmp_path / "rollouts" / "step-1.parquet")
    stored = read_step(tmp_path, 1, CONFIG)
    assert stored.is_used_S.tolist() == [True, True, False]
    assert (stored.scores.names, stored.scores.weights) == (("a", "b"), (1.0, 2.0))
    torch.testing.assert_close(stored.scores.by_function_SK, scores.by_function_SK, equal_nan=True, rtol=0, atol=0)
    found, expected = (lay_out([group.usable for group in some], CPU) for some in (stored.groups, groups))
    assert found.prompt_ids == expected.prompt_ids
    assert found.support == expected.support
    for name in ("group_S", "lengths_S", "sequence_B", "lengths_B", "ids_T", "drawn_T", "sequence_N"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.sampler_logps_N, expected.sampler_logps_N, equal_nan=True, rtol=0, atol=0)
    assert torch.equal(found.turns.turn_N, expected.turns.turn_N)
    assert found.turns.rewards_Y.tolist() == [0.5, 0.0, 0.5, 0.0]


def test_lists_of_other_lengths_are_refused(tmp_path):
    groups, scores = several_turns()
    columns = completion_columns(groups) | score_columns(scores) | {"advantage": [1.0, -1.0, None]}
    columns["turn_lengths"] = [[2, 2], [2, 1], []]
    write_table(with_facts(columns, FACTS), tmp_path / "rollouts" / "step-1.parquet")
    with pytest.raises(RunFolderError, match="the turns of a completion have other lengths than its tokens"):
        read_step(tmp_path, 1, CONFIG)
