"""Checks that every part makes of its numbers."""

from __future__ import annotations

from cohort.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_bounds(rule: str, low: float, high: float) -> None:
    """Bounds on a ratio: in order, and not negative."""
    require(low < high, f"{rule}: low ({low:g}) must be below high ({high:g}); both are bounds on the ratio itself")
    require(low >= 0, f"{rule}: low ({low:g}) is a bound on a ratio and cannot be negative; 0 is no bound")
