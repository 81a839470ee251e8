"""The native products of a decode step."""

import pytest
import torch

from cohort.native import Unavailable, has_pairs, load
from cohort.native.products import CHUNK, NativeProduct, PackedProduct, multiplies
from cohort.rollout.local.mixing import attend_causally

try:
    load()
except Unavailable as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)
if not multiplies([torch.zeros(1, 1)]):
    pytest.skip("the kernel is meant for wider vectors", allow_module_level=True)


def made(inputs, *outputs):
    generator = torch.Generator().manual_seed(inputs)
    weights = [torch.randn(count, inputs, generator=generator) for count in outputs]
    biases = [None if n else torch.randn(count, generator=generator) for n, count in enumerate(outputs)]
    return weights, biases, torch.randn(CHUNK + 19, inputs, generator=generator)


# Below one tile; sums that end inside a vector, a cache line and a partial sum; several matrices with a rest each.
@pytest.mark.parametrize(("inputs", "outputs"), [(3, (5,)), (45, (24, 1, 13)), (300, (50, 29))])
def test_products_are_those_of_float64_and_rows_depend_on_nothing_else(inputs, outputs):
    weights, biases, x = made(inputs, *outputs)
    product = NativeProduct(weights, biases)
    y = product(x)
    expected = [torch.nn.functional.linear(x.double(), w.double(), b if b is None else b.double())
                for w, b in zip(weights, biases, strict=True)]  # fmt: skip
    # A sum of `inputs` products of numbers of about 1, in float32: its rounding errors add up as its numbers do.
    torch.testing.assert_close(y.double(), torch.cat(expected, 1), rtol=0, atol=2e-6 * inputs**0.5)
    for rows in (1, 7, 8, 9, 16, 17, 33, CHUNK):
        assert torch.equal(product(x[:rows]), y[:rows])
        assert torch.equal(product(x[-rows:]), y[-rows:])


def test_a_row_that_is_not_finite_stays_alone():
    weights, biases, x = made(20, 30)
    product = NativeProduct(weights, biases)
    y = product(x)
    x[4] = torch.nan
    bad = product(x)
    assert bad[4].isnan().all()
    assert torch.equal(bad[5:], y[5:])
    assert torch.equal(bad[:4], y[:4])


def test_threads_change_no_bit(monkeypatch):
    weights, biases, x = made(300, 200)
    product = NativeProduct(weights, biases)
    y = product(x)
    monkeypatch.setattr("cohort.native.products.threads_for", lambda _: 3)
    assert torch.equal(product(x), y)


def test_other_matrices_are_refused():
    weights, biases, x = made(20, 30)
    assert not multiplies([weights[0].T])
    assert not multiplies([weights[0].double()])
    with pytest.raises(ValueError, match="float32"):
        NativeProduct([weights[0].bfloat16()], biases)
    with pytest.raises(ValueError, match="an input for each column"):
        NativeProduct(weights, biases)(x[:, :7])


pairs = pytest.mark.skipif(not has_pairs(), reason="the processor has no units for pairs of bfloat16 numbers")


def packed(weights, biases):
    product = PackedProduct([len(weight) for weight in weights], weights[0].shape[1])
    whole = None
    if any(bias is not None for bias in biases):
        whole = torch.cat([torch.zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
    product.pack(weights, whole)
    return product, whole


@pairs
def test_a_packed_product_by_hand():
    weights = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -1.0, 0.0], [4.0, 0.0, 1.0]])]
    product, _ = packed(weights, [None, torch.tensor([10.0, 0.0])])
    x = torch.tensor([[1.0, 2.0, 4.0], [0.0, -1.0, 1.0]]).bfloat16()
    assert product(x).tolist() == [[17.0, 8.5, 8.0], [1.0, 11.0, 1.0]]
    # 1 + 2^-8 lies between two bfloat16 numbers, of which 1 is even.
    product.pack([torch.tensor([[1.0, 2**-8, 0.0]]), weights[1]], None)
    assert product(torch.ones(1, 3).bfloat16()).tolist() == [[1.0, -0.5, 5.0]]


# Less than a panel and an odd number of inputs; several matrices within a panel; more than one part of inputs, and rows
# that are divided into blocks.
@pairs
@pytest.mark.parametrize(("inputs", "outputs"), [(3, (5,)), (45, (24, 1, 13)), (300, (50, 29)), (130, (64,))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_products_are_those_of_float64_and_rows_depend_on_nothing_else(inputs, outputs, dtype):
    weights, biases, x = made(inputs, *outputs)
    weights = [weight.to(dtype) for weight in weights]
    product, bias = packed(weights, biases)
    x = torch.cat([x, x.flip(0), x + 1, x - 1]).bfloat16()
    y = product(x)
    exact = x.double() @ torch.cat(weights).bfloat16().double().T
    exact += 0 if bias is None else bias.bfloat16().double()
    # Half a unit in the last place of bfloat16, 2^-8, and the rounding of float32 sums beside it.
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=2e-6 * inputs**0.5)
    for rows in (1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 33, 64, 65, 257):
        assert torch.equal(product(x[:rows]), y[:rows])
        assert torch.equal(product(x[-rows:]), y[-rows:])


@pairs
def test_a_row_of_a_packed_product_that_is_not_finite_stays_alone():
    weights, biases, x = made(21, 30)
    product, _ = packed(weights, biases)
    x = x.bfloat16()
    y = product(x)
    x[4] = torch.nan
    bad = product(x)
    assert bad[4].isnan().all()
    assert torch.equal(bad[5:], y[5:])
    assert torch.equal(bad[:4], y[:4])


@pairs
def test_threads_change_no_bit_of_a_packed_product(monkeypatch):
    weights, biases, x = made(300, 200)
    one, _ = packed(weights, biases)
    y = one(x.bfloat16())
    monkeypatch.setattr("cohort.native.products.threads_for", lambda _: 3)
    several, _ = packed(weights, biases)
    assert torch.equal(several(x.bfloat16()), y)


@pairs
def test_matrices_that_cannot_be_packed_are_refused():
    weights, biases, x = made(20, 30)
    product, _ = packed(weights, biases)
    for others in ([weights[0].T], [weights[0].double()], [weights[0][:, :10].contiguous()]):
        with pytest.raises(ValueError, match="matrices"):
            product.pack(others, None)
    with pytest.raises(ValueError, match="an input for each column"):
        product(x)


# One token; an odd width; several heads for each of keys and values; a window and sinks.
@pairs
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "width", "window", "sinks"),
    [(1, 1, 1, 16, None, False), (37, 6, 2, 20, None, False), (70, 4, 4, 32, 9, False), (130, 4, 2, 64, None, True)],
)
def test_attention_of_a_prompt_in_bfloat16_is_that_of_float64(length, heads, kv_heads, width, window, sinks):
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(n, length, width, generator=generator).bfloat16() for n in (heads, kv_heads, kv_heads))
    sink = torch.randn(heads, generator=generator) if sinks else None
    with torch.inference_mode():
        found = attend_causally(q, k, v, torch.bfloat16, 0.3, window, None, sink, True)
        cut = attend_causally(q[:, :-1], k[:, :-1], v[:, :-1], torch.bfloat16, 0.3, window, None, sink, True)
    wide = [None if part is None else part.double() for part in (q, k, v, sink)]
    exact = attend_causally(*wide[:3], torch.float64, 0.3, window, None, wide[3])
    # The output and its weights are rounded to bfloat16, 2^-8 each; weights sum to 1 and values are up to 4.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=4 * 2**-8)
    assert (found.double() - exact).abs().mean() < 2**-8
    assert torch.equal(cut, found[:, :-1])
