"""The local engine: samples with the trainer's own weights, in the trainer's own process.

Each prompt is computed once for its group; every completion ends on its own and then costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cohort.errors import ModelError
from cohort.policy import Policy
from cohort.rollout.engine import Sampling
from cohort.rollout.philox import Draws
from cohort.types import Completion, FinishReason, Group, Prompt

_DRAW_BLOCK = 64
"""Positions for which random numbers are made at a time."""


class LocalEngine:
    """Samples from a ``Policy`` through its transformers model and cache.

    Args:
        policy: whose weights are used; read at each call, so there is nothing to synchronise.
        tokenizer: decodes completions, for their text and for stop strings.
        end_token_ids: tokens that end a completion.
        max_batch_size: completions decoded at a time.

    Raises:
        ModelError: the model keeps no key-value cache that could be shared by a group.
    """

    def __init__(
        self, policy: Policy, tokenizer: Any, end_token_ids: Sequence[int], *, max_batch_size: int = 256
    ) -> None:
        if "past_key_values" not in policy.forward_arguments:
            raise ModelError(
                f"{type(policy.model).__name__} takes no past_key_values: the local engine samples from models with "
                "transformers' key-value cache; recurrent models are not supported yet"
            )
        self.policy = policy
        self.tokenizer = tokenizer
        self.end_token_ids = frozenset(end_token_ids)
        self.max_batch_size = max_batch_size

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Prompt], num_generations: int, sampling: Sampling, draws: Draws
    ) -> list[Group]:
        """See ``Engine.generate``."""
        # Prompts of like length share a turn, so that little is padded. A group larger than the batch is drawn in
        # several turns. Neither changes a draw.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
        per_turn = max(1, self.max_batch_size // num_generations)
        drawn: list[list[Completion]] = [[] for _ in prompts]
        with self.policy.compute():
            for start in range(0, len(order), per_turn):
                turn = order[start : start + per_turn]
                for first in range(0, num_generations, self.max_batch_size):
                    samples = range(first, min(first + self.max_batch_size, num_generations))
                    completions = iter(self._decode([prompts[i] for i in turn], samples, sampling, draws))
                    for index in turn:
                        drawn[index] += [next(completions) for _ in samples]
        return [Group(prompt, tuple(own)) for prompt, own in zip(prompts, drawn, strict=True)]

    def _decode(self, prompts: Sequence[Prompt], samples: range, sampling: Sampling, draws: Draws) -> list[Completion]:
        """The given samples of each prompt, prompt after prompt."""
        rows = [_Row(prompt.uid, sample) for prompt in prompts for sample in samples]
        active = _Active.prefill(self.policy, prompts, len(samples))
        uniforms = np.empty(0)
        for position in range(sampling.max_completion_length):
            if position % _DRAW_BLOCK == 0:
                uids = np.array([rows[i].uid for i in active.rows], np.uint64)
                numbers = np.array([rows[i].sample for i in active.rows], np.uint64)
                uniforms = draws.uniforms(uids, numbers, position, _DRAW_BLOCK)
            draw = torch.from_numpy(uniforms[:, position % _DRAW_BLOCK].copy()).to(self.policy.device)
            tokens, logps = draw_tokens(active.logits, draw, sampling.temperature)
            unfinished = []
            for place, (index, token, logp) in enumerate(
                zip(active.rows, tokens.tolist(), logps.tolist(), strict=True)
            ):
                row = rows[index]
                row.take(token, logp)
                row.finish_reason = self._finish_reason(row.token_ids, sampling)
                if row.finish_reason is None:
                    unfinished.append(place)
            if not unfinished:
                break
            if len(unfinished) < len(active.rows):
                active.keep(unfinished)
                tokens, uniforms = tokens[unfinished], uniforms[unfinished]
            active.advance(self.policy, tokens)
        return [row.completion(self.tokenizer, self.policy.version) for row in rows]

    def _finish_reason(self, token_ids: list[int], sampling: Sampling) -> FinishReason | None:
        if token_ids[-1] in self.end_token_ids:
            return FinishReason.EOS
        if sampling.stop and self._has_stopped(token_ids, sampling.stop):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(token_ids) == sampling.max_completion_length else None

    def _has_stopped(self, token_ids: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the newest token completed a stop string. Special tokens count as their text: they may be stops."""
        # A token spells at least one byte, so a stop of n bytes stands in the last n tokens; a few more, as the first
        # tokens of a text may lose a space or be part of a character.
        longest = max(len(stop.encode()) for stop in stops)
        tail = self.tokenizer.decode(
            token_ids[-longest - 4 :], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return any(stop in tail for stop in stops)


def draw_tokens(logits_SV: Tensor, uniforms_S: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature) by inverting its cumulative distribution.

    Args:
        logits_SV: shape ``[S, V]``.
        uniforms_S: in [0, 1), float64, shape ``[S]``. Token v is drawn when u falls into its stretch of [0, 1).

    Returns:
        ``(tokens_S, logps_S)``: ids, and their log-probs under the distribution drawn from. A token of probability 0 is
        never drawn.

    >>> draw_tokens(torch.log(torch.tensor([[0.25, 0.0, 0.75]])), torch.tensor([0.25], dtype=torch.float64), 1.0)
    (tensor([2]), tensor([-0.2877]))
    """
    if logits_SV.dtype != torch.float64:
        logits_SV = logits_SV.float()
    log_probs_SV = torch.log_softmax(logits_SV / temperature, dim=-1)
    cumulative_SV = log_probs_SV.exp().cumsum(dim=-1, dtype=torch.float64)
    # The sum ends near 1, not at 1: scaled by it, no u can fall past the last token of positive probability.
    targets_S1 = (uniforms_S * cumulative_SV[:, -1])[:, None]
    tokens_S1 = torch.searchsorted(cumulative_SV, targets_S1, right=True).clamp(max=logits_SV.shape[-1] - 1)
    return tokens_S1.squeeze(-1), log_probs_SV.gather(-1, tokens_S1).squeeze(-1)


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out, spaces as they are."""
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


@dataclass(slots=True)
class _Row:
    """A completion while it is being written."""

    uid: int
    sample: int
    token_ids: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, token: int, logp: float) -> None:
        self.token_ids.append(token)
        self.logps.append(logp)

    def completion(self, tokenizer: Any, version: int) -> Completion:
        assert self.finish_reason is not None
        text = decode(tokenizer, self.token_ids)
        return Completion(tuple(self.token_ids), tuple(self.logps), self.finish_reason, text, version)


