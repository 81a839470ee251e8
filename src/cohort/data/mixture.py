"""Which source of a weighted mixture each prompt comes from: a pure function of the position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


class Turns:
    """Sources taking turns so evenly that no source is ever a whole prompt away from its share.

    Of the first p prompts, a source with weight w of the total W has ``floor(p w / W)`` or ``ceil(p w / W)``. Of the
    sources that one more prompt keeps within ``ceil``, the turn goes to the smallest ``(count + 1) / w``; among equals,
    to the first listed. Source: M. L. Balinski and H. P. Young, "The quota method of apportionment" (1975).

    Args:
        weights: one or more positive numbers; a common factor changes nothing.

    >>> turns = Turns([Fraction(2), Fraction(1)])
    >>> [turns.at(position) for position in range(6)]
    [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]
    """

    def __init__(self, weights: Sequence[Fraction | int]) -> None:
        whole = [int(weight * math.lcm(*(weight.denominator for weight in weights))) for weight in weights]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        self._period = sum(self._weights)
        """After so many prompts every source has exactly its share, and all repeats."""
        self._turns: list[tuple[int, int]] = []
        self._counts = [0] * len(weights)

    def at(self, position: int) -> tuple[int, int]:
        """The source of the prompt at a position, and the number of earlier prompts from that source."""
        cycle, within = divmod(position, self._period)
        while len(self._turns) <= within:
            self._extend()
        source, count = self._turns[within]
        return source, count + cycle * self._weights[source]

    def epoch_length(self, sizes: Sequence[int]) -> int:
        """Prompts until every row of every source has been used: ``max_i ceil(n_i W / w_i)``."""
        return max(-(-size * self._period // weight) for size, weight in zip(sizes, self._weights, strict=True))

    def _extend(self) -> None:
        after = len(self._turns) + 1
        allowed = [i for i, count in enumerate(self._counts) if count * self._period < after * self._weights[i]]
        source = min(allowed, key=lambda i: (Fraction(self._counts[i] + 1, self._weights[i]), i))
        self._turns.append((source, self._counts[source]))
        self._counts[source] += 1
