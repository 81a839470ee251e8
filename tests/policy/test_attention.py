"""Packed attention against a softmax written out token by token: outputs, and gradients of everything."""

import math

import pytest
import torch

from cohort.policy.attention import explicit_attention, packed_attention
from cohort.policy.layout import Layout
from tests.conftest import each, telling

CPU = torch.device("cpu")
LAYOUTS = {  # lengths, prefix of each, lengths of the prefixes
    "one": ([7], None, ()),
    "one token": ([1], None, ()),
    "equal": ([5, 5, 5], None, ()),
    "unequal": ([9, 1, 3, 4, 2, 8, 20], None, ()),
    "several after each prefix": ([3, 9, 1, 5, 4, 2], [0, 0, 1, 1, 1, 2], [6, 11, 1]),
    "equal after prefixes": ([4, 4, 4, 4, 4], [0, 0, 0, 1, 1], [3, 8]),
    "single tokens after prefixes": ([1, 1, 1], [1, 1, 0], [9, 2]),
    "some prefixes empty": ([3, 2, 6, 1], [0, 1, 1, 2], [0, 5, 0]),
    "all prefixes empty": ([3, 2], [0, 1], [0, 0]),
    "a prefix's sequences apart": ([2, 5, 3, 4, 1, 6], [1, 0, 1, 1, 0, 1], [4, 7]),
    "a prefix that none continues": ([2, 5], [2, 0], [4, 3, 7]),
}


