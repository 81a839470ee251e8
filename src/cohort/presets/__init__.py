"""What an objective is: its parts as declarations, and the table of presets. Imports no torch."""

from cohort.presets.objective import Objective, choices, optional_parts, setting_names
from cohort.presets.settings import nested, with_flags
from cohort.presets.table import PRESETS, TABLE, preset
from cohort.presets.text import changes_between, describe
