"""What a newcomer copies works: the README's program, and the two files of the first tutorial."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cohort.cli.main import main

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_readmes_program_trains_a_model_and_saves_it():
    program = blocks("README.md", "python")[0]
    small = program.replace("max_steps=60", "max_steps=1, progress=False").replace(
        "prompts_per_step=16", "prompts_per_step=2"
    )
    assert small.count("=2,") == small.count("=1,") == 1
    exec(compile(small, "README.md", "exec"), {"__name__": "readme"})
    (line,) = Path("runs/run-001/metrics.jsonl").read_text().splitlines()
    assert 0 < json.loads(line)["reward/mean"] < 1  # of 16 sums, the demo's model has some right and some wrong
    assert Path("adder/model.safetensors").is_file()


def test_the_files_of_the_first_tutorial_train(capsys):
    Path("config.toml").write_text(blocks("docs/first-run.md", "toml")[0])
    Path("rewards.py").write_text(blocks("docs/first-run.md", "python")[0])
    small = ["--run.max_steps", "1", "--rollout.prompts_per_step", "2", "--data.eval_rows", "2"]
    assert main(["train", "config.toml", *small]) == 0
    assert "evaluation after step 1: reward" in capsys.readouterr().out
    (line,) = [line for line in Path("runs/run-001/metrics.jsonl").read_text().splitlines() if json.loads(line)["step"]]
    assert 0 < json.loads(line)["rewards/right"] < 1
