"""Short convolutions between their gates by the native kernels, against torch's; both against a loop by hand in
``test_recurrent.py``."""

import itertools

import pytest
import torch

from cohort.native import Unavailable, load
from cohort.policy.recurrent import Tails, convolve, convolve_into, convolve_step

try:
    load()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

LENGTHS = (3, 40, 1, 7)  # shorter than the window, and longer
TAILS = Tails((0, *itertools.accumulate(LENGTHS)), 3, torch.device("cpu"))
PADDING = 2


def inputs(channels, *, gated=False, dtype=torch.float32):
    """Columns of a wider matrix, with padding after the tokens."""
    torch.manual_seed(0)
    whole = torch.randn(sum(LENGTHS) + PADDING, channels * (3 if gated else 1) + 5).to(dtype)
    x = whole[:, 2:-3].detach().requires_grad_()
    rest = torch.randn(len(LENGTHS), 3, channels), torch.randn(channels, 4), torch.randn(channels)
    return [x, *(part.requires_grad_() for part in rest)]


def values_and_gradients(values, **flags):
    out, after = convolve(*values, TAILS, **flags)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=generator) for part in (out, after)]
    total = sum((weight * part).sum() for weight, part in zip(weights, (out, after), strict=True))
    return out, after, *torch.autograd.grad(total, values)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("channels", [32, 37])
def test_native_equals_torch(channels, silu, gated):
    """Whole blocks of channels, and a rest."""
    values, flags = inputs(channels, gated=gated), {"silu": silu, "gated": gated}
    found, wanted = (values_and_gradients(values, **flags, native=native) for native in (True, False))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-5)  # float32 sums of 51 tokens
    assert not found[0][-PADDING:].any()
    assert not found[2][-PADDING:].any()


def test_bfloat16_is_rounded_once():
    x, *rest = inputs(32, dtype=torch.bfloat16)
    out, _ = convolve(x, *rest, TAILS, silu=True, native=True)
    wanted, _ = convolve(x.float(), *rest, TAILS, silu=True)
    assert torch.equal(out, wanted.bfloat16())


def test_a_step_is_one_token_of_each_sequence():
    """And writes the new tails over the old ones."""
    x, tails, weight, bias = (part.detach() for part in inputs(37, gated=True))
    x, flags = x[: len(LENGTHS) + PADDING], {"silu": True, "gated": True}
    starts, moved, out = torch.arange(len(LENGTHS) + 1), tails.clone(), x.new_zeros(len(x), 37)
    convolve_into(out, moved, x, moved, weight.T, bias, starts, **flags)
    torch.testing.assert_close(out, convolve_step(x, tails, weight, bias, **flags))
    torch.testing.assert_close(moved, tails)


def test_wrong_shapes_are_refused():
    x, tails, weight, bias = (part.detach() for part in inputs(8))
    with pytest.raises(ValueError, match="tails of the channels"):
        convolve_into(torch.empty(len(x), 8), tails, x, tails, weight.T, bias, TAILS.starts, gated=True)
    with pytest.raises(ValueError, match="float32"):
        convolve_into(torch.empty(len(x), 8), tails, x, tails.double(), weight.T, bias, TAILS.starts)
