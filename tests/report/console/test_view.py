"""What the display shows, as text."""

import io
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

from cohort.errors import RunFolderError
from cohort.report.console import group_text, view
from cohort.report.progress import Progress, Seconds, hint, step_line
from cohort.report.words import clean
from cohort.runs.reader import Run
from tests.conftest import each
from tests.report.console.made import evaluation, line, make_run, write_lines, write_step

PICTURE = """\
step  40/100 ━━━━━━━━━━━━━━━━━━                              40%  18 s left
health      healthy: 75% of groups teach, entropy 0.5, KL 0.001
now         step 41: sampling, 12 of 64 completions have ended
reward        0.400  ▁▁▁▂▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███
right           40%  ▁▁▁▂▂▂▂▂▂▃▃▃▃▃▄▄▄▄▄▄▅▅▅▅▅▅▆▆▆▆▆▇▇▇▇▇▇███
format        0.975  ▁▅▆▆▇▇▇▇▇▇██████████████████████████████
evaluation  0.300 (0.250 to 0.350) after step 20; 0.250 before training
time        0.30 s a step: sampling 53%, rewards 33%, update 7%, log-probs 3%,
            evaluation and files 3%
            rewards take 33% of the step: set reward.workers, or make the
            functions async, to score while sampling goes on
keys        g last group"""
NOW = 1000 + 0.3 * 40 + 0.1
DOING = "step 41: sampling, 12 of 64 completions have ended"


def run_of(steps=40, **more):
    progress = Progress(steps=100)
    progress.add(line(0) | evaluation(0.25))
    for step in range(1, steps + 1):
        functions = {"rewards/right": step / 100, "rewards/format": 1 - 1 / step} | more
        spreads = {"rewards/right/std": (step / 100 * (1 - step / 100)) ** 0.5, "rewards/format/std": 0.125}
        progress.add(line(step) | functions | spreads | (evaluation(0.3) if step == 20 else {}))
    return progress


def shown(progress, width=80, encoding="utf-8", **more):
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(file=stream, width=width, height=50)
    console.print(view(progress, console.options, **more))
    stream.flush()
    return "\n".join(text.rstrip() for text in stream.buffer.getvalue().decode().splitlines())


@pytest.fixture
def now(monkeypatch):
    monkeypatch.setattr(time, "time", lambda: NOW)


def test_a_run_at_80_columns(now):
    assert shown(run_of(), doing=DOING, keys="g last group") == PICTURE


def test_a_run_at_40_columns(now):
    text = shown(run_of(), 40, doing=DOING)
    assert text.startswith("step  40/100 ━━━━╸         40%  18 s\nhealth   healthy: 75% of groups teach,\n")
    assert "\nhealth   healthy: 75% of groups teach,\n         entropy 0.5, KL 0.001\n" in text
    assert "\nreward     0.400  ▁▁▂▂▂▃▃▄▄▄▅▅▅▆▆▆▇▇▇███\n" in text


@each("width", [1, 20, 80, 200])
@each("name", ["short", "a_function_with_a_very_long_name", "奖励函数奖励函数", "\x1b[2J\u202e", "[bold]"])
def test_names_of_strangers_stay_within_the_width(width, name):
    text = shown(run_of(**{f"rewards/{name}": 0.5}), width, doing="[/] without_a_space" * 20)
    assert max(map(cell_len, text.splitlines())) <= width
    assert not any(ord(character) < 32 or character == "\u202e" for character in text.replace("\n", ""))
    assert width < 80 or any(start in text for start in (name, "a_functio…", "奖励函数", "\\x1b[2J"))


def test_before_the_first_step():
    assert shown(Progress(steps=9), 40, doing="step 1: sampling for 3 s") == (
        "step 0/9                    0%\nnow      step 1: sampling for 3 s"
    )
    assert shown(Progress()) == "step 0"


