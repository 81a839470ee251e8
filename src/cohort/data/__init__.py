"""Data sets, rendered prompts, and their order."""

from typing import Any

from cohort.config import DataConfig
from cohort.data.files import Row, readable
from cohort.data.lengths import LengthLimit
from cohort.data.load import Data, load_data
from cohort.data.named import load_sets
from cohort.data.order import MEASURED, Place, PromptStream, Stream, curriculum_values, describe_prompts
from cohort.data.prompts import PromptSet, check_data
from cohort.data.source import load_rows
from cohort.data.stream import StreamedPrompts

__all__ = [
    "MEASURED",
    "Data",
    "LengthLimit",
    "Place",
    "PromptSet",
    "PromptStream",
    "Row",
    "Stream",
    "StreamedPrompts",
    "check_data",
    "curriculum_values",
    "describe_prompts",
    "load_data",
    "load_rows",
    "load_sets",
    "prompt_stream",
    "readable",
]


def prompt_stream(
    prompts: PromptSet, tokenizer: Any, config: DataConfig, limit: LengthLimit | None, *, seed: int
) -> Stream:
    """The stream over a data set, or over the streamed data whose first rows it holds."""
    if prompts.data.streams:
        return StreamedPrompts(prompts, tokenizer, config, limit, seed=seed)
    return PromptStream(prompts, seed=seed, config=config)
