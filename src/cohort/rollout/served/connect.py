"""The servers of the settings, checked before the model is loaded, and the probe that compares what samples with the
policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cohort.config import GRPOConfig, ServerConfig
from cohort.errors import ConfigError, EngineError, PolicyMismatchError
from cohort.policy import Policy, context_length
from cohort.rollout.served.http import Client
from cohort.rollout.served.protocol import Description, Server, ServerError, check_support
from cohort.rollout.served.sglang import SGLangServer
from cohort.rollout.served.vllm import VLLMServer
from cohort.rollout.settings import Sampling

KINDS: dict[str, type[Any]] = {"vllm": VLLMServer, "sglang": SGLangServer}


def servers_of(settings: ServerConfig) -> list[Any]:
    """The servers of the settings. Nothing is sent to them.

    Raises:
        ConfigError: there is none, or an address is malformed, public or given twice.
    """
    kind = KINDS[settings.kind]
    if not settings.url:
        raise ConfigError(
            "rollout.engine is 'server': set server.url to the address of one, such as 'http://127.0.0.1:8000', "
            f"started with: {kind.command()}"
        )
    servers: list[Client] = [kind(url) for url in settings.url]
    if len({server.url for server in servers}) < len(servers):
        raise ConfigError(f"server.url names a server twice: {', '.join(server.url for server in servers)}")
    for server in servers:
        server.check_private()
    return servers


def check_servers(
    servers: Sequence[Server],
    config: GRPOConfig,
    vocab_size: int,
    longest: int,
    announce: Callable[[str], object] | None = None,
) -> dict[Server, Description]:
    """Wait for servers, and check that each can be used.

    Args:
        servers: of ``servers_of``.
        config: the settings.
        vocab_size: tokens of the policy.
        longest: tokens of the longest prompt with its completion.
        announce: is told when servers have to be waited for.

    Returns:
        what each says of itself.

    Raises:
        EngineError: a server does not answer.
        ConfigError: a server lacks what the settings need, is too old, or serves another model.
    """
    command = servers[0].command()
    try:
        found = _wait(servers, config.server.startup_timeout, announce)
        for server, one in found.items():
            server.check(vocab_size)
            check_description(server, one, config, vocab_size, longest)
    except ServerError as error:
        raise EngineError(f"{error}. A server is expected that was started with: {command}") from None
    return found


def _wait(
    servers: Sequence[Server], seconds: float, announce: Callable[[str], object] | None
) -> dict[Server, Description]:
    deadline, told, found = time.monotonic() + seconds, False, {}
    for server in servers:
        while server not in found:
            try:
                found[server] = server.describe()
            except ServerError as error:
                if error.status is not None:
                    raise
                if time.monotonic() >= deadline:
                    raise EngineError(
                        f"no server at {server.url} within {seconds:g} s ({error.reason}): correct server.url, raise "
                        f"server.startup_timeout, or start it with: {server.command()}"
                    ) from None
                if announce and not told:
                    announce(f"waiting for the server at {server.url} ({error.reason})")
                told = True
                time.sleep(0.5)
    return found


def check_description(server: Server, found: Description, config: GRPOConfig, vocab_size: int, longest: int) -> None:
    """Check that a server suits the settings.

    Raises:
        ConfigError: it does not; says how to start it.
    """
    if found.context < longest:
        raise ConfigError(
            f"{server.url} serves at most {found.context} tokens, and the longest prompt with its completion has "
            f"{longest}: start it with {server.command('MODEL', server.options['context'], str(longest))} or more"
        )
    if config.rollout.replay_routing and not found.routes:
        raise ConfigError(
            f"rollout.replay_routing: {server.url} does not return the experts of each token: "
            f"{server.options['routes']}"
        )
    if found.quantization is not None:
        raise ConfigError(
            f"{server.url} quantizes the weights ({found.quantization}): start it without, they are sent in full"
        )
    if config.rollout.sleep and not found.can_sleep:
        raise ConfigError(f"rollout.sleep: {server.url} cannot sleep: {server.options['sleep']}")
    if (config.rollout.stop or config.environment.wanted) and not found.has_tokenizer:
        raise ConfigError(
            f"{server.url} has no tokenizer to look for stop strings with: leave out --skip-tokenizer-init"
        )
    if refusal := server.refusal(Sampling.of(config.rollout), vocab_size):
        raise ConfigError(f"{server.url}: {refusal}")
    check_support(Sampling.of(config.rollout), vocab_size, found, server.url, "start it with --return-sampling-mask")


# ----------------------------------------
# A fixed text scored by what samples and by the trainer: are they the same function?
#
# An update of the weights that goes wrong is reported as a success in more than one version of vLLM.


THRESHOLDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Mean gap in nats above which two engines do not compute the same function, by the coarser of their dtypes. Kernels
that add in another order differ by about 1e-5 in float32, 0.003 in float16 and 0.03 in bfloat16, whose mantissas have
24, 11 and 8 bits; wrong weights, positions or temperatures by 0.5 to 15."""
SCORED_TOKENS = 160
"""More than the 128 tokens of a block of vLLM's prefix cache on CPUs, so that a stale one shows."""
DRAWN_TOKENS = 8


