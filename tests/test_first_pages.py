"""What a newcomer copies works: the README's program, and the first tutorial from top to bottom."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
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


def commands(page: str, but: str = "") -> list[list[str]]:
    """The commands of Cohort in a page's blocks, fenced or indented, in order; without those of the section ``but``."""
    text = (ROOT / page).read_text()
    if but:
        before, heading, after = text.partition(f"\n## {but}\n")
        assert heading, (page, but)
        text = before + after[after.index("\n## ") :]
    text = re.sub(r"^```(?!bash).*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = text.replace("\\\n", "")
    return [shlex.split(line, comments=True)[1:] for line in re.findall(r"^(?:    )?(cohort .*)", text, re.MULTILINE)]


SMALL = {
    "doctor": ["--skip", "signal", "rewards", "duplicates", "cut", "time"],
    "train": ["--run.max_steps", "1", "--rollout.prompts_per_step", "2", "--data.eval_rows", "2"],
    "resume": [],
    "diagnose": [],
    "report": [],
    "plot": [],
    "eval": ["--rows", "2", "--n", "1"],
    "generate": ["--max-tokens", "1"],
    "export": [],
}
"""What makes a command of the first tutorial quick."""


def test_the_first_tutorial_works_from_top_to_bottom(capsys, monkeypatch):
    Path("config.toml").write_text(blocks("docs/first-run.md", "toml")[0])
    Path("rewards.py").write_text(blocks("docs/first-run.md", "python")[0])
    uploaded = []

    class Hub:
        def create_repo(self, name, **_):
            return SimpleNamespace(repo_id=name)

        def upload_folder(self, repo_id, **_):
            uploaded.append(repo_id)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    given = commands("docs/first-run.md", but="A real model, first")  # its commands are those of the recipe smol
    assert {command[0] for command in given} == set(SMALL)
    for name, *arguments in given:
        assert main([name, *arguments, *SMALL[name]]) == 0, (name, arguments, capsys.readouterr().err)
    assert "evaluation after step 1: reward" in capsys.readouterr().out
    (line,) = [line for line in Path("runs/run-001/metrics.jsonl").read_text().splitlines() if json.loads(line)["step"]]
    assert 0 < json.loads(line)["rewards/right"] < 1
    assert Path("adder/model.safetensors").is_file()
    assert uploaded == ["YOU/adder"]


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])


def test_no_page_exports_twice_into_one_folder_or_has_a_command_in_running_text():
    for page in PAGES:
        exported = [command[2] for command in commands(page) if command[0] == "export"]
        assert len(set(exported)) == len(exported), (page, exported)
        running = re.findall(r"^\S(?!.*[|`#]).*\S {2,}cohort .*", (ROOT / page).read_text(), flags=re.MULTILINE)
        assert not running, (page, running)
