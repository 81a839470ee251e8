"""Norms, rotations and gates that torch compiles on CUDA, by a compiler of a CPU: ``aot_eager`` makes the same graphs."""

import pytest
import torch

from cohort.policy import Policy, Precision, fused
from cohort.policy.fused import Fused, compiled_once
from tests.cuda_on_cpu import cuda_on_cpu
from tests.families.configs import small_model
from tests.policy.plain import COMPLETIONS, MIXED, PROMPTS, SINGLE

REAL = torch.compile
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo itself reads


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """A quick compiler for this test, and how often it has been asked."""
    asked = []

    def compile(function, **settings):
        asked.append(function.__name__)
        return REAL(function, backend="aot_eager", **settings)

    monkeypatch.setattr(torch, "compile", compile)
    compiled_once.cache_clear()
    yield asked
    compiled_once.cache_clear()
    torch._dynamo.reset()


def gradients(policy):
    with policy.training(), policy.compute(), policy.gradients_in_place():
        logps_N = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N
        logps_N.sum().backward()
    assert "compiled" not in policy.passes.description  # it did not fail
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]), logps_N.detach()


def policies(family, precision):
    for wanted in (True, False):
        policy = Policy(small_model(family), precision)
        policy.torch_compile = wanted
        yield policy


@pytest.mark.parametrize(
    ("family", "precision"),
    [("qwen3", MIXED), *(pytest.param(name, SINGLE, marks=pytest.mark.slow) for name in ("qwen3", "gemma3_text"))],
)
def test_log_probs_and_gradients_are_those_of_single_operations(family, precision, compiler):
    with cuda_on_cpu(strict=False):
        found = [gradients(policy) for policy in policies(family, precision)]
    assert {"_normed", "_add_normed", "_turned", "_active"} <= set(compiler)
    for one, other in zip(*found, strict=True):
        # The same formulas in the same order; in bfloat16 the graph may round between them elsewhere.
        assert float((one - other).norm() / other.norm()) < (1e-6 if precision is SINGLE else 0.02)


def test_one_graph_serves_every_number_of_tokens():
    norm = Fused(False, torch.float32, torch.bfloat16, compiled=True)
    factor = torch.ones(8)
    torch._dynamo.utils.counters.clear()
    for tokens in (5, 9, 64, 100, 3):
        norm.norm(torch.randn(tokens, 8), factor, 1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the first, and one for any number


@pytest.mark.parametrize("failing", ["compile", "another result"])
def test_what_does_not_work_is_not_used(failing, monkeypatch):
    def compile(function, **_):
        def wrong(*given):
            if failing == "compile":
                raise RuntimeError("no compiler here\nand a long explanation")
            out = function(*given)
            return (2 * out[0], out[1]) if isinstance(out, tuple) else 2 * out

        wrong.__name__ = function.__name__
        return wrong

    monkeypatch.setattr(torch, "compile", compile)
    with cuda_on_cpu(strict=False):
        policy = next(policies("qwen3", MIXED))
        description = policy.passes.description
    reason = "RuntimeError: no compiler here" if failing == "compile" else "_normed computes something else"
    assert f"(compiled: {reason}" in description
    assert "explanation" not in description
    assert policy.passes.shared


def test_a_cpu_and_a_setting_compile_nothing(compiler):
    policy = next(policies("qwen3", MIXED))
    assert policy.passes.shared  # on a CPU
    with cuda_on_cpu(strict=False):
        _, off = policies("qwen3", MIXED)
        assert "compiled" not in off.passes.description
    assert not compiler


def test_the_limit_of_graphs_is_raised_and_never_lowered():
    for before, after in ((8, fused.MOST_GRAPHS), (1000, 1000)):
        with torch._dynamo.config.patch(recompile_limit=before):
            compiled_once.cache_clear()
            compiled_once(fused._active)
            assert torch._dynamo.config.recompile_limit == after


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_inductor(monkeypatch):
    """The compiler that runs on CUDA, here for a CPU."""
    monkeypatch.setattr(torch, "compile", REAL)
    with cuda_on_cpu(strict=False):
        one, other = (gradients(policy)[0] for policy in policies("qwen3", Precision(torch.float32, torch.float32)))
    assert float((one - other).norm() / other.norm()) < 1e-5
