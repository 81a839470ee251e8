"""Which source each prompt of a weighted mixture comes from: a pure function of its place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


class Turns:
    """Sources taking turns so evenly that none is ever a whole prompt away from its share.

    Of the first p prompts, a source with weight w of W has ``floor(p w / W)`` or ``ceil(p w / W)``. Among the sources
    that another prompt would not lift above that, the one whose next prompt is due first has the turn: the least
    ``(count + 1) / w``; of equal ones the first listed. Source: M. L. Balinski and H. P. Young, "The quota method of
    apportionment" (1975).

    Args:
        weights: one or more, positive. Equal up to a factor is the same.

    >>> turns = Turns([Fraction(2), Fraction(1)])
    >>> [turns.at(place) for place in range(6)]
    [(0, 0), (0, 1), (1, 0), (0, 2), (0, 3), (1, 1)]
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        denominator = math.lcm(*(weight.denominator for weight in weights))
        whole = [int(weight * denominator) for weight in weights]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        self._period = sum(self._weights)  # after so many places every source has exactly its share, and all repeats
        self._turns: list[tuple[int, int]] = []
        self._counts = [0] * len(weights)

    def at(self, place: int) -> tuple[int, int]:
        """The source at a place, and how many of the places before are that source's too."""
        cycle, within = divmod(place, self._period)
        while len(self._turns) <= within:
            self._extend()
        source, count = self._turns[within]
        return source, count + cycle * self._weights[source]

    def epoch_length(self, sizes: Sequence[int]) -> int:
        """Prompts until every row of every source has been used: ``max_i ceil(n_i W / w_i)``."""
        return max(-(-size * self._period // weight) for size, weight in zip(sizes, self._weights, strict=True))

    def _extend(self) -> None:
        place = len(self._turns) + 1
        allowed = [i for i, count in enumerate(self._counts) if count * self._period < place * self._weights[i]]
        source = min(allowed, key=lambda i: (Fraction(self._counts[i] + 1, self._weights[i]), i))
        self._turns.append((source, self._counts[source]))
        self._counts[source] += 1
