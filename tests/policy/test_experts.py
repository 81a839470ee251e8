"""Experts in native kernels against transformers' own, in float64."""

from __future__ import annotations

import copy
import math
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cohort.native import Unavailable, load
from cohort.policy.experts import (
    NAME,
    Activation,
    PreparedExperts,
    Route,
    experts,
    own_experts,
    use_own_experts,
    used,
)

try:
    load()
except Unavailable as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

SIZES = {"num_hidden_layers": 1, "hidden_size": 40, "intermediate_size": 28, "num_attention_heads": 2, "vocab_size": 16}
TOKENS, EXPERTS, EACH = 37, 5, 2


def model(family: str, inner: int = 28) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    more = {"num_experts": EXPERTS, "moe_intermediate_size": inner, "num_local_experts": EXPERTS}
    more |= {"num_experts_per_tok": EACH, "swiglu_limit": 0.5}
    config = AutoConfig.for_model(
        family,
        **SIZES | {"intermediate_size": inner},
        **more,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config).eval()
    for parameter in module_of(made).parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def module_of(made: Any) -> Any:
    return next(module for module in made.modules() if hasattr(module, "is_transposed"))


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def module(request: pytest.FixtureRequest) -> Any:
    return module_of(model(request.param))


@pytest.fixture(scope="module")
def given() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    index_TK = torch.rand(TOKENS, EXPERTS - 1).topk(EACH).indices  # no token chooses the last expert
    return torch.randn(TOKENS, 40), index_TK, torch.rand(TOKENS, EACH)


