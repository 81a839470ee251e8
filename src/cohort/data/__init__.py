"""Data sets, rendered prompts, and their order."""

from typing import Any

from cohort.config import DataConfig
from cohort.data.files import Row, readable
from cohort.data.lengths import LengthLimit
from cohort.data.load import Data, load_data
from cohort.data.loader import DataCursor, PromptLoader
from cohort.data.named import load_sets
from cohort.data.order import MEASURED, InMemoryLoader, curriculum_values, describe_prompts
from cohort.data.prompts import PromptSet, check_data
from cohort.data.source import load_rows
from cohort.data.streaming import StreamingLoader

__all__ = [
    "MEASURED",
    "Data",
    "DataCursor",
    "InMemoryLoader",
    "LengthLimit",
    "PromptLoader",
    "PromptSet",
    "Row",
    "StreamingLoader",
    "check_data",
    "curriculum_values",
    "describe_prompts",
    "load_data",
    "load_rows",
    "load_sets",
    "prompt_loader",
    "readable",
]


def prompt_loader(
    prompts: PromptSet, tokenizer: Any, config: DataConfig, limit: LengthLimit | None, *, seed: int
) -> PromptLoader:
    """The loader of a data set, or of streamed data whose first rows are ``prompts``."""
    if prompts.data.streams:
        return StreamingLoader(prompts, tokenizer, config, limit, seed=seed)
    return InMemoryLoader(prompts, seed=seed, config=config)
