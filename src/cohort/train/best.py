"""Which evaluation was the best so far, and whether the run has gone on long enough without a better one."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from cohort.config import EvalConfig

log = logging.getLogger("cohort.train")


@dataclass(slots=True)
class Best:
    """The best value of ``eval.metric_for_best_model``. Its state is part of a checkpoint."""

    settings: EvalConfig
    step: int | None = None
    """Whose model it is; 0: the one that the run began with. None: no evaluation had a value yet."""
    value: float | None = None
    evaluations_since: int = 0
    """How many evaluations there were since."""
    warned: bool = False
    """Whether it was said that the metric is not logged."""

    def takes(self, step: int, metrics: dict[str, Any]) -> bool:
        """Look at an evaluation; whether it is the best so far. Equal is not better, and what is no finite number, or
        was not logged, never is."""
        metric = self.settings.metric_for_best_model
        if metric is None:
            return False
        if metric not in metrics:
            if not self.warned:
                logged = ", ".join(key for key in metrics if not key.endswith(("/low", "/high")))
                log.warning("eval.metric_for_best_model is %r, which the evaluation did not log: %s", metric, logged)
            self.warned = True
        value = metrics.get(metric, math.nan)
        sign = 1 if self.settings.greater_is_better else -1
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            self.step, self.value, self.evaluations_since = step, value, 0
            return True
        self.evaluations_since += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether the run is to end."""
        patience = self.settings.early_stopping_patience
        return patience > 0 and self.evaluations_since >= patience

    def note(self) -> dict[str, Any]:
        """Step, metric and value; empty where there is no best."""
        if self.step is None:
            return {}
        return {"step": self.step, "metric": self.settings.metric_for_best_model, "value": self.value}

    def describe(self) -> str:
        """In words."""
        return f"{self.settings.metric_for_best_model} was best after step {self.step}: {self.value:.4g}"

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "step": self.step,
            "value": self.value,
            "evaluations_since": self.evaluations_since,
            "measured": self.settings.what_is_measured(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse. Where the settings that the value depends on have changed since, it says nothing about values of
        now, and there is no best yet."""
        if state["measured"] == self.settings.what_is_measured():
            self.step, self.value = state["step"], state["value"]
            self.evaluations_since = state["evaluations_since"]
