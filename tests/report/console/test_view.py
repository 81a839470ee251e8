"""What the live display shows, as text."""

import pytest
from rich.cells import cell_len

from cohort.report.console.progress import POINTS, RunProgress, Seconds, Series, hint
from cohort.report.console.view import Moment, as_plain, hanging, view
from cohort.report.words import clean
from tests.conftest import each
from tests.report.console.made import evaluation, line

NOW = 1000 + 0.3 * 40 + 0.1
PICTURE = """\
step  40/100 ━━━━━━━━━━━━━━━━━━──────────────────────────  40%  18 s left
reward        0.400  ▁▁▁▂▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███
right           40%  ▁▁▁▂▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███
format        0.975  ▁▅▆▆▇▇▇▇▇▇██████████████████████████████
evaluation  0.300 (0.250 to 0.350) after step 20; 0.250 before training
health      healthy: 75% of groups teach, entropy 0.5, KL 0.001
time        0.30 s a step: sampling 53%, rewards 33%, update 7%, log-probs 3%,
            evaluation and files 3%
            rewards take 33% of the step: set reward.workers, or make the
            functions async, to score while sampling goes on
saved       checkpoint of step 40
now         step 41: sampling, 12 of 64 completions have ended
keys        g last group"""
MOMENT = Moment(NOW, "step 41: sampling, 12 of 64 completions have ended", 40, keys="g last group")


def run_of(steps=40, **more):
    progress = RunProgress(steps=100)
    progress.add(line(0) | evaluation(0.25))
    for step in range(1, steps + 1):
        functions = {"rewards/right": step / 100, "rewards/format": 1 - 1 / step} | more
        spreads = {"rewards/right/std": (step / 100 * (1 - step / 100)) ** 0.5, "rewards/format/std": 0.125}
        progress.add(line(step) | functions | spreads | (evaluation(0.3) if step == 20 else {}))
    progress.health = "healthy: 75% of groups teach, entropy 0.5, KL 0.001"
    return progress


def shown(progress, width, height=100, moment=MOMENT):
    return as_plain(view(progress, moment, width, height))


def test_a_run_at_80_columns():
    assert shown(run_of(), 80) == PICTURE


def test_a_run_at_40_columns():
    text = shown(run_of(), 40)
    assert text.startswith("step  40/100 ━━━━──────  40%  18 s\nreward     0.400  ▁▁▂▂▂▃▃▃▄▄▅▅▅▆▆▆▇▇▇██\n")
    assert "\nhealth   healthy: 75% of groups teach,\n         entropy 0.5, KL 0.001\n" in text


@each("width", [1, 10, 20, 40, 80, 200])
@each("name", ["short", "a_function_with_a_very_long_name", "奖励函数奖励函数", "\x1b[2J\u202e"])
def test_no_line_reaches_the_last_column(width, name):
    progress = run_of(**{f"rewards/{name}": 0.5})
    progress.health = "healthy: " + "without_a_space" * 20
    lines = view(progress, MOMENT, width, 100)
    if width >= 20:
        assert max(cell_len(one.plain) for one in lines) <= width - 1
    assert not any(ord(character) < 32 for one in lines for character in one.plain)


def test_a_low_terminal_keeps_what_matters_most():
    assert shown(run_of(), 80, 3).split()[:2] == ["step", "40/100"]
    assert [text.split()[0] for text in shown(run_of(), 80, 4).splitlines()] == ["step", "reward", "health", "now"]
    assert len(shown(run_of(), 80, 1).splitlines()) == 1


def test_before_the_first_step():
    progress = RunProgress(steps=9)
    assert shown(progress, 40, moment=Moment(0.0, "step 1: sampling for 3 s")) == (
        "step 0/9 ──────────────   0%\nnow      step 1: sampling for 3 s"
    )
    assert shown(RunProgress(), 40).startswith("step 0\n")


def test_the_only_reward_function_is_the_accuracy():
    progress = RunProgress(steps=9)
    progress.add(line(1, rewards__right=0.01, rewards__right__std=0.01**0.5 * 0.99**0.5))
    assert shown(progress, 40, moment=Moment(NOW)).splitlines()[1] == "accuracy      1%  ▄"
    # A reward between 0 and 1 has come: from then on it is none, whatever later steps give.
    progress.add(line(2, rewards__right=0.02, rewards__right__std=0.1, reward__mean=0.02))
    progress.add(line(3, rewards__right=0.0, rewards__right__std=0.0, reward__mean=0.0))
    assert shown(progress, 40, moment=Moment(NOW)).splitlines()[1].startswith("reward     0.000")


