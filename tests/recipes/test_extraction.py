"""Recipe extraction: with the grammar every completion is JSON of the schema; the reward counts the fields."""

import json

import jsonschema
import pyarrow.parquet
import pytest

from cohort import shipped
from cohort.plugins import load_function
from tests.conftest import each

FOLDER = shipped.folder("examples") / "extraction"
SCHEMA = json.loads((FOLDER / "schema.json").read_text())
ROWS = [json.loads(line) for line in (FOLDER / "data.jsonl").read_text().splitlines()]
SMALL = (
    "--rollout.prompts_per_step", "2", "--rollout.num_generations", "4", "--run.max_steps", "1", "--data.eval_rows",
    "2", "--model.precision", "float32",
)  # fmt: skip


def rollouts(run):
    return pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()


def test_with_the_grammar_every_completion_is_json_and_fields_decide(run_recipe, tiny_chat_model):
    run = run_recipe("extraction", "--model.path", tiny_chat_model, *SMALL, "--rollout.max_completion_length", "400")
    table = rollouts(run)
    answers = {row["message"]: row["answer"] for row in ROWS}
    for row in table:
        text = row["completion"].removesuffix("<eos>")
        found = json.loads(text)
        assert json.dumps(found, ensure_ascii=False) == text  # strict white space
        jsonschema.validate(found, SCHEMA)
        (answer,) = (answer for message, answer in answers.items() if message in row["prompt"])
        share = sum(found[name] == value and type(found[name]) is type(value) for name, value in answer.items()) / 5
        assert row["reward"] == pytest.approx(share + 0.2, abs=1e-6)
        assert row["extra/wrong"] == ", ".join(name for name in answer if found[name] != answer[name])
    assert len({row["reward"] for row in table}) > 1  # chance alone gets `express` right in some
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (step,) = (one for one in metrics if "rewards/valid" in one)
    assert step["rewards/valid"] == 1.0
    assert 0 < step["custom/express"] < 1
    assert "eval/pass@1/mean" in metrics[-1]


def test_without_the_grammar_the_model_has_to_find_the_form(run_recipe, tiny_chat_model):
    run = run_recipe("extraction", "--model.path", tiny_chat_model, *SMALL, "--rollout.json_schema", "none")
    assert all(row["reward"] == 0 for row in rollouts(run))  # a random model never does


RIGHT = {"customer": "Ann Lee", "quantity": 12, "express": True}


@each(
    ("text", "share"),
    [
        (json.dumps(RIGHT), 1.0),
        (json.dumps(RIGHT, indent=1), 1.0),
        (json.dumps(RIGHT | {"quantity": 12.0}), 2 / 3),
        (json.dumps(RIGHT | {"quantity": "12"}), 2 / 3),
        (json.dumps(RIGHT | {"express": 1}), 2 / 3),
        (json.dumps(RIGHT | {"customer": "ann lee"}), 2 / 3),
        (json.dumps(RIGHT | {"note": ""}), 0.0),
        (json.dumps({"quantity": 12}), 0.0),
        (json.dumps([RIGHT]), 0.0),
        (json.dumps(RIGHT) + ".", 0.0),
        (json.dumps(RIGHT)[:-1], 0.0),
        ('{"quantity": 3, "customer": "Ann Lee", "express": true, "quantity": 12}', 0.0),
        ("[" * 100_000, 0.0),
        ("```json\n" + json.dumps(RIGHT) + "\n```", 0.0),
    ],
)
def test_the_share_of_exact_fields(text, share):
    fields, logged, metrics = load_function(f"{FOLDER}/rewards.py:fields", what="reward"), {}, {}
    assert fields(text, RIGHT, logged.__setitem__, metrics.__setitem__) == pytest.approx(share)
    assert sum(metrics.values()) == pytest.approx(share * 3)
    assert len([name for name in logged["wrong"].split(", ") if name]) == 3 - round(share * 3)
    if text.startswith("{"):
        assert fields(text[2:], RIGHT, logged.__setitem__, metrics.__setitem__, prefill=text[:2]) == pytest.approx(
            share
        )


def test_shipped_rows_fit_the_schema_and_no_evaluation_row_is_trained_on():
    schema = jsonschema.Draft202012Validator(SCHEMA)
    for row in ROWS:
        schema.validate(row["answer"])
        assert list(row["answer"]) == SCHEMA["required"]
    orders = [json.dumps(row["answer"]) for row in ROWS]
    assert not set(orders[:200]) & set(orders[200:])