def test_the_only_reward_function_is_the_accuracy():
    progress = Progress(steps=9)
    progress.add(line(1, rewards__right=0.01, rewards__right__std=0.01**0.5 * 0.99**0.5))
    assert shown(progress, 40).endswith("\naccuracy      1%  ▄")
    # A reward between 0 and 1 has come: from then on it is none, whatever later steps give.
    progress.add(line(2, rewards__right=0.02, rewards__right__std=0.1, reward__mean=0.02))
    progress.add(line(3, rewards__right=0.0, rewards__right__std=0.0, reward__mean=0.0))
    assert "accuracy" not in shown(progress)
    assert "\nreward        0.000  " in shown(progress)


def test_more_reward_functions_than_there_is_room_for():
    text = shown(run_of(**{f"rewards/f{n}": 0.5 for n in range(4)}))
    assert "and 2 more reward functions" in text
    assert "f1 " in text
    assert "f2 " not in text


def test_without_unicode():
    assert shown(run_of(**{"rewards/a_function_with_a_long_name": 0.5}), encoding="ascii").isascii()


def test_values_that_are_missing_or_not_finite():
    progress = Progress(steps=9)
    for step, value in enumerate((None, float("nan"), float("inf"), 0.5), 1):
        progress.add(line(step, reward__mean=value))
    assert "\nreward        0.500  ▄\n" in shown(progress)


def test_a_long_run_has_as_many_bars_as_there_is_room_for():
    progress = Progress()
    for step in range(1, 1001):
        progress.courses.setdefault("reward/mean", []).append(step)
    assert shown(progress, 38).splitlines()[-1] == "reward   1000.000  ▁▁▂▂▃▃▃▄▄▅▅▅▆▆▆▇▇██"


def test_the_time_left_is_that_of_the_latest_steps(tmp_path):
    run = make_run(tmp_path, steps=10)
    (run / "starts.jsonl").write_text('{"step": 0}\n{"step": 5, "steps": 10}\n[]\nx\n{"step": [], "steps": 0}\n{"st')
    write_lines(run, (line(step, time=t) for step, t in enumerate([0, 2, 4, 6, 8, 10, 1000, 1002])))
    progress = Progress(Run(run))
    progress.look()
    assert progress.steps == 10
    assert progress.walls() == [2, 2, 2, 2, 2]  # not before step 1, nor from before the resume to step 6
    assert progress.time_left(1002) == 6
    assert progress.time_left(1003) == 5
    assert progress.time_left(2000) == 4  # a late step counts as one


BETWEEN, WAITING = {"evaluation and files": 0.5}, {"waiting for the rollout": 0.5}


@each(
    ("shares", "settings", "metrics", "expected"),
    [
        ({"rewards": 0.61, "sampling": 0.3}, {}, {}, "rewards take 61% of the step: set reward.workers, or make"),
        ({"rewards": 0.61}, {"reward.workers": 2}, {}, "rewards take 61% of the step: raise reward.workers"),
        (BETWEEN, {"eval.eval_steps": 5, "run.save_steps": 9}, {}, "raise eval.eval_steps or run.save_steps"),
        (BETWEEN, {"eval.eval_steps": 0, "run.save_steps": 9}, {}, "50% of the time: raise run.save_steps"),
        (BETWEEN, {"eval.eval_steps": 0, "run": []}, {}, "files, trackers or callbacks are slow"),
        (WAITING, {}, {}, "training waits for its rollout 50% of the time: lower rollout.max_completion_length, or"),
        (WAITING, {"rollout.engine": "server"}, {}, "50% of the time: add servers to server.url"),
        ({"sampling": 0.5}, {}, {"seconds/episodes_blocked": 1.0}, "50% of the step: raise environment.tool_workers"),
        ({"sampling": 0.9}, {"rollout": 3}, {}, "sampling takes 90% of the step"),
        ({"sampling": 0.6, "update": 0.4}, {}, {}, ""),
    ],
)
def test_the_hint_on_the_time(shares, settings, metrics, expected):
    found = hint(Seconds(2.0, shares, {}), settings, metrics)
    assert expected in found
    assert bool(expected) == bool(found)


