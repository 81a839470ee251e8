"""From hidden states to log-probs without the logits of a batch: a chunk of tokens at a time, forward and backward.

With hidden state h, head W, temperature tau, and penalty and supports inside z:

    z = shape(W h) / tau        logps = z_target - log sum_v exp z_v
    d logps / d z = onehot(target) - softmax(z)

Hidden states are kept for all tokens. The backward pass computes each chunk's logits again, except those of the last
chunks, which native kernels keep (``Head.kept_tokens``).

Axis letters: N drawn tokens, C tokens of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from cohort.errors import ModelError
from cohort.native import call, has_pairs
from cohort.policy.anatomy import soft_cap
from cohort.policy.device import kind_of
from cohort.policy.narrow import Matrix, add_gradients, takes_in_place
from cohort.policy.rows import Distribution

# ----------------------------------------
# The head in float32 under a model that computes in half precision: logits are not rounded to half precision, in the
# update and in the sampler. Source: ScaleRL (arXiv 2510.13786).


def use_float32_head(model: Any) -> None:
    """Let the model's head compute in float32. Copies of the model do so too.

    Raises:
        ModelError: the head is not a plain linear layer, or adapters train it.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ModelError(f"model.float32_head needs a head that is a plain linear layer, got a {type(head).__name__}")
    head.register_forward_hook(_in_float32)


def is_float32(head: Any) -> bool:
    """Whether a head computes in float32 whatever the rest of the model computes in."""
    return _in_float32 in getattr(head, "_forward_hooks", {}).values()


