"""Numbers of all completions of an evaluated set together, beside the means over prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cohort.objective import group_statistics
from cohort.rewards.scores import Scores
from cohort.types import FinishReason


def totals(scores: Scores, completions: Sequence[tuple[int, FinishReason]], group_size: int) -> dict[str, float | None]:
    """Spread of the rewards, extremes of the lengths, and lengths of the completions that ended, with the keys of
    docs/metrics.md. A statistic of an empty set is None.

    Args:
        scores: scores of all completions, failed ones included.
        completions: number of tokens and finish reason of each.
        group_size: completions per prompt.
    """
    group_S = torch.arange(len(completions)) // group_size
    degenerate_P = group_statistics(scores.rewards_S, group_S, ddof=0).degenerate_P
    found: dict[str, float | None] = {**_spread("reward", scores.rewards_S)}
    found["reward/dead_share"] = float(degenerate_P.double().mean())
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        found |= _spread(f"rewards/{name}", column_S)
    lengths = [length for length, reason in completions if reason.usable]
    ended = [length for length, reason in completions if reason is FinishReason.EOS]
    return found | {
        "length/min": min(lengths, default=None),
        "length/max": max(lengths, default=None),
        "length/ended_share": len(ended) / len(lengths) if lengths else None,
        **ended_lengths(ended),
    }


def ended_lengths(lengths: Sequence[int]) -> dict[str, float | None]:
    """Mean and extremes of the lengths of completions that ended by themselves; None without any."""
    return {
        "length/ended_mean": sum(lengths) / len(lengths) if lengths else None,
        "length/ended_min": min(lengths, default=None),
        "length/ended_max": max(lengths, default=None),
    }


def std_of(values: Tensor) -> float | None:
    """The standard deviation, divided by n; None without values."""
    return float(values.std(correction=0)) if values.numel() else None


def _spread(name: str, rewards_S: Tensor) -> dict[str, float | None]:
    scored_S = rewards_S[~rewards_S.isnan()]
    return {f"{name}/std": std_of(scored_S), f"{name}/scored": scored_S.numel()}
