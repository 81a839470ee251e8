"""Evaluation data: one set, or several under names."""

from __future__ import annotations

from typing import Any

from cohort.config import DataConfig
from cohort.config.evaluation import check_set_name
from cohort.data.load import Data, load_data
from cohort.data.prompts import check_data
from cohort.errors import DataError


def load_sets(given: Any, config: DataConfig) -> dict[str, Data]:
    """The data of each evaluation set by its name; a set without one is called "". Empty: no evaluation.

    Args:
        given: in Python: what ``load_data`` takes, or a dict of such under names. None: what the settings name.
        config: the settings.

    Raises:
        DataError: a name cannot be one, or as ``load_data`` and ``check_data``.
    """
    # A plain dict only: a data set's splits are a kind of dict too.
    named = given if type(given) is dict else config.eval if given is None and isinstance(config.eval, dict) else None
    if named is None:
        found = {"": load_data(given, config, evaluation=True)}
    elif not named:
        raise DataError("eval_dataset has no sets: give rows, rows under names, or None")
    else:
        for name in named:
            try:
                check_set_name(name)
            except ValueError as error:
                raise DataError(f"eval_dataset: {error}") from None
        found = {
            name: load_data(rows, config, evaluation=True, name=f"the evaluation data {name!r}")
            for name, rows in named.items()
        }
    sets = {name: data for name, data in found.items() if data is not None}
    for data in sets.values():
        check_data(data)
    return sets
