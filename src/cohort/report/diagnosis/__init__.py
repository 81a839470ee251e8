"""What is wrong with a run, in words, from its metrics alone. Imports no torch."""

from cohort.report.diagnosis.causes import CAUSES, why_no_gradient
from cohort.report.diagnosis.checks import NAMES, not_run
from cohort.report.diagnosis.diagnosis import Diagnosis, diagnose, worst
from cohort.report.diagnosis.finding import Finding, Level
from cohort.report.diagnosis.health import clipped_share, health_line

__all__ = [
    "CAUSES",
    "NAMES",
    "Diagnosis",
    "Finding",
    "Level",
    "clipped_share",
    "diagnose",
    "health_line",
    "not_run",
    "why_no_gradient",
    "worst",
]
