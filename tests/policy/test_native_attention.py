"""Packed attention by the kernel against the formula in float64: outputs, and gradients of everything."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cohort.native import Unavailable, load
from cohort.policy import attention
from cohort.policy.attention import explicit_attention, packed_attention
from cohort.policy.layout import Layout
from tests.conftest import each
from tests.policy.plain import threads
from tests.policy.test_attention import LAYOUTS as PLAIN_LAYOUTS

try:
    load()
except Unavailable as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

CPU = torch.device("cpu")
FLOAT, HALF = torch.float32, torch.bfloat16
NAMES = ("out", "q", "k", "v", "prefix k", "prefix v")
ROUNDING = {FLOAT: 2**-24, HALF: 2**-8}  # of a number, at most, beside itself
SUMS = 2e-6  # of what float32 computes, beside the largest number of its kind: some ten roundings of 6e-8
WORDS = 2**-6  # the same in bfloat16: processors may multiply weights and slopes rounded to it, each off by up to 2^-9
LAYOUTS = PLAIN_LAYOUTS | {
    "more than a block of keys": ([70], None, ()),
    "one prefix": ([3, 9, 1, 5, 4, 2], [0] * 6, [6]),
    "long prefixes": ([3, 34, 5], [0, 0, 1], [40, 33]),
}


def made(layout, kv_heads=2, group=2, width=8, dtype=FLOAT, prefix_dtype=None, size=1.0, filler=0):
    """q, k, v, and the prefixes' k and v; laid out as a model's projections are (tokens before heads)."""
    lengths, prefixes, prefix_lengths = layout
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(lengths) + filler, heads) for heads in (kv_heads * group, kv_heads, kv_heads)]
    if prefixes is not None:
        shapes += [(sum(prefix_lengths), kv_heads)] * 2
    tensors = [torch.randn(*shape, width, generator=generator) * size for shape in shapes]
    tensors = [tensor.to(dtype) for tensor in tensors]
    return [tensor.to(dtype if n < 3 else prefix_dtype or dtype) for n, tensor in enumerate(tensors)]


def attended(tensors, layout, count=None, *, scaling=0.4, window=None, exact=False, rounded=None, spoil=None):
    """Output and gradients of all tensors, ``[tokens, heads, D]``.

    Args:
        count: of threads. None: two, or one where there is too little for two.
        exact: by the formula, in float64.
        rounded: the output that gradients are computed from: each weight's slope is its own less the mean of all, which
            is found as the output's product with its gradient.
        spoil: takes the weights that make one number of the output.
    """
    lengths, prefixes, prefix_lengths = layout
    if exact:
        tensors = [tensor.double() for tensor in tensors]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    q, k, v, *prefix = (leaf.transpose(0, 1) for leaf in leaves)
    where = Layout(lengths, CPU, prefixes, prefix_lengths)
    with threads(count or min(2, len(lengths) * k.shape[0])):
        if exact:
            q, k, v = (part[:, : where.tokens] for part in (q, k, v))
            out = explicit_attention(q, k, v, *(prefix or (None, None)), where, scaling, window)
            sums = log_sums(q, k, where, scaling, prefix[0] if prefix else None, window).T
        else:
            prefix = tuple(prefix) or None
            out = packed_attention(q, k, v, where, scaling=scaling, prefix=prefix, window=window, native=True)
            assert type(out.grad_fn).__name__ == "_NativeBackward"
            assert out.dtype == tensors[2].dtype
        out = out.transpose(0, 1)
        shape = (sum(lengths), *out.shape[1:])
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(HALF).to(out.dtype)
        if spoil is not None:
            spoil(weights)
        # What comes after the layout's tokens has gradients too, which go nowhere.
        weights = torch.nn.functional.pad(weights, (0, 0, 0, 0, 0, len(out) - len(weights)), value=1e3)
        total = (out * weights).sum()
        if rounded is not None:
            # The slopes of the log of the sum are the weights themselves.
            total = total - (((rounded[: len(out)] - out) * weights).sum(-1).detach() * sums).sum()
        grads = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [out.detach(), *grads]


def log_sums(q, k, layout, scaling, prefix_k, window):
    """Of the exponentials of each token's scores, ``[heads, tokens]``; by the formula."""
    share, found = q.shape[0] // k.shape[0], []
    for s, length in enumerate(layout.lengths):
        tokens = slice(layout.starts[s], layout.starts[s + 1])
        first = 0 if prefix_k is None else layout.prefix_starts[layout.prefixes[s]]
        before = k[:, :0] if prefix_k is None else prefix_k[:, first : first + layout.before[s]]
        keys = torch.cat([before, k[:, tokens]], 1).repeat_interleave(share, 0)
        back = torch.arange(length)[:, None] + layout.before[s] - torch.arange(keys.shape[1])
        seen = (back >= 0) & (back < (window or math.inf))
        found.append((q[:, tokens] @ keys.mT * scaling).masked_fill(~seen, -torch.inf).logsumexp(-1))
    return torch.cat(found, 1)


