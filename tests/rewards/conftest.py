"""Rollouts made by hand, and runners that are closed after the test."""

import pytest

from cohort.config import RewardConfig
from cohort.rewards import RewardRunner
from cohort.types import Completion, FinishReason, Group, Prompt


def completion(text, reason=FinishReason.EOS, ids=None):
    """A completion with one token per character."""
    ids = tuple(range(len(text))) or (0,) if ids is None else ids
    return Completion.of_tokens(ids, (0.0,) * len(ids), reason, text, 0)


def prompt(uid=0, messages=None, prefill="", **columns):
    return Prompt(uid, uid, (uid,), f"{uid}?", messages or f"{uid}?", columns, prefill=prefill)


def rollout(*texts, ids=None, **columns):
    """A group for each list of texts. The column ``answer`` is the index of the group."""
    return [
        Group(prompt(uid, **{"answer": str(uid)} | columns), tuple(completion(text, ids=ids) for text in group))
        for uid, group in enumerate(texts)
    ]


@pytest.fixture
def runner_of():
    made = []

    def make(*functions, weights=None, per_token=False, **settings):
        made.append(RewardRunner(functions, weights, RewardConfig(**settings), per_token=per_token))
        return made[-1]

    yield make
    for runner in made:
        runner.close()
