"""Statistics of evaluations: pure, seeded functions of arrays.

Axis letters here: P prompts, G completions of a prompt, M metrics, I resamples or subsets, K votes, A answers. NaN is a
missing value: it is left out, never read as 0. Prompts are independent and the completions of one prompt are not, so a
metric is first one number per prompt, and intervals are over prompts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_SUBSETS = 2_000
"""Majority votes are over all subsets of a prompt's completions if there are at most this many, else over this many
random ones."""
MOST_SIGNS = 12
"""The permutation test enumerates all signs of at most this many differences: 2**12 of them."""
CHUNK = 2_000_000
"""Entries of the matrix of resamples in memory at a time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its confidence interval; NaN bounds mean that there is no interval."""

    mean: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    def __str__(self) -> str:
        return f"{self.mean:.3f} " + (f"[{self.low:.3f}, {self.high:.3f}]" if self.has_interval else "[no interval]")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same prompts: the first minus the second."""

    difference: Estimate
    wins: int
    """Prompts on which the first model has the higher value."""
    ties: int
    losses: int
    p_value: float
    """Two-sided p-value of the hypothesis that the models are exchangeable."""

    def shown(self, confidence: float) -> bool:
        """Whether a difference is shown: the interval excludes 0 and the permutation test agrees.

        The test is needed because the bootstrap is overconfident with few prompts: if three prompts gained 0.1, 0.2 and
        0.3, its interval is above 0 while the test's p is 1/4. Without an interval the test alone decides.
        """
        outside = self.difference.low > 0 or self.difference.high < 0 or not self.difference.has_interval
        return outside and self.p_value <= 1 - confidence


def pass_at_k(correct_PG: Floats, k: int) -> Floats:
    """Unbiased estimate of the chance that at least one of k completions is correct: ``1 - C(n - c, k) / C(n, k)`` with
    n scored completions, c of them correct. Computed as a product of k fractions, which neither overflows nor cancels.

    Args:
        correct_PG: 1, 0, or NaN for an unscored completion.
        k: number of completions.

    Returns:
        One number per prompt, NaN for prompts with fewer than k scored completions.

    Source: Chen et al., "Evaluating large language models trained on code" (arXiv 2107.03374).

    >>> pass_at_k(np.array([[1.0, 0.0, 0.0, 0.0]]), 2)
    array([0.5])
    """
    n_P = (~np.isnan(correct_PG)).sum(axis=1)
    wrong_P = n_P - np.nansum(correct_PG, axis=1)
    none_P = np.ones(len(correct_PG))
    for drawn in range(k):
        none_P *= np.maximum(wrong_P - drawn, 0) / np.maximum(n_P - drawn, 1)
    return np.where(n_P >= k, 1 - none_P, np.nan)


def majority_at_k(correct_PG: Floats, answers_PG: Sequence[Sequence[Any]], k: int, *, seed: int = 0) -> Floats:
    """The chance that the most frequent answer of k completions is correct.

    The mean is over the subsets of k of a prompt's scored completions: all of them, or ``MOST_SUBSETS`` random ones if
    there are more. In a subset each completion votes for its answer; a completion whose answer is None does not vote.
    Tied answers share the win, and a subset without votes is wrong. The correctness of an answer is the mean over the
    prompt's completions that gave it, which are all equally correct unless the reward depends on more than the answer.

    Args:
        correct_PG: as for ``pass_at_k``.
        answers_PG: answer of each completion, compared as text.
        k: number of votes.
        seed: seed of random subsets.

    Returns:
        One number per prompt, NaN for prompts with fewer than k scored completions.

    >>> majority_at_k(np.array([[1.0, 0.0, 0.0, 1.0]]), [["7", "8", "9", "7"]], 4)
    array([1.])
    """
    values_P = np.full(len(correct_PG), np.nan)
    for prompt, (correct_G, answers_G) in enumerate(zip(correct_PG, answers_PG, strict=True)):
        scored = np.flatnonzero(~np.isnan(correct_G))
        if len(scored) >= k:
            given = [None if answers_G[index] is None else str(answers_G[index]) for index in scored.tolist()]
            values_P[prompt] = _majority(correct_G[scored], given, _subsets(len(scored), k, seed))
    return values_P