def assert_same(tensors, layout, count=None, sums=None, **ways):
    sums = sums or (WORDS if tensors[0].dtype == HALF else SUMS)
    found = attended(tensors, layout, count, **ways)
    one_block = Layout(layout[0], CPU, *layout[1:]).longest <= attention.BLOCK  # otherwise it is rounded afterwards
    expected = attended(tensors, layout, exact=True, rounded=found[0] if one_block else None, **ways)
    if not one_block and sums == SUMS:  # joins round outputs and sums again; keys and gradients of up to 3 multiply it
        sums *= 4
    tokens = sum(layout[0])
    for name, one, other, like in zip(NAMES, found, expected, [tensors[2], *tensors], strict=False):
        assert one.dtype == like.dtype
        if name in NAMES[:4]:
            assert (one[tokens:] == 0).all()
            one, other = one[:tokens], other[:tokens]
        if other.numel():
            gap, scale = (one.double() - other).abs(), other.abs().max().item()
            # Gradients are sums of numbers of size 1, which may cancel.
            bound = ROUNDING[one.dtype] * other.abs() + sums * max(scale, 1.0)
            assert (gap <= bound).all(), f"{name}: off by {gap.max().item():.2g} of {scale:.2g}"
    return found


@each(("window", "dtype"), [(None, FLOAT), (1, HALF), (4, FLOAT), (12, HALF)])
@each("layout", LAYOUTS)
def test_outputs_and_gradients(layout, window, dtype):
    """Windows shorter than the sequence and than the prefix, and that end inside either."""
    assert_same(made(LAYOUTS[layout], dtype=dtype), LAYOUTS[layout], window=window)


@each(("window", "dtype"), [(None, FLOAT), (None, HALF), (1, FLOAT), (12, HALF), (20, FLOAT)])
@each("layout", ["more than a block of keys", "one prefix", "long prefixes"])
def test_sequences_that_are_longer_than_a_table(monkeypatch, layout, window, dtype):
    """Blocks of prefixes and of sequences are joined, in float32: bfloat16 is rounded once. Some tokens see nothing of
    a block, and some sequences fit."""
    monkeypatch.setattr(attention, "BLOCK", 16)
    assert_same(made(LAYOUTS[layout], dtype=dtype), LAYOUTS[layout], window=window)


