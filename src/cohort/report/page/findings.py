"""The diagnosis on the page: its findings in words, over time, and as marks on the curves."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from cohort.report.diagnosis import Finding, Level
from cohort.report.history import RunHistory
from cohort.report.page.blocks import MAX_KEY

MAX_FINDINGS = 300
"""Findings that are shown."""
MAX_MARKED = 100
"""Metrics on whose curves a finding is marked."""


def shown(findings: Sequence[Finding]) -> list[Finding]:
    """At most ``MAX_FINDINGS``: those that stand first, the worst first, then by step."""
    return sorted(findings, key=lambda one: (not one.stands, -one.level.rank, one.begin))[:MAX_FINDINGS]


def opening_step(findings: Sequence[Finding]) -> int | None:
    """The step at which the worst alarm begins that stands at the end; None without one."""
    return next((one.begin for one in findings if one.stands and one.level is Level.ALARM), None)


def is_ill(findings: Sequence[Finding]) -> bool:
    """Whether a warning or an alarm stands at the end."""
    return any(one.stands and one.level is not Level.NOTE for one in findings)


def listed(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """The findings for the template."""
    return [
        {
            "level": str(one.level),
            "check": one.check,
            "when": _when(one),
            "found": one.found,
            "worst": f"Worst, {one.worst.level} at step {one.worst.step:,}: {one.worst.found}" if one.worst else "",
            "advice": one.advice,
        }
        for one in findings
    ]


def _when(finding: Finding) -> str:
    return f"since step {finding.begin:,}" if finding.end is None else f"steps {finding.begin:,} to {finding.end - 1:,}"


def timeline(history: RunHistory, findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as bars over the steps, a row for each check; places are in per cent of the width."""
    last = max((line["step"] for line in history.metrics), default=1)
    names = list(dict.fromkeys(one.check for one in findings))
    rows: list[dict[str, Any]] = [{"name": name.replace("_", " "), "bars": []} for name in names]
    for one in findings:
        end = last if one.end is None else one.end - 1
        start, width = 100 * (one.begin - 1) / max(1, last), 100 * (end - one.begin + 1) / max(1, last)
        bar = {"x": f"{start:.3f}%", "width": f"{max(width, 0.6):.3f}%", "level": _worst_level(one), "when": _when(one)}
        rows[names.index(one.check)]["bars"].append(bar)
    return {"rows": rows, "last": last}


def marks(history: RunHistory, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Where findings begin, and the metrics on whose curves that is marked: those that the finding is about."""
    keys = [key for key in history.keys() if len(key) <= MAX_KEY]  # noqa: SIM118
    found = []
    for one in findings:
        named = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in one.metrics)]
        mark = {"step": one.begin, "level": _worst_level(one), "check": one.check, "keys": named[:MAX_MARKED]}
        found.append(mark)
    return found


def _worst_level(finding: Finding) -> str:
    return str((finding.worst or finding).level)


def begins(findings: Sequence[Finding]) -> dict[int, str]:
    """The steps at which findings begin, and which; warnings and alarms first."""
    found: dict[int, str] = {}
    for one in sorted(findings, key=lambda one: -one.level.rank):
        found.setdefault(one.begin, f"{one.level}: {one.check.replace('_', ' ')}")
    return found
