"""Which changes of a user's files and values change their hashes."""

import sys
from functools import partial

import pytest

from cohort.plugins import load_function
from cohort.rewards.names import resolve_reward
from cohort.runs.code import code_hash, named_code_hash, values_hash

REWARD = "LIMIT = 3\ndef score(completions, limit=1, **_): return [LIMIT] * len(completions)\n"


@pytest.fixture
def hash_of(tmp_path, monkeypatch):
    """The hash of ``score`` in a file with some text."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def found(text):
        (tmp_path / "reward.py").write_text(text)
        spec = f"{tmp_path}/reward.py:score"
        function = resolve_reward(spec)
        assert code_hash(function) == named_code_hash(spec)
        return code_hash(function)

    return found


def test_the_file_counts_without_comments_and_formatting(hash_of):
    before = hash_of(REWARD)
    assert hash_of("# a comment\n" + REWARD.replace("LIMIT = 3", "LIMIT  =  3")) == before
    for text in (REWARD.replace("LIMIT = 3", "LIMIT = 4"), REWARD + "def other(): ...\n"):
        assert hash_of(text) != before


def test_bound_values_count_on_their_own():
    def score(completions, limit=1, **_):
        return [limit] * len(completions)

    bound = partial(score, limit=2)
    assert code_hash(bound) == code_hash(score)
    assert (values_hash(score), values_hash(bound)) == ("", values_hash(partial(score, limit=2)))
    assert len({values_hash(one) for one in (score, bound, partial(score, limit=3))}) == 3
    judge = partial(score, api_key="one")
    assert values_hash(judge) == values_hash(partial(score, api_key="another"))


def test_code_of_cohort_counts_by_its_name_and_settings():
    first, other = (resolve_reward(f"soft_overlong(max_length=8, buffer={n})") for n in (2, 4))
    assert code_hash(first) == code_hash(other) != "unknown"
    assert values_hash(first) != values_hash(other)
    assert values_hash(first) == values_hash(resolve_reward("soft_overlong(max_length=8, buffer=2)"))


class Judge:
    def __call__(self, completions, **_):
        return [0.0] * len(completions)


def test_objects_lambdas_and_code_without_a_source():
    assert code_hash(Judge()) == code_hash(Judge) == code_hash(lambda completions: completions) != "unknown"
    assert code_hash(eval("lambda completions: completions", {"__name__": "nowhere"})) == "unknown"
    assert code_hash(load_function("math:sqrt", what="reward")) == "unknown"