@each(("lengths", "before"), [([3, 1, 4, 40], 5), ([38, 2], 4), ([33], 31)])
@each("block", [16, 2048])
def test_equal_weights_by_hand(monkeypatch, block, lengths, before):
    """All scores are 0 and four tokens are seen: the output is the mean of four values. Slopes are a quarter of a value's
    product with the output's gradient less the mean of the four. All of it are few bits, which bfloat16 holds: a number
    that is paired with a wrong one is off by more than a rounding, and so is one beside a last token that is no zero."""
    monkeypatch.setattr(attention, "BLOCK", block)
    generator = torch.Generator().manual_seed(5)
    width, tokens = 5, sum(lengths)
    q, k, v = (
        torch.randint(-2, 3, (n, 1, width), generator=generator).float() for n in [tokens, *[before + tokens] * 2]
    )
    q[..., 2:], k[..., :2] = 0, 0
    grad = torch.randint(-1, 2, (tokens, 1, width), generator=generator).float()
    own = [part.to(HALF).transpose(0, 1).requires_grad_() for part in (q, k[before:], v[before:])]
    prefix = [part.to(HALF).transpose(0, 1).requires_grad_() for part in (k[:before], v[:before])]
    layout = Layout(lengths, CPU, [0] * len(lengths), [before])
    with threads(1):
        out = packed_attention(*own, layout, scaling=0.5, prefix=(prefix[0], prefix[1]), window=4, native=True)
        found = [out, *torch.autograd.grad(out, own + prefix, grad.transpose(0, 1).to(HALF))]
    expected = [torch.zeros(part.shape[1], width) for part in found]
    for start, length in zip(layout.starts, lengths, strict=False):
        for t in range(start, start + length):
            seen = [before + at if at >= start else before + at - start for at in range(t - 3, t + 1)]
            mean = v[seen, 0].mean(0)
            expected[0][t] = mean
            for at in seen:
                grad_k, grad_v, place = (*expected[2:4], at - before) if at >= before else (*expected[4:], at)
                slope = grad[t, 0] @ (v[at, 0] - mean) / 4 * 0.5
                expected[1][t] += slope * k[at, 0]
                grad_k[place] += slope * q[t, 0]
                grad_v[place] += grad[t, 0] / 4
    for name, one, other in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(one[0].float(), other, rtol=2**-8, atol=1e-6, msg=name)


def test_gradients_of_a_prefix_are_added_where_they_add_up():
    layout = LAYOUTS["long prefixes"]
    grads = []
    for before in (0.0, 2.0):
        q, k, v, *prefix = (tensor.transpose(0, 1).requires_grad_() for tensor in made(layout))
        given = [torch.full_like(part, before) for part in prefix] if before else [None, None]
        for part, grad in zip(prefix, given, strict=True):
            part.grad = grad
        with threads(1):
            where = Layout(layout[0], CPU, *layout[1:])
            packed_attention(q, k, v, where, scaling=0.4, prefix=tuple(prefix), native=True).sum().backward()
        assert not before or all(part.grad is grad for part, grad in zip(prefix, given, strict=True))
        grads.append([part.grad - before for part in prefix])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)  # roundings of numbers up to 10


def test_the_sequences_of_several_prefixes_are_cut_into_items():
    """A prefix that comes again, and one that has too few sequences to be cut."""
    layout = Layout([1] * 6, CPU, [1, 1, 1, 0, 1, 1], [2, 3])
    with threads(4):
        work = layout.work
    assert work.items.tolist() == [[0, 1, 0], [1, 3, 1], [3, 4, 0], [4, 5, 2], [5, 6, 3]]
    assert work.slots == 4
    assert work.sequences[:, 2].tolist() == [2, 2, 2, 0, 2, 2]


@pytest.mark.parametrize(
    ("layout", "count", "dtype"),
    [("one prefix", 2, FLOAT), ("several after each prefix", 3, HALF), ("a prefix's sequences apart", 4, FLOAT)],
)
def test_the_bits_do_not_depend_on_the_threads(layout, count, dtype):
    """Except for the prefixes' gradients, which are sums over items."""
    tensors = made(LAYOUTS[layout], group=7, dtype=dtype, prefix_dtype=FLOAT)
    one, other = (attended(tensors, LAYOUTS[layout], each, window=9) for each in (1, count))
    for name, a, b in zip(NAMES, one, other, strict=False):
        if name.startswith("prefix"):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6 * a.abs().max().item())  # some ten roundings of 6e-8
        else:
            assert torch.equal(a, b), name


