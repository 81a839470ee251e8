"""Recurrences over packed sequences that begin with given states: the gated delta rule and Mamba 2's state space.

Both are computed by chunks: products inside all chunks at once, then one step of the recurrence per chunk. They are
plain differentiable functions of tensors, in float32 or wider. For sampling there is one token of each sequence, which
writes the new state over the old one.

Axis letters: T tokens, S sequences, J chunks, C tokens of a chunk, A heads, G groups of R heads each that share keys, K
width of keys, D width of values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.native import call, require, threads_for
from cohort.native import recurrent as native

# ----------------------------------------
# Sequences that lie end to end, cut for recurrences: into chunks, and with the tails of what they continue.
#
# Axis letters: T tokens, S sequences, J chunks, C tokens of a chunk, E tokens with the tails before each sequence.


LONGEST_CHUNK = 64
"""Tokens of a chunk, at most. Work inside a chunk grows with its length; the recurrence between chunks runs one after
the other."""


class Chunks:
    """Sequences as chunks of one length, of which the last of a sequence may be padded. Chunks that come n-th in their
    sequences are neighbours, those of long sequences first, so that a step of the recurrence is one product.

    Args:
        starts: the first token of each sequence on axis T, and the end of the last one.
        device: of the indices.
    """

    def __init__(self, starts: Sequence[int], device: torch.device) -> None:
        lengths = [stop - start for start, stop in pairwise(starts)]
        self.size = -(-max(lengths) // -(-max(lengths) // LONGEST_CHUNK))
        """C."""
        order = sorted(range(len(lengths)), key=lambda s: -lengths[s])
        first: list[int] = []
        real: list[int] = []
        self.steps: list[slice] = []
        """The chunks that come n-th, on axis J."""
        place = torch.empty(starts[-1], dtype=torch.int64)
        for before in range(0, lengths[order[0]], self.size):
            running = [s for s in order if lengths[s] > before]
            self.steps.append(slice(len(first), len(first) + len(running)))
            for s in running:
                token, count = starts[s] + before, min(self.size, lengths[s] - before)
                place[token : token + count] = torch.arange(count) + len(first) * self.size
                first.append(token)
                real.append(count)
        offset_C = torch.arange(self.size)
        real_JC = offset_C < torch.tensor(real)[:, None]
        index_JC = (torch.tensor(first)[:, None] + offset_C) * real_JC
        self.padded = not bool(real_JC.all())
        self.real_JC, self.index = real_JC.to(device), index_JC.flatten().to(device)
        self.place_T = place.to(device)
        self.order_S = torch.tensor(order, device=device)

    def cut(self, values: Tensor, *, fill: bool = True) -> Tensor:
        """``[T, ...]`` to ``[J, C, ...]``. Padding is 0, or unless ``fill`` the values of some token."""
        cut: Tensor = values.index_select(0, self.index).unflatten(0, (-1, self.size))
        if self.padded and fill:
            cut = cut * self.real_JC.view(*self.real_JC.shape, *[1] * (cut.ndim - 2)).to(cut.dtype)
        return cut

    def join(self, values: Tensor) -> Tensor:
        """The inverse, ``[J, C, ...]`` to ``[T, ...]``."""
        return values.flatten(0, 1).index_select(0, self.place_T)

    def sorted(self, states: Tensor) -> Tensor:
        """States of the sequences, ``[S, ...]``, longest first."""
        return states.index_select(0, self.order_S)

    def unsorted(self, states: Tensor) -> Tensor:
        """The inverse."""
        return states.index_select(0, self.order_S.argsort())


class Tails:
    """Sequences with room before each one for the last tokens of what it continues.

    Args:
        starts: as of ``Chunks``.
        count: tokens of a tail.
        device: of the indices.
    """

    def __init__(self, starts: Sequence[int], count: int, device: torch.device) -> None:
        tokens, sequences = starts[-1], len(starts) - 1
        self.count, self.tokens = count, tokens
        self.starts = torch.tensor(starts, device=device)
        tail = torch.arange(count)
        # Indices on axis E into tokens with the tails after them.
        parts = []
        for s, (start, stop) in enumerate(pairwise(starts)):
            parts += [tokens + s * count + tail, torch.arange(start, stop)]
        self._order_E = torch.cat(parts).to(device)
        shift = torch.tensor([stop - start for start, stop in pairwise(starts)])
        row_T = torch.arange(sequences).repeat_interleave(shift)
        self._place_T = (torch.arange(tokens) + row_T * count).to(device)
        """Where the window of a token begins on axis E."""
        ends = torch.tensor(starts[1:]) + torch.arange(sequences) * count
        self._ends = (ends[:, None] + tail).flatten().to(device)

    def convolve(self, values_T: Tensor, tails_S: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A causal convolution by channel, ``y_t = sum_j weight[:, j] x_{t + j - count}``.

        Args:
            values_T: x, ``[T, H]``.
            tails_S: x before each sequence, ``[S, count, H]``.
            weight: ``[H, count + 1]``.

        Returns:
            y, and the new tails: the last ``count`` of each sequence with what came before.
        """
        whole_E = torch.cat([values_T, tails_S.flatten(0, 1)]).index_select(0, self._order_E)
        windows = len(whole_E) - self.count
        out = whole_E[:windows] * weight[:, 0]
        for j in range(1, self.count + 1):
            out = torch.addcmul(out, whole_E[j : j + windows], weight[:, j])
        tails = whole_E.index_select(0, self._ends).view_as(tails_S)
        return out.index_select(0, self._place_T), tails


