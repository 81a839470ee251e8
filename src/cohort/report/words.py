"""Numbers, times and phases in words. Imports nothing of Cohort."""

from __future__ import annotations

import math

PHASES = {
    "generate": "sampling",
    "rollout_wait": "waiting for the rollout",
    "reward": "rewards",
    "logps": "log-probs",
    "update": "update",
    "measure": "measuring",
}
"""Phases of a step by their names in ``seconds/...``."""


def number(value: float | None, form: str = ".3f") -> str:
    """A number, or "none" for None and NaN."""
    return "none" if value is None or math.isnan(value) else format(value, form)


def share(value: float | None) -> str:
    """A share as a percentage, or "none"."""
    return number(value, ".0%")


def duration(seconds: float) -> str:
    """A time in the two largest units that it has, or in seconds with two digits.

    >>> duration(0.34), duration(7.4), duration(87), duration(3 * 3600 + 120), duration(200_000)
    ('0.34 s', '7.4 s', '1:27 min', '3:02 h', '2 d 7 h')
    """
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 86_400:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
