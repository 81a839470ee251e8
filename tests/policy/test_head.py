"""Log-probs from hidden states in chunks, against a plain log-softmax of all logits by autograd."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cohort.policy import CompletionStates, Head, chunked_terms, head
from cohort.policy.device import forced_kind
from cohort.train.memory import LiveBytes
from tests.policy.plain import distribution_of, random_supports

VOCABULARY, HIDDEN = 23, 6
PROMPTS = [(5, 9, 20), (7,), (30, 3, 5, 5, 11), (2, 3)]  # 30 is beyond the vocabulary
COMPLETIONS = [(4, 6, 1), (8, 8, 7, 8, 8, 1), (1,), (12, 13)]
TARGETS = list(itertools.chain(*COMPLETIONS))
N = len(TARGETS)
SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "bias": {"bias": True},
    "multiplier": {"multiplier": 0.3},
    "soft cap": {"cap": 1.5, "bias": True},
    "soft cap after multiplier": {"cap": 1.5, "multiplier": 2.5},
    "supports": {"supports": True},
    "penalty": {"penalty": 1.4},
    "reward for repeating": {"penalty": 0.7},
    "all": {"temperature": 0.6, "bias": True, "multiplier": 0.8, "cap": 3.0, "supports": True, "penalty": 1.4},
}


KEPT, SUPPORTS = random_supports(COMPLETIONS, VOCABULARY, whole=2)


def parts(bias=False, dtype=torch.float64, scale=1.0):
    """Hidden states and a head, leaves."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(N, HIDDEN, generator=generator, dtype=torch.float64) * scale
    linear = nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return hidden.to(dtype).requires_grad_(), linear


def states_of(hidden, linear, multiplier=1.0, cap=None, compute=torch.float64, **settings):
    its_head = Head(linear, compute, multiplier, cap)
    return CompletionStates(hidden, its_head, distribution(**settings))


def distribution(temperature=1.0, supports=False, penalty=1.0, **_):
    return distribution_of(PROMPTS, COMPLETIONS, temperature, SUPPORTS if supports else (), penalty)


def plain_scores(logits, temperature=1.0, supports=False, penalty=1.0, **_):
    """Penalty, then support, then temperature, token by token."""
    kept, rows, n = list(itertools.chain(*KEPT)), [], 0
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        for t in range(len(completion)):
            row, seen = logits[n], torch.zeros(logits.shape[1], dtype=torch.bool)
            seen[[token for token in (*prompt, *completion[:t]) if token < logits.shape[1]]] = True
            row = torch.where(seen, torch.where(row < 0, row * penalty, row / penalty), row)
            if supports:
                outside = torch.ones_like(seen)
                outside[kept[n]] = False
                row = row.masked_fill(outside, -torch.inf)
            rows.append(row / temperature)
            n += 1
    return torch.stack(rows)


def plain_log_probs(hidden, linear, multiplier=1.0, cap=None, **settings):
    logits = linear(hidden) * multiplier
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return torch.log_softmax(plain_scores(logits, **settings), -1)


def statistics(log_probs):
    probs = log_probs.exp()
    chosen = log_probs.gather(-1, torch.tensor(TARGETS)[:, None]).squeeze(-1)
    entropy = -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)
    return chosen, entropy, probs.square().sum(-1)


def gradients(value, hidden, linear):
    return torch.autograd.grad(value, [hidden, *linear.parameters()])


WEIGHTS = torch.linspace(-1, 2, N, dtype=torch.float64)


CHUNKED = list(zip(SETTINGS, itertools.cycle([1, 3, 512]), strict=False))


@pytest.mark.parametrize(("name", "chunk"), [*CHUNKED, ("all", 3)])
def test_statistics_and_gradients(monkeypatch, name, chunk):
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    settings = dict(SETTINGS[name])
    hidden, linear = parts(settings.pop("bias", False))
    states = states_of(hidden, linear, **settings)
    assert states.chunk == chunk
    got, expected = states.logps(), statistics(plain_log_probs(hidden, linear, **settings))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert [values.requires_grad for values in got] == [True, False, False]
    for one, other in zip(
        gradients((got.logps_N * WEIGHTS).sum(), hidden, linear),
        gradients((expected[0] * WEIGHTS).sum(), hidden, linear),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "chunk"), [*CHUNKED, ("all", 5)])
