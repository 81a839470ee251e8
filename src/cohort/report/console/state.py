"""A run as the terminal follows it: its progress, and the diagnosis of each step in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cohort.report.console.lines import evaluation_line
from cohort.report.console.progress import RunProgress
from cohort.report.diagnosis import Diagnosis, Finding, worst
from cohort.report.files import DAMAGE, read_file, toml_table
from cohort.report.words import clean, number

QUIET = ("value_zero",)
"""Notes on what is normal at the first update of every run: reports and ``cohort diagnose`` have them."""


class RunState:
    """The progress and the diagnosis of a run, fed with the lines of its ``metrics.jsonl`` in order.

    Args:
        folder: the run folder, whose settings are read. None: the defaults.
        steps: steps of the whole run; None: unknown.
    """

    def __init__(self, folder: Path | None = None, steps: int | None = None) -> None:
        self.folder = folder
        self.settings = settings_of(folder) if folder else {}
        self.progress = RunProgress(steps=steps)
        self.is_going = True
        """Whether a process trains it, so that there is a time left."""
        self._diagnosis = Diagnosis(self.settings)

    def add(self, metrics: dict[str, Any]) -> list[str]:
        """Take a step's metrics; return what is new to say: findings that begin, worsen or end, and the evaluation."""
        progress = self.progress
        progress.add(metrics)
        said = [finding_text(one) for one in self._diagnosis.step_or_log(metrics) if one.check not in QUIET]
        if metrics["step"]:
            progress.health = self._diagnosis.health
            progress.level = worst(self._diagnosis.findings) or "note"
        if any(key.startswith("eval/") for key in metrics):
            step = metrics["step"]
            when = f"after step {step}" if step else "before training"
            said.append(clean(evaluation_line(metrics, when, success_of(self.settings))))
        return said

    @property
    def groups_compared(self) -> bool:
        """Whether a group of equal rewards teaches nothing, so that the share of dead groups says something."""
        return self._diagnosis.groups_compared

    def standing(self) -> list[str]:
        """The warnings and alarms that stand, in words."""
        return [finding_text(one) for one in self._diagnosis.standing if one.level != "note"]


def success_of(settings: dict[str, Any]) -> str:
    """What counts as correct in the evaluations of a run, from its settings; empty if they do not say.

    >>> success_of({"eval": {"success": "math", "success_threshold": 0.5}})
    'math >= 0.5'
    >>> success_of({"reward": {"functions": ["/data/rewards.py:digits(n=2)"]}})
    'digits >= 1'
    """
    chosen, functions = settings.get("eval", {}), settings.get("reward", {}).get("functions", [])
    function = chosen.get("success") or (functions[0] if len(functions) == 1 else "")
    function = function.partition("(")[0].rpartition(":")[2]  # as the metrics name it
    return f"{function} >= {number(chosen.get('success_threshold', 1.0), 'g')}" if function else ""


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings in a run folder as nested tables; empty if they cannot be read."""
    try:
        return toml_table(read_file(folder, "config.toml").decode())
    except DAMAGE:
        return {}


def finding_text(finding: Finding) -> str:
    """A finding for the terminal: when it begins or worsens, what to do; or that it has ended.

    >>> print(finding_text(Finding("all_right", "warning", 7, "every answer is right.", "Take harder prompts.")))
    step 7: warning (all_right): every answer is right.
      -> Take harder prompts.
    """
    if finding.end is not None:
        return f"step {finding.end}: ended ({finding.check})"
    text = f"step {finding.step}: {finding.level} ({finding.check}): {finding.found}"
    return clean(f"{text}\n  -> {finding.advice}" if finding.advice else text)
