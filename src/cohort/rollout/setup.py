"""The engine of the settings."""

from __future__ import annotations

from typing import Any

from cohort.config import RolloutConfig
from cohort.policy import Policy, end_token_ids
from cohort.rollout.local import LocalEngine
from cohort.rollout.settings import Sampling


def local_engine(policy: Policy, tokenizer: Any, config: RolloutConfig, *, ahead: bool = False) -> LocalEngine:
    """The engine of the settings. Raises here, before anything is sampled, if a grammar does not compile.

    Args:
        policy: what to sample from.
        tokenizer: of the policy.
        config: the settings.
        ahead: whether it samples while the policy is trained, from a copy of the weights.
    """
    engine = LocalEngine(
        policy.snapshot() if ahead else policy,
        tokenizer,
        end_token_ids(policy.model, tokenizer),
        max_batch_size=config.max_batch_size,
        cache_tokens=config.cache_tokens,
        native_kernels=policy.native_kernels,
        trained=policy,
    )
    engine.grammar(Sampling.of(config))
    return engine