def test_work_that_was_shared_out_for_other_threads():
    """A layout's work is shared out once; the number of threads may change after that."""
    layout = LAYOUTS["several after each prefix"]
    tensors = made(layout)
    where = Layout(layout[0], CPU, *layout[1:])
    q, k, v, *prefix = (tensor.transpose(0, 1) for tensor in tensors)
    outs = []
    for count in (4, 1, 3):
        with threads(count):
            outs.append(packed_attention(q, k, v, where, scaling=0.4, prefix=tuple(prefix), native=True))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("reason", ["too few items", "a cap"])
def test_fallbacks_to_torch(reason):
    layout = ([7], None, ())
    q, k, v = (tensor.transpose(0, 1).requires_grad_() for tensor in made(layout, kv_heads=1))
    cap = 2.0 if reason == "a cap" else None
    with threads(1 if cap else 2):
        given = Layout(layout[0], CPU)
        out = packed_attention(q, k, v, given, scaling=0.4, cap=cap, native=True)
    assert type(out.grad_fn).__name__ != "_NativeBackward"
    expected = explicit_attention(q.double(), k.double(), v.double(), None, None, given, 0.4, cap=cap)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)  # as above


@pytest.mark.parametrize(("layout", "filler", "dtype"), [("unequal", 9, FLOAT), ("several after each prefix", 1, HALF)])
def test_padding_is_not_read(layout, filler, dtype):
    tensors = made(LAYOUTS[layout], dtype=dtype, filler=filler)
    for tensor in tensors[:3]:
        tensor[-filler:] = math.nan
    assert_same(tensors, LAYOUTS[layout])


@pytest.mark.parametrize("window", [None, 4])
def test_scores_of_thousands(window):
    """Exponentials of 1000 are infinite; one part may be nothing beside the other."""
    layout = LAYOUTS["several after each prefix"]
    tensors = made(layout, size=30.0)
    assert (tensors[0][:, 0] @ tensors[1][:, 0].T).abs().max() > 1000
    # A rounding of a score of 3000 is one of 2e-4 of its weight; gradients are what is left of sums of numbers up to
    # 3000 (a value's product with the output's gradient, times a key), whose roundings are 2e-4 too.
    assert_same(tensors, layout, sums=5e-3, scaling=1.0, window=window)


@each("rise", [1.0, -1.0, 0.02])
def test_scores_that_rise_or_fall_along_the_keys(rise):
    """By `rise` per token: what was found before may be nothing beside what follows, or scaled down as more follows."""
    layout = ([230, 3], [0, 0], [101])
    tensors = made(layout, kv_heads=1, width=16, dtype=HALF)
    tensors[0][..., 0] = 1
    for keys, first in ((tensors[3], 0), (tensors[1], 101)):
        keys[..., 0] = (torch.arange(first, first + len(keys)) * rise / 2)[:, None]
    found, expected = (attended(tensors, layout, 1, scaling=2.0, exact=exact)[0] for exact in (False, True))
    # Weights of sum 1 and the output are rounded: 2^-9 of the largest value, twice.
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2**-8 * tensors[2].abs().max().item())


def sequences_of(layout):
    """The tokens of each."""
    ends = torch.tensor(layout[0]).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, layout[0], strict=True)]


@pytest.mark.parametrize(
    ("layout", "bad", "dtype"),
    [("unequal", math.nan, FLOAT), ("unequal", math.inf, HALF), ("a prefix's sequences apart", math.nan, HALF)],
)
def test_nan_and_infinity_stay_in_their_sequence(layout, bad, dtype):
    """Threads work on sequences in turn, in the same memory."""
    layout = LAYOUTS[layout]
    tensors, spans = made(layout, dtype=dtype), sequences_of(layout)
    sound = attended(tensors, layout, 1)
    for spoilt in range(len(spans)):
        span = spans[spoilt]
        for part in range(3):
            given = [tensor.clone() for tensor in tensors]
            given[part][span.start] = bad
            found = attended(given, layout, 1)
            assert not found[0][span].isfinite().all()
            others = torch.ones(sum(layout[0]), dtype=torch.bool)
            others[span] = False
            for one, other in zip(found[:4], sound[:4], strict=True):
                assert torch.equal(one[others], other[others])


