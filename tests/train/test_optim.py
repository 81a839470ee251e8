"""The optimizer: its schedule by hand, its groups, its clipping, and AdamW itself as the judge."""

import pytest
import torch
from torch import nn

from cohort.config import OptimConfig
from cohort.errors import ModelError
from cohort.train import Optimizer


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))


def one_step(module, optimizer, scale=1.0):
    optimizer.zero_grad()
    (scale * module(torch.ones(1, 3))[0, 0]).backward()
    return optimizer.step()


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant_with_warmup", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_rates_by_hand(schedule, rates):
    module = model()
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, warmup_steps=4, lr_scheduler_type=schedule), 8)
    seen = []
    for _ in rates:
        seen.append(optimizer.learning_rate)
        assert optimizer.adamw.param_groups[0]["lr"] == optimizer.learning_rate
        one_step(module, optimizer)
    assert seen == pytest.approx([0.1 * rate for rate in rates], rel=1e-5)


def test_steps_are_torchs_adamw():
    mine, theirs = model(), model()
    optimizer = Optimizer(mine, OptimConfig(learning_rate=0.1, max_grad_norm=1e9), 10)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(3):
        one_step(mine, optimizer)
        plain.zero_grad()
        theirs(torch.ones(1, 3))[0, 0].backward()
        plain.step()
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)  # other kernels; a step is 0.1 whatever the gradient


def test_weight_decay_is_for_matrices():
    module = model()
    before = [p.clone() for p in module.parameters()]
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, weight_decay=0.5), 1)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-30)  # not 0, and moves nothing by itself
    optimizer.adamw.step()
    for old, new in zip(before, module.parameters(), strict=True):
        expected = old * (1 - 0.1 * 0.5) if old.ndim == 2 else old
        torch.testing.assert_close(new, expected)


def test_the_norm_is_returned_uncut_and_the_step_is_cut():
    module = model()
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, max_grad_norm=0.5), 1)
    norm = one_step(module, optimizer, scale=100.0)
    cut = torch.sqrt(sum((p.grad**2).sum() for p in module.parameters()))
    assert norm > 10
    assert cut.item() == pytest.approx(0.5, rel=1e-4)


def test_nothing_to_train():
    module = model().requires_grad_(False)
    with pytest.raises(ModelError, match="nothing to train"):
        Optimizer(module, OptimConfig(), 1)
