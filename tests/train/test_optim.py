"""The optimizers: learning rates, clipping, weight decay and states, against values by hand and torch's AdamW."""

import copy
import inspect
import json
import sys
from typing import get_args
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import SchedulerType
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from cohort.config import OptimConfig
from cohort.config.schema import ARGUMENTS, LRSchedule
from cohort.errors import ConfigError, ModelError, NonFiniteError, RunFolderError
from cohort.runs.models import Stream, read_tensors, write_tensors
from cohort.train import Optimizer
from tests.conftest import tiny_llama


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
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
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
        assert optimizer.rules[0].param_groups[0]["lr"] == optimizer.learning_rate
        one_step(module, optimizer)
    assert seen == pytest.approx([0.1 * rate for rate in rates], rel=1e-5)


def rates_of(updates, **settings):
    """The learning rate of each update, as a share of the peak."""
    module = model()
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, **settings), updates)
    found = []
    for _ in range(updates):
        found.append(optimizer.learning_rate / 0.1)
        one_step(module, optimizer)
    return pytest.approx(found, abs=1e-6)


def test_a_share_of_warm_up_is_rounded_up():
    whole = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.3}
    assert rates_of(8, **whole) == [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]
    assert OptimConfig(**whole).warmup_of(10) == 3


@pytest.mark.parametrize(
    ("schedule", "arguments", "rates"),
    [
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}, [1, 0.882843, 0.6, 0.317157]),
        ("polynomial", {"lr_end": 0.05, "power": 1.0}, [1, 0.875, 0.75, 0.625]),
        ("cosine_with_restarts", {"num_cycles": 2}, [1, 0.5, 1, 0.5]),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "linear"}, [1, 1, 1, 0.5]),
    ],
)
def test_schedules_with_arguments(schedule, arguments, rates):
    assert rates_of(4, lr_scheduler_type=schedule, lr_scheduler_kwargs=arguments) == rates


def test_the_arguments_of_each_schedule_are_transformers_own():
    for name in get_args(LRSchedule):
        parameters = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters
        others = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
        assert set(ARGUMENTS.get(name, ())) == parameters.keys() - others, name


def test_arguments_that_the_schedule_refuses_are_an_error():
    config = OptimConfig(lr_scheduler_type="polynomial", lr_scheduler_kwargs={"lr_end": 1.0})
    with pytest.raises(ConfigError, match=r"optim.lr_scheduler_kwargs: .*lr_end"):
        Optimizer(model(), config, 4)


def test_without_a_maximum_no_gradient_is_scaled():
    module = model()
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, max_grad_norm=0), 1)
    norm = one_step(module, optimizer, scale=100.0)
    assert norm == pytest.approx(torch.sqrt(sum((p.grad**2).sum() for p in module.parameters())).item(), rel=1e-6)
    assert norm > 10


def test_steps_equal_those_of_torch():
    ours, theirs = model(), model()
    optimizer = Optimizer(ours, OptimConfig(learning_rate=0.1, max_grad_norm=1e9), 10)
    plain = torch.optim.AdamW(theirs.parameters(), lr=0.1, weight_decay=0.0)
    for _ in range(3):
        one_step(ours, optimizer)
        plain.zero_grad()
        theirs(torch.ones(1, 3))[0, 0].backward()
        plain.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=1e-5
        )  # the fused kernel rounds differently; a step is about 0.1


def test_a_gradient_of_zero_makes_no_step():
    module = model()
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, weight_decay=0.5, lr_scheduler_type="linear"), 4)
    one_step(module, optimizer)  # now there is momentum
    before, rate = copy.deepcopy(module.state_dict()), optimizer.learning_rate
    assert one_step(module, optimizer, scale=0.0) == 0.0
    assert optimizer.learning_rate == rate
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_weight_decay_is_for_matrices():
    module = model()
    before = [p.clone() for p in module.parameters()]
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, weight_decay=0.5), 1)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-30)  # not 0, but too small to change a weight
    optimizer.rules[0].step()
    for old, new in zip(before, module.parameters(), strict=True):
        expected = old * (1 - 0.1 * 0.5) if old.ndim == 2 else old
        torch.testing.assert_close(new, expected)


