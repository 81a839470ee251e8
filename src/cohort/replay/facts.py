"""What the file of a stored step says about the whole step, checked: anybody can have written it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for the whole step (``docs/store.md``). None: the file does not say it."""

    known: bool
    """Whether the file says anything; those of earlier versions do not."""
    groups: int
    """Groups that were sampled; 0: unknown."""
    minibatches: int | None
    max_completion_length: int | None
    microbatch_tokens: int
    """0: unknown."""
    shared_prompts: bool
    beta: float | None
    """Weight of the KL in this step."""
    learning_rates: list[float | None] | None
    """Of each update; None in the place of one that was skipped."""
    reward_weights: dict[str, float]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Facts:
        """Check the facts of a file.

        Raises:
            ValueError: one has another type than documented, or is out of bounds.
        """
        shared, updates = facts.get("shared_prompts", True), facts.get("updates")
        if type(shared) is not bool:
            raise ValueError(f"shared_prompts is {shared!r:.80}; expected true or false")
        if not isinstance(updates, list | None):
            raise ValueError(f"updates is {updates!r:.80}; expected a list")
        beta = _object(_object(facts, "objective"), "kl").get("beta")
        weights = _object(facts, "reward_weights")
        return cls(
            known=bool(facts),
            groups=_whole(facts, "groups", least=0) or 0,
            minibatches=_whole(facts, "minibatches"),
            max_completion_length=_whole(facts, "max_completion_length"),
            microbatch_tokens=_whole(facts, "microbatch_tokens") or 0,
            shared_prompts=shared,
            beta=None if beta is None else _finite("beta", beta, least=0.0),
            learning_rates=None if updates is None else [_learning_rate(one) for one in updates],
            reward_weights={name: _finite(f"the weight of {name}", value) for name, value in weights.items()},
        )


def _object(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = facts.get(name)
    if not isinstance(value, dict | None):
        raise ValueError(f"{name} is {value!r:.80}; expected an object")
    return value or {}


def _whole(facts: Mapping[str, Any], name: str, least: int = 1) -> int | None:
    value = facts.get(name)
    if value is not None and not (type(value) is int and least <= value <= MOST):
        raise ValueError(f"{name} is {value!r:.80}; expected a whole number from {least} to {MOST}")
    return value


def _finite(name: str, value: Any, least: float = -math.inf) -> float:
    if type(value) not in (int, float) or not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} is {value!r:.80}; expected a finite number{' from 0' if least == 0 else ''}")
    return float(value)


def _learning_rate(update: Any) -> float | None:
    if not isinstance(update, dict) or type(update.get("skipped")) is not bool:
        raise ValueError(
            f"an update is {update!r:.80}; expected an object with learning_rate, and skipped as a boolean"
        )
    return None if update["skipped"] else _finite("learning_rate", update.get("learning_rate"), least=0.0)
