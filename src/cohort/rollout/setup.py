"""The engine of the settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cohort.config import GRPOConfig, RolloutConfig
from cohort.errors import ConfigError
from cohort.parallel import World
from cohort.policy import Policy, context_length, end_token_ids, resolve_device
from cohort.rollout.engine import check_capabilities
from cohort.rollout.local.engine import LocalEngine
from cohort.rollout.served.colocated import INSTALL, NAME, Colocated, missing
from cohort.rollout.served.connect import Probe, check_servers, servers_of
from cohort.rollout.served.engine import ServedEngine
from cohort.rollout.served.fleet import Servers
from cohort.rollout.served.protocol import Description, Turns, check_support, check_temperature
from cohort.rollout.served.weights import Sender, sender_of
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


def with_engine(config: GRPOConfig, world: World | None = None, *, trains: bool = True) -> tuple[GRPOConfig, str]:
    """Settings whose ``rollout.engine`` is "local", "vllm" or "server", and what to say of the choice of "auto".

    Args:
        config: the settings.
        world: the ranks.
        trains: whether the policy is trained on what is drawn, and the log-probs have to be exact.

    Raises:
        ConfigError: the engine that they name cannot do what they ask.
    """
    ranks, engine, reason = (world or World()).size, config.rollout.engine, ""
    if engine == "auto":
        engine, reason = "local", missing()
        if resolve_device(config.model.device).type != "cuda":
            reason = "no GPU"
        elif not reason:
            try:
                check_engine("vllm", config, ranks, trains=trains)
                engine, reason = "vllm", "it is installed, and the policy is on a GPU"
            except ConfigError as error:
                reason = str(error)
    check_engine(engine, config, ranks, trains=trains)
    chosen = config.rollout.model_copy(update={"engine": engine})
    said = f"engine: {engine} ({reason}); rollout.engine is auto" if reason else ""
    return config.model_copy(update={"rollout": chosen}), said


def check_engine(engine: str, config: GRPOConfig, ranks: int, *, trains: bool = True) -> None:
    """Check settings against an engine, before anything is loaded or asked.

    Raises:
        ConfigError: it cannot do what they ask.
    """
    check_capabilities(LocalEngine if engine == "local" else ServedEngine, config, trains=trains)
    if engine == "local":
        if config.rollout.lag and config.parallel.layout == "full":
            raise ConfigError(
                "rollout.lag, with rollout.engine 'local', needs weights that parallel.layout 'full' has divided: "
                "leave it unset, or set parallel.layout to 'optimizer' or 'replicate'"
            )
        return
    temperatures = {
        "rollout.temperature": config.rollout.temperature,
        "eval.temperature_eval": config.eval.temperature_eval,
    }
    for name, value in temperatures.items():
        check_temperature(value or 0.0, name)
    if engine == "server":
        if config.model.quantization != "none":
            raise ConfigError(
                f"rollout.engine 'server' gets whole weights, and model.quantization {config.model.quantization!r} "
                "cannot be sent without loss: set it to 'none', or rollout.engine to 'vllm' or 'local'"
            )
        return
    if why := missing():
        raise ConfigError(f"rollout.engine 'vllm': {why}: {INSTALL}, or set rollout.engine to 'local'")
    size = config.vllm.tensor_parallel_size
    if ranks % size:
        raise ConfigError(f"vllm.tensor_parallel_size is {size}, and {ranks} ranks are no multiple of it")
    if size > 1 and config.environment.wanted:
        raise ConfigError(
            "with vllm.tensor_parallel_size above 1, ranks step together, and turns of environments do not end "
            "together: set it to 1, or use a server (rollout.engine = 'server')"
        )


ROOM = 4096
"""Tokens of prompt and completion for which vLLM makes room at least, as far as the model's context goes: an evaluation
may have longer prompts than those that are known at the start."""


class EngineSetup:
    """Makes the engine of a run: checks settings and servers before the model is loaded, and the engine after it.

    Args:
        config: the settings, of ``with_engine``.
        world: the ranks.
        trains: as ``with_engine`` takes it.

    Raises:
        ConfigError: an address of a server is wrong.
    """

    def __init__(self, config: GRPOConfig, world: World | None = None, *, trains: bool = True) -> None:
        self.config, self.world = config, world or World()
        self.kind = config.rollout.engine
        self._sampling = replace(Sampling.of(config.rollout), record_support=trains and config.rollout.replay_sampling)
        self._routes = trains and config.rollout.replay_routing
        self._servers: list[Any] = servers_of(config.server) if self.kind == "server" else []
        self._found: dict[Any, Description] = {}
        self._sender: Sender | None = None
        self._on_gpu = self.kind == "vllm" and resolve_device(config.model.device).type == "cuda"
        self._context = 0

    @property
    def sleeps(self) -> bool:
        """Whether the engine frees memory during updates."""
        if self.kind == "server":
            return bool(self.config.rollout.sleep)
        return self._on_gpu and self.config.rollout.sleep is not False and not self.config.rollout.lag

    def connect(
        self,
        model_config: Any,
        longest: int,
        announce: Callable[[str], object] | None = None,
    ) -> None:
        """Wait for the servers and check them; nothing without servers. Called before the model is loaded.

        Args:
            model_config: of the model that will be loaded.
            longest: tokens of the longest prompt with its completion, evaluations included.
            announce: is told when servers have to be waited for.

        Raises:
            ConfigError, EngineError: see ``check_servers``.
        """
        config = self.config
        if self.kind == "vllm":
            self._check_colocated(model_config, longest)
        if self.kind != "server":
            return
        self._found = check_servers(self._servers, config, model_config.vocab_size, longest, announce)
        self._context = min(found.context for found in self._found.values())
        self._sender = sender_of(config.server, resolve_device(config.model.device), sends=self.world.is_main)
        for server, found in self._found.items():
            self._sender.check(server, found)

    def _check_colocated(self, model_config: Any, longest: int) -> None:
        """Decide for how many tokens vLLM in this process makes room, and check that it can do what is asked."""
        given, most = self.config.vllm.max_model_len, context_length(model_config) or ROOM
        self._context = given or max(longest, min(ROOM, most))
        if self._context < longest:
            raise ConfigError(
                f"vllm.max_model_len is {given}, and the longest prompt with its completion has {longest} tokens: "
                "raise it, or leave it unset"
            )
        found = Description("", masks=self._on_gpu, candidates=-1)
        how = "on a GPU it does, and rollout.engine 'local' always does"
        check_support(self._sampling, model_config.vocab_size, found, NAME, how)
        if self._routes and not self._on_gpu:
            raise ConfigError(
                "rollout.replay_routing needs the experts of each token, which vLLM returns on a GPU only: set it to "
                "false"
            )

    def engine(self, policy: Policy, tokenizer: Any) -> LocalEngine | ServedEngine:
        """The engine, after ``connect``."""
        config, rollout = self.config, self.config.rollout
        if self.kind == "local":
            return local_engine(policy, tokenizer, rollout, ahead=rollout.lag > 0)
        probe = Probe(policy, rollout.probe_threshold)
        turns: Turns
        if self.kind == "vllm":
            turns = Colocated(
                policy,
                tokenizer,
                config.vllm,
                context=self._context,
                max_batch_size=rollout.max_batch_size,
                masks=self._sampling.record_support and self._sampling.truncates,
                routes=self._routes,
                sleeps=self.sleeps,
                trust_remote_code=config.model.trust_remote_code,
                probe=lambda one: probe(one, NAME, one.found),
                world=self.world,
            )
        else:
            assert self._sender is not None
            turns = Servers(
                policy,
                self._servers,
                self._sender,
                max_batch_size=rollout.max_batch_size,
                request_timeout=config.server.request_timeout,
                startup_timeout=config.server.startup_timeout,
                probe=lambda server: probe(server, server.url, self._found[server]),
                sleeps=self.sleeps,
                max_lora_rank=min(found.adapters for found in self._found.values()),
                world=self.world,
            )
        ends = end_token_ids(policy.model, tokenizer)
        return ServedEngine(policy, tokenizer, ends, turns, context=self._context, routes=self._routes)