@dataclass(slots=True)
class _Active:
    """The unfinished rows' state on the device: what the next token needs."""

    rows: list[int]
    """Which completion each row of the tensors below belongs to."""
    logits: Tensor
    cache: Any
    mask: Tensor
    """1 where the cache holds a real token, 0 where it holds left padding; shape [rows, length]."""

    @classmethod
    def prefill(cls, policy: Policy, prompts: Sequence[Prompt], num_generations: int) -> _Active:
        """Compute each prompt once, then give every completion of its group a copy of the cache."""
        longest = max(len(prompt.token_ids) for prompt in prompts)
        input_ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
            mask[row, longest - len(prompt.token_ids) :] = 1
        mask = mask.to(policy.device)
        output = policy.logits(
            input_ids.to(policy.device),
            keep=1,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=True,
        )
        cache = output.past_key_values
        # Taking rows by index is what every kind of cache layer can do: attention, sliding window, recurrent.
        cache.reorder_cache(torch.arange(len(prompts), device=mask.device).repeat_interleave(num_generations))
        return cls(
            rows=list(range(len(prompts) * num_generations)),
            logits=output.logits[:, -1].repeat_interleave(num_generations, dim=0),
            cache=cache,
            mask=mask.repeat_interleave(num_generations, dim=0),
        )

    def keep(self, places: list[int]) -> None:
        """Drop the rows that are finished."""
        index = torch.tensor(places, device=self.mask.device)
        self.rows = [self.rows[place] for place in places]
        self.mask = self.mask[index]
        self.cache.reorder_cache(index)

    def advance(self, policy: Policy, tokens: Tensor) -> None:
        """One decode step: feed the drawn tokens, get the next logits."""
        positions = self.mask.sum(-1, keepdim=True)
        self.mask = torch.cat([self.mask, torch.ones_like(positions)], dim=1)
        output = policy.logits(
            tokens[:, None],
            keep=1,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits = output.logits[:, -1]
