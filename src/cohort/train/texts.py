"""How much the completions of a step differ from each other, and how much they repeat themselves, from token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohort.train.rollout import Rollout

SPAN = 4
"""Tokens that make up what is counted as repeated."""
SHORTEST = 4 * SPAN
"""Tokens of a completion below which a repetition says nothing."""
FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
"""Odd 64-bit numbers: a span's hash is the sum of its ids times these. Two spans share one by chance once in 2^64."""


def text_metrics(rollout: Rollout) -> dict[str, Any]:
    """Different completions, and repetition inside of them, over the usable completions."""
    groups = [[one.token_ids for one in group.completions] for group in rollout.usable_groups if group.completions]
    distinct = [len({ids.tobytes() for ids in group}) for group in groups]
    count = sum(map(len, groups))
    return {
        "completions/distinct_share": sum(distinct) / count,
        "groups/identical_share": sum(n == 1 < len(one) for n, one in zip(distinct, groups, strict=True)) / len(groups),
        "completions/repetition": repetition([ids for group in groups for ids in group]),
    }


def repetition(completions: Sequence[NDArray[np.int64]]) -> float | None:
    """The share of all spans of ``SPAN`` tokens that occurred in the same completion before, over the completions of at
    least ``SHORTEST`` tokens; None without any.

    >>> repetition([np.arange(16)]), round(repetition([np.zeros(16, int)]), 3)
    (0.0, 0.923)
    """
    long = [ids for ids in completions if len(ids) >= SHORTEST]
    if not long:
        return None
    ids_N, sequence_N = np.concatenate(long), np.repeat(np.arange(len(long)), [len(ids) for ids in long])
    spans = len(ids_N) - SPAN + 1
    hash_N = sequence_N[:spans].astype(np.uint64)  # so that spans of different completions differ
    for place, factor in enumerate(FACTORS):
        hash_N += ids_N[place : place + spans].astype(np.uint64) * factor
    hash_N = np.sort(hash_N[sequence_N[:spans] == sequence_N[SPAN - 1 :]])
    return int((hash_N[1:] == hash_N[:-1]).sum()) / len(hash_N)