# ----------------------------------------
# What recurrences compute inside their chunks besides matrix products, by the kernels of recurrent.c or by torch.
#
# Axis letters: J chunks, G groups of R heads each that share keys, C tokens of a chunk, D width.


def decayed(scores_JGCC: Tensor, passed_JGRC: Tensor, *, native: bool = False) -> Tensor:
    """``scores_ij exp(passed_i - passed_j)`` for i >= j, else 0, ``[J, G, R, C, C]``, in the dtype of the scores.
    ``passed`` holds sums over a chunk, in float64: in float32 the difference of two large ones would have few digits
    left."""
    if native:
        out: Tensor = _Decayed.apply(scores_JGCC, passed_JGRC)  # type: ignore[no-untyped-call]
        return out
    size = passed_JGRC.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=passed_JGRC.device).triu(1)
    between = (passed_JGRC[..., :, None] - passed_JGRC[..., None, :]).to(scores_JGCC.dtype)
    return scores_JGCC[:, :, None] * between.masked_fill(later, -torch.inf).exp()


def solved(lower: Tensor, b: Tensor, *, native: bool = False) -> Tensor:
    """X with ``(1 + lower) x = b``, ``[..., C, D]``; of ``lower``, ``[..., C, C]``, only the strictly lower triangle
    counts."""
    if native:
        out: Tensor = _Solved.apply(lower, b)  # type: ignore[no-untyped-call]
        return out
    x: Tensor = torch.linalg.solve_triangular(lower, b, upper=False, unitriangular=True)
    return x


class _Decayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, passed: Tensor) -> Tensor:
        scores, passed = scores.contiguous(), passed.contiguous()
        (chunks, groups, repeats, size), kinds = passed.shape, (scores.dtype, passed.dtype)
        require(scores.shape == (chunks, groups, size, size), "scores of each group")
        require(kinds == (torch.float32, torch.float64), "scores in float32, sums in float64")
        out = scores.new_empty(chunks, groups, repeats, size, size)
        _decay(scores, passed, out=out)
        ctx.save_for_backward(scores, passed)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        scores, passed = ctx.saved_tensors
        grad_scores, grad_passed = torch.empty_like(scores), scores.new_empty(passed.shape)
        _decay(scores, passed, grad_out=grad.contiguous(), grad_scores=grad_scores, grad_passed=grad_passed)
        return grad_scores, grad_passed.double()


def _decay(scores: Tensor, passed: Tensor, **others: Tensor) -> None:
    chunks, groups, repeats, size = passed.shape
    threads = threads_for(passed.numel() * size)
    sizes = {"groups": chunks * groups, "repeats": repeats, "size": size}
    call("decayed", scores=scores, passed=passed.data_ptr(), threads=threads, **sizes, **others)


