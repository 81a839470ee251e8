"""From hidden states to log-probs, without the logits of a batch: a chunk of tokens at a time, forward and backward.

With hidden state h, head W, temperature tau and whatever else shapes the distribution inside z:

    z = shape(W h) / tau        logps = z_target - log sum_v exp z_v
    d logps / d z = onehot(target) - softmax(z)

The backward pass computes each chunk's logits again; what lives for all tokens is of the hidden states' size.

Axis letters: N completion tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.policy.anatomy import soft_cap
from cohort.policy.distribution import Distribution
from cohort.policy.kernels import UpdateKernels

CHUNK_TOKENS = 512
CHUNK_LOGITS = 2**25
"""A chunk has at most so many tokens, and so many logits (128 MiB in float32). Memory and time only."""


PRODUCT = 2**23
"""Numbers of a product that is added to a gradient. Memory only."""
LIKE_SHAPES = 64
"""On a CPU, products have so many rows or a multiple of it: for every shape it meets, oneDNN compiles code, and keeps
most of it until the process ends. With as many shapes as there are token counts a run would grow step by step."""


def in_like_shapes(rows: Tensor) -> Tensor:
    """With zeros after the last row, so that the number of rows is one of a few."""
    missing = -len(rows) % LIKE_SHAPES if rows.device.type == "cpu" else 0
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


class TokenLogps(NamedTuple):
    """Shape ``[N]`` each; only the first has a gradient."""

    logps_N: Tensor
    """``log softmax(logits / temperature)`` at the sampled token."""
    entropy_N: Tensor
    """``-sum_v p_v log p_v`` over what was drawn from, in nats."""
    collision_N: Tensor
    """``sum_v p_v^2``: the chance that two draws agree."""


@dataclass(frozen=True, slots=True)
class Head:
    """``logits = cap(multiplier * (W h + b))``; or what is given are the logits already."""

    linear: nn.Linear | None = None
    """None: hidden states are logits."""
    compute: torch.dtype = torch.float32
    """What the product is computed in."""
    multiplier: float = 1.0
    cap: float | None = None
    """Logits become ``cap * tanh(logits / cap)``. None: they stay."""
    kernels: UpdateKernels | None = None
    """What goes over logits in one pass, where there are such."""

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """``[C, V]`` in float32 or wider. Differentiable."""
        if self.linear is None:
            return hidden_CH.to(torch.promote_types(hidden_CH.dtype, torch.float32))
        logits_CV = _product(hidden_CH, self.linear.weight, self.linear.bias, self.compute)
        if self.multiplier != 1:
            logits_CV = logits_CV * self.multiplier
        return logits_CV if self.cap is None else self.cap * torch.tanh(logits_CV / self.cap)


def _product(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, compute: torch.dtype) -> Tensor:
    logits_CV = _linear(hidden_CH, weight_VH, bias_V, compute)[: len(hidden_CH)]
    return logits_CV.to(torch.promote_types(compute, torch.float32))


def _linear(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, compute: torch.dtype) -> Tensor:
    """``[C or more, V]``: what ``in_like_shapes`` adds comes last."""
    bias_V = None if bias_V is None else bias_V.to(compute)
    return functional.linear(in_like_shapes(hidden_CH.to(compute)), weight_VH.to(compute), bias_V)


@dataclass(frozen=True, slots=True)
class CompletionStates:
    """A model's last hidden states where completion tokens were drawn, and all that makes log-probs of them."""

    hidden_NH: Tensor
    head: Head
    distribution: Distribution
    router_logits: tuple[Tensor, ...] = ()
    """Of each layer with experts, ``[N, E]``, where they are asked for."""
    adds_gradient: bool = False
    """Whether the backward pass of ``logps`` adds the weight's gradient to ``.grad``; see
    ``Policy.gradients_in_place``."""

    @property
    def chunk(self) -> int:
        """How many tokens have logits at a time."""
        linear = self.head.linear
        vocabulary = self.hidden_NH.shape[1] if linear is None else linear.weight.shape[0]
        size = max(1, min(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary))
        return size - size % LIKE_SHAPES or size

    @property
    def in_one_pass(self) -> bool:
        """Whether a kernel makes log-probs of the logits as they are."""
        head = self.head
        return head.kernels is not None and head.linear is not None and head.cap is None and self.distribution.is_plain

    @property
    def factor(self) -> float:
        """What takes logits to scores, where nothing else is between them."""
        return self.head.multiplier / self.distribution.temperature

    def logps(self) -> TokenLogps:
        """Log-probs of the tokens, differentiable, with entropies and collision probabilities."""
        linear = self.head.linear
        weight, bias = (None, None) if linear is None else (linear.weight, linear.bias)
        return TokenLogps(*_SampledLogps.apply(self.hidden_NH, weight, bias, self))  # type: ignore[no-untyped-call]

    def log_probs(self, hidden_CH: Tensor, start: int) -> Tensor:
        """Of the whole vocabulary, ``[C, V]``, of the tokens from ``start`` on. Differentiable."""
        scores_CV, _ = self.distribution.scores(self.head.logits(hidden_CH), start)
        return torch.log_softmax(scores_CV, dim=-1)


