"""What an objective is: its parts as plain data, and the named rows of the table. Imports no torch."""

from cohort.presets.objective import Objective
from cohort.presets.resolve import nested, optional_parts, preset, setting_names, with_flags
from cohort.presets.table import PRESETS, TABLE

__all__ = ["PRESETS", "TABLE", "Objective", "nested", "optional_parts", "preset", "setting_names", "with_flags"]