def _majority(correct_N: Floats, answers_N: Sequence[str | None], subsets_IK: NDArray[np.int64]) -> float:
    voted = list(dict.fromkeys(answer for answer in answers_N if answer is not None))
    if not voted:
        return 0.0
    votes_NA = np.array([[answer == one for one in voted] for answer in answers_N])
    correct_A = correct_N @ votes_NA / votes_NA.sum(axis=0)
    counts_IA = votes_NA[subsets_IK].sum(axis=1)
    top_I1 = counts_IA.max(axis=1, keepdims=True)
    first_IA = (counts_IA == top_I1) & (top_I1 > 0)
    shares_I = (first_IA @ correct_A) / np.maximum(first_IA.sum(axis=1), 1)
    return float(shares_I.mean())


@lru_cache(maxsize=64)
def _subsets(n: int, k: int, seed: int) -> NDArray[np.int64]:
    """Subsets of k of n, shape ``[I, K]``."""
    if math.comb(n, k) <= MOST_SUBSETS:
        return np.array(list(itertools.combinations(range(n), k)), dtype=np.int64)
    drawn = np.random.default_rng([seed, n, k]).random((MOST_SUBSETS, n))
    return np.argpartition(drawn, k - 1, axis=1)[:, :k].astype(np.int64)


def estimates(
    values: Mapping[str, Floats],
    confidence: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
    not_proportions: Collection[str] = (),
) -> dict[str, Estimate]:
    """Means over prompts with confidence intervals.

    The interval is that of the percentile bootstrap over prompts, with the same draws for all metrics. A metric whose
    values are all 0 or 1 is a proportion and gets Wilson's score interval instead: the bootstrap of a proportion adds
    nothing to its binomial variance, and collapses when all values are equal, as if 20 wrong answers proved that no
    answer is ever right. No interval is computed for a single prompt, or for identical values other than 0 and 1. NaN
    is left out; if nothing remains, all three numbers are NaN.

    Args:
        values: for each metric, one number per prompt; all metrics have the same prompts.
        confidence: confidence level of the intervals.
        resamples: number of bootstrap resamples.
        seed: seed of the bootstrap.
        not_proportions: metrics that must not be treated as proportions even if every value is 0 or 1.

    Sources: B. Efron, "Bootstrap methods: another look at the jackknife" (1979); E. B. Wilson, "Probable inference, the
    law of succession, and statistical inference" (1927).

    >>> print(estimates({"accuracy": np.array([1.0] * 45 + [0.0] * 55)})["accuracy"])
    0.450 [0.356, 0.548]
    """
    found: dict[str, Estimate] = {}
    to_resample: dict[str, Floats] = {}
    for name, values_P in values.items():
        given = values_P[~np.isnan(values_P)]
        mean = float(given.mean()) if len(given) else math.nan
        found[name] = Estimate(mean, math.nan, math.nan)
        if len(given) and name not in not_proportions and _binary(given):
            found[name] = wilson(mean, len(given), confidence)
        elif not _all_equal(given):
            to_resample[name] = values_P
    if to_resample:
        bounds = bootstrap_bounds(np.stack(list(to_resample.values()), axis=1), confidence, resamples, seed)
        for name, low, high in zip(to_resample, *bounds, strict=True):
            found[name] = Estimate(found[name].mean, float(low), float(high))
    return found


def _binary(values: Floats) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _all_equal(values: Floats) -> bool:
    """Up to rounding: a mean of the same rewards in another order may differ in its last bit."""
    return not len(values) or bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def wilson(mean: float, count: int, confidence: float = 0.95) -> Estimate:
    """Wilson's score interval of a proportion: inside [0, 1], and accurate near its ends.

    >>> print(wilson(0.0, 20))
    0.000 [0.000, 0.161]
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (mean + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = mean * (1 - mean) / count + z**2 / (4 * count**2)
    half = z * math.sqrt(spread) / (1 + z**2 / count)
    # At 0 and 1 a bound is exactly the mean, which rounding would miss.
    low = 0.0 if mean == 0 else max(0.0, centre - half)
    return Estimate(mean, low, 1.0 if mean == 1 else min(1.0, centre + half))


def bootstrap_bounds(values_PM: Floats, confidence: float, resamples: int, seed: int) -> Floats:
    """Lower and upper bounds of the percentile bootstrap's intervals of M means over prompts, shape ``[2, M]``."""
    tail = (1 - confidence) / 2
    return np.nanquantile(resampled_means(values_PM, resamples, seed), [tail, 1 - tail], axis=0)


