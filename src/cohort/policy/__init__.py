"""A Hugging Face causal language model as a policy."""

from cohort.policy.adapters import adapter_weights, add_adapters, has_adapters, merged, trained_adapter
from cohort.policy.compute import disable_dropout, enable_checkpointing
from cohort.policy.context import context_length, known_tokens
from cohort.policy.deferred import DeferredModel
from cohort.policy.export import named_weights
from cohort.policy.head import CompletionStates, Head, TokenLogps, chunked_terms
from cohort.policy.load import (
    Precision,
    check_loading,
    end_token_ids,
    file_of_hub,
    folder_of_revision,
    load_model,
    load_tokenizer,
    read_config,
    resolve_device,
    resolve_precision,
    without_progress_bars,
)
from cohort.policy.passes import Prefixes
from cohort.policy.policy import Policy, load_policy
from cohort.policy.router import ExpertBalance, expert_counts, experts_per_token
from cohort.policy.rows import Distribution, PackedRows, penalized_where
from cohort.policy.vision import placeholder_ids, reads_images
