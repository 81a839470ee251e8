"""The order of prompts: one endless stream, a pure function of the seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from cohort.data.prompts import PromptSet
from cohort.types import Prompt


@dataclass(slots=True)
class Place:
    """How many prompts of the stream the whole steps of a run have taken. Part of a checkpoint."""

    taken: int = 0


class PromptStream:
    """Pass after pass over a data set, each in a new order (or each in the file's).

    What stands at a place of the stream depends on the place and the seed alone, so a run's position in its data is one
    number. Every row occurs once in each pass; a step may span the end of one pass and the start of the next.

    Args:
        prompts: the data set.
        seed: decides the orders.
        shuffle: a new order for each pass, or the file's order always.
    """

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool = True) -> None:
        self._prompts = prompts
        self._order = lru_cache(maxsize=2)(lambda epoch: pass_order(len(prompts), seed, epoch, shuffle=shuffle))

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, start: int, count: int) -> list[Prompt]:
        """The prompts at places ``start .. start + count - 1``. Their uids are their places, so no two groups of a run
        share one."""
        return [self._prompts.prompt(self._row(place), uid=place) for place in range(start, start + count)]

    def _row(self, place: int) -> int:
        epoch, index = divmod(place, len(self._prompts))
        return int(self._order(epoch)[index])


def pass_order(num_rows: int, seed: int, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """The order of rows in one pass.

    >>> sorted(pass_order(5, seed=0, epoch=3).tolist())
    [0, 1, 2, 3, 4]
    """
    if not shuffle:
        return np.arange(num_rows)
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_rows)
