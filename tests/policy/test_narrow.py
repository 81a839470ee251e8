"""Linear layers of an update in half precision over float32 weights, against autocast."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from cohort.native import Unavailable, has_pairs, load
from cohort.policy import CompletionStates, Head, Policy, enable_checkpointing
from cohort.policy.narrow import Matrix, add_gradients, add_narrow, narrow_linears, outputs_beside
from cohort.train.memory import LiveBytes
from tests.conftest import each
from tests.cuda_on_cpu import cuda_on_cpu
from tests.policy.plain import MIXED, distribution_of, threads, tiny_llama

try:
    load()
except Unavailable as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

HALF = torch.bfloat16
VOCABULARY = 23
PASSES = [((5, 9, 20), (4, 6, 1)), ((7, 2), (3,))]


def gradients(policy, *, in_place):
    """Of two passes over two prompts each, by the update's block, or by autocast alone."""
    policy.model.zero_grad()
    with policy.training(), policy.compute():
        block = policy.gradients_in_place() if in_place else torch.enable_grad()
        with block:
            for scale in (1.0, 3.0):
                logps_N = policy.logps(*zip(*PASSES, strict=True), 1.0).logps_N
                (logps_N * scale).sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_a_model_are_those_of_autocast(checkpointing):
    """Prompts and completions are one pass here, of which autocast adds up the gradients in bfloat16: off by one rounding
    of the sum and one of each part."""
    policy = Policy(tiny_llama(tie_word_embeddings=False, attention_bias=True), MIXED)
    if checkpointing:
        enable_checkpointing(policy.model)
    expected = gradients(policy, in_place=False)
    got = gradients(policy, in_place=True)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=3 * 2**-8 * float(value.abs().max()))
    assert not any("forward" in vars(module) for module in policy.model.modules())


def test_a_layer_computes_what_autocast_does_and_its_gradient_has_float32_sums():
    """The layer's output and the gradient of its input are those of autocast bit by bit. The gradients of the weight and
    the bias are sums of exact products in float32, where autocast rounds each pass's to bfloat16."""
    layer, given = linear_of(), [torch.randn(rows, 40) for rows in (64, 7, 1)]
    expected_weight, expected_bias = torch.zeros(24, 40, dtype=torch.float64), torch.zeros(24, dtype=torch.float64)
    found = []
    for block in (nullcontext(), narrow_linears(layer, HALF)):
        layer.zero_grad()
        outs = []
        with block, torch.autocast("cpu", HALF):
            for x in given:
                out = layer(x.requires_grad_())
                (out.float() * torch.arange(24)).sum().backward()
                outs, x.grad = [*outs, out, x.grad], None
        found.append(outs)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    for x in given:
        grad = torch.arange(24.0).repeat(len(x), 1).double()
        expected_weight += grad.T @ x.detach().bfloat16().double()
        expected_bias += grad.sum(0)
    half = not has_pairs()  # torch's product is rounded then
    torch.testing.assert_close(layer.weight.grad.double(), expected_weight, rtol=2**-8 if half else 1e-6, atol=2e-4)
    assert torch.equal(layer.bias.grad.double(), expected_bias)


@pytest.mark.parametrize("bias", [False, True])
def test_layers_side_by_side_are_one_product(bias):
    """Outputs and gradients of weights are those of the layers one by one. Those of the input are a single sum in float32:
    nearer to float64 than three that are rounded and added in bfloat16."""
    layers = nn.ModuleList(nn.Linear(40, width, bias=bias) for width in (24, 8, 5))
    grads = [torch.randn(2, 7, layer.out_features) for layer in layers]
    found = []
    for beside in (False, True):
        layers.zero_grad()
        x = torch.arange(560.0).reshape(2, 7, 40).sin().requires_grad_()
        with narrow_linears(layers, HALF), torch.autocast("cpu", HALF):
            outs = outputs_beside(layers, x).split([24, 8, 5], dim=-1) if beside else [layer(x) for layer in layers]
            sum((out.float() * grad).sum() for out, grad in zip(outs, grads, strict=True)).backward()
        found.append([*outs, *(parameter.grad for parameter in layers.parameters()), x.grad])
    *one_by_one, grad_x = found[0]
    *beside, grad_x_beside = found[1]
    for one, other in zip(one_by_one, beside, strict=True):
        assert torch.equal(one, other)
    rounded = [
        (layer.weight.to(HALF).double(), grad.to(HALF).double()) for layer, grad in zip(layers, grads, strict=True)
    ]
    exact = sum(grad @ weight for weight, grad in rounded)
    gap = (grad_x_beside - exact).abs()
    assert (gap <= 2**-8 * exact.abs() + 1e-6).all()  # one rounding, and the sum's
    assert gap.max() < (grad_x - exact).abs().max()


