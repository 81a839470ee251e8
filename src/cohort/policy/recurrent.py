"""Recurrences over packed sequences that begin with given states: the gated delta rule and Mamba 2's state space.

Both are computed by chunks: products inside all chunks at once, then one step of the recurrence per chunk. They are
plain differentiable functions of tensors, in float32 or wider. For sampling there is one token of each sequence, which
writes the new state over the old one.

Axis letters: T tokens, S sequences, J chunks, C tokens of a chunk, A heads, G groups of R heads each that share keys, K
width of keys, D width of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from cohort.policy.chunk_products import decayed, solved
from cohort.policy.chunks import Chunks


def delta_rule(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_TAD: Tensor,
    decay_TA: Tensor,
    beta_TA: Tensor,
    chunks: Chunks,
    state: Tensor,
    *,
    native: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, by chunks::

        S_t = exp(decay_t) S_{t-1} + beta_t k_t (v_t - exp(decay_t) S_{t-1}^T k_t)^T        out_t = S_t^T q_t

    Args:
        q_TGK, k_TGK: queries, with their scale, and keys. Each is used by R = A / G neighbouring heads.
        v_TAD: values.
        decay_TA: at most 0.
        beta_TA: how much of a value is written.
        chunks: the sequences.
        state: S before each sequence, ``[S, A, K, D]``.
        native: whether to use native kernels, in float32.

    Returns:
        out, ``[T, A, D]``, and S after each sequence.

    Source: Gated Delta Networks (arXiv 2412.06464), 3.3.
    """
    groups, heads = k_TGK.shape[1], v_TAD.shape[1]
    shape = (groups, heads // groups)
    # [J, G, 1 or R, C, ...]
    q, k = (chunks.cut(part, fill=False).transpose(1, 2)[:, :, None] for part in (q_TGK, k_TGK))
    v = chunks.cut(v_TAD, fill=False).transpose(1, 2).unflatten(1, shape)
    decay, beta = (chunks.cut(part).transpose(1, 2).unflatten(1, shape) for part in (decay_TA, beta_TA))
    passed = decay.double().cumsum(-1)  # since the beginning of the chunk
    grown = passed.to(decay.dtype).exp()[..., None]
    # Inside a chunk: (1 + L) u = beta v and (1 + L) w = beta exp(passed) k, with L the strictly lower triangle of
    # beta_i exp(passed_i - passed_j) k_i . k_j. What is written is u - w S for the state S before the chunk.
    lower = decayed((k @ k.mT)[:, :, 0], passed, native=native) * beta[..., None]
    weighted = torch.cat([v, k * grown], -1) * beta[..., None]
    u, w = solved(lower, weighted, native=native).flatten(1, 2).split([v.shape[-1], k.shape[-1]], -1)
    left = _decay_after(passed, decay.dtype)[..., None]
    keys = (k * left).flatten(1, 2).mT
    whole = grown[..., -1:, :].flatten(1, 2)

    written: list[Tensor] = []

    def added(step: slice, state: Tensor) -> Tensor:
        new: Tensor = u[step] - w[step] @ state
        written.append(new)
        adding: Tensor = keys[step] @ new
        return adding

    before, after = _carry(chunks, state, whole, added)
    scores = decayed((q @ k.mT)[:, :, 0], passed, native=native).flatten(1, 2)
    out: Tensor = (q * grown).flatten(1, 2) @ before + scores @ torch.cat(written)
    return chunks.join(out.transpose(1, 2)), after


def state_space(
    x_TAD: Tensor,
    step_TA: Tensor,
    decay_A: Tensor,
    b_TGK: Tensor,
    c_TGK: Tensor,
    chunks: Chunks,
    state: Tensor,
    *,
    native: bool = False,
) -> tuple[Tensor, Tensor]:
    """The state space of Mamba 2, by chunks::

        S_t = exp(step_t decay) S_{t-1} + step_t x_t b_t^T        out_t = S_t c_t

    Args:
        x_TAD: values.
        step_TA: time steps.
        decay_A: at most 0.
        b_TGK, c_TGK: keys and queries. Each is used by R = A / G neighbouring heads.
        chunks: the sequences.
        state: S before each sequence, ``[S, A, D, K]``.
        native: whether to use native kernels, in float32.

    Returns:
        out, ``[T, A, D]``, and S after each sequence.

    Source: Transformers are SSMs (arXiv 2405.21060), 6.
    """
    groups, heads, width = b_TGK.shape[1], *x_TAD.shape[1:]
    shape = (groups, heads // groups)
    step = chunks.cut(step_TA)  # [J, C, A]
    b, c = (chunks.cut(part, fill=False).transpose(1, 2) for part in (b_TGK, c_TGK))  # [J, G, C, K]
    x = (chunks.cut(x_TAD, fill=False) * step[..., None]).transpose(1, 2)  # [J, A, C, D]
    passed = (step * decay_A).double().transpose(1, 2).cumsum(-1)  # [J, A, C]
    scores = decayed(c @ b.mT, passed.unflatten(1, shape), native=native)
    out = scores.flatten(1, 2) @ x
    # What a chunk adds to the state, [J, G, K, R, D]: one product for the heads of a group.
    left = _decay_after(passed, step.dtype)[..., None]
    grown = passed.to(step.dtype).exp()

    def by_group(values: Tensor) -> Tensor:
        """``[J, A, C, D]`` to ``[J, G, C, R D]``."""
        grouped: Tensor = values.unflatten(1, shape)
        return grouped.transpose(2, 3).flatten(3)

    added = (b.mT @ by_group(x * left)).unflatten(-1, (-1, width))
    whole = grown[..., -1].unflatten(1, shape)[:, :, None, :, None]
    state = state.unflatten(1, shape).permute(0, 1, 4, 2, 3)
    before, after = _carry(chunks, state, whole, lambda step, _: added[step])
    read = (c @ before.flatten(3)).unflatten(-1, (-1, width))  # [J, G, C, R, D]
    out = out + read.transpose(2, 3).flatten(1, 2) * grown[..., None]
    return chunks.join(out.transpose(1, 2)), after.permute(0, 1, 3, 4, 2).flatten(1, 2)


def delta_step(q_SGK: Tensor, k_SGK: Tensor, v_SAD: Tensor, decay_SA: Tensor, beta_SA: Tensor, state: Tensor) -> Tensor:
    """One token of each sequence; see ``delta_rule``. Writes over ``state``, ``[S, A, K, D]``."""
    ratio = v_SAD.shape[1] // k_SGK.shape[1]
    both = torch.stack([k_SGK, q_SGK], 2).repeat_interleave(ratio, 1).flatten(0, 1)  # [S A, 2, K]
    flat, decay = state.flatten(0, 1), decay_SA.exp().flatten()[:, None, None]
    # One read of the states gives k . S and q . S.
    known, read = (torch.bmm(both, flat) * decay).split(1, 1)
    new = (v_SAD.flatten(0, 1)[:, None] - known) * beta_SA.flatten()[:, None, None]
    k, q = both.split(1, 1)
    flat.mul_(decay).baddbmm_(k.mT, new)
    out: Tensor = read + (q * k).sum(-1, keepdim=True) * new
    return out.view_as(v_SAD)


def space_step(x_SAD: Tensor, step_SA: Tensor, decay_A: Tensor, b_SGK: Tensor, c_SGK: Tensor, state: Tensor) -> Tensor:
    """One token of each sequence; see ``state_space``. Writes over ``state``, ``[S, A, D, K]``."""
    groups, (count, heads, width) = b_SGK.shape[1], x_SAD.shape
    decay = (step_SA * decay_A).exp()[..., None]
    new = x_SAD * step_SA[..., None]
    flat = state.view(count * groups, heads // groups * width, -1)  # [S G, R D, K]
    b, c = b_SGK.flatten(0, 1)[:, None], c_SGK.flatten(0, 1)[..., None]
    read = torch.bmm(flat, c).view_as(x_SAD) * decay
    state.mul_(decay[..., None])
    flat.baddbmm_(new.reshape(len(flat), -1, 1), b)
    return read + new * (b @ c).view(count, groups, 1, 1).expand(-1, -1, heads // groups, -1).flatten(1, 2)


StateKey = tuple[int, str]
"""A recurrent layer, and the name of one of its states."""


class Recurrence(NamedTuple):
    """A recurrence, over packed sequences and for one token of each sequence."""

    sequences: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., Tensor]

    def over(self, *values: Any, native: bool) -> tuple[Tensor, Tensor]:
        """Packed sequences, in float32 or wider also under autocast."""
        with torch.autocast(values[0].device.type, enabled=False):
            return self.sequences(*values, native=native)


class Recurring(Protocol):
    """What mixes the tokens of recurrent layers in one forward pass, each sequence after the state that what it
    continues left. Inputs may have padding after the tokens; outputs have as much."""

    def convolve(
        self, key: StateKey, x_TH: Tensor, weight: Tensor, bias: Tensor | None = None, **flags: bool
    ) -> Tensor:
        """A causal convolution by channel; see ``policy.convolution.convolve``."""

    def recur(self, key: StateKey, recurrence: Recurrence, values: Sequence[Tensor], zeros: Tensor) -> Tensor:
        """A recurrence; ``zeros`` is the state of nothing."""


DELTA_RULE = Recurrence(delta_rule, delta_step)
STATE_SPACE = Recurrence(state_space, space_step)


def _carry(
    chunks: Chunks, state: Tensor, decay: Tensor, added: Callable[[slice, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Carry states from chunk to chunk.

    Args:
        chunks: the sequences.
        state: before each sequence, ``[S, ...]``.
        decay: factors of states in each chunk, ``[J, ...]``.
        added: what some chunks, given their states before them, add to the states.

    Returns:
        The state before each chunk, ``[J, ...]``, and after each sequence.
    """
    state = chunks.sorted(state)
    before, ended = [], []
    for step in chunks.steps:
        running = step.stop - step.start
        if running < len(state):
            ended.append(state[running:])
            state = state[:running]
        before.append(state)
        state = state * decay[step] + added(step, state)
    return torch.cat(before), chunks.unsorted(torch.cat([state, *reversed(ended)]))


def _decay_after(passed: Tensor, dtype: torch.dtype) -> Tensor:
    """``exp(passed_C - passed_i)``, from a token to the end of its chunk."""
    return (passed[..., -1:] - passed).to(dtype).exp()


def steps_of(dt_TA: Tensor, bias_A: Tensor | None, softplus: bool, limits: tuple[float, float]) -> Tensor:
    """Time steps from their projection, as Mamba 2 computes them."""
    if bias_A is not None:
        dt_TA = dt_TA + bias_A.to(dt_TA.dtype)
    if softplus:
        dt_TA = functional.softplus(dt_TA)
    return dt_TA.clamp(*limits)


def unit(values: Tensor) -> Tensor:
    """Vectors of length 1, with the epsilon of Qwen's kernels."""
    length = (values.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return values * length
