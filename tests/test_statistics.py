"""Statistics of evaluations: values by hand, brute force, and coverage by simulation."""

import itertools
import math

import numpy as np
import pytest

from cohort.statistics import (
    MOST_SUBSETS,
    compare,
    estimates,
    majority_at_k,
    paired_shares,
    paired_t,
    pass_at_k,
    resampled_means,
    sign_flip_p,
    t_probability,
    t_quantile,
    welch_t,
    wilson,
)
from tests.conftest import each

NAN = math.nan


def one(values, **settings):
    return estimates({"x": np.array(values, dtype=float)}, **settings)["x"]


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one():
    rng = np.random.default_rng(0)
    rows = (rng.random((20, 6)) < 0.3).astype(float)
    for k in range(1, 7):
        expected = [np.mean([max(chosen) for chosen in itertools.combinations(row, k)]) for row in rows]
        assert pass_at_k(rows, k) == pytest.approx(expected, abs=1e-14)


def test_pass_at_k_of_thousands_is_accurate():
    row = np.zeros((1, 5000))
    assert pass_at_k(row, 1000)[0] == 0
    row[0, :2] = 1  # 1 - C(4998, 1000) / C(5000, 1000)
    assert pass_at_k(row, 1000)[0] == pytest.approx(1 - (4000 * 3999) / (5000 * 4999), rel=1e-12)


def test_unscored_completions_do_not_count_as_wrong():
    rows = np.array([[1.0, NAN, 0.0], [NAN, NAN, 1.0], [NAN, NAN, NAN]])
    assert pass_at_k(rows, 1).tolist() == pytest.approx([0.5, 1.0, NAN], nan_ok=True)
    assert pass_at_k(rows, 2).tolist() == pytest.approx([1.0, NAN, NAN], nan_ok=True)


@each(
    ("correct", "answers", "k", "expected"),
    [
        ([1, 1, 0], ["7", "7", "8"], 3, 1.0),
        ([1, 0, 0], ["7", "8", "8"], 3, 0.0),
        ([1, 0], ["7", "8"], 2, 0.5),  # a tie: each counts half
        ([1, 0, 0], ["7", "8", "9"], 3, 1 / 3),
        ([1, 0, 0], ["7", None, None], 3, 1.0),  # completions without an answer do not vote
        ([0, 0], [None, None], 2, 0.0),
        ([1, 1, 0], ["7", "7", "8"], 2, 2 / 3),  # of the subsets of two, {7, 7} is right and twice {7, 8} half right
        ([1, 1, 0], [7, 7.0, 8], 1, 2 / 3),
        ([1, NAN], ["7", "8"], 2, NAN),
        ([1, NAN, 1], ["7", "8", "7"], 2, 1.0),
    ],
)
def test_majority_by_hand(correct, answers, k, expected):
    assert majority_at_k(np.array([correct], float), [answers], k)[0] == pytest.approx(expected, nan_ok=True)


def test_maj_at_1_is_pass_at_1():
    rng = np.random.default_rng(1)
    rows = (rng.random((10, 5)) < 0.4).astype(float)
    answers = [["right" if c else f"wrong {n % 2}" for n, c in enumerate(row)] for row in rows]
    assert majority_at_k(rows, answers, 1) == pytest.approx(pass_at_k(rows, 1), abs=1e-12)


def test_many_subsets_are_sampled_reproducibly():
    rng = np.random.default_rng(2)
    answers = [rng.choice(["a", "b", "c"], size=20, p=[0.5, 0.3, 0.2]).tolist()]
    rows = np.array([[float(answer == "a") for answer in answers[0]]])
    assert math.comb(20, 5) > MOST_SUBSETS
    drawn = majority_at_k(rows, answers, 5)[0]
    assert drawn == majority_at_k(rows, answers, 5)[0]
    names, counts = np.unique(answers[0], return_counts=True)
    share = 0.0
    for votes in itertools.product(range(6), repeat=len(names)):  # exact: all counts of each answer among five voters
        if sum(votes) == 5:
            chance = math.prod(math.comb(int(n), v) for n, v in zip(counts, votes, strict=True)) / math.comb(20, 5)
            first = [name for name, v in zip(names, votes, strict=True) if v == max(votes)]
            share += chance * ("a" in first) / len(first)
    # the mean of 2,000 numbers in [0, 1] has a standard error of at most 0.5 / sqrt(2000) = 0.011; four of them
    assert drawn == pytest.approx(share, abs=0.045)


def test_wilson_by_hand():
    # 8 of 10: centre (0.8 + 3.8415/20) / (1 + 3.8415/10) = 0.7167; half-width 0.2265
    estimate = one([1.0] * 8 + [0.0] * 2)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=1e-4)
    narrower = wilson(0.8, 10, 0.5)
    assert estimate.low < narrower.low < 0.8 < narrower.high < estimate.high


