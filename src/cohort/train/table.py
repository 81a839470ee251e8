"""Completions and their scores as columns of a table, a row per completion: what rollouts/ and evaluations/ hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from cohort.types import Group, Scores


def completion_columns(groups: Sequence[Group]) -> dict[str, Any]:
    """What was sampled. ``full_logps`` only where some completion has them."""
    import pyarrow

    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    columns: dict[str, Any] = {
        "group": [prompt.uid for prompt, _ in pairs],
        "row": [prompt.row_index for prompt, _ in pairs],
        "prompt": [prompt.text for prompt, _ in pairs],
        "completion": [completion.text for _, completion in pairs],
        "finish_reason": [str(completion.finish_reason) for _, completion in pairs],
        "weights_version": [completion.weights_version for _, completion in pairs],
        "token_ids": [list(completion.token_ids) for _, completion in pairs],
        "sampler_logps": [list(completion.sampler_logps) for _, completion in pairs],
        "num_forced": [completion.num_forced for _, completion in pairs],
    }
    if any(prompt.source for prompt, _ in pairs):
        columns["source"] = [prompt.source for prompt, _ in pairs]
    types = {"token_ids": pyarrow.list_(pyarrow.int64()), "sampler_logps": pyarrow.list_(pyarrow.float64())}
    columns |= {name: pyarrow.array(columns[name], kind) for name, kind in types.items()}
    full_logps = [completion.full_logps for _, completion in pairs]
    if any(logps is not None for logps in full_logps):
        columns["full_logps"] = pyarrow.array(full_logps, pyarrow.list_(pyarrow.float64()))
    return columns


def score_columns(scores: Scores) -> dict[str, Any]:
    """What the reward functions said of it: unscored is null."""
    columns: dict[str, Any] = {"reward": _reward_column(scores.rewards_S)}
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        columns[f"rewards/{name}"] = _reward_column(column_S)
    if scores.errors:
        columns["reward_error"] = _text_column([scores.errors.get(s) for s in range(len(scores.rewards_S))])
    return columns | {f"extra/{name}": _extra_column(values) for name, values in scores.extras.items()}


def write_table(columns: Any, target: Path) -> None:
    """Write columns, or a table, as Parquet, so that a file of that name is whole."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(columns) if isinstance(columns, dict) else columns
    target.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table, target.with_suffix(".part"))
    target.with_suffix(".part").replace(target)


def _reward_column(values_S: Tensor) -> Any:
    """The type is a number's even where every entry is null."""
    import pyarrow

    return pyarrow.array([None if math.isnan(value) else value for value in values_S.tolist()], pyarrow.float64())


def _extra_column(values: Sequence[Any]) -> Any:
    """As it is where all values are of one type; else as text."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, TypeError, UnicodeError):
        return _text_column(values)


def _text_column(values: Sequence[Any]) -> Any:
    """As text; what UTF-8 cannot hold, half a surrogate pair, is escaped."""
    import pyarrow

    texts = [None if value is None else str(value).encode("utf-8", "backslashreplace").decode() for value in values]
    return pyarrow.array(texts, pyarrow.string())
