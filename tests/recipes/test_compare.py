"""Recipe compare: a run for each objective and seed, none of them twice, and the verdicts at the end."""

import contextlib
import subprocess
import time
from types import SimpleNamespace

import pytest

from cohort.cli import main
from cohort.config import load_config

SMALL = ("--rollout.prompts_per_step", "4", "--rollout.num_generations", "2", "--rollout.max_completion_length", "4")
SMALL += ("--eval.eval_steps", "1", "--data.eval_rows", "4", "--run.max_steps", "1", "--optim.warmup_steps", "0")


@pytest.fixture
def compare(recipe_file, monkeypatch, tmp_path):
    """compare.py with two objectives and one seed, whose commands run in this process."""
    module, commands = recipe_file("compare", "compare.py"), []

    def run(command, stdout=None, stderr=None, check=False):
        arguments = [str(part) for part in command[command.index("cohort") + 1 :]]
        commands.append(arguments)
        with contextlib.ExitStack() as stack:
            if stderr:
                stack.enter_context(contextlib.redirect_stdout(stdout))
                stack.enter_context(contextlib.redirect_stderr(stdout))
            code = main(arguments)
        if stdout:
            stdout.flush()
        assert not (check and code)
        return SimpleNamespace(returncode=code)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(module, "ALGORITHMS", ("grpo", "rloo"))
    monkeypatch.setattr(module, "SEEDS", (0,))
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run, STDOUT=subprocess.STDOUT))
    module.commands = commands
    return module


def test_every_objective_runs_with_every_seed_once(compare, tiny_chat_model, tmp_path, capsys):
    arguments = ["--jobs", "1", "--model.path", str(tiny_chat_model), *SMALL]
    compare.main(arguments)
    runs = {path.parent.name: load_config(path, of_run=True) for path in tmp_path.glob("runs/*/config.toml")}
    made = {name: (config.objective.preset.partition("@")[0], config.run.seed) for name, config in runs.items()}
    assert made == {f"{name}-{seed}": (name, seed) for name in ("grpo", "rloo") for seed in (0,)}
    assert {config.objective.minibatches for config in runs.values()} == {4}
    assert "<svg" in (tmp_path / "compare.svg").read_text()
    assert (tmp_path / "report.html").is_file()
    (verdict,) = [line for line in capsys.readouterr().out.splitlines() if "at equal drawn tokens" in line]
    assert "preset rloo@1" in verdict
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/metrics.jsonl")}
    compare.main(arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/metrics.jsonl")} == before


def test_a_run_that_fails_is_named_with_its_error(compare, tmp_path):
    with pytest.raises(
        SystemExit, match=r"runs/grpo-0 failed: cohort: error: .*learning_rat.* \(see runs/grpo-0.log\)"
    ):
        compare.main(["--jobs", "1", "--optim.learning_rat", "1"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_after_ctrl_c_or_an_error_no_further_run_begins(compare, monkeypatch, error):
    begun, jobs = [], []

    def train(*run):
        begun.append(run)
        deadline = time.monotonic() + 5
        while not all(job.cancelled() for job in jobs[1:]) or not jobs:  # the run in progress ends after that
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def interrupted(submitted):
        jobs.extend(submitted)
        while not begun:
            time.sleep(0.001)
        raise error

    monkeypatch.setattr(compare, "train", train)
    monkeypatch.setattr(compare, "as_completed", interrupted)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        compare.main(["--jobs", "1"])
    assert len(begun) == 1
    assert jobs[0].exception() is None
    assert jobs[1].cancelled()
    assert compare.commands == []
