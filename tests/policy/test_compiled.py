"""Norms, rotations and gates that torch compiles on CUDA, by a compiler of a CPU: ``aot_eager`` makes the same graphs."""

import functools
import threading

import pytest
import torch

from cohort.objective import PRESETS
from cohort.policy import Policy, Precision, fused
from cohort.policy.compute import enable_checkpointing
from cohort.policy.fused import Fused, compiled_once
from cohort.train.metrics import term_norms
from tests.cuda_on_cpu import cuda_on_cpu
from tests.families.configs import small_model
from tests.policy.plain import COMPLETIONS, MIXED, PROMPTS, SINGLE
from tests.policy.test_pieces import rows_of, trained
from tests.train.updates import all_sequences, batch_for, context_for

REAL = torch.compile
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo itself reads


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """A quick compiler for this test, and how often it has been asked."""
    asked = []

    @functools.wraps(REAL)
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


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_rows_in_pieces(checkpointing, compiler):
    """Graphs of the backward pass alone, which runs in threads of its own on CUDA."""
    found = []
    with cuda_on_cpu(strict=False):
        for policy in policies("qwen3", SINGLE):
            if checkpointing:
                enable_checkpointing(policy.model)
            assert policy.passes.shared
            found.append(in_a_thread(lambda policy=policy: trained(policy, rows_of(), 64)))
    assert set(compiler) == {"_normed", "_add_normed", "_turned", "_active"}
    (logps_N, grads), (expected_N, expected) = found
    # The same formulas in the same order, in float32.
    torch.testing.assert_close(logps_N, expected_N, rtol=0, atol=1e-5)
    for name, grad in grads.items():
        assert float((grad - expected[name]).norm()) <= 1e-5 * float(expected[name].norm()), name


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_norms_of_terms_take_several_backward_passes_of_a_graph(compiler):
    found, objective = [], PRESETS["grpo"].replace(beta=0.3)
    with cuda_on_cpu(strict=False):
        for policy in policies("qwen3", SINGLE):
            batch = batch_for(policy, objective)
            assert policy.passes.shared
            found.append(term_norms(context_for(policy, objective, 40), batch, all_sequences(batch), 0.05))
    assert compiler
    assert found[0] == pytest.approx(found[1], rel=1e-4)  # the same operations, beside old log-probs of compiled ones
    assert found[0]["gradient/kl_norm"] > 0


def test_one_graph_serves_every_number_of_tokens(compiler):
    """The width is a constant of it, as kernels of known sizes index with less work."""
    norm = Fused(False, torch.float32, torch.bfloat16, compiled=True)
    for width in (8, 12):
        torch._dynamo.utils.counters.clear()
        for tokens in (5, 9, 64, 12, 8, 3):
            norm.norm(torch.randn(tokens, width), torch.ones(width), 1e-6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_more_graphs_than_torch_makes_by_default_in_any_thread(compiler):
    """CUDA's backward passes run in their own threads, where settings of dynamo are the defaults."""
    norm, widths = Fused(False, torch.float32, torch.bfloat16, compiled=True), range(2, 14)
    norm.norm(torch.randn(3, 1), torch.ones(1), 1e-6)
    torch._dynamo.utils.counters.clear()
    for width in widths:
        in_a_thread(lambda width=width: norm.norm(torch.randn(3, width), torch.ones(width), 1e-6))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(widths)


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


def test_an_older_torch_has_one_limit_of_graphs_which_is_never_lowered(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
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
