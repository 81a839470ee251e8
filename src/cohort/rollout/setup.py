"""The engine of the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cohort.config import GRPOConfig, RolloutConfig
from cohort.errors import ConfigError
from cohort.parallel import World
from cohort.policy import Policy, end_token_ids
from cohort.rollout.connect import check_servers, servers_of
from cohort.rollout.engine import check_capabilities
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


class EngineSetup:
    """Makes the engine of a run: checks settings and servers before the model is loaded, and the engine after it.

    Args:
        config: the settings.
        world: the ranks.

    Raises:
        ConfigError: the engine cannot serve the settings, or an address of a server is wrong.
    """

    def __init__(self, config: GRPOConfig, world: World | None = None) -> None:
        self.config, self.world = config, world or World()
        self.servers: Sequence[Server] = ()
        self.transport: WeightTransport | None = None
        self.context: int | None = None
        served = config.rollout.engine == "vllm"
        check_capabilities(VLLMEngine if served else LocalEngine, config)
        if served:
            self.servers = servers_of(config.vllm)

    def connect(self, vocab_size: int, longest_prompt: int, announce: Callable[[str], object] | None = None) -> None:
        """Wait for the servers and check them; nothing without servers. Called before the model is loaded.

        Args:
            vocab_size: tokens of the model that will be loaded.
            longest_prompt: in tokens.
            announce: is told when servers have to be waited for.

        Raises:
            ConfigError, EngineError: see ``check_servers``.
        """
        if self.servers:
            longest = longest_prompt + self.config.rollout.max_completion_length
            self.context = check_servers(self.servers, self.config.vllm, vocab_size, longest, announce)
            self.transport = weight_transport(self.config)
            self.transport.check(self.servers)

    def engine(self, policy: Policy, tokenizer: Any) -> LocalEngine | VLLMEngine:
        """The engine, after ``connect``."""
        if self.transport is None:
            return local_engine(policy, tokenizer, self.config.rollout)
        return VLLMEngine(
            policy,
            tokenizer,
            end_token_ids(policy.model, tokenizer),
            self.servers,
            self.transport,
            context=self.context,
            max_batch_size=self.config.rollout.max_batch_size,
            request_timeout=self.config.vllm.request_timeout,
            world=self.world,
        )
