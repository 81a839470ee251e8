"""Runs are sent to trackers: each step once, whatever the folder holds."""

import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from cohort.cli import main
from cohort.errors import ConfigError, RunFolderError
from cohort.lock import Lock
from cohort.report import trackers
from cohort.report.trackers import State, hyperparameters, left_to_send, run_name, send_run, tables
from tests.report.trackers.made import Stub, add_lines, made_run


@pytest.fixture
def run(tmp_path):
    return made_run(tmp_path / "mine")


@pytest.fixture
def stub(monkeypatch):
    """In the place of TensorBoard, a class of its own: what it is sent starts empty."""
    kind = type("Mine", (Stub,), {"sent": [], "opened": []})
    monkeypatch.setitem(trackers.KINDS, "tensorboard", kind)
    return kind


def steps_of(stub):
    return [one[0] for one in stub.sent if isinstance(one[0], int)]


# TensorBoard and MLflow for real --------------------------------------------------------------------------------------


def test_tensorboard_reads_what_was_sent(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent = send_run(run, "tensorboard")
    assert (sent.steps, sent.before, sent.last) == (13, -1, 12)
    add_lines(run, 13)
    assert send_run(run, "tensorboard").steps == 1
    found = EventAccumulator(str(run / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    keys = {"time", "rewards/<lambda>", "updates", "reward/mean", "groups/dead_share", "groups/sampled"}
    assert set(found.Tags()["scalars"]) == keys | {"eval/reward/mean"}
    assert [(event.step, event.value) for event in found.Scalars("time")] == [(n, 100.0 + n) for n in range(14)]
    assert [(event.step, event.value) for event in found.Scalars("eval/reward/mean")] == [(0, 0.25)]
    texts = {tag: found.Tensors(tag) for tag in found.Tags()["tensors"]}
    assert [event.step for event in texts["completions/text_summary"]] == [1, 10]
    assert [event.step for event in texts["evaluations/text_summary"]] == [0]
    text = texts["completions/text_summary"][0].tensor_proto.string_val[0].decode()
    assert all(one == "" or one.startswith("    ") for one in text.split("\n"))  # a block of code: no markup
    assert "    completion: <script>alert(1)</script>\n" in text
    assert "    prompt: # a\n    b\n" in text
    finding = texts["findings/all_wrong/text_summary"][0]
    assert finding.step == 5
    assert finding.tensor_proto.string_val[0].decode().startswith("step 5, alarm: 100% of groups have equal rewards")
    (settings,) = (event.tensor_proto.string_val[0].decode() for event in texts["settings/text_summary"])
    assert "    model.lora.rank = 8\n" in settings
    assert "sk-secret" not in settings


@pytest.mark.slow  # importing MLflow takes seconds
@pytest.mark.filterwarnings("ignore")  # those of MLflow's file store
def test_mlflow_reads_what_was_sent(run, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    store = f"file://{tmp_path / 'store'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sent = send_run(run, "mlflow", "sums")
    add_lines(run, 13)
    again = send_run(run, "mlflow")
    assert (sent.steps, again.steps, again.id, again.project) == (13, 1, sent.id, "sums")
    client = mlflow.MlflowClient(store)
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert found.info.run_id == sent.id
    assert found.info.run_name == "mine"
    assert found.info.status == "FINISHED"
    assert found.data.params["model.lora.rank"] == "8"
    assert found.data.params["reward.functions"] == """["judge.py:score(api_key='***')"]"""
    assert found.data.tags["findings/all_wrong"].startswith("step 5, alarm")
    points = [(point.step, point.value) for point in client.get_metric_history(sent.id, "time")]
    assert points == [(n, 100.0 + n) for n in range(14)]
    assert "rewards._lambda_" in found.data.metrics  # in a store of files
    table = json.loads((next((tmp_path / "store").rglob("completions/step-10.json"))).read_text())
    assert table["columns"] == ["group", "prompt", "completion", "finish_reason", "reward", "advantage", "rewards/f"]
    assert table["data"][0] == [5, "1+1", "<script>alert(1)</script>", "stop", 1.0, 0.5, 1.0]
    assert table["data"][2][4] is None


# Each step once -------------------------------------------------------------------------------------------------------


def test_every_step_once_and_in_order(run, stub):
    assert left_to_send(run, "tensorboard") == list(range(13))
    assert send_run(run, "tensorboard").steps == 13
    assert send_run(run, "tensorboard") == (sent := send_run(run, "tensorboard"))
    assert (sent.steps, sent.before, sent.last) == (0, 12, 12)
    assert len(stub.opened) == 1  # nothing to send: the tracker is left alone
    add_lines(run, 12, 13, 14)  # a resumed run repeats a step
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "half')
    assert send_run(run, "tensorboard").steps == 2
    assert steps_of(stub) == list(range(15))
    assert [one.id for one in stub.opened] == [None, "stub-1"]
    assert [one.step for one in stub.opened] == [-1, 12]
    assert [one for one in stub.sent if one[0] == "settings"] == [stub.sent[0]]
    assert stub.sent[-1] == "closed"
    assert left_to_send(run, "tensorboard") == []


@pytest.mark.parametrize("newer", [[], [13]])
@pytest.mark.parametrize("noted", [12, 9, -1])
def test_the_tracker_knows_best(run, stub, monkeypatch, noted, newer):
    """W&B says how far its run is: what had not arrived is sent again, and nothing twice."""
    (run / "trackers" / "tensorboard").mkdir(parents=True)
    State(id="stub-1", project="cohort", step=noted, configured=True).write(run, "tensorboard")
    monkeypatch.setattr(stub, "says_step", True)
    monkeypatch.setattr(stub, "step", 9)
    add_lines(run, *newer)
    sent = send_run(run, "tensorboard", "cohort")
    assert steps_of(stub) == [10, 11, 12, *newer]
    assert (sent.steps, sent.before, sent.last) == (3 + len(newer), 9, 12 + len(newer))
    assert [one for one in stub.sent if one[0] == "findings/all_wrong"] == []  # of step 5


def test_what_is_sent_of_a_step(run, stub):
    send_run(run, "tensorboard")
    values = next(one for one in stub.sent if one[0] == 3)[1]
    assert values.keys() == {
        "time",
        "rewards/<lambda>",
        "updates",
        "reward/mean",
        "groups/dead_share",
        "groups/sampled",
    }
    assert [one[:2] for one in stub.sent if len(one) == 4] == [
        ("evaluations", 0),
        ("completions", 1),
        ("completions", 10),
    ]
    ((_, step, text),) = [one for one in stub.sent if one[0] == "findings/all_wrong"]
    assert (step, text.partition(":")[0]) == (5, "step 5, alarm")
    _, settings = stub.sent[0]
    assert settings["data.stop"] == '["a", "b"]'
    assert settings["model.lora.rank"] == 8


def test_tables_are_bounded(run):
    ((name, columns, rows),) = tables(run, 10, evaluated=False)
    assert (name, len(rows)) == ("completions", 4)
    assert len(rows[1][columns.index("completion")]) == 2004  # and what says that it was cut
    assert list(tables(run, 2, evaluated=False)) == []  # only every tenth
    table = pyarrow.table({"group": [n // 6 for n in range(60)], "completion": [str(n) for n in range(60)]})
    pyarrow.parquet.write_table(table, run / "rollouts" / "step-10.parquet")
    ((_, _, rows),) = tables(run, 10, evaluated=False)
    assert [int(text) for _, text in rows] == [6 * group + n for group in range(4) for n in range(4)]
    (run / "rollouts" / "step-10.parquet").write_bytes(b"PAR1")
    assert list(tables(run, 10, evaluated=True)) == []


def test_settings_as_hyperparameters():
    settings = {"a": {"b": None, "c": float("inf"), "d": True}, "e": 1.5, "judge": {"api_key": "k"}}
    expected = {"a.b": "null", "a.c": "Infinity", "a.d": True, "e": 1.5, "judge.api_key": "***"}
    assert hyperparameters(settings) == expected


def test_ids_are_read_back(run):
    """trackio's runs are known by their names, which are made of the folder's."""
    name = run_name("sums lr=1e-5 \N{SNOWMAN}" + "x" * 200)
    assert re.fullmatch(r"sums-lr-1e-5-x{87}-[0-9a-f]{6}", name)
    (run / "trackers" / "tensorboard").mkdir(parents=True)
    State(id=name).write(run, "tensorboard")
    assert State.read(run, "tensorboard").id == name


# What is refused ------------------------------------------------------------------------------------------------------


def test_unknown_trackers(run):
    with pytest.raises(ConfigError, match=r"unknown tracker 'wand'; did you mean 'wandb'\?$"):
        send_run(run, "wand")
    with pytest.raises(ConfigError, match="unknown tracker 'foo'; the trackers are tensorboard, wandb, "):
        send_run(run, "foo")


def test_another_project(run, stub):
    send_run(run, "tensorboard", "one")
    with pytest.raises(ConfigError, match="is in project 'one' of TensorBoard, not in 'two': leave out the project"):
        send_run(run, "tensorboard", "two")


def test_a_folder_of_somebody_else(run, stub, capsys, tmp_path):
    """It names a run of this account's: nothing is written there unless the user names its project."""
    send_run(run, "tensorboard", "sums")
    add_lines(run, 13)
    other = run.rename(tmp_path / "other")
    with pytest.raises(ConfigError, match="names run stub-1 in project 'sums' of TensorBoard.* give --project sums;"):
        send_run(other, "tensorboard")
    assert len(stub.opened) == 1
    assert send_run(other, "tensorboard", "sums").steps == 1
    add_lines(other, 14)
    assert send_run(other, "tensorboard").steps == 1  # from now on it is known


def test_two_processes(run, stub):
    (run / "trackers" / "tensorboard").mkdir(parents=True)
    lock = Lock(run / "trackers" / "tensorboard")
    lock.take()
    with pytest.raises(RunFolderError, match="another process is sending .* to TensorBoard: wait for its end"):
        send_run(run, "tensorboard")
    lock.release()
    assert send_run(run, "tensorboard").steps == 13


@pytest.mark.parametrize(
    "text", ["", "[]", '{"id": 3, "step": "x"}', '{"step": true, "id": "a/../b"}', '{"step": -7}', "[" * 10**5]
)
def test_a_damaged_state_sends_everything_to_a_new_run(run, stub, text):
    (run / "trackers" / "tensorboard").mkdir(parents=True)
    (run / "trackers" / "tensorboard" / "state.json").write_text(text)
    assert send_run(run, "tensorboard").steps == 13
    assert stub.opened[0].id is None


def test_folders_that_are_no_runs_or_lead_elsewhere(run, stub, tmp_path):
    with pytest.raises(RunFolderError, match="does not exist"):
        send_run(tmp_path / "none", "tensorboard")
    (run / "tensorboard").symlink_to(tmp_path)
    with pytest.raises(RunFolderError, match="is a symbolic link"):
        send_run(run, "tensorboard")
    assert stub.opened == []


def test_a_run_without_steps(tmp_path, stub, capsys):
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "starts.jsonl").write_text("")
    assert main(["track", str(tmp_path), "--to", "tensorboard"]) == 0
    assert capsys.readouterr().out == "nothing to send: no step is complete\n"


def fails(self, values, step):
    raise OSError("no answer from https://me:word@host/api?token=abc\nmore")


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command(run, stub, capsys, monkeypatch):
    assert main(["track", str(run), "--to", "tensorboard", "--project", "sums"]) == 0
    assert capsys.readouterr().out == (
        "opening TensorBoard, project sums, a new run\n"
        "sent 13 steps, up to step 12, to TensorBoard, project sums, run stub-1\n"
    )
    assert main(["track", str(run), "--to", "tensorboard"]) == 0
    assert capsys.readouterr().out == "nothing to send: TensorBoard, project sums, run stub-1 has all steps\n"
    add_lines(run, 13)
    monkeypatch.setattr(stub, "numbers", fails)
    assert main(["track", str(run), "--to", "tensorboard"]) == 1
    said = capsys.readouterr()
    assert said.out == "opening TensorBoard, project sums, run stub-1\n"
    assert said.err == "cohort: error: TensorBoard: OSError: no answer from https://***@host/api?token=***\n"
