"""``cohort doctor``: checks of a run before it starts, and the short form of them before every run.

A check is a plain function of plain values (``settings``, ``prompts``, ``answers``, ``signal``, ``agreement``,
``cost``) and returns findings. ``known`` and ``trial`` collect the values from a run; ``examine`` has the order.
"""

from cohort.doctor.examine import NAMES, check_names, examine, refused, without_data
from cohort.doctor.finding import Check, Finding, Status, summary
from cohort.doctor.known import Run, problem_lines
