"""Output without a terminal, and the reasons for a missing gradient."""

import re
import threading
import time

from cohort.report import console
from cohort.report.console import Display
from cohort.report.diagnosis import why_no_gradient
from cohort.watchdog import waiting
from tests.conftest import each
from tests.report.console.made import evaluation, line, make_run, write_lines

METRICS = {"step": 1, "updates": 1, "updates_skipped": 0, "reward/mean": 0.5, "rewards/accuracy": 0.25, "entropy": 1.5}
METRICS |= {"groups/dead_share": 0.125, "groups/rounds": 1, "kl/k3": 0.001, "tokens_per_second": 1234.5}


def test_without_a_terminal_quick_steps_share_lines(capsys):
    with Display.of_training(100) as display:
        for step in range(1, 101):
            display.show(METRICS | {"step": step})
    steps = re.findall(r"^step (\d+)/100", capsys.readouterr().out, flags=re.MULTILINE)
    assert {1, *range(5, 101, 5)} <= set(map(int, steps))
    assert len(steps) < 40  # a second or two of lines, one each, beside the twentieths


def test_without_a_terminal_each_long_step_has_a_line_with_the_time_left(capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    now = time.time()
    with Display.of_training(1000) as display:
        for step in (1, 2, 3):
            display.show(METRICS | {"step": step, "time": now - 60 * (3 - step), "seconds/step": 60.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines] == ["step 1/1000", "step 2/1000", "step 3/1000"]
    assert lines[2].endswith("16:37 h left") or lines[2].endswith("16:36 h left")


def test_a_long_step_without_a_terminal_is_not_silent(capsys, monkeypatch):
    display = Display.of_training(9)
    display.silence = 0.2
    with display, waiting("sampling", lambda: "3 of 8 completions"):
        deadline = time.monotonic() + 20
        printed = ""
        while "sampling" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)
            printed += capsys.readouterr().out
    assert printed.startswith("step 1: sampling, 3 of 8 completions\n")


def test_its_thread_ends_with_it(monkeypatch):
    """A thread that ends later frees the run's tensors while the interpreter ends: the process is aborted."""
    monkeypatch.setattr(Display, "_tick", lambda _: time.sleep(0.4))
    with Display.of_training(9):
        assert "cohort-display" in {thread.name for thread in threading.enumerate()}
        time.sleep(0.3)
    assert "cohort-display" not in {thread.name for thread in threading.enumerate()}


def test_the_warning_about_missing_gradients_is_printed_once(capsys):
    with Display.of_training(2) as display:
        for step in (1, 2):
            dead = {"groups/dead_share": 1.0, "tokens/no_advantage_share": 1, "updates_skipped": 1}
            display.show(METRICS | dead | {"step": step})
    assert capsys.readouterr().out.count("every group has equal rewards, so there is nothing to learn") == 1


def test_findings_appear_once_also_in_a_resumed_run(tmp_path, capsys):
    dead = {"groups__dead_share": 1.0, "reward__mean": 0.0, "updates": 2}
    with Display.of_training(100, make_run(tmp_path)) as display:
        write_lines(tmp_path, [line(0, **evaluation(0.25))])
        for step in range(1, 11):
            write_lines(tmp_path, [line(step, **dead)])
            display.show(line(step, **dead))
        assert [row["step"] for row in display.progress.evaluations] == [0]
        assert len(display.progress.courses["reward/mean"]) == 10
    found = re.findall(r"^step \d+: alarm \((.*?)\): .*\n  -> ", capsys.readouterr().out, flags=re.MULTILINE)
    assert found == ["all_wrong"]
    with Display.of_training(100, tmp_path) as display:
        display.show(line(11, **dead, **evaluation(0.25)))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 11/100")
    assert lines[1:] == ["evaluation after step 11: reward 0.250 (0.200 to 0.300)"]


@each(
    ("metrics", "expected"),
    [
        ({"tokens/masked_share": 0.9, "tokens/no_advantage_share": 0.1}, "90% of the tokens belong to completions cut"),
        ({"tokens/vanished_share": 1.0}, "100% of the tokens have a multiplier of 0 in the trust region"),
        ({"groups/left_out": 4, "groups/sampled": 4}, "objective.group_filter dropped them all"),
        ({"groups/dead_share": 1.0, "tokens/no_advantage_share": 1.0}, "every group has equal rewards"),
        ({"groups/dead_share": 1.0, "tokens/masked_share": 1.0}, "100% of the tokens belong to completions cut"),
    ],
)
def test_reasons_for_a_missing_gradient(metrics, expected):
    assert expected in why_no_gradient({"groups/dead_share": 0.0, "groups/left_out": 0, "groups/sampled": 4} | metrics)


def test_progress_false_prints_nothing(tmp_path, capsys):
    with Display.of_training(2, make_run(tmp_path), enabled=False) as display:
        display.show(line(1, updates_skipped=1, **evaluation(0.25)))
    assert capsys.readouterr().out == ""


def test_reasons_for_missing_scores():
    unscored = {"reward/mean": None, "groups/dead_share": 1.0, "groups/unscored_share": 1.0}
    unscored |= {"rewards/gsm8k/unscored_share": 1.0}
    assert why_no_gradient(unscored | {"rewards/gsm8k/failed": 0}) == (
        "no update had a gradient: no completion was scored, because gsm8k returned None for every one"
    )
    assert why_no_gradient(unscored | {"rewards/gsm8k/failed": 4}).endswith("because gsm8k failed on every one")
    some = {"reward/mean": 0.0, "groups/dead_share": 1.0, "tokens/no_advantage_share": 1.0}
    assert why_no_gradient(some | {"rewards/mine/failed": 15, "rewards/mine/unscored_share": 15 / 16}) == (
        "mine failed on 15 completions (94%), which are unscored (the log has the traceback). Without them, no update "
        "had a gradient: every group has equal rewards, so there is nothing to learn"
    )
