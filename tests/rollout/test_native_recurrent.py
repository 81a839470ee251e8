"""Native steps of recurrent layers, against torch's."""

import pytest
import torch

from cohort.native import Unavailable, load
from cohort.policy.recurrent import DELTA_RULE, STATE_SPACE
from tests.conftest import each

try:
    load()
except Unavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

ROWS, GROUPS, HEADS = 3, 2, 4


def values_of(recurrence, keys, width):
    torch.manual_seed(0)
    q, k = torch.randn(ROWS, 2 * GROUPS, keys)[:, ::2], torch.randn(ROWS, GROUPS, keys) / keys**0.5
    v, steps = torch.randn(ROWS, HEADS, width), torch.rand(ROWS, HEADS)
    if recurrence is DELTA_RULE:
        return (q, k, v, -steps, torch.rand(ROWS, HEADS)), torch.randn(ROWS, HEADS, keys, width)
    return (v, steps, -torch.rand(HEADS), q, k), torch.randn(ROWS, HEADS, width, keys)


@each(("keys", "width"), [(8, 64), (37, 70), (5, 3)])
@each("recurrence", [DELTA_RULE, STATE_SPACE])
def test_steps(recurrence, keys, width):
    """Vectors of whole registers, with a rest, and shorter than one."""
    values, state = values_of(recurrence, keys, width)
    wanted_state = state.clone()
    wanted = recurrence.step(*values, wanted_state)
    out = recurrence.native_step(*values, state)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)  # float32 sums of 37 numbers
    torch.testing.assert_close(state, wanted_state, rtol=1e-5, atol=1e-5)


def test_wrong_shapes_are_refused():
    values, state = values_of(DELTA_RULE, 8, 4)
    with pytest.raises(ValueError, match="states of the shapes of their inputs"):
        DELTA_RULE.native_step(*values, state[:, :, 1:])
    with pytest.raises(ValueError, match="float32"):
        DELTA_RULE.native_step(*values, state.double())
