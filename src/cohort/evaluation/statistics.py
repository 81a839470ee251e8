"""What evaluations say of their numbers: pure, seeded functions of arrays.

Axis letters: P prompts, G completions of a prompt, M metrics, B resamples. NaN is a value that there is none of: it is
left out, never read as 0. Prompts are the independent units; the completions of one prompt are not, so a metric is
first one number per prompt, and intervals are over prompts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_SUBSETS = 2_000
"""Majority votes over all subsets of a prompt's completions where there are at most so many, else over so many drawn
ones."""
MOST_SIGNS = 12
"""A permutation test goes through all signs of at most so many differences, 2**12 of them."""
CHUNK = 2_000_000
"""Entries of the matrix of resamples that are held at a time."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its confidence interval; the ends are NaN where there is none."""

    mean: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        """Whether anything is known of how sure the mean is."""
        return not math.isnan(self.low)

    def __str__(self) -> str:
        return f"{self.mean:.3f} " + (f"[{self.low:.3f}, {self.high:.3f}]" if self.has_interval else "[no interval]")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same prompts, the first less the second."""

    difference: Estimate
    wins: int
    """Prompts on which the first has more."""
    ties: int
    losses: int
    p_value: float
    """Of the hypothesis that which model is which does not matter, two-sided."""

    def shown(self, confidence: float) -> bool:
        """Whether a difference is shown: the interval has not 0 in it, and the permutation test agrees.

        The test is asked too, as the bootstrap of few prompts is too sure: where three prompts gained 0.1, 0.2 and 0.3
        its interval is above 0, and the test's p is 1/4. Where there is no interval the test decides alone.
        """
        outside = self.difference.low > 0 or self.difference.high < 0 or not self.difference.has_interval
        return outside and self.p_value <= 1 - confidence


def pass_at_k(correct_PG: Floats, k: int) -> Floats:
    """The chance that at least one of k completions is correct, unbiased: ``1 - C(n - c, k) / C(n, k)`` with n scored
    completions, c of them correct. As a product of k fractions, which neither overflows nor cancels.

    Args:
        correct_PG: 1, 0, or NaN for a completion that was not scored.
        k: how many may try.

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

    Over the subsets of k of a prompt's scored completions: all of them, or ``MOST_SUBSETS`` drawn ones where there are
    more. In a subset each completion votes for its answer, and one whose answer is None does not vote. Where several
    answers have most votes each counts its share; where nobody votes the subset is wrong. An answer is as correct as
    the prompt's completions that gave it are, in their mean: one number, unless a reward also looks at something else.

    Args:
        correct_PG: as for ``pass_at_k``.
        answers_PG: each completion's answer; compared as text.
        k: voters.
        seed: of drawn subsets.

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


def _majority(correct_N: Floats, answers_N: Sequence[str | None], subsets_BK: NDArray[np.int64]) -> float:
    voted = dict.fromkeys(answer for answer in answers_N if answer is not None)
    if not voted:
        return 0.0
    names = {answer: number for number, answer in enumerate(voted)}
    nobody = len(names)  # the column of those that do not vote
    votes_N = np.array([nobody if answer is None else names[answer] for answer in answers_N])
    correct_A = np.array([correct_N[votes_N == answer].mean() for answer in range(len(names))])
    cells_BK = np.arange(len(subsets_BK))[:, None] * (nobody + 1) + votes_N[subsets_BK]
    counts_BA = np.bincount(cells_BK.ravel(), minlength=len(subsets_BK) * (nobody + 1)).reshape(-1, nobody + 1)
    counts_BA = counts_BA[:, :nobody]
    top_B1 = counts_BA.max(axis=1, keepdims=True)
    first_BA = (counts_BA == top_B1) & (top_B1 > 0)
    shares_B = (first_BA @ correct_A) / np.maximum(first_BA.sum(axis=1), 1)
    return float(shares_B.mean())


