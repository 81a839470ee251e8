"""Run folders that no run has written, and trackers that are not installed."""

import json

import pyarrow
import pyarrow.parquet

from cohort.report.trackers import Tracker

SETTINGS = """
[model]
path = "m"
[model.lora]
rank = 8
[reward]
functions = ["judge.py:score(api_key='sk-secret')"]
[data]
stop = ["a", "b"]
"""


def line(step, **metrics):
    """A line of a step in which no completion is right: the diagnosis says so."""
    dead = {"updates": 1, "reward/mean": 0.0, "groups/dead_share": 1.0, "groups/sampled": 16}
    return json.dumps({"step": step, "time": 100.0 + step, "rewards/<lambda>": 0.5, "kl/k3": None} | dead | metrics)


def add_lines(run, *steps, **metrics):
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(line(step, **metrics) + "\n" for step in steps)


def made_run(run, steps=12):
    """A run folder with an evaluation before the first step and tables of completions of steps 1 and 10."""
    (run / "rollouts").mkdir(parents=True)
    (run / "evaluations").mkdir()
    (run / "config.toml").write_text(SETTINGS)
    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "time": 100.0, "eval/reward/mean": 0.25}) + "\n")
    add_lines(run, *range(1, steps + 1))
    columns = {
        "group": [5, 5, 7, 7],
        "prompt": ["1+1", "1+1", "# a\nb", "# a\nb"],
        "completion": ["<script>alert(1)</script>", "x" * 5000, "2", ""],
        "finish_reason": ["stop", "length", "stop", "stop"],
        "reward": [1.0, 0.0, None, 1.0],
        "rewards/f": [1.0, 0.0, None, 1.0],
        "advantage": [0.5, -0.5, None, 0.0],
    }
    for name in ("rollouts/step-1", "rollouts/step-10", "rollouts/step-2", "evaluations/step-0"):
        pyarrow.parquet.write_table(pyarrow.table(columns), run / f"{name}.parquet")
    return run


class Stub(Tracker):
    """A tracker that keeps what it is sent, in lists that outlive it."""

    title, package = "TensorBoard", "tensorboard"
    sent, opened = [], []

    def __init__(self, run, state, settings):
        self.opened.append(state)
        self.id = state.id or "stub-1"

    def configure(self, settings):
        self.sent.append(("settings", settings))

    def numbers(self, values, step):
        self.sent.append((step, values))

    def table(self, name, columns, rows, step):
        self.sent.append((name, step, columns, rows))

    def text(self, name, text, step):
        self.sent.append((name, step, text))

    def close(self):
        self.sent.append("closed")
