"""Smooth curves: local linear fits with their confidence bands."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cohort.statistics import t_quantile

Floats = NDArray[np.float64]
MAX_WINDOW = 2001
"""Points of a local fit."""


def loess(values_T: Floats, window: int) -> tuple[Floats, Floats]:
    """A smooth curve without lag: at each point, the weighted least-squares line through the points around it.

    The weight of a point at distance d is ``(1 - (d / D)^3)^3``, with D one more than the distance of the window's
    farther end. In the middle the window is centred (an even one is raised by one point), and the line's value is the
    weighted mean. Within half a window of an end it is the first or last ``window`` points, so a trend goes on to the
    ends.

    Args:
        values_T: T values at even distances.
        window: points of a fit, at least 3. With fewer values, all.

    Returns:
        The fit, and half the width of its 95% confidence band: ``t_{window - 2} * sigma * |l|``, where l are the
        weights with which values enter the fit at the point, and sigma^2 is the mean over the window of the squared
        residuals, each divided by its expectation per sigma^2, ``1 - 2 l_own + |l|^2``. It takes the deviations from
        the curve as independent.

    Source: W. S. Cleveland, "Robust locally weighted regression and smoothing scatterplots" (1979).
    """
    count = len(values_T)
    window = min(window | 1, count if count % 2 else count - 1)
    if window < 3:
        return values_T.copy(), np.zeros(count)
    half = window // 2
    weights_HW, norm_H = _fit_weights(window)
    left_H, right_H = weights_HW[:half] @ values_T[:window], weights_HW[:half] @ values_T[::-1][:window]
    middle = np.convolve(values_T, weights_HW[half], "valid")
    fit_T = np.concatenate([left_H, middle, right_H[::-1]])
    from_end_T = np.minimum(np.minimum(np.arange(count), np.arange(count)[::-1]), half)
    own_T, norm_T = weights_HW.diagonal()[from_end_T], norm_H[from_end_T]
    squares_T = (values_T - fit_T) ** 2 / (1 - 2 * own_T + norm_T)
    means_M = np.convolve(squares_T, np.ones(window) / window, "valid")
    variance_T = means_M[np.clip(np.arange(count) - half, 0, count - window)]
    return fit_T, t_quantile(0.975, window - 2) * np.sqrt(variance_T * norm_T)


@lru_cache(maxsize=4)
def _fit_weights(window: int) -> tuple[Floats, Floats]:
    """The weights with which the values of a window enter the line's value at its points from the first to the middle,
    a row each, and the sums of their squares."""
    at_H1 = np.arange(window // 2 + 1)[:, None]
    offset_HW = np.arange(window) - at_H1
    weight_HW = (1 - (np.abs(offset_HW) / (window - at_H1)) ** 3) ** 3
    s0, s1, s2 = ((weight_HW * offset_HW**power).sum(axis=1, keepdims=True) for power in (0, 1, 2))
    weights_HW = weight_HW * (s2 - s1 * offset_HW) / (s0 * s2 - s1**2)
    return weights_HW, (weights_HW**2).sum(axis=1)


def window_for(points: int) -> int:
    """A window that suits a curve of so many points: a tenth, at most ``MAX_WINDOW``, and none below 30.

    >>> window_for(29), window_for(100), window_for(1000), window_for(100_000)
    (1, 11, 101, 2001)
    """
    return min(points // 10, MAX_WINDOW) | 1 if points >= 30 else 1
