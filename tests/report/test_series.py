"""Curves: axes, smoothing, intervals, groups of seeds."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from cohort.errors import ConfigError
from cohort.report.series import (
    aligned,
    check_key,
    common_window,
    curve,
    grouped,
    interval,
    loess,
    means_of_groups,
    over_seeds,
    positions,
)
from tests.conftest import each
from tests.report.made import history, rewards


def test_axes():
    lines = rewards([0.5] * 3) + rewards([0.5], tokens=300, seconds=1.0, updates=4, updates_skipped=1)
    run = history(
        [
            {"step": 0, "time": 9.0, "eval/reward/mean": 0.1},
            *({"time": 10.0 + n} | one for n, one in enumerate(lines, 1)),
        ]
    )
    run = history([{**line, "step": step} for step, line in enumerate(run.rows)])
    assert positions(run, "step") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    assert positions(run, "updates") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 6}
    assert positions(run, "tokens") == {0: 0, 1: 100, 2: 200, 3: 300, 4: 600}
    assert positions(run, "seconds") == {0: 0, 1: 2, 2: 4, 3: 6, 4: 7}
    assert positions(run, "time") == {0: 9, 1: 11, 2: 12, 3: 13, 4: 14}
    with pytest.raises(ConfigError, match="unknown axis 'epochs': expected one of step, updates"):
        positions(run, "epochs")


def test_a_missing_line_counts_like_the_next_and_missing_numbers_like_those_before():
    lines = rewards([0, 0, 0, 0], tokens=10)
    lines[1]["step"], lines[2]["step"], lines[3]["step"] = 4, 5, 6
    lines[1]["tokens_per_second"] = 20.0
    lines[2]["tokens_per_second"] = lines[3]["updates"] = None
    assert positions(history(lines), "tokens") == {1: 10, 4: 130, 5: 170, 6: 180}
    assert positions(history(lines), "updates") == {1: 1, 4: 4, 5: 5, 6: 6}
    assert positions(history([{"reward/mean": 1.0}]), "tokens") == {}


def test_a_curve_is_json():
    run = history(rewards([0.0, 1.0, None, 2.0]), name="a/b")
    made = curve(run, "reward/mean", "tokens")
    assert (made.label, made.steps, made.x, made.y, made.line) == (
        "b",
        [1, 2, 4],
        [100, 200, 400],
        [0, 1, 2],
        [0, 1, 2],
    )
    assert json.loads(json.dumps(asdict(made)))["smooth"] is None
    assert curve(run, "nothing").x == curve(history([{"a": 1}]), "a", "tokens").x == []


def test_loess_by_hand():
    fit, half = loess(np.array([0.0, 3.0, 0.0]), 3)
    outer = (7 / 8) ** 3  # the weight at half the distance
    total = 1 + 2 * outer
    assert fit[1] == pytest.approx(3 / total)
    assert fit[0] == fit[2]
    # All values are the window of the middle; each squared residual counts by its expectation.
    first = loess(np.array([0.0, 3.0, 0.0]), 3)[0][0]
    weights = [(1 - (d / 3) ** 3) ** 3 for d in range(3)]
    s0, s1, s2 = (sum(w * d**power for d, w in enumerate(weights)) for power in range(3))
    l_first = [w * (s2 - s1 * d) / (s0 * s2 - s1**2) for d, w in enumerate(weights)]
    assert first == pytest.approx(3 * l_first[1])
    norms = (1 + 2 * outer**2) / total**2, sum(one**2 for one in l_first)
    squares = (3 - fit[1]) ** 2 / (1 - 2 / total + norms[0]), first**2 / (1 - 2 * l_first[0] + norms[1])
    t = math.tan(math.pi * 0.475)  # Student's t with one degree of freedom is Cauchy's distribution
    assert half[1] == pytest.approx(t * math.sqrt((squares[0] + 2 * squares[1]) / 3 * norms[0]))


@each("window", [3, 8, 9, 39, 99])
def test_loess_is_the_weighted_line_of_each_window(window):
    values = np.random.default_rng(0).normal(size=40).cumsum() + 1e3
    fit, half = loess(values, window)
    size = min(window | 1, 39)
    for at in range(40):
        first = min(max(at - size // 2, 0), 40 - size)
        distance = np.abs(np.arange(first, first + size) - at)
        weights = (1 - (distance / (distance.max() + 1)) ** 3) ** 3
        line = np.polyfit(np.arange(first, first + size) - at, values[first : first + size], 1, w=np.sqrt(weights))
        assert fit[at] == pytest.approx(line[1], abs=1e-9)
    assert (half > 0).all()


def test_loess_follows_a_trend_to_both_ends():
    fit, half = loess(np.arange(20.0), 7)
    assert fit.tolist() == pytest.approx(list(range(20)))
    assert half.max() < 1e-9
    assert loess(np.array([1.0, 2.0]), 9)[0].tolist() == [1.0, 2.0]
    made = curve(history(rewards([0.0, 1.0, 5.0, 3.0])), "reward/mean", window=9)
    assert (made.window, len(made.smooth), made.line, made.band) == (3, 4, made.smooth, "95% band of the fit")


@pytest.mark.parametrize("at", [0, 15])
def test_the_band_of_loess_covers(at):
    values = np.random.default_rng(0).normal(size=(400, 31))
    fits = [loess(one, 11) for one in values]
    inside = sum(abs(fit[at]) <= half[at] for fit, half in fits) / 400
    assert 0.92 <= inside <= 0.98  # 95% within 2.8 standard errors of 400 draws


def test_intervals_that_the_metrics_tell():
    line = {"eval/reward/mean": 0.5, "eval/reward/low": 0.4, "eval/reward/high": 0.7, "kl/k3": 0.1, "kl/k3_se": 0.01}
    line |= {"reward/mean": 0.5, "reward/std": 0.5, "reward/within_group_std": 0.3, "groups/sampled": 16}
    assert interval(line, "eval/reward/mean") == (0.4, 0.7, "confidence interval over the evaluation's prompts")
    assert interval(line, "kl/k3")[:2] == pytest.approx((0.1 - 0.0196, 0.1 + 0.0196), abs=1e-6)
    assert interval(line, "reward/mean")[:2] == pytest.approx(
        (0.5 - 2.131450 * 0.4 / math.sqrt(15), 0.5 + 2.131450 * 0.4 / math.sqrt(15)), abs=1e-5
    )  # t with 15 degrees of freedom
    assert interval(line | {"groups/sampled": 1}, "reward/mean") is None
    assert interval(line | {"eval/reward/low": None}, "eval/reward/mean") is None
    assert interval(line, "groups/sampled") is interval(line, "nothing") is None
    made = curve(history([line, {"kl/k3": 0.2}]), "kl/k3")
    assert made.low == [pytest.approx(0.0804, abs=1e-4), None]
    assert made.band == "95% interval over the step's tokens, as if independent"


def settings(seed, rate=1e-5, **run):
    return {"run": {"seed": seed, "output_dir": f"run-{seed}", **run}, "optim": {"learning_rate": rate, "warmup": 1}}


def test_the_interval_over_two_prompts_covers():
    """The mean of 2 prompts with 8 rewards each: of 1,000 intervals, 95% or more have the true mean, 0."""
    generator = np.random.default_rng(0)
    rewards_RPG = generator.normal(size=(1000, 2, 1)) + 0.5 * generator.normal(size=(1000, 2, 8))
    covered = 0
    for rewards_PG in rewards_RPG:
        line = {"reward/mean": rewards_PG.mean(), "reward/std": rewards_PG.std(), "groups/sampled": 2}
        low, high, _ = interval(line | {"reward/within_group_std": rewards_PG.std(axis=1).mean()}, "reward/mean")
        covered += low <= 0 <= high
    assert covered / 1000 > 0.929  # 0.95 less three standard errors of 0.007


def test_groups_differ_by_more_than_the_seed():
    runs = [
        history([], settings(0), name="a"),
        history([], settings(0, 2e-5), name="b"),
        history([], settings(1, save_steps=7), name="c"),
        history([], settings(1, 2e-5), name="d"),
        history([], settings(1), name="again"),
        history([], {}, name="unknown"),
    ]
    groups = grouped(runs[:4])
    assert [(group.label, [run.path.name for run in group.runs], group.seeds) for group in groups] == [
        ("learning_rate 1e-05", ["a", "c"], [0, 1]),
        ("learning_rate 2e-05", ["b", "d"], [0, 1]),
    ]
    assert groups[1].differs == {"optim.learning_rate": 2e-5}
    assert [group.label for group in grouped(runs)] == ["a and 1 more", "b and 1 more", "again", "unknown"]
    assert [group.label for group in grouped(runs[:1])] == ["a"]
    assert len(grouped([history([], settings(0, max_steps=5)), history([], settings(1, max_steps=9))])) == 2


def test_groups_with_other_code_are_apart():
    runs = [history([], settings(n), starts=[{"facts": {"code": text}}]) for n, text in enumerate("xxy")]
    assert [group.label for group in grouped(runs)] == ["code x", "code y"]
    assert grouped([history([], settings(0), starts=[{"facts": 3}]), history([], settings(1))])[0].differs == {}


def test_labels_of_equal_folders():
    runs = [history([], settings(0), name=f"{place}/run") for place in "xy"]
    assert [group.label for group in grouped(runs)] == ["x/run", "y/run"]


def test_over_three_seeds():
    curves = [curve(history(rewards([0.0, value])), "reward/mean") for value in (1.0, 2.0, 3.0)]
    mean = over_seeds(curves, "all")
    assert (mean.label, mean.steps, mean.x, mean.y, mean.runs) == ("all", [1, 2], [1, 2], [0, 2], 3)
    assert mean.low == [0, pytest.approx(2 - 4.302653 / math.sqrt(3))]
    assert mean.high == [0, pytest.approx(2 + 4.302653 / math.sqrt(3))]
    assert mean.band == "95% interval of the mean over 3 seeds"


def test_over_two_seeds_the_band_is_both():
    curves = [curve(history(rewards([value] * 2)), "reward/mean") for value in (1.0, 2.0)]
    mean = over_seeds([*curves, curve(history([]), "reward/mean")], "both")
    assert (mean.y, mean.low, mean.high, mean.band, mean.runs) == ([1.5] * 2, [1] * 2, [2] * 2, "range of 2 seeds", 2)
    assert over_seeds(curves[:1], "one").label == "one"


def test_curves_with_other_places_meet_where_both_are():
    a = curve(history(rewards([0, 1, 2, 3], tokens=100)), "reward/mean", "tokens")
    b = curve(history(rewards([0, 2, 4], tokens=200)), "reward/mean", "tokens")
    x, lines = aligned([a, b])
    assert (x[0], x[-1], len(x)) == (200, 400, 200)
    assert lines[:, [0, -1]].tolist() == [[1, 3], [0, 2]]
    x, lines = aligned([curve(history(rewards(range(n))), "reward/mean") for n in (3, 5)])
    assert x.tolist() == [1, 2, 3]
    assert lines.tolist() == [[0, 1, 2]] * 2


def test_curves_that_do_not_meet():
    lines = rewards([1.0])
    late = history([{**lines[0], "step": 9}])
    mean = over_seeds([curve(one, "reward/mean") for one in (history(lines), late)], "none")
    assert mean.x == mean.y == []
    groups = grouped([history(lines, settings(0)), history([], settings(0, 2e-5))])
    assert [mean.label for mean, _ in means_of_groups(groups, "reward/mean") if mean.x] == ["learning_rate 1e-05"]


def test_a_wrong_key_names_the_nearest():
    run = history(rewards([1.0]))
    check_key([history([]), run], "reward/mean")
    with pytest.raises(ConfigError, match="no run has the metric 'reward/maen'; did you mean reward/mean"):
        check_key([run], "reward/maen")
    with pytest.raises(ConfigError, match="did you mean .*reward/mean"):
        check_key([run], "mean")
    with pytest.raises(ConfigError, match="there are reward/mean, "):
        check_key([run], "xyz")
    with pytest.raises(ConfigError, match="no metrics yet"):
        check_key([history([])], "reward/mean")


def test_a_window_suits_the_shortest_run():
    long, short, without = history(rewards([0.5] * 60)), history(rewards([0.5] * 8)), history([{"step": 1}])
    assert common_window([long, without], "reward/mean") == 7
    assert common_window([long, short], "reward/mean") == common_window([without], "reward/mean") == 1