def test_without_unicode():
    moment = Moment(NOW, ascii_only=True)
    assert shown(run_of(), 80, moment=moment).isascii()


def test_values_that_are_missing_or_not_finite():
    progress = RunProgress(steps=9)
    for step, value in enumerate((None, float("nan"), float("inf"), 0.5), 1):
        progress.add(line(step, reward__mean=value))
    assert progress.reward.points(9) == [0.5]
    assert shown(progress, 80).splitlines()[1] == "reward        0.500  ▄"


def test_a_series_keeps_the_means_of_equally_many_values():
    series = Series()
    for value in range(10 * POINTS):
        series.add(float(value))
    points = series.points(10)
    assert len(points) == 10
    # Each point is the mean of about a tenth of the values; the edges are at most one bin of 16 values off.
    for n, point in enumerate(points):
        assert abs(point - (n + 0.5) * POINTS) < 16


def test_the_time_left_is_that_of_the_latest_steps():
    progress = RunProgress(steps=10, starts=[0, 5])
    for step, time in enumerate([0, 2, 4, 6, 8, 10, 1000, 1002]):
        progress.add(line(step, time=time))
    assert progress.walls() == [2, 2, 2, 2, 2]  # not before step 1, nor from before the resume to step 6
    assert progress.time_left(1002) == 6
    assert progress.time_left(1003) == 5
    assert progress.time_left(2000) == 4  # a late step counts as one


BETWEEN, WAITING = {"evaluation and files": 0.5}, {"waiting for the rollout": 0.5}


@each(
    ("shares", "settings", "metrics", "expected"),
    [
        ({"rewards": 0.61, "sampling": 0.3}, {}, {}, "rewards take 61% of the step: set reward.workers, or make"),
        ({"rewards": 0.61}, {"reward": {"workers": 2}}, {}, "rewards take 61% of the step: raise reward.workers"),
        (BETWEEN, {"eval": {"eval_steps": 5}, "run": {"save_steps": 9}}, {}, "raise eval.eval_steps or run.save_steps"),
        (BETWEEN, {"eval": {"eval_steps": 0}, "run": {"save_steps": 9}}, {}, "50% of the time: raise run.save_steps"),
        (BETWEEN, {"eval": {"eval_steps": 0}, "run": []}, {}, "files, trackers or callbacks are slow"),
        (WAITING, {}, {}, "training waits for its rollout 50% of the time: lower rollout.max_completion_length, or"),
        (WAITING, {"rollout": {"engine": "vllm"}}, {}, "50% of the time: add servers to vllm.url"),
        ({"sampling": 0.5}, {}, {"seconds/episodes_blocked": 1.0}, "50% of the step: raise environment.tool_workers"),
        ({"sampling": 0.9}, {"rollout": 3}, {}, "sampling takes 90% of the step"),
        ({"sampling": 0.6, "update": 0.4}, {}, {}, ""),
    ],
)
def test_the_hint_on_the_time(shares, settings, metrics, expected):
    found = hint(Seconds(2.0, shares, {}), settings, metrics)
    assert expected in found
    assert bool(expected) == bool(found)


def test_the_hint_when_training_waits_for_slow_rewards():
    seconds = Seconds(2.0, WAITING, {"accuracy": 1.0, "format": 0.0})
    assert hint(seconds, {"rollout": {"engine": "vllm"}}, {}).endswith(
        "raise reward.workers, or make the reward functions faster"
    )


def test_the_phases_of_a_rollout_in_the_background():
    progress = RunProgress()
    for step in (1, 2):
        progress.add(line(step, time=float(step), seconds__rollout_wait=0.5))
    assert progress.seconds().shares == pytest.approx(
        {"waiting for the rollout": 0.5, "update": 0.02, "log-probs": 0.01, "evaluation and files": 0.47}
    )


def test_what_a_terminal_would_obey_is_written_out():
    assert clean("a\x00\x07\x9b\u2028\udc80b") == "a\\x00\\x07\\x9b\\u2028\\udc80b"
    assert clean("naïve 日本 👩\u200d💻 ب") == "naïve 日本 👩\u200d💻 ب"
    assert hanging("", 10) == ""
