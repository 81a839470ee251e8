"""Different and repeated tokens of completions, against loops."""

from collections import Counter

import numpy as np
import pytest

from cohort.train.layout import Rollout
from cohort.train.metrics import SHORTEST, repetition, text_metrics
from cohort.types import Completion, FinishReason, Group, Prompt


def by_loops(completions):
    repeated = total = 0
    for ids in completions:
        if len(ids) >= SHORTEST:
            spans = Counter(tuple(ids[n : n + 4]) for n in range(len(ids) - 3))
            total, repeated = total + sum(spans.values()), repeated + sum(count - 1 for count in spans.values())
    return repeated / total


def test_repetition_by_loops():
    random = np.random.default_rng(0)
    completions = [random.integers(0, 3, size) for size in (40, 3, 16, 100)]
    assert repetition(completions) == by_loops(completions)
    assert repetition([np.full(20, 150_000), np.full(20, 150_000)]) == pytest.approx(16 / 17)
    assert repetition([np.arange(200)] * 2) == 0.0  # only spans of the same completion count
    assert repetition([np.arange(15)]) is None


def test_different_completions_of_groups():
    def group(*texts, reason=FinishReason.EOS):
        prompt = Prompt(uid=0, row_index=0, token_ids=(0,), text="", prompt="", columns={})
        return Group(prompt, tuple(Completion.of_tokens(ids, [0.0] * len(ids), reason) for ids in texts))

    groups = [group([1, 2], [1, 2]), group([1, 2], [1]), group([3]), group([4], [5], reason=FinishReason.ERROR)]
    found = text_metrics(Rollout(groups, None, (True,) * 4))
    assert found["completions/distinct_share"] == 4 / 5
    assert found["groups/identical_share"] == 1 / 3
    assert found["completions/repetition"] is None
