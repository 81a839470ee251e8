"""The diagnosis of a run: named checks over the metrics of each step, and what they have found so far."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cohort.config.report import ThresholdsConfig
from cohort.report.diagnosis import lengths, movement, signal, sources
from cohort.report.diagnosis.case import Case
from cohort.report.diagnosis.facts import Facts, thresholds_of
from cohort.report.diagnosis.finding import Finding, Level, Verdict, plain

if TYPE_CHECKING:
    from cohort.report.history import RunHistory

log = logging.getLogger("cohort.diagnosis")
ENDS_AFTER = 5
"""Steps without a verdict after which a finding has ceased: it does not flicker."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    verdict: Callable[[Case], Verdict | None]
    """What it says of the metrics so far; None: nothing."""
    unless: tuple[str, ...] = ()
    """Checks whose warning or alarm explains what this one would say."""


NO_REWARD = ("failing_rewards", "unscored")
NO_SIGNAL = (*NO_REWARD, "all_right", "entropy_collapse", "identical", "all_wrong", "dead_groups")
CHECKS = (
    Check("sampling_errors", sources.sampling_errors),
    Check("nonfinite", movement.nonfinite),
    Check("failing_rewards", sources.failing_rewards),
    Check("unscored", signal.unscored, ("failing_rewards",)),
    Check("all_right", signal.all_right, NO_REWARD),
    Check("entropy_collapse", movement.entropy_collapse, NO_REWARD),
    Check("identical", signal.identical, (*NO_REWARD, "entropy_collapse")),
    Check("all_wrong", signal.all_wrong, (*NO_REWARD, "entropy_collapse")),
    Check("dead_groups", signal.dead_groups, (*NO_REWARD, "entropy_collapse")),
    Check("zero_gradient", signal.zero_gradient, NO_SIGNAL),
    Check("value_zero", signal.value_zero),
    Check("sampler_mismatch", sources.sampler_mismatch),
    Check("stale_logps", movement.stale_logps),
    Check("learning_rate_high", movement.learning_rate_high),
    Check("learning_rate_low", movement.learning_rate_low, (*NO_SIGNAL, "zero_gradient")),
    Check("kl_fast", movement.kl_fast, ("learning_rate_high",)),
    Check("clipped", movement.clipped, ("learning_rate_high",)),
    Check("few_tokens", movement.few_tokens, (*NO_SIGNAL, "zero_gradient")),
    Check("entropy_explosion", movement.entropy_explosion),
    Check("end_token", lengths.end_token),
    Check("truncation", lengths.truncation, ("end_token",)),
    Check("length_drift", lengths.length_drift),
    Check("duplicates", lengths.duplicates, ("identical", "entropy_collapse")),
    Check("repetition", lengths.repetition),
    Check("drowned_reward", sources.drowned_reward),
    Check("evaluation_falls", sources.evaluation_falls),
)
"""Every check, causes before their consequences."""
NAMES = tuple(check.name for check in CHECKS)


class Diagnosis:
    """What is wrong with a run, from its metrics alone. Feed it the lines of ``metrics.jsonl`` in order: a resumed run,
    or another process, that feeds it the same lines has the same findings. A step costs the same however long the run.

    >>> diagnosis = Diagnosis()
    >>> metrics = {"updates": 1, "reward/mean": 0.0, "groups/dead_share": 1.0, "groups/sampled": 16}
    >>> said = [finding for step in range(1, 8) for finding in diagnosis.step({"step": step, **metrics})]
    >>> [(finding.check, str(finding.level), finding.step) for finding in said]
    [('all_wrong', 'alarm', 5)]

    Args:
        settings: the run's, as its config.toml has them (``GRPOConfig.model_dump()``); {}: the defaults.
        thresholds: instead of those of the settings.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, thresholds: ThresholdsConfig | None = None) -> None:
        settings = settings or {}
        self._case = Case(Facts.of(settings), thresholds or thresholds_of(settings))
        self.findings: list[Finding] = []
        """All so far, each once and with its worst level, in the order in which they began."""
        self._open: dict[str, _Open] = {}
        self._noted: set[str] = set()
        self._has_failed = False

    @property
    def standing(self) -> list[Finding]:
        """The findings that have not ceased, the worst first."""
        return sorted((one for one in self.findings if one.stands), key=lambda one: -one.level.rank)

    def step(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """Take the metrics of a step; return the findings that begin, worsen or cease with it."""
        step = metrics.get("step")
        if type(step) is not int:
            return []
        self._case.add(metrics)
        if not self._case.last:
            return []
        said: list[Finding] = []
        ill: set[str] = set()
        for check in CHECKS:
            if check.name in self._case.facts.skip:
                continue
            verdict = None if ill.intersection(check.unless) else check.verdict(self._case)
            if verdict is not None and verdict.level is not Level.NOTE:
                ill.add(check.name)
            if (finding := self._said(check.name, verdict, step)) is not None:
                said.append(finding)
        return said

    def step_or_log(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """As ``step``, for runs and trackers, which an error in a check must not end: the first is logged, and a step
        with an error has no findings."""
        try:
            return self.step(metrics)
        except Exception:
            if not self._has_failed:
                log.exception("the diagnosis failed at step %s: findings are incomplete", metrics.get("step"))
            self._has_failed = True
            return []

    def _said(self, check: str, verdict: Verdict | None, step: int) -> Finding | None:
        """What is new of a check at this step."""
        at = self._open.get(check)
        if verdict is None:
            return self._ended(check, step) if at else None
        if at is None or verdict.level.rank > self.findings[at.index].level.rank:
            begin = self.findings[at.index].begin if at else step
            found, advice = plain(verdict.found), plain(verdict.advice)
            finding = Finding(check, verdict.level, step, found, advice, verdict.numbers, begin)
            if verdict.level is Level.NOTE:
                if check in self._noted:
                    return None
                self._noted.add(check)
            if at is None:
                at = self._open[check] = _Open(len(self.findings))
                self.findings.append(finding)
            else:
                self.findings[at.index] = finding
            at.quiet = 0
            return finding
        at.quiet = 0
        return None

    def _ended(self, check: str, step: int) -> Finding | None:
        """Count a step without a verdict; the finding ceases with the first of ``ENDS_AFTER``."""
        at = self._open[check]
        at.quiet += 1
        if at.quiet < ENDS_AFTER:
            return None
        del self._open[check]
        finding = self.findings[at.index]
        ended = self.findings[at.index] = replace(finding, end=step - ENDS_AFTER + 1)
        return None if finding.level is Level.NOTE else ended


@dataclass(slots=True)
class _Open:
    """A finding that stands."""

    index: int
    """Its place in ``Diagnosis.findings``."""
    quiet: int = 0
    """Steps in a row without a verdict."""


def diagnose(history: RunHistory, thresholds: ThresholdsConfig | None = None) -> list[Finding]:
    """All findings of a run, each once and with its worst level, in the order in which they began."""
    diagnosis = Diagnosis(history.settings, thresholds)
    for metrics in history.metrics:
        diagnosis.step(metrics)
    return diagnosis.findings


def worst(findings: Sequence[Finding]) -> Level | None:
    """The worst level of the findings that stand; None without any."""
    return max((one.level for one in findings if one.stands), key=lambda level: level.rank, default=None)
