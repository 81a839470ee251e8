"""The engine of the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cohort.config import GRPOConfig, RolloutConfig
from cohort.errors import ConfigError
from cohort.parallel import World
from cohort.policy import Policy, end_token_ids, resolve_device, resolve_precision
from cohort.policy.load import hidden_size
from cohort.rollout.engine import check_capabilities
from cohort.rollout.local import LocalEngine
from cohort.rollout.settings import Sampling
from cohort.rollout.vllm.connect import ServerProbe, check_servers, servers_of
from cohort.rollout.vllm.engine import LOWEST_TEMPERATURE, VLLMEngine
from cohort.rollout.vllm.own_server import OwnServer
from cohort.rollout.vllm.plugin import ServerDescription, check_sizes
from cohort.rollout.vllm.server import Server, WeightTransport
from cohort.rollout.vllm.transports import transport_of


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
        self.own: OwnServer | None = None
        """The server that this process has started."""
        self._descriptions: Mapping[Server, ServerDescription] = {}
        served = config.rollout.engine == "vllm"
        check_capabilities(VLLMEngine if served else LocalEngine, config)
        if served:
            check_settings(config, self.world.size)
            self.servers = [] if config.vllm.start else servers_of(config.vllm)

    def connect(
        self,
        model_config: Any,
        tokenizer: Any,
        longest_prompt: int,
        announce: Callable[[str], object] | None = None,
    ) -> None:
        """Start a server if the settings say so, wait for the servers and check them; nothing without servers. Called
        before the model is loaded.

        Args:
            model_config: of the model that will be loaded.
            tokenizer: of the policy.
            longest_prompt: in tokens.
            announce: is told when servers have to be waited for.

        Raises:
            ConfigError, EngineError: see ``OwnServer`` and ``check_servers``.
        """
        config = self.config
        if config.rollout.engine != "vllm":
            return
        if config.vllm.start:
            self.servers = [self._start(model_config, tokenizer, announce)]
        longest = longest_prompt + config.rollout.max_completion_length
        self.context = check_servers(self.servers, config.vllm, model_config.vocab_size, longest, announce)
        self.transport = transport_of(config.vllm, resolve_device(config.model.device), sends=self.world.is_main)
        self._descriptions = self.transport.check(self.servers)
        for server, found in self._descriptions.items():
            check_description(server, found, config, model_config.to_dict())

    def _start(self, model_config: Any, tokenizer: Any, announce: Callable[[str], object] | None) -> Server:
        """Start a server with the policy's model."""
        config, model = self.config, model_config
        if not model._name_or_path:
            raise ConfigError("vllm.start needs a model that was loaded from a folder or hub id; or set vllm.url")
        device = resolve_device(config.model.device)
        precision = resolve_precision(config.model.precision, device, hidden_size(model))
        self.own = OwnServer(
            config.vllm,
            model._name_or_path,
            tokenizer=tokenizer,
            dtype="bfloat16" if precision.compute == torch.bfloat16 else "float32",
            trust_remote_code=config.model.trust_remote_code,
        )
        self.own.wait(config.vllm.startup_timeout, announce)
        return self.own.server

    def move_log(self, folder: Path) -> None:
        """Write the log of the server that was started to a folder from now on."""
        if self.own is not None:
            self.own.move_log(folder / "vllm.log")

    def engine(self, policy: Policy, tokenizer: Any) -> LocalEngine | VLLMEngine:
        """The engine, after ``connect``."""
        if self.transport is None:
            return local_engine(policy, tokenizer, self.config.rollout, ahead=self.config.rollout.lag > 0)
        dtypes = {server: found.dtype for server, found in self._descriptions.items()}
        return VLLMEngine(
            policy,
            tokenizer,
            end_token_ids(policy.model, tokenizer),
            self.servers,
            self.transport,
            context=self.context,
            max_batch_size=self.config.rollout.max_batch_size,
            request_timeout=self.config.vllm.request_timeout,
            probe=ServerProbe(policy, self.config.vllm.probe_threshold, dtypes),
            sleeps=self.config.vllm.sleep,
            world=self.world,
        )


def check_settings(config: GRPOConfig, ranks: int) -> None:
    """Check settings that concern servers, before anything is asked of one.

    Raises:
        ConfigError: they contradict each other.
    """
    if config.vllm.start and config.vllm.url:
        raise ConfigError("vllm.start starts a server and vllm.url names running ones: set one of them")
    if config.vllm.start and ranks > 1:
        raise ConfigError(
            f"vllm.start is for one process, and there are {ranks}: start a server and set vllm.url to it"
        )
    if config.vllm.sleep and config.vllm.transport == "group" and config.vllm.start:
        raise ConfigError(
            "vllm.sleep is for a server on the trainer's own GPU, and NCCL connects no two processes on one GPU: set "
            "vllm.transport to 'files'"
        )
    temperatures = {
        "rollout.temperature": config.rollout.temperature,
        "eval.temperature_eval": config.eval.temperature_eval,
    }
    for name, value in temperatures.items():
        if value is not None and 0 < value < LOWEST_TEMPERATURE:
            raise ConfigError(f"{name} is {value:g}: vLLM would raise it to {LOWEST_TEMPERATURE}; set that or more")
    if config.model.quantization != "none":
        raise ConfigError(
            f"rollout.engine 'vllm' gets the weights with the adapters merged in, and model.quantization "
            f"{config.model.quantization!r} cannot be merged without loss: set it to 'none', or rollout.engine 'local'"
        )


def check_description(server: Server, found: ServerDescription, config: GRPOConfig, model: Mapping[str, Any]) -> None:
    """Check that a server suits the settings and the model.

    Raises:
        ConfigError: it does not; says how to start it.
    """
    check_sizes(server, found.sizes, model)
    if config.vllm.sleep and not found.can_sleep:
        raise ConfigError(f"vllm.sleep: {server.url} cannot sleep: start it with --enable-sleep-mode")
    if (config.rollout.stop or config.environment.wanted) and not found.has_tokenizer:
        raise ConfigError(
            f"{server.url} has no tokenizer to look for stop strings with: leave out --skip-tokenizer-init"
        )
