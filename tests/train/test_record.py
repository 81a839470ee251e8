"""The names under which what a trainer is given in Python stands in the settings."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest

from cohort import GRPOConfig
from cohort.config import Source
from cohort.rewards.mathematics import math
from cohort.rewards.names import resolve_reward
from cohort.runs.code import code_hash
from cohort.train.inputs import Given, name_of, recorded
from tests.train.harness import ROWS, digits_reward

HERE = Path.cwd()


class Environment:
    def method(self):
        """Not at the top of its module."""


def test_names_of_functions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def score(completions, limit=1, **_): return [limit] * len(completions)\n")
    assert name_of(digits_reward) == "tests.train.harness:digits_reward"
    assert name_of(partial(digits_reward, limit=2, words=["a"])) == (
        "tests.train.harness:digits_reward(limit=2, words=['a'])"
    )
    assert name_of(Environment) == f"{__name__}:Environment"
    assert name_of(math) == "math"
    for spec in (f"{file}:score", f"{file}:score(limit=3)", "soft_overlong(max_length=8, buffer=2)"):
        name = name_of(resolve_reward(spec))
        assert name == spec
        assert resolve_reward(name)
    for unnamed in (Environment.method, lambda **_: 1, partial(digits_reward, 1), partial(digits_reward, of=object())):
        assert name_of(unnamed) is None


SCRIPT = """
'A script.'
import json
LIMIT = 2
def score(completions, **_): return [LIMIT] * len(completions)
"""


@pytest.mark.parametrize(
    ("end", "named"),
    [
        ("if __name__ == '__main__': print('training')", True),
        ("print('training')", False),
        ("", False),
    ],
)
def test_functions_of_a_script_have_a_name_if_it_can_be_imported(tmp_path, monkeypatch, end, named):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + end)
    spec = importlib.util.spec_from_file_location("__main__", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert name_of(module.score) == (f"{script}:score" if named else None)
    if named:
        assert code_hash(resolve_reward(name_of(module.score))) == code_hash(module.score) != "unknown"


def test_a_function_that_only_the_running_script_defines_has_no_name(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("if __name__ == '__main__':\n    def inner(completions): return [1.0]\n")
    spec = importlib.util.spec_from_file_location("__main__", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert name_of(module.inner) is None


def test_what_is_recorded_and_what_is_missing(tmp_path):
    config, missing = recorded(
        GRPOConfig(tools=["calculator"]),
        Given(
            model=tmp_path,
            reward_funcs=[digits_reward, "gsm8k"],
            train_dataset=["a.jsonl", Source(path="b.jsonl", weight=2.0)],
            eval_dataset={"x": "x.jsonl", "y": ["y.jsonl"]},
            tools=digits_reward,
            environment_factory={"one": Environment},
        ),
    )
    assert missing == {}
    assert (config.model.path, config.environment.factory) == (str(tmp_path), {"one": f"{__name__}:Environment"})
    assert config.reward.functions == ("tests.train.harness:digits_reward", "gsm8k")
    assert [source.path for source in config.data.train] == [str(HERE / "a.jsonl"), str(HERE / "b.jsonl")]
    y = Source(path=str(HERE / "y.jsonl"), name="y.jsonl")
    assert config.data.eval == {"x": str(HERE / "x.jsonl"), "y": (y,)}
    assert config.environment.tools == ("calculator", "tests.train.harness:digits_reward")

    given = {"model": object(), "train_dataset": ROWS, "eval_dataset": {"x": ROWS}, "processing_class": object()}
    given |= {"reward_funcs": [digits_reward, lambda **_: 1], "environment_factory": lambda: Environment()}
    config, missing = recorded(GRPOConfig(), Given(**given))
    assert config == GRPOConfig()
    assert missing.keys() == given.keys()
    assert missing["train_dataset"] == "rows in memory"
    assert "<lambda>" in missing["reward_funcs"]