def chunked_terms(
    term: Callable[..., Tensor], states: Sequence[CompletionStates], others_N: Sequence[Tensor]
) -> Tensor:
    """The sum of a differentiable term over the vocabulary, in chunks, each computed again in the backward pass.

    Args:
        term: takes the log-probs of a chunk under each model, then the chunk of each of ``others_N``; gives a number.
        states: of one or more models, for the same tokens.
        others_N: more tensors per token.
    """
    tokens, size = states[0].hidden_NH.shape[0], states[0].chunk

    def piece(start: int, *parts: Tensor) -> Tensor:
        hidden = parts[: len(states)]
        log_probs = [each.log_probs(hidden_CH, start) for each, hidden_CH in zip(states, hidden, strict=True)]
        return term(*log_probs, *parts[len(states) :])

    wide = torch.promote_types(states[0].hidden_NH.dtype, torch.float32)
    total = states[0].hidden_NH.new_zeros((), dtype=wide)
    for start in range(0, tokens, size):
        parts = [values[start : start + size] for values in (*(each.hidden_NH for each in states), *others_N)]
        total = total + torch.utils.checkpoint.checkpoint(
            piece, start, *parts, use_reentrant=False, preserve_rng_state=False
        )
    return total


class _SampledLogps(torch.autograd.Function):
    """``CompletionStates.logps``."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, states: CompletionStates
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden_NH.dtype, torch.float32)
        if states.head.linear is not None:
            wide = torch.promote_types(states.head.linear.weight.dtype, torch.float32)
        found = hidden_NH.new_empty(5, hidden_NH.shape[0], dtype=wide)
        compute, targets_N = states.head.compute, states.distribution.targets_N
        if weight_VH is not None and len(targets_N):
            lowest, highest = targets_N.aminmax()
            if lowest < 0 or highest >= len(weight_VH):
                raise IndexError(f"completions hold ids from {lowest} to {highest}, of a head of {len(weight_VH):,}")
        weight = None if weight_VH is None else weight_VH.to(compute)  # once for all chunks
        for start in range(0, hidden_NH.shape[0], states.chunk):
            span = slice(start, start + states.chunk)
            if states.in_one_pass:
                assert states.head.kernels is not None
                assert weight is not None
                targets_C = states.distribution.targets_N[span]
                logits_CV = _linear(hidden_NH[span], weight, bias_V, compute)[: len(targets_C)]
                states.head.kernels.head_statistics(logits_CV, targets_C, states.factor, found[:, span])
            else:
                found[:3, span] = _statistics(hidden_NH[span], weight, bias_V, states, start)
        ctx.tops_sums_2N = found[3:]
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        ctx.states = states
        logps_N, entropy_N, collision_N = found[:3]
        ctx.mark_non_differentiable(entropy_N, collision_N)
        return logps_N, entropy_N, collision_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V = ctx.saved_tensors
        states: CompletionStates = ctx.states
        compute = states.head.compute
        grad_hidden_NH, grad_N = torch.empty_like(hidden_NH), grad_N.contiguous()
        weight = None if weight_VH is None else weight_VH.to(compute)
        grad_weight, in_place = None, False
        if ctx.needs_input_grad[1]:
            assert states.head.linear is not None
            # The parameter itself: what was saved for the backward pass need not be the same object.
            parameter = states.head.linear.weight
            in_place = states.adds_gradient and takes_in_place(parameter)
            grad_weight = gradient_of(parameter) if in_place else torch.zeros_like(weight_VH)
        grad_bias = torch.zeros_like(bias_V) if ctx.needs_input_grad[2] else None
        for start in range(0, hidden_NH.shape[0], states.chunk):
            span = slice(start, start + states.chunk)
            hidden_CH = hidden_NH[span]
            if states.in_one_pass:
                assert states.head.kernels is not None
                assert weight is not None
                grad_CV = _linear(hidden_CH, weight, bias_V, compute)
                targets_C, (tops_C, sums_C) = states.distribution.targets_N[span], ctx.tops_sums_2N[:, span]
                states.head.kernels.head_gradient(
                    grad_CV[: len(hidden_CH)], targets_C, states.factor, tops_C, sums_C, grad_N[span]
                )
                grad_CV[len(hidden_CH) :] = 0
            else:
                grad_CV = _gradient(hidden_CH, weight, bias_V, states, start, grad_N[span])
            if weight is None:
                grad_hidden_NH[span] = grad_CV
                continue
            grad_rows_CV = in_like_shapes(grad_CV.to(compute))
            grad_hidden_NH[span] = (grad_rows_CV @ weight)[: len(hidden_CH)]
            if grad_weight is not None:
                add_product(grad_weight, grad_rows_CV.mT, in_like_shapes(hidden_CH.to(compute)))
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0, dtype=grad_bias.dtype)
        return grad_hidden_NH, None if in_place else grad_weight, grad_bias, None


def takes_in_place(weight: Tensor) -> bool:
    """Whether a weight's gradient may be added to ``.grad``: it is a parameter, and nobody waits for the gradient."""
    return (
        weight.is_leaf and weight.requires_grad and not (weight._backward_hooks or weight._post_accumulate_grad_hooks)
    )