def made(lengths, prefix_lengths, heads=4, kv_heads=2, width=6, dtype=torch.float64, size=1.0):
    """q, k, v, and the prefixes' k and v; leaves, laid out as a model's projections are (tokens before heads)."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(lengths), h) for h in (heads, kv_heads, kv_heads)] + [(sum(prefix_lengths), kv_heads)] * 2
    tensors = [torch.randn(*shape, width, generator=generator, dtype=torch.float64) * size for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def naive(tensors, layout, scaling, window=None, cap=None):
    """Token by token: one softmax of each head over all keys that it sees."""
    lengths, prefixes, prefix_lengths = layout
    q, k, v, prefix_k, prefix_v = tensors
    ratio = q.shape[1] // k.shape[1]
    rows, start = [], 0
    for s, length in enumerate(lengths):
        first = 0 if prefixes is None else sum(prefix_lengths[: prefixes[s]])
        before = 0 if prefixes is None else prefix_lengths[prefixes[s]]
        for position in range(length):
            keys = torch.cat([prefix_k[first : first + before], k[start : start + position + 1]])
            values = torch.cat([prefix_v[first : first + before], v[start : start + position + 1]])
            seen = min(window or math.inf, len(keys))
            q_KRD = q[start + position].unflatten(0, (-1, ratio))
            scores = torch.einsum("lkd,krd->lkr", keys[-seen:], q_KRD) * scaling
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            rows.append(torch.einsum("lkr,lkd->krd", torch.softmax(scores, 0), values[-seen:]).flatten(0, 1))
        start += length
    return torch.stack(rows)


def packed(tensors, layout, scaling, window=None, cap=None, function=packed_attention):
    lengths, prefixes, prefix_lengths = layout
    q, k, v, *prefix = (tensor.transpose(0, 1) for tensor in tensors)
    prefix = None if prefixes is None else tuple(prefix)
    where = Layout(lengths, CPU, prefixes, prefix_lengths)
    if function is explicit_attention:
        out = function(q, k, v, *(prefix or (None, None)), where, scaling, window, cap)
    else:
        out = function(q, k, v, where, scaling=scaling, prefix=prefix, window=window, cap=cap)
    return out.transpose(0, 1)


def assert_same(tensors, layout, tolerance, **settings):
    """Outputs, and gradients of all five tensors, beside the largest number of each, or the numbers of size 1 whose
    sums they are and which may cancel."""
    function, least = settings.pop("function", packed_attention), settings.pop("least", 1.0)
    expected = naive(tensors, layout, **settings)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    got = packed(tensors, layout, **settings, function=function)
    assert got.dtype == tensors[2].dtype
    results = []
    for out in (got, expected):
        grads = torch.autograd.grad((out * weights).sum(), tensors, materialize_grads=True)
        results.append([out.detach(), *grads])
    for name, one, other in zip(("out", "q", "k", "v", "prefix k", "prefix v"), *results, strict=True):
        scale = other.abs().max().item() if other.numel() else 1.0
        gap = (one - other).abs().max().item() if other.numel() else 0.0
        assert gap <= tolerance * max(scale, least), f"{name}: off by {gap:.2g} of {scale:.2g}"


WINDOWED = [(layout, window) for layout in LAYOUTS for window in (None, 1, 4, 12)]


@pytest.mark.parametrize(("layout", "window"), telling(WINDOWED, *WINDOWED[::5], *WINDOWED[2::5]))
def test_outputs_and_gradients(layout, window):
    """Windows shorter than the sequence and than the prefix, and that end inside either."""
    tensors = made(LAYOUTS[layout][0], LAYOUTS[layout][2])
    # float64, sums of up to 30 terms in another order
    assert_same(tensors, LAYOUTS[layout], 1e-13, scaling=0.4, window=window)


@each("layout", LAYOUTS)
def test_the_explicit_formula(layout):
    """Without settings, and with a cap and a window, for which the fused kernels are not used."""
    tensors = made(LAYOUTS[layout][0], LAYOUTS[layout][2])
    assert_same(tensors, LAYOUTS[layout], 1e-13, scaling=0.4, function=explicit_attention)
    assert_same(tensors, LAYOUTS[layout], 1e-13, scaling=0.4, window=4, cap=2.0)


@each(("native", "tolerance"), [(False, 1e-13), (True, 1e-5)])
@each("window", [None, 4])
def test_sinks_and_values_of_another_width(native, tolerance, window):
    """Beside the formula: float64 by torch's kernels, float32 by the native one."""
    lengths, prefixes, prefix_lengths = LAYOUTS["several after each prefix"]
    layout = Layout(lengths, CPU, prefixes, prefix_lengths)
    q, k, v, *prefix = made(lengths, prefix_lengths, dtype=torch.float32 if native else torch.float64)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=q.dtype, requires_grad=True)
    leaves, found = (q, k, v, *prefix, sinks), []
    q, k, v, prefix_k, prefix_v = (part.transpose(0, 1) for part in (q, k, v, *prefix))
    v, prefix_v = v[..., :4], prefix_v[..., :4]
    for formula in (False, True):
        if formula:
            out = explicit_attention(q, k, v, prefix_k, prefix_v, layout, 0.4, window, None, sinks)
        else:
            settings = {"window": window, "sinks": sinks, "native": native}
            out = packed_attention(q, k, v, layout, scaling=0.4, prefix=(prefix_k, prefix_v), **settings)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert found[0][0].shape[-1] == 4
    assert float(found[1][-1].abs().min()) > 1e-3
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_in_bfloat16():
    layout = LAYOUTS["a prefix's sequences apart"]
    tensors = made(layout[0], layout[2], dtype=torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    got, expected = packed(tensors, layout, 0.4), naive(exact, layout, 0.4)
    grads = torch.autograd.grad(got.double().square().sum(), tensors)
    expected_grads = torch.autograd.grad(expected.square().sum(), exact)
    assert {each.dtype for each in (got, *grads)} == {torch.bfloat16}
    for one, other in zip((got, *grads), (expected, *expected_grads), strict=True):
        # Computed in float32; only what comes out and what goes back in has 8 bits (half a unit: 2^-9).
        assert (one - other).abs().max() <= 2**-7 * other.abs().max()


@pytest.mark.parametrize(("window", "size"), [(None, 30.0), (4, 30.0), (None, 1e-8)])
def test_scores_of_any_size(size, window):
    """Scores up to some thousand: one part may be nothing beside the other, and exponentials of 1000 are infinite."""
    layout = LAYOUTS["several after each prefix"]
    tensors = made(layout[0], layout[2], size=size)
    scores = (tensors[0][:, 0] @ tensors[1][:, 0].T).abs().max()
    assert scores > 1000 or scores < 1e-10
    # A gap of 1e-16 of a score of 5000 is one of 5e-13 of its weight; q's gradient is a difference of such.
    assert_same(tensors, layout, 1e-11, scaling=1.0, window=window, least=1.0 if size > 1 else 0.0)


def test_the_layout_by_hand():
    layout = Layout([3, 1, 2], CPU, [1, 0, 0], [4, 2])
    assert layout.positions_T.tolist() == [2, 3, 4, 4, 4, 5]
    assert layout.before == (2, 4, 4)
    assert layout.longest == 6
    assert [(c.tokens, c.prefix) for c in layout.continuations] == [
        (slice(0, 3), slice(4, 6)),
        (slice(3, 6), slice(0, 4)),
    ]
    assert [tuple(bucket.index_JW.shape) for bucket in layout.buckets] == [(1, 3), (1, 2), (1, 1)]
    assert [tuple(bucket.index_JW.shape) for bucket in Layout([8, 6, 7, 1], CPU).buckets] == [(3, 8), (1, 1)]


def test_nothing_but_inputs_and_one_output_is_kept_for_the_backward_pass():
    """No scores: what is kept grows with the tokens and not with their square."""
    kept = {}
    for length in (50, 100):
        layout = ([length] * 3, [0, 0, 1], [length, length])
        tensors = made(layout[0], layout[2])
        sizes = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            packed(tensors, layout, 0.4)
        kept[length] = sum(sizes.values())
    assert kept[100] == pytest.approx(2 * kept[50], rel=1e-6)
