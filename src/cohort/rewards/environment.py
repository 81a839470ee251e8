"""The reward of the environment that a completion acted in."""

from __future__ import annotations

from typing import Any


def environment_reward(
    completion: Any,  # noqa: ARG001 - makes this a function per sample
    environment_reward: float | None,
) -> float | None:
    """The environment's reward: those of all turns, plus its reward at the end.

    None where the environment gives no rewards: it has neither ``step`` nor ``get_reward``. With ``objective.credit =
    "turns"``, the reward of a turn is no part of the returns of later turns.

    >>> environment_reward("I guess 7.", environment_reward=1.5)
    1.5
    """
    return environment_reward
