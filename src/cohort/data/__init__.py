"""Data sets, rendered prompts, and their order."""

from cohort.data.named import evaluation_rows, set_name
from cohort.data.order import Place, PromptStream
from cohort.data.prompts import PromptSet
from cohort.data.source import Row, check_rows, first_rows, load_rows

__all__ = [
    "Place",
    "PromptSet",
    "PromptStream",
    "Row",
    "check_rows",
    "evaluation_rows",
    "first_rows",
    "load_rows",
    "set_name",
]
