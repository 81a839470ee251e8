"""Recipe trackers: what a tracker has is what metrics.jsonl has, metrics of one's own included; and the callbacks."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from cohort.report.trackers import send_run

SMALL = ("--data.eval", '[{path = "cohort:addition", rows = 2}]', "--eval.eval_steps", "1", "--report.trackers", "[]")
SMALL += ("--rollout.prompts_per_step", "2", "--rollout.num_generations", "2", "--rollout.max_completion_length", "4")


@pytest.fixture(scope="module")
def run(run_recipe, tiny_chat_model):
    return run_recipe("trackers", "--model.path", tiny_chat_model, *SMALL, "--run.max_steps", "2")


@pytest.fixture(scope="module")
def logged(run):
    """Every number of metrics.jsonl by its key, as (step, number) pairs."""
    found = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for key, value in line.items():
            if key != "step" and value is not None:
                found.setdefault(key, []).append((line["step"], value))
    assert found["custom/carries"] == [(1, 0.0), (2, 0.0)]
    assert [step for step, _ in found["eval/rewards/right/mean"]] == [0, 1, 2]
    return found


def test_tensorboard_has_the_numbers_of_the_run(run, logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert send_run(run, "tensorboard").steps == 3
    sent = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    assert set(sent.Tags()["scalars"]) == set(logged)
    for key, points in logged.items():
        events = [(event.step, event.value) for event in sent.Scalars(key)]
        assert events == [(step, pytest.approx(value, rel=1e-6)) for step, value in points]  # stored as float32


@pytest.mark.slow  # importing MLflow takes seconds
@pytest.mark.filterwarnings("ignore")  # those of MLflow's file store
def test_mlflow_has_the_numbers_of_the_run(run, logged, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    store = f"file://{tmp_path / 'store'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sent, client = send_run(run, "mlflow"), mlflow.MlflowClient(store)
    assert sent.project == client.get_experiment(client.get_run(sent.id).info.experiment_id).name == "addition"
    assert len(client.get_run(sent.id).data.metrics) == len(logged)
    for key, points in logged.items():
        name = key.replace("@", "_").replace("/", ".")  # "rewards/right" is no folder beside "rewards/right/std"
        history = client.get_metric_history(sent.id, name)
        assert [(point.step, point.value) for point in history] == points


@pytest.fixture
def posted(monkeypatch):
    """What is posted to the address in NOTIFY_URL."""
    found = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self):
            found.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Webhook) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        monkeypatch.setenv("NOTIFY_URL", f"http://127.0.0.1:{server.server_port}")
        yield found
        server.shutdown()


def test_the_callbacks_stop_a_solved_run_and_post_its_end(recipe_file, tiny_chat_model, tmp_path, posted, capsys):
    solved = ("--reward.functions", "[\"regex(pattern='')\"]", "--model.path", str(tiny_chat_model))
    main = recipe_file("trackers", "functions.py").main
    main([*SMALL, *solved, "--run.max_steps", "2", "--run.output_dir", str(tmp_path / "run")])
    assert posted == [{"text": "stopped after step 0"}]  # the evaluation before the first step has a reward of 1
    assert "cohort resume" in capsys.readouterr().err
    assert (tmp_path / "run" / "checkpoints" / "step-0").is_dir()


def test_an_address_without_an_answer_does_not_end_a_run(recipe_file, capsys):
    recipe_file("trackers", "functions.py").Notify("http://127.0.0.1:9").post("text")
    assert "not posted to http://127.0.0.1:9: " in capsys.readouterr().err
