"""The whole pipeline by enumeration: prompts, completions, rewards, advantages, forward and backward passes, parameter
gradients. Every group that a small transformer can draw goes through the real update, weighted with its probability;
the sum is the exact gradient of the expected reward in the model's parameters, by autograd over all completions."""

import itertools

import pytest
import torch

from cohort.objective import PRESETS
from cohort.policy import Policy, Precision
from cohort.rewards.runner import Scores
from cohort.train import assign_advantages, lay_out, packs, update
from cohort.types import Completion, FinishReason, Group, Prompt
from tests.conftest import tiny_llama
from tests.train.updates import CPU, all_sequences, context_for

from .tabular import Tree, assert_apart

DOUBLE = Precision(torch.float64, torch.float64)
TREE = Tree(3, 2)  # END, 1 or 2; at most two tokens: 7 completions
PROMPTS = ((2, 1, 1), (1,))
REWARDS = torch.tensor([[0.5, -1.0, 0.0, 2.0, 1.0, 0.0, -0.5], [1.0, 0.0, 0.0, -2.0, 0.5, 1.5, 0.0]]).double()
UNBIASED = {
    "rloo": PRESETS["rloo"].replace(beta=0.0),
    "reinforce": PRESETS["grpo"].replace(beta=0.0, baseline=0.3, scale=None, aggregation="seq_sum", truncated="keep"),
}


def policy(**changes):
    small = {"vocab_size": 3, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    model = tiny_llama(**small | changes, num_attention_heads=2, num_key_value_heads=1, pad_token_id=None)
    return Policy(model.double(), DOUBLE)


def probabilities(own, prompt):
    """Of every completion, by one plain forward pass each; differentiable."""
    found = []
    for completion in TREE.sequences:
        with own.compute():
            logits = own.model(torch.tensor([[*prompt, *completion]])).logits[0]
        log_probs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        found.append(log_probs[range(len(completion)), list(completion)].sum().exp())
    return torch.stack(found)


def rollout(p, members):
    """A group of the given completions of one prompt."""
    completions = []
    for number in members:
        ids = TREE.sequences[number]
        reason = FinishReason.EOS if ids[-1] == 0 else FinishReason.LENGTH
        completions.append(Completion.of_tokens(ids, (-1.0,) * len(ids), reason))
    rewards = REWARDS[p, list(members)]
    return [Group(Prompt(p, p, PROMPTS[p], "", "", {}), tuple(completions))], Scores(rewards, rewards[:, None], ("r",))


def update_gradient(own, objective, p, members, token_budget):
    """Of the loss, as the real update leaves it."""
    groups, scores = rollout(p, members)
    batch = assign_advantages(lay_out(groups, CPU), scores, objective, max_completion_length=2)
    update(context_for(own, objective, token_budget), batch, all_sequences(batch))
    zeros = [torch.zeros_like(each) if each.grad is None else each.grad for each in own.model.parameters()]
    return torch.cat([gradient.flatten() for gradient in zeros])


def expected_gradient(own, objective, p, token_budget):
    """Over all groups of two that can be drawn; two different completions come in two orders."""
    with torch.no_grad():
        chance = probabilities(own, PROMPTS[p])
    groups = itertools.combinations_with_replacement(range(len(TREE.sequences)), 2)
    return sum(
        (1 + (i != j)) * chance[i] * chance[j] * update_gradient(own, objective, p, (i, j), token_budget)
        for i, j in groups
    )


def exact_gradient(own, p):
    """Of minus the expected reward."""
    value = -(probabilities(own, PROMPTS[p]) * REWARDS[p]).sum()
    parts = torch.autograd.grad(value, list(own.model.parameters()), materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize(("name", "p", "token_budget"), [("rloo", 1, 1), ("reinforce", 0, 1000)])
def test_the_expected_update_is_the_exact_gradient_of_the_expected_reward(name, p, token_budget):
    own = policy()
    exact = exact_gradient(own, p)
    assert exact.norm() > 0.05
    found = expected_gradient(own, UNBIASED[name], p, token_budget)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)  # sums of a hundred float64 terms of size 1


def test_the_mean_over_a_completions_tokens_is_another_gradient():
    """So that the test above could fail: GRPO's division by length is biased."""
    own = policy()
    objective = UNBIASED["reinforce"].replace(aggregation="seq_mean_token_mean")
    assert_apart(expected_gradient(own, objective, 1, 1000), exact_gradient(own, 1))


def test_a_budget_of_one_token_cuts_everything():
    groups, _ = rollout(0, (1, 2))
    batch = lay_out(groups, CPU)
    assert [len(pack.microbatches) for pack in packs(batch, all_sequences(batch), 1)] == [2]
