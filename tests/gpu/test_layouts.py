"""The layout "full" on one GPU: FSDP2's streams and hooks, under NCCL."""

import pytest
import torch

from cohort.parallel import Full, World
from cohort.policy import Policy, Precision
from tests.conftest import tiny_llama

pytestmark = pytest.mark.gpu
PROMPTS, COMPLETIONS = [(3, 4, 5, 6), (7,), (3, 4, 5, 6)], [(7, 8, 9), (2, 3), (5,)]


@pytest.mark.parametrize(("compute", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_log_probs_and_gradients_are_those_of_the_whole_model(compute, tolerance):
    """Relative to the gradient's norm; the kernels of matrix products may differ with the memory's alignment."""
    policy = Policy(tiny_llama(hidden_size=64, num_hidden_layers=3).cuda(), Precision(torch.float32, compute))
    _ = policy.passes

    def computed():
        with policy.compute(), policy.gradients_in_place():
            logps_N = policy.logps(PROMPTS, COMPLETIONS, 1.0).logps_N
            logps_N.sum().backward()
        grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in policy.model.parameters()]
        policy.model.zero_grad()
        return logps_N.detach(), torch.cat([grad.flatten() for grad in grads])

    logps_N, gradient = computed()
    layout = Full(World())
    try:
        layout.shard(policy.model, compute)
        again_N, sharded = computed()
        with layout.whole(policy.model):
            assert not hasattr(next(policy.model.parameters()), "device_mesh")
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close(again_N, logps_N, rtol=tolerance, atol=tolerance)
    assert (sharded - gradient).norm() <= tolerance * gradient.norm()
