"""Trackers in their offline modes, in processes of their own: in the thread of a run, and by the user's command. Slow,
and skipped where they are not installed: ``pip install -e '.[trackers-test]'``."""

import json
import os
import sqlite3
import subprocess
import sys
import zipfile

import pytest

from tests.report.trackers.made import made_run

pytestmark = pytest.mark.slow
STEPS = list(range(14))
SCRIPT = """
import random, signal, sys
from pathlib import Path
from types import SimpleNamespace

import numpy, torch

from cohort.cli import main
from cohort.report import trackers
from tests.report.trackers.made import add_lines

def generators():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist()

kind, run = sys.argv[1], Path("mine")
before, handlers = generators(), [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
trackers.END_SECONDS = 300.0  # a busy machine
made = trackers.Trackers([kind], "sums")
made.on_start(None, SimpleNamespace(output_dir=run))
made.on_end(None, SimpleNamespace(outcome="complete"))
assert generators() == before
assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
add_lines(run, 13)
print("now the command", flush=True)
sys.exit(main(["track", "mine", "--to", kind]))
"""


@pytest.fixture
def sent(tmp_path, request):
    """The folder in which a run was sent by a thread, which drew nothing from the run's generators, and then another
    step by ``cohort track``."""
    kind, package, variables = request.param
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables
    places = {"TRACKIO_DIR": "trackio", "COHORT_STATE": "state", "HOME": ""}
    environment |= {name: str(tmp_path / place) for name, place in places.items()}
    command = [sys.executable, "-P", "-c", f"import {package}"]
    if subprocess.run(command, env=environment, capture_output=True).returncode:
        pytest.skip(f"{package} is not installed")
    made_run(tmp_path / "mine")
    command = [sys.executable, "-P", "-c", SCRIPT, kind]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    live, _, track = done.stdout.partition("now the command\n")
    assert kind == "swanlab" or not live  # it prints where it writes
    (said,) = (line for line in track.splitlines() if line.startswith("sent "))
    assert said.startswith("sent 1 steps, up to step 13, to ")
    assert said.endswith("(up to step 12 it was there)")
    return tmp_path


@pytest.mark.parametrize("sent", [("tensorboard", "tensorboard", {})], indirect=True)
def test_tensorboard(sent):
    assert len(list((sent / "mine" / "tensorboard").glob("events.*"))) == 2  # what is in them: test_send.py


@pytest.mark.parametrize(
    "sent",
    [("mlflow", "mlflow", {"MLFLOW_TRACKING_URI": "store", "MLFLOW_ALLOW_FILE_STORE": "true"})],
    indirect=True,
)
def test_mlflow(sent):
    (metric,) = (sent / "store").glob("*/*/metrics/time")  # one run
    assert [int(line.split()[2]) for line in metric.read_text().splitlines()] == STEPS


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
    assert ["step 5, alarm" in json.dumps(metrics) for _, metrics in rows if "findings/all_wrong" in metrics] == [True]
    ((config,),) = database.execute("select config from configs").fetchall()
    assert json.loads(config)["model.lora.rank"] == 8
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
