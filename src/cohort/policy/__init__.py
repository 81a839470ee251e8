"""A Hugging Face causal language model as a policy."""

from cohort.policy.load import (
    Precision,
    context_length,
    end_token_ids,
    load_model,
    load_tokenizer,
    read_config,
    resolve_device,
    resolve_precision,
    without_progress_bars,
)
from cohort.policy.policy import (
    Policy,
    TokenLogps,
    chunked_logps,
    chunked_terms,
    disable_dropout,
    enable_checkpointing,
    sampled_logps,
)

__all__ = [
    "Policy",
    "Precision",
    "TokenLogps",
    "chunked_logps",
    "chunked_terms",
    "context_length",
    "disable_dropout",
    "enable_checkpointing",
    "end_token_ids",
    "load_model",
    "load_tokenizer",
    "read_config",
    "resolve_device",
    "resolve_precision",
    "sampled_logps",
    "without_progress_bars",
]
