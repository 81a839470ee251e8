"""Completions and their scores as columns, one row per completion: the tables in rollouts/ and evaluations/."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cohort.types import Completion, Group, Scores


def completion_columns(groups: Sequence[Group]) -> dict[str, Any]:
    """The sampled completions. ``full_logps`` only if some completion has them."""
    pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
    columns: dict[str, Any] = {
        "group": [prompt.uid for prompt, _ in pairs],
        "row": [prompt.row_index for prompt, _ in pairs],
        "prompt": [prompt.text for prompt, _ in pairs],
        "completion": [completion.text for _, completion in pairs],
        "finish_reason": [str(completion.finish_reason) for _, completion in pairs],
        "weights_version": [completion.weights_version for _, completion in pairs],
        "sampler_logps": _lists([completion.sampler_logps for _, completion in pairs]),
        **_token_columns([completion for _, completion in pairs]),
    }
    if any(prompt.source for prompt, _ in pairs):
        columns["source"] = [prompt.source for prompt, _ in pairs]
    if any(completion.full_logps is not None for _, completion in pairs):
        columns["full_logps"] = _lists([completion.full_logps for _, completion in pairs])
    return columns


def _token_columns(completions: Sequence[Completion]) -> dict[str, Any]:
    """The token ids of all segments; which of them were drawn, unless all were; the segments' lengths, if there are
    several."""
    import pyarrow

    ids = [[segment.token_ids for segment in completion.segments] for completion in completions]
    columns = {"token_ids": _lists([np.concatenate([np.zeros(0, np.int64), *some]) for some in ids], pyarrow.int64())}
    if any(segment.drawn is not None for completion in completions for segment in completion.segments):
        columns["drawn"] = _lists(
            [
                np.concatenate(
                    [np.ones(len(s.token_ids), np.bool_) if s.drawn is None else s.drawn for s in completion.segments]
                )
                for completion in completions
            ],
            pyarrow.bool_(),
        )
    if any(len(completion.segments) != 1 for completion in completions):
        columns["segment_lengths"] = [[len(one) for one in some] for some in ids]
    return columns


def _lists(arrays: Sequence[Any], kind: Any = None) -> Any:
    """A column of lists of numbers, float64 unless said otherwise; None is null."""
    import pyarrow

    return pyarrow.array(arrays, pyarrow.list_(kind or pyarrow.float64()))


def score_columns(scores: Scores) -> dict[str, Any]:
    """The rewards; null when unscored."""
    columns: dict[str, Any] = {"reward": _reward_column(scores.rewards_S)}
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        columns[f"rewards/{name}"] = _reward_column(column_S)
    if scores.errors:
        columns["reward_error"] = _text_column([scores.errors.get(s) for s in range(len(scores.rewards_S))])
    return columns | {f"extra/{name}": _extra_column(values) for name, values in scores.extras.items()}


def write_table(columns: Any, target: Path) -> None:
    """Write columns or a table as Parquet, atomically."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(columns) if isinstance(columns, dict) else columns
    target.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(table, target.with_suffix(".part"))
    target.with_suffix(".part").replace(target)


def _reward_column(values_S: Tensor) -> Any:
    """A column of numbers, even if every entry is null."""
    import pyarrow

    return pyarrow.array([None if math.isnan(value) else value for value in values_S.tolist()], pyarrow.float64())


def _extra_column(values: Sequence[Any]) -> Any:
    """A typed column if all values have one type, else text."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, TypeError, UnicodeError):
        return _text_column(values)


def _text_column(values: Sequence[Any]) -> Any:
    """Text; lone surrogates, which UTF-8 cannot encode, are escaped."""
    import pyarrow

    texts = [None if value is None else str(value).encode("utf-8", "backslashreplace").decode() for value in values]
    return pyarrow.array(texts, pyarrow.string())
