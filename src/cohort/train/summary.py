"""The summary of a run, as it grows with the steps: what ``summary.json`` holds at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from cohort.config import GRPOConfig, Schedule
from cohort.parallel import on_main
from cohort.rewards import TrainerState
from cohort.runs.folder import RunFolder
from cohort.train.loop import evaluate_step
from cohort.train.parts import TrainerParts


def evaluate_before(
    parts: TrainerParts, schedule: Schedule, config: GRPOConfig, folder: RunFolder, summary: dict[str, Any]
) -> dict[str, Any] | None:
    """Evaluate before the first step, if it is wanted. A resumed run reads that evaluation and the last one.

    Args:
        parts, schedule, config, folder: of the run.
        summary: its summary, which takes the evaluations.

    Returns:
        The metrics, if they are new.
    """
    evaluations = on_main(parts.world, folder.evaluations)
    if 0 in evaluations or parts.complete_steps or parts.evaluator is None or not config.eval.eval_on_start:
        if last := max((step for step in evaluations if step), default=None):
            summary["eval_after"] = evaluations[last]
        if before := evaluations.get(0):
            summary["eval_before"] = before
        return None
    before = evaluate_step(parts, TrainerState(0, schedule.steps), config, folder)
    on_main(parts.world, lambda: folder.append_metrics({"step": 0, "time": time.time(), **before}))
    summary["eval_before"] = before
    return before


def record_step(
    summary: dict[str, Any], parts: TrainerParts, config: GRPOConfig, metrics: Mapping[str, Any], started: float
) -> None:
    """Add a step to the summary; ``started``: the run's start by ``time.perf_counter``."""
    summary.setdefault("seconds_to_first_update", round(time.perf_counter() - started, 2))
    summary |= parts.for_summary(config.rollout.num_generations)
    if evaluated := {key: value for key, value in metrics.items() if key.startswith("eval/")}:
        summary["eval_after"] = evaluated


def end_summary(summary: dict[str, Any], parts: TrainerParts, schedule: Schedule, started: float) -> None:
    """Add the end of the run: the best model, whether the run stopped early, and its seconds."""
    if best := parts.best.note():
        summary["best"] = best
    if parts.best.exhausted and summary["steps"] < schedule.steps:
        summary["stopped_early"] = True
    summary["seconds"] = round(time.perf_counter() - started, 2)
