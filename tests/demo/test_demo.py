"""The demo: its task, its model, and (slow) its whole run."""

import json
import random
from pathlib import Path

import pytest

from cohort.cli import main
from cohort.config import load_config, to_toml
from cohort.demo import run as demo
from cohort.demo.task import DIGITS, accuracy, is_held_out, problems, solution
from tests.conftest import DEMO_MODEL


def test_problems_are_distinct_and_held_out_ones_are_never_trained_on():
    train = {row["question"] for row in problems(8000, held_out=False, seed=0)}
    held_out = {row["question"] for row in problems(500, held_out=True, seed=0)}
    assert (len(train), len(held_out)) == (8000, 500)
    swapped = {"+".join(reversed(question.split("+"))) for question in held_out}
    assert not train & (held_out | swapped)
    share = sum(is_held_out(a, b) for a in range(1000, 1100) for b in range(1000, 1100)) / 10_000
    assert 0.08 < share < 0.12


def test_solutions():
    rng = random.Random(1)
    for _ in range(300):
        a, b = rng.randint(1000, 9999), rng.randint(1000, 9999)
        text = solution(a, b)
        assert accuracy([text], [str(a + b)]) == [1.0]
        assert len(text.splitlines()) == DIGITS + 1
    assert solution(1999, 1, forget_carry=1.0).endswith("#### 1990")  # wrong by the forgotten carries
    assert solution(1111, 2222, forget_carry=1.0).endswith("#### 3333")  # nothing to forget


def test_only_the_exact_answer_line_counts():
    texts = ["#### 13\n", "13", "#### 13 ", "#### 13\nand more", "#### 12", "", "####13"]
    assert accuracy(texts, ["13"] * 7) == [1.0, 0, 0, 0, 0, 0, 0]


def test_the_model_is_small_and_complete():
    files = {path.name for path in DEMO_MODEL.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"} <= files
    assert sum(path.stat().st_size for path in DEMO_MODEL.iterdir()) < 5_000_000


def test_the_tokenizer_round_trips(demo_tokenizer):
    text = solution(3478, 5869)
    assert demo_tokenizer.decode(demo_tokenizer(text)["input_ids"]) == text


def test_a_stopped_demo_says_so_once(tmp_path, monkeypatch, capsys):
    class Stopping(demo.GRPOTrainer):
        def train(self):
            self.stop()
            return super().train()

    config = load_config(demo.SETTINGS, ["--run.max_steps=2", "--rollout.prompts_per_step=4"])
    (tmp_path / "short.toml").write_text(to_toml(config))
    monkeypatch.setattr(demo, "SETTINGS", tmp_path / "short.toml")
    monkeypatch.setattr(demo, "EVAL_PROBLEMS", 2)
    monkeypatch.setattr(demo, "GRPOTrainer", Stopping)
    assert main(["demo", "--output-dir", str(tmp_path / "a")]) == 75
    assert capsys.readouterr().err.count("stopped by stop()") == 1


def test_a_short_demo(tmp_path, monkeypatch, capsys):
    config = load_config(demo.SETTINGS, ["--run.max_steps=2", "--rollout.prompts_per_step=4", "--report.progress=no"])
    (tmp_path / "short.toml").write_text(to_toml(config))
    monkeypatch.setattr(demo, "SETTINGS", tmp_path / "short.toml")
    monkeypatch.setattr(demo, "EVAL_PROBLEMS", 40)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # a second thread waits for the first, and for the tests beside it
    assert main(["demo", "--seed", "3", "--output-dir", str(tmp_path / "a")]) == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    low, high = summary["accuracy_before_interval"]
    assert (low < 0.55, high > 0.30) == (True, True)
    assert 0.20 < summary["accuracy_before"] < 0.65  # 40 samples: the interval is 30 points wide
    output = capsys.readouterr().out
    for part in ("before", "after", "held-out problems", "run folder:", "cohort train my.toml", "#### "):
        assert part in output
    assert {"accuracy_after", "seconds_to_first_update", "seconds"} <= set(summary)
    assert (summary["updates"], summary["completions"]) == (2, 64)


def test_the_demo_does_not_overwrite_a_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    (tmp_path / "run" / "objective.txt").write_text("")
    assert main(["demo", "--output-dir", str(tmp_path / "run")]) == 2
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_demo(tmp_path, capsys):
    assert main(["demo", "--output-dir", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0.30 <= summary["accuracy_before"] <= 0.55
    assert summary["accuracy_after"] >= 0.90
    assert Path(tmp_path / "run" / "checkpoints").exists()
