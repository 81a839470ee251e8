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
    """The best value of ``eval.metric_for_best_model``. Its state is part of a checkpoint; its model lies in ``best/``
    with ``record``, and where the two differ the model that is there counts."""

    settings: EvalConfig
    prompts: str = ""
    """A hash of the prompts that the metric is measured on."""
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
        if (step, value) == (self.step, self.value):  # a resumed run comes by it again
            self.evaluations_since = 0
            return False
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

    @property
    def measured(self) -> dict[str, Any]:
        """What a value depends on, beside the model: only values under the same are to be compared."""
        return {**self.settings.what_is_measured(), "prompts": self.prompts}

    def record(self) -> dict[str, Any]:
        """What ``best/best.json`` says."""
        return {**self.note(), "measured": self.measured}

    def describe(self) -> str:
        """In words."""
        return f"{self.settings.metric_for_best_model} was best after step {self.step}: {self.value:.4g}"

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "step": self.step,
            "value": self.value,
            "evaluations_since": self.evaluations_since,
            "measured": self.measured,
        }

    def load_state_dict(self, state: dict[str, Any], record: dict[str, Any] | None) -> None:
        """The inverse, and a look at the model that is kept. What was measured under other settings or on other prompts
        says nothing about values of now; then there is no best yet.

        Args:
            state: the checkpoint's.
            record: of ``best/``; None: there is no such model.
        """
        if state["measured"] == self.measured:
            self.evaluations_since = state["evaluations_since"]
        elif state["step"] is not None:
            old, new = state["measured"], self.measured
            changed = ", ".join(key for key in {**old, **new} if old.get(key) != new.get(key))
            log.warning(
                "the best evaluation, after step %s, was another one (%s): it starts anew", state["step"], changed
            )
        if record is not None and record["measured"] == self.measured:
            self.step, self.value = record["step"], record["value"]
            if (self.step, self.value) != (state["step"], state["value"]):
                log.warning("best/ holds the model after step %s, which the checkpoint does not know: kept", self.step)
        elif state["measured"] == self.measured and state["step"] is not None:
            self.evaluations_since = 0
            log.warning(
                "best/ no longer holds the model after step %s, which was the best: it starts anew", state["step"]
            )
