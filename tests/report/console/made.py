"""A run folder that no run has made: metrics, completions, settings."""

import json

import pyarrow
import pyarrow.parquet

SECONDS = {"generate": 0.16, "reward": 0.1, "update": 0.02, "logps": 0.01, "measure": 0.0}


def line(step, time=None, **more):
    """A line of ``metrics.jsonl``; keys with "__" for "/"."""
    metrics = {"step": step, "time": 1000 + 0.3 * step if time is None else time}
    if step:
        metrics |= {"updates": 1, "updates_skipped": 0, "reward/mean": step / 100, "groups/dead_share": 0.25}
        metrics |= {"groups/rounds": 1, "groups/sampled": 8, "entropy": 0.5, "kl/k3": 0.001, "tokens_per_second": 9.0}
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in SECONDS.items()} | {"seconds/step": 0.29}
    return metrics | {key.replace("__", "/"): value for key, value in more.items()}


def evaluation(mean):
    return {"eval/reward/mean": mean, "eval/reward/low": mean - 0.05, "eval/reward/high": mean + 0.05}


def write_lines(folder, lines):
    """Append lines to the folder's metrics."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in lines))


def write_step(folder, step, **columns):
    """Store a step of two groups of two completions."""
    columns = {
        "group": [4, 4, 5, 5],
        "prompt": ["2 + 2", "2 + 2", "3 + 3", "3 + 3"],
        "completion": ["4", "5", "first line\nsecond line", "\x1b[2Jclears"],
        "reward": [1.0, 0.0, 1.0, None],
        "advantage": [1.0, -1.0, 0.5, None],
        "finish_reason": ["eos"] * 4,
        "rewards/right": [1.0, 0.0, 1.0, None],
        "rewards/length": [0.5, 0.0, 1.0, 0.0],
        **columns,
    }
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "rollouts" / f"step-{step}.parquet")


def make_run(folder, lines=(), steps=100):
    """A run folder with settings, a start and metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text("[run]\nseed = 0\n")
    (folder / "starts.jsonl").write_text(json.dumps({"step": 0, "steps": steps}) + "\n")
    write_lines(folder, lines)
    return folder