def test_the_returned_norm_is_that_before_clipping():
    module = model()
    optimizer = Optimizer(module, OptimConfig(learning_rate=0.1, max_grad_norm=0.5), 1)
    norm = one_step(module, optimizer, scale=100.0)
    clipped = torch.sqrt(sum((p.grad**2).sum() for p in module.parameters()))
    assert norm > 10
    assert clipped.item() == pytest.approx(0.5, rel=1e-4)


def test_a_model_without_trainable_parameters_is_an_error():
    module = model().requires_grad_(False)
    with pytest.raises(ModelError, match="nothing to train"):
        Optimizer(module, OptimConfig(), 1)


def tiny_trained(name, updates=3, learning_rate=0.05):
    """A small model after some updates that raise the probability of one token."""
    module = tiny_llama(vocab_size=200)  # tables of more than 4,096 numbers, for which 8-bit states have 8 bits
    optimizer = Optimizer(module, OptimConfig(optimizer=name, learning_rate=learning_rate), updates)
    ids, losses = torch.tensor([[3, 4, 5, 6]]), []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = -module(ids).logits[0, -1].log_softmax(-1)[7]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return module, optimizer, losses


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "muon"])
def test_every_optimizer_learns_and_goes_on_from_its_state(name, tmp_path):
    module, optimizer, losses = tiny_trained(name)
    assert losses[-1] < losses[0] - 0.5
    other = tiny_llama(vocab_size=200)
    other.load_state_dict(module.state_dict())
    resumed = Optimizer(other, OptimConfig(optimizer=name, learning_rate=0.05), 3)
    state = optimizer.state_dict()
    assert (torch.uint8 in {tensor.dtype for tensor in state["tensors"].values()}) == (name == "adamw_8bit")
    write_tensors(tmp_path / "tensors", Stream(state["tensors"]))
    numbers = json.loads(json.dumps(state["numbers"]))
    resumed.load_state_dict({"tensors": read_tensors(tmp_path / "tensors"), "numbers": numbers})
    (tmp_path / "tensors").write_bytes(b"")  # nothing of the state is in the file any more
    for each, its in ((module, optimizer), (other, resumed)):
        its.zero_grad()
        each(torch.tensor([[3, 4]])).logits.square().mean().backward()
        its.step()
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "adafactor", "muon"])
@pytest.mark.parametrize("resumed", [False, True])
def test_a_state_allocated_ahead_is_that_of_the_first_step(name, resumed, monkeypatch):
    """Bit for bit; also if a checkpoint is loaded over it from before that step, which does not hold it."""
    expected, lazy, _ = tiny_trained(name)
    init, saved = Optimizer.__init__, []

    def allocated(self, *arguments, **settings):
        init(self, *arguments, **settings)
        self.allocate_state()
        for _ in range(resumed):
            saved.append(self.state_dict())
            for state in self.rules[0].state.values():  # nothing of the state before is left
                state.update({key: value + 1 for key, value in state.items() if isinstance(value, torch.Tensor)})
            self.load_state_dict(saved[-1])
        held = sum(len(rule.state) for rule in self.rules)
        assert held == len(self.parameters)
        saved.append(self.state_dict())

    monkeypatch.setattr(Optimizer, "__init__", allocated)
    module, optimizer, _ = tiny_trained(name)
    assert all(one["tensors"] == one["numbers"]["states"] == {} for one in saved)
    for one, other in zip(expected.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, other)
    states, others = optimizer.state_dict(), lazy.state_dict()
    assert states["numbers"] == others["numbers"]
    assert all(torch.equal(value, others["tensors"][key]) for key, value in states["tensors"].items())


