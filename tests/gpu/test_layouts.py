"""The layout "full" on one GPU: FSDP2's streams and hooks, under NCCL."""

import pytest
import torch

from cohort.config import OptimConfig
from cohort.parallel import Full, World
from cohort.policy import Policy, Precision
from cohort.runs.models import whole
from cohort.train import Optimizer
from tests.conftest import tiny_llama

pytestmark = pytest.mark.gpu
PROMPTS, COMPLETIONS = [(3, 4, 5, 6), (7,), (3, 4, 5, 6)], [(7, 8, 9), (2, 3), (5,)]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(("compute", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_log_probs_gradients_and_a_step_are_those_of_the_whole_model(compute, tolerance, offload):
    """Relative to the gradient's norm; the kernels of matrix products may differ with the memory's alignment."""
    policy = Policy(tiny_llama(hidden_size=64, num_hidden_layers=3).cuda(), Precision(torch.float32, compute))
    _ = policy.passes

    def computed():
        with policy.compute(), policy.gradients_in_place():
            logps_N = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N
            logps_N.sum().backward()
        grads = [whole(p.grad).cpu().flatten() for p in policy.model.parameters()]
        return logps_N.detach(), torch.cat(grads)

    logps_N, gradient = computed()
    policy.model.zero_grad()
    layout = Full(World(), offload=offload)
    try:
        layout.shard(policy.model, compute)
        optimizer = Optimizer(policy.model, OptimConfig(max_grad_norm=0.5), 1, layout)
        again_N, sharded = computed()
        layout.sum_gradients(optimizer.parameters)
        norm = optimizer.step(layout.clip_gradients)
        layout.stepped()
        optimizer.check_weights()
        with layout.whole(policy.model):
            assert not hasattr(next(policy.model.parameters()), "device_mesh")
    finally:
        torch.distributed.destroy_process_group()
    assert norm == pytest.approx(float(gradient.norm()), rel=tolerance)
    torch.testing.assert_close(again_N, logps_N, rtol=tolerance, atol=tolerance)
    assert (sharded - gradient).norm() <= tolerance * gradient.norm()
