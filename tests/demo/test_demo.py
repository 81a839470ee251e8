"""The demo: its task, its model, and (slow) its whole run."""

import json
import random
from pathlib import Path

import pytest
import torch

from cohort.cli import main
from cohort.demo import run as demo
from cohort.demo.task import DIGITS, accuracy, is_held_out, problems, solution
from tests.conftest import DEMO_MODEL


def test_problems_are_distinct_and_the_held_out_ones_are_never_trained_on():
    train = {row["question"] for row in problems(8000, held_out=False, seed=0)}
    held_out = {row["question"] for row in problems(500, held_out=True, seed=0)}
    assert (len(train), len(held_out)) == (8000, 500)
    swapped = {"+".join(reversed(question.split("+"))) for question in held_out}
    assert not train & (held_out | swapped)
    share = sum(is_held_out(a, b) for a in range(1000, 1100) for b in range(1000, 1100)) / 10_000
    assert 0.08 < share < 0.12


def test_the_careful_solution_is_right():
    rng = random.Random(1)
    for _ in range(300):
        a, b = rng.randint(1000, 9999), rng.randint(1000, 9999)
        text = solution(a, b)
        assert accuracy([text], [str(a + b)]) == [1.0]
        assert len(text.splitlines()) == DIGITS + 1


def test_a_forgetful_solution_is_wrong_by_the_carries_left_out():
    assert solution(1999, 1, forget_carry=1.0).endswith("#### 1990")
    assert solution(1111, 2222, forget_carry=1.0).endswith("#### 3333")  # nothing to forget


@pytest.mark.parametrize("text", ["#### 13\n", "13", "#### 13 ", "#### 13\nand more", "#### 12", "", "####13"])
def test_only_the_asked_form_counts(text):
    expected = 1.0 if text == "#### 13\n" else 0.0
    assert accuracy([text], ["13"]) == [expected]


def test_the_model_is_small_and_complete():
    files = {path.name for path in DEMO_MODEL.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"} <= files
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) < 5_000_000


def test_the_tokenizer_gives_text_back(demo_tokenizer):
    text = solution(3478, 5869)
    assert demo_tokenizer.decode(demo_tokenizer(text)["input_ids"]) == text


def demo_steps(tmp_path, name, monkeypatch, seed=0, steps=2):
    """The demo cut to a few steps and problems."""
    real = demo.demo_config
    short = {"max_steps": steps, "prompts_per_step": 4, "progress": False}

    def cut(seed, output_dir):
        settings = {
            k: v
            for section in dict(real(seed, output_dir)).values()
            for k, v in section.model_dump(exclude_unset=True).items()
        }
        return demo.GRPOConfig(**settings | short)

    monkeypatch.setattr(demo, "demo_config", cut)
    monkeypatch.setattr(demo, "EVAL_PROBLEMS", 120)
    assert main(["demo", "--seed", str(seed), "--output-dir", str(tmp_path / name)]) == 0
    return json.loads((tmp_path / name / "summary.json").read_text())


def test_the_model_starts_between_30_and_55_percent(tmp_path, monkeypatch, capsys):
    summary = demo_steps(tmp_path, "run", monkeypatch)
    low, high = summary["accuracy_before_interval"]
    assert high > 0.30
    assert low < 0.55
    assert 0.25 < summary["accuracy_before"] < 0.60  # 120 samples: the interval is 17 points wide
    said = capsys.readouterr().out
    for part in ("before", "after", "held-out problems", "run folder:", "cohort train my.toml", "#### "):
        assert part in said
    keys = {"accuracy_before", "accuracy_after", "seconds_to_first_update", "seconds", "updates", "completions"}
    assert keys <= set(summary)
    assert (summary["updates"], summary["completions"]) == (2, 64)


def test_a_seed_gives_the_same_numbers_again(tmp_path, monkeypatch, capsys):
    def numbers(name):
        demo_steps(tmp_path, name, monkeypatch, seed=3)
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        timed = ("seconds", "time", "tokens_per_second")
        return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]

    assert numbers("a") == numbers("b")


def test_the_demo_leaves_a_folder_with_a_run_alone(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    assert main(["demo", "--output-dir", str(tmp_path / "run")]) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_demo(tmp_path, capsys):
    assert main(["demo", "--output-dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0.30 <= summary["accuracy_before"] <= 0.55
    assert summary["accuracy_after"] >= 0.90
    assert Path(tmp_path / "run" / "checkpoints").exists()


@pytest.fixture(autouse=True)
def _keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
