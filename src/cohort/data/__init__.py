"""Data sets, rendered prompts, and their order."""

from cohort.config import DataConfig
from cohort.data.load import Data, check_held_out, load_data, load_sets
from cohort.data.loader import DataCursor, InMemoryLoader, PromptLoader, StreamingLoader
from cohort.data.prompts import LengthLimit, PromptSet, unknown_tokens
from cohort.data.render import columns_of, filled
from cohort.data.source import Row, file_format, load_rows, read_lines


def prompt_loader(prompts: PromptSet, config: DataConfig, *, seed: int) -> PromptLoader:
    """The loader of a data set, or of streamed data whose first rows are ``prompts``."""
    return (StreamingLoader if prompts.data.streams else InMemoryLoader)(prompts, config, seed=seed)