def test_nan_beyond_a_window_is_not_seen():
    """NaN in the first token's values, and queries some blocks of keys later."""
    layout = ([90], None, ())
    tensors = made(layout)
    sound = attended(tensors, layout, 1, window=5)
    tensors[2][0] = math.nan
    found = attended(tensors, layout, 1, window=5)
    assert found[0][:5].isnan().all()
    assert torch.equal(found[0][40:], sound[0][40:])


@st.composite
def packs(draw):
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=7))
    prefixes, prefix_lengths = None, []
    if draw(st.booleans()):
        prefix_lengths = draw(st.lists(st.integers(0, 25), min_size=1, max_size=4))
        number = st.integers(0, len(prefix_lengths) - 1)
        prefixes = draw(st.lists(number, min_size=len(lengths), max_size=len(lengths)))
    return lengths, prefixes, prefix_lengths


@settings(max_examples=60, deadline=None)
@given(
    layout=packs(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    width=st.integers(1, 40),
    window=st.none() | st.integers(1, 50),
    dtypes=st.sampled_from([(FLOAT, FLOAT), (HALF, HALF), (HALF, FLOAT)]),
    count=st.integers(1, 4),
    filler=st.integers(0, 3),
    block=st.sampled_from([16, 2048]),
)
@example(([1, 13, 1, 1, 14, 20], [0, 1, 0, 0, 0, 0], [6, 4]), 1, 1, 1, None, (FLOAT, FLOAT), 1, 1, 16)
def test_any_pack(layout, kv_heads, group, width, window, dtypes, count, filler, block):
    with threads(count):
        items = len(Layout(layout[0], CPU, *layout[1:]).work.items)
    tensors = made(layout, kv_heads, group, width, *dtypes, filler=filler)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "BLOCK", block)
        assert_same(tensors, layout, min(count, items * kv_heads), scaling=width**-0.5, window=window)


@each("wrong", ["no prefix", "a short prefix", "narrow values", "short keys", "odd heads"])
def test_shapes_that_do_not_fit_are_refused(wrong):
    """C would read out of bounds."""
    layout = LAYOUTS["several after each prefix"]
    q, k, v, *prefix = (tensor.transpose(0, 1) for tensor in made(layout))
    if wrong == "no prefix":
        prefix = None
    elif wrong == "a short prefix":
        prefix = [part[:, :-1] for part in prefix]
    elif wrong == "narrow values":
        v = v[..., :4]
    elif wrong == "short keys":
        k, v = k[:, :-1], v[:, :-1]
    else:
        q = q[:3]
    with pytest.raises(ValueError, match="."):
        packed_attention(q, k, v, Layout(layout[0], CPU, *layout[1:]), scaling=0.4, prefix=prefix, native=True)


@pytest.mark.parametrize("name", ["more than a block of keys", "one prefix", "long prefixes"])
def test_tokens_whose_output_is_not_needed_change_nothing(name):
    lengths, prefixes, prefix_lengths = LAYOUTS[name]
    tokens = sum(lengths)
    drawn_N = torch.tensor([0, *range(tokens // 3, tokens // 2), tokens - 1])
    weights = torch.zeros(4, tokens, 8)
    weights[:, drawn_N] = torch.randn(4, len(drawn_N), 8, generator=torch.Generator().manual_seed(5))
    results = []
    for chosen in (None, drawn_N):
        leaves = [tensor.requires_grad_() for tensor in made(LAYOUTS[name])]
        q, k, v, *prefix = (leaf.transpose(0, 1) for leaf in leaves)
        where = Layout(lengths, CPU, prefixes, prefix_lengths)
        options = {"scaling": 0.4, "prefix": tuple(prefix) or None, "native": True, "drawn_N": chosen}
        with threads(1):
            out = packed_attention(q, k, v, where, **options)
            (out * weights).sum().backward()
        results.append([out.detach()[:, drawn_N], *(leaf.grad for leaf in leaves)])
        left_out = int((out.detach() == 0).all(dim=-1).all(dim=0).sum())
    assert left_out > 0, "some tiles were not computed"
    assert all(map(torch.equal, *results))
