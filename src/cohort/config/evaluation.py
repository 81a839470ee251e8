"""Settings of evaluation."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, model_validator

from cohort.config.section import Count, PositiveInt, PositiveInts, PositiveShare, Section, Share

MEASURES = ("reward", "rewards", "length", "cut_share", "unscored", "errors")
"""Reserved metric names; invalid as names of evaluation sets."""


def check_set_name(name: Any) -> None:
    """Check that an evaluation set's name can be part of metrics and of file names.

    Raises:
        ValueError: the name contains other characters than letters, digits, '-' and '_', or is reserved.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in MEASURES:
        raise ValueError(
            "an evaluation set's name becomes part of metrics and of file names: expected letters, digits, '-' and "
            f"'_', and none of {', '.join(MEASURES)}; got {name!r}"
        )


class EvalConfig(Section):
    """Evaluation on fresh samples of `data.eval`'s prompts, with the same random numbers every time
    (docs/evaluation.md)."""

    eval_steps: Count = 0
    """Evaluate every this many steps. 0: only before the first step and after the last one."""
    eval_on_start: bool = True
    """Also evaluate before the first step, for comparison."""
    num_generations_eval: PositiveInt = 1
    """Completions per prompt."""
    temperature_eval: Annotated[float, Field(ge=0)] | None = None
    """Divides the logits; 0 is greedy. Unset: as in training, also for the four settings below."""
    top_p_eval: PositiveShare | None = None
    """Sample from the smallest set of most likely tokens whose probabilities add up to p. 1: all."""
    top_k_eval: Count | None = None
    """Sample from the k most likely tokens only. 0: all."""
    min_p_eval: Share | None = None
    """Sample from tokens at least this fraction as likely as the most likely one. 0: all."""
    max_completion_length_eval: PositiveInt | None = None
    """Maximum number of tokens of a completion."""
    pass_at_k: PositiveInts = (1,)
    """Log the probability that at least one of k completions is correct, for each of these k. []: off."""
    maj_at_k: PositiveInts = ()
    """Log the probability that the most frequent answer of k completions is correct, for each of these k. Needs a
    reward function that logs the column "answer" (`log_extra`)."""
    pass_function: str | None = None
    """The reward function that decides whether a completion is correct. Unset: the first."""
    pass_threshold: float = 1.0
    """A completion is correct if that function returns at least this."""
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2_000
    """Resamples of each confidence interval."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence level of the intervals."""
    metric_for_best_model: str | None = None
    """Keep the model with the best value of this metric, as in "eval/reward/mean", in best/ in the run folder. Unset:
    off."""
    greater_is_better: bool = True
    """Whether a higher value of that metric is better."""
    early_stopping_patience: Count = 0
    """End the run after this many evaluations in a row without a new best. 0: off."""

    @model_validator(mode="after")
    def _check_together(self) -> EvalConfig:
        for name in ("pass_at_k", "maj_at_k"):
            if (k := max(getattr(self, name), default=0)) > self.num_generations_eval:
                raise ValueError(
                    f"{name} needs {k} completions per prompt, and num_generations_eval is "
                    f"{self.num_generations_eval}: raise it, or lower k"
                )
        if self.early_stopping_patience and self.metric_for_best_model is None:
            raise ValueError("early_stopping_patience needs a metric: set eval.metric_for_best_model")
        if 1 / (1 + self.bootstrap_samples) > 1 - self.confidence:
            raise ValueError(
                f"bootstrap_samples ({self.bootstrap_samples}) is too small for confidence {self.confidence}: the "
                "smallest possible p-value is above 1 - confidence, so no difference would be significant. Raise it"
            )
        return self

    def what_is_measured(self) -> dict[str, Any]:
        """The settings that the value of ``metric_for_best_model`` depends on. Values are comparable only under the
        same settings."""
        metric = self.metric_for_best_model or ""
        sampling = {name for name in type(self).model_fields if name.endswith("_eval")}
        names = {"metric_for_best_model", "greater_is_better"} | sampling
        if "@" in metric:
            names |= {"pass_function", "pass_threshold"}
        if metric.endswith(("/low", "/high")):
            names |= {"bootstrap_samples", "confidence"}
        return self.model_dump(include=names, mode="json")