@pytest.mark.parametrize("why", ["a hook", "a bias", "a frozen weight", "no autocast", "outside"])
def test_layers_that_are_not_one_product(why):
    layers = [nn.Linear(40, 24), nn.Linear(40, 8, bias=why != "a bias")]
    if why == "a hook":
        layers[1].register_forward_hook(lambda module, args, out: 2 * out)
    if why == "a frozen weight":
        layers[1].weight.requires_grad_(False)
    block = nullcontext() if why == "outside" else narrow_linears(nn.ModuleList(layers), HALF)
    with block, torch.autocast("cpu", HALF, enabled=why != "no autocast"):
        assert outputs_beside(layers, torch.randn(3, 40)) is None


# Rows that are no whole tiles, odd numbers of inputs and outputs, one panel of outputs, and two or three with a rest.
@each("size", [(1, 3, 5), (2, 1, 1), (7, 40, 24), (13, 70, 33), (401, 33, 70), (65, 20, 4099), (6, 130, 64)])
@each("bias", [False, True])
def test_products_are_those_of_float64_rounded_once(size, bias):
    rows, inputs, outputs = size
    generator = torch.Generator().manual_seed(rows)
    x, grad, first, second = (
        torch.randn(*shape, generator=generator)
        for shape in ((rows, inputs), (rows, outputs), (outputs - outputs // 3, inputs), (outputs // 3, inputs))
    )
    x, grad, added = x.to(HALF), grad.to(HALF), torch.randn(outputs, generator=generator) if bias else None
    matrix = Matrix([first, second], added, HALF)
    weight = torch.cat([first, second]).to(HALF).double()
    expected = x.double() @ weight.T + (added.to(HALF).double() if bias else 0)
    # An output has half a unit of bfloat16's last place, and a float32 sum of n products of about 1 an error below n 2^-24.
    for got, exact, terms in (
        (matrix.outputs(x), expected, inputs),
        (matrix.inputs(grad), grad.double() @ weight, outputs),
    ):
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=4 * 2**-24 * terms)


def test_an_output_depends_on_no_other_row_or_output_and_no_thread():
    weight, x, grad = torch.randn(100, 50), torch.randn(401, 50).to(HALF), torch.randn(401, 100).to(HALF)
    whole, part = Matrix([weight], None, HALF), Matrix([weight[32:69]], None, HALF)
    with threads(1):
        outs, grads = whole.outputs(x), whole.inputs(grad)
    with threads(3):
        some_outs, some_grads = part.outputs(x[17:22]), whole.inputs(grad[17:22])
    if has_pairs():  # torch promises neither
        assert torch.equal(some_outs, outs[17:22, 32:69])
        assert torch.equal(some_grads, grads[17:22])


def test_a_product_of_another_width_is_refused():
    matrix = Matrix([torch.randn(4, 6)], None, HALF)
    with pytest.raises((ValueError, RuntimeError)):
        matrix.outputs(torch.randn(3, 5).to(HALF))


# One pair of tokens and half of one; ends inside a panel, a block and the outputs that are laid out together.
@each("size", [(1, 3, 5), (2, 1, 1), (7, 40, 24), (300, 33, 70), (65, 20, 4099), (1031, 64, 600)])
@each("fresh", [False, True])
@each("native", [False, True])
def test_a_weights_gradient_is_that_of_float64(size, fresh, native):
    tokens, inputs, outputs = size
    generator = torch.Generator().manual_seed(tokens)
    x, grad = (torch.randn(tokens, n, generator=generator).to(HALF) for n in (inputs, outputs))
    total = torch.full((outputs, inputs), torch.nan if fresh else 0.5)
    product = grad.double().T @ x.double()
    add_gradients([total], grad, x, fresh=[fresh], native=native)
    # Partial sums of t products of about 1 are about sqrt(t), and their t roundings add up to as many times sqrt(t). Where
    # torch computes it, the product is rounded to bfloat16.
    atol = 4 * 2**-24 * tokens + (0 if native and has_pairs() else 2**-8 * float(product.abs().max()))
    torch.testing.assert_close(total.double(), product + (0 if fresh else 0.5), rtol=0, atol=atol)


@each("native", [False, True])
def test_gradients_of_layers_side_by_side_are_theirs_one_by_one(native):
    """Totals of a few rows end inside a tile; one is new, and the last bias lies in a panel that is not full."""
    x, grad = torch.randn(301, 50).to(HALF), torch.randn(301, 90).to(HALF)
    parts, fresh = grad.split([50, 3, 37], dim=1), [True, False, True]
    one_by_one = [torch.ones(part.shape[1], 50) for part in parts]
    beside, bias = [total.clone() for total in one_by_one], torch.empty(90)
    for total, part, new in zip(one_by_one, parts, fresh, strict=True):
        add_gradients([total], part, x, fresh=[new], native=native)
    add_gradients(beside, grad, x, fresh=fresh, native=native, bias_O=bias)
    assert all(map(torch.equal, one_by_one, beside))
    torch.testing.assert_close(bias.double(), grad.double().sum(0), rtol=0, atol=4 * 2**-24 * 301)


def test_a_gradient_in_another_order_of_memory_is_added():
    x, grad, total = torch.ones(4, 3).to(HALF), torch.ones(4, 2).to(HALF), torch.ones(3, 2).T
    add_gradients([total], grad, x, native=True)
    assert total.tolist() == [[5.0] * 3] * 2


def test_a_weights_gradient_depends_on_no_other_output_and_no_thread():
    x, grad = torch.randn(301, 50).to(HALF), torch.randn(301, 90).to(HALF)
    whole, part = torch.empty(90, 50), torch.empty(37, 50)
    with threads(1):
        add_gradients([whole], grad, x, fresh=[True], native=True)
    with threads(3):
        add_gradients([part], grad[:, 20:57], x, fresh=[True], native=True)  # its rows lie apart
    if has_pairs():  # torch promises neither
        assert torch.equal(part, whole[20:57])


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts tensors made in float32 of a shape."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        of_shape = isinstance(out, torch.Tensor) and out.shape == (24, 40) and out.dtype == torch.float32
        given = [each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)]
        self.made += of_shape and out.untyped_storage()._cdata not in given
        return out