def test_the_bootstrap_of_three_prompts_by_enumeration():
    """All 27 equally likely draws of three prompts give the exact distribution; the ends of its middle 95% lie at its
    ends, 1 (chance 1/27 above 2.5%) and 4."""
    estimate = one([1.0, 2.0, 4.0], resamples=4000)
    assert (estimate.low, estimate.high) == (1.0, 4.0)
    # of the 27 sums 30% are up to 6, whose share goes from 7/27 to 11/27; 70% up to 8, from 17/27 to 20/27. The
    # standard error of a share of 4,000 is 0.7%, and both are 4% inside.
    middle = one([1.0, 2.0, 4.0], resamples=4000, confidence=0.4)
    sums = sorted(sum(draw) for draw in itertools.product([1.0, 2.0, 4.0], repeat=3))
    assert (sums[8], sums[18]) == (6.0, 8.0)
    assert (middle.low, middle.high) == pytest.approx((6 / 3, 8 / 3))


@each(
    ("values", "settings", "words"),
    [
        ([NAN], {}, "nan [no interval]"),
        ([0.5], {}, "0.500 [no interval]"),
        ([0.5] * 20, {}, "0.500 [no interval]"),
        ([0.1 + 0.2, 0.3, 0.3], {}, "0.300 [no interval]"),  # rounding is no spread
        ([1.0] * 12, {"not_proportions": ("x",)}, "1.000 [no interval]"),  # lengths
        ([1.0] * 12 + [NAN], {}, "1.000 [0.758, 1.000]"),  # 12 / (12 + 1.96**2)
        ([0.0] * 50, {}, "0.000 [0.000, 0.071]"),  # 3.8415 / (50 + 3.8415)
    ],
)
def test_intervals_of_little(values, settings, words):
    assert str(one(values, **settings)) == words


def test_prompts_without_a_value_are_left_out_and_change_nothing_else():
    values = np.array([0.1, 0.7, 0.4, 0.9, 0.2])
    holed = np.array([0.5, NAN, 0.5, NAN, 0.25])
    together = estimates({"a": values, "b": holed})
    alone = estimates({"a": values})["a"]
    # a matrix product of another shape rounds differently
    assert (together["a"].low, together["a"].high) == pytest.approx((alone.low, alone.high), abs=1e-12)
    assert together["a"].mean == alone.mean
    assert together["b"].mean == pytest.approx(1.25 / 3)
    assert 0.25 <= together["b"].low < together["b"].high <= 0.5


def test_resamples_do_not_depend_on_the_chunk(monkeypatch):
    values = np.random.default_rng(3).random((30, 2))
    at_once = resampled_means(values, 200, seed=4)
    monkeypatch.setattr("cohort.statistics.CHUNK", 30 * 7)
    # matrix products of other shapes round differently
    assert resampled_means(values, 200, seed=4) == pytest.approx(at_once, abs=1e-12)
    assert resampled_means(values, 200, seed=5) != pytest.approx(at_once, abs=1e-3)


def test_a_comparison_by_hand():
    first, second = np.array([1.0, 1.0, 0.0, 0.5, NAN, 1.0]), np.array([0.0, 1.0, 1.0, 0.25, 1.0, 0.0])
    found = compare(first, second)
    assert (found.wins, found.ties, found.losses) == (3, 1, 1)
    assert found.difference.mean == pytest.approx((1 - 1 + 0.25 + 1) / 5)
    # differences 1, -1, 0.25, 1 (the 0 has no sign): |sum| >= 1.25 under 16 signs
    sums = [abs(sum(signs)) for signs in itertools.product((1, -1), (1, -1), (0.25, -0.25), (1, -1))]
    assert found.p_value == sum(total >= 1.25 for total in sums) / 16
    turned = compare(second, first)
    assert turned.difference.mean == -found.difference.mean
    assert (turned.wins, turned.losses, turned.p_value) == (1, 3, found.p_value)


@each(
    ("count", "first", "second", "low", "p_value", "shown"),
    [
        (3, 1.0, 0.0, None, 0.25, False),
        (3, np.array([0.1, 0.2, 0.3]), 0.0, 0.1, 0.25, False),  # although the bootstrap excludes 0
        (8, 1.0, 0.0, None, 2 / 256, True),
        (1, 1.0, 0.0, 1 - 2 * 3.841459 / (1 + 3.841459), 1.0, False),
        (1, NAN, 1.0, NAN, 1.0, False),
        (50, 1.0, 1.0, -3.841459 / (50 + 3.841459), 1.0, False),
        (12, 0.5, 0.5, NAN, 1.0, False),
        (12, 0.75, 0.5, NAN, 2 / 4096, True),  # without an interval the test alone decides
    ],
)
def test_which_differences_are_shown(count, first, second, low, p_value, shown):
    found = compare(np.broadcast_to(first, count), np.broadcast_to(second, count))
    assert found.difference.mean == pytest.approx(np.mean(first - np.array(second)), nan_ok=True)
    assert low is None or found.difference.low == pytest.approx(low, nan_ok=True)
    assert (found.p_value, found.shown(0.95)) == (p_value, shown)
    lengths = compare(np.ones(12), np.ones(12), proportion=False)
    assert not lengths.difference.has_interval


