"""The native kernels between matrix products, and of the head, against torch in float64: outputs and all gradients."""

import itertools
import math

import pytest
import torch
from torch import nn

from cohort.native import Unavailable, load
from cohort.policy import CompletionStates, Head
from cohort.policy.fused import Fused
from tests.conftest import each
from tests.policy.plain import distribution_of, random_supports, threads

try:
    load()
except Unavailable as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

FLOAT, HALF = torch.float32, torch.bfloat16
EXACT = Fused(False, torch.float64, torch.float64)
ROUNDING = {FLOAT: 2**-24, HALF: 2**-8}  # of a number, at most, beside itself
SUMS = 2e-6  # of what float32 computes, beside the largest number of its row: some ten roundings of 6e-8
MANY = (900, 37)  # more numbers than one thread takes alone
BOTH = pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=["float32", "bfloat16"])


def randn(*shape, seed=0, dtype=FLOAT):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def fused(narrow=FLOAT):
    return Fused(True, FLOAT, narrow)


def results(operation, by, inputs, used=None, transposed=False):
    """Outputs of an operation, and gradients of its inputs that are to have one.

    Args:
        used: numbers of the outputs that the gradient comes from. None: all.
        transposed: gradients come to the outputs in another order of memory.
    """
    leaves = [each.detach().requires_grad_(each.requires_grad) for each in inputs]
    outs = operation(by, *leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    pairs = [(outs[n], randn(*outs[n].shape, seed=50 + n)) for n in used or range(len(outs))]
    total = sum(
        ((out.mT.contiguous().mT if transposed else out).double() * grad.to(HALF).double()).sum() for out, grad in pairs
    )
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [out.detach() for out in outs], torch.autograd.grad(total, wanted, materialize_grads=True)


def assert_near(one, other, sums=SUMS):
    """Each rounded to its own dtype, after sums in float32."""
    assert one.shape == other.shape
    if not one.numel():
        return
    bound = ROUNDING[one.dtype] * other.abs() + sums * other.abs().amax(-1, keepdim=True)
    gap = (one.double() - other).abs()
    assert (gap <= bound).all(), f"off by {(gap / bound).max():.3g} times what is allowed"


def assert_same(operation, narrow, inputs, sums=SUMS, **ways):
    outs, grads = results(operation, fused(narrow), inputs, **ways)
    exact_inputs = [each.detach().double().requires_grad_(each.requires_grad) for each in inputs]
    expected_outs, expected_grads = results(operation, EXACT, exact_inputs, **ways)
    wanted = [each for each in inputs if each.requires_grad]
    assert [grad.dtype for grad in grads] == [each.dtype for each in wanted]
    assert len(outs) == len(expected_outs)
    for one, other in zip((*outs, *grads), (*expected_outs, *expected_grads), strict=True):
        assert_near(one, other, sums)
    return outs


def leaves(*tensors):
    return [tensor.requires_grad_() for tensor in tensors]


# Norms


def norm(by, x, factor, eps=1e-6):
    return by.norm(x, factor, eps)


def add_norm(by, x, update, factor):
    return by.add_norm(x, update, factor, 1e-6)


SHAPES = [(1, 8), (1, 5), (3, 24), (4, 3, 20), (7, 37), (5, 256), MANY]


PAIRS = [(FLOAT, FLOAT), (HALF, HALF), (FLOAT, HALF), (HALF, FLOAT)]  # dtypes of the input and of the output
SHAPED = [*zip(SHAPES, itertools.cycle(PAIRS), strict=False), *((MANY, pair) for pair in PAIRS)]


@each(("shape", "dtypes"), SHAPED, ids=str)
def test_norms(shape, dtypes):
    dtype, narrow = dtypes
    (out,) = assert_same(norm, narrow, leaves(randn(*shape, dtype=dtype), randn(shape[-1], seed=1)))
    assert out.dtype == narrow
    inputs = leaves(randn(*shape), randn(*shape, seed=1, dtype=dtype), randn(shape[-1], seed=2))
    stream, out = assert_same(add_norm, narrow, inputs)
    assert (stream.dtype, out.dtype) == (FLOAT, narrow)
    assert torch.equal(stream, inputs[0] + inputs[1])


@pytest.mark.parametrize("used", [(0,), (1,)], ids=["the sum", "the norm"])
@BOTH
def test_a_gradient_may_come_from_one_of_the_two(dtype, used):
    inputs = leaves(randn(6, 24), randn(6, 24, seed=1, dtype=dtype), randn(24, seed=2))
    assert_same(add_norm, dtype, inputs, used=used)


@BOTH
def test_frozen_tensors_get_no_gradient(dtype):
    x, update, factor = randn(6, 37), randn(6, 37, seed=1, dtype=dtype), randn(37, seed=2)
    assert_same(norm, dtype, [*leaves(x), factor])
    assert_same(add_norm, dtype, [*leaves(x, update), factor])
    assert_same(add_norm, dtype, [*leaves(x), update.detach(), factor])
    assert_same(add_norm, dtype, [x.detach(), *leaves(update), factor])
    assert_same(norm, dtype, [x.detach(), *leaves(factor)])
    assert_same(add_norm, dtype, [x.detach(), update.detach(), *leaves(factor)])


def test_without_an_update_the_stream_is_as_it_was():
    x, factor = leaves(randn(6, 24), randn(24, seed=1))
    stream, out = fused(HALF).add_norm(x, None, factor, 1e-6)
    assert stream is x
    assert torch.equal(out, fused(HALF).norm(x, factor, 1e-6))
    assert_same(lambda by, x, factor: by.add_norm(x, None, factor, 1e-6), HALF, [x, factor])


@pytest.mark.parametrize(("bad", "dtype"), [(math.nan, FLOAT), (math.inf, HALF), (-math.inf, FLOAT)])
def test_nan_and_infinity_stay_in_their_row(dtype, bad):
    sound = leaves(randn(5, 37), randn(5, 37, seed=1, dtype=dtype), randn(37, seed=2))
    spoilt = [each.detach().clone() for each in sound]
    spoilt[1][2, 20] = bad  # in a vector
    spoilt[1][3, 36] = bad  # after the last whole one
    leaves(*spoilt)
    outs, grads = results(add_norm, fused(dtype), spoilt)
    exact_outs, exact_grads = results(add_norm, EXACT, [each.detach().double().requires_grad_() for each in spoilt])
    for one, other in zip((*outs, *grads), (*exact_outs, *exact_grads), strict=True):
        assert not one[~other.isfinite()].isfinite().any()
    sound_outs, sound_grads = results(add_norm, fused(dtype), sound)
    for one, other in zip((*outs, *grads[:2]), (*sound_outs, *sound_grads[:2]), strict=True):
        assert torch.equal(one[[0, 1, 4]], other[[0, 1, 4]])


# Rotation


def tables(tokens, width):
    """Angles without a relation between the halves, as in some kinds of rotation."""
    angles = randn(tokens, width, seed=7)
    return angles.cos(), angles.sin()


def rotation(cos, sin, neighbours=False):
    return lambda by, x: by.rotate(x, x[:, :1], cos.to(by.wide), sin.to(by.wide), neighbours=neighbours)[0]


ROTATED = [(1, 1, 2), (1, 3, 6), (5, 2, 24), (4, 3, 64), (3, 1, 74), (500, 3, 30)]


@each(("shape", "dtypes"), [*zip(ROTATED, itertools.cycle(PAIRS), strict=False)], ids=str)
def test_rotation(shape, dtypes):
    dtype, narrow = dtypes
    inputs = leaves(randn(*shape, dtype=dtype))
    (out,) = assert_same(rotation(*tables(shape[0], shape[2])), narrow, inputs)
    assert out.dtype == narrow


@pytest.mark.parametrize(("rotated", "neighbours"), [(64, True), (24, True), (40, False)])
def test_rotation_of_neighbours_and_of_the_first_dimensions(rotated, neighbours):
    x, (cos, sin) = randn(4, 3, 64), tables(4, rotated)
    (out,) = assert_same(rotation(cos, sin, neighbours), torch.float32, leaves(x))
    step, apart = (2, 1) if neighbours else (1, rotated // 2)
    for i in range(rotated // 2):
        first, second = x[..., i * step], x[..., i * step + apart]
        turned = first * cos[:, None, i] - second * sin[:, None, i]
        torch.testing.assert_close(out[..., i * step], turned, rtol=1e-6, atol=1e-6)  # float32
    assert torch.equal(out[..., rotated:], x[..., rotated:])


# The activation


def gating(gelu):
    return lambda by, gate, up: by.gate(gate, up, gelu=gelu)


ACTIVATIONS = pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])


@BOTH
@ACTIVATIONS
@pytest.mark.parametrize("shape", [(2, 3, 64), (70, 576), (1, 1), (7, 4099)], ids=str)
def test_activation(shape, gelu, dtype):
    inputs = leaves(2 * randn(*shape, dtype=dtype), randn(*shape, seed=1, dtype=dtype))
    (out,) = assert_same(gating(gelu), dtype, inputs)
    assert out.dtype == dtype
    assert type(gating(gelu)(fused(dtype), *inputs).grad_fn).__name__ == "_GateBackward"


@BOTH
@ACTIVATIONS
@pytest.mark.parametrize("shape", [(2, 3, 64), (70, 37)], ids=str)
def test_gate_and_up_side_by_side(shape, gelu, dtype):
    """As apart, bit by bit; their gradient is one tensor."""
    gate, up = leaves(2 * randn(*shape, dtype=dtype), randn(*shape, seed=1, dtype=dtype))
    (joint,) = leaves(torch.cat([gate, up], dim=-1).detach())
    apart = results(gating(gelu), fused(dtype), [gate, up])
    beside = results(lambda by, both: by.gate(both, gelu=gelu), fused(dtype), [joint])
    assert torch.equal(apart[0][0], beside[0][0])
    assert torch.equal(torch.cat(apart[1], dim=-1), beside[1][0])
    assert_same(lambda by, both: by.gate(both, gelu=gelu), dtype, [joint])


@BOTH
def test_rotation_of_a_part_of_wider_rows(dtype):
    rows, turn = randn(5, 2 * 24 + 11, dtype=dtype), rotation(*tables(5, 24))
    part = rows[:, 3 : 3 + 48].unflatten(-1, (2, 24))
    assert torch.equal(turn(fused(HALF), part), turn(fused(HALF), part.contiguous()))


# Threads


@BOTH
def test_numbers_do_not_depend_on_the_threads(dtype):
    rows = randn(*MANY), randn(*MANY, seed=1, dtype=dtype), randn(MANY[1], seed=2)
    cases = {
        "norm": (norm, [rows[1], rows[2]]),
        "sum": (add_norm, rows),
        "rotation": (rotation(*tables(500, 30)), [randn(500, 3, 30, dtype=dtype)]),
        "silu": (gating(False), [randn(70, 576, dtype=dtype), randn(70, 576, seed=1, dtype=dtype)]),
        "gelu": (gating(True), [randn(70, 576, dtype=dtype), randn(70, 576, seed=1, dtype=dtype)]),
    }
    for name, (operation, inputs) in cases.items():
        found = []
        for count in (1, 2):
            with threads(count):
                found.append(results(operation, fused(dtype), leaves(*(each.clone() for each in inputs))))
        (one_outs, one_grads), (other_outs, other_grads) = found
        if name in {"norm", "sum"}:
            # The factor's gradient is a sum over 900 rows, in another order.
            *one_grads, of_one = one_grads
            *other_grads, of_other = other_grads
            torch.testing.assert_close(of_one, of_other, rtol=0, atol=2e-6 * of_one.abs().max().item())
        for one, other in zip((*one_outs, *one_grads), (*other_outs, *other_grads), strict=True):
            assert torch.equal(one, other), name


# The head

HIDDEN, TOKENS = 24, 11
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "temperature": {"temperature": 0.6},
    "multiplier": {"multiplier": 0.3, "bias": True},
    "both": {"temperature": 1.7, "multiplier": 2.5},
}