def test_terms_over_the_vocabulary(monkeypatch, name, chunk):
    monkeypatch.setattr(head, "CHUNK_TOKENS", chunk)
    settings = dict(SETTINGS[name])
    hidden, linear = parts(settings.pop("bias", False))

    def term(log_probs, weights):
        finite = log_probs.masked_fill(log_probs.isneginf(), 0.0)
        return (weights[:, None] * log_probs.exp() * finite).sum()

    got = chunked_terms(term, [states_of(hidden, linear, **settings)], [WEIGHTS])
    expected = term(plain_log_probs(hidden, linear, **settings), WEIGHTS)
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)
    for one, other in zip(gradients(got, hidden, linear), gradients(expected, hidden, linear), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_scores_are_not_written_over_given_logits():
    """A reference's logits need no gradient, and are read again in the backward pass."""
    logits = torch.randn(N, VOCABULARY, generator=torch.Generator().manual_seed(1))
    states, before = CompletionStates(logits, Head(), distribution(temperature=0.5)), logits.clone()
    states.log_probs(logits, 0)
    assert torch.equal(logits, before)


def test_given_logits_that_need_a_gradient_are_not_written_over():
    """Not even those of forbidden tokens, whose -inf would be a finite number afterwards."""
    logits = torch.randn(N, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[2, 5:10] = -torch.inf
    before = logits.clone()
    CompletionStates(logits.requires_grad_(), Head(), distribution()).logps().logps_N.sum().backward()
    assert torch.equal(logits, before)


def test_the_size_of_chunks(monkeypatch):
    hidden, linear = parts()
    monkeypatch.setattr(head, "CHUNK_LOGITS", 2 * VOCABULARY + 1)
    assert states_of(hidden, linear).chunk == 2
    monkeypatch.setattr(head, "CHUNK_LOGITS", 1)
    assert states_of(hidden, linear).chunk == 1
    with forced_kind("cuda"):
        for vocabulary, chunk in ((151_936, 2048), (2**18, 2048), (2**18 + 1, 1984)):  # multiples of 64
            with torch.device("meta"):
                wide = nn.Linear(HIDDEN, vocabulary)
            assert states_of(hidden, wide).chunk == chunk


@pytest.mark.parametrize(("cap", "backward"), [(None, 2), (1.5, 3)])
def test_few_tensors_of_a_chunk_exist_at_once(cap, backward):
    """Scores and probabilities; with a soft cap its slopes, too."""
    states = long_states(64, cap=cap)
    with LiveBytes() as live:
        logps = states.logps().logps_N.sum()
    one = 64 * MANY * 4
    assert 2 * one <= live.peak < 2.1 * one
    with LiveBytes() as live:
        logps.backward()
    assert backward * one <= live.peak < (backward + 0.1) * one


@pytest.mark.parametrize(
    ("width", "compute", "ends"), [(4, torch.float32, [1, 5, 9, 13, 17, 21]), (8, torch.bfloat16, [5, 21])]
)
def test_chunks_of_native_kernels_have_at_most_the_weights_bytes(monkeypatch, width, compute, ends):
    """By hand: rows of V numbers in V * width * 4 bytes, 4 or 16 rows; 21 tokens are cut from the end."""
    monkeypatch.setattr(head, "KEPT_BYTES", 1)
    drawn = distribution_of([(1,)], [(2,) * 21], 1.0, (), 1.0)
    states = CompletionStates(torch.zeros(21, width), Head(nn.Linear(width, 5), compute, native=True), drawn)
    assert [*states.chunks(states.drawn_chunk)] == [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
    monkeypatch.setattr(head, "KEPT_BYTES", 5 * 70 * compute.itemsize)
    assert states.drawn_chunk == 64  # a multiple of 64
    monkeypatch.setattr(head, "KEPT_BYTES", 2**20)
    assert states.drawn_chunk == 1024
    assert states.chunk == 512  # of torch, whose logits are in float32


def test_the_penalty_of_logits_that_are_zero_by_hand():
    """Seen: 0 (logit 0), 1 (logit -1) and 2 (logit 1). Zero counts as positive, as in sampling: its slope is 1 / 2."""
    logits = torch.tensor([[0.0, -1.0, 1.0, -0.0, 3.0]], dtype=torch.float64, requires_grad=True)
    states = CompletionStates(logits, Head(), distribution_of([(0, 1, 2)], [(4,)], 1.0, (), 2.0))
    logps = states.logps().logps_N
    z = torch.tensor([0.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    probs = z.softmax(0)
    assert logps.item() == pytest.approx(probs[4].log().item(), abs=1e-15)
    (grad,) = torch.autograd.grad(logps.sum(), logits)
    expected = -probs * torch.tensor([0.5, 2.0, 0.5, 1.0, 1.0], dtype=torch.float64)
    expected[4] += 1
    torch.testing.assert_close(grad[0], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["plain", "soft cap", "penalty", "all"])
def test_bfloat16_products(name):
    """Weights in float32, products in bfloat16: only the logits' rounding to 8 bits is lost."""
    settings = dict(SETTINGS[name])
    hidden, linear = parts(settings.pop("bias", False), torch.float32)
    exact = plain_log_probs(hidden, linear, **settings)
    got = states_of(hidden, linear, compute=torch.bfloat16, **settings).logps()
    assert {values.dtype for values in got} == {torch.float32}
    largest = linear(hidden).abs().max().item() * settings.get("multiplier", 1) / settings.get("temperature", 1)
    largest *= max(settings.get("penalty", 1), 1)
    # Hidden states, weights and the sum are each rounded by at most 2^-9 of themselves; two logits per log-prob.
    bound = 2 * 3 * 2**-9 * largest
    expected = statistics(exact)
    gap = (got.logps_N - expected[0]).abs().max().item()
    assert 1e-6 < gap < bound
    assert (got.entropy_N - expected[1]).abs().max() < bound
    weights = WEIGHTS.float()
    grads = gradients((got.logps_N * weights).sum(), hidden, linear)
    expected_grads = gradients((expected[0] * weights).sum(), hidden, linear)
    for one, other in zip(grads, expected_grads, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.05 * other.norm()  # probabilities off by a few percent of themselves


def test_frozen_parameters_get_no_gradient():
    hidden, linear = parts(bias=True)
    linear.requires_grad_(False)
    states_of(hidden, linear).logps().logps_N.sum().backward()
    assert hidden.grad is not None
    assert linear.weight.grad is linear.bias.grad is None
    linear.bias.requires_grad_(True)
    states_of(hidden.detach(), linear).logps().logps_N.sum().backward()
    assert linear.bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_are_finite(dtype):
    logits = torch.full((N, VOCABULARY), -1e4, dtype=dtype)
    logits[:, ::2] = 1e4
    logits[1] = -1e4
    logits[2, 5:10] = -torch.inf  # as a model forbids tokens
    logits[3] = 0.0
    logits[:, 0] = 1e4
    logits.requires_grad_()
    for settings in ({}, {"temperature": 0.01}, {"supports": True}, {"penalty": 1.5}):
        got = CompletionStates(logits, Head(), distribution(**settings)).logps()
        expected = statistics(torch.log_softmax(plain_scores(logits.double(), **settings), -1))
        for one, other in zip(got, expected, strict=True):
            assert torch.isfinite(one).all()
            # Beside logits of 1e4 a float32 number has a rounding of 1e-3, of 1e6 one of 0.1.
            size = 1e6 if "temperature" in settings else 2e4
            torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=size * torch.finfo(dtype).eps)
        (grad,) = torch.autograd.grad(got.logps_N.sum(), logits)
        assert torch.isfinite(grad).all()
    assert (got.entropy_N > -1e-2).all()


@pytest.mark.parametrize("name", ["plain", "supports"])
def test_autocast_rounds_no_statistic(name):
    """In an update it casts the factors of dot products to bfloat16, in which the lowest float32 number is -inf."""
    hidden, linear = parts(dtype=torch.float32)
    expected = states_of(hidden, linear, compute=torch.float32, **SETTINGS[name]).logps()
    states = states_of(hidden, linear, compute=torch.float32, **SETTINGS[name])
    states = dataclasses.replace(states, head=dataclasses.replace(states.head, own_dtype=True))
    with torch.autocast("cpu", torch.bfloat16):
        got = states.logps()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


# Memory ---------------------------------------------------------------------------------------------------------------

MANY = 1000  # a vocabulary much larger than all other sizes
CASES = [{}, {"penalty": 1.3, "cap": 5.0, "multiplier": 0.5}]


def long_states(tokens, penalty=1.0, **settings):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(MANY, (tokens,), generator=generator).tolist()
    linear = nn.Linear(4, MANY, bias=False)
    hidden = torch.randn(tokens, 4, generator=generator).requires_grad_()
    completions = [ids[start : start + 20] for start in range(0, tokens, 20)]
    its_distribution = distribution_of([(1, 2)] * len(completions), completions, 0.9, (), penalty)
    return CompletionStates(hidden, Head(linear, **settings), its_distribution)


def kept_bytes(function):
    """Distinct storage kept for the backward pass."""
    sizes = {}

    def keep(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = function()
    return sum(sizes.values()), value


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.numel = max(self.numel, each.numel())
        return out


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_no_logits_are_kept(settings):
    kept = {}
    for tokens in (400, 800):
        states = long_states(tokens, **settings)
        kept[tokens], _ = kept_bytes(lambda states=states: states.logps().logps_N.sum())
        assert kept[tokens] < 2 * (tokens * 4 + MANY * 4) * 4
    # Per token: 4 numbers of its hidden state.
    assert kept[800] - kept[400] <= 400 * 4 * 4 + 64


@pytest.mark.parametrize(
    ("settings", "term"),
    # Terms are torch's where native kernels compute log-probs, too.
    [(CASES[0], "logps"), (CASES[1], "logps"), (CASES[1], "entropy"), ({"native": True}, "entropy")],
)
def test_the_largest_tensor_is_a_chunk_of_logits(monkeypatch, settings, term):
    monkeypatch.setattr(head, "CHUNK_TOKENS", 64)
    for tokens in (400, 1200):
        states = long_states(tokens, **settings)
        with Largest() as largest:
            if term == "logps":
                value = states.logps().logps_N.sum()
            else:
                value = chunked_terms(lambda p, w: (w[:, None] * p.exp() * p).sum(), [states], [torch.ones(tokens)])
            value.backward()
        assert 64 * MANY <= largest.numel <= 64 * (MANY + 1), tokens


def test_without_gradients_nothing_is_kept():
    states = long_states(400)
    with torch.no_grad():
        kept, logps = kept_bytes(states.logps)
    assert kept == 0
    assert not logps.logps_N.requires_grad
    assert logps.logps_N.grad_fn is None
    with torch.no_grad():
        again = states.logps()
    assert all(torch.equal(one, other) for one, other in zip(logps, again, strict=True))
