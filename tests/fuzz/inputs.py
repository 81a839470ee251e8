"""Random inputs: generators with the names of Hypothesis's strategies, several times as fast, because nothing is recorded
for shrinking. The number of an input determines it."""

import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

CHARACTERS = "abz09 .,:;'\"[]{}()=-_/\\\n\t\0é日\U0001f600\ud800"


class SearchStrategy:
    """Draws a value with a random generator."""

    def __init__(self, draw: Callable[[Random], Any]) -> None:
        self.draw = draw
        self.choices: list[SearchStrategy] = [self]

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def map(self, function: Callable[[Any], Any]) -> "SearchStrategy":
        return SearchStrategy(lambda rng: function(self.draw(rng)))

    def __or__(self, other: "SearchStrategy") -> "SearchStrategy":
        return one_of(*self.choices, *other.choices)


def one_of(*choices: SearchStrategy) -> SearchStrategy:
    both = SearchStrategy(lambda rng: rng.choice(choices).draw(rng))
    both.choices = list(choices)
    return both


def just(value: Any) -> SearchStrategy:
    return SearchStrategy(lambda rng: value)


def sampled_from(values: Sequence[Any]) -> SearchStrategy:
    return SearchStrategy(lambda rng: rng.choice(values))


def tuples(*parts: SearchStrategy) -> SearchStrategy:
    return SearchStrategy(lambda rng: tuple(part.draw(rng) for part in parts))


def integers(low: int = -(2**70), high: int = 2**70) -> SearchStrategy:
    return SearchStrategy(lambda rng: rng.randint(low, high))


def floats(low: float = -sys.float_info.max, high: float = sys.float_info.max) -> SearchStrategy:
    return SearchStrategy(lambda rng: low / 2 + rng.random() * (high / 2 - low / 2) * 2 + low / 2)


def text(max_size: int) -> SearchStrategy:
    return SearchStrategy(lambda rng: "".join(rng.choices(CHARACTERS, k=rng.randint(0, max_size))))


def lists(part: SearchStrategy, min_size: int = 0, max_size: int = 3) -> SearchStrategy:
    return SearchStrategy(lambda rng: [part.draw(rng) for _ in range(rng.randint(min_size, max_size))])


def dictionaries(key: SearchStrategy, value: SearchStrategy, max_size: int = 3) -> SearchStrategy:
    return lists(tuples(key, value), 0, max_size).map(dict)


def recursive(
    leaf: SearchStrategy, extend: Callable[[SearchStrategy], SearchStrategy], depth: int = 2
) -> SearchStrategy:
    return leaf if depth == 0 else leaf | leaf | extend(recursive(leaf, extend, depth - 1))


def deferred(make: Callable[[], SearchStrategy]) -> SearchStrategy:
    made: list[SearchStrategy] = []

    def draw(rng: Random) -> Any:
        if not made:
            made.append(make())
        return made[0].draw(rng)

    return SearchStrategy(draw)