def head_parts(vocabulary, tokens=TOKENS, bias=False, hidden_dtype=FLOAT):
    linear = nn.Linear(HIDDEN, vocabulary, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(randn(vocabulary, HIDDEN, seed=1) / 3)
        if bias:
            linear.bias.copy_(randn(vocabulary, seed=2))
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(3)).tolist()
    return randn(tokens, HIDDEN, dtype=hidden_dtype), linear, targets


def states_of(hidden, linear, targets, native, compute=FLOAT, temperature=1.0, multiplier=1.0, **_):
    its_head = Head(linear, compute, multiplier, native=native)
    return CompletionStates(hidden, its_head, distribution_of([(0,)], [targets], temperature))


def with_gradients(hidden, linear, targets, native, **settings):
    hidden = hidden.detach().requires_grad_()
    states = states_of(hidden, linear, targets, native, **settings)
    assert states.native is native
    found = states.logps()
    weights = torch.linspace(-1, 2, len(targets))
    grads = torch.autograd.grad((found.logps_N * weights).sum(), [hidden, *linear.parameters()])
    return found, grads


@pytest.mark.parametrize("compute", [FLOAT, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "vocabulary"), [("plain", 1), ("bias", 37), ("temperature", 64), ("multiplier", 5003), ("both", 5003)]
)
def test_the_head_is_torchs(monkeypatch, name, vocabulary, compute):
    """From the same logits. 5003 tokens are more than one block of sums, and 11 such rows more than one thread's share."""
    settings = HEADS[name]
    parts = head_parts(vocabulary, bias=settings.get("bias", False))
    monkeypatch.setattr(CompletionStates, "drawn_chunk", 4)
    found, grads = with_gradients(*parts, True, compute=compute, **settings)
    expected, expected_grads = with_gradients(*parts, None, compute=compute, **settings)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == FLOAT
        # Scores up to some 20 have a rounding of 1e-6, in both.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for one, other in zip(grads, expected_grads, strict=True):
        assert one.dtype == other.dtype
        # In bfloat16 both round the logits' gradient before the products, but the bias's only the kernel.
        bound = 2e-6 if compute == FLOAT else 2**-8
        assert (one - other).norm() <= bound * other.norm() + 1e-6


