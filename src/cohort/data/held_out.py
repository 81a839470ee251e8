"""Whether evaluation items of reasoning-gym are held out of training."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from cohort.data.load import Data
from cohort.data.procedural import INDEX, PREFIX, SETTINGS
from cohort.errors import DataError


def check_held_out(train: Data, sets: Mapping[str, Data]) -> None:
    """Check that no evaluation set has items of the training data.

    Raises:
        DataError: two sources are of the same data set with the same settings, and their ranges of ``seed + index``
            overlap.
    """
    for settings, numbers, where, _ in _ranges(train):
        for other, held_out, other_where, seed in (found for data in sets.values() for found in _ranges(data)):
            if other == settings and max(numbers.start, held_out.start) < min(numbers.stop, held_out.stop):
                raise DataError(
                    f"{where} and {other_where} have items of {PREFIX}{settings['name']} in common. An item is made "
                    f"from seed + index, here {numbers.start} to {numbers.stop - 1} and {held_out.start} to "
                    f"{held_out.stop - 1}: set offset={max(numbers.stop - seed, 0)} or more in data.eval"
                )


def _ranges(data: Data) -> Iterator[tuple[dict[str, Any], range, str, int]]:
    """Of each source made here: its settings without the seed and size, ``seed + index`` of its items, what errors call
    it, and its seed."""
    for source in data.sources:
        if {SETTINGS, INDEX}.issubset(source.rows.columns):
            first, last = source.rows[0], source.rows[-1]
            try:  # a file can have columns of these names too
                settings = dict(ast.literal_eval(first[SETTINGS]))
                seed, size = settings.pop("seed"), settings.pop("size")
                numbers = range(seed + first[INDEX], seed + (size if source.stream else last[INDEX] + 1))
            except (ValueError, TypeError, LookupError, SyntaxError, MemoryError, RecursionError):
                raise DataError(
                    f"{source.rows.where}: the columns {SETTINGS} and {INDEX} are those of rows that Cohort makes, and "
                    "hold something else: rename them with data.columns"
                ) from None
            yield settings, numbers, source.rows.where, seed
