"""The pieces of the predictions of time and disk, from the trial and from the parts of the run."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from cohort.doctor.cost import Disk, Time, kept_of, times_due
from cohort.doctor.known import Run, existing_parent
from cohort.doctor.trial import Trial
from cohort.policy import adapter_weights, has_adapters
from cohort.runs.folder import RunFolder
from cohort.runs.lines import write_file
from cohort.runs.tensors import named_weights

CHUNK, MOST_CHUNKS = 2**23, 8
"""Bytes and number of the pieces that are written to measure the disk."""
LINE = 6000
"""Bytes of a step in metrics.jsonl."""


def costs_of(run: Run, trial: Trial, rounds: float) -> tuple[Time, Disk]:
    """Time and disk.

    Args:
        run: the run.
        trial: what was measured.
        rounds: calls of the engine per step, with dynamic sampling.
    """
    steps, settings = run.schedule.steps, run.config.run
    checkpoint, model, per_completion = _sizes(run, trial)
    seconds = trial.seconds | {name: trial.seconds[name] * rounds for name in ("generate", "reward")}
    per_step = run.config.rollout.prompts_per_step * run.config.rollout.num_generations
    evaluations, evaluated = _evaluations(run)
    time = Time(
        phases=seconds,
        steps=steps,
        evaluation=(trial.seconds["generate"] + trial.seconds["reward"]) / per_step * evaluated,
        evaluations=evaluations,
        checkpoint=checkpoint / write_rate(run.folder, checkpoint),
        checkpoints=times_due(steps, settings.save_steps),
        lag=run.config.rollout.lag,
    )
    by_clock = int(time.step * steps / 60 / settings.save_minutes) if settings.save_minutes else 0
    exempt = steps // settings.keep_every if settings.keep_every else 0
    report, all_groups = run.config.report, run.config.rollout.prompts_per_step * rounds
    groups = min(report.store_groups or all_groups, all_groups)
    stored = steps // report.store_steps * groups * run.config.rollout.num_generations + evaluations * evaluated
    weights = run.parts.policy.model.parameters()
    # The old best model stays until the new one is written.
    best = 2 * model if run.config.eval.metric_for_best_model else 0
    merged = sum(weight.nbytes for weight in weights) if run.config.model.lora.save_merged else 0
    return time, Disk(
        free=shutil.disk_usage(existing_parent(run.folder)).free,
        checkpoint=checkpoint,
        kept=kept_of(time.checkpoints + by_clock, settings.save_total_limit, exempt),
        models=best + merged,
        completions=int(per_completion * stored if report.log_completions else 0) + LINE * steps,
    )


def _sizes(run: Run, trial: Trial) -> tuple[int, int, float]:
    """Bytes of a checkpoint, of the model in it, and of a stored completion."""
    parts, model = run.parts, run.parts.policy.model
    with tempfile.TemporaryDirectory() as made:
        parts.tokenizer.save_pretrained(made)
        RunFolder(made).write_rollout(1, trial.table)
        stored = sum(path.stat().st_size for path in Path(made, "rollouts").iterdir())
        tokenizer = sum(path.stat().st_size for path in Path(made).iterdir() if path.is_file())
    saved = adapter_weights(model) if has_adapters(model) else named_weights(model)
    weights = tokenizer + sum(tensor.nbytes for tensor in saved.values())
    state = sum(tensor.nbytes for tensor in parts.optimizer.state_dict()["tensors"].values())
    if (reference := parts.models.stored_reference) is not None:
        state += sum(tensor.nbytes for tensor in named_weights(reference.model).values())
    return weights + state, weights, stored / trial.table.num_rows


def _evaluations(run: Run) -> tuple[int, int]:
    """Evaluations of the run, and completions of each."""
    if run.parts.evaluator is None:
        return 0, 0
    prompts = sum(map(len, run.parts.evaluator.sets.values()))
    count = times_due(run.schedule.steps, run.config.eval.eval_steps) + run.config.eval.eval_on_start
    return count, prompts * run.config.eval.num_generations_eval


def write_rate(folder: Path, most: int) -> float:
    """Bytes per second of writing, hashing and syncing files on the disk of a folder.

    Args:
        folder: the folder, which need not exist.
        most: write no more bytes than this.
    """
    chunk = os.urandom(max(1, min(CHUNK, most)))
    count = max(1, min(MOST_CHUNKS, most // len(chunk)))
    try:
        with tempfile.TemporaryDirectory(dir=existing_parent(folder)) as made:
            start = time.perf_counter()
            write_file(Path(made) / "part", [chunk] * count)
            return len(chunk) * count / (time.perf_counter() - start)
    except OSError:  # the check 'folder' says so
        return float("inf")
