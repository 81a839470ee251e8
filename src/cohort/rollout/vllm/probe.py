"""A fixed text scored by servers and trainer: are they the same function?

An update that goes wrong on the server is reported as a success in more than one version of vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cohort.errors import PolicyMismatchError
from cohort.policy import Policy, context_length
from cohort.rollout.vllm.server import Server, ServerError

GENERATE = "/inference/v1/generate"
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
        ours_N = self._logps(self.token_ids + drawn)
        theirs_N = torch.tensor(text_N + drawn_N, dtype=torch.float64)
        gaps_N = (theirs_N - ours_N).abs()
        parts = gaps_N[: len(text_N)].mean(), gaps_N[len(text_N) :].mean()
        mean, largest = float(torch.stack(parts).max()), float(gaps_N.max())  # NaN if one of them is
        self._check(server, mean, largest)
        return {"vllm/probe_gap": mean, "vllm/probe_gap_max": largest}

    def threshold(self, server: Server) -> float:
        """The mean gap in nats at which the run stops."""
        if self._threshold is not None:
            return self._threshold
        return max(THRESHOLDS[self.policy.precision.compute], THRESHOLDS.get(self._dtypes[server], 0.0))

    def _check(self, server: Server, mean: float, largest: float) -> None:
        threshold = self.threshold(server)
        if mean <= threshold:  # NaN is not
            return
        raise PolicyMismatchError(
            f"{server.url} does not compute the policy: its log-probabilities of a fixed text are {mean:.3g} nats from "
            f"the trainer's on average and {largest:.3g} at most, with the same weights (limit {threshold:g}). Start "
            "the server with the policy's model and without --quantization; if it is so and the gap is small, set "
            "vllm.probe_threshold above it; else vLLM does not load this architecture's weights: use rollout.engine "
            "'local'"
        )

    def _scored(self, server: Server) -> tuple[list[float], list[int], list[float]]:
        """What a server says of the text: the log-probs of its tokens from the second on, a continuation, and its
        log-probs."""
        settings = {"temperature": 1.0, "seed": 0, "ignore_eos": True, "detokenize": False}
        scored = server.post(
            GENERATE,
            {"token_ids": self.token_ids, "sampling_params": {**settings, "max_tokens": 1, "prompt_logprobs": 0}},
        )
        drawn = server.post(
            GENERATE,
            {"token_ids": self.token_ids, "sampling_params": {**settings, "max_tokens": DRAWN_TOKENS, "logprobs": 0}},
        )
        try:
            text_N = [
                float(entry[str(token)]["logprob"])
                for token, entry in zip(self.token_ids[1:], scored["prompt_logprobs"][1:], strict=True)
            ]
            content = drawn["choices"][0]["logprobs"]["content"]
            return text_N, [int(one["token_id"]) for one in content], [float(one["logprob"]) for one in content]
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise ServerError(server.url, GENERATE, f"unexpected answer to the probe ({error!r})") from None

    @torch.no_grad()
    def _logps(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The policy's log-probs of all tokens but the first."""
        return self.policy.logps([token_ids[:1]], [token_ids[1:]], temperature=1.0).logps_N.cpu()
