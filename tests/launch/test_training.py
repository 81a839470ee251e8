"""``cohort launch`` with the real loop: a rank is killed, and the same command goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import DEMO_MODEL
from tests.launch.test_processes import SOURCE, log_of, wait_for
from tests.train import test_signals as runs
from tests.train.harness import metrics_of


@pytest.mark.ranks
def test_the_same_command_goes_on_after_a_rank_was_killed(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1"}) + "\n" for n in range(8)))
    (tmp_path / "reward.py").write_text(
        "import time\n"
        "def digits(completions, **_):\n"
        "    time.sleep(0.05)\n"
        "    return [float(sum(c.isdigit() for c in text)) for text in completions]\n"
    )
    (tmp_path / "c.toml").write_text(
        f"[model]\npath='{DEMO_MODEL}'\ndevice='cpu'\nprecision='float32'\n[data]\ntrain='rows.jsonl'\n"
        "[reward]\nfunctions=['reward.py:digits']\n"
        "[rollout]\nprompts_per_step=4\nnum_generations=2\nmax_completion_length=4\n"
        "[run]\noutput_dir='out'\nmax_steps=10000\nsave_steps=1\n"
    )
    unset = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    command = [sys.executable, "-m", "cohort", "launch", "--ranks", "2", "train", "c.toml", "--resume", "auto"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    settings = {"cwd": tmp_path, "env": environment | {"PYTHONPATH": str(SOURCE)}}
    run, checkpoints = tmp_path / "out", tmp_path / "out" / "checkpoints"

    process = subprocess.Popen(command, **pipes, **settings)
    wait_for(lambda: (checkpoints / "step-2").exists(), 120)
    os.kill(int(re.search(r"process (\d+)", log_of(run))[1]), signal.SIGKILL)
    started = time.monotonic()
    output, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 10
    assert process.returncode == 1
    assert output.count("step 1/") == 1
    last = errors.splitlines()[-1]
    assert last.startswith("cohort: error: rank 1 was ended by SIGKILL, so all ranks were ended; ")
    assert re.search(r"has a checkpoint of step \d+: continue with 'resume .*'$", last)
    assert "Traceback" not in errors

    steps = max(int(path.name.split("-")[1]) for path in checkpoints.glob("step-*[0-9]")) + 2
    done = subprocess.run([*command, "--run.max_steps", str(steps)], **pipes, **settings, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "resuming out after step" in done.stdout
    found = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found == list(range(1, steps + 1))


def without_parallel(folder):
    """Lines of metrics.jsonl without what depends on the clock."""
    timed = ("seconds", "time", "tokens_per_second", "memory/", "parallel/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in metrics_of(folder)]


@pytest.mark.ranks
@pytest.mark.parametrize("receiver", ["launcher", "rank 1"])
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tmp_path, receiver):
    """A signal to the launcher or to one rank stops all ranks at the same instant."""
    runs.write_run(tmp_path)
    out, ranks = tmp_path / "out", ("launch", "--ranks", "2", "train", "c.toml")
    process = runs.begin(tmp_path, *ranks)
    wait_for(lambda: runs.steps_of(out) >= 1, 120)
    if receiver == "launcher":
        process.send_signal(signal.SIGTERM)
    else:
        os.kill(int(re.search(r"process (\d+)", log_of(out))[1]), signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert len(re.findall(r"stopped by SIGTERM (in|after) step ", errors)) == 1, errors
    assert "Traceback" not in errors + log_of(out)
    resumed = runs.begin(tmp_path, *ranks, "--resume", "auto")
    output, errors = resumed.communicate(timeout=120)
    assert "resuming out after step" in output, errors
    straight = runs.begin(tmp_path, *ranks, "--run.output_dir", "straight")
    straight.communicate(timeout=120)
    assert without_parallel(out) == without_parallel(tmp_path / "straight")
