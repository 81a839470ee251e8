"""Evaluation rows: one set, or several under names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cohort.config import DataConfig
from cohort.config.evaluation import check_set_name
from cohort.data.source import Row, check_rows, first_rows, load_rows
from cohort.errors import DataError


def evaluation_rows(given: Any, config: DataConfig) -> dict[str, Sequence[Row]]:
    """The rows of each evaluation set by its name; a set without one is called "". Empty: no evaluation.

    Args:
        given: in Python: rows, or a dict of them under names. None: what the settings name.
        config: the settings.

    Raises:
        DataError: rows cannot be read, or a name cannot be one.
    """
    if given is None:
        sources = config.eval if isinstance(config.eval, dict) else {"": config.eval} if config.eval else {}
        return {name: load_rows(at, split=config.eval_split, limit=config.eval_rows) for name, at in sources.items()}
    # A plain dict only: a data set's splits are a kind of dict too.
    named = given if type(given) is dict else {"": given}
    if not named:
        raise DataError("eval_dataset has no sets: give rows, rows under names, or None")
    for name in named if named is given else ():
        try:
            check_set_name(name)
        except ValueError as error:
            raise DataError(f"eval_dataset: {error}") from None
    return {name: first_rows(check_rows(rows, set_name(name)), config.eval_rows) for name, rows in named.items()}


def set_name(name: str) -> str:
    """What errors call a set."""
    return f"the evaluation data {name!r}" if name else "the evaluation data"
