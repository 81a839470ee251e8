"""Experiment trackers: a process per tracker sends what the run folder holds. docs/trackers.md.

A tracker's library may hang, end the process, or change what the process prints, draws and computes. So none runs in
the process that trains: ``python -m cohort.report.trackers`` reads the run folder, ``Trackers`` starts and watches it.
``cohort track`` sends a run with the same code.
"""

from cohort.report.trackers.kinds import KINDS, check_installed
from cohort.report.trackers.live import Trackers
from cohort.report.trackers.send import Sent, send_run

__all__ = ["KINDS", "Sent", "Trackers", "check_installed", "send_run"]
