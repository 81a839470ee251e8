"""Recurrences over packed sequences, against loops over the tokens; a state handed over is one long pass."""

import itertools

import pytest
import torch

from cohort.native import Unavailable, load
from cohort.policy.layout import Layout
from cohort.policy.recurrent import DELTA_RULE, STATE_SPACE, Chunks, Tails, delta_rule, state_space, steps_of, unit

LENGTHS = (3, 130, 1, 70)  # of one chunk, of several with padding and without
HEADS, GROUPS, KEYS, VALUES = 4, 2, 3, 5
CPU = torch.device("cpu")


def starts(lengths):
    return (0, *itertools.accumulate(lengths))


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def delta_inputs(tokens):
    torch.manual_seed(0)
    q, k = unit(random(tokens, GROUPS, KEYS)), unit(random(tokens, GROUPS, KEYS))
    return q, k, random(tokens, HEADS, VALUES), -random(tokens, HEADS).exp(), random(tokens, HEADS).sigmoid()


def space_inputs(tokens):
    torch.manual_seed(0)
    steps = steps_of(random(tokens, HEADS), random(HEADS), True, (0.1, 2.0))
    keys = random(tokens, GROUPS, KEYS), random(tokens, GROUPS, KEYS)
    return random(tokens, HEADS, VALUES), steps, -random(HEADS).exp(), *keys


def delta_loop(q, k, v, decay, beta, state):
    """The formula of ``delta_rule`` for one sequence."""
    q, k = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (q, k))
    out = []
    for t in range(len(v)):
        state = state * decay[t].exp()[:, None, None]
        error = v[t] - torch.einsum("akd,ak->ad", state, k[t])
        state = state + beta[t][:, None, None] * torch.einsum("ak,ad->akd", k[t], error)
        out.append(torch.einsum("akd,ak->ad", state, q[t]))
    return torch.stack(out), state


def space_loop(x, steps, decay, b, c, state):
    """The formula of ``state_space`` for one sequence."""
    b, c = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (b, c))
    out = []
    for t in range(len(x)):
        state = state * (steps[t] * decay).exp()[:, None, None]
        state = state + steps[t][:, None, None] * torch.einsum("ad,ak->adk", x[t], b[t])
        out.append(torch.einsum("adk,ak->ad", state, c[t]))
    return torch.stack(out), state


CASES = {
    "delta rule": (delta_rule, delta_loop, delta_inputs, (KEYS, VALUES), ()),
    "state space": (state_space, space_loop, space_inputs, (VALUES, KEYS), (2,)),
}


@pytest.mark.parametrize("name", CASES)
def test_chunks_equal_a_loop_over_the_tokens(name):
    function, loop, inputs, shape, whole = CASES[name]
    values, state = inputs(sum(LENGTHS)), random(len(LENGTHS), HEADS, *shape)
    out, after = function(*values, Chunks(starts(LENGTHS), CPU), state)
    parts = [[value] * len(LENGTHS) if n in whole else value.split(LENGTHS) for n, value in enumerate(values)]
    found = [loop(*part, state[s]) for s, part in enumerate(zip(*parts, strict=True))]
    wanted, wanted_after = torch.cat([out for out, _ in found]), torch.stack([after for _, after in found])
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(after, wanted_after, rtol=1e-10, atol=1e-10)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in (out, after)]
    grads, expected = (
        torch.autograd.grad(
            sum((w * part).sum() for w, part in zip(weights, pair, strict=True)), [*values, state], retain_graph=True
        )
        for pair in ((out, after), (wanted, wanted_after))
    )
    torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_strong_decays_keep_the_precision_of_float32(name):
    """Decays of a token are between 0 and 30, their sums over a chunk about 1000, which has a rounding of 1e-4."""
    function, _, inputs, shape, whole = CASES[name]
    values = [value.detach() for value in inputs(64)]
    strong = values[1] if whole else values[3]  # time steps, or decays
    strong.copy_(torch.rand_like(strong).pow(3) * (30 if whole else -30))
    if whole:
        values[2].fill_(-1.0)
    state = torch.zeros(1, HEADS, *shape)
    exact, _ = function(*values, Chunks((0, 64), CPU), state.double())
    out, _ = function(*(value.float() for value in values), Chunks((0, 64), CPU), state)
    assert out.dtype == torch.float32
    assert float((out - exact).norm() / exact.norm()) < 1e-6  # with sums in float32: 3e-6 and 5e-6


@pytest.mark.parametrize("name", CASES)
def test_native_kernels_equal_torch(name):
    try:
        load()
    except Unavailable as reason:
        pytest.skip(str(reason))
    function, _, inputs, shape, _ = CASES[name]
    values = [value.detach().float().requires_grad_() for value in inputs(sum(LENGTHS))]
    state = torch.randn(len(LENGTHS), HEADS, *shape, requires_grad=True)
    found = []
    for native in (True, False):
        out, after = function(*values, Chunks(starts(LENGTHS), CPU), state, native=native)
        generator = torch.Generator().manual_seed(1)
        total = sum((torch.randn(part.shape, generator=generator) * part).sum() for part in (out, after))
        found.append((out, after, *torch.autograd.grad(total, [*values, state])))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)  # float32 sums over chunks of 64


@pytest.mark.parametrize(("name", "recurrence"), [("delta rule", DELTA_RULE), ("state space", STATE_SPACE)])
def test_a_step_is_one_token_of_each_sequence(name, recurrence):
    _, loop, inputs, shape, whole = CASES[name]
    values, state = inputs(3), random(3, HEADS, *shape)
    parts = [[value] * 3 if n in whole else value.split(1) for n, value in enumerate(values)]
    found = [loop(*part, state[s]) for s, part in enumerate(zip(*parts, strict=True))]
    with torch.no_grad():
        written = state.clone()
        out = recurrence.step(*values, written)
    torch.testing.assert_close(out, torch.cat([out for out, _ in found]), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(written, torch.stack([after for _, after in found]), rtol=1e-10, atol=1e-10)


def test_the_delta_rule_by_hand():
    """One head of width 1: S = 2; decay 1/2 leaves 1; a value of 5 read as 1 writes half of the error; q reads."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    half = torch.full((1, 1), 0.5, dtype=torch.float64)
    out, after = delta_rule(3 * one, one, 5 * one, half.log(), half, Chunks((0, 1), CPU), 2 * one[None])
    assert (float(out), float(after)) == (pytest.approx(9.0), pytest.approx(3.0))


def test_convolutions_begin_with_tails():
    """Two sequences, of which the second is shorter than its window."""
    x, weight = torch.tensor([[1.0], [2.0], [3.0], [10.0]]), torch.tensor([[100.0, 10.0, 1.0]])
    tails = torch.tensor([[[0.0], [0.0]], [[4.0], [5.0]]])
    out, after = Tails((0, 3, 4), 2, CPU).convolve(x, tails, weight)
    assert out.flatten().tolist() == [1.0, 12.0, 123.0, 460.0]
    assert after.flatten(1).tolist() == [[2.0, 3.0], [5.0, 10.0]]


def test_sequences_are_numbered_by_prefixes_that_are_not_empty():
    layout = Layout([1, 1, 2, 1], CPU, [0, 1, 1, 2], [4, 0, 2])
    assert layout.continued_S.tolist() == [1, 0, 0, 2]
    assert Layout([1, 2], CPU).continued_S.tolist() == [0, 0]
