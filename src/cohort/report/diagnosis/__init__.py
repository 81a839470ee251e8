"""What is wrong with a run, in words, from its metrics alone. Imports no torch."""

from cohort.report.diagnosis.diagnosis import NAMES, Diagnosis, diagnose, not_run, worst
from cohort.report.diagnosis.finding import Finding, Level, clipped_share, health_line
from cohort.report.diagnosis.signal import CAUSES, why_no_gradient

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
