"""What a file says about its step is checked: anybody can have written it."""

import json
import math

import pyarrow.parquet
import pytest

from cohort.errors import RunFolderError
from cohort.replay.facts import Facts
from cohort.replay.stored import read_step
from cohort.runs.tables import write_table
from tests.conftest import each
from tests.replay.steps import CONFIG, made_up_step
from tests.replay.test_coefficients import TWO


def test_what_a_step_says():
    facts = Facts.of(
        {
            "groups": 4,
            "minibatches": 2,
            "max_completion_length": 8,
            "microbatch_tokens": 100,
            "shared_prompts": False,
            "objective": {"kl": {"beta": 0.05}},
            "updates": [{"skipped": False, "learning_rate": 1e-3}, {"skipped": True}],
            "reward_weights": {"x": 2},
        }
    )
    assert facts == Facts(True, 4, 2, 8, 100, False, 0.05, [1e-3, None], {"x": 2.0})
    assert Facts.of({}) == Facts(False, 0, None, None, 0, True, None, None, {})


@each(
    "facts",
    [
        {"groups": "abc"},
        {"groups": -1},
        {"minibatches": []},
        {"minibatches": -3},
        {"minibatches": 1.5},
        {"minibatches": True},
        {"minibatches": 10**12},
        {"max_completion_length": -3},
        {"max_completion_length": 0},
        {"microbatch_tokens": {}},
        {"shared_prompts": "no"},
        {"objective": []},
        {"objective": {"kl": 1}},
        {"objective": {"kl": {"beta": math.nan}}},
        {"objective": {"kl": {"beta": -1}}},
        {"updates": 3},
        {"updates": [3]},
        {"updates": [{"learning_rate": "1"}]},
        {"updates": [{"skipped": False, "learning_rate": math.inf}]},
        {"reward_weights": {"x": None}},
    ],
)
def test_other_facts_are_damage(facts):
    with pytest.raises(ValueError, match="expected"):
        Facts.of(facts)


def test_damage_names_the_file(tmp_path):
    made_up_step(tmp_path, TWO)
    path = tmp_path / "rollouts" / "step-1.parquet"
    table = pyarrow.parquet.read_table(path)
    write_table(table.replace_schema_metadata({"cohort_step": json.dumps({"groups": "abc"})}), path)
    with pytest.raises(RunFolderError, match=r"step-1.parquet is damaged: groups is 'abc'; expected a whole number"):
        read_step(tmp_path, 1, CONFIG)
