"""Tables of completions, as a run folder and an evaluation hold them: Parquet files, a row for each completion.

``docs/store.md`` describes every column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from torch import Tensor

from cohort.columns import ALL_DIFFERENT, FACTS_KEY, STORE_VERSION, VERSION_KEY
from cohort.rewards.runner import Scores
from cohort.types import Completion, Episode, Group, Support

NUMBERS = pyarrow.list_(pyarrow.float64())
"""A column of lists of numbers; None is null."""


def completion_columns(groups: Sequence[Group]) -> dict[str, Any]:
    """The sampled completions. ``full_logps`` only if some completion has them."""
    prompts = [group.prompt for group in groups for _ in group.completions]
    completions = [completion for group in groups for completion in group.completions]
    columns: dict[str, Any] = {
        "group": [prompt.uid for prompt in prompts],
        "row": [prompt.row_index for prompt in prompts],
        "prompt": _text_column([prompt.text for prompt in prompts]),
        "prompt_ids": _joined([[np.asarray(prompt.token_ids, np.int64)] for prompt in prompts], np.int64),
        "completion": _text_column([completion.text for completion in completions]),
        "finish_reason": [str(completion.finish_reason) for completion in completions],
        "weights_version": [completion.weights_version for completion in completions],
        "sampler_logps": pyarrow.array([completion.sampler_logps for completion in completions], NUMBERS),
        **_token_columns(completions),
    }
    if any(prompt.source for prompt in prompts):
        columns["source"] = [prompt.source for prompt in prompts]
    if any(completion.episode for completion in completions):
        columns |= _episode_columns([completion.episode for completion in completions])
    if any(completion.full_logps is not None for completion in completions):
        columns["full_logps"] = pyarrow.array([completion.full_logps for completion in completions], NUMBERS)
    if any(completion.support is not None for completion in completions):
        columns |= _support_columns([completion.support for completion in completions])
    return columns


def _token_columns(completions: Sequence[Completion]) -> dict[str, Any]:
    """The token ids of all segments; which of them were drawn, unless all were; the segments' lengths, if there are
    several."""
    ids = [[segment.token_ids for segment in completion.segments] for completion in completions]
    columns = {"token_ids": _joined(ids, np.int64)}
    if any(segment.drawn is not None for completion in completions for segment in completion.segments):
        drawn = [[segment.is_drawn for segment in completion.segments] for completion in completions]
        columns["drawn"] = _joined(drawn, np.bool_)
    if any(len(some) != 1 for some in ids):
        columns["segment_lengths"] = [[len(one) for one in some] for some in ids]
    return columns


def _joined(arrays: Sequence[Sequence[Any]], dtype: Any) -> Any:
    """A column of lists, each the arrays of one completion end to end."""
    joined = [np.concatenate([np.zeros(0, dtype), *some]) for some in arrays]
    return pyarrow.array(joined, pyarrow.list_(pyarrow.from_numpy_dtype(dtype)))


def _support_columns(supports: Sequence[Support | None]) -> dict[str, Any]:
    """The tokens that each draw could have given, as ``Support`` has them; null: all tokens."""
    kinds = {"token_ids_U": np.int32, "counts_N": np.int32, "excluded_N": np.bool_}
    return {
        f"support/{name[:-2]}": pyarrow.array(
            [None if one is None else getattr(one, name) for one in supports],
            pyarrow.list_(pyarrow.from_numpy_dtype(dtype)),
        )
        for name, dtype in kinds.items()
    }


def _episode_columns(episodes: Sequence[Episode | None]) -> dict[str, Any]:
    """The messages after the prompt as JSON, the environment's rewards, and why an episode is unusable."""
    some = [episode or Episode(()) for episode in episodes]
    return {
        "messages": _text_column([json.dumps(one.messages, ensure_ascii=False, default=str) for one in some]),
        "turn_lengths": [[turn.num_drawn for turn in one.turns] for one in some],
        "turn_rewards": pyarrow.array([[turn.reward for turn in one.turns] for one in some], NUMBERS),
        "environment_reward": pyarrow.array([one.reward for one in some], pyarrow.float64()),
        "episode_error": _text_column([one.error or None for one in some]),
    }


def time_columns(completions: Sequence[Completion], scores: Scores) -> dict[str, Any]:
    """Durations, which differ between two runs of the same computation: of reward calls, and of turns' answers."""
    columns: dict[str, Any] = {
        f"seconds/reward/{name}": pyarrow.array(seconds, pyarrow.float64()) for name, seconds in scores.seconds.items()
    }
    if any(completion.episode for completion in completions):
        turns = [one.episode.turns if one.episode else () for one in completions]
        columns["seconds/turns"] = pyarrow.array([[turn.seconds for turn in some] for some in turns], NUMBERS)
    return columns


