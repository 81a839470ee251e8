"""``cohort generate``: prompts in; completions out, on the terminal or in a file."""

from cohort.generate.request import Request
from cohort.generate.run import generate

__all__ = ["Request", "generate"]
