"""Sampling through transformers' own forward pass, for models that the lean path does not support.

Three backends, from the best to the one that always works: rows join and leave a running batch (caches of keys and
values alone), a batch runs until its last row ends (any other cache), each token computes the whole text again (no
usable cache). The first one parks rows; for the others the scheduler prefills the history of a continued trajectory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from cohort.policy import Policy
from cohort.rollout.backend import PREFILL_TOKENS, Backend
from cohort.rollout.capacity import order_after_removal

CacheKind = Literal["attention", "padded", "other"]
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
    """What a model's cache holds: keys and values of all tokens; also windows of them, or recurrent states, which
    know padding; something else. None: the model returns no cache that its next call accepts."""
    if "past_key_values" not in policy.forward_arguments:
        return None
    with policy.compute():
        output = policy.text_logits(torch.zeros(1, 2, dtype=torch.long, device=policy.device), keep=1, use_cache=True)
    layers = getattr(getattr(output, "past_key_values", None), "layers", None)
    if not layers:
        return None
    kinds = {type(layer).__name__ for layer in layers}
    if kinds == {"DynamicLayer"}:
        return "attention"
    return "padded" if kinds <= PADDED_LAYERS else "other"


@contextlib.contextmanager
def limited_time_steps(model: nn.Module) -> Iterator[None]:
    """Limit the time steps of Mamba layers inside the block, before their softplus. Cached decoding of transformers
    leaves out their limits (Nemotron-H, Zamba 2), which passes over several tokens respect."""
    limited: list[Any] = [module for module in model.modules() if _time_limits(module) is not None]
    hooks = [module.in_proj.register_forward_hook(partial(_limit, module)) for module in limited]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _time_limits(module: nn.Module) -> tuple[float, float] | None:
    limits = getattr(module, "time_step_limit", None)
    if limits is None or not hasattr(module, "dt_bias") or not hasattr(module, "in_proj"):
        return None
    least, most = map(float, limits)
    return (least, most) if least > 0 or math.isfinite(most) else None


def _limit(mixer: Any, _module: nn.Module, _given: Any, projected: Tensor) -> Tensor:
    """The time steps are the last columns of the projection."""
    bias = mixer.dt_bias
    limits = (bias.new_tensor(limit) for limit in _time_limits(mixer) or (0.0, math.inf))
    least, most = ((limit + torch.log(-torch.expm1(-limit)) - bias).to(projected.dtype) for limit in limits)
    steps = projected[..., -len(bias) :].clamp(least, most)
    return torch.cat([projected[..., : -len(bias)], steps], dim=-1)


class _CachedBackend(Backend):
    """Base of the two backends with a cache: a left-padded batch of rows."""

    mixed_lengths = True
    token_multiple = 1

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._cache: Any = None
        self._mask = torch.empty(0, dtype=torch.int64)

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
        self._cache = None
        self._mask = torch.empty(0, dtype=torch.int64)

    def _forward(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Any:
        with self.policy.compute(), limited_time_steps(self.policy.model):
            return self.policy.text_logits(
                input_ids,
                keep=1,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Any, Tensor]:
        """Logits, cache and mask of left-padded prompts."""
        device = self.policy.device
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        output = self._forward(input_ids, mask, (mask.cumsum(-1) - 1).clamp(min=0), None)
        return output.logits[:, -1].to(self.policy.precision.master), output.past_key_values, mask

    def step(self, tokens_S: Tensor) -> Tensor:
        """See ``Backend``."""
        positions = self._mask.sum(-1, keepdim=True)
        self._mask = functional.pad(self._mask, (0, 1), value=1)
        output = self._forward(tokens_S[:, None], self._mask, positions, self._cache)
        logits: Tensor = output.logits[:, -1].to(self.policy.precision.master)
        return logits

    def _select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, dtype=torch.long, device=self._mask.device)
        self._mask = self._mask[index]
        # Every kind of cache layer can select rows: attention, sliding window, recurrent.
        self._cache.reorder_cache(index)


class StaticBackend(_CachedBackend):
    """Any cache of transformers. New rows start when the last row of the batch has ended.

    Args:
        policy: its model is used.
        mixed_lengths: whether prompts of different length share a batch, padded on the left.
    """

    refills = False

    def __init__(self, policy: Policy, *, mixed_lengths: bool) -> None:
        super().__init__(policy)
        self.mixed_lengths = mixed_lengths
        self.description = "transformers' cache, static batches: rows wait for the last of their batch" + (
            "" if mixed_lengths else ", in which all prompts have one length"
        )

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``. Called once per batch."""
        logits, self._cache, self._mask = self._prefill(prompts)
        return logits

    def add_rows(self, prompts: Sequence[int]) -> None:
        """See ``Backend``. Called once per batch."""
        self._select(prompts)

    def remove_rows(self, rows: Sequence[int]) -> None:
        """See ``Backend``."""
        self._select(order_after_removal(rows, len(self._mask)))

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """See ``Backend``. Rows have copies of their prompt's keys and values."""


