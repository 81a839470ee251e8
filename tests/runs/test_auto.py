"""``cohort train --resume auto``: one command that may run again and again."""

import json

import pytest

from cohort.cli import main
from cohort.config import GRPOConfig, to_toml
from cohort.runs import RunFolder, find_run
from tests.conftest import DEMO_MODEL


@pytest.fixture
def command(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1"}) + "\n" for n in range(8)))
    (tmp_path / "reward.py").write_text(
        "import pathlib\n"
        "def digits(completions, **_):\n"
        "    stop = pathlib.Path(__file__).with_name('stop')\n"
        "    if stop.exists():\n"
        "        if stop.read_text(): raise KeyboardInterrupt\n"
        "        stop.write_text('now')  # the first call tries the function on two rows\n"
        "    return [float(sum(c.isdigit() for c in text)) for text in completions]\n"
    )
    (tmp_path / "c.toml").write_text(
        f"[model]\npath='{DEMO_MODEL}'\ndevice='cpu'\nprecision='float32'\n[data]\ntrain='{tmp_path}/rows.jsonl'\n"
        f"[reward]\nfunctions=['{tmp_path}/reward.py:digits']\n"
        "[rollout]\nprompts_per_step=2\nnum_generations=2\nmax_completion_length=4\n"
        f"[run]\noutput_dir='{tmp_path}/out'\nmax_steps=2\nsave_steps=1\n"
    )
    return ["train", str(tmp_path / "c.toml"), "--resume", "auto"]


def steps_of(folder):
    return [json.loads(line)["step"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def test_auto_starts_continues_and_ends(command, tmp_path, capsys):
    assert main(command) == 0
    assert steps_of(tmp_path) == [1, 2]
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out == f"{tmp_path}/out is complete\n"
    assert main([*command, "--run.max_steps", "3"]) == 0
    assert steps_of(tmp_path) == [1, 2, 3]
    assert "resuming" in capsys.readouterr().out
    # Stopped in the middle of the extension: the summary of the shorter run is not taken for the end.
    (tmp_path / "stop").touch()
    assert main([*command, "--run.max_steps", "4"]) == 130
    (tmp_path / "stop").unlink()
    assert main([*command, "--run.max_steps", "4"]) == 0
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_auto_starts_over_without_a_checkpoint(command, tmp_path, capsys):
    (tmp_path / "stop").touch()
    assert main(command) == 130
    assert (tmp_path / "out" / "config.toml").exists()
    (tmp_path / "out" / "logs").mkdir()
    (tmp_path / "stop").unlink()
    assert main([*command, "--run.seed", "1"]) == 2
    assert "run.seed: the run has 0, now 1" in capsys.readouterr().err
    assert main(command) == 0
    assert steps_of(tmp_path) == [1, 2]
    assert (tmp_path / "out" / "logs").is_dir()


def test_auto_leaves_other_folders_alone(command, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    assert main(command) == 2
    assert "is not empty" in capsys.readouterr().err
    (tmp_path / "c.toml").write_text("[model]\npath='x'\n")
    assert main(command) == 2
    assert "to resume a run, set run.output_dir" in capsys.readouterr().err


@pytest.mark.parametrize("stopped_early", [True, False])
def test_another_patience_lets_a_run_that_stopped_early_go_on(tmp_path, stopped_early):
    settings = {"output_dir": str(tmp_path), "metric_for_best_model": "eval/reward/mean"}
    folder, saved = RunFolder(tmp_path), GRPOConfig(**settings, early_stopping_patience=2)
    (tmp_path / "config.toml").write_text(to_toml(saved))
    (tmp_path / "summary.json").write_text(json.dumps({"stopped_early": stopped_early}))
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    assert find_run(folder, saved, "auto") is None
    assert find_run(folder, GRPOConfig(**settings), "auto") is (True if stopped_early else None)
    folder.close()
