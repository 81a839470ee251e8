"""CUDA's choices on a CPU: every branch is taken as on CUDA, formulas stand in for the kernels that a CPU lacks, and what
CUDA refuses is refused (``tests/cuda_rules/rules.py``)."""

import contextlib
import sys
from unittest import mock

import torch

from cohort import native
from cohort.policy.device import forced_kind
from tests.cuda_rules.rules import HALF, Refused, cuda_rules


def scores_of(q, k, scaling, causal, left):
    """Scores of one span, ``[A, queries, keys]``; queries end where the keys end."""
    share = q.shape[1] // k.shape[1]
    scores = torch.einsum("qad,kad->aqk", q, k.repeat_interleave(share, 1)) * scaling
    back = torch.arange(len(q))[:, None] + (len(k) - len(q)) - torch.arange(len(k))
    hidden = torch.zeros_like(back, dtype=torch.bool)
    if causal:
        hidden |= back < 0
    if left >= 0:
        hidden |= back > left
    return scores.masked_fill(hidden, -torch.inf)


def spans_of(starts_q, starts_k):
    ends = zip(
        starts_q.tolist()[:-1], starts_q.tolist()[1:], starts_k.tolist()[:-1], starts_k.tolist()[1:], strict=True
    )
    return [(slice(a, b), slice(c, d)) for a, b, c, d in ends]


def forward(
    q, k, v, starts_q, starts_k, most_q, most_k, dropout, causal, debug, *, scale=None, window_size_left=None, **_
):
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert q.is_contiguous()
    assert k.is_contiguous()
    assert v.is_contiguous()
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.promote_types(q.dtype, torch.float32))
    for at_q, at_k in spans_of(starts_q, starts_k):
        assert at_q.stop - at_q.start <= most_q
        assert at_k.stop - at_k.start <= most_k
        wide = [part.to(lse.dtype) for part in (q[at_q], k[at_k], v[at_k])]
        scores = scores_of(*wide[:2], scale, causal, -1 if window_size_left is None else window_size_left)
        lse[:, at_q] = scores.logsumexp(-1)
        values = wide[2].repeat_interleave(q.shape[1] // v.shape[1], 1)
        out[at_q] = torch.einsum("aqk,kad->qad", scores.softmax(-1), values).to(out.dtype)
    assert starts_q[-1] == len(q)
    assert starts_k[-1] == len(k)
    return out, lse, *(q.new_empty(0) for _ in range(3))


def backward(
    grad, q, k, v, out, lse, starts_q, starts_k, most_q, most_k, dropout, causal, state, unused, *, scale=None,
    window_size_left=None, **_,
):  # fmt: skip
    """With the log-sum-exp and output that it is given, which are of more keys than these."""
    assert grad.is_contiguous()
    assert lse.is_contiguous()
    wide = lse.dtype
    grads = [torch.zeros_like(part, dtype=wide) for part in (q, k, v)]
    share = q.shape[1] // k.shape[1]
    for at_q, at_k in spans_of(starts_q, starts_k):
        queries, keys, values, g, o = (part.to(wide) for part in (q[at_q], k[at_k], v[at_k], grad[at_q], out[at_q]))
        scores = scores_of(queries, keys, scale, causal, -1 if window_size_left is None else window_size_left)
        weights = (scores - lse[:, at_q, None]).exp()
        of_weights = torch.einsum("qad,kad->aqk", g, values.repeat_interleave(share, 1))
        of_scores = weights * (of_weights - (g * o).sum(-1).T[..., None]) * scale
        grads[0][at_q] = torch.einsum("aqk,kad->qad", of_scores, keys.repeat_interleave(share, 1))
        for total, piece, with_ in ((grads[1], of_scores, queries), (grads[2], weights, g)):
            each = torch.einsum("aqk,qad->kad", piece, with_)
            total[at_k] += each.unflatten(1, (-1, share)).sum(2)
    return tuple(each.to(q.dtype) for each in grads)


def product(factors, summand=None, beta=1, alpha=1, out=None):
    """The product of half-precision factors with float32 sums, which a CPU does not return in float32."""
    found = alpha * torch.matmul(*(factor.double() for factor in factors))
    found = (found if summand is None else found + beta * summand).to(torch.float32)
    return found if out is None else out.copy_(found)


PRODUCTS = {
    "mm.dtype": lambda a, b, _dtype: product((a, b)),
    "bmm.dtype": lambda a, b, _dtype: product((a, b)),
    "addmm.dtype": lambda c, a, b, _dtype, *, beta=1, alpha=1: product((a, b), c, beta, alpha),
    "addmm.dtype_out": lambda c, a, b, _dtype, *, beta=1, alpha=1, out: product((a, b), c, beta, alpha, out),
}

WIDENED = (
    "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar", "softplus", "layer_norm", "rms_norm",
    "cosine_similarity", "logsumexp", "sum", "sum.dim_IntList", "softmax.int",
    "log_softmax.int", "cumsum", "linalg_vector_norm",
)  # fmt: skip
"""Operations that CUDA's autocast computes in float32, and a CPU's in the dtype that comes
(aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE): those that models and Cohort use."""


def widened(name):
    packet, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args, **kwargs):
        wide = [arg.float() if isinstance(arg, torch.Tensor) and arg.dtype in HALF else arg for arg in args]
        with torch.autocast("cpu", enabled=False):
            return function(*wide, **kwargs)

    return run


def no_native_kernels(*_, **__):
    raise Refused("a native kernel, which reads the memory of a CPU")


@contextlib.contextmanager
def without_native_kernels():
    """Refuse calls of the native kernels, which would read addresses of a GPU."""
    kernels = {"call": native.call, "load": native.load}
    with contextlib.ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith("cohort.")]:
            for name, function in kernels.items():
                if getattr(module, name, None) is function:
                    stack.enter_context(mock.patch.object(module, name, no_native_kernels))
        yield


@contextlib.contextmanager
def cuda_on_cpu(*, strict=True):
    """Choose as on CUDA, with the formulas in place of its kernels.

    Args:
        strict: refuse what CUDA refuses.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    for name, stand_in in PRODUCTS.items():
        library.impl(name, stand_in, "CPU")
    for name in WIDENED:
        library.impl(name, widened(name), "AutocastCPU")
    try:
        with forced_kind("cuda"), contextlib.ExitStack() as stack:
            if strict:
                stack.enter_context(without_native_kernels())
                stack.enter_context(cuda_rules())
            yield
    finally:
        library._destroy()
