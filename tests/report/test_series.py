"""Curves: axes, smoothing, intervals, groups of seeds."""

import math

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
)
from tests.conftest import each
from tests.report.made import history, rewards


def places(run, axis):
    return {row["step"]: x for row, x in zip(run.rows, run.axis(axis).tolist(), strict=True) if not math.isnan(x)}


def reward_curve(lines, axis="step", window=1):
    return curve(history(lines), "reward/mean", axis, window)


def test_axes():
    lines = rewards([0.5] * 3) + rewards([0.5], tokens=300, seconds=1.0, updates=4, updates_skipped=1)
    lines = [{"time": 9.0, "eval/reward/mean": 0.1}, *({"time": 10.0 + n} | one for n, one in enumerate(lines, 1))]
    run = history([{**line, "step": step} for step, line in enumerate(lines)])
    assert places(run, "step") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    assert places(run, "updates") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 6}
    assert places(run, "tokens") == {0: 0, 1: 100, 2: 200, 3: 300, 4: 600}
    assert places(run, "seconds") == {0: 0, 1: 2, 2: 4, 3: 6, 4: 7}
    assert places(run, "time") == {0: 9, 1: 11, 2: 12, 3: 13, 4: 14}
    with pytest.raises(ConfigError, match="unknown axis 'epochs': expected one of step, updates"):
        run.axis("epochs")


def test_a_missing_line_counts_like_the_next_and_missing_numbers_like_those_before():
    lines = rewards([0, 0, 0, 0], tokens=10)
    lines[1]["step"], lines[2]["step"], lines[3]["step"] = 4, 5, 6
    lines[1]["tokens_per_second"] = 20.0
    lines[2]["tokens_per_second"] = lines[3]["updates"] = None
    assert places(history(lines), "tokens") == {1: 10, 4: 130, 5: 170, 6: 180}
    assert places(history(lines), "updates") == {1: 1, 4: 4, 5: 5, 6: 6}
    assert places(history([{"reward/mean": 1.0}]), "tokens") == {}


def test_a_curve_has_the_points_with_a_place_and_a_number():
    run = history(rewards([0.0, 1.0, None, 2.0]), name="a/b")
    made = curve(run, "reward/mean", "tokens")
    assert (made.label, made.band, made.window) == ("b", "", 1)
    assert (made.x.tolist(), made.y.tolist(), made.line.tolist()) == ([100, 200, 400], [0, 1, 2], [0, 1, 2])
    assert len(curve(run, "nothing").x) == len(curve(history([{"a": 1}]), "a", "tokens").x) == 0


def test_loess_by_hand():
    fit, half = loess(np.array([0.0, 3.0, 0.0]), 3)
    outer = (7 / 8) ** 3  # the weight at half the distance
    total = 1 + 2 * outer
    assert fit[1] == pytest.approx(3 / total)
    assert fit[0] == fit[2]
    # All values are the window of the middle; each squared residual counts by its expectation.
    weights = [(1 - (d / 3) ** 3) ** 3 for d in range(3)]
    s0, s1, s2 = (sum(w * d**power for d, w in enumerate(weights)) for power in range(3))
    l_first = [w * (s2 - s1 * d) / (s0 * s2 - s1**2) for d, w in enumerate(weights)]
    assert fit[0] == pytest.approx(3 * l_first[1])
    norms = (1 + 2 * outer**2) / total**2, sum(one**2 for one in l_first)
    squares = (3 - fit[1]) ** 2 / (1 - 2 / total + norms[0]), fit[0] ** 2 / (1 - 2 * l_first[0] + norms[1])
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
    made = reward_curve(rewards([0.0, 1.0, 5.0, 3.0]), window=9)
    assert (made.window, len(made.line), made.band) == (3, 4, "95% band of the fit")
    assert reward_curve(rewards([0.0, 1.0]), window=9).window == 1


@pytest.mark.parametrize("at", [0, 15])
def test_the_band_of_loess_covers(at):
    values = np.random.default_rng(0).normal(size=(400, 31))
    fits = [loess(one, 11) for one in values]
    inside = sum(abs(fit[at]) <= half[at] for fit, half in fits) / 400
    assert 0.92 <= inside <= 0.98  # 95% within 2.8 standard errors of 400 draws


def test_intervals_that_the_metrics_tell():
    line = {"eval/reward/mean": 0.5, "eval/reward/low": 0.4, "eval/reward/high": 0.7, "kl/k3": 0.1, "kl/k3_se": 0.01}
    line |= {"reward/mean": 0.5, "reward/std": 0.5, "reward/within_group_std": 0.3, "groups/sampled": 16}
    run = history([line, line | {"groups/sampled": 1, "eval/reward/low": None}, {"kl/k3": 0.2}])

    def rows(key):
        low, high, words = interval(run, key)
        return np.stack([low, high], axis=1), words

    nothing = [math.nan, math.nan]
    found, words = rows("eval/reward/mean")
    np.testing.assert_array_equal(found, [[0.4, 0.7], nothing, nothing])
    assert words == "confidence interval over the evaluation's prompts"
    half = 1.9599640 * 0.01
    np.testing.assert_allclose(rows("kl/k3")[0], [[0.1 - half, 0.1 + half]] * 2 + [nothing], rtol=1e-6)
    half = 2.131450 * 0.4 / math.sqrt(15)  # t with 15 degrees of freedom
    np.testing.assert_allclose(rows("reward/mean")[0], [[0.5 - half, 0.5 + half], nothing, nothing], rtol=1e-5)
    assert np.isnan(rows("groups/sampled")[0]).all()
    made = curve(run, "kl/k3")
    np.testing.assert_allclose(made.low, [0.1 - 0.019599640] * 2 + [math.nan], rtol=1e-6)
    assert made.band == "95% interval over the step's tokens, as if independent"


