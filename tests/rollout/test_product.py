"""The native products of a decode step."""

import pytest
import torch

from cohort.native import Unavailable, load
from cohort.rollout.product import CHUNK, NativeProduct, multiplies

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
    monkeypatch.setattr("cohort.rollout.product.threads_for", lambda _: 3)
    assert torch.equal(product(x), y)


def test_other_matrices_are_refused():
    weights, biases, x = made(20, 30)
    assert not multiplies([weights[0].T])
    assert not multiplies([weights[0].double()])
    with pytest.raises(ValueError, match="float32"):
        NativeProduct([weights[0].bfloat16()], biases)
    with pytest.raises(ValueError, match="an input for each column"):
        NativeProduct(weights, biases)(x[:, :7])
