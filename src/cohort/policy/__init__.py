"""A Hugging Face causal language model as a policy."""

from cohort.policy.adapters import adapter_weights, add_adapters, has_adapters, merged, trained_adapter
from cohort.policy.compute import disable_dropout, enable_checkpointing
from cohort.policy.experts import ExpertBalance, expert_counts, experts_per_token
from cohort.policy.head import CompletionStates, Head, TokenLogps, chunked_terms
from cohort.policy.load import (
    DeferredModel,
    Precision,
    check_loading,
    context_length,
    end_token_ids,
    file_of_hub,
    folder_of_revision,
    known_tokens,
    load_model,
    load_tokenizer,
    placeholder_ids,
    read_config,
    reads_images,
    resolve_device,
    resolve_precision,
    without_progress_bars,
)
from cohort.policy.passes import Prefixes
from cohort.policy.policy import Policy, load_policy, named_weights
from cohort.policy.rows import Distribution, PackedRows, penalized_where