def resampled_means(values_PM: Floats, resamples: int, seed: int) -> Floats:
    """Means of M metrics over prompts drawn with replacement, shape ``[I, M]``; NaN if a draw has no value."""
    count = len(values_PM)
    given_PM = ~np.isnan(values_PM)
    numbers_PM, weights_PM = np.where(given_PM, values_PM, 0.0), given_PM.astype(np.float64)
    rng, size = np.random.default_rng(seed), max(1, CHUNK // count)
    chunks = []
    for first in range(0, resamples, size):
        rows = min(size, resamples - first)
        drawn = rng.integers(count, size=(rows, count)) + np.arange(rows)[:, None] * count
        counts_IP = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count).astype(np.float64)
        with np.errstate(invalid="ignore"):  # 0 / 0 where no drawn prompt has a value
            chunks.append((counts_IP @ numbers_PM) / (counts_IP @ weights_PM))
    return np.concatenate(chunks)


def paired_shares(gained: int, lost: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Tango's score interval of the difference of two proportions on the same ``count`` prompts.

    It holds every difference D whose score statistic ``(gained - lost - count D) / sqrt(count (2 q + D (1 - D)))`` is
    within the normal quantile, where q is the maximum-likelihood share of losses under D. Without gains and losses it
    is as wide as Wilson's.

    Source: T. Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design" (Statistics in Medicine 17, 1998).

    >>> low, high = paired_shares(0, 0, 20)
    >>> round(low, 3), round(high, 3)
    (-0.161, 0.161)
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)

    def low(gained: int, lost: int) -> float:
        def inside(difference: float) -> bool:
            b = (2 * count - gained + lost) * difference - gained - lost
            root = math.sqrt(max(0.0, b * b + 8 * count * lost * difference * (1 - difference)))
            variance = count * ((root - b) / (2 * count) + difference * (1 - difference))
            return gained - lost - count * difference <= z * math.sqrt(max(0.0, variance))

        outside, within = -1.0, (gained - lost) / count
        for _ in range(60):  # bisection down to rounding
            middle = (outside + within) / 2
            outside, within = (outside, middle) if inside(middle) else (middle, within)
        return within

    return low(gained, lost), -low(lost, gained)


def compare(
    first_P: Floats,
    second_P: Floats,
    confidence: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
    *,
    proportion: bool = True,
) -> Comparison:
    """Compare two models' values prompt by prompt, so that the variation between prompts cancels.

    The interval of the mean difference is that of the percentile bootstrap over prompts or, for proportions (all values
    0 or 1), Tango's score interval, because a few differences carry too little information for the bootstrap. No
    interval is computed for a single prompt, or for identical differences of values that are not proportions. Prompts
    on which either model has no value are left out; if none remains, the numbers are NaN.

    Args:
        first_P: values of the first model.
        second_P: values of the second model.
        confidence: confidence level of the interval.
        resamples: resamples of the bootstrap and of the permutation test.
        seed: seed of both.
        proportion: whether values that are all 0 or 1 are proportions; False for lengths.

    >>> compare(np.array([1.0, 0.5, 0.25, 1.0]), np.array([0.5, 0.5, 0.5, 0.0])).wins
    2
    """
    both_P = ~(np.isnan(first_P) | np.isnan(second_P))
    differences_P = (first_P - second_P)[both_P]
    wins, losses = int((differences_P > 0).sum()), int((differences_P < 0).sum())
    low = high = math.nan
    if len(differences_P) and proportion and _binary(first_P[both_P]) and _binary(second_P[both_P]):
        low, high = paired_shares(wins, losses, len(differences_P), confidence)
    elif not _all_equal(differences_P):
        low, high = bootstrap_bounds(differences_P[:, None], confidence, resamples, seed)[:, 0].tolist()
    mean = float(differences_P.mean()) if len(differences_P) else math.nan
    p_value = sign_flip_p(differences_P, resamples=resamples, seed=seed)
    return Comparison(Estimate(mean, low, high), wins, int((differences_P == 0).sum()), losses, p_value)