def _cached_numbers(config: Any) -> int:
    """Keys and values of a token in a layer, from the layer's settings."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    return 2 * heads * int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


Kept = list[tuple[Tensor, Tensor]]
"""Keys and values of one text for each layer, ``[heads, tokens, D]``."""


class RefillBackend(_CachedBackend):
    """A cache of keys and values alone. Rows join the running batch, padded on the left to its length.

    Args:
        policy: its model is used.
        keeps_rows: whether rows are parked with their keys and values, instead of being read again.
    """

    refills = True

    def __init__(self, policy: Policy, *, keeps_rows: bool = True) -> None:
        super().__init__(policy)
        self.keeps_rows = keeps_rows
        self.description = "transformers' cache, rows refilled" + ("" if keeps_rows else ", histories read again")
        self._prompts: list[Kept] = []
        self._parked: dict[int, Kept] = {}
        self._handles = count()
        self._template: Any = None  # a cache whose layers receive the rows' keys and values

    def end(self) -> None:
        """See ``Backend``."""
        super().end()
        self._prompts, self._parked, self._template = [], {}, None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``."""
        logits = []
        share = max(1, PREFILL_TOKENS // max(map(len, prompts)))
        for start in range(0, len(prompts), share):
            part_logits, cache, mask = self._prefill(prompts[start : start + share])
            logits.append(part_logits)
            self._prompts += _rows_of(cache, mask)
            self._template = cache
        return torch.cat(logits)

    def add_rows(self, prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self._arrange([*range(len(self._mask)), *(self._prompts[prompt] for prompt in prompts)])

    def remove_rows(self, rows: Sequence[int]) -> None:
        """See ``Backend``. Columns that hold only padding afterwards go too."""
        staying = order_after_removal(rows, len(self._mask))
        self._select(staying)
        if not staying:
            self._cache = None
            return
        spare = int(self._mask.any(0).int().argmax())
        if spare:
            self._mask = self._mask[:, spare:]
            for layer in self._cache.layers:
                layer.keys, layer.values = layer.keys[:, :, spare:], layer.values[:, :, spare:]

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self._prompts = [self._prompts[index] for index in order_after_removal(prompts, len(self._prompts))]

    def park(self, row: int) -> int:
        """See ``Backend``."""
        handle = next(self._handles)
        (self._parked[handle],) = _rows_of(self._part([row]), self._mask[[row]])
        return handle

    def resume(self, handles: Sequence[int]) -> None:
        """See ``Backend``."""
        self._arrange([*range(len(self._mask)), *(self._parked.pop(handle) for handle in handles)])

    def release(self, handle: int) -> None:
        """See ``Backend``."""
        del self._parked[handle]

    def extend(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``. In memory, padding stands between what a row had and shorter texts."""
        device = self._mask.device
        logits: list[Tensor] = []
        entries: list[int | Kept] = list(range(len(self._mask)))
        share = max(1, PREFILL_TOKENS // max(map(len, texts)))
        for start in range(0, len(rows), share):
            part, new = rows[start : start + share], texts[start : start + share]
            longest = max(map(len, new))
            input_ids = torch.tensor([[*[0] * (longest - len(text)), *text] for text in new], device=device)
            given = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in new], device=device)
            mask = torch.cat([self._mask[list(part)], given], 1)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -longest:]
            output = self._forward(input_ids, mask, positions, self._part(part))
            logits.append(output.logits[:, -1].to(self.policy.precision.master))
            for row, kept in zip(part, _rows_of(output.past_key_values, mask), strict=True):
                entries[row] = kept
        self._arrange(entries)
        return torch.cat(logits)

    def _part(self, rows: Sequence[int]) -> Any:
        """A cache of some rows, which may grow without a change to the whole one."""
        part = copy(self._cache)
        part.layers = [copy(layer) for layer in self._cache.layers]
        for layer in part.layers:
            layer.keys, layer.values = layer.keys[list(rows)], layer.values[list(rows)]
        return part

    def _arrange(self, entries: Sequence[int | Kept]) -> None:
        """Lay out the batch anew: for each row, the number of an existing one, or its keys and values."""
        old = self._mask
        stay = {row: entry for row, entry in enumerate(entries) if isinstance(entry, int)}
        new = {row: entry for row, entry in enumerate(entries) if not isinstance(entry, int)}
        width = old.shape[1] if stay else 0
        length = max(width, *(kept[0][0].shape[1] for kept in new.values())) if new else width
        mask = torch.zeros(len(entries), length, dtype=torch.long, device=self.policy.device)
        if stay:
            mask[list(stay), length - width :] = old[list(stay.values())]
        for row, kept in new.items():
            mask[row, length - kept[0][0].shape[1] :] = 1
        if self._cache is None:
            self._cache = self._template
        for number, layer in enumerate(self._cache.layers):
            for kind, name in enumerate(("keys", "values")):
                before = getattr(layer, name)
                joined = before.new_zeros(len(mask), before.shape[1], length, before.shape[3])
                if stay:
                    joined[list(stay), :, length - width :] = before[list(stay.values())]
                for row, kept in new.items():
                    tokens = kept[number][kind]
                    joined[row, :, length - tokens.shape[1] :] = tokens
                setattr(layer, name, joined)
        self._mask = mask


def _rows_of(cache: Any, mask: Tensor) -> list[Kept]:
    """Copies of each row's keys and values, without padding."""
    is_token = mask.bool()
    return [
        [(layer.keys[row][:, tokens], layer.values[row][:, tokens]) for layer in cache.layers]
        for row, tokens in enumerate(is_token)
    ]


class RecomputeBackend(Backend):
    """No cache: each token costs a forward pass over the whole text. Correct for any causal model, and slow."""

    refills = True
    mixed_lengths = True
    token_multiple = 1
    description = "without a cache: every token computes the whole text again, which is slow"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._prompts: list[list[int]] = []
        self._rows: list[list[int]] = []

    def end(self) -> None:
        """See ``Backend``."""
        self._prompts, self._rows = [], []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See ``Backend``."""
        self._prompts += [list(prompt) for prompt in prompts]
        return self._next_logits(prompts)

    def add_rows(self, prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self._rows += [list(self._prompts[prompt]) for prompt in prompts]

    def remove_rows(self, rows: Sequence[int]) -> None:
        """See ``Backend``."""
        self._rows = [self._rows[index] for index in order_after_removal(rows, len(self._rows))]

    def remove_prompts(self, prompts: Sequence[int]) -> None:
        """See ``Backend``."""
        self._prompts = [self._prompts[index] for index in order_after_removal(prompts, len(self._prompts))]

    def step(self, tokens_S: Tensor) -> Tensor:
        """See ``Backend``."""
        for row, token in zip(self._rows, tokens_S.tolist(), strict=True):
            row.append(token)
        return self._next_logits(self._rows)

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