def test_the_hint_when_rewards_are_slow():
    seconds = Seconds(2.0, WAITING, {"accuracy": 1.0, "format": 0.0})
    assert hint(seconds, {"rollout.engine": "vllm"}, {}).endswith(
        "raise reward.workers, or make the reward functions faster"
    )
    seconds = Seconds(2.0, {"rewards": 0.5}, {"format": 0.1, "accuracy": 0.9})
    assert "rewards take 50% of the step, most of it in accuracy: " in hint(seconds, {}, {})


def test_the_phases_of_a_rollout_in_the_background():
    progress = Progress()
    for step in (1, 2):
        progress.add(line(step, time=float(step), seconds__rollout_wait=0.5))
    assert progress.seconds().shares == pytest.approx(
        {"waiting for the rollout": 0.5, "update": 0.02, "log-probs": 0.01, "evaluation and files": 0.47}
    )


METRICS = {"step": 1, "updates": 1, "updates_skipped": 0, "reward/mean": 0.5, "rewards/accuracy": 0.25, "entropy": 1.5}
METRICS |= {"groups/dead_share": 0.125, "groups/rounds": 1, "kl/k3": 0.001, "tokens_per_second": 1234.5}


def test_the_line_of_a_step():
    expected = "reward 0.500  accuracy 0.250  dead groups 12%  entropy 1.5000  KL 0.0010  1,234 tokens/s"
    assert step_line(METRICS) == expected
    without = {k: v for k, v in METRICS.items() if k not in ("kl/k3", "rewards/accuracy")} | {"reward/mean": None}
    assert step_line(without) == "reward none  dead groups 12%  entropy 1.5000  1,234 tokens/s"
    assert "  none groups sampled, 3 left out  entropy" in step_line(
        METRICS | {"groups/rounds": 2, "groups/left_out": 3}
    )
    episodes = {"episodes/turns": 2.25, "episodes/calls": 0.5, "episodes/failed_call_share": 0.125}
    assert "  turns 2.2  calls 0.50 (12% failed)  1 episodes failed  entropy" in step_line(
        METRICS | episodes | {"episodes/failed": 1}
    )


def test_the_last_group_of_a_step(tmp_path):
    write_step(tmp_path, 3, reward_error=[None, None, None, "ValueError: no\x1b number"])
    assert group_text(Run(tmp_path).rollouts[3]).plain == (
        "step 3, group 2 of 2\nprompt\n  | 3 + 3\n"
        " 1  reward 1.000  advantage +0.500  eos\n  | first line\n  | second line\n"
        " 2  reward none  advantage none  eos\n  | \\x1b[2Jclears\n    ValueError: no\\x1b number"
    )


def test_a_group_of_strangers(tmp_path):
    texts = ["", "", "x" * 30_000, "\x1b]0;title\x07\r\x00\u202e\ud83d\n\n".encode("utf-8", "replace").decode()]
    write_step(tmp_path, 1, completion=texts, finish_reason=["\n\x1b[2J" * 9] * 4)
    text = group_text(Run(tmp_path).rollouts[1]).plain
    assert "... 20,000 more characters" in text
    assert len(text) < 11_000
    assert not any(ord(character) < 32 or character == "\u202e" for character in text.replace("\n", ""))


def test_a_damaged_table(tmp_path):
    write_step(tmp_path, 1)
    file = Run(tmp_path).rollouts[1]
    file.write_bytes(b"PAR1 and so on")
    with pytest.raises(RunFolderError, match=r"cannot read .*step-1\.parquet"):
        group_text(file)


def test_what_a_terminal_would_obey_is_written_out():
    assert clean("a\x00\x07\x9b\u2028\udc80b") == "a\\x00\\x07\\x9b\\u2028\\udc80b"
    assert clean("naïve 日本 👩\u200d💻 ب") == "naïve 日本 👩\u200d💻 ب"