def sign_flip_p(differences_P: Floats, *, resamples: int = 2_000, seed: int = 0) -> float:
    """Permutation test: how often the sum of differences is at least as far from 0 when each sign is random.

    Exact for at most ``MOST_SIGNS`` nonzero differences; for more, ``(1 + hits) / (1 + resamples)`` over random signs.
    1 without nonzero differences.

    Source: R. A. Fisher, "The design of experiments" (1935), section 21.

    >>> sign_flip_p(np.array([1.0, 1.0, 1.0, 0.0]))
    0.25
    """
    differences = differences_P[differences_P != 0]
    if not len(differences):
        return 1.0
    # The tolerance keeps rounding from making an equal sum the smaller one.
    observed = abs(differences.sum()) - 1e-12 * np.abs(differences).sum()
    if len(differences) <= MOST_SIGNS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(differences))))
        return float((np.abs(signs @ differences) >= observed).mean())
    rng, size, hits = np.random.default_rng(seed), max(1, CHUNK // len(differences)), 0
    for first in range(0, resamples, size):
        signs = rng.integers(2, size=(min(size, resamples - first), len(differences))) * 2.0 - 1.0
        hits += int((np.abs(signs @ differences) >= observed).sum())
    return (1 + hits) / (1 + resamples)


def paired_t(differences_R: Floats, confidence: float = 0.95) -> tuple[Estimate, float]:
    """The mean of R independent differences with the interval of Student's t, and the two-sided p-value of the
    hypothesis that their mean is 0. Both are NaN for fewer than two differences, or equal ones.

    >>> estimate, p_value = paired_t(np.array([1.0, 2.0, 3.0]))
    >>> print(estimate, f"{p_value:.3f}")
    2.000 [-0.484, 4.484] 0.074
    """
    count = len(differences_R)
    mean = float(differences_R.mean()) if count else math.nan
    if count < 2 or _all_equal(differences_R):
        return Estimate(mean, math.nan, math.nan), math.nan
    return _with_t(mean, float(differences_R.std(ddof=1)) / math.sqrt(count), count - 1, confidence)


def welch_t(first_R: Floats, second_R: Floats, confidence: float = 0.95) -> tuple[Estimate, float]:
    """The difference of two means, first minus second, of independent values that need not vary equally, with the
    interval of Student's t, and its two-sided p-value. The degrees of freedom are rounded down. NaN as in ``paired_t``.

    Source: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
    involved" (1947).
    """
    variances = [float(one.var(ddof=1)) / len(one) if len(one) > 1 else math.nan for one in (first_R, second_R)]
    mean = float(first_R.mean() - second_R.mean())
    if not sum(variances) > 0:
        return Estimate(mean, math.nan, math.nan), math.nan
    parts = [variance**2 / (len(one) - 1) for variance, one in zip(variances, (first_R, second_R), strict=True)]
    return _with_t(mean, math.sqrt(sum(variances)), int(sum(variances) ** 2 / sum(parts)), confidence)


def _with_t(mean: float, error: float, degrees: int, confidence: float) -> tuple[Estimate, float]:
    half = t_quantile((1 + confidence) / 2, degrees) * error
    return Estimate(mean, mean - half, mean + half), 2 * t_probability(-abs(mean) / error, degrees)


@cache
def t_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t for a whole number of degrees of freedom; accurate to 1e-6 above 200.

    >>> round(t_quantile(0.975, 1), 3), round(t_quantile(0.975, 4), 3), round(t_quantile(0.975, 1000), 3)
    (12.706, 2.776, 1.962)
    """
    if degrees > 200:
        z = NormalDist().inv_cdf(p)  # t is an expansion around it in 1 / degrees
        return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    low, high = -1e6, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def t_probability(t: float, degrees: int) -> float:
    """``P(T <= t)`` of Student's t for a whole number of degrees of freedom, as a finite sum.

    Source: M. Abramowitz and I. Stegun, "Handbook of mathematical functions" (1964), 26.7.3 and 26.7.4.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return 0.5 + within / 2
