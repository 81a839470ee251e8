"""Recipe code: the reward is of the hidden tests; a program that knows the answer of the shown one gets nothing."""

import asyncio
import json

import pyarrow.parquet
import pytest

from cohort import shipped
from cohort.errors import DataError, RewardError
from cohort.plugins import load_function

REWARDS = shipped.folder("examples") / "code" / "rewards.py"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(0, 5) == 5"]
ROW = {"text": "Write a function to add two numbers.", "code": "", "test_setup_code": "", "challenge_test_list": []}


@pytest.fixture
def data(tmp_path):
    rows = [
        {**ROW, "task_id": 1, "test_list": TESTS},
        {**ROW, "task_id": 2, "test_list": ["assert area(Box(2)) == 4"], "test_setup_code": "class Box: ..."},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "--data.train", tmp_path / "rows.jsonl", "--data.eval", ""


PROGRAMS = {"a + b": (1.0, 1.0), "3": (0.0, 1.0)}
"""What a program returns, and its rewards by the hidden tests and by the shown one."""


def test_only_hidden_tests_are_rewarded(run_recipe, tiny_chat_model, data):
    form = r"```python\ndef add\(a, b\): return (a \+ b|3)\n```|So\."
    run = run_recipe(
        "code", *data, "--model.path", tiny_chat_model, "--run.max_steps", "1", "--rollout.prompts_per_step", "1",
        "--rollout.num_generations", "6", "--rollout.regex", form, "--rollout.temperature", "20", "--reward.cache", "true", "--run.seed", "1",
        "--rollout.max_completion_length", "64", "--model.precision", "float32",
    )  # fmt: skip
    prompt = (run / "first_prompt.txt").read_text()
    assert TESTS[0] in prompt
    assert TESTS[1] not in prompt
    table = pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()
    found = set()
    for row in table:
        program = row["completion"].partition("return ")[2].partition("\n")[0]
        found.add(program)
        hidden, shown = PROGRAMS.get(program, (0.0, 0.0))
        assert (row["reward"], row["rewards/hidden"], row["rewards/shown"]) == (hidden, hidden, shown)
        assert row["extra/passed"] == ("2/2" if hidden else "0/2")
    assert found == {*PROGRAMS, ""}
    step = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert step["rewards/shown"] > step["rewards/hidden"] > 0


def test_a_row_whose_only_test_is_shown_is_unscored_and_part_of_the_tests_gives_part_of_the_reward():
    hidden, logged = load_function(f"{REWARDS}:hidden", what="reward"), {}
    assert asyncio.run(hidden("", TESTS[:1], "", logged.__setitem__)) is None
    program = "```python\ndef add(a, b): return 4\n```"
    assert asyncio.run(hidden(program, TESTS, "", logged.__setitem__, partial=True)) == 0.5
    assert logged["passed"] == "1/2"


def test_without_a_sandbox_or_with_other_columns_nothing_is_sampled(
    run_recipe, tiny_chat_model, data, tmp_path, monkeypatch
):
    with pytest.raises(DataError, match="test_list"):
        run_recipe(
            "code",
            *data,
            "--rollout.prompts_per_step",
            "1",
            "--model.path",
            tiny_chat_model,
            "--data.columns",
            '{ tests = "tests_list" }',
        )
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RewardError, match="bubblewrap"):
        run_recipe("code", *data, "--rollout.prompts_per_step", "1", "--model.path", tiny_chat_model)
