"""Evaluation: fresh samples on held-out prompts, with a confidence interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cohort.data import PromptSet
from cohort.rewards import RewardRunner
from cohort.rollout import Draws, Engine, Purpose, Sampling
from cohort.types import Group

Z_95 = 1.959964
"""Two-sided 95% point of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its 95% confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    reward: Estimate
    by_function: dict[str, Estimate]
    groups: list[Group]
    """Every completion it drew."""

    def metrics(self) -> dict[str, Any]:
        """Flat, for ``metrics.jsonl``."""
        metrics = {}
        for kind in ("mean", "low", "high"):
            metrics[f"eval/reward/{kind}"] = getattr(self.reward, kind)
            for name, estimate in self.by_function.items():
                metrics[f"eval/rewards/{name}/{kind}"] = getattr(estimate, kind)
        return metrics


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a policy on fixed prompts with fixed random numbers: two policies are compared on the same draws."""

    prompts: PromptSet
    rewards: RewardRunner
    sampling: Sampling
    num_generations: int
    seed: int

    def evaluate(self, engine: Engine) -> Evaluation:
        """Sample and score every prompt. A prompt's unscored completions are left out of its mean."""
        draws = Draws(self.seed, 0, Purpose.EVAL)
        groups = engine.generate(self.prompts.all(), self.num_generations, self.sampling, draws)
        scores = self.rewards.score(groups)

        def estimate(rewards_S: Tensor) -> Estimate:
            return confidence_interval(rewards_S.view(len(groups), self.num_generations).nanmean(dim=1))

        by_function = {name: estimate(scores.by_function_SK[:, k]) for k, name in enumerate(scores.names)}
        return Evaluation(estimate(scores.rewards_S), by_function, groups)


def confidence_interval(means_P: Tensor) -> Estimate:
    """Mean over prompts with a 95% interval. Prompts are the independent units; completions of one prompt are not.

    When every value is 0 or 1, Wilson's score interval: it stays inside [0, 1] and is right near its ends. Otherwise
    the normal interval ``mean +- 1.96 std / sqrt(P)``. NaN entries (nothing could be scored) are left out; with nothing
    left all three numbers are NaN, and with a single non-binary value the interval is unbounded.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).

    >>> import torch
    >>> print(confidence_interval(torch.tensor([1.0] * 45 + [0.0] * 55)))
    0.450 [0.356, 0.548]
    """
    means_P = means_P[~means_P.isnan()].double()
    count = means_P.numel()
    if count == 0:
        return Estimate(math.nan, math.nan, math.nan)
    mean = float(means_P.mean())
    if bool(((means_P == 0) | (means_P == 1)).all()):
        centre = (mean + Z_95**2 / (2 * count)) / (1 + Z_95**2 / count)
        spread = mean * (1 - mean) / count + Z_95**2 / (4 * count**2)
        half = Z_95 * math.sqrt(spread) / (1 + Z_95**2 / count)
        return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))
    half = Z_95 * float(means_P.std()) / math.sqrt(count) if count > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)