class _Solved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor, b: Tensor) -> Tensor:
        lower, b = lower.contiguous(), b.contiguous()
        fits = lower.shape == (*b.shape[:-1], b.shape[-2]) and lower.dtype == b.dtype == torch.float32
        require(fits, "square matrices and right sides in float32")
        x = torch.empty_like(b)
        _solve(lower, b, x)
        ctx.save_for_backward(lower, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        lower, x = ctx.saved_tensors
        grad_b, grad_lower = grad.clone(memory_format=torch.contiguous_format), torch.empty_like(lower)
        _solve(lower, x, grad_b, grad_lower)
        return grad_lower, grad_b


def _solve(lower: Tensor, b: Tensor, x: Tensor, grad_lower: Tensor | None = None) -> None:
    size, width = b.shape[-2:]
    systems = b.numel() // (size * width)
    call("triangular", lower=lower, b=b, x=x, grad_lower=grad_lower, systems=systems, size=size, width=width)


# ----------------------------------------
# Short causal convolutions by channel over packed sequences that continue prefixes, one operation with what is around
# them in recurrent layers: gates and SiLU. By the kernels of recurrent.c, or by torch.


def convolve(
    x_TH: Tensor,
    tails_S: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tails: Tails,
    *,
    silu: bool = False,
    gated: bool = False,
    native: bool = False,
) -> tuple[Tensor, Tensor]:
    """``y_t = bias + sum_j weight[:, j] x_{t + j - count}``, and SiLU of it.

    Args:
        x_TH: x. Tokens after those of the sequences are padding, and 0 in the output.
        tails_S: x before each sequence, ``[S, count, H]``; for native kernels in float32.
        weight, bias: ``[H, count + 1]`` and ``[H]``.
        tails: the sequences.
        silu: whether SiLU follows.
        gated: whether x has ``3 H`` columns, a gate, a gate and x: the first multiplies x, the second the output.
        native: whether the kernels of recurrent.c compute it, in float32.

    Returns:
        y, and the new tails: the last ``count`` of each sequence with what came before.
    """
    if native:
        bias = None if bias is None else bias.float()
        both: tuple[Tensor, Tensor] = _Convolution.apply(  # type: ignore[no-untyped-call]
            x_TH, tails_S, weight.T.float(), bias, tails.starts, silu, gated
        )
        return both
    ends: list[Tensor] = []

    def inner(values: Tensor) -> Tensor:
        out, after = tails.convolve(values, tails_S, weight)
        ends.append(after)
        return out

    return _by_torch(inner, x_TH, tails.tokens, bias, silu=silu, gated=gated), ends[0]


def convolve_step(
    x_SH: Tensor, tails_S: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False, gated: bool = False
) -> Tensor:
    """One token of each sequence, by torch; see ``convolve``. Moves ``tails_S`` on."""

    def inner(values: Tensor) -> Tensor:
        whole = torch.cat([tails_S.to(values.dtype), values[:, None]], 1)
        tails_S.copy_(whole[:, 1:])
        return (whole.to(weight.dtype) * weight.T).sum(1)

    return _by_torch(inner, x_SH, len(tails_S), bias, silu=silu, gated=gated)


def _by_torch(
    inner: Callable[[Tensor], Tensor], x_TH: Tensor, tokens: int, bias: Tensor | None, *, silu: bool, gated: bool
) -> Tensor:
    """What is around a convolution."""
    after, values = None, x_TH[:tokens]
    if gated:
        before, after, values = values.chunk(3, -1)
        values = before * values
    out = inner(values)
    out = out if bias is None else out + bias
    out = functional.silu(out) if silu else out
    out = (out if after is None else after * out).to(x_TH.dtype)
    return functional.pad(out, (0, 0, 0, len(x_TH) - tokens)) if len(x_TH) > tokens else out


def _columns(x: Tensor, gated: bool) -> dict[str, int]:
    """The addresses of x and its gates, and the numbers between rows."""
    names = ("before", "after", "x") if gated else ("x",)
    step = x.shape[-1] // len(names) * x.itemsize
    return {name: x.data_ptr() + index * step for index, name in enumerate(names)}


def convolve_into(
    out_TH: Tensor,
    new_tails: Tensor,
    x_TH: Tensor,
    tails: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    starts: Tensor,
    *,
    silu: bool = False,
    gated: bool = False,
) -> None:
    """``convolve`` by the native kernel, without gradients.

    Args:
        out_TH: y, contiguous. Rows after those of the sequences are not written.
        new_tails: float32; may be ``tails``.
        x_TH: its rows may lie apart.
        tails: float32.
        weight: ``[count + 1, H]``, float32.
        bias: float32.
        starts: the first token of each sequence, and the end of the last one.
    """
    (sequences, count, channels), wide = tails.shape, {tails.dtype, new_tails.dtype, weight.dtype}
    columns = channels * (3 if gated else 1)
    fits = x_TH.shape[1] == columns and x_TH.stride(1) == 1 and len(starts) == sequences + 1
    require(fits and weight.shape == (count + 1, channels) and new_tails.shape == tails.shape, "tails of the channels")
    require(out_TH.shape == (len(x_TH), channels) and out_TH.dtype == x_TH.dtype, "an output for each token")
    require(wide == {torch.float32} and (bias is None or bias.dtype == torch.float32), "float32")
    call(
        "convolve", out=out_TH, weight=weight.contiguous(), bias=bias, tails=tails, new_tails=new_tails, starts=starts,
        **_columns(x_TH, gated), stride=x_TH.stride(0), sequences=sequences, channels=channels, count=count, silu=silu,
        threads=threads_for(out_TH.numel()),
    )  # fmt: skip


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tails: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool, gated: bool
    ) -> tuple[Tensor, Tensor]:
        x = x if x.stride(1) == 1 else x.contiguous()
        tails, weight = tails.contiguous(), weight.contiguous()
        out, new_tails = x.new_empty(len(x), tails.shape[2]), torch.empty_like(tails)
        convolve_into(out, new_tails, x, tails, weight, bias, starts, silu=silu, gated=gated)
        out[int(starts[-1]) :] = 0
        ctx.save_for_backward(x, tails, weight, bias, starts)
        ctx.silu, ctx.gated = silu, gated
        ctx.set_materialize_grads(False)
        return out, new_tails

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_new_tails: Tensor | None) -> tuple[Tensor | None, ...]:
        x, tails, weight, bias, starts = ctx.saved_tensors
        (sequences, count, channels), threads = tails.shape, threads_for(x.numel())
        grad = x.new_zeros(len(x), channels) if grad is None else grad.contiguous()
        grad_new_tails = None if grad_new_tails is None else grad_new_tails.contiguous()
        grad_x, grad_tails = torch.empty(x.shape, dtype=x.dtype), torch.empty_like(tails)
        grad_x[int(starts[-1]) :] = 0
        grad_weight = tails.new_zeros(threads, count + 2, channels)
        call(
            "convolve_grad", grad_out=grad, weight=weight, bias=bias, tails=tails, grad_new_tails=grad_new_tails,
            starts=starts, grad_tails=grad_tails, grad_weight=grad_weight, **_columns(x, ctx.gated),
            **{f"grad_{name}": at for name, at in _columns(grad_x, ctx.gated).items()}, stride=x.stride(0),
            grad_stride=grad_x.stride(0), sequences=sequences, channels=channels, count=count, silu=ctx.silu,
            threads=threads,
        )  # fmt: skip
        *of_weight, of_bias = grad_weight.sum(0)
        return grad_x, grad_tails, torch.stack(of_weight), None if bias is None else of_bias, None, None, None


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
    native_step: Callable[..., Tensor]
    """The same by a native kernel, in float32."""

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
        """A causal convolution by channel; see ``convolve``."""

    def recur(self, key: StateKey, recurrence: Recurrence, values: Sequence[Tensor], zeros: Tensor) -> Tensor:
        """A recurrence; ``zeros`` is the state of nothing."""


DELTA_RULE = Recurrence(delta_rule, delta_step, native.delta_step)
STATE_SPACE = Recurrence(state_space, space_step, native.space_step)


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