def linear_of(**kwargs):
    torch.manual_seed(1)
    return nn.Linear(40, 24, **kwargs)


def test_a_sum_of_gradients_is_the_only_float32_tensor_of_a_weights_size():
    layer, x = linear_of(), torch.randn(64, 40)
    with Copies() as copies, torch.autocast("cpu", HALF), narrow_linears(layer, HALF):
        for _ in range(3):
            layer(x).float().sum().backward()
    assert copies.made == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_with_hooks_or_frozen_weights_are_left_alone(frozen):
    layer = linear_of()
    if frozen:
        layer.weight.requires_grad_(False)
    else:
        layer.weight.register_hook(lambda grad: 3 * grad)
    with narrow_linears(layer, HALF):
        assert "forward" not in vars(layer)


def test_without_gradients_and_without_autocast_the_layer_computes_what_it_does():
    layer, x = linear_of(), torch.randn(7, 40)
    with torch.no_grad():
        with torch.autocast("cpu", HALF):
            narrow = layer(x)
        wide = layer(x)
        with narrow_linears(layer, HALF):
            assert torch.equal(layer(x), wide)
            with torch.autocast("cpu", HALF):
                assert torch.equal(layer(x), narrow)


@each("shape", [(1,), (3, 5), (4099,), (33, 1001)])
@each("count", [1, 2])
def test_adding_half_precision_is_exact_to_float32(shape, count):
    """Widening is exact, so each sum is rounded once, as by torch."""
    total, part = torch.randn(shape), torch.randn(shape).to(HALF)
    expected = total + part.float()
    with threads(count):
        add_narrow(total, part)
    assert torch.equal(total, expected)


def test_adding_in_another_order_of_memory():
    total, part = torch.randn(6, 8), torch.randn(8, 6).to(HALF).T
    expected = total + part.float()
    add_narrow(total, part)
    assert torch.equal(total, expected)


