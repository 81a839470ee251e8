"""The best evaluation so far, and early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cohort.config import EvalConfig

log = logging.getLogger("cohort.train")


@dataclass(slots=True)
class Best:
    """The best value of ``eval.metric_for_best_model``.

    The state is part of a checkpoint. The model is in ``best/`` with ``record``. A run that is killed after a new best
    and before the next checkpoint leaves a model in ``best/`` that the checkpoint does not know (``ahead``). The
    resumed run repeats those evaluations, and early stopping counts them from the checkpoint's state, as in a run that
    was not killed; only a better model, or the same one again, takes its place.
    """

    settings: EvalConfig
    prompts: str = ""
    """Hash of the prompts that the metric is measured on."""
    step: int | None = None
    """The step after which the model was best; 0: the initial model. None: no evaluation had a value yet."""
    value: float | None = None
    evaluations_since: int = 0
    """Number of evaluations since then."""
    ahead: tuple[int, float] | None = None
    """Step and value of the model in ``best/``, if it is not that of ``step``."""
    warned: bool = False
    """Whether a warning about a missing metric was given."""

    def update(self, step: int, metrics: dict[str, Any]) -> bool:
        """Record an evaluation; return whether its model belongs in ``best/``. Ties and missing values never win."""
        metric = self.settings.metric_for_best_model
        if metric is None:
            return False
        if metric not in metrics:
            if not self.warned:
                logged = ", ".join(key for key in metrics if not key.endswith(("/low", "/high")))
                log.warning("eval.metric_for_best_model is %r, which the evaluation did not log: %s", metric, logged)
            self.warned = True
        if self.ahead is not None and self.ahead[0] < step:  # its evaluation has been repeated, or never will be
            if self._wins(self.ahead[1], self.value):
                (self.step, self.value), self.evaluations_since = self.ahead, 0
            self.ahead = None
        value = metrics.get(metric, math.nan)
        if not self._wins(value, self.value):
            self.evaluations_since += 1
            return False
        self.step, self.value, self.evaluations_since = step, value, 0
        if self.ahead is None or self._wins(value, self.ahead[1]):
            self.ahead = None
            return True
        if self.ahead == (step, value):
            self.ahead = None
        return False

    def _wins(self, value: float, other: float | None) -> bool:
        """Whether a value is better than another; NaN and infinity never are."""
        sign = 1 if self.settings.greater_is_better else -1
        return math.isfinite(value) and (other is None or sign * value > sign * other)

    @property
    def exhausted(self) -> bool:
        """Whether the patience of early stopping is exhausted."""
        patience = self.settings.early_stopping_patience
        return patience > 0 and self.evaluations_since >= patience

    def note(self) -> dict[str, Any]:
        """Step, metric and value of the model in ``best/``; empty without a best evaluation."""
        step, value = self.ahead or (self.step, self.value)
        return {} if step is None else {"step": step, "metric": self.settings.metric_for_best_model, "value": value}

    @property
    def measured(self) -> dict[str, Any]:
        """What a value depends on beside the model. Only values with equal entries are comparable."""
        return {**self.settings.what_is_measured(), "prompts": self.prompts}

    def record(self) -> dict[str, Any]:
        """The contents of ``best/best.json``."""
        return {**self.note(), "measured": self.measured}

    def describe(self) -> str:
        """The best evaluation in words."""
        return f"{self.settings.metric_for_best_model} was best after step {self.step}: {self.value:.4g}"

    def state_dict(self) -> dict[str, Any]:
        """The state as a checkpoint stores it."""
        return {name: getattr(self, name) for name in ("step", "value", "evaluations_since", "measured")}

    def load_state_dict(self, state: Mapping[str, Any], record: dict[str, Any] | None) -> None:
        """Restore the state. A value that was measured with other settings or on other prompts is not comparable and is
        dropped.

        Args:
            state: the checkpoint's state.
            record: ``best_record`` of the folder; None: there is no best model.
        """
        old, new, step = state["measured"], self.measured, state["step"]
        in_folder = None
        if record is not None and record["measured"] == new:
            in_folder = record["step"], record["value"]
        if old == new and (step is None or in_folder is not None):
            self.step, self.value, self.evaluations_since = step, state["value"], state["evaluations_since"]
            if in_folder is not None and step is not None and in_folder[0] < step:  # a full disk, then a kill
                log.warning("best/ holds the model after step %s: that after step %s was lost", in_folder[0], step)
                self.step, self.value = in_folder
            elif in_folder is not None and in_folder != (step, self.value):
                self.ahead = in_folder
                log.warning(
                    "best/ holds the model after step %s, which the checkpoint does not know; kept", in_folder[0]
                )
            return
        if old == new:
            log.warning("best/ no longer holds the model after step %s, which was the best: starting anew", step)
        elif step is not None:
            changed = ", ".join(key for key in {**old, **new} if old.get(key) != new.get(key))
            log.warning(
                "the best evaluation, after step %s, was measured differently (%s): starting anew", step, changed
            )
        if in_folder is not None:
            self.step, self.value = in_folder
