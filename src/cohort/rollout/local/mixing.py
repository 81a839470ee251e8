"""How the tokens of a sampler's passes see each other: of texts that are read, and of the newest tokens of all rows.

A decode step computes attention scores in two parts, takes one softmax over both, and adds the two parts of the output:

    own part      each row over its own tokens                         [rows x KV heads] products
    prompt part   the rows of a group together over their prompt       [prompts x KV heads] products

Axis letters: S rows, R their places (``cache.Places``), P prompts, A query heads, K key-value heads, D head dimension,
T tokens of a row or text, X tokens of a prompt, L newest tokens of a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from cohort.native import DTYPES, has_pairs
from cohort.policy.anatomy import soft_cap
from cohort.policy.attention import BLOCK, packed_attention
from cohort.policy.layout import Layout
from cohort.policy.passes import Hidden, KeysValues, PackedPass
from cohort.policy.recurrent import Recurrence, StateKey, convolve_into, convolve_step
from cohort.rollout.local.cache import GroupStep, Places, RowStates


class Reading(PackedPass):
    """A pass over texts that lie end to end, each of which attends to itself by itself: its bits do not depend on those
    that are read with it.

    Args:
        lengths: tokens of each text.
        native: whether to use native kernels.
        dtype: of the products of attention.
        found: receives keys, values and states.
        device: of the pass.
        before: tokens that came before each text, if the texts go on.
        states: what those left in recurrent layers.
        earlier: their keys and values in a layer, ``[K, T, width]`` each, by the text's number.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        native: bool,
        dtype: torch.dtype,
        found: KeysValues,
        device: torch.device,
        *,
        before: Sequence[int] | None = None,
        states: KeysValues | None = None,
        earlier: Callable[[int, int], Sequence[Tensor]] | None = None,
    ) -> None:
        layout = Layout(lengths, device, None if before is None else range(len(lengths)), before or ())
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        super().__init__(layout, native, read=found, prefixes=states, drawn_N=last)
        self._dtype, self._earlier = dtype, earlier

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
        drawn_N: Tensor | None = None,  # noqa: ARG002
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``Mixing``."""
        self.record(layer, k, v)
        out_ATD = v.new_zeros(*q.shape[:2], v.shape[-1])
        with torch.autocast(q.device.type, enabled=False):
            for number, (start, length) in enumerate(zip(self.layout.starts, self.layout.lengths, strict=False)):
                span = slice(start, start + length)
                keys, values = k[:, span], v[:, span]
                if self._earlier is not None:
                    pairs = zip(self._earlier(layer, number), (keys, values), strict=True)
                    keys, values = (torch.cat([before, new.to(before.dtype)], 1) for before, new in pairs)
                settings = scaling, window, cap, sinks, self.native
                out_ATD[:, span] = attend_causally(q[:, span], keys, values, self._dtype, *settings)
        return out_ATD


class StateStep:
    """What mixes the tokens of recurrent layers in a decode step, one of each row; see ``policy.recurrent.Recurring``.

    Args:
        states: of all rows; those of the step are written over.
        places: of the rows, rising.
        device: of the states.
        native: whether to use native kernels.
    """

    def __init__(self, states: RowStates, places: Sequence[int], device: torch.device, *, native: bool) -> None:
        self._states, self._native, self._given = states, native, (places, device)

    @cached_property
    def _places(self) -> Places:
        return Places(*self._given, share=1)

    def convolve(
        self, key: StateKey, x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, **flags: bool
    ) -> Tensor:
        """See ``Recurring``."""
        places = self._places
        x_RH, tails = places.spread(x_TH[: places.count]), places.of(self._states[key])
        if self._native and x_TH.dtype in DTYPES:
            out_RH = x_RH.new_zeros(len(x_RH), tails.shape[2])
            starts, bias = torch.arange(len(x_RH) + 1), None if bias is None else bias.float()
            convolve_into(out_RH, tails, x_RH, tails, weight.T.float(), bias, starts, **flags)
        else:
            out_RH = convolve_step(x_RH, tails, weight, bias, **flags)
        places.store(self._states[key], tails)
        return _padded(places.collect(out_RH), len(x_TH))

    def recur(self, key: StateKey, recurrence: Recurrence, values: Sequence[Tensor], zeros: Tensor) -> Tensor:  # noqa: ARG002
        """See ``Recurring``."""
        places, state = self._places, self._places.of(self._states[key])
        step = recurrence.native_step if self._native else recurrence.step
        given = [places.spread(part[: places.count]) if part.ndim > 1 else part for part in values]
        with torch.autocast(state.device.type, enabled=False):  # as in ``Recurrence.over``
            out = places.collect(step(*given, state))
        places.store(self._states[key], state)
        return _padded(out, len(values[0]))


class Step(StateStep):
    """What mixes the tokens of a decode step, one of each row; a ``Mixing``.

    Args:
        step: of the cache, which is written.
        states, native: see ``StateStep``.
    """

    read: KeysValues | None = None
    drawn_N: Tensor | None = None
    only_keys_of: int | None = None
    routes_T: Tensor | None = None

    def __init__(self, step: GroupStep, states: RowStates, *, native: bool) -> None:
        super().__init__(states, step.places, step.positions.device, native=native)
        self.tokens, self._step = step.count, step

    def select(self, found: Hidden) -> Hidden:
        """See ``Mixing``."""
        return found.select(slice(self.tokens))

    def record(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See ``Mixing``."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        cap: float | None,
        drawn_N: Tensor | None = None,  # noqa: ARG002
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``Mixing``."""
        q_SAD, k_SKD, v_SKD = (part[:, : self.tokens].transpose(0, 1) for part in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            self._step.write(layer, k_SKD, v_SKD)
            out_SAD = attend_in_two_parts(q_SAD, layer, self._step, scaling, window, cap, sinks)
        return _padded(out_SAD.to(v.dtype), q.shape[1]).transpose(0, 1)


def _padded(entries_S: Tensor, length: int) -> Tensor:
    """With zeros after the entries."""
    missing = length - len(entries_S)
    return functional.pad(entries_S, (0, 0) * (entries_S.ndim - 1) + (0, missing)) if missing else entries_S


def attend_in_two_parts(
    q_SAD: Tensor,
    layer: int,
    step: GroupStep,
    scaling: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each row's newest token to its prompt and its own tokens, those just written included.

    Args:
        q_SAD: its queries.
        layer: the layer's number.
        step: where keys and values are.
        scaling, window, cap, sinks: see ``packed_attention``.

    Returns:
        ``[S, A, width of the values]``, in float32 or wider.
    """
    heads, count = step.layers[layer], len(q_SAD)
    (own_k, own_v), (prompt_k, prompt_v) = step.own(layer), step.of_prompts(layer)
    groups, q_SAD = step.groups(heads), q_SAD.to(own_k.dtype)
    q = q_SAD.reshape(count * heads.count, heads.group, -1)
    q_R = step.rows.spread(q_SAD).reshape(len(own_k), heads.group, -1)
    own = _scores(q_R, own_k, scaling, cap, step.own_mask(heads, window)).unflatten(0, (-1, heads.count))
    prompt = _scores(groups.by_prompt(q), prompt_k, scaling, cap, step.prompt_mask(heads, window))
    scores = torch.cat([step.rows.collect(own).flatten(0, 1), groups.by_row(prompt)], dim=-1)
    if sinks is not None:  # [S K, group, t] to [S, A, 1, t] and back
        weights = softmax(scores.view(count, len(sinks), 1, -1), sinks).view_as(scores).to(own_v.dtype)
    else:
        weights = torch.softmax(scores, dim=-1).to(own_v.dtype)
    own_weights, prompt_weights = weights.split([own_k.shape[1], prompt_k.shape[1]], dim=-1)
    of_prompt = groups.by_row(_product(groups.by_prompt(prompt_weights), prompt_v)).unflatten(0, (count, -1))
    spread = step.rows.spread(own_weights.unflatten(0, (count, -1))).flatten(0, 1)
    out_SKD = step.rows.collect(_product(spread, own_v).unflatten(0, (-1, heads.count)))
    return out_SKD.add(of_prompt).flatten(1, 2)


def attend_causally(
    q_ALD: Tensor,
    k_KTD: Tensor,
    v_KTD: Tensor,
    dtype: torch.dtype,
    scaling: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None = None,
    native: bool = False,
) -> Tensor:
    """Attention of a text over the tokens before it and itself: the last L of T tokens, by products of the
    given dtype. The settings: see ``packed_attention``, which computes whole texts in bfloat16 if ``native`` and the
    processor has units for it."""
    length, total = q_ALD.shape[1], k_KTD.shape[1]
    q, k, v = (part.to(dtype)[None] for part in (q_ALD, k_KTD, v_KTD))
    # Decided by the text alone: its bits must not depend on those that are read with it.
    suits = cap is None and total == length <= BLOCK and len(k[0]) >= torch.get_num_threads()
    if native and suits and dtype == torch.bfloat16 and has_pairs():
        alone = Layout([length], q.device)
        return packed_attention(q[0], k[0], v[0], alone, scaling=scaling, window=window, sinks=sinks, native=True)
    mask, plain = None, cap is None and sinks is None
    if not plain or total > length or (window is not None and length > window):
        positions = torch.arange(total, device=q.device)
        back = positions[total - length :, None] - positions
        mask = (back >= 0) & (back < (window or math.inf))
    if plain:
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
    else:
        assert mask is not None
        share = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(share, 1).mT
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(scaling)
        scores = soft_cap(scores, cap).masked_fill_(~mask, -torch.inf)
        out = softmax(scores, sinks).to(v.dtype) @ v.repeat_interleave(share, 1)
    return out[0]


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over the last axis of scores ``[S, A, L, T]``, in which a sink of each head may take part."""
    if sinks is None:
        return torch.softmax(scores, -1)
    of_sinks = sinks.detach().to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, of_sinks], -1), -1)[..., :-1]


def _scores(q: Tensor, k: Tensor, scaling: float, cap: float | None, mask: Tensor | None) -> Tensor:
    """Batched attention scores, ``[B, m, t]``, in float32 or better.

    Args:
        q, k: ``[B, m, D]`` and ``[B, t, D]``.
        scaling: multiplies them.
        cap: bounds them softly; see ``soft_cap``.
        mask: added to them, ``[B, 1 or m, t]``: 0 or -inf. None: no mask.
    """
    if cap is None and mask is not None and q.dtype == mask.dtype:
        return torch.baddbmm(mask, q, k.mT, alpha=scaling)
    scores = soft_cap(_product(q, k.mT).mul_(scaling), cap)
    return scores if mask is None else scores.add_(mask)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched product, in float32 or better: sums of half-precision inputs are not rounded to half precision."""
    if a.dtype in {torch.bfloat16, torch.float16}:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b)
