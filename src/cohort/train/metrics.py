"""What a step's line in ``metrics.jsonl`` says. ``docs/metrics.md`` has every key with its formula."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cohort.objective import group_statistics
from cohort.train.update import UpdateResult
from cohort.types import FinishReason, Group, Scores, TokenBatch


class PhaseClock:
    """Seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block as ``phase``."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def step_metrics(
    groups: Sequence[Group], scores: Scores, batch: TokenBatch, results: Sequence[UpdateResult], clock: PhaseClock
) -> dict[str, Any]:
    """A step's metrics, flat. Means over tokens are sums over all updates divided by the tokens of all updates."""
    metrics = reward_metrics(scores, batch.group_S.cpu()) | length_metrics(groups)
    metrics |= update_metrics(results)
    total = sum(clock.seconds.values())
    metrics |= {f"seconds/{phase}": seconds for phase, seconds in clock.seconds.items()}
    metrics["seconds/step"] = total
    metrics["tokens_per_second"] = batch.num_tokens / total
    return metrics


def reward_metrics(scores: Scores, group_S: Tensor) -> dict[str, Any]:
    """Rewards over the scored completions. A statistic of nothing is None."""
    rewards_S = scores.rewards_S
    scored_S = rewards_S[~rewards_S.isnan()]
    statistics = group_statistics(rewards_S, group_S, ddof=0)
    spread_R = statistics.std_R
    metrics: dict[str, Any] = {
        "reward/mean": _mean(scored_S),
        "reward/std": float(scored_S.std(correction=0)) if scored_S.numel() else None,
        "reward/within_group_std": _mean(spread_R[~spread_R.isnan()]),
        "reward/unscored": int(rewards_S.isnan().sum()),
        "groups/dead_share": float(statistics.degenerate_R.double().mean()),
    }
    for name, column_S in zip(scores.names, scores.by_function_SK.T, strict=True):
        metrics[f"rewards/{name}"] = _mean(column_S[~column_S.isnan()])
    return metrics


def length_metrics(groups: Sequence[Group]) -> dict[str, Any]:
    """Lengths in tokens (end token included) and how completions ended."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = torch.tensor([len(completion.token_ids) for completion in completions], dtype=torch.float64)
    reasons = Counter(completion.finish_reason for completion in completions)
    return {
        "length/mean": float(lengths.mean()),
        "length/min": int(lengths.min()),
        "length/max": int(lengths.max()),
        "length/cut_share": reasons[FinishReason.LENGTH] / len(completions),
    }


def update_metrics(results: Sequence[UpdateResult]) -> dict[str, Any]:
    """The step's updates. Values are means over updates; token statistics are over all tokens of all updates."""
    sums: Counter[str] = Counter()
    for result in results:
        sums.update(result.sums)
    tokens, updates = sums["tokens"], len(results)
    first = results[0].sums
    metrics: dict[str, Any] = {
        "policy_value": sums["policy_value"] / updates,
        "entropy": sums["entropy"] / tokens,
        "clip/low_share": sums["clip_low"] / tokens,
        "clip/high_share": sums["clip_high"] / tokens,
        "ratio/held_share": sums["ratio_held"] / tokens,
        "sampler/gap": first["sampler_gap"] / first["tokens"],
        "grad_norm": sum(result.grad_norm for result in results) / updates,
        "learning_rate": results[-1].learning_rate,
        "updates": updates,
        "updates_skipped": sum(result.grad_norm == 0 for result in results),
        "tokens": int(tokens),
    }
    if "k1" in sums:
        metrics |= {
            "kl_value": sums["kl_value"] / updates,
            "kl/k1": sums["k1"] / tokens,
            "kl/k3": sums["k3"] / tokens,
        }
    return metrics


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if values.numel() else None
