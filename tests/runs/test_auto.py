"""``cohort train --resume auto``: one command that may run again and again."""

import json

import pytest

from cohort.cli import main
from cohort.config import GRPOConfig, to_toml
from cohort.errors import RunFolderError
from cohort.runs.folder import Beginning, RunFolder, find_run
from cohort.runs.starts import Start, clear
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
    # The last checkpoint of a complete run is damaged: its steps are repeated from the one before.
    saved = tmp_path / "out" / "checkpoints" / "step-3" / "model.safetensors"
    whole = saved.read_bytes()
    saved.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert main(["resume", str(tmp_path / "out")]) == 0
    assert saved.read_bytes() == whole
    assert main(["verify", str(tmp_path / "out")]) == 0
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
def test_another_patience_lets_a_run_that_stopped_early_go_on(tmp_path, monkeypatch, stopped_early):
    settings = {"output_dir": str(tmp_path), "metric_for_best_model": "eval/reward/mean"}
    folder, saved = RunFolder(tmp_path), GRPOConfig(**settings, early_stopping_patience=2)
    (tmp_path / "config.toml").write_text(to_toml(saved))
    (tmp_path / "summary.json").write_text(json.dumps({"stopped_early": stopped_early}))
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    monkeypatch.setattr("cohort.runs.folder.check_checkpoint", lambda path: None)
    assert find_run(folder, saved, "auto") is Beginning.COMPLETE
    expected = Beginning.RESUMED if stopped_early else Beginning.COMPLETE
    assert find_run(folder, GRPOConfig(**settings), "auto") is expected
    folder.close()


def test_a_run_whose_checkpoints_were_removed(tmp_path, caplog):
    """It had one if a process went on from it. Else its steps are named that are made again."""
    (tmp_path / "config.toml").write_text(to_toml(GRPOConfig(output_dir=str(tmp_path))))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(4)))
    starts = [json.dumps(Start().line(step, 9, {})) for step in (0, 2, 0)]
    (tmp_path / "starts.jsonl").write_text("\n".join(starts) + '\n{"step"')
    with pytest.raises(RunFolderError, match=r"no checkpoint to go on from.*starts.jsonl \(it went on from step 2\)"):
        clear(tmp_path)
    (tmp_path / "starts.jsonl").write_text(starts[0] + "\n")
    clear(tmp_path)
    assert "has metrics up to step 3 and no checkpoint: the run starts again at step 1" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