def test_the_head_does_not_depend_on_the_threads():
    parts, found = head_parts(4099, bias=True), []
    for count in (1, 2):
        with threads(count):
            values, grads = with_gradients(*parts, True)
            found.append((grads[0], *values, *grads[1:]))
    (one, *ones), (other, *others) = found
    # A sum over the vocabulary by the library, which on some processors gives each thread a part of it.
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * float(other.abs().max()))
    assert all(torch.equal(*pair) for pair in zip(ones, others, strict=True))


@pytest.mark.parametrize("compute", [FLOAT, HALF], ids=["float32", "bfloat16"])
def test_tokens_that_cannot_occur(compute):
    """A bias of -inf, for a token within a vector, one after the last, and a target."""
    hidden, linear, targets = head_parts(37, bias=True)
    targets[:3] = [4, 5, 6]
    with torch.no_grad():
        linear.bias[[4, 20, 36]] = -math.inf
    targets = [4, *(token if token not in {4, 20, 36} else 7 for token in targets[1:])]
    found, grads = with_gradients(hidden, linear, targets, True, compute=compute)
    expected, expected_grads = with_gradients(hidden, linear, targets, None, compute=compute)
    assert found.logps_N[0] == -math.inf
    assert found.logps_N[1:].isfinite().all()
    assert found.entropy_N.isfinite().all()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for one, other in zip(grads, expected_grads, strict=True):
        assert one.isfinite().all()
        assert (one - other).norm() <= (2e-6 if compute == FLOAT else 2**-8) * other.norm()
    assert (grads[1][[20, 36]] == 0).all()


