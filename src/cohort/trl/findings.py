"""What the diagnosis finds in a run, printed beside transformers' log, in TRL's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]  # transformers requires it

from cohort.report.console.state import finding_text, settings_of
from cohort.report.console.tail import Tail
from cohort.report.diagnosis import Diagnosis, why_no_gradient
from cohort.runs.folder import RunFolder
from cohort.trl.translate import in_trl_terms


class Findings:
    """Prints what is new with each rollout: a finding that begins, worsens or ends, and once why an update is skipped.

    Args:
        folder: of the run, whose rollouts so far have been told of. None: prints nothing, as on other ranks.
    """

    def __init__(self, folder: RunFolder | None) -> None:
        self._diagnosis = Diagnosis(settings_of(folder.path)) if folder else None
        self._warned = False
        if self._diagnosis and folder:
            for metrics in Tail(folder.path / "metrics.jsonl").everything():
                self._diagnosis.step_or_log(metrics)

    def show(self, metrics: Mapping[str, Any]) -> None:
        """Print what a rollout's metrics tell."""
        if self._diagnosis is None:
            return
        said = [finding_text(one) for one in self._diagnosis.step_or_log(metrics)]
        if metrics["updates"] == metrics["updates_skipped"] and not self._warned:
            self._warned = True
            said.insert(0, f"step {metrics['step']}: {why_no_gradient(metrics)}")
        for text in said:
            tqdm.write(in_trl_terms(f"rollout {text.removeprefix('step ')}"))
