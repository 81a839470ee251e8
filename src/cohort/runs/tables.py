"""Tables of completions, as a run folder and an evaluation hold them: Parquet files, a row for each completion."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from torch import Tensor

from cohort.rewards.scores import Scores
from cohort.types import Completion, Episode, Group

NUMBERS = pyarrow.list_(pyarrow.float64())
"""A column of lists of numbers; None is null."""


def completion_columns(groups: Sequence[Group]) -> dict[str, Any]:
    """The sampled completions. ``full_logps`` only if some completion has them."""
    prompts = [group.prompt for group in groups for _ in group.completions]
    completions = [completion for group in groups for completion in group.completions]
    columns: dict[str, Any] = {
        "group": [prompt.uid for prompt in prompts],
        "row": [prompt.row_index for prompt in prompts],
        "prompt": [prompt.text for prompt in prompts],
        "completion": [completion.text for completion in completions],
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


def score_columns(scores: Scores) -> dict[str, Any]:
    """The rewards; null when unscored."""
    columns: dict[str, Any] = {"reward": _reward_column(scores.rewards_S)}
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        columns[f"rewards/{name}"] = _reward_column(column_S)
    if scores.errors:
        columns["reward_error"] = _text_column([scores.errors.get(s) for s in range(len(scores.rewards_S))])
    return columns | {f"extra/{name}": _extra_column(values) for name, values in scores.extras.items()}


def advantage_columns(advantages: Sequence[Sequence[float] | None]) -> dict[str, Any]:
    """Each completion's mean advantage, null if no update used it; those of its tokens if they differ in one."""
    means = [None if tokens is None else _mean(tokens) for tokens in advantages]
    columns = {"advantage": pyarrow.array(means, pyarrow.float64())}
    if any(len(set(tokens or ())) > 1 for tokens in advantages):
        columns["token_advantages"] = pyarrow.array(advantages, NUMBERS)
    return columns


def _mean(numbers: Sequence[float]) -> float:
    """Exact when all numbers are equal."""
    return numbers[0] if len(set(numbers)) == 1 else math.fsum(numbers) / len(numbers)


def write_table(table: pyarrow.Table, target: Path) -> None:
    """Write a table as Parquet, atomically, with checksums."""
    part = target.with_suffix(".part")
    target.parent.mkdir(exist_ok=True)
    try:
        pyarrow.parquet.write_table(table, part, write_page_checksum=True)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


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
