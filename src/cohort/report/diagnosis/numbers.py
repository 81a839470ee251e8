"""Numbers of untrusted metrics, and what the checks compute from a few of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

CONFIDENCE = 2.576
"""Standard errors of a two-sided interval of 99%: with a looser one, some run of thousands would look ill by chance."""

LARGEST = 1e100
"""Numbers beyond are no measurement, and their squares would overflow."""


def number(metrics: Mapping[str, Any], key: str) -> float | None:
    """A number within ``LARGEST``; None for whatever else a line of ``metrics.jsonl`` has under the key."""
    value = metrics.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= LARGEST else None


def mean(values: Sequence[float]) -> float | None:
    """The mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def share_interval(count: float, total: float) -> tuple[float, float]:
    """Wilson's score interval of a share of ``count`` in ``total``, (0, 1) of nothing. E. B. Wilson, 1927.

    >>> [round(end, 3) for end in share_interval(10, 10)]
    [0.601, 1.0]
    """
    if total <= 0:
        return 0.0, 1.0
    share, squared = min(1.0, max(0.0, count / total)), CONFIDENCE**2 / total
    centre = share + squared / 2
    spread = CONFIDENCE * math.sqrt(share * (1 - share) / total + squared / (4 * total))
    return max(0.0, (centre - spread) / (1 + squared)), min(1.0, (centre + spread) / (1 + squared))


def differs(before: Sequence[float], after: Sequence[float]) -> float:
    """The difference of two means in standard errors (Welch). 0 with fewer than two numbers on a side; infinite if
    neither side varies.

    >>> differs([1, 2, 3], [1, 2, 3]), differs([0, 0], [1, 1])
    (0.0, inf)
    """
    if len(before) < 2 or len(after) < 2:
        return 0.0
    difference = math.fsum(after) / len(after) - math.fsum(before) / len(before)
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def variance(values: Sequence[float]) -> float:
    """Divided by n - 1."""
    centre = math.fsum(values) / len(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)
