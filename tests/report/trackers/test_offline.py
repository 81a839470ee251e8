"""Trackers in their offline modes, in processes of their own, as a user's command starts them. Slow, and skipped where
they are not installed: ``pip install -e '.[trackers-test]'``."""

import json
import os
import sqlite3
import subprocess
import sys
import zipfile

import pytest

from tests.report.trackers.made import add_lines, made_run

pytestmark = pytest.mark.slow
STEPS = list(range(14))


@pytest.fixture
def sent(tmp_path, request):
    """The folder in which ``cohort track`` was called for a run, and again after another step."""
    kind, package, variables = request.param
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    environment |= {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path), "WANDB_SILENT": "true"}
    command = [sys.executable, "-P", "-c", f"import {package}"]
    if subprocess.run(command, env=environment, capture_output=True).returncode:
        pytest.skip(f"{package} is not installed")
    run = made_run(tmp_path / "mine")
    said = []
    for _ in range(2):
        command = [sys.executable, "-P", "-m", "cohort", "track", "mine", "--to", kind, "--project", "sums"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        said.append([line for line in done.stdout.splitlines() if line.startswith("sent ")])
        add_lines(run, 13)
    assert said[0][0].startswith("sent 13 steps, up to step 12, to ")
    assert said[1][0].startswith("sent 1 steps, up to step 13, to ")
    assert said[1][0].endswith("(up to step 12 it was there)")
    return tmp_path


@pytest.mark.parametrize("sent", [("wandb", "wandb", {"WANDB_MODE": "offline"})], indirect=True)
def test_wandb(sent):
    one, two = sorted((sent / "wandb").glob("offline-run-*"))
    assert one.name.rpartition("-")[2] == two.name.rpartition("-")[2]  # the same run, which 'wandb sync' joins
    (table,) = one.glob("files/media/table/completions_10_*.json")
    assert json.loads(table.read_text())["data"][0][2] == "<script>alert(1)</script>"
    stored = [next(folder.glob("*.wandb")).read_bytes() for folder in (one, two)]
    assert all(b"model.lora.rank" in content and b"sk-secret" not in content for content in stored)
    assert b"groups/dead_share" in stored[0]
    assert b"findings/all_wrong" in stored[0]


@pytest.mark.parametrize("sent", [("trackio", "trackio", {})], indirect=True)
def test_trackio(sent):
    database = sqlite3.connect(sent / "trackio" / "sums.db")
    rows = [
        (step, json.loads(text)) for step, text in database.execute("select step, metrics from metrics order by id")
    ]
    assert [step for step, metrics in rows if "wall_time" in metrics] == STEPS
    assert [step for step, metrics in rows if "completions" in metrics] == [1, 10]
    ((config,),) = database.execute("select config from configs").fetchall()
    assert json.loads(config)["model.lora.rank"] == 8
    ((title, text),) = database.execute("select title, text from alerts").fetchall()
    assert (title, text.partition(":")[0]) == ("all_wrong", "step 5, alarm")
    database.close()


@pytest.mark.parametrize("sent", [("swanlab", "swanlab", {"SWANLAB_MODE": "offline"})], indirect=True)
def test_swanlab(sent):
    one, two = sorted((sent / "swanlog").glob("run-*"))
    assert one.name.rpartition("-")[2] == two.name.rpartition("-")[2]
    stored = b"".join(file.read_bytes() for file in one.rglob("*") if file.is_file())
    assert b"groups/dead_share" in stored
    assert b"<script>alert(1)</script>" in stored
    assert b"sk-secret" not in stored


@pytest.mark.parametrize(
    "sent", [("comet", "comet_ml", {"COMET_START_ONLINE": "0", "COMET_API_KEY": "x" * 25})], indirect=True
)
def test_comet(sent):
    archives = sorted((sent / ".cometml-runs").glob("*.zip"), key=lambda file: file.stat().st_mtime)
    assert len({archive.name.partition("-")[0] for archive in archives}) == 1  # one experiment
    messages = []
    for archive in archives:
        with zipfile.ZipFile(archive) as file:
            messages += [json.loads(line) for line in file.read("messages.json").splitlines()]
    metrics = [one["payload"]["metric"] for one in messages if one["type"] == "metric_msg"]
    assert [one["step"] for one in metrics if one["metricName"] == "time"] == STEPS
    assert "completions/step-10.csv" in json.dumps(messages)
    assert "sk-secret" not in json.dumps(messages)
