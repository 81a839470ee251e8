"""Weights that follow a target: pure functions from a weight and a measurement to the next weight."""

from __future__ import annotations

import math

from cohort.presets.parts import KL, EntropyBonus


def next_beta(kl: KL, beta: float, measured: float, completions: int) -> float:
    """The KL weight after a step.

        beta <- beta * (1 + clip(measured / target - 1, -0.2, 0.2) * completions / horizon)

    Args:
        kl: its target and horizon; without a target beta stays.
        beta: the weight of the step.
        measured: the step's mean KL per token (k3), in nats.
        completions: completions of the step.

    Source: Ziegler et al. (arXiv 1909.08593) section 2.2.

    >>> round(next_beta(KL(beta=0.1, target=0.01, horizon=1000), 0.1, measured=0.05, completions=100), 12)
    0.102
    """
    if kl.target is None:
        return beta
    error = min(max(measured / kl.target - 1, -0.2), 0.2)
    return beta * (1 + error * min(1.0, completions / kl.horizon))


def next_entropy_coefficient(bonus: EntropyBonus, coefficient: float, measured: float) -> float:
    """The entropy bonus's weight after an update: larger by ``step`` if the entropy is at most the target, else smaller
    by ``step``. A rise ends at ``maximum``, a fall at ``minimum``.

    Source: Skywork-OR1 (arXiv 2505.22312).

    >>> next_entropy_coefficient(EntropyBonus(target=0.2, step=0.005), 0.0, measured=0.1)
    0.005
    """
    if bonus.target is None:
        return coefficient
    if measured <= bonus.target:
        return min(coefficient + bonus.step, math.inf if bonus.maximum is None else bonus.maximum)
    return max(coefficient - bonus.step, bonus.minimum)


def applied_entropy_coefficient(bonus: EntropyBonus | None, coefficient: float, measured: float | None) -> float:
    """The bonus's weight in the next update. With a target it is 0 unless the previous update's entropy was at most the
    target, and so 0 in the first update."""
    if bonus is None or (bonus.target is not None and (measured is None or measured > bonus.target)):
        return 0.0
    return coefficient
