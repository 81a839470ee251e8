"""What an objective is: its parts as plain data, and the named rows of the table. Imports no torch."""

from cohort.presets.objective import Objective
from cohort.presets.resolve import nested, preset, setting_names
from cohort.presets.table import PRESETS, TABLE

__all__ = ["PRESETS", "TABLE", "Objective", "nested", "preset", "setting_names"]
