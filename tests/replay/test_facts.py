"""What a file says about its step is checked: anybody can have written it."""

import json
import math

import pyarrow.parquet
import pytest

from cohort.errors import RunFolderError
from cohort.replay.stored import Facts, read_step
from cohort.runs.tables import write_table
from tests.conftest import each
from tests.replay.steps import CONFIG, FACTS, made_up_step
from tests.replay.test_coefficients import TWO


def test_what_a_step_says():
    facts = Facts.of(
        FACTS
        | {
            "objective": {"kl": {"beta": 0.05}},
            "updates": [{"skipped": False, "learning_rate": 1e-3}, {"skipped": True}],
            "reward_weights": {"x": 2},
            "of a later version": 1,
        }
    )
    assert (facts.groups, facts.max_completion_length, facts.beta) == (1, 8, 0.05)
    assert (facts.learning_rates, facts.reward_weights) == ([1e-3, None], {"x": 2.0})


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
    with pytest.raises(ValueError, match=f"{next(iter(facts))}.* of the step: .*, got "):
        Facts.of(FACTS | facts)
    with pytest.raises(ValueError, match="of the step: Field required, got"):
        Facts.of({key: value for key, value in FACTS.items() if key not in facts})


def test_damage_names_the_file(tmp_path):
    made_up_step(tmp_path, TWO)
    path = tmp_path / "rollouts" / "step-1.parquet"
    table = pyarrow.parquet.read_table(path)
    write_table(table.replace_schema_metadata({"cohort_step": json.dumps(FACTS | {"groups": "abc"})}), path)
    with pytest.raises(
        RunFolderError, match=r"step-1.parquet is damaged: groups of the step: .*valid integer, got 'abc'"
    ):
        read_step(tmp_path, 1, CONFIG)