def test_the_interval_over_two_prompts_covers():
    """The mean of 2 prompts with 8 rewards each: of 1,000 intervals, 95% or more have the true mean, 0."""
    generator = np.random.default_rng(0)
    rewards_RPG = generator.normal(size=(1000, 2, 1)) + 0.5 * generator.normal(size=(1000, 2, 8))
    names = ("reward/mean", "reward/std", "reward/within_group_std", "groups/sampled")
    lines = [dict(zip(names, (one.mean(), one.std(), one.std(axis=1).mean(), 2), strict=True)) for one in rewards_RPG]
    low, high, _ = interval(history(lines), "reward/mean")
    assert ((low <= 0) & (high >= 0)).mean() > 0.929  # 0.95 less three standard errors of 0.007


def settings(seed, rate=1e-5, **run):
    return {"run": {"seed": seed, "output_dir": f"run-{seed}", **run}, "optim": {"learning_rate": rate, "warmup": 1}}


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
    same_name = [history([], settings(0), name=f"{place}/run") for place in "xy"]
    assert [group.label for group in grouped(same_name)] == ["x/run", "y/run"]


def test_a_data_file_at_two_places_is_one_experiment():
    def run(seed, place, prompts, model="/m"):
        named = {"run": {"seed": seed}, "model": {"path": model}, "data": {"train": f"/{place}/a.jsonl"}}
        return history([], named, name=f"{place}-{seed}", starts=[{"facts": {"prompts": prompts}}])

    runs = [run(0, "x", "p"), run(1, "y", "p"), run(2, "x", "q"), run(3, "x", "p", model="/n")]
    assert [one.seeds for one in grouped(runs)] == [[0, 1], [2], [3]]


def test_groups_with_other_code_are_apart():
    runs = [history([], settings(n), starts=[{"facts": {"code": text}}]) for n, text in enumerate("xxy")]
    assert [group.label for group in grouped(runs)] == ["code x", "code y"]
    assert grouped([history([], settings(0), starts=[{"facts": 3}]), history([], settings(1))])[0].differs == {}


def test_over_three_seeds():
    mean = over_seeds([reward_curve(rewards([0.0, value])) for value in (1.0, 2.0, 3.0)], "all")
    assert (mean.label, mean.x.tolist(), mean.y.tolist(), mean.runs) == ("all", [1, 2], [0, 2], 3)
    assert mean.low.tolist() == [0, pytest.approx(2 - 4.302653 / math.sqrt(3))]
    assert mean.high.tolist() == [0, pytest.approx(2 + 4.302653 / math.sqrt(3))]
    assert mean.band == "95% interval of the mean over 3 seeds"


def test_over_two_seeds_the_band_is_both():
    curves = [reward_curve(rewards([value] * 2)) for value in (1.0, 2.0)]
    mean = over_seeds([*curves, reward_curve([])], "both")
    edges = [one.tolist() for one in (mean.y, mean.low, mean.high)]
    assert (edges, mean.band, mean.runs) == ([[1.5] * 2, [1] * 2, [2] * 2], "range of 2 seeds", 2)
    assert over_seeds(curves[:1], "one").label == "one"


def test_curves_with_other_places_meet_where_both_are():
    a = reward_curve(rewards([0, 1, 2, 3], tokens=100), "tokens")
    b = reward_curve(rewards([0, 2, 4], tokens=200), "tokens")
    x, lines = aligned([a, b])
    assert (x[0], x[-1], len(x)) == (200, 400, 200)
    assert lines[:, [0, -1]].tolist() == [[1, 3], [0, 2]]
    x, lines = aligned([reward_curve(rewards(range(n))) for n in (3, 5)])
    assert x.tolist() == [1, 2, 3]
    assert lines.tolist() == [[0, 1, 2]] * 2


def test_curves_that_do_not_meet():
    lines = rewards([1.0])
    mean = over_seeds([reward_curve(lines), reward_curve([{**lines[0], "step": 9}])], "none")
    assert len(mean.x) == len(mean.y) == 0
    groups = grouped([history(lines, settings(0)), history([], settings(0, 2e-5))])
    assert [mean.label for mean, _ in means_of_groups(groups, "reward/mean") if len(mean.x)] == ["learning_rate 1e-05"]


def test_a_wrong_key_names_the_nearest():
    run = history(rewards([1.0]))
    check_key([history([]), run], "reward/mean")
    for key, message in (
        ("reward/maen", "no run has the metric 'reward/maen'; did you mean reward/mean"),
        ("mean", "did you mean .*reward/mean"),
        ("xyz", "there are reward/mean, "),
    ):
        with pytest.raises(ConfigError, match=message):
            check_key([run], key)
    with pytest.raises(ConfigError, match="no metrics yet"):
        check_key([history([])], "reward/mean")


def test_a_window_suits_the_shortest_run():
    long, short, without = history(rewards([0.5] * 60)), history(rewards([0.5] * 8)), history([{"step": 1}])
    assert common_window([long, without], "reward/mean") == 7
    assert common_window([long, short], "reward/mean") == common_window([without], "reward/mean") == 1
