"""The summary of a run, as it grows with the steps: what ``summary.json`` holds at the end."""

from __future__ import annotations

import time
from typing import Any

from cohort.config import GRPOConfig, Schedule
from cohort.parallel import on_main
from cohort.train.boundary import Training
from cohort.train.loop import evaluate
from cohort.train.observers import CompleteStep
from cohort.train.parts import TrainerParts
from cohort.train.state import State


def evaluate_before(training: Training, summary: dict[str, Any]) -> dict[str, Any] | None:
    """Evaluate before the first step, if it is wanted. A resumed run reads that evaluation and the last one.

    Args:
        training: the run.
        summary: its summary, which takes the evaluations.

    Returns:
        The metrics, if they are new.
    """
    parts, folder, state = training.parts, training.folder, training.boundary.state
    evaluations = on_main(parts.world, folder.evaluations)
    if 0 in evaluations or state.complete_steps or parts.evaluator is None or not parts.config.eval.eval_on_start:
        if last := max((step for step in evaluations if step), default=None):
            summary["eval_after"] = evaluations[last]
        if before := evaluations.get(0):
            summary["eval_before"] = before
        return None
    state, before = evaluate(training)
    training.boundary.reached(state)
    on_main(parts.world, lambda: folder.append_metrics({"step": 0, "time": time.time(), **before}))
    summary["eval_before"] = before
    return before


def begun_summary(state: State, parts: TrainerParts) -> dict[str, Any]:
    """Complete steps, updates and completions so far, and what evaluations count as correct."""
    success = parts.evaluator.success if parts.evaluator else None
    done: dict[str, Any] = dict(state.for_summary(parts.config.rollout.num_generations))
    return done | ({"success": str(success)} if success else {})


def record_step(summary: dict[str, Any], step: CompleteStep, config: GRPOConfig, started: float) -> None:
    """Add a step to the summary; ``started``: the run's start by ``time.perf_counter``."""
    summary.setdefault("seconds_to_first_update", round(time.perf_counter() - started, 2))
    summary |= step.state.for_summary(config.rollout.num_generations)
    if evaluated := {key: value for key, value in step.metrics.items() if key.startswith("eval/")}:
        summary["eval_after"] = evaluated


def end_summary(summary: dict[str, Any], state: State, schedule: Schedule, started: float) -> None:
    """Add the end of the run: the best model, whether the run stopped early, and its seconds."""
    if best := state.best.note():
        summary["best"] = best
    if state.best.exhausted and summary["steps"] < schedule.steps:
        summary["stopped_early"] = True
    summary["seconds"] = round(time.perf_counter() - started, 2)
