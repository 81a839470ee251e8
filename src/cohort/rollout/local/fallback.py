"""Sampling through transformers' own forward pass, for models whose layers Cohort does not run: a batch that runs until
its last row ends, or, without a usable cache, the whole text again for each token. Neither keeps rows: the scheduler
prefills the history of a continued trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from cohort.policy import Policy
from cohort.rollout.local.backend import PREFILL_TOKENS, Backend

CacheKind = Literal["padded", "other"]
PADDED_LAYERS = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",  # of a layer that reads another's keys and values
    }
)
"""Cache layers of transformers whose models keep padding on the left out of states. Others may count positions from the
first column, which shows only in texts longer than a trial's: sparse layers do, for their blocks."""


@torch.no_grad()
def cache_kind(policy: Policy) -> CacheKind | None:
    """What a model's cache holds: keys and values, windows of them, or recurrent states, which know padding; something
    else. None: the model returns no cache that its next call accepts."""
    if "past_key_values" not in policy.forward_arguments:
        return None
    with policy.compute():
        output = policy.text_logits(torch.zeros(1, 2, dtype=torch.long, device=policy.device), keep=1, use_cache=True)
    layers = getattr(getattr(output, "past_key_values", None), "layers", None)
    if not layers:
        return None
    return "padded" if {type(layer).__name__ for layer in layers} <= PADDED_LAYERS else "other"


class StaticBackend(Backend):
    """A left-padded batch with any cache of transformers. New rows start when the last row of the batch has ended.

    Args:
        policy: its model is used.
        mixed_lengths: whether prompts of different length share a batch.
    """

    refills = False

    def __init__(self, policy: Policy, *, mixed_lengths: bool) -> None:
        self.policy = policy
        self.mixed_lengths = mixed_lengths
        self.description = "transformers' cache, static batches: rows wait for the last of their batch" + (
            "" if mixed_lengths else ", in which all prompts have one length"
        )
        self.end()

    @property
    def token_bytes(self) -> int:
        """See ``Backend``. An estimate from the model's settings: attention in every layer."""
        config = self.policy.model.config.get_text_config()
        layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
        if not layers or not hidden:
            return 0  # unknown: max_batch_size alone limits the batch
        # Layers of Gemma 4 differ in width, and its config as a whole refuses to tell one.
        differ = getattr(config, "is_heterogeneous", False)
        numbers = sum(map(_cached_numbers, config.per_layer_config)) if differ else layers * _cached_numbers(config)
        return int(numbers * self.policy.precision.compute.itemsize)

    def end(self) -> None:
        """See ``Backend``."""
        self._cache: Any = None
        self._mask = torch.empty(0, dtype=torch.int64)
        self._slots: list[int] = []  # of the batch: of prompts, then of rows

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``. Called once per batch."""
        device, longest = self.policy.device, max(map(len, prompts))
        input_ids = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts], device=device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
        self._cache, self._slots = None, list(slots)
        return self._forward(input_ids, (self._mask.cumsum(-1) - 1).clamp(min=0))

    def add_rows(self, slots: Sequence[int], prompts: Sequence[int]) -> None:
        """See ``Backend``. Called once per batch."""
        self._select(prompts)
        self._slots = list(slots)

    def step(self, slots: Sequence[int], tokens_S: Tensor) -> Tensor:
        """See ``Backend``."""
        if list(slots) != self._slots:
            self._select(slots)
        positions = self._mask.sum(-1, keepdim=True)
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        return self._forward(tokens_S[:, None], positions)

    def _forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        with self.policy.compute():
            output = self.policy.text_logits(
                input_ids,
                keep=1,
                attention_mask=self._mask,
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            )
        self._cache = output.past_key_values
        logits: Tensor = output.logits[:, -1].to(self.policy.precision.master)
        return logits

    def _select(self, slots: Sequence[int]) -> None:
        rows = [self._slots.index(slot) for slot in slots]
        index = torch.tensor(rows, dtype=torch.long, device=self._mask.device)
        self._mask, self._slots = self._mask[index], list(slots)
        # Every kind of cache layer can select rows: attention, sliding window, recurrent.
        self._cache.reorder_cache(index)


def _cached_numbers(config: Any) -> int:
    """Keys and values of a token in a layer, from the layer's settings."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    return 2 * heads * int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


class RecomputeBackend(Backend):
    """No cache: each token costs a forward pass over the whole text. Correct for any causal model, and slow."""

    refills = True
    mixed_lengths = True
    description = "without a cache: every token computes the whole text again, which is slow"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.end()

    def end(self) -> None:
        """See ``Backend``."""
        self._prompts: dict[int, list[int]] = {}
        self._rows: dict[int, list[int]] = {}

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``."""
        self._prompts |= {slot: list(prompt) for slot, prompt in zip(slots, prompts, strict=True)}
        return self._next_logits(prompts)

    def add_rows(self, slots: Sequence[int], prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self._rows |= {slot: list(self._prompts[prompt]) for slot, prompt in zip(slots, prompts, strict=True)}

    def step(self, slots: Sequence[int], tokens_S: Tensor) -> Tensor:
        """See ``Backend``."""
        for slot, token in zip(slots, tokens_S.tolist(), strict=True):
            self._rows[slot].append(token)
        return self._next_logits([self._rows[slot] for slot in slots])

    def _next_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        share = max(1, PREFILL_TOKENS // max(map(len, texts)))
        parts = [self._part_logits(texts[start : start + share]) for start in range(0, len(texts), share)]
        return torch.cat(parts)

    def _part_logits(self, texts: Sequence[Sequence[int]]) -> Tensor:
        # Padded on the right: neither causal attention nor a recurrence sees later tokens.
        longest, shortest = max(map(len, texts)), min(map(len, texts))
        device = self.policy.device
        input_ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
        with self.policy.compute():
            output = self.policy.text_logits(input_ids, keep=longest - shortest + 1, use_cache=False)
        last = torch.tensor([len(text) - shortest for text in texts], device=device)
        logits: Tensor = output.logits[torch.arange(len(texts), device=device), last]
        return logits.to(self.policy.precision.master)