def gradient_of(leaf: Tensor) -> Tensor:
    """Where a parameter's gradient adds up."""
    if leaf.grad is None:
        leaf.grad = torch.zeros_like(leaf)
    return leaf.grad


def add_product(total_VH: Tensor, left_VC: Tensor, right_CH: Tensor) -> None:
    """``total += left @ right``, some rows at a time: the product of narrow matrices is as large as the total."""
    size = max(1, PRODUCT // right_CH.shape[1])
    for start in range(0, len(total_VH), size):
        total_VH[start : start + size] += left_VC[start : start + size] @ right_CH


def _gradient(
    hidden_CH: Tensor,
    weight_VH: Tensor | None,
    bias_V: Tensor | None,
    states: CompletionStates,
    start: int,
    grad_C: Tensor,
) -> Tensor:
    """Of a chunk's logits, as the linear layer gives them."""
    scores_CV, factor, slope_CV = _scores(hidden_CH, weight_VH, bias_V, states, start)
    targets_C1 = states.distribution.targets_N[start : start + len(hidden_CH), None]
    grad_CV = torch.softmax(scores_CV, dim=-1).mul_(-grad_C[:, None])
    del scores_CV  # one vocabulary-wide tensor less
    grad_CV.scatter_add_(-1, targets_C1, grad_C[:, None].to(grad_CV.dtype))
    grad_CV.mul_(factor)
    if slope_CV is not None:
        grad_CV.mul_(slope_CV)
    if weight_VH is not None and states.head.multiplier != 1:
        grad_CV.mul_(states.head.multiplier)
    return grad_CV


def _statistics(
    hidden_CH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, states: CompletionStates, start: int
) -> Tensor:
    """Log-probs, entropies and collision probabilities of a chunk, ``[3, C]``."""
    scores_CV, _, _ = _scores(hidden_CH, weight_VH, bias_V, states, start)
    highest_C, place_C = scores_CV.max(dim=-1)
    targets_C = states.distribution.targets_N[start : start + len(hidden_CH), None]
    chosen_C = scores_CV.gather(-1, targets_C).squeeze(-1)
    probs_CV = torch.softmax(scores_CV, dim=-1)
    # The likeliest token's probability is at least 1/V, so its logarithm is exact enough.
    highest_logp_C = probs_CV.gather(-1, place_C[:, None]).squeeze(-1).log()
    normalizer_C = highest_C - highest_logp_C
    logps_C = chosen_C - highest_C + highest_logp_C  # in this order a common shift costs nothing
    # A token that cannot occur has score -inf, and 0 * -inf is not 0.
    scores_CV.clamp_(min=torch.finfo(scores_CV.dtype).min)
    entropy_C = normalizer_C - torch.linalg.vecdot(probs_CV, scores_CV)
    return torch.stack([logps_C, entropy_C, torch.linalg.vecdot(probs_CV, probs_CV)])


def _scores(
    hidden_CH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, states: CompletionStates, start: int
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """``Distribution.scores`` of a chunk, and the soft cap's slope ``1 - tanh^2``, without gradient."""
    head, slope_CV = states.head, None
    if weight_VH is None:
        logits_CV = hidden_CH.to(torch.promote_types(hidden_CH.dtype, torch.float32), copy=True)
    else:
        logits_CV = _product(hidden_CH, weight_VH, bias_V, head.compute)
        if head.multiplier != 1:
            logits_CV.mul_(head.multiplier)
        if head.cap is not None:
            soft_cap(logits_CV, head.cap)
            slope_CV = 1 - (logits_CV / head.cap).square_()
    scores_CV, factor = states.distribution.scores(logits_CV, start)
    return scores_CV, factor, slope_CV
