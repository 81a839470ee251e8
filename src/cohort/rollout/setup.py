"""The engine of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cohort.config import GRPOConfig, RolloutConfig
from cohort.errors import ConfigError
from cohort.parallel import World
from cohort.policy import Policy, end_token_ids
from cohort.rollout.local import LocalEngine
from cohort.rollout.server import Server, WeightTransport
from cohort.rollout.settings import Sampling
from cohort.rollout.vllm import VLLMEngine


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


def weight_transport(config: GRPOConfig) -> WeightTransport:  # noqa: ARG001
    """The transport of the settings."""
    raise ConfigError("there is no weight transport yet")


def vllm_engine(
    policy: Policy,
    tokenizer: Any,
    config: GRPOConfig,
    servers: Sequence[Server],
    transport: WeightTransport,
    context: int,
    world: World | None = None,
) -> VLLMEngine:
    """The engine of the settings, over servers that ``check_servers`` has accepted."""
    return VLLMEngine(
        policy,
        tokenizer,
        end_token_ids(policy.model, tokenizer),
        servers,
        transport,
        context=context,
        max_batch_size=config.rollout.max_batch_size,
        request_timeout=config.vllm.request_timeout,
        world=world,
    )
