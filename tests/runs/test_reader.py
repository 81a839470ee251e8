"""Reading run folders: whole, in progress, torn, of other versions, hostile."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from cohort.errors import ConfigError, RunFolderError
from cohort.runs import reader
from cohort.runs.reader import Run
from tests.report.console.made import line, make_run, write_lines


@pytest.fixture
def run(tmp_path):
    """A folder with everything that a finished run has, made by hand."""
    folder = tmp_path / "run"
    for name in ("rollouts", "evaluations", "checkpoints/step-2", "checkpoints/step-2.broken"):
        (folder / name).mkdir(parents=True)
    (folder / "config.toml").write_text("[run]\nseed = 3\nwhen = 2026-01-02\n[objective.kl]\nbeta = 0.5\nhigh = inf\n")
    lines = [{"step": 0, "eval/reward/mean": 0.25}]
    lines += [{"step": n, "reward/mean": n / 4, "gradient/cosine": None} for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text('{"steps": 2}')
    (folder / "starts.jsonl").write_text('{"step": 0, "facts": {"code": "x"}}\n')
    for name in (
        "rollouts/step-2",
        "rollouts/step-10",
        "rollouts/step-1",
        "evaluations/step-0",
        "evaluations/step-2-b",
    ):
        (folder / f"{name}.parquet").touch()
    for name in ("rollouts/step-1.part", "rollouts/step-01.parquet", "rollouts/step--1.parquet", "rollouts/a.parquet"):
        (folder / name).touch()
    return folder


def metrics_of(run, text):
    (run / "metrics.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    found = Run.read(run)
    return found.rows, found.damaged


def test_a_finished_run(run):
    found = Run.read(str(run))
    assert found.settings == {
        "run": {"seed": 3, "when": "2026-01-02"},
        "objective": {"kl": {"beta": 0.5, "high": math.inf}},
    }
    assert found.flat_settings()["objective.kl.beta"] == 0.5
    assert [line["step"] for line in found.rows] == [0, 1, 2]
    assert found.keys() == ["eval/reward/mean", "reward/mean"]
    assert found.series("reward/mean") == ([1, 2], [0.25, 0.5])
    assert found.series("gradient/cosine") == found.series("unknown") == ([], [])
    assert np.array_equal(found.column("reward/mean"), [math.nan, 0.25, 0.5], equal_nan=True)
    assert found.column("step").dtype == np.float64
    assert np.isnan(found.axis("tokens")).all()
    with pytest.raises(ConfigError, match="unknown axis 'hours': expected one of step, updates"):
        found.axis("hours")
    assert found.summary == {"steps": 2}
    assert found.starts == [{"step": 0, "facts": {"code": "x"}}]
    assert list(found.rollouts) == [1, 2, 10]
    assert found.rollouts[10] == run / "rollouts" / "step-10.parquet"
    assert list(found.evaluations) == [(0, ""), (2, "b")]
    assert found.checkpoints == {2: run / "checkpoints" / "step-2"}
    assert found.missing == []


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "run.lock").touch()
    found = Run.read(tmp_path)
    assert (found.rows, found.summary, found.settings, found.damaged) == ([], None, {}, [])
    assert {line.split()[0] for line in found.missing} == {
        "summary.json",
        "metrics.jsonl",
        "starts.jsonl",
        "rollouts/",
    }


def test_a_line_that_is_being_written_is_no_damage(run):
    assert metrics_of(run, '{"step": 1, "a": 2}\n{"step": 2, "a"') == ([{"step": 1, "a": 2}], [])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"step": 2, "rew', "line 2: Unterminated string"),
        (b"", "line 2: Expecting value"),
        (b'{"step": 2},{"step": 5}', "line 2: Extra data"),
        (b'[{"step": 2}]', "line 2: expected a JSON object, got list"),
        (b'{"a": 1}', "line 2: expected a step, got None"),
        (b'{"step": true}', "line 2: expected a step, got True"),
        (b'{"step": -1}', "line 2: expected a step, got -1"),
        (b'{"step": 9007199254740992}', "line 2: expected a step, got 9007199254740992"),
        (b'{"step": 1e999}', "line 2: expected a step, got None"),
        (b'{"step": ' + b"9" * 5000 + b"}", "line 2: Exceeds the limit"),
        (b'{"step": 2, "a": "\xff"}', "line 2: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "line 2: "),
        (b'{"a":' * 60 + b"1" + b"}" * 60, "line 2: it is nested deeper than 50"),
        (b'{"step": 2, "a": "' + b"x" * (1 << 22) + b'"}', "line 2: it is longer than 4,194,304 bytes"),
    ],
)
def test_a_damaged_line_in_the_middle(run, line, reason):
    metrics, damaged = metrics_of(run, b'{"step": 1, "a": 1}\n' + line + b'\n{"step": 3, "a": 3}\n')
    assert metrics == [{"step": 1, "a": 1}, {"step": 3, "a": 3}]
    (text,) = damaged
    assert text.startswith(f"metrics.jsonl, {reason}")
    assert len(text) < 300


def test_values_are_finite_numbers_or_none(run):
    text = '{"step": 1, "a": NaN, "b": -Infinity, "c": 1e999, "d": 1%s, "e": -1%s.5, "f": 1e+0099, "g": 1e-300}\n'
    metrics, damaged = metrics_of(run, text % ("0" * 101, "0" * 400))
    assert metrics == [{"step": 1, **dict.fromkeys("abcde"), "f": 1e99, "g": 1e-300}]
    assert damaged == []
    metrics, damaged = metrics_of(run, '{"step": 1, "a": {"b": 1}, "c": "<script>", "d": true, "e": 2}\n')
    assert metrics == [{"step": 1, "e": 2}]
    assert damaged == ["metrics.jsonl, line 1: 'a' is not a number"]


def test_of_several_lines_of_a_step_the_last_counts(run):
    metrics, damaged = metrics_of(run, '{"step": 2, "a": 1}\n{"step": 1}\n{"step": 2, "a": 3}\n')
    assert metrics == [{"step": 1}, {"step": 2, "a": 3}]
    assert damaged == ["metrics.jsonl, line 3: step 2 was written before; this line counts"]


def test_damage_is_named_up_to_a_limit(run):
    _, damaged = metrics_of(run, "x\n" * 1200)
    assert len(damaged) == 6
    assert damaged[-1] == "metrics.jsonl: 1195 more damaged lines"


def test_files_are_read_up_to_a_limit(run, monkeypatch):
    monkeypatch.setattr(reader, "MAX_LINES_FILE", 50)
    monkeypatch.setattr(reader, "MAX_FILE", 10)
    metrics, damaged = metrics_of(run, '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n{"step": 5}\n')
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert sorted(damaged) == [
        "config.toml cannot be read: it is larger than 10 bytes",
        "metrics.jsonl is larger than 50 bytes: the rest was not read",
        "summary.json cannot be read: it is larger than 10 bytes",
    ]


def test_nothing_outside_the_folder_is_read_and_nothing_blocks(run, tmp_path):
    (tmp_path / "secret").write_text('{"step": 1}\n')
    for name in ("config.toml", "metrics.jsonl", "starts.jsonl", "rollouts/step-3.parquet", "objective.txt"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / "secret")
    (run / "summary.json").unlink()
    os.mkfifo(run / "summary.json")
    os.mkfifo(run / "rollouts" / "step-4.parquet")
    (run / "evaluations").rename(tmp_path / "evaluations")
    (run / "evaluations").symlink_to(tmp_path / "evaluations")
    found = Run.read(run)
    assert (found.settings, found.rows, found.starts, found.summary) == ({}, [], [], None)
    assert list(found.rollouts) == [1, 2, 10]
    assert found.evaluations == {}
    assert found.text("objective.txt") is found.text("../secret") is found.json("../secret") is None
    assert sorted(line.split()[0] for line in found.damaged) == [
        "config.toml",
        "evaluations/",
        "metrics.jsonl",
        "starts.jsonl",
        "summary.json",
    ]


def test_links_within_the_folder_pass(run):
    (run / "metrics.jsonl").rename(run / "real.jsonl")
    (run / "metrics.jsonl").symlink_to("real.jsonl")
    link = run.with_name("link")
    link.symlink_to(run)
    assert len(Run.read(link).rows) == 3


@pytest.mark.parametrize("text", ["[a", "a = 1\na = 2", "a" + ".a" * 500 + " = 1", "\udc80", "a = " + "[" * 9999])
def test_settings_that_cannot_be_read(run, text):
    (run / "config.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = Run.read(run)
    assert found.settings == {}
    assert found.damaged[0].startswith("config.toml cannot be read: ")


def test_other_files(run):
    (run / "best").mkdir()
    (run / "best" / "best.json").write_text('{"value": NaN}')
    (run / "objective.txt").write_bytes(b"A\xff")
    found = Run.read(run)
    assert found.json("best/best.json") == {"value": None}
    assert found.text("objective.txt") == "A\ufffd"
    assert found.text("nothing") is found.json("objective.txt") is None


def test_what_is_no_run(run, tmp_path):
    for path, message in (
        (tmp_path / "none", "none does not exist"),
        (tmp_path, r"run is not a run folder|It holds the runs run\."),
        (run / "rollouts" / "step-1.parquet", "is not a folder"),
        (run / "metrics.jsonl", f"is a file of a run: give its folder, {run}"),
        (run / "checkpoints" / "step-2", f"Its run is {run}"),
        ("a\0b", "expected a run folder|cannot read the run folder"),
    ):
        with pytest.raises(RunFolderError, match=message):
            Run.read(path)


def test_it_imports_numpy_and_nothing_heavy():
    heavy = {"torch", "pyarrow", "pydantic", "transformers", "rich"}
    code = f"import sys, cohort.runs.reader; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def steps_in(lines):
    return [one["step"] for one in lines]


def test_lines_come_once_and_complete(tmp_path):
    follower = Run(tmp_path)
    assert follower.refresh() == (False, [])
    write_lines(tmp_path, [line(1), line(2)])
    assert steps_in(follower.refresh()[1]) == [1, 2]
    text = json.dumps(line(3)) + "\n"
    for part in (text[:7], text[7:-1]):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(part)
        assert follower.refresh() == (False, [])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert steps_in(follower.refresh()[1]) == [3]


def test_a_resumed_run_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_lines(tmp_path, [line(step) for step in range(1, 6)])
    follower = Run(tmp_path)
    assert steps_in(follower.refresh()[1]) == [1, 2, 3, 4, 5]
    path.with_suffix(".part").write_text("".join(json.dumps(line(step)) + "\n" for step in (1, 2, 3)))
    path.with_suffix(".part").replace(path)
    replaced, lines = follower.refresh()
    assert (replaced, steps_in(lines)) == (True, [1, 2, 3])
    path.write_text("")  # truncated in place
    assert follower.refresh() == (True, [])
    write_lines(tmp_path, [line(1, custom__x=0.25)])
    assert steps_in(follower.refresh()[1]) == [1]
    with path.open("r+") as file:  # other content of at least the same length, in the same file
        file.write(json.dumps(line(1, custom__x=0.75)) + "\n" + json.dumps(line(2)) + "\n")
    assert [one.get("custom/x") for one in follower.refresh()[1]] == [0.75, None]
    path.unlink()
    assert follower.refresh() == (False, [])


def test_rows_are_by_step_whatever_the_order_of_their_lines(tmp_path):
    run = make_run(tmp_path, [line(1), line(5)])
    reader = Run(run)
    assert [row["step"] for row in reader.rows] == [1, 5]
    write_lines(run, [line(3), line(1, reward__mean=9.0), line(9)])
    assert [row["step"] for row in reader.refresh()[1]] == [3, 1, 9]
    write_lines(run, [line(9), line(8), line(10)])
    reader.refresh()
    assert [row["step"] for row in reader.rows] == [1, 3, 5, 8, 9, 10]
    assert reader.rows[0]["reward/mean"] == 9.0