@pytest.mark.parametrize("free", [1, None])
def test_no_memory_for_the_state(free, monkeypatch):
    """Known before it is allocated, or noticed then."""
    monkeypatch.setattr("cohort.train.optim.free_bytes", lambda device: free)
    optimizer = Optimizer(tiny_llama(), OptimConfig(), 1)
    step = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(optimizer.rules[0], "step", step)
    with pytest.raises(ModelError, match=r"for the state of AdamW: set optim\.optimizer to 'adamw_8bit'"):
        optimizer.allocate_state()
    assert step.called == (free is None)
    assert all(parameter.grad is None for parameter in optimizer.parameters)


def test_weights_that_are_not_finite_are_named():
    module = model()
    optimizer = Optimizer(module, OptimConfig(), 1)
    module[0].weight.data[0] = 3e38  # finite, though their sum is not
    optimizer.check_weights()
    module[0].weight.data[1, 1:] = torch.tensor([float("nan"), float("-inf")])
    with pytest.raises(
        NonFiniteError, match=r"^0\.weight of the updated model has 2 NaN or infinite values of 6\. To go on"
    ):
        optimizer.check_weights()


@pytest.mark.parametrize(("scheduled", "rate"), [(False, 0.375), (True, 0.25)])
def test_a_ready_optimizer_goes_on_from_its_state(scheduled, rate, tmp_path):
    """With the settings' linear schedule over 4 updates, or with one that halves the rate at each."""

    def made():
        module = model()
        optimizer = Optimizer(module, OptimConfig(lr_scheduler_type="linear", max_grad_norm=0), num_updates=4)
        rule = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        halving = torch.optim.lr_scheduler.LambdaLR(rule, lambda update: 0.5**update)
        optimizer.use(rule, halving if scheduled else None)
        return module, optimizer

    module, optimizer = made()
    optimizer.allocate_state()
    before = module[0].weight.detach().clone()
    one_step(module, optimizer)
    assert torch.equal(before - module[0].weight, 0.5 * module[0].weight.grad)  # momentum has no past yet
    assert optimizer.learning_rate == rate
    other, resumed = made()
    other.load_state_dict(module.state_dict())
    state = optimizer.state_dict()
    write_tensors(tmp_path / "tensors", Stream(state["tensors"]))
    numbers = json.loads(json.dumps(state["numbers"]))
    resumed.load_state_dict({"tensors": read_tensors(tmp_path / "tensors"), "numbers": numbers})
    one_step(module, optimizer)
    one_step(other, resumed)
    assert optimizer.learning_rate == resumed.learning_rate
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_state_of_a_stranger_is_refused():
    _, optimizer, _ = tiny_trained("adamw", updates=1)
    with pytest.raises(
        RunFolderError, match=r"the saved optimizer state is of model\.embed_tokens\.weight, which is not"
    ):
        Optimizer(model(), OptimConfig(), 1).load_state_dict(optimizer.state_dict())


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest():
    module, optimizer, _ = tiny_trained("muon", updates=1)
    muon, adamw = optimizer.rules
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    inner = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert inner == {name for name in names.values() if "_proj" in name}
    both = inner | {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert both == set(names.values())


def test_one_muon_step_is_the_orthogonalised_momentum():
    """The step is nearly orthogonal. Its root mean square is 0.2 (the size of AdamW's) times the learning rate."""
    module = nn.Linear(32, 32, bias=False)
    before = module.weight.detach().clone()
    optimizer = Optimizer(module, OptimConfig(optimizer="muon", learning_rate=0.1), 1)
    inputs = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    (module(inputs) * torch.eye(32)[:5]).sum().backward()
    optimizer.step()
    step = (before - module.weight.detach()) / 0.1
    singular = torch.linalg.svdvals(step)[:5]  # the gradient has rank 5
    # Newton-Schulz stops with singular values between about 0.7 and 1.2; scaled by 0.2 sqrt(32).
    assert 0.6 < (singular.min() / (0.2 * 32**0.5)).item() < (singular.max() / (0.2 * 32**0.5)).item() < 1.3


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ModelError, match=r"cohort-rl\[quantized\]"):
        Optimizer(model(), OptimConfig(optimizer="adamw_8bit"), 1)
