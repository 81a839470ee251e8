"""``cohort doctor``: checks of a run before it starts, and the short form of them before every run.

A check is a function that returns findings: of a run that has not started, or of plain values, which ``answers`` and
``trial`` measure. ``examine`` has the order.
"""

from cohort.doctor.checks import Run, problem_lines
from cohort.doctor.examine import NAMES, check_names, examine, refused, without_data
from cohort.doctor.finding import Check, Finding, Status, summary
