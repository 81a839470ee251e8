"""The table itself: each rule refuses a call that CUDA refuses, takes one that CUDA takes, and has a source."""

import threading

import pytest
import torch

from cohort.policy.attention import packed_attention
from cohort.policy.device import forced_kind
from cohort.policy.layout import Layout
from tests.conftest import each
from tests.cuda_on_cpu import cuda_on_cpu
from tests.cuda_rules.rules import RULES, SOURCES, Refused, known_autocast, why_refused

aten = torch.ops.aten
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64
Q, STARTS = torch.zeros(3, 4, 16, dtype=HALF), torch.tensor([0, 3], dtype=torch.int32)
K, LSE = torch.zeros(3, 2, 16, dtype=HALF), torch.zeros(4, 3)
A, B, INDEX = torch.zeros(8, 8), torch.zeros(8, 8, dtype=HALF), torch.tensor([0, 1])
THREE = B.expand(2, 8, 8).contiguous()


def flash(q=Q, k=K, v=K, starts=STARTS):
    return aten._flash_attention_forward.default, (q, k, v, starts, starts, 3, 3, 0.0, True, False)


def back(grad=Q, q=Q, k=K, out=Q, lse=LSE):
    return aten._flash_attention_backward.default, (grad, q, k, k, out, lse, STARTS, STARTS, 3, 3, 0.0, True, Q, Q)


def adam(grad=A, state=A, step=None):
    lists = [[A], [grad], [state], [state], [], [torch.zeros(()) if step is None else step]]
    return aten._fused_adamw_.default, tuple(lists)


REFUSED = {
    "keys of another dtype": flash(k=K.float()),
    "values of another dtype": flash(v=K.float()),
    "attention in float32": flash(Q.float(), K.float(), K.float()),
    "a head of 12": flash(Q[..., :12].contiguous(), K[..., :12].contiguous(), K[..., :12].contiguous()),
    "numbers apart": flash(torch.zeros(3, 4, 32, dtype=HALF)[..., ::2]),
    "lengths in int64": flash(starts=STARTS.long()),
    "an axis too many": flash(k=K[None], v=K[None]),
    "3 heads over 2": flash(Q[:, :3]),
    "a gradient of another dtype": back(grad=Q.float()),
    "an output of another dtype": back(out=Q.float()),
    "log-sum-exps by token": back(lse=LSE.T),
    "log-sum-exps of other queries": back(lse=LSE[:, :2].contiguous()),
    "a CPU's attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, (Q[None], K[None], K[None])),
    "a product of two dtypes": (aten.mm.default, (A, B)),
    "a product of integers": (aten.mm.default, (A.long(), A.long())),
    "a linear layer of two dtypes": (aten.linear.default, (A, B)),
    "a sum of another dtype": (aten.addmm.default, (A, B, B)),
    "batches of two dtypes": (aten.bmm.default, (A[None], B[None])),
    "float64 of bfloat16": (aten.bmm.dtype, (B[None], B[None], DOUBLE)),
    "float32 of float64": (aten.mm.dtype, (A.double(), A.double(), SINGLE)),
    "a summand in float64": (aten.addmm.dtype, (A.double(), B, B, SINGLE)),
    "experts of two dtypes": (aten._grouped_mm.default, (A, THREE, INDEX.int())),
    "experts by int64": (aten._grouped_mm.default, (B, THREE, INDEX)),
    "experts of 4 numbers": (aten._grouped_mm.default, (B[:, :4].contiguous(), THREE[:, :4], INDEX.int())),
    "a norm of two dtypes": (aten._fused_rms_norm.default, (B, [8], A[0], 1e-6)),
    "a centred norm of two dtypes": (aten.native_layer_norm.default, (B, [8], A[0], None, 1e-6)),
    "a search in another dtype": (aten.searchsorted.Tensor, (A[0], A[0].double())),
    "a gradient in another order": adam(grad=torch.zeros(8, 8).T),
    "a gradient in bfloat16": adam(grad=B),
    "a state in bfloat16": adam(state=B),
    "a step in int64": adam(step=torch.zeros((), dtype=torch.int64)),
    "a sum at indices of another dtype": (aten.index_add_.default, (A, 0, INDEX, B[:2])),
    "indices in int16": (aten.index_add_.default, (A, 0, INDEX.short(), A[:2])),
    "a copy at indices": (aten.index_copy_.default, (A, 0, INDEX, B[:2])),
    "values at indices": (aten.index_put_.default, (A, [INDEX], B[:2])),
    "a scattered sum": (aten.scatter_add_.default, (A, 0, INDEX[:, None], B[:2])),
    "a triangular system": (aten.linalg_solve_triangular.default, (B, B)),
    "a convolution of two dtypes": (aten.convolution.default, (A[None], THREE, None)),
}
TAKEN = {
    "attention": flash(),
    "its gradient": back(),
    "float32 of bfloat16": (aten.bmm.dtype, (B[None], B[None], SINGLE)),
    "a sum in float32": (aten.addmm.dtype, (A, B, B, SINGLE)),
    "experts": (aten._grouped_mm.default, (B, THREE, INDEX.int())),
    "experts in float32": (aten._grouped_mm.default, (A, THREE.float(), INDEX.int())),
    "a step of AdamW": adam(),
    "a sum at indices": (aten.index_add_.default, (A, 0, INDEX, A[:2])),
    "a convolution": (aten.convolution.default, (B[None], THREE, None)),
}


@each(("name", "call"), REFUSED.items())
def test_what_is_refused(name, call):
    assert why_refused(*call, {}), name


@each(("name", "call"), TAKEN.items())
def test_what_is_taken(name, call):
    assert why_refused(*call, {}) is None, name


def test_experts_in_float32_are_refused_under_autocast():
    call = TAKEN["experts in float32"]
    with known_autocast(), torch.autocast("cpu", HALF):
        assert "only bfloat16" in why_refused(*call, {})
        with torch.autocast("cpu", enabled=False):
            assert why_refused(*call, {}) is None


def test_every_rule_has_a_source():
    for name in RULES:
        assert any(name.startswith(beginning) for beginning in SOURCES), name


def test_rules_hold_in_threads_and_backward_passes():
    failed = []

    def multiply():
        try:
            torch.mm(A, B)
        except Refused as error:
            failed.append(error)

    with cuda_on_cpu():
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
        assert len(failed) == 1
        x = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
        y = _Wrong.apply(x)
        with pytest.raises(Refused, match="index_add_"):
            y.sum().backward()


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros(2).index_add_(0, INDEX, grad)


def test_a_cpu_is_not_taken_for_a_gpu():
    """Explicit use of a CPU's kernels is refused, torch's own choice of one is not."""
    layout = Layout([3], torch.device("cpu"))
    parts = [torch.randn(2, 3, 8, dtype=HALF) for _ in range(3)]
    with cuda_on_cpu():
        torch.nn.functional.scaled_dot_product_attention(*(part[None] for part in parts))
        with forced_kind("cpu"), pytest.raises(Refused, match="for_cpu"):
            packed_attention(*parts, layout, scaling=1.0)
        with forced_kind("cpu"), pytest.raises(Refused, match="native kernel"):
            packed_attention(*parts, layout, scaling=1.0, native=True)
