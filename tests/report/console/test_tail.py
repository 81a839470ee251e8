"""Metrics that another process appends."""

import json
import os

from cohort.report.console import tail
from cohort.report.console.live import newest_checkpoint
from cohort.report.console.tail import Tail, read_starts
from cohort.report.console.view import newest_file
from tests.report.console.made import line, make_run, write_lines, write_step


def steps(lines):
    return [one["step"] for one in lines]


def test_lines_come_once_and_complete(tmp_path):
    follower = Tail(tmp_path / "metrics.jsonl")
    assert follower.read() == (False, [])
    write_lines(tmp_path, [line(1), line(2)])
    assert steps(follower.read()[1]) == [1, 2]
    text = json.dumps(line(3)) + "\n"
    for part in (text[:7], text[7:-1]):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(part)
        assert follower.read() == (False, [])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert steps(follower.read()[1]) == [3]


def test_a_resumed_run_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(tmp_path, [line(step) for step in range(1, 6)])
    follower = Tail(path)
    assert steps(follower.everything()) == [1, 2, 3, 4, 5]
    path.with_suffix(".part").write_text("".join(json.dumps(line(step)) + "\n" for step in (1, 2, 3)))
    path.with_suffix(".part").replace(path)
    replaced, lines = follower.read()
    assert (replaced, steps(lines)) == (True, [1, 2, 3])
    path.write_text("")  # truncated in place
    assert follower.read() == (True, [])
    write_lines(tmp_path, [line(1, custom__x=0.25)])
    assert steps(follower.read()[1]) == [1]
    with path.open("r+") as file:  # other content of at least the same length, in the same file
        file.write(json.dumps(line(1, custom__x=0.75)) + "\n" + json.dumps(line(2)) + "\n")
    assert [one.get("custom/x") for one in follower.read()[1]] == [0.75, None]
    path.unlink()
    assert follower.read() == (False, [])


def test_damaged_and_hostile_lines_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "MAX_LINE", 1000)
    monkeypatch.setattr(tail, "CHUNK", 100)
    bad = [
        b"{",
        b"[]",
        b'{"step": "1"}',
        b'{"step": true}',
        b'{"step": -1}',
        b"\xff\xfe",
        b'{"step": ' + b"9" * 30 + b"}",
    ]
    bad += [b"[" * 900, b'{"step": 1, "x": "' + b"y" * 5000 + b'"}']
    good = b'{"step": 7, "text": "<script>", "list": [1], "nan": NaN, "huge": 1e999, "n": 1}'
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*bad, good, b""]))
    follower = Tail(tmp_path / "metrics.jsonl")
    assert follower.everything() == [{"step": 7, "nan": None, "huge": None, "n": 1}]


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert Tail(tmp_path / "metrics.jsonl").read() == (False, [])


def test_no_link_out_of_the_folder_is_followed(tmp_path):
    other, run = make_run(tmp_path / "other", [line(1)]), tmp_path / "run"
    write_step(other, 1)
    (other / "checkpoints" / "step-1").mkdir(parents=True)
    run.mkdir()
    for name in ("metrics.jsonl", "rollouts", "checkpoints"):
        (run / name).symlink_to(other / name)
    assert (Tail(run / "metrics.jsonl").read(), newest_file(run), newest_checkpoint(run)) == ((False, []), None, None)
    assert (newest_file(other), newest_checkpoint(other)) == (other / "rollouts" / "step-1.parquet", 1)
    (run / "rollouts").unlink()
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step-1.parquet").symlink_to(newest_file(other))
    assert newest_file(run) is None


def test_the_starts_of_a_run(tmp_path):
    assert read_starts(tmp_path) == ([], None)
    (tmp_path / "starts.jsonl").write_text(
        '{"step": 0}\n{"step": 5, "steps": 40}\n[]\nx\n{"step": "a", "steps": 0}\n{"st'
    )
    assert read_starts(tmp_path) == ([0, 5], 40)
