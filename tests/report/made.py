"""Histories of runs that never ran."""

from pathlib import Path

from cohort.report.history import RunHistory


def history(metrics, settings=None, *, seed=0, name="run", **parts):
    """A history of made-up lines; ``metrics`` without ``step`` get their place in the list, from 1."""
    lines = [{"step": number, **line} for number, line in enumerate(metrics, 1)]
    settings = {"run": {"seed": seed}, "optim": {"learning_rate": 1e-5}} if settings is None else settings
    empty = {"summary": None, "starts": [], "rollout_steps": {}, "evaluation_files": {}, "checkpoints": {}}
    empty |= {"absent": [], "damaged": []}
    return RunHistory(path=Path(name), settings=settings, metrics=lines, **(empty | parts))


def rewards(values, *, tokens=100, seconds=2.0, **more):
    """A line for each reward: of one update, so many tokens and seconds."""
    rest = {"seconds/step": seconds, "tokens_per_second": tokens / seconds, "updates": 1, "updates_skipped": 0} | more
    return [{"reward/mean": value} | rest for value in values]
