"""``cohort diagnose`` on run folders that are made by hand."""

import json

import pytest

from cohort.cli.main import main

DEAD = {"updates": 1, "updates_skipped": 1, "reward/mean": 0.0, "groups/dead_share": 1.0, "groups/sampled": 32}
LIVE = {"updates": 1, "updates_skipped": 0, "reward/mean": 0.5, "groups/dead_share": 0.25, "groups/sampled": 32}


@pytest.fixture
def run_of(tmp_path):
    def make(lines, settings=""):
        (tmp_path / "config.toml").write_text(settings)
        steps = enumerate(lines, 1)
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **line}) + "\n" for n, line in steps))
        return str(tmp_path)

    return make


def test_the_exit_code_is_1_if_an_alarm_stands(run_of, capsys):
    assert main(["diagnose", run_of([LIVE] * 5 + [DEAD] * 20)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("ALARM   all_wrong") == 1
    assert "after step 25, unhealthy (all_wrong): 0% of groups teach\n" in shown
    assert "learning_rate_low, " in shown.splitlines()[-1]


def test_an_alarm_that_has_ceased_is_told_and_does_not_count(run_of, capsys):
    assert main(["diagnose", run_of([DEAD] * 20 + [LIVE] * 20)]) == 0
    shown = capsys.readouterr().out
    assert "ended   all_wrong" in shown
    assert "after step 40, healthy: 75% of groups teach\n" in shown


def test_the_findings_as_json(run_of, capsys):
    settings = '[report]\nskip_checks = ["all_wrong"]\n[report.thresholds]\ndead_groups = 0.1\n'
    assert main(["diagnose", "--json", run_of([LIVE] * 12, settings)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["steps"]) == (True, 12)
    (finding,) = found["findings"]
    assert (finding["check"], finding["level"], finding["end"]) == ("dead_groups", "warning", None)


def test_a_run_without_a_step(run_of, capsys):
    assert main(["diagnose", run_of([])]) == 0
    assert capsys.readouterr().out == "no step yet\n"


def test_damaged_lines_are_mentioned(run_of, capsys, tmp_path):
    folder = run_of([LIVE] * 6)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("no json\n")
    assert main(["diagnose", folder]) == 0
    assert "metrics.jsonl, line 7: " in capsys.readouterr().out