@lru_cache(maxsize=64)
def _subsets(n: int, k: int, seed: int) -> NDArray[np.int64]:
    """Subsets of k of n, shape ``[B, k]``."""
    if math.comb(n, k) <= MOST_SUBSETS:
        return np.array(list(itertools.combinations(range(n), k)), dtype=np.int64)
    drawn = np.random.default_rng([seed, n, k]).random((MOST_SUBSETS, n))
    return np.argpartition(drawn, k - 1, axis=1)[:, :k].astype(np.int64)


def estimates(
    values: Mapping[str, Floats],
    *,
    confidence: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
    no_shares: Collection[str] = (),
) -> dict[str, Estimate]:
    """Means over prompts with confidence intervals.

    The interval is the percentile bootstrap's: prompts are drawn with replacement ``resamples`` times, all metrics on
    the same draws, and the interval holds the middle of the means. Where every value is 0 or 1 the metric is taken for
    a share, and it is Wilson's score interval instead: there the bootstrap only knows a binomial spread, and none at
    all where all are equal, as if 20 prompts without a right answer proved that there is never one. Values that are all
    equal and no share, or a single one, have no interval: nothing is known of how they spread. NaN values are left out;
    with nothing left all three numbers are NaN.

    Args:
        values: of each metric, one number per prompt, the same prompts for all.
        confidence: of the intervals.
        resamples: how many.
        seed: of the draws.
        no_shares: metrics that are no shares even where every value is 0 or 1, as lengths.

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
        if len(given) and name not in no_shares and _binary(given):
            found[name] = wilson(mean, len(given), confidence)
        elif not _all_equal(given):
            to_resample[name] = values_P
    if to_resample:
        means_BM = resampled_means(np.stack(list(to_resample.values()), axis=1), resamples, seed)
        tail = (1 - confidence) / 2
        lows, highs = np.nanquantile(means_BM, [tail, 1 - tail], axis=0)
        for name, low, high in zip(to_resample, lows, highs, strict=True):
            found[name] = Estimate(found[name].mean, float(low), float(high))
    return found


def _binary(values: Floats) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _all_equal(values: Floats) -> bool:
    """But for rounding: a mean of the same rewards in another order may differ in its last bit."""
    return not len(values) or bool(np.ptp(values) <= 1e-12 * np.abs(values).max())


def wilson(mean: float, count: int, confidence: float = 0.95) -> Estimate:
    """Wilson's score interval of a share: inside [0, 1], and right near its ends.

    >>> print(wilson(0.0, 20))
    0.000 [0.000, 0.161]
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (mean + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = mean * (1 - mean) / count + z**2 / (4 * count**2)
    half = z * math.sqrt(spread) / (1 + z**2 / count)
    # At the ends a bound is the mean itself, which rounding would miss.
    low = 0.0 if mean == 0 else max(0.0, centre - half)
    return Estimate(mean, low, 1.0 if mean == 1 else min(1.0, centre + half))


def resampled_means(values_PM: Floats, resamples: int, seed: int) -> Floats:
    """Means of M metrics over prompts drawn with replacement, shape ``[B, M]``; NaN where a draw has no value."""
    count = len(values_PM)
    given_PM = ~np.isnan(values_PM)
    numbers_PM, weights_PM = np.where(given_PM, values_PM, 0.0), given_PM.astype(np.float64)
    rng, size = np.random.default_rng(seed), max(1, CHUNK // count)
    chunks = []
    for first in range(0, resamples, size):
        rows = min(size, resamples - first)
        drawn = rng.integers(count, size=(rows, count)) + np.arange(rows)[:, None] * count
        counts_BP = np.bincount(drawn.ravel(), minlength=rows * count).reshape(rows, count).astype(np.float64)
        with np.errstate(invalid="ignore"):  # 0 / 0 where no drawn prompt has a value
            chunks.append((counts_BP @ numbers_PM) / (counts_BP @ weights_PM))
    return np.concatenate(chunks)


def paired_shares(gained: int, lost: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Tango's score interval of the difference of two shares on the same ``count`` prompts.

    All differences D whose score statistic ``(gained - lost - count D) / sqrt(count (2 q + D (1 - D)))`` is within the
    normal quantile, with q the likeliest share of losses under D. Without gains and losses it goes as far as Wilson's.

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
        for _ in range(60):  # halves the distance, until it is rounding
            middle = (outside + within) / 2
            outside, within = (outside, middle) if inside(middle) else (middle, within)
        return within

    return low(gained, lost), -low(lost, gained)


def compare(
    first_P: Floats,
    second_P: Floats,
    *,
    confidence: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
    share: bool = True,
) -> Comparison:
    """Two models' values on the same prompts, prompt by prompt: what varies between prompts cancels.

    The interval of the mean difference is the percentile bootstrap's over prompts; where all values are 0 or 1, and so
    shares, Tango's score interval (``paired_shares``), as few differences tell the bootstrap too little. Differences
    that are all equal, or a single one, of values that are no shares have no interval. Prompts on which either has no
    value are left out; with none left the numbers are NaN.

    Args:
        first_P: of the one model.
        second_P: of the other.
        confidence: of the interval.
        resamples: of the bootstrap and of the test.
        seed: of both.
        share: values that are all 0 or 1 are shares; False for lengths.

    >>> compare(np.array([1.0, 0.5, 0.25, 1.0]), np.array([0.5, 0.5, 0.5, 0.0])).wins
    2
    """
    both_P = ~(np.isnan(first_P) | np.isnan(second_P))
    differences_P = (first_P - second_P)[both_P]
    wins, losses = int((differences_P > 0).sum()), int((differences_P < 0).sum())
    low = high = math.nan
    if len(differences_P) and share and _binary(first_P[both_P]) and _binary(second_P[both_P]):
        low, high = paired_shares(wins, losses, len(differences_P), confidence)
    elif not _all_equal(differences_P):
        tail = (1 - confidence) / 2
        means_B = resampled_means(differences_P[:, None], resamples, seed)[:, 0]
        low, high = (float(bound) for bound in np.quantile(means_B, [tail, 1 - tail]))
    mean = float(differences_P.mean()) if len(differences_P) else math.nan
    return Comparison(
        Estimate(mean, low, high),
        wins=wins,
        ties=int((differences_P == 0).sum()),
        losses=losses,
        p_value=sign_flip_p(differences_P, resamples=resamples, seed=seed),
    )


def sign_flip_p(differences_P: Floats, *, resamples: int = 2_000, seed: int = 0) -> float:
    """How often the sum of differences is at least as far from 0 when each difference's sign is a coin's.

    Exact for at most ``MOST_SIGNS`` differences that are not 0; for more, ``(1 + hits) / (1 + resamples)`` over drawn
    signs. 1 where all are 0 or there are none.

    Source: R. A. Fisher, "The design of experiments" (1935), section 21.

    >>> sign_flip_p(np.array([1.0, 1.0, 1.0, 0.0]))
    0.25
    """
    differences = differences_P[differences_P != 0]
    if not len(differences):
        return 1.0
    # What rounding takes from a sum of other signs must not make it the smaller one.
    observed = abs(differences.sum()) - 1e-12 * np.abs(differences).sum()
    if len(differences) <= MOST_SIGNS:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(differences))))
        return float((np.abs(signs @ differences) >= observed).mean())
    rng, size, hits = np.random.default_rng(seed), max(1, CHUNK // len(differences)), 0
    for first in range(0, resamples, size):
        signs = rng.integers(2, size=(min(size, resamples - first), len(differences))) * 2.0 - 1.0
        hits += int((np.abs(signs @ differences) >= observed).sum())
    return (1 + hits) / (1 + resamples)
