"""The request and the answer of vLLM's route for tokens in and tokens out, ``/inference/v1/generate``."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from cohort.rollout.trajectory import Trajectory
from cohort.rollout.vllm.server import Server, ServerError
from cohort.types import FinishReason

GENERATE = "/inference/v1/generate"
UNKNOWN_LOGP = -9999.0
"""What vLLM sends for a log-prob that is NaN, minus infinity or missing."""


@dataclass(frozen=True, slots=True)
class DrawnTurn:
    """What a server drew."""

    token_ids: list[int]
    logps: list[float]
    """Under the distribution that the tokens were drawn from; of greedy draws, under the full softmax."""
    finish_reason: FinishReason


def generate_request(trajectory: Trajectory, end_token_ids: Collection[int]) -> dict[str, Any]:
    """The body of a request for the next turn of a trajectory.

    The end tokens are sent as stop tokens, and the server ignores those of its own model: what ends a turn does not
    depend on the files that the server was started with. No default of the server applies to what is sent here.
    """
    request, sampling = trajectory.request, trajectory.request.sampling
    room = trajectory.limit - len(trajectory.tokens)
    parameters: dict[str, Any] = {
        "seed": request.key.request_seed(request.prompt.uid, request.sample, trajectory.position),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": room,
        "min_tokens": min(room, max(0, sampling.min_completion_length - len(trajectory.tokens))),
        "stop_token_ids": sorted(end_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        parameters |= {"stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
    return {"token_ids": [*request.prompt.token_ids, *trajectory.tokens], "sampling_params": parameters}


def read_answer(
    server: Server, answer: Any, *, max_tokens: int, end_token_ids: Collection[int], vocab_size: int, version: str
) -> DrawnTurn:
    """The drawn tokens of an answer.

    Args:
        server: which gave it.
        answer: decoded JSON.
        max_tokens: of the request.
        end_token_ids: tokens that end a turn.
        vocab_size: tokens of the policy.
        version: the label of the weights that the tokens must come from.

    Raises:
        ServerError: the answer is malformed or incomplete, or comes from other weights.
    """

    def check(holds: bool, problem: str) -> None:
        if not holds:
            raise ServerError(server.url, GENERATE, problem)

    try:
        (choice,) = answer["choices"]
        tokens, reason, stop = choice["token_ids"], choice["finish_reason"], choice["stop_reason"]
        content, spans = choice["logprobs"]["content"], choice["weight_versions"]
        logps = [float(one["logprob"]) for one in content]
        reported = [one["token_id"] for one in content]
        versions = {span["version"] for span in spans or ()}
    except (TypeError, KeyError, ValueError):
        raise ServerError(server.url, GENERATE, f"unexpected answer {str(answer)[:200]}") from None
    check(reason in ("stop", "length"), f"the request ended with {reason!r}")
    check(all(type(token) is int and 0 <= token < vocab_size for token in tokens), "token ids outside the vocabulary")
    check(reported == tokens, "the log-probs are of other tokens than those that were drawn")
    check(0 < len(tokens) <= max_tokens, f"{len(tokens)} tokens, of at most {max_tokens}")
    check(reason == "stop" or len(tokens) == max_tokens, f"cut after {len(tokens)} of {max_tokens} tokens")
    if versions != {version}:
        found = ", ".join(map(repr, sorted(map(str, versions)))) or "without a version"
        raise WrongWeightsError(server, found, version)
    if invalid := [n for n, logp in enumerate(logps) if not math.isfinite(logp) or logp <= UNKNOWN_LOGP]:
        return DrawnTurn(tokens[: invalid[0]], logps[: invalid[0]], FinishReason.ERROR)
    if reason == "length":
        return DrawnTurn(tokens, logps, FinishReason.LENGTH)
    if isinstance(stop, str):
        return DrawnTurn(tokens, logps, FinishReason.STOP)
    check(tokens[-1] in end_token_ids, f"stopped after token {tokens[-1]}, which is no end token")
    return DrawnTurn(tokens, logps, FinishReason.EOS)


class WrongWeightsError(ServerError):
    """A server sampled with other weights than the present ones."""

    def __init__(self, server: Server, found: str, expected: str) -> None:
        super().__init__(
            server.url,
            GENERATE,
            f"it sampled with weights {found}, expected {expected!r}: was it started again, or does another run send "
            "it weights?",
        )
