"""The diagnosis of a run: named checks over the metrics of each step, and what they have found so far."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Self

from cohort.config.schema import ThresholdsConfig
from cohort.report.diagnosis import movement, signal, sources
from cohort.report.diagnosis.case import Case, Facts, thresholds_of
from cohort.report.diagnosis.finding import Finding, Level, Verdict, health_line
from cohort.report.words import one_line

if TYPE_CHECKING:
    from cohort.runs.reader import Run


# ----------------------------------------
# The table of checks: their names, functions, causes and metrics.


@dataclass(frozen=True, slots=True)
class Check:
    """A named check."""

    name: str
    verdict: Callable[[Case], Verdict | None]
    """What it says of the metrics so far; None: nothing."""
    metrics: tuple[str, ...]
    """The metrics that it is about, as patterns (``fnmatch``) of their keys. Without the first it has nothing to look
    at."""
    unless: tuple[str, ...] = ()
    """Checks whose warning or alarm explains what this one would say: until they are silent it is not asked."""


NO_REWARD = ("failing_rewards", "unscored")
NO_SIGNAL = (*NO_REWARD, "all_right", "entropy_collapse", "identical", "all_wrong", "dead_groups")
DEAD = ("groups/dead_share", "groups/dead_*_share", "reward/mean")
CLIPPED = ("tokens/clipped_low_share", "tokens/clipped_high_share")
CHECKS = (
    Check("sampling_errors", sources.sampling_errors, ("completions/errors",)),
    Check("nonfinite", movement.nonfinite, ("updates_nonfinite",)),
    Check("failing_rewards", sources.failing_rewards, ("rewards/*/failed", "rewards/*/timeouts")),
    Check("unscored", signal.unscored, ("reward/unscored",), ("failing_rewards",)),
    Check("reward_falls", movement.reward_falls, ("reward/mean",)),
    Check("all_right", signal.all_right, DEAD, NO_REWARD),
    Check(
        "entropy_collapse", movement.entropy_collapse, ("entropy", "groups/identical_share", "reward/mean"), NO_REWARD
    ),
    Check(
        "identical", signal.identical, ("groups/dead_share", "groups/identical_share"), (*NO_REWARD, "entropy_collapse")
    ),
    Check("all_wrong", signal.all_wrong, DEAD, (*NO_REWARD, "entropy_collapse")),
    Check("dead_groups", signal.dead_groups, DEAD, (*NO_REWARD, "entropy_collapse")),
    Check("zero_gradient", signal.zero_gradient, ("updates_skipped", "grad_norm", "tokens/active_share"), NO_SIGNAL),
    Check("value_zero", signal.value_zero, ("policy_value",)),
    Check("sampler_mismatch", sources.sampler_mismatch, ("sampler/gap", "sampler/mean_ratio", "tokens/mismatch_share")),
    Check("stale_logps", movement.stale_logps, ("update_kl", "ratio/log_min", "ratio/log_max")),
    Check("learning_rate_high", movement.learning_rate_high, ("update_kl", "learning_rate")),
    Check(
        "learning_rate_low",
        movement.learning_rate_low,
        ("update_kl", "learning_rate"),
        (*NO_SIGNAL, "zero_gradient"),
    ),
    Check("kl_fast", movement.kl_fast, ("kl/k3",), ("learning_rate_high",)),
    Check("clipped", movement.clipped, CLIPPED, ("learning_rate_high",)),
    Check("few_tokens", movement.few_tokens, ("gradient/effective_tokens",), (*NO_SIGNAL, "zero_gradient")),
    Check("entropy_explosion", movement.entropy_explosion, ("entropy", "reward/mean")),
    Check("end_token", signal.end_token, ("length/cut_share", "length/ended_share")),
    Check("truncation", signal.truncation, ("length/cut_share",), ("end_token",)),
    Check("length_drift", signal.length_drift, ("length/mean", "reward/mean")),
    Check("duplicates", signal.duplicates, ("completions/distinct_share",), ("identical", "entropy_collapse")),
    Check("repetition", signal.repetition, ("completions/repetition",)),
    Check("drowned_reward", sources.drowned_reward, ("rewards/*/within_group_std",)),
    Check("evaluation_falls", sources.evaluation_falls, ("eval/*reward/mean", "reward/mean")),
)
"""Every check, causes before their consequences."""
NAMES = tuple(check.name for check in CHECKS)


def not_run(keys: Iterable[str]) -> tuple[str, ...]:
    """The checks that have nothing to look at in a run with metrics of these keys.

    >>> "learning_rate_low" in not_run(["reward/mean", "groups/dead_share"])
    True
    """
    known = list(keys)
    return tuple(check.name for check in CHECKS if not any(fnmatchcase(key, check.metrics[0]) for key in known))


log = logging.getLogger("cohort.diagnosis")
MAX_TEXT = 2000
"""Characters of a sentence that are kept: names of reward functions come from the run folder."""
ENDS_AFTER = 5
"""Steps without a verdict, or with milder ones, after which a finding has ceased, or is milder: it does not flicker."""


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
        """All so far, each once and as it is now (``Finding.worst``: as it was), in the order in which they began."""
        self._open: dict[str, _Open] = {}
        self._noted: set[str] = set()
        self._has_failed = False

    @classmethod
    def of(cls, history: Run, thresholds: ThresholdsConfig | None = None) -> Self:
        """The diagnosis of a run so far."""
        made = cls(history.settings, thresholds)
        for metrics in history.rows:
            made.step(metrics)
        return made

    @property
    def groups_compared(self) -> bool:
        """Whether a group of equal rewards teaches nothing, so that the others are those that teach."""
        return self._case.facts.groups_compared

    @property
    def health(self) -> str:
        """The latest step in one line (``health_line``); empty before the first."""
        compared = self.groups_compared
        return health_line(self._case.now, self.findings, groups_compared=compared) if self._case.last else ""

    @property
    def standing(self) -> list[Finding]:
        """The findings that have not ceased, the worst first."""
        return sorted((one for one in self.findings if one.stands), key=lambda one: -one.level.rank)

    def step(self, metrics: Mapping[str, Any]) -> list[Finding]:
        """Take the metrics of a step; return the findings that begin, worsen, become milder or cease with it."""
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
            if ill.intersection(check.unless):
                continue  # its finding waits: the cause hides whether it still holds
            verdict = check.verdict(self._case)
            if verdict is not None and verdict.level is not Level.NOTE:
                ill.add(check.name)
            if (finding := self._said(check, verdict, step)) is not None:
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

    def _said(self, check: Check, verdict: Verdict | None, step: int) -> Finding | None:
        """What is new of a check at this step."""
        at = self._open.get(check.name)
        if verdict is None:
            return self._ended(check.name, step) if at else None
        finding = _finding(check, verdict, step)
        if at is None:
            if verdict.level is Level.NOTE and check.name in self._noted:
                return None
            self._open[check.name] = _Open(len(self.findings))
            self.findings.append(finding)
        else:
            at.quiet = 0
            before = self.findings[at.index]
            at.milder = at.milder + 1 if finding.level.rank < before.level.rank else 0
            if 0 < at.milder < ENDS_AFTER:
                return None
            at.milder = 0
            self.findings[at.index] = finding = _next(before, finding)
            if finding.level is before.level:
                return None
        if finding.level is Level.NOTE:
            self._noted.add(check.name)
        return finding

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
    milder: int = 0
    """Steps in a row with a milder one."""


def _finding(check: Check, verdict: Verdict, step: int) -> Finding:
    found, advice = one_line(verdict.found[:MAX_TEXT]), one_line(verdict.advice[:MAX_TEXT])
    return Finding(check.name, verdict.level, step, found, advice, verdict.numbers, step, metrics=check.metrics)


def _next(before: Finding, now: Finding) -> Finding:
    """A finding that stands, with the words of now."""
    worst = before.worst or before
    return replace(
        now,
        step=before.step if now.level is before.level else now.step,
        begin=before.begin,
        worst=replace(worst, worst=None) if worst.level.rank > now.level.rank else None,
    )


def diagnose(history: Run, thresholds: ThresholdsConfig | None = None) -> list[Finding]:
    """All findings of a run, each once and as it is at the end, in the order in which they began."""
    return Diagnosis.of(history, thresholds).findings


def worst(findings: Sequence[Finding]) -> Level | None:
    """The worst level of the findings that stand; None without any."""
    return max((one.level for one in findings if one.stands), key=lambda level: level.rank, default=None)