def score_columns(scores: Scores) -> dict[str, Any]:
    """The rewards; null when unscored."""
    columns: dict[str, Any] = {"reward": _reward_column(scores.rewards_S)}
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        columns[f"rewards/{name}"] = _reward_column(column_S)
    if scores.errors:
        columns["reward_error"] = _text_column([scores.errors.get(s) for s in range(len(scores.rewards_S))])
    return columns | {f"extra/{name}": _extra_column(values) for name, values in scores.extras.items()}


@dataclass(frozen=True, slots=True)
class UsedRows:
    """The rows of the completions that a step's updates used, among all rows of a table."""

    rows_S: NDArray[np.int64]
    """Their numbers, ascending."""
    lengths_S: NDArray[np.int64]
    """Drawn tokens of each."""
    num_rows: int

    def column(self, values_S: NDArray[Any]) -> Any:
        """A number for each of them; null in other rows, and where it is negative."""
        values = np.full(self.num_rows, -1, values_S.dtype)
        values[self.rows_S] = values_S
        return pyarrow.array(values, mask=values < 0)

    def lists(self, values_N: Any, with_values_S: NDArray[np.bool_]) -> Any:
        """A list for each of those that have values.

        Args:
            values_N: the values of all of them, or an Arrow array of them; NumPy's dtype is kept.
            with_values_S: which have values; the other rows are null.
        """
        lengths, null = np.zeros(self.num_rows, np.int64), np.ones(self.num_rows, np.bool_)
        lengths[self.rows_S], null[self.rows_S] = np.where(with_values_S, self.lengths_S, 0), ~with_values_S
        values = values_N if isinstance(values_N, pyarrow.Array) else pyarrow.array(values_N)
        if not with_values_S.all():
            values = values.filter(pyarrow.array(np.repeat(with_values_S, self.lengths_S)))
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        return pyarrow.ListArray.from_arrays(pyarrow.array(offsets), values, mask=pyarrow.array(null))


def advantage_columns(rows: UsedRows, advantages_N: NDArray[np.float64]) -> dict[str, Any]:
    """Each completion's mean advantage, null if no update used it; those of its tokens if they differ in one."""
    tokens = np.split(advantages_N, rows.lengths_S.cumsum()[:-1])[: len(rows.rows_S)]
    means: list[float | None] = [None] * rows.num_rows
    for row, some in zip(rows.rows_S.tolist(), tokens, strict=True):
        means[row] = _mean(some)
    columns = {"advantage": pyarrow.array(means, pyarrow.float64())}
    if any(len(some) and (some != some[0]).any() for some in tokens):
        columns["token_advantages"] = rows.lists(advantages_N, np.ones(len(tokens), np.bool_))
    return columns


def _mean(numbers: NDArray[np.float64]) -> float:
    """Exact when all numbers are equal; 0 for none."""
    if not len(numbers):
        return 0.0
    return float(numbers[0]) if (numbers == numbers[0]).all() else math.fsum(numbers.tolist()) / len(numbers)


def with_facts(columns: Mapping[str, Any], facts: Mapping[str, Any]) -> pyarrow.Table:
    """The table of a step, with the version of the store and facts about the whole step in its metadata."""
    metadata = {VERSION_KEY: str(STORE_VERSION), FACTS_KEY: json.dumps(facts)}
    return pyarrow.table(dict(columns)).replace_schema_metadata(metadata)


def write_table(table: pyarrow.Table, target: Path) -> None:
    """Write a table as Parquet, atomically, with checksums."""
    part = target.with_suffix(".part")
    target.parent.mkdir(exist_ok=True)
    try:
        split = {_path(field): "BYTE_STREAM_SPLIT" for field in table.schema if _is_split(field)}
        others = [_path(field) for field in table.schema if not _is_split(field)]
        settings = {"compression": "zstd", "use_dictionary": others, "column_encoding": split}
        pyarrow.parquet.write_table(table, part, write_page_checksum=True, **settings)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _is_split(column: pyarrow.Field) -> bool:
    """Whether the bytes of a column's floats are split."""
    kind = column.type
    return column.name in ALL_DIFFERENT and pyarrow.types.is_list(kind) and pyarrow.types.is_floating(kind.value_type)


def _path(column: pyarrow.Field) -> str:
    """The path of a column's values in a Parquet file."""
    return f"{column.name}.list.element" if pyarrow.types.is_list(column.type) else column.name


def _reward_column(values_S: Tensor) -> Any:
    """A column of numbers, even if every entry is null."""
    return pyarrow.array(values_S.double().numpy(), from_pandas=True)  # which makes NaN null


def _extra_column(values: Sequence[Any]) -> Any:
    """A typed column if all values have one type, else text."""
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError, TypeError, UnicodeError):
        return _text_column(values)


def _text_column(values: Sequence[Any]) -> Any:
    """Text; lone surrogates, which UTF-8 cannot encode, are escaped."""
    texts = [None if value is None else str(value).encode("utf-8", "backslashreplace").decode() for value in values]
    return pyarrow.array(texts, pyarrow.string())
