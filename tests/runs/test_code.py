"""Which changes of a user's files change the hash of a function."""

import sys
from functools import partial
from textwrap import dedent

import pytest

from cohort.plugins import load_function
from cohort.rewards.names import resolve_reward
from cohort.runs.code import code_hash, named_code_hash

REWARD = """
    '''Rewards.'''
    import json
    from helper import scale as factor
    LIMIT = 3

    def score(completions, **_):
        '''Scores.'''
        from late import shift
        return [factor(min(len(text), LIMIT)) + shift() + inner(text) for text in completions]

    def inner(text): return json.loads('0')
    def other(completions, **_): return [0.0] * len(completions)
    if __name__ == '__main__': print(score(['a']))
"""
HELPER = "import unrelated\ndef scale(x): return used(x)\ndef used(x): return x / 2\ndef unused(x): return x\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder of a reward file and its neighbours; a function that changes a file and gives the hash of ``score``."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    contents = {"reward.py": dedent(REWARD), "helper.py": HELPER, "late.py": "def shift(): return 0\n"}
    contents["unrelated.py"] = "def noise(): return 0\n"

    def found(name="reward.py", old="", new="", spec="score"):
        for file, text in contents.items():
            assert file != name or old in text
            (tmp_path / file).write_text(text.replace(old, new) if file == name and old else text)
        for module in ("helper", "late", "unrelated"):
            sys.modules.pop(module, None)
        function = resolve_reward(f"{tmp_path}/reward.py:{spec}")
        assert code_hash(function) == named_code_hash(f"{tmp_path}/reward.py:{spec}") or "(" in spec
        return code_hash(function)

    return found


def test_what_a_reward_can_reach_counts_and_nothing_else(files):
    before = files()
    for name, old, new in [
        ("reward.py", "    return [factor", "    # a comment\n    return [ factor"),
        ("reward.py", "[0.0] * len", "[1.0] * len"),  # another function
        ("reward.py", "print(score", "print('x', score"),
        ("helper.py", "def unused(x): return x", ""),
        ("unrelated.py", "return 0", "return 1"),
    ]:
        assert files(name, old, new) == before, (name, new)
    for name, old, new in [
        ("reward.py", "LIMIT = 3", "LIMIT = 4"),
        ("reward.py", "loads('0')", "loads('1')"),
        ("helper.py", "x / 2", "x / 3"),
        ("late.py", "return 0", "return 1"),
    ]:
        assert files(name, old, new) != before, (name, new)
    assert files() == before


def test_bound_values_count(files):
    def score(completions, limit=1, **_):
        return [limit] * len(completions)

    hashes = {code_hash(one) for one in (score, partial(score, limit=2), partial(score, limit=3))}
    assert len(hashes) == 3
    assert code_hash(partial(score, limit=2)) == code_hash(partial(score, limit=2))


def test_code_of_cohort_counts_by_its_name_and_settings():
    first, other = (resolve_reward(f"soft_overlong(max_length=8, buffer={n})") for n in (2, 4))
    assert code_hash(first) != code_hash(other)
    assert code_hash(first) == code_hash(resolve_reward("soft_overlong(max_length=8, buffer=2)"))


class Judge:
    def __call__(self, completions, **_):
        return [0.0] * len(completions)


def test_objects_lambdas_and_code_without_a_source():
    assert code_hash(Judge()) == code_hash(Judge()) == code_hash(Judge)
    assert code_hash(lambda completions: completions) != "unknown"
    assert code_hash(eval("lambda completions: completions", {"__name__": "nowhere"})) == "unknown"
    assert code_hash(load_function("math:sqrt", what="reward")) == "unknown"
