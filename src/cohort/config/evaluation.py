"""The settings of evaluation."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, model_validator

from cohort.config.section import Count, PositiveInt, PositiveInts, Section

MEASURES = ("reward", "rewards", "length", "cut_share", "unscored", "errors")
"""What an evaluation logs under eval/: no name of a data set."""


def check_set_name(name: Any) -> None:
    """Refuse a name of an evaluation set that does not do as a part of metrics and of file names.

    Raises:
        ValueError: it holds something else than letters, digits, '-' and '_', or is that of a metric.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in MEASURES:
        raise ValueError(
            f"an evaluation set's name becomes part of metrics and of file names: expected letters, digits, '-' and "
            f"'_', and none of {', '.join(MEASURES)}; got {name!r}"
        )


class EvalConfig(Section):
    """Evaluation: fresh samples of `data.eval`'s prompts, the same random numbers every time (docs/evaluation.md)."""

    eval_steps: Count = 0
    """Evaluate every so many steps. 0: before the first step and after the last one only."""
    eval_on_start: bool = True
    """Evaluate before the first step too: what the run begins with, and what it is compared with."""
    num_generations_eval: PositiveInt = 1
    """Completions per prompt."""
    temperature_eval: Annotated[float, Field(ge=0)] | None = None
    """Divides the logits; 0 takes the likeliest token. Unset: as in training, and so for the four that follow."""
    top_p_eval: Annotated[float, Field(gt=0, le=1)] | None = None
    """Draw from the smallest set of likeliest tokens whose probabilities reach p. 1: all."""
    top_k_eval: Count | None = None
    """Draw from the k likeliest tokens only. 0: all."""
    min_p_eval: Annotated[float, Field(ge=0, le=1)] | None = None
    """Draw from tokens at least so many times as likely as the likeliest. 0: all."""
    max_completion_length_eval: PositiveInt | None = None
    """Tokens after which a completion is cut."""
    pass_at_k: PositiveInts = (1,)
    """Log the chance that one of k completions is correct, for each of these k; [] for none."""
    maj_at_k: PositiveInts = ()
    """Log the chance that the most frequent answer of k completions is correct, for each of these k; needs a reward
    function that logs the column "answer" (`log_extra`)."""
    pass_function: str | None = None
    """The reward function that says whether a completion is correct. Unset: the first."""
    pass_threshold: float = 1.0
    """A completion is correct when that function gives it at least so much."""
    bootstrap_samples: Annotated[int, Field(ge=100)] = 2_000
    """Resamples behind each confidence interval."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Of the intervals."""
    metric_for_best_model: str | None = None
    """Keep the model with the best value of this metric, as in "eval/reward/mean", in best/ in the run folder. Unset:
    none is kept."""
    greater_is_better: bool = True
    """Whether more of that metric is better."""
    early_stopping_patience: Count = 0
    """End the run after so many evaluations in a row without a new best. 0: off."""

    @model_validator(mode="after")
    def _check_together(self) -> EvalConfig:
        for name in ("pass_at_k", "maj_at_k"):
            if (k := max(getattr(self, name), default=0)) > self.num_generations_eval:
                raise ValueError(
                    f"{name} asks for {k} completions per prompt, and num_generations_eval is "
                    f"{self.num_generations_eval}: raise it, or lower k"
                )
        if self.early_stopping_patience and self.metric_for_best_model is None:
            raise ValueError("early_stopping_patience needs a metric: set eval.metric_for_best_model")
        if 1 / (1 + self.bootstrap_samples) > 1 - self.confidence:
            raise ValueError(
                f"bootstrap_samples {self.bootstrap_samples} are too few for confidence {self.confidence}: the least p "
                "that so many can give is above 1 - confidence, and no difference would ever be shown. Raise it"
            )
        return self

    def what_is_measured(self) -> dict[str, Any]:
        """The settings that the value of ``metric_for_best_model`` depends on: two values under others are not to be
        compared."""
        metric = self.metric_for_best_model or ""
        names = {
            "metric_for_best_model",
            "greater_is_better",
            *(n for n in type(self).model_fields if n.endswith("_eval")),
        }
        if "@" in metric:
            names |= {"pass_function", "pass_threshold"}
        if metric.endswith(("/low", "/high")):
            names |= {"bootstrap_samples", "confidence"}
        return self.model_dump(include=names, mode="json")
