"""The best evaluation so far, and early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cohort.config import EvalConfig

log = logging.getLogger("cohort.train")


@dataclass(frozen=True, slots=True)
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

    def after(self, step: int, metrics: Mapping[str, Any]) -> tuple[Best, bool]:
        """The record after an evaluation, and whether its model belongs in ``best/``. Ties and missing values never
        win."""
        metric = self.settings.metric_for_best_model
        if metric is None:
            return self, False
        value = metrics.get(metric, math.nan)
        if metric not in metrics and not self.evaluations_since:  # said once: it is missing in the later ones too
            logged = ", ".join(key for key in metrics if not key.endswith(("/low", "/high")))
            log.warning("eval.metric_for_best_model is %r, which the evaluation did not log: %s", metric, logged)
        before = self
        if self.ahead is not None and self.ahead[0] < step:  # its evaluation has been repeated, or never will be
            before = replace(self, ahead=None)
            if self._wins(self.ahead[1], self.value):
                before = replace(before, step=self.ahead[0], value=self.ahead[1], evaluations_since=0)
        if not self._wins(value, before.value):
            return replace(before, evaluations_since=before.evaluations_since + 1), False
        ahead, now = before.ahead, replace(before, step=step, value=value, evaluations_since=0)
        wins = ahead is None or self._wins(value, ahead[1])
        return replace(now, ahead=None if wins or ahead == (step, value) else ahead), wins

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

    def restored(self, state: Mapping[str, Any], record: Mapping[str, Any] | None) -> Best:
        """The record of a checkpoint. A value that was measured with other settings or on other prompts is not
        comparable and is dropped.

        Args:
            state: ``state_dict`` of the checkpoint.
            record: ``best_record`` of the folder; None: there is no best model.
        """
        old, new, step = state["measured"], self.measured, state["step"]
        in_folder = None
        if record is not None and record["measured"] == new:
            in_folder = record["step"], record["value"]
        if old == new and (step is None or in_folder is not None):
            found = replace(self, step=step, value=state["value"], evaluations_since=state["evaluations_since"])
            if in_folder is None or in_folder == (step, found.value):
                return found
            if step is not None and in_folder[0] < step:  # a full disk, then a kill
                log.warning("best/ holds the model after step %s: that after step %s was lost", in_folder[0], step)
                return replace(found, step=in_folder[0], value=in_folder[1])
            log.warning("best/ holds the model after step %s, which the checkpoint does not know; kept", in_folder[0])
            return replace(found, ahead=in_folder)
        if old == new:
            log.warning("best/ no longer holds the model after step %s, which was the best: starting anew", step)
        elif step is not None:
            changed = ", ".join(key for key in {**old, **new} if old.get(key) != new.get(key))
            log.warning(
                "the best evaluation, after step %s, was measured differently (%s): starting anew", step, changed
            )
        return self if in_folder is None else replace(self, step=in_folder[0], value=in_folder[1])
