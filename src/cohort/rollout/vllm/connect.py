"""The vLLM servers of the settings, checked before the model is loaded."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cohort.config import VLLMConfig
from cohort.errors import ConfigError, EngineError, PolicyMismatchError
from cohort.policy import Policy, context_length
from cohort.rollout.vllm.plugin import start_command
from cohort.rollout.vllm.server import GENERATE, Server, ServerError

OLDEST = (0, 32)
"""The first version of vLLM whose answers name the weights that they come from."""
NO_TOKEN = 2**31 - 1
"""A token id that no model has."""


def servers_of(settings: VLLMConfig) -> list[Server]:
    """The servers of the settings. Nothing is sent to them.

    Raises:
        ConfigError: there is none, or an address is malformed, public or given twice.
    """
    if not settings.url:
        raise ConfigError(
            "rollout.engine is 'vllm': set vllm.url to the address of a server, such as 'http://127.0.0.1:8000', "
            f"started with: {start_command()}"
        )
    servers = [Server(url) for url in settings.url]
    if len({server.url for server in servers}) < len(servers):
        raise ConfigError(f"vllm.url names a server twice: {', '.join(server.url for server in servers)}")
    for server in servers:
        server.check_private()
    return servers


def check_servers(
    servers: Sequence[Server],
    settings: VLLMConfig,
    vocab_size: int,
    longest: int,
    announce: Callable[[str], object] | None = None,
) -> int:
    """Wait for servers, and check that each can be used.

    Args:
        servers: of ``servers_of``.
        settings: how long to wait.
        vocab_size: tokens of the policy.
        longest: tokens of the longest prompt with its completion.
        announce: is told when servers have to be waited for.

    Returns:
        the tokens of the longest text that all servers take.

    Raises:
        EngineError: a server does not answer.
        ConfigError: a server lacks a route, is too old, or serves another model.
    """
    _wait(servers, settings.startup_timeout, announce)
    lengths = []
    for server in servers:
        try:
            _check_version(server)
            _check_routes(server)
            lengths.append(_check_length(server, longest))
            _check_vocabulary(server, vocab_size)
            _check_logps(server, vocab_size)
        except ServerError as error:
            raise EngineError(f"{error}. A server is expected that was started with: {start_command()}") from None
    return min(lengths)


def _wait(servers: Sequence[Server], seconds: float, announce: Callable[[str], object] | None) -> None:
    deadline, told = time.monotonic() + seconds, False
    for server in servers:
        while True:
            try:
                server.get("/health", timeout=5.0)
                break
            except ServerError as error:
                if time.monotonic() >= deadline:
                    raise EngineError(
                        f"no vLLM server at {server.url} within {seconds:g} s ({error.reason}): correct vllm.url, "
                        f"raise vllm.startup_timeout, or start it with: {start_command()}"
                    ) from None
                if announce and not told:
                    announce(f"waiting for the vLLM server at {server.url} ({error.reason})")
                told = True
                time.sleep(0.5)


def _check_version(server: Server) -> None:
    found = server.text("/version", "version")
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers and OLDEST > (int(numbers[1]), int(numbers[2])) > (0, 1):  # 0.1.dev: built from source
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"{server.url} runs vLLM {found}: {oldest} or newer is needed")


def _check_routes(server: Server) -> None:
    """The routes for weights and for tokens, each of which has to be switched on when the server is started."""
    try:
        server.weights_version()
    except ServerError as error:
        if error.status == 404:
            raise ConfigError(
                f"{server.url} has no routes for weights: set VLLM_SERVER_DEV_MODE=1 in its environment. Whoever "
                "reaches these routes controls the server, so let it listen on a private address"
            ) from None
        raise
    paused = server.get("/is_paused")
    if isinstance(paused, dict) and paused.get("is_paused"):  # by a run that was killed while it sent weights
        server.post("/resume")
    try:
        server.post(GENERATE, {})
    except ServerError as error:
        if error.status == 404:
            raise ConfigError(f"{server.url} has no route {GENERATE}: start it with --enable-scale-out") from None
        if error.is_failure:
            raise


def _check_length(server: Server, longest: int) -> int:
    try:
        length = int(server.get("/v1/models")["data"][0]["max_model_len"])
    except (TypeError, KeyError, IndexError):
        raise ServerError(server.url, "/v1/models", "expected a model with its max_model_len") from None
    if length < longest:
        raise ConfigError(
            f"{server.url} serves at most {length} tokens, and the longest prompt with its completion has {longest}: "
            f"start it with --max-model-len {longest} or more"
        )
    return length


def _check_vocabulary(server: Server, vocab_size: int) -> None:
    # vLLM 0.32 does not check the token ids of a prompt, and dies of unknown ones. It checks those of a bias, and its
    # answer says how many there are.
    answer = "it accepted an unknown token id"
    try:
        server.post(GENERATE, _continuation([0], 1, logprobs=0, logit_bias={str(NO_TOKEN): 0.0}))
    except ServerError as error:
        if error.is_failure:
            raise
        answer = error.reason
    size = re.search(r"[Vv]ocabulary size: (\d+)", answer)
    if size is None:
        raise ServerError(server.url, GENERATE, f"cannot tell how many tokens the model has: {answer}")
    if int(size[1]) != vocab_size:
        raise ConfigError(
            f"{server.url} serves a model with {size[1]} tokens, and the policy has {vocab_size}: start it with the "
            "policy's model"
        )


def _check_logps(server: Server, vocab_size: int) -> None:
    """Draw one token from the likeliest one: its log-prob is 0 under the distribution that it was drawn from.

    After some texts the two likeliest tokens can be equally likely, so a few are tried.
    """
    for divisor in (2, 3, 5, 7):
        answer = server.post(GENERATE, _continuation([vocab_size // divisor], 1, logprobs=0, top_k=1))
        try:
            (choice,) = answer["choices"]
            spans = choice["weight_versions"]
            logp = abs(choice["logprobs"]["content"][0]["logprob"])
        except (TypeError, KeyError, ValueError, IndexError):
            raise ServerError(server.url, GENERATE, f"unexpected answer {str(answer)[:200]}") from None
        if not spans:
            raise ConfigError(f"{server.url} does not say which weights an answer comes from: use vLLM 0.32 or newer")
        if logp < 1e-3:
            return
    raise ConfigError(
        f"{server.url} reports log-probs of another distribution than the one that it draws from: start it with "
        "--logprobs-mode processed_logprobs"
    )


def _continuation(token_ids: Sequence[int], max_tokens: int, **parameters: Any) -> dict[str, Any]:
    """The body of a request to continue a text."""
    settings = {"max_tokens": max_tokens, "temperature": 1.0, "seed": 0, "ignore_eos": True, "detokenize": False}
    return {"token_ids": token_ids, "sampling_params": {**settings, **parameters}}


# ----------------------------------------
# A fixed text scored by servers and trainer: are they the same function?
#
# An update that goes wrong on the server is reported as a success in more than one version of vLLM.


THRESHOLDS = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Mean gap in nats above which two engines do not compute the same function, by the coarser of their dtypes. Kernels
that add in another order differ by about 1e-5 in float32, 0.003 in float16 and 0.03 in bfloat16, whose mantissas have
24, 11 and 8 bits; wrong weights, positions or temperatures by 0.5 to 15."""
SCORED_TOKENS = 160
"""More than the 128 tokens of a block of vLLM's prefix cache on CPUs, so that a stale one shows."""
DRAWN_TOKENS = 8


