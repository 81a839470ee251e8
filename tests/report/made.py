"""Runs that never ran."""

from cohort.runs.reader import Run


class Made(Run):
    """A run of made-up rows and files."""

    settings = summary = starts = rollouts = evaluations = checkpoints = absent = damaged = None

    def __init__(self, name, rows, parts):
        super().__init__(name)
        self._rows, self._identity = {row["step"]: row for row in rows}, (0, 0)
        vars(self).update(parts)


def history(metrics, settings=None, *, seed=0, name="run", **parts):
    """A run of made-up lines; ``metrics`` without ``step`` get their place in the list, from 1."""
    lines = [{"step": number, **line} for number, line in enumerate(metrics, 1)]
    settings = {"run": {"seed": seed}, "optim": {"learning_rate": 1e-5}} if settings is None else settings
    empty = {"summary": None, "starts": [], "rollouts": {}, "evaluations": {}, "checkpoints": {}}
    empty |= {"absent": [], "damaged": []}
    return Made(name, lines, {"settings": settings} | empty | parts)


def rewards(values, *, tokens=100, seconds=2.0, **more):
    """A line for each reward: of one update, so many tokens and seconds."""
    rest = {"seconds/step": seconds, "tokens_per_second": tokens / seconds, "updates": 1, "updates_skipped": 0} | more
    return [{"reward/mean": value} | rest for value in values]