def _in_float32(head: nn.Linear, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
    with torch.autocast(inputs[0].device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return functional.linear(inputs[0].float(), head.weight.float(), bias)


CHUNK_TOKENS = 512
"""Maximum number of tokens of a chunk."""
CHUNK_LOGITS = 2**25
"""Maximum number of logits of a chunk (128 MiB in float32)."""
CUDA_TOKENS, CUDA_LOGITS = 2048, 2**29
"""The same on CUDA, whose products want more rows: at most 2 GiB in float32."""
NATIVE_TOKENS = 1024
"""Maximum number of tokens of a chunk in native kernels, which need one tensor of logits."""
KEPT_BYTES = 2**26
"""Most memory of logits in native kernels, unless the head's weight takes more: then as much as that."""
LIKE_SHAPES = 64
"""On a CPU, the number of rows of a product is a multiple of this. oneDNN compiles code for every shape and keeps most
of it until the process ends: with a shape per token count, memory would grow from step to step."""


def in_like_shapes(rows: Tensor, multiple: int = LIKE_SHAPES) -> Tensor:
    """On a CPU, pad with rows of zeros to a multiple."""
    missing = -len(rows) % multiple if kind_of(rows.device) == "cpu" else 0
    return functional.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


def _whole_shapes(size: int) -> int:
    """The largest multiple of ``LIKE_SHAPES`` up to a size, or the size if it is smaller."""
    return size - size % LIKE_SHAPES or size


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Tokens whose logits torch has at the same time, with their softmax: 8 bytes a logit."""
    tokens, logits = (CUDA_TOKENS, CUDA_LOGITS) if kind_of(device) == "cuda" else (CHUNK_TOKENS, CHUNK_LOGITS)
    return _whole_shapes(max(1, min(tokens, logits // vocabulary)))


class TokenLogps(NamedTuple):
    """Shape ``[N]`` each. Only the log-probs have a gradient."""

    logps_N: Tensor
    """``log softmax(logits / temperature)`` at the drawn token."""
    entropy_N: Tensor
    """``-sum_v p_v log p_v`` of the distribution that was drawn from, in nats."""
    collision_N: Tensor
    """``sum_v p_v^2``: the probability that two draws are equal."""


@dataclass(frozen=True, slots=True)
class Head:
    """``logits = cap(multiplier * (W h + b))``, or logits that were computed already."""

    linear: nn.Linear | None = None
    """None: hidden states are logits."""
    compute: torch.dtype = torch.float32
    """Dtype of the product."""
    multiplier: float = 1.0
    cap: float | None = None
    """Logits become ``cap * tanh(logits / cap)``. None: no cap."""
    native: bool = False
    """Whether native kernels compute log-probs."""
    own_dtype: bool = False
    """Whether ``compute`` is not the dtype of the rest of the model, to which autocast would convert the products."""

    @property
    def kept_tokens(self) -> int:
        """Most tokens whose logits native kernels have at a time. They keep these for the backward pass."""
        assert self.linear is not None
        return max(1, max(KEPT_BYTES, self.linear.weight.nbytes) // self.native_bytes)

    @property
    def native_bytes(self) -> int:
        """Bytes of a token's logits in native kernels. 0: the head has no matrix, or torch computes its log-probs."""
        return len(self.linear.weight) * self.compute.itemsize if self.linear is not None and self.native else 0

    def without_autocast(self) -> AbstractContextManager[None]:
        """A block whose products are computed in the dtype of their factors."""
        if not self.own_dtype or self.linear is None:
            return nullcontext()
        return torch.autocast(self.linear.weight.device.type, enabled=False)

    def cast_weight(self) -> Tensor | None:
        """The weight in the compute dtype."""
        return None if self.linear is None else self.linear.weight.to(self.compute)

    def product(self, hidden_CH: Tensor, weight_VH: Tensor | Matrix, multiple: int = LIKE_SHAPES) -> Tensor:
        """``W h + b`` in the compute dtype; of a tensor on a CPU followed by padding, see ``in_like_shapes``."""
        assert self.linear is not None
        if isinstance(weight_VH, Matrix):
            return weight_VH.outputs(hidden_CH.to(self.compute))
        bias_V = None if self.linear.bias is None else self.linear.bias.to(self.compute)
        with self.without_autocast():
            return functional.linear(in_like_shapes(hidden_CH.to(self.compute), multiple), weight_VH, bias_V)

    def logits(self, hidden_CH: Tensor, weight_VH: Tensor | None = None, *, multiple: int = LIKE_SHAPES) -> Tensor:
        """``[C, V]`` in float32 or wider, differentiable. ``weight_VH``: from ``cast_weight``, to cast it once only.
        ``multiple``: see ``in_like_shapes``."""
        if self.linear is None:
            wide = torch.promote_types(hidden_CH.dtype, torch.float32)
            return hidden_CH.to(wide, copy=not hidden_CH.requires_grad)  # scores are written over logits
        weight_VH = self.linear.weight.to(self.compute) if weight_VH is None else weight_VH
        logits_CV = self.product(hidden_CH, weight_VH, multiple)[: len(hidden_CH)]
        logits_CV = logits_CV.to(torch.promote_types(self.compute, torch.float32))
        in_place = not logits_CV.requires_grad
        if self.multiplier != 1:
            logits_CV = logits_CV.mul_(self.multiplier) if in_place else logits_CV * self.multiplier
        if self.cap is None or in_place:
            return soft_cap(logits_CV, self.cap)
        return self.cap * torch.tanh(logits_CV / self.cap)


@dataclass(frozen=True, slots=True)
class CompletionStates:
    """Last hidden states that predict drawn tokens, and everything that turns them into log-probs."""

    hidden_NH: Tensor
    head: Head
    distribution: Distribution
    router_logits: tuple[Tensor, ...] = ()
    """Of each layer with experts, ``[N, E]``, if the load-balancing loss needs them."""
    adds_gradient: bool = False
    """Whether the backward pass of ``logps`` adds the weight's gradient to ``.grad``; see
    ``ComputeModel.gradients_in_place``."""

    @property
    def chunk(self) -> int:
        """Tokens whose logits torch has at the same time."""
        linear = self.head.linear
        vocabulary = self.hidden_NH.shape[1] if linear is None else linear.weight.shape[0]
        return chunk_tokens(vocabulary, self.hidden_NH.device)

    @property
    def drawn_chunk(self) -> int:
        """Tokens whose logits exist at the same time in ``logps``."""
        return _whole_shapes(min(NATIVE_TOKENS, self.head.kept_tokens)) if self.native else self.chunk

    def chunks(self, size: int) -> Iterator[slice]:
        """All tokens, chunk by chunk. The first may have fewer tokens than the others."""
        count = len(self.distribution.targets_N)
        return (slice(max(0, end - size), end) for end in range(count % size or size, count + 1, size))

    @property
    def native(self) -> bool:
        """Whether native kernels compute log-probs of these logits. They know no cap, penalty or support."""
        plain = self.head.linear is not None and self.head.cap is None and self.distribution.is_plain
        return self.head.native and plain

    def weight(self) -> Tensor | Matrix | None:
        """The head's weight in the compute dtype. If it must be cast to bfloat16, and the processor multiplies pairs of
        such numbers, it is packed for native kernels."""
        linear, compute = self.head.linear, self.head.compute
        packs = self.native and compute == torch.bfloat16 and has_pairs()
        if packs and linear is not None and (linear.weight.dtype != compute or getattr(linear, "is_table", False)):
            return Matrix([linear.weight.detach()], linear.bias, compute)
        return self.head.cast_weight()

    def call_native(self, logits_CV: Tensor, span: slice, **others: Tensor) -> None:
        """The kernel of update.c on a chunk's logits: statistics, or with ``grads`` their gradient in their place."""
        rows, vocabulary = logits_CV.shape
        factor, targets_C = self.head.multiplier / self.distribution.temperature, self.distribution.targets_N[span]
        call("head", logits=logits_CV, targets=targets_C, rows=rows, vocabulary=vocabulary, factor=factor, **others)

    def logps(self) -> TokenLogps:
        """Log-probs of the tokens, differentiable, with entropies and collision probabilities."""
        linear = self.head.linear
        weight, bias = (None, None) if linear is None else (linear.weight, linear.bias)
        return TokenLogps(*_DrawnLogps.apply(self.hidden_NH, weight, bias, self))  # type: ignore[no-untyped-call]

    def log_probs(self, hidden_CH: Tensor, start: int) -> Tensor:
        """Log-probs of the whole vocabulary, ``[C, V]``, of the tokens from ``start`` on. Differentiable."""
        scores_CV, _ = self.distribution.scores(self.head.logits(hidden_CH), start)
        return torch.log_softmax(scores_CV, dim=-1)


def chunked_terms(
    term: Callable[..., Tensor], states: Sequence[CompletionStates], others_N: Sequence[Tensor]
) -> Tensor:
    """The sum of a differentiable term over the vocabulary, in chunks that are recomputed in the backward pass.

    Args:
        term: takes the log-probs of a chunk under each model, then the chunk of each of ``others_N``; returns a number.
        states: of one or more models, for the same tokens.
        others_N: more tensors per token.
    """

    def piece(start: int, *parts: Tensor) -> Tensor:
        log_probs = [each.log_probs(hidden_CH, start) for each, hidden_CH in zip(states, parts, strict=False)]
        return term(*log_probs, *parts[len(states) :])

    first = states[0]
    wide = torch.promote_types(first.hidden_NH.dtype, torch.float32)
    total = first.hidden_NH.new_zeros((), dtype=wide)
    # On CUDA a quarter: a term and its gradient have several tensors of the vocabulary's width for each model.
    size = first.chunk // 4 if kind_of(first.hidden_NH.device) == "cuda" else first.chunk
    for span in first.chunks(max(1, size)):
        parts = [values[span] for values in (*(each.hidden_NH for each in states), *others_N)]
        total = total + torch.utils.checkpoint.checkpoint(
            piece, span.start, *parts, use_reentrant=False, preserve_rng_state=False
        )
    return total


class _DrawnLogps(torch.autograd.Function):
    """``CompletionStates.logps``."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor | None, bias_V: Tensor | None, states: CompletionStates
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = hidden_NH.dtype if weight_VH is None else weight_VH.dtype
        found = hidden_NH.new_empty(5, len(hidden_NH), dtype=torch.promote_types(wide, torch.float32))
        targets_N = states.distribution.host_targets_N
        if weight_VH is not None and len(targets_N):
            lowest, highest = targets_N.aminmax()
            if lowest < 0 or highest >= len(weight_VH):
                raise IndexError(f"completions hold ids from {lowest} to {highest}, of a head of {len(weight_VH):,}")
        weight = states.weight()  # once for all chunks
        # The backward pass is next: it takes the copy and frees it.
        ctx.copy = None if states.head.linear is None or weight is states.head.linear.weight else weight
        ctx.kept = {}
        for span in states.chunks(states.drawn_chunk):
            if isinstance(weight, Matrix) or (states.native and weight is not None):
                product_CV = states.head.product(hidden_NH[span], weight)
                names = ("logps", "entropies", "collisions", "tops", "sums")
                logits_CV = product_CV[: len(targets_N[span])]
                states.call_native(logits_CV, span, **dict(zip(names, found[:, span], strict=True)))
                if ctx.needs_input_grad[0] and len(targets_N) - span.start <= states.head.kept_tokens:
                    ctx.kept[span.start] = product_CV
                del product_CV, logits_CV  # one chunk's at a time
            else:
                found[:3, span] = _statistics(hidden_NH[span].detach(), weight, states, span)
        ctx.tops_sums_2N = found[3:]
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V)
        # Without the hidden states, which are saved: they can be freed before the layers' backward pass.
        ctx.states = replace(states, hidden_NH=hidden_NH.new_empty(0, hidden_NH.shape[1]))
        logps_N, entropy_N, collision_N = found[:3]
        ctx.mark_non_differentiable(entropy_N, collision_N)
        return logps_N, entropy_N, collision_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, _, bias_V = ctx.saved_tensors
        states: CompletionStates = ctx.states
        head = states.head
        grad_hidden_NH, grad_N = torch.empty_like(hidden_NH), grad_N.contiguous()
        grad_weight, in_place, fresh = None, False, True
        if ctx.needs_input_grad[1]:
            assert head.linear is not None
            parameter = head.linear.weight  # the parameter itself: a saved tensor may be another object
            in_place = states.adds_gradient and takes_in_place(parameter)
            grad_weight = parameter.grad if in_place else None
            fresh = grad_weight is None
            grad_weight = torch.empty_like(parameter) if grad_weight is None else grad_weight
        grad_bias = torch.zeros_like(bias_V) if ctx.needs_input_grad[2] else None
        weight, ctx.copy = states.weight() if ctx.copy is None else ctx.copy, None
        for span in reversed([*states.chunks(states.drawn_chunk)]):  # the last ones are kept, and freed first
            hidden_CH = hidden_NH[span]
            kept_CV = ctx.kept.pop(span.start, None)
            grad_CV = _gradient(hidden_CH, weight, states, span, grad_N[span], ctx.tops_sums_2N[:, span], kept_CV)
            if weight is None:
                grad_hidden_NH[span] = grad_CV
                continue
            multiple = 1 if isinstance(weight, Matrix) else LIKE_SHAPES
            grad_rows_CV = in_like_shapes(grad_CV.to(head.compute), multiple)
            with head.without_autocast():
                last = span.start == 0
                product_CH = (
                    weight.inputs(grad_rows_CV, last=last) if isinstance(weight, Matrix) else grad_rows_CV @ weight
                )
                grad_hidden_NH[span] = product_CH[: len(hidden_CH)]
                if grad_weight is not None:
                    hidden_rows_CH = in_like_shapes(hidden_CH.to(head.compute), multiple)
                    add_gradients([grad_weight], grad_rows_CV, hidden_rows_CH, fresh=[fresh], native=states.native)
                    fresh = False
            if grad_bias is not None:
                grad_bias += grad_CV.sum(0, dtype=grad_bias.dtype)
            del kept_CV, grad_CV, grad_rows_CV  # one chunk's at a time
        if grad_weight is not None and fresh:  # no tokens
            grad_weight.zero_()
        if in_place:
            parameter.grad = grad_weight
        return grad_hidden_NH, None if in_place else grad_weight, grad_bias, None


def gradient_of(leaf: Tensor) -> Tensor:
    """The ``.grad`` of a parameter, zeros at first."""
    if leaf.grad is None:
        leaf.grad = torch.zeros_like(leaf)
    return leaf.grad


def _gradient(
    hidden_CH: Tensor,
    weight_VH: Tensor | Matrix | None,
    states: CompletionStates,
    span: slice,
    grad_C: Tensor,
    tops_sums_2C: Tensor,
    kept_CV: Tensor | None,
) -> Tensor:
    """The gradient of a chunk's ``Head.product``, padding included, or of its logits. ``kept_CV``: that product, which
    is overwritten; None: compute it again."""
    head, targets_C = states.head, states.distribution.targets_N[span]
    if isinstance(weight_VH, Matrix) or (states.native and weight_VH is not None):
        grad_CV = head.product(hidden_CH, weight_VH) if kept_CV is None else kept_CV
        count, (tops_C, sums_C) = len(hidden_CH), tops_sums_2C
        states.call_native(grad_CV[:count], span, tops=tops_C, sums=sums_C, grads=grad_C)
        grad_CV[count:] = 0
        return grad_CV
    logits_CV = head.logits(hidden_CH, weight_VH)
    slope_CV = None
    if head.cap is not None and weight_VH is not None:
        slope_CV = 1 - (logits_CV / head.cap).square_()  # 1 - tanh^2
    scores_CV, factor = states.distribution.scores(logits_CV, span.start)
    grad_CV = torch.softmax(scores_CV, dim=-1).mul_(-grad_C[:, None])
    del scores_CV, logits_CV  # one tensor of the vocabulary's width less
    grad_CV.scatter_add_(-1, targets_C[:, None], grad_C[:, None].to(grad_CV.dtype))
    grad_CV.mul_(factor)
    if slope_CV is not None:
        grad_CV.mul_(slope_CV)
    if weight_VH is not None and head.multiplier != 1:
        grad_CV.mul_(head.multiplier)
    return grad_CV


def _statistics(hidden_CH: Tensor, weight_VH: Tensor | None, states: CompletionStates, span: slice) -> Tensor:
    """Log-probs, entropies and collision probabilities of a chunk, ``[3, C]``."""
    scores_CV, _ = states.distribution.scores(states.head.logits(hidden_CH, weight_VH), span.start)
    top_C, top_index_C = scores_CV.max(dim=-1)
    drawn_C = scores_CV.gather(-1, states.distribution.targets_N[span, None]).squeeze(-1)
    probs_CV = torch.softmax(scores_CV, dim=-1)
    # The likeliest token's probability is at least 1/V, so its logarithm is exact enough.
    top_logp_C = probs_CV.gather(-1, top_index_C[:, None]).squeeze(-1).log()
    normalizer_C = top_C - top_logp_C
    logps_C = drawn_C - top_C + top_logp_C  # in this order a common shift costs no precision
    # A token that cannot occur has score -inf, and 0 * -inf is NaN.
    scores_CV.clamp_(min=torch.finfo(scores_CV.dtype).min)
    # In place, as a tensor of a chunk may take 2 GiB on CUDA. Autocast would round the factors of a dot product.
    entropy_C = normalizer_C - scores_CV.mul_(probs_CV).sum(-1)
    return torch.stack([logps_C, entropy_C, probs_CV.mul_(probs_CV).sum(-1)])
