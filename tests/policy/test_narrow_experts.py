"""Mixtures on CUDA: grouped products get bfloat16, in updates and in sampling."""

import pytest
import torch

from cohort.policy import Policy
from cohort.policy.experts import NARROW, NarrowExperts
from cohort.rollout import LocalEngine, RNGKey, Sampling
from cohort.types import Prompt
from tests.cuda_on_cpu import cuda_on_cpu
from tests.families.configs import small_model
from tests.policy.plain import COMPLETIONS, MIXED, PROMPTS, SINGLE
from tests.rollout.test_local_engine import LetterTokenizer


def module_of(model):
    return next(module for module in model.modules() if hasattr(module, "is_transposed"))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_outputs_and_gradients(family):
    """Against the module in float32: bfloat16 has 8 bits, and a number passes two products and a gate."""
    module = module_of(small_model(family))
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[n % 4, (n + 1) % 4] for n in range(9)])
    weights, found = torch.full((9, 2), 0.5), []
    for dtype in (torch.bfloat16, torch.float32):
        narrow = NarrowExperts(module, dtype)
        narrow.refresh()
        x.requires_grad_()
        out = narrow(x, index, weights)
        parts = torch.autograd.grad(out.square().sum(), [x, module.gate_up_proj, module.down_proj])
        assert {part.dtype for part in (out, *parts)} == {torch.float32}
        found.append([out.detach(), *parts])
    for one, other in zip(*found, strict=True):
        assert 0 < float((one - other).norm() / other.norm()) < 0.03


def test_rows_that_the_kernel_does_not_take_stay_in_float32():
    module = module_of(small_model("mixtral"))
    module.down_proj = torch.nn.Parameter(module.down_proj[:, :, :12].clone())  # 24 bytes
    narrow = NarrowExperts(module, torch.bfloat16)
    narrow.refresh()
    assert narrow.down_proj is module.down_proj


def test_updates_and_sampling(monkeypatch):
    """Weights are read once per update in sampling, and not in each step. The rules refuse products in float32."""
    read = []
    refresh = NarrowExperts.refresh
    monkeypatch.setattr(NarrowExperts, "refresh", lambda self: read.append(self.module) or refresh(self))
    with cuda_on_cpu():
        policy = Policy(small_model("qwen3_moe"), MIXED)
        assert policy.model.config._experts_implementation == NARROW
        with policy.training(), policy.compute(), policy.gradients_in_place():
            policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N.sum().backward()
        module = module_of(policy.model)
        assert module.gate_up_proj.grad.dtype == torch.float32
        assert module.gate_up_proj.grad.any()
        engine = LocalEngine(policy, LetterTokenizer(), (1,))
        layers = policy.model.config.num_hidden_layers
        assert all(
            isinstance(layer.mlp.prepared, NarrowExperts) for layer in engine.backend.body.weights.anatomy.layers
        )
        read.clear()
        engine.generate([Prompt(0, 0, (5, 9, 20), "", "", {})], 3, Sampling(12), RNGKey(0, 0))
        assert len(read) <= layers
        exact = Policy(policy.model.requires_grad_(False), SINGLE)
        gaps = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N - exact.logps(PROMPTS, COMPLETIONS, 1.0).logps_N
    assert 0 < float(gaps.abs().median()) < 0.1  # rounding; a token may take another expert