class ServerProbe:
    """Compares a server with a policy on a fixed text, whose tokens are spread over the vocabulary.

    The server scores the text as a prompt, which reads no cached prefix, and then continues it, which does.

    Args:
        policy: the trainer's.
        threshold: mean gap in nats above which a run stops. None: by the dtypes, see ``THRESHOLDS``.
        dtypes: of the servers' weights.
    """

    def __init__(self, policy: Policy, threshold: float | None, dtypes: Mapping[Server, torch.dtype]) -> None:
        self.policy = policy
        self._threshold = threshold
        self._dtypes = dtypes
        context = context_length(policy.model.config) or SCORED_TOKENS + DRAWN_TOKENS
        length = max(2, min(SCORED_TOKENS, context - DRAWN_TOKENS))
        generator = torch.Generator().manual_seed(0)
        self.token_ids: list[int] = torch.randint(policy.vocab_size, (length,), generator=generator).tolist()
        """The text."""

    def __call__(self, server: Server) -> dict[str, float]:
        """Score the text on a server and with the policy; return the mean and the largest gap in nats.

        Raises:
            PolicyMismatchError: the mean gap is above the threshold.
        """
        text_N, drawn, drawn_N = self._scored(server)
        with torch.no_grad():
            text = [self.token_ids[:1]], [self.token_ids[1:] + drawn]
            ours_N = self.policy.logps(*text, temperature=1.0).logps_N.cpu()
        theirs_N = torch.tensor(text_N + drawn_N, dtype=torch.float64)
        gaps_N = (theirs_N - ours_N).abs()
        parts = gaps_N[: len(text_N)].mean(), gaps_N[len(text_N) :].mean()
        mean, largest = float(torch.stack(parts).max()), float(gaps_N.max())  # NaN if one of them is
        if not mean <= (threshold := self.threshold(server)):  # NaN is not
            raise PolicyMismatchError(
                f"{server.url} does not compute the policy: its log-probabilities of a fixed text are {mean:.3g} nats "
                f"from the trainer's on average and {largest:.3g} at most, with the same weights (limit "
                f"{threshold:g}). Start the server with the policy's model and without --quantization; if it is so and "
                "the gap is small, set vllm.probe_threshold above it; else vLLM does not load this architecture's "
                "weights: use rollout.engine 'local'"
            )
        return {"vllm/probe_gap": mean, "vllm/probe_gap_max": largest}

    def threshold(self, server: Server) -> float:
        """The mean gap in nats at which the run stops."""
        if self._threshold is not None:
            return self._threshold
        return max(THRESHOLDS[self.policy.precision.compute], THRESHOLDS.get(self._dtypes[server], 0.0))

    def _scored(self, server: Server) -> tuple[list[float], list[int], list[float]]:
        """What a server says of the text: the log-probs of its tokens from the second on, a continuation, and its
        log-probs."""
        scored = server.post(GENERATE, _continuation(self.token_ids, 1, prompt_logprobs=0))
        drawn = server.post(GENERATE, _continuation(self.token_ids, DRAWN_TOKENS, logprobs=0))
        try:
            text_N = [
                float(entry[str(token)]["logprob"])
                for token, entry in zip(self.token_ids[1:], scored["prompt_logprobs"][1:], strict=True)
            ]
            content = drawn["choices"][0]["logprobs"]["content"]
            return text_N, [int(one["token_id"]) for one in content], [float(one["logprob"]) for one in content]
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise ServerError(server.url, GENERATE, f"unexpected answer to the probe ({error!r})") from None
