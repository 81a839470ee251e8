"""Data sets, rendered prompts, and their order."""

from cohort.config import DataConfig
from cohort.data.held_out import check_held_out
from cohort.data.load import Data, load_data, load_sets
from cohort.data.loader import DataCursor, PromptLoader
from cohort.data.order import InMemoryLoader
from cohort.data.prompts import LengthLimit, PromptSet, unknown_tokens
from cohort.data.render import columns_of, filled
from cohort.data.rows import Row
from cohort.data.source import file_format, load_rows, read_lines
from cohort.data.streaming import StreamingLoader


def prompt_loader(prompts: PromptSet, config: DataConfig, *, seed: int) -> PromptLoader:
    """The loader of a data set, or of streamed data whose first rows are ``prompts``."""
    return (StreamingLoader if prompts.data.streams else InMemoryLoader)(prompts, config, seed=seed)
