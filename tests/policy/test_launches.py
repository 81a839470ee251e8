"""Kernels that a GPU is asked for, counted by dispatch: budgets per layer of an update and per decoded token."""

import contextlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cohort.policy import Policy, fused
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.rollout.local.cached import CachedBackend
from cohort.rollout.local.runner import BackendRunner
from cohort.types import Prompt
from tests.cuda_on_cpu import cuda_on_cpu
from tests.families.configs import small_model
from tests.policy.plain import COMPLETIONS, MIXED, PROMPTS
from tests.rollout.test_local_engine import LetterTokenizer

VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "slice", "select", "split", "split_with_sizes", "unsqueeze",
    "squeeze", "expand", "alias", "detach", "as_strided", "unflatten", "unbind", "reshape", "_reshape_alias", "mT",
    "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "chunk", "flatten", "view_as", "pad",
}  # fmt: skip
"""Operations that launch nothing."""
READS = {"_local_scalar_dense", "nonzero", "equal"}
"""Operations that wait for the GPU."""


MODES = []


class Launches(TorchDispatchMode):
    """Counts operations that launch a kernel, and those that wait for one."""

    def __init__(self):
        super().__init__()
        self.kernels, self.reads, self.muted = Counter(), Counter(), False

    def __enter__(self):
        MODES.append(self)
        return super().__enter__()

    def __exit__(self, *error):
        MODES.remove(self)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        given = next((part for part in args if isinstance(part, torch.Tensor)), None)
        dtype = kwargs.get("dtype", args[1] if name == "to" and len(args) > 1 else None)
        moved = name in {"_to_copy", "to"} and given is not None and dtype in {None, given.dtype}
        if name in READS:
            self.reads[name] += 1
        elif not self.muted and name not in VIEWS and not moved:
            self.kernels[name] += 1
        return func(*args, **kwargs)


@contextlib.contextmanager
def as_one(name):
    """What runs inside counts as one kernel."""
    for mode in MODES:
        mode.kernels[name] += 1
        mode.muted = True
    yield
    for mode in MODES:
        mode.muted = False


class _Compiled(torch.autograd.Function):
    """A compiled operation: a kernel forward and one backward."""

    @staticmethod
    def forward(ctx, function, rest, *given):
        with as_one(function.__name__), torch.enable_grad():
            ctx.given = [part.detach().requires_grad_(part.is_floating_point()) for part in given]
            out = function(*ctx.given, *rest)
            ctx.outs = out if isinstance(out, tuple) else (out,)
        return tuple(part.detach() for part in ctx.outs) if isinstance(out, tuple) else out.detach()

    @staticmethod
    def backward(ctx, *grads):
        with as_one("backward"), torch.enable_grad():
            found = torch.autograd.grad(ctx.outs, ctx.given, grads, allow_unused=True)
        return None, None, *found


def compiled(function):
    def run(*arguments):
        tensors = [part for part in arguments if isinstance(part, torch.Tensor)]
        return _Compiled.apply(function, arguments[len(tensors) :], *tensors)

    return run


def policy_of(family, layers):
    policy = Policy(small_model(family, num_hidden_layers=layers), MIXED)
    policy.torch_compile = True
    return policy


def of_update(family, layers):
    """Of a pass over prompts and the rows after them, forward and backward."""
    policy = policy_of(family, layers)
    assert policy.passes.body.fused._by_torch is compiled
    with Launches() as forward, policy.training(), policy.compute(), policy.gradients_in_place():
        logps_N = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N.sum()
    with Launches() as backward, policy.gradients_in_place():
        logps_N.backward()
    return forward, backward


def of_tokens(monkeypatch, family, layers):
    """Of a decode step and of a draw."""
    engine = LocalEngine(policy_of(family, layers), LetterTokenizer(), (1,))
    found = {"step": [], "draw": []}

    def counted(name, function):
        def run(self, *given):
            with Launches() as launches:
                out = function(self, *given)
            found[name].append(launches)
            return out

        return run

    with monkeypatch.context() as patched:
        patched.setattr(CachedBackend, "step", counted("step", CachedBackend.step))
        patched.setattr(BackendRunner, "draw", counted("draw", BackendRunner.draw))
        prompts = [Prompt(0, 0, (5, 9, 20), "", "", {}), Prompt(1, 1, (5,), "", "", {})]
        engine.generate(prompts, 3, Sampling(12, min_completion_length=12), RNGKey(0, 0))
    return found["step"][5], found["draw"][5]


def per_layer(two, four):
    """Kernels of a layer, and of everything else, from models of two and of four."""
    many, few = four.kernels.total(), two.kernels.total()
    return (many - few) / 2, few - (many - few)


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    monkeypatch.setattr(fused, "compiled_once", compiled)
    monkeypatch.setattr("cohort.policy.lean.try_compiled", lambda *_: None)
    with cuda_on_cpu(strict=False):
        yield


UPDATES = {"llama": ((50, 85), (79, 5)), "qwen3": ((54, 85), (85, 3))}
"""Forward and backward: in a layer and in the rest of a microbatch, of prompts and of the rows after them. Of single
operations, a layer has 106 and 173, 138 and 239 (with norms in torch's parts, as on a CPU). The rest counts what the
last layer is spared, whose prompts have keys only, and what the host computes."""


@pytest.mark.parametrize("family", UPDATES)
def test_an_update(family):
    two, four = of_update(family, 2), of_update(family, 4)
    found = tuple(per_layer(*pair) for pair in zip(two, four, strict=True))
    for counts, most in zip(found, UPDATES[family], strict=True):
        assert all(count <= limit for count, limit in zip(counts, most, strict=True)), found
    assert two[0].reads == four[0].reads  # nothing waits in a layer
    assert not four[1].reads


TOKENS = {"llama": (39, 26, 77), "qwen3": (45, 26, 77)}
"""In a layer, in the rest of the model, and in the draw."""


@pytest.mark.parametrize("family", TOKENS)
def test_a_decoded_token(family, monkeypatch):
    (two, draw), (four, _) = (of_tokens(monkeypatch, family, layers) for layers in (2, 4))
    found = *per_layer(two, four), draw.kernels.total()
    assert all(count <= most for count, most in zip(found, TOKENS[family], strict=True))
    assert not four.reads  # the host waits in the draw alone
    assert draw.reads.total() <= 1