def results(module: Any, x: Tensor, index: Tensor, weights: Tensor, compute: Any) -> list[Tensor]:
    """The output, and the gradients of x, of the weights and of the parameters."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = compute(module, x, index, weights)
    direction = torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, weights, *module.parameters()], direction)]


def expected_of(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    wide = copy.deepcopy(module).double()
    wide.config._experts_implementation = "eager"
    return results(wide, x.double(), index, weights.double(), lambda wide, *given: wide(*given))


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def prepare(module: Any, dtype: torch.dtype) -> PreparedExperts:
    made = PreparedExperts.of(module, dtype)
    assert made is not None
    made.refresh()
    return made


def test_outputs_and_gradients_are_those_of_transformers(module: Any, given: Any) -> None:
    expected, found = expected_of(module, *given), results(module, *given, experts)
    for own, other in zip(found, expected, strict=True):
        assert gap(own, other) < 2e-6  # sums of 40 numbers in float32


def test_under_autocast_products_are_in_bfloat16(module: Any, given: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = results(module, *given, experts)
    for own, other in zip(found, expected_of(module, *given), strict=True):
        assert own.dtype == torch.float32
        assert 1e-4 < gap(own, other) < 0.1  # a bfloat16 has 8 bits; limits cut where they round


def test_few_tokens_have_the_same_numbers_whatever_their_company(module: Any, given: Any) -> None:
    prepared = prepare(module, torch.float32)
    x, index, weights = given
    found = prepared(x, index, weights)
    assert gap(found, expected_of(module, *given)[0]) < 2e-6
    for part in (slice(3, 4), slice(5, 30)):
        assert prepared(x[part], index[part], weights[part]).equal(found[part])
    narrow = prepare(module, torch.bfloat16)
    assert 1e-4 < gap(narrow(x, index, weights), found) < 0.05  # a bfloat16 has 8 bits
    with used(prepared), torch.no_grad():
        assert experts(module, x, index, weights).equal(found)
    assert prepared(x, index + EXPERTS, weights).isnan().all()


def test_prepared_weights_are_those_of_one_thread(module: Any, given: Any) -> None:
    """Samplers in other threads have others, of other dtypes, and other passes of the module have none."""
    prepared, of_others = prepare(module, torch.float32), []

    def other() -> None:
        with torch.no_grad():
            of_others.append(experts(module, *given))
        with used(prepare(module, torch.bfloat16)):
            pass

    with used(prepared), torch.no_grad():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        found = experts(module, *given)
        with used(None):
            expected = experts(module, *given)
    assert of_others[0].equal(expected)
    assert found.equal(prepared(*given))
    assert not found.equal(expected)  # in another order


@pytest.mark.parametrize("inner", [28, 27])  # an odd width has no pairs of numbers
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_few_tokens_in_bfloat16(family: str, inner: int, given: Any) -> None:
    module = module_of(model(family, inner))
    x, index, weights = given
    found = (prepared := prepare(module, torch.bfloat16))(x, index, weights)
    activation = Activation.of(module)
    assert activation is not None
    turn = (lambda matrix: matrix) if module.is_transposed else (lambda matrix: matrix.mT)
    up, down = (turn(matrix).bfloat16().double() for matrix in (module.gate_up_proj, module.down_proj))
    biases = [torch.zeros(EXPERTS, 1), torch.zeros(EXPERTS, 1)]
    if module.has_bias:
        biases = [bias.bfloat16().double() for bias in (module.gate_up_proj_bias, module.down_proj_bias)]
    expected = torch.zeros(TOKENS, 40, dtype=torch.float64)
    for token, expert, weight in zip(*(part.flatten() for part in (pairs(index), index, weights)), strict=True):
        active = weight * activation(x[token].bfloat16().double() @ up[expert] + biases[0][expert])
        expected[token] += active.bfloat16().double() @ down[expert] + weight * biases[1][expert]
    assert (
        gap(found, expected.detach()) < 1e-3
    )  # an activation that float32 rounds to the other neighbour is off by 2^-8
    for part in (slice(3, 4), slice(5, 30)):
        assert prepared(x[part], index[part], weights[part]).equal(found[part])


def pairs(index: Tensor) -> Tensor:
    """The token of each of its experts."""
    return torch.arange(len(index))[:, None].expand_as(index)


def test_prepared_weights_are_not_used_where_adapters_change_the_module(given: Any) -> None:
    class Added(torch.nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + 0.1

    module = module_of(model("qwen3_moe"))
    prepared = prepare(module, torch.float32)
    torch.nn.utils.parametrize.register_parametrization(module, "down_proj", Added())  # as peft does while it runs
    with torch.no_grad():
        expected = experts(module, *given)
        assert gap(prepared(*given), expected) > 0.1
        with used(prepared):
            assert experts(module, *given).equal(expected)


def test_activations_are_found_by_trying(module: Any) -> None:
    kind = "GptOss" in type(module).__name__
    assert Activation.of(module) == (Activation(False, 1.702, 0.5, 1.0, True) if kind else Activation())

    def found(gate: Any) -> Activation | None:
        holder = type("Module", (SimpleNamespace,), {"__hash__": object.__hash__})(_apply_gate=gate)
        return Activation.of(holder)

    assert found(lambda both: functional.gelu(both[:, :16], approximate="tanh") * both[:, 16:]) == Activation(gelu=True)
    assert found(lambda both: functional.gelu(both[:, :16]) * both[:, 16:]) is None
    assert found(lambda both: both) is None
    assert found(lambda both: functional.silu(both[:, :16]) * both[:, 16:]) == Activation()
    assert found(lambda both: functional.silu(both[:, :16]).clamp(max=100.0) * both[:, 16:]) is None


def test_gelu(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, gelu = module_of(model("gpt_oss")), Activation(gelu=True, limit=1.0)
    monkeypatch.setattr(module, "_apply_gate", gelu, raising=False)
    monkeypatch.setattr(Activation, "of", lambda module: gelu)
    expected, found = expected_of(module, *given), results(module, *given, experts)
    assert all(gap(own, other) < 2e-6 for own, other in zip(found, expected, strict=True))
    prepared = prepare(module, torch.float32)
    assert gap(prepared(*given), expected[0]) < 2e-6


def test_routes() -> None:
    index_TK = torch.tensor([[2, 0], [2, 1], [0, 2]])
    route = Route.of(index_TK, 4, 2)
    assert route.spans == ((0, 0, 2), (1, 2, 4), (2, 4, 8))
    assert route.token_M.tolist() == [0, 2, 1, -1, 0, 1, 2, -1]
    assert route.position_TK.tolist() == [[4, 0], [5, 2], [1, 6]]
    x_TH = torch.arange(6.0).view(3, 2)
    assert route.rows(x_TH)[:4].tolist() == [[0, 1], [4, 5], [2, 3], [0, 0]]
    assert route.tokens(route.rows(x_TH)).equal(2 * x_TH)
    with pytest.raises(IndexError, match="not one of 2"):
        Route.of(index_TK, 2, 1)


def test_a_model_computes_with_them_until_its_own_are_asked_for() -> None:
    made = model("qwen3_moe")
    use_own_experts(made, native=True)
    assert made.config._experts_implementation == NAME
    ids = torch.arange(9)[None]
    found = made(ids).logits.detach()
    with own_experts(made):
        assert made.config._experts_implementation != NAME
        expected = made(ids).logits.detach()
    assert made.config._experts_implementation == NAME
    assert not found.equal(expected)
    assert math.isclose(gap(found, expected), 0, abs_tol=1e-5)  # float32