@pytest.mark.parametrize(("gained", "lost", "count"), [(7, 2, 30), (1, 0, 20), (0, 5, 12), (3, 3, 9)])
def test_the_interval_of_paired_shares_inverts_the_score_test(gained, lost, count):
    """At each end the score statistic, with the likeliest share of losses found by search, is the normal quantile."""
    for end, z in zip(paired_shares(gained, lost, count), (1.959964, -1.959964), strict=True):
        shares = np.linspace(max(0, -end), (1 - end) / 2, 2_000_001)[1:-1]  # of losses; gains have `end` more
        ties = 1 - 2 * shares - end
        logs = gained * np.log(shares + end) + lost * np.log(shares) + (count - gained - lost) * np.log(ties)
        likeliest = shares[logs.argmax()]
        statistic = (gained - lost - count * end) / math.sqrt(count * (2 * likeliest + end - end**2))
        assert statistic == pytest.approx(z, abs=1e-3)  # the grid's step is 5e-7, near 0 under a root
    low, high = paired_shares(lost, gained, count)
    assert (-high, -low) == pytest.approx(paired_shares(gained, lost, count))


@pytest.mark.parametrize(("count", "more"), [(20, 0.03), (50, 0.03), (20, 0.3)])
def test_intervals_of_rare_differences_cover_the_truth(count, more):
    """Exactly: the chance of each number of gains, where nothing is lost. The bootstrap has 0.44 for the first."""
    covered = 0.0
    for gained in range(count + 1):
        low, high = paired_shares(gained, 0, count)
        covered += math.comb(count, gained) * more**gained * (1 - more) ** (count - gained) * (low <= more <= high)
    assert covered > 0.93  # a score interval's coverage goes around 0.95, from one number of gains to the next


def test_sampled_signs_agree_with_all_signs(monkeypatch):
    differences = np.array([0.3, 0.5, -0.2, 0.4, 0.1, 0.6, -0.1, 0.2, 0.35, -0.3])
    exact = sign_flip_p(differences)
    monkeypatch.setattr("cohort.statistics.MOST_SIGNS", 0)
    drawn = sign_flip_p(differences, resamples=20_000)
    # standard error at most 0.5 / sqrt(20000) = 0.0035; four of them
    assert drawn == pytest.approx(exact, abs=0.015)
    assert sign_flip_p(np.ones(30), resamples=99) == 0.01  # no sample has equal signs; the data itself counts as one


def test_equal_models_are_rarely_called_different():
    rng, shown = np.random.default_rng(6), 0
    for trial in range(400):
        rates = rng.beta(0.8, 1.2, size=40)
        first, second = ((rng.random((40, 2)) < rates[:, None]).mean(axis=1) for _ in range(2))
        shown += compare(first, second, resamples=400, seed=trial).shown(0.95)
    assert shown / 400 < 0.05 + 3 * 0.011  # three standard errors of a share of 400 above 5%


@each(
    ("degrees", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (29, 2.0452), (200, 1.9719), (201, 1.9718)],
)
def test_quantiles_of_student_t(degrees, expected):
    """Against the printed tables."""
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=5e-5)
    assert t_probability(t_quantile(0.975, degrees), degrees) == pytest.approx(0.975, abs=1e-6)
    assert t_probability(-1.0, degrees) == pytest.approx(1 - t_probability(1.0, degrees))


def test_intervals_of_student_t():
    """Student's own sleep data of 1908 (t = 4.0621 paired, 1.8608 by Welch, both in the documentation of R's t.test)."""
    first = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
    second = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    estimate, p_value = paired_t(first - second)
    assert [estimate.mean, estimate.low, estimate.high, p_value] == pytest.approx(
        [-1.58, -2.4598858, -0.7001142, 0.002832890], rel=1e-6
    )
    estimate, p_value = welch_t(first, second)  # 17.776 degrees of freedom, here 17
    assert [estimate.mean, p_value] == pytest.approx([-1.58, 0.0802], abs=1e-3)
    assert paired_t(np.array([1.0, 1.0]))[0].has_interval is paired_t(np.array([1.0]))[0].has_interval is False
    assert welch_t(np.array([1.0, 1.0]), np.array([2.0, 2.0]))[0].has_interval is False
