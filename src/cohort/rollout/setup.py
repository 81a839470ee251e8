"""The engine of the settings."""

from __future__ import annotations

from typing import Any

from cohort.config import RolloutConfig
from cohort.policy import Policy, end_token_ids
from cohort.rollout.local import LocalEngine
from cohort.rollout.settings import Sampling


def local_engine(policy: Policy, tokenizer: Any, config: RolloutConfig) -> LocalEngine:
    """The engine of the settings. Raises here, before anything is sampled, if a grammar does not compile."""
    engine = LocalEngine(
        policy,
        tokenizer,
        end_token_ids(policy.model, tokenizer),
        max_batch_size=config.max_batch_size,
        cache_tokens=config.cache_tokens,
        native_kernels=policy.native_kernels,
    )
    engine.grammar(Sampling.of(config))
    return engine