@each("settings", [{"cap": 1.5}, {"penalty": 1.4}, {"supports": True}, {"linear": None}], ids=str)
def test_caps_penalties_and_supports_are_computed_by_torch(settings):
    prompts, completions = [(5, 9, 20), (7,), (3, 3), (2, 3)], [(4, 6, 1), (8, 8, 7, 8, 8, 1), (1,), (12, 13)]
    supports = random_supports(completions, 23, whole=2)[1] if settings.get("supports") else ()
    distribution = distribution_of(prompts, completions, 0.8, supports, settings.get("penalty", 1.0))
    hidden, linear, _ = head_parts(23, tokens=12, bias=True)
    if "linear" in settings:
        hidden, linear = randn(12, 23), None
    found = []
    for native in (True, False):
        states = CompletionStates(hidden, Head(linear, cap=settings.get("cap"), native=native), distribution)
        assert not states.native
        found.append(states.logps())
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


# Errors


@each(
    "call",
    [
        lambda by: by.add_norm(randn(4, 8).bfloat16(), randn(4, 8), randn(8), 1e-6),
        lambda by: by.norm(randn(4, 8), randn(7), 1e-6),
        lambda by: by.rotate(*[randn(4, 2, 8)] * 2, randn(4, 10), randn(4, 10)),
        lambda by: by.rotate(*[randn(4, 2, 8)] * 2, randn(3, 8), randn(3, 8)),
        lambda by: by.gate(randn(4, 8), randn(3, 8), gelu=False),
    ],
)
def test_shapes_that_do_not_fit_are_refused(call):
    """C would read or write out of bounds."""
    with pytest.raises(ValueError, match="."):
        call(fused())


@pytest.mark.parametrize("wrong", [randn(4, 8).half(), randn(4, 8).double()])
def test_other_layouts_and_dtypes_are_refused(wrong):
    with pytest.raises(TypeError, match="a contiguous tensor on the CPU was expected"):
        fused().norm(wrong, randn(8), 1e-6)


@pytest.mark.parametrize("token", [-1, 40, 10**6])
def test_a_token_that_the_head_does_not_have(token):
    """No embedding reads the last token of a completion, so that the head has to refuse it."""
    linear = torch.nn.Linear(8, 40, bias=False)
    distribution = distribution_of([(1,)], [(3, token)], 1.0)
    states = CompletionStates(randn(2, 8), Head(linear, native=True), distribution)
    with pytest.raises(IndexError, match=r"completions hold ids from .* of a head of 40"):
        states.logps()
