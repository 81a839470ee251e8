"""Flash attention on the device against the formula, in half precision."""

import pytest
import torch

from cohort.policy.attention import explicit_attention, packed_attention
from cohort.policy.layout import Layout
from tests.policy.test_attention import LAYOUTS, made

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [None, 1, 4, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [64, 128])
def test_outputs_and_gradients(layout, window, width):
    lengths, prefixes, prefix_lengths = LAYOUTS[layout]
    given = made(lengths, prefix_lengths, heads=4, kv_heads=2, width=width, dtype=torch.bfloat16)
    where = Layout(lengths, torch.device("cuda"), prefixes, prefix_lengths)
    results = []
    for function, dtype in ((packed_attention, torch.bfloat16), (explicit_attention, torch.float64)):
        tensors = [tensor.detach().cuda().to(dtype).requires_grad_() for tensor in given]
        q, k, v, *prefix = (tensor.transpose(0, 1) for tensor in tensors)
        if function is explicit_attention:
            out = function(q, k, v, *(prefix if prefixes else (None, None)), where, width**-0.5, window)
        else:
            out = function(
                q, k, v, where, scaling=width**-0.5, prefix=tuple(prefix) if prefixes else None, window=window
            )
        weights = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view_as(out)
        grads = torch.autograd.grad((out * weights).sum(), tensors, materialize_grads=True)
        results.append([out.detach(), *grads])
    for one, other in zip(*results, strict=True):
        if other.numel():
            # bfloat16 has 8 bits; the kernel rounds weights and products, and a gradient is a sum of tens of terms.
            assert (one - other).abs().max() <= 2**-5 * max(1.0, float(other.abs().max()))
