"""``cohort watch``, on folders that no run has made."""

import json
import re
import time
from threading import Thread

import pytest

from cohort.cli import main
from cohort.errors import RunFolderError
from cohort.lock import LOCK, Lock
from cohort.report import watch as module
from cohort.report.watch import Watched, watch
from tests.report.console.made import evaluation, line, make_run, write_lines, write_step


def recent(steps, ago=0.0):
    """Lines of steps of 0.3 s, of which the last ended so many seconds ago."""
    end = time.time() - ago
    return [line(step, time=end - 0.3 * (steps - step)) for step in range(1, steps + 1)]


def not_permitted(_):
    raise PermissionError


def test_one_picture(tmp_path, capsys):
    run = make_run(tmp_path / "run", [line(0, **evaluation(0.2)), *recent(20)])
    write_step(run, 20)
    (run / "checkpoints" / "step-10").mkdir(parents=True)
    (run / "checkpoints" / "step-20.part").mkdir()
    assert main(["watch", str(run), "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("step  20/100 ━")
    assert "health      healthy: 75% of groups teach" in shown
    assert "saved       checkpoint of step 10\n" in shown
    assert re.search("stopped after step 20, [0-9.]+ s ago: run.lock is free. cohort resume", shown)


def test_what_is_known_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.0)
    run = make_run(tmp_path, recent(20))
    lock = Lock(run)
    lock.take()
    watched = Watched(run)
    assert watched.standing() == ("running", "step 21")
    write_lines(run, recent(21, ago=720)[-1:])
    watched.progress.look()
    kind, text = watched.standing()
    owner = json.loads((run / LOCK).read_text())["pid"]
    assert kind == "late"
    assert re.fullmatch(f"no new step for 12:0. min; steps took 0.3 s: process {owner} on .* holds run.lock; .*", text)
    monkeypatch.setattr(module, "is_written", not_permitted)
    assert watched.standing()[1].endswith("the process may be dead (run.lock cannot be read from here)")
    monkeypatch.undo()
    lock.release()
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.0)
    assert watched.standing()[0] == "stopped"


def test_a_resumed_run_begins_anew(tmp_path):
    run = make_run(tmp_path, recent(20))
    watched = Watched(run)
    assert watched.progress.row["step"] == 20
    (run / "new").write_text("".join(json.dumps(one) + "\n" for one in recent(10)))
    (run / "new").replace(run / "metrics.jsonl")
    assert len(watched.progress.look()) == 10
    assert watched.progress.row["step"] == 10
    assert len(watched.progress.walls()) == 9


def test_without_a_terminal_lines_are_printed_until_the_run_is_complete(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path, recent(1), steps=40)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)

    def train():
        for first in range(1, 40, 7):
            time.sleep(0.05)
            write_lines(run, recent(40)[first : first + 7])
        (run / "summary.json").write_text('{"steps": 40, "seconds": 12.5}')

    thread = Thread(target=train)
    thread.start()
    watch(run)
    thread.join()
    printed = capsys.readouterr().out
    assert [int(step) for step in re.findall(r"^step (\d+)/40  reward", printed, flags=re.MULTILINE)] == list(
        range(2, 41, 2)
    )
    assert printed.count("stopped after step") == 2  # in the picture, and once after it
    assert printed.endswith("complete: 40 steps in 12 s\n")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.toml": "", "objective.txt": ""}, "step 0\n"),
        ({"config.toml": "[run]\nmax_steps = 7\n", "metrics.jsonl": '{"step": 1, "text": "x"}\n'}, "step 1\n"),
        ({"config.toml": "\x00", "metrics.jsonl": '{"step": 1, "reward/mean": {}}\n{"st'}, "step 1\n"),
        ({"config.toml": "run = 3", "summary.json": '{"steps": "x", "seconds": []}'}, "complete"),
        ({"summary.json": "[" * 100_000}, "stopped before the end of a step"),
        ({"metrics.jsonl": '{"step": 3, "rewards/\\u001b[2J": 0.5, "rewards/b": 1}\n'}, "\\x1b[2J"),
        ({"metrics.jsonl": '{"step": 1, "eval/\\u001b[2J\\n/reward/mean": 1}\n'}, "1.000 after step 1"),
    ],
)
def test_strange_folders(tmp_path, files, expected, capsys):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    watch(tmp_path, once=True)
    shown = capsys.readouterr().out
    assert expected in shown
    assert not any(ord(character) < 32 for character in shown.replace("\n", ""))


def test_no_run_folder(tmp_path, capsys):
    with pytest.raises(RunFolderError, match="not a run folder"):
        watch(tmp_path, once=True)
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
