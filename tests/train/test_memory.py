"""The token budget: what is counted, what is chosen, and what happens when memory runs out."""

import gc
import importlib

import pytest
import torch

from cohort.errors import ModelError
from cohort.policy import Policy, Precision, enable_checkpointing
from cohort.train import TokenBudget, find_budget, policy_logps
from cohort.train.memory import LiveBytes, out_of_memory, peak_bytes
from tests.conftest import tiny_llama
from tests.invariance.test_update import PAPER, batch_for, gradient

memory = importlib.import_module("cohort.train.memory")
SINGLE = Precision(torch.float32, torch.float32)


def wide_llama():
    """Activations that outweigh the gradients."""
    return tiny_llama(hidden_size=64, intermediate_size=256, num_hidden_layers=3, max_position_embeddings=4096)


def test_bytes_alive_at_once_by_hand():
    with LiveBytes() as live:
        first = torch.zeros(1000)  # 4,000
        second = first + 1  # 8,000
        view = second.view(10, 100)  # none
        view.add_(1)
        del first  # 4,000
        third = torch.cat([second, second])  # 12,000
        del second, view, third
        torch.zeros(100)
    assert live.peak == 12_000
    assert live.now == 0


def test_what_was_there_before_is_not_counted():
    weight = torch.randn(500, 10, requires_grad=True)
    with LiveBytes() as live:
        product = weight.t() @ torch.ones(500, 1)
        del product
    assert live.peak == 4 * (500 + 10)


def test_the_prediction_is_what_a_pass_takes(float32_policy):
    """Of as many tokens as the budget allows, counted in a pass of that size."""
    policy = Policy(wide_llama(), SINGLE)
    budget = find_budget(policy, 1024, 16, 16)
    measured = peak_bytes(policy, 1024, 1024)
    # The prediction is a straight line through two small passes; the head's chunk makes a step in it.
    assert measured == pytest.approx(budget.predicted_bytes, rel=0.25)


def test_the_longest_completion_is_tried():
    policy = Policy(wide_llama(), SINGLE)
    assert find_budget(policy, 64, 1000, 700).predicted_bytes > 4 * find_budget(policy, 64, 16, 16).predicted_bytes


def test_checkpointing_takes_less():
    policy = Policy(wide_llama(), SINGLE)
    before = peak_bytes(policy, 512, 512)
    enable_checkpointing(policy.model)
    assert peak_bytes(policy, 512, 512) < 0.7 * before


def test_trying_changes_nothing():
    policy = Policy(tiny_llama(), SINGLE)
    state = torch.get_rng_state()
    weights = [p.clone() for p in policy.model.parameters()]
    find_budget(policy, None, 20, 20)
    assert torch.equal(torch.get_rng_state(), state)
    for before, parameter in zip(weights, policy.model.parameters(), strict=True):
        assert torch.equal(before, parameter)
        assert parameter.grad is None
    assert not policy.model.training


def test_the_budget_follows_the_free_memory(monkeypatch):
    policy = Policy(wide_llama(), SINGLE)
    chosen = {}
    for free in (2**50, 40 * 2**20, 1):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        chosen[free] = find_budget(policy, None, 16, 16)
    assert chosen[2**50].tokens == 1024
    assert 256 < chosen[40 * 2**20].tokens < 1024
    assert peak_bytes(policy, *2 * (chosen[40 * 2**20].tokens,)) < 0.6 * 40 * 2**20
    assert chosen[1].tokens == 256
    assert "likely too little" in chosen[1].describe()
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    assert find_budget(policy, None, 16, 16).tokens == 1024
    assert find_budget(policy, 77, 16, 16).tokens == 77


def failing(budgets, limit):
    def call(token_budget):
        budgets.append(token_budget)
        if token_budget > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return token_budget

    return call


def test_out_of_memory_halves_the_budget_until_it_fits():
    budget, tried = TokenBudget(100), []
    with pytest.warns(UserWarning, match="the step is repeated with"):
        assert budget.run(failing(tried, 20)) == 12
    assert tried == [100, 50, 25, 12]
    assert budget.run(failing(tried, 20)) == 12  # and stays there


def test_out_of_memory_with_one_completion():
    with (
        pytest.warns(UserWarning, match="out of memory"),
        pytest.raises(ModelError, match=r"model\.gradient_checkpointing"),
    ):
        TokenBudget(3).run(failing([], 0))


def test_other_errors_are_not_taken_for_it():
    with pytest.raises(RuntimeError, match="shapes"):
        TokenBudget(8).run(lambda token_budget: (_ for _ in ()).throw(RuntimeError("shapes do not match")))
    assert out_of_memory(MemoryError())
    assert out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))


def test_the_update_that_ran_out_of_memory_is_the_update(float64_policy, monkeypatch):
    """Memory runs out in the second microbatch's backward pass: the repeated update has the same gradient."""
    batch = batch_for(float64_policy, PAPER)
    expected, _ = gradient(float64_policy, batch, PAPER, 10_000)
    real, calls = torch.Tensor.backward, []

    def backward(self, *arguments, **named):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *arguments, **named)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    budget, found = TokenBudget(20), []
    with pytest.warns(UserWarning, match="repeated with 10"):
        budget.run(lambda token_budget: found.append(gradient(float64_policy, batch, PAPER, token_budget)[0]))
    assert len(calls) > 3
    for one, other in zip(expected, found[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_nothing_of_the_failed_pass_is_kept(float32_policy):
    """While the smaller pass runs, the larger one's tensors are gone."""
    alive = []

    def call(token_budget):
        held = torch.zeros(1000)
        alive.append(held.untyped_storage()._weak_ref())
        if token_budget > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        gc.collect()
        return torch.UntypedStorage._expired(alive[0])

    with pytest.warns(UserWarning, match="out of memory"):
        assert TokenBudget(8).run(call)


def test_passes_take_the_budget(float64_policy):
    batch = batch_for(float64_policy, PAPER)
    budget = TokenBudget(13)
    seen = budget.run(lambda token_budget: policy_logps(float64_policy, batch, 1.0, token_budget))
    torch.testing.assert_close(seen, policy_logps(float64_policy, batch, 1.0, 10_000), rtol=0, atol=1e-12)