class Scorer(Protocol):
    """What the probe asks: a server, or vLLM in this process."""

    def score(self, token_ids: Sequence[int], count: int) -> tuple[list[float], list[int], list[float]]:
        """See ``Server``."""


class Probe:
    """Compares what samples with a policy on a fixed text, whose tokens are spread over the vocabulary.

    The text is scored as a prompt, which reads no cached prefix, and then continued, which does.

    Args:
        policy: the trainer's.
        threshold: mean gap in nats above which a run stops. None: by the dtypes, see ``THRESHOLDS``.
    """

    def __init__(self, policy: Policy, threshold: float | None = None) -> None:
        self.policy = policy
        self._threshold = threshold
        context = context_length(policy.model.config) or SCORED_TOKENS + DRAWN_TOKENS
        length = max(2, min(SCORED_TOKENS, context - DRAWN_TOKENS))
        generator = torch.Generator().manual_seed(0)
        self.token_ids: list[int] = torch.randint(policy.vocab_size, (length,), generator=generator).tolist()
        """The text."""

    def __call__(self, scorer: Scorer, name: str, found: Description) -> dict[str, float]:
        """Score the text there and with the policy; return the mean and the largest gap in nats.

        Args:
            scorer: what samples.
            name: in the error.
            found: what it says of itself: its dtype and context.

        Raises:
            PolicyMismatchError: the mean gap is above the threshold.
        """
        text = self.token_ids[: max(2, found.context - DRAWN_TOKENS) if found.context else None]
        text_N, drawn, drawn_N = scorer.score(text, DRAWN_TOKENS)
        with torch.no_grad():
            ours_N = self.policy.logps([text[:1]], [text[1:] + drawn], temperature=1.0).logps_N.cpu()
        theirs_N = torch.tensor(text_N + drawn_N, dtype=torch.float64)
        gaps_N = (theirs_N - ours_N).abs()
        parts = gaps_N[: len(text_N)].mean(), gaps_N[len(text_N) :].mean()
        mean, largest = float(torch.stack(parts).max()), float(gaps_N.max())  # NaN if one of them is
        if not mean <= (threshold := self.threshold(getattr(torch, found.dtype))):  # NaN is not
            raise PolicyMismatchError(
                f"{name} does not compute the policy: its log-probabilities of a fixed text are {mean:.3g} nats from "
                f"the trainer's on average and {largest:.3g} at most, with the same weights (limit {threshold:g}). A "
                "server is started with the policy's model and without --quantization; a model with a tied head on "
                "vLLM's CPU build needs the plugin ('cohort docs scale'); if the gap is small, as a mixture of experts "
                "has it, set rollout.probe_threshold above it; else vLLM does not load this architecture's weights: "
                "use rollout.engine 'local'"
            )
        return {"server/probe_gap": mean, "server/probe_gap_max": largest}

    def threshold(self, dtype: torch.dtype) -> float:
        """The mean gap in nats at which the run stops, with weights of ``dtype`` there."""
        if self._threshold is not None:
            return self._threshold
        return max(THRESHOLDS[self.policy.precision.compute], THRESHOLDS.get(dtype, 0.0))
