"""The diagnosis on the page: its findings in words, over time, and as marks on the curves."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from cohort.report.diagnosis import Diagnosis, Finding, diagnose, health_line
from cohort.report.history import RunHistory

MAX_FINDINGS = 300
"""Findings that are shown."""


def found_in(history: RunHistory) -> list[Finding]:
    """The findings of a run, at most ``MAX_FINDINGS``: those that stand first, the worst first, then by step."""
    return sorted(diagnose(history), key=lambda one: (not one.stands, -one.level.rank, one.begin))[:MAX_FINDINGS]


def verdict(history: RunHistory, findings: Sequence[Finding]) -> str:
    """The health of the last step in one line; empty before the first step."""
    steps = [line for line in history.metrics if line["step"] > 0]
    compared = Diagnosis(history.settings).groups_compared
    return health_line(steps[-1], findings, groups_compared=compared) if steps else ""


def listed(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """The findings for the template."""
    return [
        {"level": str(one.level), "check": one.check, "when": _when(one), "found": one.found, "advice": one.advice}
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
        bar = {"x": f"{start:.3f}%", "width": f"{max(width, 0.6):.3f}%", "level": str(one.level), "when": _when(one)}
        rows[names.index(one.check)]["bars"].append(bar)
    return {"rows": rows, "last": last}


def marks(history: RunHistory, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Where findings begin, and the metrics on whose curves that is marked: those that the finding is about."""
    keys = history.keys()
    found = []
    for one in findings:
        named = [key for key in keys if any(fnmatchcase(key, pattern) for pattern in one.metrics)]
        found.append({"step": one.begin, "level": str(one.level), "check": one.check, "keys": named})
    return found


def begins(findings: Sequence[Finding]) -> dict[int, str]:
    """The steps at which findings begin, and which; warnings and alarms first."""
    found: dict[int, str] = {}
    for one in sorted(findings, key=lambda one: -one.level.rank):
        found.setdefault(one.begin, f"{one.level}: {one.check.replace('_', ' ')}")
    return found