def test_kernels_that_are_switched_off_are_not_used(monkeypatch):
    monkeypatch.setattr("cohort.policy.narrow.call", lambda *_, **__: pytest.fail("a kernel was called"))
    total, grad, x = torch.ones(3, 4), torch.ones(2, 3).bfloat16(), torch.ones(2, 4).bfloat16()
    add_gradients([total], grad, x)
    assert total.tolist() == [[3.0] * 4] * 3


def test_a_gradient_on_cuda_is_added_without_rounding_its_product():
    """1 + 2^-9 has a digit more than bfloat16 holds: a rounded product would be 1."""
    grad, x = torch.tensor([[1.0], [2**-9]]).bfloat16(), torch.ones(2, 1).bfloat16()
    total = torch.tensor([[2.0**-12]])
    with cuda_on_cpu():
        add_gradients([total], grad, x)
        assert float(total) == 1 + 2**-9 + 2**-12
        add_gradients([total], grad, x, fresh=[True])
    assert float(total) == 1 + 2**-9


@pytest.mark.parametrize("compute", [torch.float32, HALF])
@each(("chunk", "kept", "products"), [(2, 1, (5, 10, 15)), (2, 4, (5, 8, 13)), (4, 9, (3, 3, 6))])
def test_kept_logits_change_no_bit_and_serve_one_backward_pass(monkeypatch, compute, chunk, kept, products):
    """None, those of the last two chunks, or all. The second pass finds nothing kept: the logits were written over."""
    monkeypatch.setattr(CompletionStates, "drawn_chunk", chunk)
    computed, found = [], []
    monkeypatch.setattr(Head, "product", lambda *given, real=Head.product: computed.append(1) or real(*given))
    hidden, linear = torch.randn(9, 6, requires_grad=True), nn.Linear(6, VOCABULARY, bias=False)
    drawn = distribution_of([(1, 2)], [tuple(range(9))], 1.0, (), 1.0)
    for most in (0, kept):
        monkeypatch.setattr(Head, "kept_tokens", most)
        computed.clear()
        logps_N = CompletionStates(hidden, Head(linear, compute, native=True), drawn).logps().logps_N
        weighted, counts = (logps_N * torch.arange(9)).sum(), [len(computed)]
        once = torch.autograd.grad(weighted, (hidden, linear.weight), retain_graph=True)
        counts.append(len(computed))
        again = torch.autograd.grad(weighted, (hidden, linear.weight))
        found.append([logps_N.detach(), *once, *again])
    assert (*counts, len(computed)) == products
    assert all(map(torch.equal, once, again))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("compute", [torch.float32, HALF])
def test_the_logits_of_one_chunk_exist_at_a_time(monkeypatch, compute):
    """With as many kept as a chunk has."""
    monkeypatch.setattr(CompletionStates, "drawn_chunk", 512)
    monkeypatch.setattr(Head, "kept_tokens", 512)
    vocabulary, tokens = 8192, 2048
    hidden, linear = torch.randn(tokens, 32, requires_grad=True), nn.Linear(32, vocabulary, bias=False)
    drawn = distribution_of([(1, 2)], [(5,) * tokens], 1.0, (), 1.0)
    states, live = CompletionStates(hidden, Head(linear, compute, native=True), drawn), LiveBytes()
    with live:
        states.logps().logps_N.sum().backward()
    logits = 512 * vocabulary * compute.itemsize
    # The weight's copies and gradient, hidden states and theirs: 3 MiB; words of weight_gradient.c: 4 MiB.
    assert logits < live.peak < logits + 7 * 2**20


@each(
    ("given", "compute", "is_packed"),
    [
        (torch.float32, HALF, True),
        (HALF, HALF, False),
        (torch.float32, torch.float32, False),
        (HALF, torch.float32, False),
    ],
)
def test_a_head_that_is_not_cast_is_not_copied(given, compute, is_packed):
    """Under adapters it is frozen and in bfloat16."""
    linear = nn.Linear(6, VOCABULARY, bias=False, dtype=given)
    drawn = distribution_of([(1, 2)], [(3, 4)], 1.0, (), 1.0)
    weight = CompletionStates(torch.zeros(2, 6), Head(linear, compute, native=True), drawn).weight()
    assert isinstance(weight, Matrix) is (is_packed and has_pairs())
    assert (weight is linear.weight) is (given == compute)
