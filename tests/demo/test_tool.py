"""``cohort demo tool``: its task, its model, and (slow) its whole run."""

import json
import math

import pytest

from cohort.cli import main
from cohort.config import load_config, to_toml
from cohort.demo import tool
from cohort.demo.tool_task import calls, products, right, sums
from cohort.environments.calls import CallParser
from cohort.environments.tools import Toolbox
from cohort.policy import load_tokenizer
from cohort.types import FinishReason, Turn


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(tool.MODEL))


def test_held_out_products_are_never_trained_on():
    train, held_out = (products(1000, held_out=flag, seed=0) for flag in (False, True))
    pairs = [{tuple(sorted(map(int, row["question"].split("*")))) for row in rows} for rows in (train, held_out)]
    assert not pairs[0] & pairs[1]
    for row in [*train, *held_out]:
        assert str(math.prod(map(int, row["question"].split("*")))) == row["answer"]


def test_sums():
    questions = [row["question"] for row in sums()]
    assert len(set(questions)) == len(questions) == 349
    assert all(str(sum(map(int, row["question"].split("+")))) == row["answer"] for row in sums())


def test_rewards():
    assert [right(text, "42") for text in ("42", "42.", "", "<tool_call>")] == [1.0, 0.0, 0.0, 0.0]
    turns = [Turn(9, FinishReason.EOS, (), calls=2, failed_calls=1), Turn(2, FinishReason.EOS, (), calls=0)]
    assert calls("42", turns) == 2.0


def test_the_model_is_small_and_complete():
    files = {path.name for path in tool.MODEL.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"} <= files
    assert sum(path.stat().st_size for path in tool.MODEL.iterdir()) < 3_000_000  # both models: 5 MB


def test_the_tokenizer_and_the_template_round_trip(tokenizer):
    for text in ("347*86", 'Error: "naïve" 日本\n\t{x} <b>', "\x00\x7f"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    box = Toolbox(["calculator"])
    function = {"name": "calculator", "arguments": {"expression": "347*86"}}
    messages = [
        {"role": "user", "content": "347*86"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "29842"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=box.schemas, tokenize=False, add_generation_prompt=True)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "347*86"}}\n</tool_call><|end|>'
    assert text == (f"<|tools|>calculator(expression)<|user|>347*86<|assistant|>{call}<|tool|>29842<|assistant|>")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    (parsed,) = CallParser.of(tokenizer, box.schemas).parse(call, "").calls
    assert (parsed.name, parsed.arguments, parsed.error) == (*function.values(), "")


@pytest.mark.slow
def test_a_short_demo(tmp_path, monkeypatch, capsys):
    overrides = ["--run.max_steps=2", "--rollout.prompts_per_step=4", "--report.progress=no"]
    (tmp_path / "short.toml").write_text(to_toml(load_config(tool.SETTINGS, overrides)))
    monkeypatch.setattr(tool, "SETTINGS", tmp_path / "short.toml")
    monkeypatch.setattr(tool, "EVAL_PRODUCTS", 60)
    assert main(["demo", "tool", "--output-dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["updates"], summary["completions"]) == (2, 64)
    # 60 samples: a share of 0.5 has a standard error of 6 points.
    before = summary["before"]
    assert 0.15 < before["easy"]["calls"] < 0.65
    assert 0.05 < before["hard"]["right"] < 0.45
    assert before["easy"]["right"] > 0.7
    assert math.isfinite(summary["after"]["hard"]["calls"])
    output = capsys.readouterr().out
    for part in ("hard: right", "easy: calls per problem", "tool: ", "<tool_call>", "run folder:"):
        assert part in output


@pytest.mark.slow
def test_the_whole_demo(tmp_path):
    assert main(["demo", "tool", "--output-dir", str(tmp_path / "run")]) == 0
    after = json.loads((tmp_path / "run" / "summary.json").read_text())["after"]
    assert after["hard"]["right"] >= 0.85
    assert after["easy"]["right"] >= 0.90
    assert after["easy"]["calls"] <= 0.10
